"""Small files that several tests of the command line only read."""

import numpy as np
import pytest
import torch

import bnexport
from bnexport.cli import main
from models.resnet import ResNet


def tiny():
    torch.manual_seed(0)
    return ResNet(in_channels=1, widths=(4,), blocks=1)


def smallest():
    """A network whose training step exports in a second."""
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2), torch.nn.Flatten(), torch.nn.Linear(72, 10)
    )


def synced():
    return bnexport.convert_sync_batchnorm(tiny())


@pytest.fixture(scope="package")
def small_files(tmp_path_factory):
    """kept.onnx with 3 sync batch norms, step.onnx with rows.npz and x.npy, and weights.pth."""
    folder = tmp_path_factory.mktemp("small_files")
    bnexport.export(tiny().eval(), torch.randn(2, 1, 8, 8), folder / "kept.onnx", mode="custom_op")
    x, target = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
    loss = torch.nn.functional.cross_entropy
    names = ["x", "target"]
    bnexport.export_training_step(smallest(), loss, (x, target), folder / "step.onnx", input_names=names, verify=False)
    np.save(folder / "x.npy", x.numpy())
    np.savez(folder / "rows.npz", x=x.numpy(), target=target.numpy())
    torch.save(tiny().state_dict(), folder / "weights.pth")
    return folder


@pytest.fixture
def call(capfd):
    """Run a command in this process; return its exit code, and what it printed on stdout and stderr."""

    def called(*arguments, code=None):
        capfd.readouterr()
        got = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        assert code is None or got == code, err
        return got, out, err

    return called


NET = "g (float[N,3,H,W] x) => (float[N,4,A,B] y) { z = Conv (x, w:4.3.3.3) y = Norm (z, p:4) }"
# One batch norm that folds, one that stays.
HALF = """g (float[N,3,H,W] x) => (float[N,4,A,B] y, float[N,3,H,W] z) {
    [conv] c = Conv (x, w:4.3.3.3) [first] y = Norm (c, p:4) [relu] r = Relu (x) [second] z = Norm (r, q:3) }"""
