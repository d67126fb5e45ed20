"""The slices of ONNX Runtime's ABI, the library's and the one that the C example brings along, are those of its headers.

ort_abi.json has the slots and fields that the headers of its versions have in common; a slot once given stays, in every later one.
"""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = json.loads(Path(__file__).with_name("ort_abi.json").read_text())
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
# The library's names of the fields of OrtCustomOp that are others in snake case.
FIELDS = {
    "execution_provider": "GetExecutionProviderType", "input_count": "GetInputTypeCount", "output_count": "GetOutputTypeCount",
    "compute": "KernelCompute", "destroy": "KernelDestroy", "input_presence": "GetInputCharacteristic",
    "output_presence": "GetOutputCharacteristic", "input_memory": "GetInputMemoryType",
    "variadic_input_minimum": "GetVariadicInputMinArity", "variadic_input_homogeneous": "GetVariadicInputHomogeneity",
    "variadic_output_minimum": "GetVariadicOutputMinArity", "variadic_output_homogeneous": "GetVariadicOutputHomogeneity",
    "compute_v2": "KernelComputeV2", "infer_shapes": "InferOutputShapeFn", "version": "version",
}  # fmt: skip


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


def ours() -> dict[str, tuple[int, str]]:
    """The library's slots by their official names: index and signature."""
    text = (ROOT / "custom_ops/abi/ort_abi.h").read_text()
    found = {}
    for name, index, signature in re.findall(r"^using (\w+) = Slot<(\d+), (.*)>;", text, re.MULTILINE):
        official = re.sub(r"\b(Status|SessionOptions|CustomOpDomain|KernelInfo|KernelContext|ShapeContext|Value|TensorInfo"
                          r"|MemoryInfo|Allocator|CustomOp|ErrorCode)\b", lambda m: "Ort" + TYPES.get(m[0], m[0]), signature)  # fmt: skip
        found[OFFICIAL.get(name, name)] = int(index), plain(official)
    return found


def test_the_library_has_the_slots_of_the_headers() -> None:
    """Index and signature, in every version from 1.17 on."""
    assert {17, 18, 24, 29} <= set(TABLE["versions"])
    assert {name: list(slot) for name, slot in ours().items()} == TABLE["slots"]


def test_the_library_has_the_fields_of_the_headers() -> None:
    text = (ROOT / "custom_ops/abi/ort_abi.h").read_text().split("struct CustomOp {")[1].split("};")[0]
    names = re.findall(r"\(\*(\w+)\)\(|uint32_t (\w+);", text)
    camel = {name: "".join(part.capitalize() for part in name.split("_")) for name in map("".join, names)}
    official = [FIELDS.get(name, made if made.startswith("Create") else f"Get{made}") for name, made in camel.items()]
    assert official == TABLE["fields"]


def example_slots() -> dict[str, int]:
    text = (ROOT / "examples/ort_run/ort_slice.h").read_text()
    table = text.split("typedef struct OrtApi {")[1].split("} OrtApi;")[0]
    slots, index = {}, 0
    for gap, length, name in re.findall(r"slots_(\d+)\[(\d+)\]|\(\*(\w+)\)\(", table):
        if name:
            slots[name] = index
            index += 1
        else:
            assert int(gap) == index, f"slots_{gap} stands at {index}"
            index += int(length)
    return slots


def test_both_slices_have_the_same_slots() -> None:
    library, example = {name: index for name, (index, _) in ours().items()}, example_slots()
    shared = library.keys() & example.keys()
    assert len(shared) >= 8
    assert {name: library[name] for name in shared} == {name: example[name] for name in shared}
