"""Stored statistics against those of data: a trained network, and faults planted into it."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch.nn import functional

import bnexport
from bnexport.cli import main
from bnexport.recalibration.deviations import DEVIATION, StatisticsReport, _channels
from bnexport.recalibration.moments import merge
from models.digits import load_digits

pytest.importorskip("sklearn")


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((1, 8), (8, 16), (16, 16)):
        layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    return torch.from_numpy(load_digits().test_images)


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    torch.manual_seed(0)
    digits, model = load_digits(), network()
    x, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(3):
        for rows in torch.randperm(len(x)).split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(x[rows]), labels[rows]).backward()
            optimizer.step()
    return model


def measured_by_torch(model: nn.Module, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Mean and variance of the inputs of all batch norms in one forward of inference, in float64."""
    model, found = copy.deepcopy(model).eval().double(), {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.register_forward_pre_hook(
                lambda _, inputs, name=name: found.__setitem__(name, torch.var_mean(inputs[0], (0, 2, 3))[::-1])
            )
    model(x.double())
    return found


def export(model: nn.Module, x: torch.Tensor, path: Path) -> Path:
    options: Any = {"dynamo": False, "training": torch.onnx.TrainingMode.PRESERVE, "do_constant_folding": False}
    axes = {"x": {0: "N"}}
    torch.onnx.export(model.eval(), (x[:2],), str(path), input_names=["x"], dynamic_axes=axes, **options)
    return path


def test_no_rows_beside_rows_of_huge_numbers() -> None:
    none, huge = np.zeros(3), np.array([2, 1e200, 0])
    for merged in (merge(none, huge), merge(huge, none)):
        np.testing.assert_array_equal(merged, huge)
    np.testing.assert_array_equal(merge(none, none), none)


def test_module_and_file_measure_what_torch_measures(trained: nn.Module, images: torch.Tensor, tmp_path: Path) -> None:
    before = copy.deepcopy(trained.train().state_dict())
    path = export(copy.deepcopy(trained), images, tmp_path / "a.onnx")
    size = path.stat().st_size
    expected = measured_by_torch(trained, images)
    for report in (
        bnexport.statistics(trained, iter(images.split(50))),
        bnexport.statistics(path, iter([{"x": each.numpy()} for each in images.split(70)])),
    ):
        assert (report.measured.passes, report.measured.rows, len(report.layers)) == (1, len(images), 3)
        assert report.summary().endswith("nothing found") and report.warnings() == [], report
        for layer, name in zip(report.layers, expected, strict=True):
            mean, var = (each.detach().numpy() for each in expected[name])
            np.testing.assert_allclose(layer.change.new_mean, mean, rtol=1e-4, atol=1e-5)
            np.testing.assert_allclose(layer.change.new_var, var, rtol=1e-4)
            norm: Any = trained.get_submodule(name)
            z = torch.linspace(-1, 1, 3)[:, None] * 1.5**0.5  # mean 0, variance 1
            x = torch.from_numpy(mean) + z * torch.from_numpy(var + norm.eps).sqrt()
            y = (x - norm.running_mean) / (norm.running_var.double() + norm.eps).sqrt()
            assert abs(layer.deviation - float((y - z).square().mean().sqrt())) < 1e-4
    assert trained.training and path.stat().st_size == size
    assert all(torch.equal(value, before[name]) for name, value in trained.state_dict().items())


def reset(model: nn.Module) -> None:
    model[4].reset_running_stats()


def dead(model: nn.Module) -> None:
    model[3].weight.data[5] = 0


def dead_since_training(model: nn.Module) -> None:
    dead(model)
    bnexport.recalibrate(model, [torch.from_numpy(load_digits().train_images)])


DEAD = "dead (constant on these rows): 4 (channel 5 of 16)"
SMALL = "variance below eps (eps decides the scale): 4 (channel {} of 16)"
FAULTS: dict[str, tuple[Callable[[Any], Any], float, str | None, list[str]]] = {
    "reset": (reset, 1, "4", ["never updated (every mean is 0 and every variance 1): 4", "to re-estimate"]),
    "variance": (lambda model: model[4].running_var[3].fill_(1e-9), 1, "4", [SMALL.format(3)]),
    "dead": (dead, 1, "4", [DEAD]),
    "always dead": (dead_since_training, 1, None, [DEAD, SMALL.format(5)]),
    "last": (lambda model: model[7].running_mean.add_(0.8 * model[7].running_var.sqrt()), 1, "7", ["to re-estimate"]),
    "scale": (lambda model: None, 0.4, "1", ["no batch norm comes before it: were these rows preprocessed"]),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_layer_that_starts_it_is_named(name: str, trained: nn.Module, images: torch.Tensor) -> None:
    plant, scale, start, words = FAULTS[name]
    model = copy.deepcopy(trained)
    plant(model)
    report = bnexport.statistics(model, (scale * images).split(50))
    assert (report.start.change.name if report.start else None) == start
    said = "\n".join(report.warnings())
    assert all(text in said for text in words), said
    if start is None:
        assert report.summary().endswith("none deviates") and "to re-estimate" not in said
    else:
        assert f"first {start}, by " in report.summary()
        bnexport.recalibrate(model, (scale * images).split(50))
        assert bnexport.statistics(model, (scale * images).split(50)).start is None


def test_chance_explains_what_few_rows_show(trained: nn.Module, images: torch.Tensor) -> None:
    few = bnexport.statistics(trained, [images[:3]])
    assert few.start is None and max(layer.deviation for layer in few.layers) > DEVIATION
    (line,) = few.warnings()
    assert line.startswith("3 rows explain deviations up to ")
    model = copy.deepcopy(trained)
    reset(model)
    start = bnexport.statistics(model, [images[:3]]).start
    assert start is not None and start.never_updated


def test_a_report_is_a_page_in_a_notebook(trained: nn.Module, images: torch.Tensor) -> None:
    model = copy.deepcopy(trained)
    reset(model)
    report: StatisticsReport = bnexport.statistics(model, [images])
    page = report._repr_html_()
    assert [_channels(list(range(count)), 8)[9:] for count in (4, 5, 8)] == [
        "0, 1, 2, 3 of 8",
        "0, 1, 2, 3 and 1 more of 8",
        "nnels",
    ]
    assert "starts here; never updated" in page and "<td>\u2588" in page and "<script" not in page
    assert "nothing found" not in page and bnexport.recalibrate(model, [images])._repr_html_().startswith("<p>3 batch")


class TestCommand:
    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: nn.Module, images: torch.Tensor) -> Path:
        monkeypatch.chdir(tmp_path)
        model = copy.deepcopy(trained)
        reset(model)
        export(model, images, Path("a.onnx"))
        torch.save(model.state_dict(), "w.pth")
        np.save("x.npy", images.numpy())
        return tmp_path

    def test_of_a_file(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        before = Path("a.onnx").read_bytes()
        assert main(["statistics", "a.onnx", "-i", "x:x.npy", "--html", "s.html", "--json", "s.json"]) == 0
        said = capsys.readouterr().err
        norm = onnx.load("a.onnx").graph.node[4].name
        assert f"deviate, first {norm}, by" in said
        command = "bnexport recalibrate a.onnx OUT.onnx -i x:x.npy"
        assert command in said and command in Path("s.html").read_text()
        data = json.loads(Path("s.json").read_text())
        assert (data["start"], data["passes"], data["rows"]) == (norm, 1, 360)
        assert data["layers"][1]["never_updated"] and len(data["layers"][1]["measured_mean"]) == 16
        assert Path("a.onnx").read_bytes() == before
        assert main(["recalibrate", "a.onnx", "OUT.onnx", "-i", "x:x.npy"]) == 0
        capsys.readouterr()
        assert main(["statistics", "OUT.onnx", "-i", "x:x.npy"]) == 0
        assert "nothing found" in capsys.readouterr().err

    def test_of_a_model_without_batch_norms(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        export(nn.ReLU(), torch.ones(2, 1, 8, 8), Path("plain.onnx"))
        assert main(["statistics", "plain.onnx", "-i", "x:x.npy"]) == 0
        assert "no batch norms with running statistics: nothing was measured" in capsys.readouterr().err

    def test_of_a_module(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        arguments = ["statistics", f"{__name__}:network", "-i", "input:x.npy", "--batch", "100"]
        assert main([*arguments, "--checkpoint", "w.pth"]) == 0
        captured = capsys.readouterr()
        assert "first 4, by" in captured.err and "bnexport.recalibrate(model, batches)" in captured.err
        assert main(arguments) == 0
        assert "first 4, by" not in capsys.readouterr().err
