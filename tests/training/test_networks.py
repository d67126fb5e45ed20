"""One step of networks against torch's, both measured from torch's step in float64, which follows each at kinks.

Groups of three steps with batches of different sizes; before each, torch takes over the session's state, so that errors do not
add up. A kind (parameters, running means, first moments, ...) is one vector: its error is that of all its tensors in the three
steps of a group, in the 2-norm; the median group counts. Bound: twice torch float32's own, or four roundings where that is nearly
exact. Each tensor alone is bounded, too, so that none hides in a large sum.

Adam divides a gradient by its own size: where it is zero but for rounding, rounding decides the update's sign, in torch as in ONNX
Runtime. Such elements of parameters (size below 1e-4 of the network's root mean square) are left out there alone.
"""

import itertools
from collections import defaultdict

import numpy as np
import pytest
import torch

import bnexport
from bnexport import tolerances
from bnexport.training import step
from tests.support.checks import needs_training_step
from tests.training import following
from tests.training.networks import NETWORKS
from tests.training.torch_step import state_of, torch_step

pytestmark = needs_training_step

# Groups of three batches.
DRAWS = 3
OPTIONS = {
    "sgd": {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-3, "nesterov": True},
    "adam": {"lr": 1e-3, "weight_decay": 1e-3},
    "adamw": {"lr": 1e-3, "amsgrad": True},
}
QUICK = ("miniature-classifier", "adam", True), ("miniature-segmenter", "sgd", True)
CASES = [(name, *way) for name in NETWORKS for way in (*((each, True) for each in OPTIONS), ("adamw", False))]


def kind_of(name: str) -> str:
    if name == "loss":
        return name
    last = name.rpartition(".")[2]
    return last if name.startswith("optimizer.") or last.startswith("running_") else "parameter"


def well_conditioned(name, exact):
    """Which elements of a result to compare: all, but for parameters that Adam updates."""
    own = exact.get(f"optimizer.{name}.exp_avg_sq")
    if own is None:
        return ...
    squares = [value for other, value in exact.items() if other.endswith(".exp_avg_sq")]
    mean_square = sum(value.sum() for value in squares) / sum(value.size for value in squares)
    return own > 1e-8 * mean_square


@pytest.mark.parametrize(
    ("network", "optimizer", "cpu_kernels"),
    [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_a_step_is_as_close_to_float64_as_torchs(network, optimizer, cpu_kernels, tmp_path, record_property):
    net = NETWORKS[network]
    model, options = net.model(), OPTIONS[optimizer]
    given = {"optimizer": optimizer, "optimizer_options": options, "cpu_kernels": cpu_kernels, "verify": False}
    _, reached = following.export(model, net.loss, net.batch(4), tmp_path / "s.onnx", **given)
    session = bnexport.TrainingSession(tmp_path / "s.onnx")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    squares = defaultdict(lambda: np.zeros((DRAWS, 3)))
    tensors = defaultdict(list)
    for draw, size in itertools.product(range(DRAWS), (4, 5, 3)):
        state, batch = state_of(session, tmp_path), net.batch(size, 10 * draw + size)
        recorder = step.Recorder()
        arguments = (model, net.loss, optimizer, options, state, batch)
        with recorder:
            single = torch_step(*arguments, torch.float32)
        exact = {}
        for whose, values in (("ours", reached(state, batch)), ("own", [value.numpy() for value in recorder.values])):
            with step.Follower(values, batch):
                exact[whose] = torch_step(*arguments, torch.float64)
        loss = session.step([tensor.numpy() for tensor in batch])
        got = {**state_of(session, tmp_path), "loss": np.array(loss)}
        for name, right in exact["ours"].items():
            if right.dtype.kind != "f":
                assert np.array_equal(got[name], right), name
                continue
            assert got[name].shape == right.shape, name
            kept = well_conditioned(name, exact["ours"])
            differences = got[name] - right, single[name] - exact["own"][name]
            errors = np.array([np.linalg.norm(difference[kept]) for difference in differences])
            squares[kind_of(name)][draw] += [*errors**2, np.linalg.norm(right) ** 2]
            tensors[name].append((*errors / np.sqrt(right.size), np.linalg.norm(right) / np.sqrt(right.size)))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())

    medians = {name: np.median(values, axis=0) for name, values in tensors.items()}
    largest = defaultdict(float)
    for name, (_, _, size) in medians.items():
        largest[kind_of(name)] = max(largest[kind_of(name)], size)
    for kind, values in squares.items():
        ours, own = np.median(np.sqrt(values[:, :2] / values[:, 2:]), axis=0)
        record_property(kind, f"{ours:.2e} {own:.2e}")
        assert ours <= 2 * max(own, 4 * tolerances.UNIT_ROUNDOFF["float32"]), (
            f"{kind}: {ours:.3g} from float64, torch float32 {own:.3g}"
        )
    for name, (ours, own, _) in medians.items():
        bound = tolerances.model("float32", np.array([largest[kind_of(name)]])).atol
        assert ours <= max(2 * own, bound), f"{name}: {ours:.3g} from float64, torch {own:.3g}, floor {bound:.3g}"
