"""The two slices of ONNX Runtime's ABI, the library's and the one that the C example brings along, are of one table."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Names of our own that are shorter than the official ones.
OFFICIAL = {"ReleaseTensorInfo": "ReleaseTensorTypeAndShapeInfo"}


def library_slots() -> dict[str, int]:
    text = (ROOT / "custom_ops/abi/ort_abi.h").read_text()
    found = re.findall(r"^using (\w+) = Slot<(\d+),", text, re.MULTILINE)
    return {OFFICIAL.get(name, name): int(index) for name, index in found}


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
