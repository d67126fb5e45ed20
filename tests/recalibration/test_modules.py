"""Statistics of modules that are re-estimated on data."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import bnexport
from bnexport.errors import GroupError, UsageError
from bnexport.sync_bn.recognition import FrozenSyncBatchNorm
from tests.support.cluster import Raised
from tests.support.modules import compose

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm, bnexport.SyncBatchNorm)


class Net(nn.Module):
    """Two branches, one of two layers, and a dropout."""

    def __init__(self, norm: Any = nn.BatchNorm2d, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3), norm(4), nn.ReLU())
        self.left = nn.Sequential(nn.Conv2d(4, 3, 1), norm(3))
        self.right = nn.Sequential(nn.Conv2d(4, 3, 1), norm(3), nn.Tanh(), nn.Conv2d(3, 3, 1), norm(3))
        self.drop = nn.Dropout(0.5)
        self.head = nn.Sequential(nn.Flatten(), nn.Linear(48, 5), nn.BatchNorm1d(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.drop(self.left(x) + self.right(x)))


def rows(count: int = 20, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, 2, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 3 + 1


def joint(model: nn.Module, x: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The statistics of all rows at once, layer after layer in the order of the forward."""
    model = copy.deepcopy(model).eval()
    found = {}

    def measure(module: Any, inputs: Any) -> None:
        values = inputs[0].transpose(0, 1).flatten(1)
        module.running_mean.copy_(values.mean(1))
        module.running_var.copy_(values.var(1))
        found[module] = (module.running_mean.clone(), module.running_var.clone())

    for module in model.modules():
        if isinstance(module, NORMS):
            module.register_forward_pre_hook(measure)
    with torch.no_grad():
        model(x)
    return {name: found[module] for name, module in model.named_modules() if module in found}


def assert_statistics(model: nn.Module, expected: dict[str, tuple[torch.Tensor, torch.Tensor]], bound: float) -> None:
    assert expected
    for name, vectors in expected.items():
        layer = model.get_submodule(name)
        for got, wanted in zip((layer.running_mean, layer.running_var), vectors, strict=True):
            torch.testing.assert_close(got, wanted, rtol=bound, atol=bound, msg=name)


def split(x: torch.Tensor, cuts: list[int]) -> list[torch.Tensor]:
    edges = [0, *sorted(cuts), len(x)]
    return [x[a:b] for a, b in itertools.pairwise(edges) if b > a]


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 20), max_size=6), st.sampled_from(NORMS[1:]))
def test_one_by_one_is_one_pass_over_all_rows(cuts: list[int], norm: Any) -> None:
    model, x = Net(norm).double(), rows()
    expected = joint(model, x)
    report = bnexport.recalibrate(model, split(x, cuts))
    assert_statistics(model, expected, 1e-12)
    assert (report.passes, report.rows, len(report.layers), report.left) == (5, 20, 5, ())


def test_only_statistics_change() -> None:
    model = Net().double().train()
    model.stem.eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    bnexport.recalibrate(model, [rows()])
    assert modes == [module.training for module in model.modules()]
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"running_mean", "running_var"} and len(changed) == 10


def inputs_of(model: nn.Module, run: Callable[[], Any]) -> dict[str, list[torch.Tensor]]:
    seen: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, NORMS):
            module.register_forward_pre_hook(lambda _, x, name=name: seen.setdefault(name, []).append(x[0].clone()))
    with torch.no_grad():
        run()
    return seen


