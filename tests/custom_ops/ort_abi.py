"""The slots of OrtApi and the fields of OrtCustomOp that the library uses, from ONNX Runtime's own headers.

    python -m tests.custom_ops.ort_abi FOLDER...     write ort_abi.json; each folder has onnxruntime_c_api.h of a version

The headers are in ONNX Runtime's releases (include/ of the archives) and in the history of github.com/yalue/onnxruntime_go.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import records

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".json")
# The official names of what the library calls otherwise.
OFFICIAL = {
    "AttributeFloat": "KernelInfoGetAttribute_float", "AttributeInt": "KernelInfoGetAttribute_int64",
    "AttributeInts": "KernelInfoGetAttributeArray_int64", "AttributeString": "KernelInfoGetAttribute_string",
    "ContextAllocator": "KernelContext_GetAllocator", "ContextInput": "KernelContext_GetInput",
    "ContextInputCount": "KernelContext_GetInputCount", "ContextOutput": "KernelContext_GetOutput",
    "ContextOutputCount": "KernelContext_GetOutputCount", "ContextScratch": "KernelContext_GetScratchBuffer",
    "ContextStream": "KernelContext_GetGPUComputeStream", "CustomOpDomainAdd": "CustomOpDomain_Add",
    "InfoNodeName": "KernelInfo_GetNodeName", "MemoryInfoId": "MemoryInfoGetId", "ParallelFor": "KernelContext_ParallelFor",
    "ReleaseTensorInfo": "ReleaseTensorTypeAndShapeInfo", "ShapeInput": "ShapeInferContext_GetInputTypeShape",
    "ShapeSetOutput": "ShapeInferContext_SetOutputTypeShape",
}  # fmt: skip
TYPES = {"TensorInfo": "TensorTypeAndShapeInfo", "ShapeContext": "ShapeInferContext"}
SINCE = {"ContextScratch": 18}  # the others are in every version


def plain(signature: str) -> str:
    """A signature without names of parameters and attributes."""
    signature = re.sub(r"\bnoexcept\b|__attribute__\(\(\w+\)\)|\bstruct\b", "", signature).strip()
    signature = signature.replace("OrtStatusPtr", "OrtStatus*").replace("(* ", "(*")
    signature = re.sub(r"(\w[\w ]*[* ]+)\w+\[\]", r"\1*", signature)
    signature = re.sub(r"\(\*\w+\)", "(*)", signature)
    signature = re.sub(
        r"([\w*][ *]+)[a-z]\w*(?=\s*[,)])(?<!size_t)(?<!int64_t)(?<!int)(?<!float)(?<!char)", r"\1", signature
    )
    return re.sub(r"\s*([*,()])\s*", r"\1", re.sub(r"\s+", " ", signature))


def members(text: str, struct: str) -> list[tuple[str, str]]:
    """Names and types of a struct's members, in order."""
    body = re.search(rf"^struct {struct} \{{\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    assert body is not None, struct
    found = []
    for member in body[1].split(";")[:-1]:
        name = re.search(r"\(\s*\*\s*(\w+)\s*\)", member)
        if name is None:
            found.append((member.split()[-1], " ".join(member.split()[:-1])))
        else:
            found.append((name[1], plain(member.replace(name[0], "", 1))))
    return found


def ours() -> dict[str, tuple[int, str]]:
    """The library's slots by their official names: index and signature."""
    text = (ROOT / "custom_ops/abi/ort_abi.h").read_text()
    found = {}
    for name, index, signature in re.findall(r"^using (\w+) = Slot<(\d+), (.*)>;", text, re.MULTILINE):
        official = re.sub(r"\b(Status|SessionOptions|CustomOpDomain|KernelInfo|KernelContext|ShapeContext|Value|TensorInfo"
                          r"|MemoryInfo|Allocator|CustomOp|ErrorCode)\b", lambda m: "Ort" + TYPES.get(m[0], m[0]), signature)  # fmt: skip
        found[OFFICIAL.get(name, name)] = int(index), plain(official)
    return found


def read(folder: Path) -> tuple[int, dict[str, Any]]:
    """The version of a header, and what it says about the library's slots and fields."""
    header = folder / "onnxruntime_c_api.h"
    version = int(re.search(r"define ORT_API_VERSION (\d+)", header.read_text())[1])  # type: ignore[index]
    done = subprocess.run(
        ["g++", "-E", "-P", "-w", "-x", "c++", str(header)], capture_output=True, text=True, check=True
    )
    slots = {name: [index, type_] for index, (name, type_) in enumerate(members(done.stdout, "OrtApi"))}
    fields = [name for name, _ in members(done.stdout, "OrtCustomOp")]
    return version, {"slots": {name: slots[name] for name in ours() if name in slots}, "fields": fields[:22]}


def main() -> None:
    """Write what the versions have in common once, and fail where they differ."""
    versions = dict(sorted(read(Path(folder)) for folder in sys.argv[1:]))
    newest = versions[max(versions)]
    for version, found in versions.items():
        missing = {OFFICIAL[name] for name, since in SINCE.items() if version < since}
        assert found["fields"] == newest["fields"], version
        assert found["slots"] == {k: v for k, v in newest["slots"].items() if k not in missing}, version
    records.write(TABLE, {"versions": list(versions), **newest})


if __name__ == "__main__":
    main()
