"""Sizes that a model computes with int() stay dynamic in an ONNX file."""

import sys
import threading

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bnexport
from bnexport.errors import UsageError


class Net(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.function = function

    def forward(self, x):
        return self.function(self.body(x))


def resize(x, size):
    """As MMSegmentation's does."""
    return F.interpolate(x, tuple(int(n) for n in size), mode="bilinear", align_corners=False)


def other_uses(x):
    """int as a function of other things, as a class, and as a type."""
    assert isinstance(int(x.shape[2]), int) and not isinstance(2.0, int) and issubclass(bool, int)
    assert int("7") + int(3.9) + int("ff", base=16) + int.from_bytes(b"\1", "big") == 266
    return x * int(x.shape[1])


def type_of_elements(x):
    return x + torch.arange(4, dtype=int).reshape(1, 4, 1, 1)


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


THIS_FILE = sys.modules[__name__]


class Base(nn.Module):
    def forward(self, x):
        return self.half(x)

    @staticmethod
    def half(x):
        return THIS_FILE.resize(x, (int(x.shape[2] * 0.5), int(x.shape[3])))


class Derived(Base):
    def forward(self, x):
        return super().forward(x)


TYPES = {
    "other uses": other_uses,
    "dtype=int": type_of_elements,
    "numpy dtype=int": type_of_elements_in_numpy,
    "type is int": identity_of_the_type,
    "type == int": equality_of_the_type,
    "super": Derived(),
}


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("exporter", ["torchscript", pytest.param("dynamo", marks=pytest.mark.slow)])
def test_int_in_other_uses(exporter, name, tmp_path):
    model = Net(TYPES[name]).eval()
    result = bnexport.export(model, torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter=exporter)
    assert result.verification.passed
    assert not result.notes
    session = onnxruntime.InferenceSession(result.path)
    for size in [(8, 8), (45, 20), (90, 90), (170, 10)]:
        x = torch.randn(1, 3, *size)
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, model(x).detach(), rtol=1e-4, atol=1e-4, err_msg=str(size))


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
            bnexport.export(
                Net(function), torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter="torchscript", verify=False
            )
        assert len(seen) == 6  # the last to say whose failure it is
        assert seen[0] is not int and all(each is int for each in seen[1:])
        assert "int" not in vars(sys.modules[__name__])


def test_only_the_model_under_export_sees_another_int(tmp_path):
    """Code that runs at the same time in another thread, and the functions themselves."""
    seen = {}

    def other_thread():
        seen["module"] = "int" in vars(sys.modules[__name__])
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
    bnexport.export(model.eval(), torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", exporter="torchscript", verify=False)
    assert seen == {"module": False, "function": (int, 3), "own": (seen["own"][0], 3)}
    assert seen["own"][0] is not int
    assert {name: model.__dict__[name] for name in before if name != "training"}.keys() == before.keys() - {"training"}
    assert "forward" not in model.__dict__ and model.function is forward


def sizes_of_int():
    return int, int("3")