def test_together_measures_what_each_layer_saw() -> None:
    model, batches = Net().double(), split(rows(), [3, 11])
    seen = inputs_of(model, lambda: bnexport.recalibrate(model, iter(batches), layers="together"))
    values = {name: torch.cat([x.transpose(0, 1).flatten(1) for x in inputs], 1) for name, inputs in seen.items()}
    assert_statistics(model, {name: (x.mean(1), x.var(1)) for name, x in values.items()}, 1e-12)
    # The inputs are those of training, without dropout.
    other = Net().double().train()
    other.drop.eval()
    for name, (x,) in inputs_of(other, lambda: other(batches[-1])).items():
        torch.testing.assert_close(seen[name][-1], x, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sums_are_float64_whatever_the_type(dtype: torch.dtype) -> None:
    layer = bnexport.SyncBatchNorm(2)
    x = (rows() + 1000).to(dtype)
    report = bnexport.recalibrate(layer, list(x.split(3)))
    values = x.double().transpose(0, 1).flatten(1)
    np.testing.assert_allclose(report.layers[0].new_mean, values.mean(1).numpy(), rtol=1e-12)
    np.testing.assert_allclose(report.layers[0].new_var, values.var(1).numpy(), rtol=1e-7)


def test_layers_that_run_in_another_order_than_they_stand() -> None:
    parts = {"last": nn.BatchNorm2d(2), "first": nn.BatchNorm2d(2)}
    model = compose(lambda self, x: self.last(self.first(x)), **parts).double()
    expected = joint(model, rows())
    bnexport.recalibrate(model, [rows()])
    assert_statistics(model, expected, 1e-12)


def test_a_layer_that_runs_twice_gets_all_its_inputs() -> None:
    x, y = rows()[:, :, 0, 0], rows(seed=5)[:, :, 0, 0]
    model = compose(lambda self, x, y: self.norm(x) + self.norm(y), norm=nn.BatchNorm1d(2).double())
    report = bnexport.recalibrate(model, [{"x": x[:4].numpy(), "y": y[:4]}, {"x": x[4:], "y": y[4:].numpy()}])
    assert_statistics(model, {"norm": (torch.cat([x, y]).mean(0), torch.cat([x, y]).var(0))}, 1e-12)
    assert any("runs 2 times" in line for line in report.warnings())


def test_what_is_left_alone_is_named() -> None:
    class Odd(nn.BatchNorm2d):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) * 2

    parts = {name: nn.BatchNorm2d(2, track_running_stats=name != "none") for name in ("used", "unused", "none")}
    parts |= {"odd": Odd(2), "frozen": FrozenSyncBatchNorm(2), "lazy": nn.LazyBatchNorm2d()}
    model = compose(lambda self, x: self.odd(self.frozen(self.none(self.used(x)))), **parts)
    report = bnexport.recalibrate(model, [(rows().float(), "a target")])
    assert [layer.name for layer in report.layers] == ["used"]
    reasons = dict(report.left)
    assert reasons["unused"] == "it did not run on these rows"
    assert reasons["none"].startswith("it has no running statistics; set track_running_stats = True")
    assert reasons["frozen"] == "it is frozen"
    assert "forward" in reasons["odd"] and reasons["lazy"] == "it is lazy and has never run"
    assert "nothing was changed" in bnexport.recalibrate(nn.Linear(2, 2), []).summary()


def test_a_layer_without_statistics_gets_some_by_the_recipe() -> None:
    x, norm = rows(), nn.BatchNorm2d(2, track_running_stats=False).double()
    norm.track_running_stats, norm.running_mean, norm.running_var = True, torch.zeros(2), torch.ones(2)
    bnexport.recalibrate(norm.double(), [x])
    assert_statistics(nn.Sequential(norm), {"0": (x.mean((0, 2, 3)), x.transpose(0, 1).flatten(1).var(1))}, 1e-12)
    assert "running_var" in norm.state_dict()


def test_other_preprocessing_is_seen() -> None:
    model, x = Net().double(), rows()
    bnexport.recalibrate(model, [x])
    assert not bnexport.recalibrate(copy.deepcopy(model), [rows(seed=3)]).other_data
    report = bnexport.recalibrate(model, [x * 255])
    assert report.other_data and any("preprocessed" in line for line in report.warnings())


BAD = {
    "no rows": ([], {}, "no rows"),
    "one value": ([torch.ones(1, 2, 1, 1).double()], {}, "one value a channel in all"),
    "one value a batch": ([torch.ones(1, 2, 1, 1).double()] * 3, {"layers": "together"},
        "one value a channel in a batch"),
    "a generator": (iter([rows()]), {}, "can be gone through once"),
    "layers": ([rows()], {"layers": "all"}, "layers: got 'all'"),
    "an empty tuple": ([()], {}, "empty tuple"),
    "a mapping": ([{"image": rows(), "label": torch.zeros(20)}], {},
        r"got a mapping with image, label, .*give the inputs alone, such as \[batch\['image'\] for batch in loader\]"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    batches, options, message = BAD[name]
    model = nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2)).double()
    with pytest.raises(UsageError, match=message):
        bnexport.recalibrate(model, batches, **options)
    assert all((layer.running_mean == 0).all() and (layer.running_var == 1).all() for layer in model)


