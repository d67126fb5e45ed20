"""The slices of ONNX Runtime's ABI, the library's and the one that the C example brings along, are those of its headers."""

import json
import re
from pathlib import Path

from tests.custom_ops import ort_abi

ROOT = Path(__file__).parents[2]
TABLE = json.loads(ort_abi.TABLE.read_text())
# The library's names of the fields of OrtCustomOp that are others in snake case.
FIELDS = {
    "execution_provider": "GetExecutionProviderType", "input_count": "GetInputTypeCount", "output_count": "GetOutputTypeCount",
    "compute": "KernelCompute", "destroy": "KernelDestroy", "input_presence": "GetInputCharacteristic",
    "output_presence": "GetOutputCharacteristic", "input_memory": "GetInputMemoryType",
    "variadic_input_minimum": "GetVariadicInputMinArity", "variadic_input_homogeneous": "GetVariadicInputHomogeneity",
    "variadic_output_minimum": "GetVariadicOutputMinArity", "variadic_output_homogeneous": "GetVariadicOutputHomogeneity",
    "compute_v2": "KernelComputeV2", "infer_shapes": "InferOutputShapeFn", "version": "version",
}  # fmt: skip


def test_the_library_has_the_slots_of_the_headers() -> None:
    """Index and signature, in every version from 1.17 on."""
    assert {17, 18, 24, 29} <= set(TABLE["versions"])
    assert {name: list(slot) for name, slot in ort_abi.ours().items()} == TABLE["slots"]


def test_the_library_has_the_fields_of_the_headers() -> None:
    text = (ROOT / "custom_ops/abi/ort_abi.h").read_text().split("struct CustomOp {")[1].split("};")[0]
    names = re.findall(r"\(\*(\w+)\)\(|uint32_t (\w+);", text)
    camel = {name: "".join(part.capitalize() for part in name.split("_")) for name in map("".join, names)}
    official = [FIELDS.get(name, made if made.startswith("Create") else f"Get{made}") for name, made in camel.items()]
    assert official == TABLE["fields"]


def library_slots() -> dict[str, int]:
    return {name: index for name, (index, _) in ort_abi.ours().items()}


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
    library, example = library_slots(), example_slots()
    shared = library.keys() & example.keys()
    assert len(shared) >= 8
    assert {name: library[name] for name in shared} == {name: example[name] for name in shared}
