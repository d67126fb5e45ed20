"""Code under a trace: warnings of torch's tracer become notes that name its line, and sizes that it computes with int() stay
dynamic.
"""

import contextlib
import inspect
import re
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bnexport
from bnexport.errors import UnsupportedModelError, UsageError
from bnexport.exporting import tracer_notes
from bnexport.exporting.tracer_notes import TracerNotes
from tests.exporting.files import assert_right, is_tracer_note
from tests.exporting.size_corpus import Net


class Asks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 1e6:
            x = x + 1
        return self.body(x) * float(x.shape[1])


def line_of(words: str) -> int:
    lines, first = inspect.getsourcelines(Asks)
    return first + next(index for index, line in enumerate(lines) if words in line)


@pytest.mark.parametrize("suffix", ["onnx", "pt"])
def test_places_in_the_model(suffix, tmp_path) -> None:
    """No warning gets out, and torch's own lines are in no note."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="scripting fails")
        warnings.filterwarnings("ignore", category=bnexport.errors.NotVerifiedWarning)
        model, x = (Asks() if suffix == "onnx" else Unscriptable()).eval(), torch.randn(2, 3, 6, 6)
        result = bnexport.export(model, x, tmp_path / f"m.{suffix}", exporter="torchscript")
    places = [f"exporting/test_tracer_notes.py:{line_of(words)} in forward" for words in ("float(x.", "if x.sum()")]
    baked = f"the trace keeps what the code made of the example's values: a condition at {places[1]}; other values give wrong results"
    assert [note for note in result.notes if is_tracer_note(note) or "example's values" in note] == [
        f"the trace keeps what it found for the example: a float at {places[0]}",
        baked,
    ]
    assert (result.verification.status, result.verification.reason) == ("not_verified", baked)


class Unscriptable(Asks):
    """The compiler knows no set comprehensions."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * max({value + 1 for value in (0, 0)})


class Reads(nn.Module):
    """Code that asks for a value in one of several ways."""

    def __init__(self, function: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.function = nn.BatchNorm2d(3), function
        self.register_buffer("factor", torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.norm(x))


# A way, and what the note calls it; empty where only sizes or constants are asked for, which a comparison at other sizes checks.
READS = {
    "branch": (lambda net, y: y * 2 if y.mean() > 5 else y, "a condition"),
    "loop": (lambda net, y: sum([y] * (1 + int(y.sum() * 0))), "an integer"),
    "item": (lambda net, y: y + y.max().item(), "a number"),
    "list": (lambda net, y: y + y[0, 0, 0].tolist()[0], "a list"),
    "array": (lambda net, y: y + float(y[0, 0, 0].detach().numpy()[0]), "a NumPy array"),
    "buffer": (lambda net, y: y + net.factor.item(), ""),
    "size": (lambda net, y: y[:, :, : int(y.shape[2] * 0.7)] if y.shape[0] < 100 else y, ""),
}


@pytest.mark.parametrize("name", READS)
def test_what_is_read_out_of_values_is_not_verified(name: str, tmp_path: Path) -> None:
    function, what = READS[name]
    arguments = (Reads(function).eval(), torch.rand(2, 3, 6, 6), tmp_path / "m.onnx")
    with pytest.warns(bnexport.errors.NotVerifiedWarning) if what else contextlib.nullcontext():
        result = bnexport.export(*arguments, exporter="torchscript", dynamic=False)
    assert result.verification.status == ("not_verified" if what else "passed")
    assert f"{what} at exporting/test_tracer_notes.py:" in (result.verification.reason if what else result.notes[0])


def test_the_way_out_of_a_branch_on_values(tmp_path: Path) -> None:
    """TorchScript that can be scripted keeps both branches; the other exporter only that of the example."""
    with pytest.raises(UnsupportedModelError) as raised:
        bnexport.export(Asks().eval(), torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter="dynamo")
    assert re.search(
        rf"values of tensors at exporting/test_tracer_notes.py:{line_of('if x.sum()')} in forward: use torch.where or torch.cond"
        r" there, or format torchscript, which keeps .*; exporter torchscript would keep the example's branch",
        str(raised.value),
    )


def test_many_places_are_one_note() -> None:
    with TracerNotes() as tracer:
        for number in range(20):
            code = compile("warnings.warn('Python index', torch.jit.TracerWarning)", f"/code/net_{number}.py", "exec")
            exec(code, {"warnings": warnings, "torch": torch})
        warnings.warn("of another kind", UserWarning)
    notes = tracer.notes(nn.Identity(), (torch.zeros(1),))
    assert len(notes) == tracer_notes._MOST + 1
    assert str(notes[0]).endswith("an index at code/net_0.py:1 in <module>")
    assert str(notes[-1]).endswith("at 12 more places")


def resize(x, size):
    """As MMSegmentation's does."""
    return F.interpolate(x, tuple(int(n) for n in size), mode="bilinear", align_corners=False)


def other_uses(x):
    """int as a function of other things, as a class, and as a type."""
    assert isinstance(int(x.shape[2]), int) and not isinstance(2.0, int) and issubclass(bool, int)
    assert int("7") + int(3.9) + int("ff", base=16) + int.from_bytes(b"\1", "big") == 266
    return x * int(x.shape[1])


def type_of_elements_in_numpy(x):
    assert np.zeros(3, dtype=int).dtype == np.dtype("int64")
    return resize(x, (int(x.shape[2] * 0.5), x.shape[3]))


def identity_of_the_type(x):
    size = 3
    assert type(size) is int
    return resize(x, x.shape[2:]) + x


def equality_of_the_type(x):
    size = 3
    assert type(size) == int and type(size) in (float, int) and {int: True}[type(size)]  # noqa: E721
    return resize(x, (int(x.shape[2] * 0.5), x.shape[3]))


X, THIS_FILE = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(0)), sys.modules[__name__]