@pytest.mark.parametrize("layers", ["one_by_one", "together"])
def test_a_nan_row_is_named_and_nothing_changes(layers: str) -> None:
    model, x = Net().double(), rows()
    x[13, 0, 2, 2] = torch.nan
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError, match=r"batch 2, row 13 gives NaN or infinity to stem.1; nothing was changed"):
        bnexport.recalibrate(model, list(x.split(6)), layers=layers)
    by_pair = nn.Sequential(nn.Flatten(0, 1), nn.BatchNorm1d(6)).double()
    with pytest.raises(UsageError, match=r"batch 2 gives NaN"):  # whose rows are not those of the batch
        bnexport.recalibrate(by_pair, list(x.split(6)), layers=layers)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_loader_that_gives_other_batches_is_refused() -> None:
    class Fewer:
        count = 4  # the order is found with the first

        def __iter__(self) -> Any:
            self.count -= 1
            return iter([rows()] * self.count)

    with pytest.raises(UsageError, match=r"got 1 in a later pass, expected 2"):
        bnexport.recalibrate(nn.Sequential(nn.BatchNorm2d(2), nn.BatchNorm2d(2)).double(), Fewer())


def test_every_forward_of_the_caller_ends() -> None:
    """No exception ends one early, which a module that cleans up behind an error would see."""

    class Guarded(nn.Sequential):
        entered = ended = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:
            self.entered += 1
            y = super().forward(input)
            self.ended += 1
            return y

    model = Guarded(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).double()
    bnexport.recalibrate(model, [rows()[:4], rows()[4:]])
    assert model.entered == model.ended == 1 + 2 * 2  # one for the order, and two passes


def test_an_interrupt_leaves_the_old_statistics() -> None:
    class Stop(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            if self.calls == 5:  # in the second pass
                raise KeyboardInterrupt
            return x

    model = nn.Sequential(nn.BatchNorm2d(2), Stop(), nn.BatchNorm2d(2)).double()
    with pytest.raises(KeyboardInterrupt):
        bnexport.recalibrate(model, [rows(), rows()])
    assert all((model[place].running_mean == 0).all() for place in (0, 2))


def _batches(rank: int, sizes: list[list[int]]) -> list[torch.Tensor]:
    """The batches of one process of two; the rows of both are all rows."""
    return list(rows().split(sizes[0] + sizes[1])[rank * len(sizes[0]) :][: len(sizes[rank])])


def _member(group: Any, sizes: list[list[int]], layers: str) -> list[np.ndarray[Any, Any]]:
    model = Net(nn.SyncBatchNorm).double()
    bnexport.recalibrate(model, _batches(group.rank(), sizes), layers=layers, process_group=group)
    return [buffer.numpy() for buffer in model.buffers()]


@pytest.mark.parametrize("layers", ["one_by_one", "together"])
@pytest.mark.parametrize("sizes", [[[4, 6], [6, 4]], [[3, 5, 9], [3]], [[], [12, 8]], [[20], []]], ids=str)
def test_processes_are_one_process_with_their_batches(cluster: Any, sizes: list[list[int]], layers: str) -> None:
    model = Net().double()
    bnexport.recalibrate(model, _batches(0, sizes) + _batches(1, sizes), layers=layers)
    for got in cluster.call(2, _member, sizes, layers):
        for array, buffer in zip(got, model.buffers(), strict=True):
            np.testing.assert_allclose(array, buffer.numpy(), rtol=1e-11, atol=1e-11)


def _failing(group: Any, layers: str) -> None:
    model = Net(nn.SyncBatchNorm).double()
    x = rows()
    if group.rank() == 1:
        x[3] = torch.nan
    bnexport.recalibrate(model, list(x.split(5)), layers=layers, process_group=group)


@pytest.mark.parametrize("layers", ["one_by_one", "together"])
def test_a_process_that_fails_stops_all(cluster: Any, layers: str) -> None:
    other, own = cluster.run(2, _failing, layers)
    assert isinstance(other, Raised) and isinstance(own, Raised)
    assert other.type == GroupError.__name__ and "process 1 of the group failed" in other.message
    assert own.type == UsageError.__name__ and "row 3" in own.message


def _different(group: Any) -> None:
    model = nn.Sequential(*(nn.BatchNorm2d(2) for _ in range(group.rank())))
    bnexport.recalibrate(model, [rows().float()], process_group=group)


def test_different_models_are_refused(cluster: Any) -> None:
    assert all("different batch norms" in result.message for result in cluster.run(2, _different))
