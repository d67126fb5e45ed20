"""dynamic= of export_training_step by name: which arrays of a batch have rows that vary."""

import numpy as np
import pytest
import torch
from torch import nn

from bnexport import SyncBatchNorm, TrainingSession, export_training_step
from bnexport.errors import UsageError


class Scaled(nn.Module):
    """Takes a factor for each class beside the images."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm2d(2)
        self.out = nn.Linear(2, 3)

    def forward(self, x, scale):
        return self.out(self.norm(x).mean((2, 3))) * scale


def batch(rows, classes=3):
    generator = torch.Generator().manual_seed(rows)
    images = torch.randn(rows, 2, 5, 5, generator=generator)
    return images, torch.full((classes,), 0.5), torch.randint(0, 3, (rows,), generator=generator)


def export(path, dynamic, rows=4):
    return export_training_step(Scaled(), nn.functional.cross_entropy, batch(rows), path, dynamic=dynamic)


# One row is doubled for the export; it must not double the factors.
@pytest.mark.parametrize("rows", [4, 1])
def test_the_rows_of_named_arrays_vary(tmp_path, rows):
    path = tmp_path / "s.onnx"
    result = export(path, {"x": [0], "target": {0: "batch"}}, rows)
    assert result.verification.passed
    shapes = {value.name: value.shape for value in result.model.graph.inputs}
    assert [str(shapes[name][0]) for name in ("x", "scale", "target")] == ["batch", "3", "batch"]
    session = TrainingSession(path)
    assert np.isfinite(session.step([tensor.numpy() for tensor in batch(7)]))
    with pytest.raises(UsageError, match=r"scale: got shape \(7,\), expected \(3,\)"):
        session.step([tensor.numpy() for tensor in batch(7, classes=7)])


def test_a_name_for_the_rows(tmp_path):
    result = export(tmp_path / "s.onnx", {"x": {0: "rows"}, "target": {0: "rows"}})
    assert str(next(value for value in result.model.graph.inputs if value.name == "x").shape[0]) == "rows"


@pytest.mark.parametrize(
    "dynamic, message",
    [
        ({"x": [0, 2]}, r"dynamic: x: got dimension 2, expected 0: only the rows .* one step for each image size"),
        ({"y": [0]}, r"dynamic: got y, expected inputs among x, scale, target"),
        ({"x": [0], "target": {0: "rows"}}, r"dynamic: target: got 'rows' .* one name for each size .*: batch 4$"),
        ({"x": {0: "n"}, "scale": {0: "n"}}, r"dynamic: scale: got 'n' .* one name for each size .*: n 4, n 3$"),
    ],
)
def test_a_dimension_that_cannot_be_dynamic(tmp_path, dynamic, message):
    with pytest.raises(UsageError, match=message):
        export(tmp_path / "s.onnx", dynamic)
    assert not list(tmp_path.iterdir())


def test_one_row_and_two_rows_share_a_size(tmp_path):
    """One row is doubled before the export, and torch gives equal sizes one symbol."""

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(3, 1)

        def forward(self, x):
            return self.out(x).mean()

    batch = (torch.ones(1, 3), torch.ones(2))
    made = export_training_step(Two(), lambda got, y: (got - y).square().mean(), batch, tmp_path / "s.onnx")
    shapes = {value.name: str(value.shape[0]) for value in made.model.graph.inputs if value.name in {"x", "target"}}
    assert shapes == {"x": "batch", "target": "batch"}


def test_half_of_the_rows_rounded_up(tmp_path):
    """ONNX rounds an integer division towards zero; 5 // -2 is -3 in Python, and the example's 4 // -2 is -2 in both."""

    class Halved(Scaled):
        def forward(self, x, scale):
            return super().forward(x, scale) * -(x.shape[0] // -2)

    model = Halved().train()
    export_training_step(
        model, nn.functional.cross_entropy, batch(4), tmp_path / "s.onnx", dynamic={"x": [0], "target": [0]}
    )
    x, scale, target = batch(5)
    loss = TrainingSession(tmp_path / "s.onnx").step([x.numpy(), scale.numpy(), target.numpy()])
    assert loss == pytest.approx(float(nn.functional.cross_entropy(model(x, scale), target)), rel=1e-5)


@pytest.mark.parametrize("standard", [True, False])
def test_one_value_a_channel_has_no_unbiased_variance(tmp_path, standard):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 3), SyncBatchNorm(3)).train()
    rows = (torch.randn(4, 4), torch.randint(0, 3, (4,)))
    export_training_step(net, nn.functional.cross_entropy, rows, tmp_path / "s.onnx", standard_ops_only=standard)
    session = TrainingSession(tmp_path / "s.onnx")
    session.step([tensor[:1].numpy() for tensor in rows])
    state = session.state_dict()
    np.testing.assert_allclose(state["1.running_mean"], 0.1 * net[0](rows[0][:1]).detach()[0], rtol=1e-5)
    np.testing.assert_allclose(state["1.running_var"], np.full(3, 0.9), rtol=1e-6)