class Half(nn.Module):
    def forward(self, x):
        return THIS_FILE.resize(x, (int(x.shape[2] * 0.5), int(x.shape[3])))


class Derived(Half):
    def forward(self, x):
        return super().forward(x)


TYPES = {
    "other uses": other_uses,
    "dtype=int": lambda x: x + torch.arange(4, dtype=int).reshape(1, 4, 1, 1),
    "numpy dtype=int": type_of_elements_in_numpy,
    "type is int": identity_of_the_type,
    "type == int": equality_of_the_type,
    "super": Derived(),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("exporter", ["torchscript", pytest.param("dynamo", marks=pytest.mark.slow)])
def test_int_in_other_uses(exporter, name, tmp_path):
    model = Net(TYPES[name]).eval()
    result = bnexport.export(model, X, tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert not result.notes
    assert_right(result.path, model, *((1, 3, *size) for size in [(8, 8), (45, 20), (90, 90), (170, 10)]), atol=1e-4)


def test_int_is_itself_afterwards(tmp_path):
    """After an export that fails as well, which runs again with int itself, and then with ever fewer open sizes."""
    seen = []

    def fails(x):
        seen.append(int)
        raise RuntimeError("stop")

    def fails_with_size(x):
        return fails(x[:, :, int(x.shape[2]) :])

    for function in (fails, fails_with_size):
        seen.clear()
        with pytest.raises(UsageError, match="stop"):
            bnexport.export(Net(function), X, tmp_path / "m.onnx", exporter="torchscript", verify=False)
        assert len(seen) == 6  # the last to say whose failure it is
        assert seen[0] is not int and all(each is int for each in seen[1:])
        assert "int" not in vars(THIS_FILE)


def test_only_the_model_under_export_sees_another_int(tmp_path):
    """Code that runs at the same time in another thread, and the functions themselves."""
    seen = {}

    def other_thread():
        seen["module"] = "int" in vars(THIS_FILE)
        seen["function"] = sizes_of_int()

    def forward(x):
        thread = threading.Thread(target=outside.__getitem__("run"))
        thread.start()
        thread.join()
        seen["own"] = sizes_of_int()
        return x[:, :, int(x.shape[2]) // 2 :]

    outside = {"run": other_thread}
    model = Net(forward)
    before = dict(model.__dict__)
    bnexport.export(model.eval(), X, tmp_path / "m.onnx", exporter="torchscript", verify=False)
    assert seen == {"module": False, "function": (int, 3), "own": (seen["own"][0], 3)}
    assert seen["own"][0] is not int
    assert {name: model.__dict__[name] for name in before if name != "training"}.keys() == before.keys() - {"training"}
    assert "forward" not in model.__dict__ and model.function is forward


def sizes_of_int():
    return int, int("3")
