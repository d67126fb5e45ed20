"""Each network of the corpus is right at every size that its file declares, and declares what it can.

Sizes of 0 may end in an error of the engine, as some of its kernels take no empty tensor; a result is right there, too.
"""

import numpy as np
import onnxruntime
import pytest
import torch

import bnexport
from bnexport.errors import UnsupportedModelError
from tests.exporting.files import is_tracer_note
from tests.exporting.size_corpus import CASES, Net
from tests.support.checks import needs_dynamo

EXAMPLE = (4, 3, 8, 8)
BATCHES = [(n, 3, 8, 8) for n in (0, 1, 2, 3, 5, 7, 9, 11, 13, 16)]
SIZES = ((0, 8), (1, 1), (1, 8), (8, 1), (2, 3), (5, 6), (7, 7), (8, 16), (9, 13), (11, 13), (12, 8), (15, 8), (17, 31))
IMAGES = [(n, 3, *size) for n in (1, 4) for size in (*SIZES, (31, 33), (64, 48))]
IMAGES += [(1, 3, *size) for size in ((50, 90), (100, 7), (170, 4), (10, 13), (230, 6))]


def sessions(path, exporter):
    """Return a function that runs the file, and its input's declared shape."""
    if exporter == "pt2":
        program = torch.export.load(path)
        size = next(node for node in program.graph.nodes if node.name in program.graph_signature.user_inputs)
        shape = [int(n) if isinstance(n, int) else str(n) for n in size.meta["val"].shape]
        return lambda x: program.module()(x).detach().numpy(), shape
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(path, options)
    (declared,) = session.get_inputs()
    return lambda x: session.run(None, {declared.name: x.numpy()})[0], declared.shape


# The dynamo exporter takes far longer.
DYNAMO = (
    "average to a tuple",
    "past a trace",
    "int of half",
    "int, rounded twice",
    "int, rounded up",
    "window of the image",
)


@pytest.mark.parametrize(
    ("exporter", "name"),
    [
        *(("torchscript", name) for name in CASES),
        *(pytest.param("dynamo", name, marks=needs_dynamo) for name in DYNAMO),
        *(pytest.param("dynamo", name, marks=[pytest.mark.slow, needs_dynamo]) for name in CASES if name not in DYNAMO),
        *(pytest.param("pt2", name, marks=pytest.mark.slow) for name in CASES),
    ],
)
def test_every_declared_size(exporter, name, tmp_path):
    """A pt2 file says itself which sizes it takes."""
    case = CASES[name]
    torch.manual_seed(0)
    model = Net(case.function).eval()
    options = {"exporter": exporter} if exporter != "pt2" else {}
    arguments = (model, torch.randn(EXAMPLE), tmp_path / ("m.pt2" if exporter == "pt2" else "m.onnx"))
    if exporter in case.refused:
        with pytest.raises(UnsupportedModelError):
            bnexport.export(*arguments, **options)
        return
    result = bnexport.export(*arguments, **options)
    assert result.verification.passed
    assert exporter == "pt2" or result.report.after.batch_norm == 0
    run, shape = sessions(result.path, exporter)
    found = frozenset(index for index in (0, 2, 3) if isinstance(shape[index], int))
    fixed, word = (found, "(") if exporter == "pt2" else case.fixed.get(exporter, (frozenset(), ""))
    assert found == fixed, result.notes
    notes = [note for note in result.notes if not is_tracer_note(note) and "has to be" not in note]
    assert len(notes) == len(fixed)
    assert all(word and word in note for note in notes)
    compared = 0
    for size in [EXAMPLE, *BATCHES, *IMAGES]:
        if any(isinstance(shape[index], int) and size[index] != shape[index] for index in range(4)):
            continue
        x = torch.randn(size)
        try:
            expected = model(x).detach()
        except (RuntimeError, ValueError, ZeroDivisionError):
            continue  # a size that the model itself does not take
        try:
            got = run(x)
        except Exception:
            if 0 in size or exporter == "pt2":
                continue
            raise
        if case.empty and exporter == "dynamo" and size[0] == 0:
            assert got.shape == case.empty[0] != tuple(expected.shape)
            continue
        np.testing.assert_allclose(got, expected, rtol=1e-3, atol=1e-4, err_msg=str(size))
        compared += 1
    assert compared > len(BATCHES) // 3 or len(fixed) == 3
