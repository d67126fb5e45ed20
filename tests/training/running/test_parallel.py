"""Training on two processes over gloo against one process with the joint batch."""

import functools
import os
import signal
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import torch.distributed as dist
from torch import nn

import bnexport
from bnexport import model_io, tolerances
from bnexport.errors import GroupError, UnsupportedModelError, UsageError
from bnexport.sync_bn import distributed
from bnexport.training.graph import keep_gradients
from bnexport.training.processes import share_of_loss
from bnexport.training.session import TrainingSession
from tests.support.cluster import Cluster, Raised, join, run_once
from tests.support.modules import compose

Batch = tuple[np.ndarray, ...]
IGNORED = 255
# Rows of the two ranks in each step; torch's DDP knows equal ones only.
SPLITS = [(3, 3), (5, 2), (1, 3), (3, 1), (1, 6), (2, 2)]


class Net(nn.Module):
    """Two batch norms, one of torch's own; smooth, so that rounding does not decide branches."""

    def __init__(self, dense: bool = False) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 8, 3, groups=2, padding=1, bias=False)
        self.sync = bnexport.SyncBatchNorm(8)
        self.out = nn.Conv2d(8, 3, 1)
        self.dense = dense

    def forward(self, image):
        x = torch.tanh(self.norm(self.first(image)))
        x = self.out(torch.tanh(self.sync(self.second(x))))
        return x if self.dense else x.mean((2, 3))


def net(dense: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(dense).train()


def rows(count: int, seed: int, dense: bool = False) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(seed)
    images = generator.standard_normal((count, 2, 6, 6)).astype(np.float32)
    labels = generator.integers(0, 3, (count, 6, 6) if dense else count)
    if dense:
        labels[generator.random(labels.shape) < 0.3] = IGNORED
    return images, labels


def parts(step: int, dense: bool = False) -> list[Batch]:
    joint = [np.split(array, [SPLITS[step][0]]) for array in rows(sum(SPLITS[step]), step, dense)]
    return list(zip(*joint))


def joined(batches: list[Batch]) -> Batch:
    return tuple(map(np.concatenate, zip(*batches)))


def sum_loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum")


def ignoring_loss(output, target):
    return nn.functional.cross_entropy(output, target, ignore_index=IGNORED)


EXPORTS = {
    "sgd": {"optimizer": "sgd", "optimizer_options": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
        "clip_grad_norm": 0.5, "outputs": ["output"]},
    # A small eps would let rounding decide the sign of the first updates.
    "adamw": {"optimizer": "adamw", "optimizer_options": {"lr": 0.01, "eps": 1e-3, "groups": [{"params": "out.*",
        "lr": 0.02}], "decay_norms_and_biases": False}, "accumulate": 2},
    "sum": {"mode": "gradients", "loss": sum_loss},
    "weighted": {"mode": "gradients", "loss": ignoring_loss, "dense": True},
}  # fmt: skip


JOBS: dict[str, dict[str, Any]] = {
    "sgd": {"save": "sgd"},
    "adamw": {},
    "begun": {"export": "adamw", "steps": range(3), "save": "begun"},
    "resumed": {"export": "adamw", "steps": range(3, len(SPLITS)), "load": "begun"},
    "sum": {"gradients": True, "loss_reduction": "sum"},
    "weighted": {"gradients": True, "weighted": True},
}


def train(group: Any, path: Path, batches: list[list[Batch]], job: dict[str, Any]) -> dict[str, Any]:
    """What one process of a group does: losses, outputs and gradients of its steps, and the state after them."""
    rank, options = dist.get_rank(group), onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    reduction = job.get("loss_reduction", "mean")
    session = TrainingSession(path, session_options=options, group=group, loss_reduction=reduction)
    assert distributed.published_name(distributed.name_of(group)) in (None, "world"), "exports would write the name"
    if "load" in job:
        session.load_checkpoint(path.parent / job["load"])
    if job.get("other_state") == rank:
        session.load_state_dict({"out.bias": np.full(3, 7.0, np.float32)}, strict=False)
    if job.get("other_rate") == rank:
        session.learning_rate = 7.0
    results, losses = {}, []
    for step, given in enumerate(batches):
        if job.get("dies") == [rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)
        weight = int((given[rank][1] != IGNORED).sum()) if job.get("weighted") else None
        if job.get("gradients"):
            loss, gradients = session.gradients(given[rank], weight=weight)
            results |= {f"{step}/{name}": array for name, array in gradients.items()}
        else:
            loss = session.step(given[rank], weight=weight)
        losses.append(loss)
        results |= {f"{step}/{name}": array for name, array in session.outputs.items()}
    results |= {f"state/{name}": session._state.get(name) for name in session._state.names()}
    if rank == 0 and "save" in job:
        session.save_checkpoint(path.parent / job["save"], overwrite=True)
    dist.barrier(group)
    return {"losses": np.array(losses), **results}


def train_once(rank: int, size: int, port: int, *arguments: Any) -> dict[str, Any]:
    join(rank, size, port)
    return train(dist.group.WORLD, *arguments)


@pytest.fixture(scope="module")
def steps(cluster: Cluster, tmp_path_factory: Any) -> types.SimpleNamespace:
    """Exported steps, and what two processes have at the end of a job: each made when it is asked for."""
    folder = tmp_path_factory.mktemp("steps")

    @functools.cache
    def path(name: str) -> Path:
        options = dict(EXPORTS[name])
        dense, loss = options.pop("dense", False), options.pop("loss", nn.functional.cross_entropy)
        example = tuple(torch.from_numpy(array) for array in rows(4, 9, dense))
        bnexport.export_training_step(net(dense), loss, example, folder / f"{name}.onnx", verify=False, **options)
        return folder / f"{name}.onnx"

    @functools.cache
    def results(name: str) -> list[dict[str, np.ndarray]]:
        job = JOBS[name]
        if "load" in job:
            results(job["load"])
        batches = [parts(step, name == "weighted") for step in job.get("steps", range(len(SPLITS)))]
        return cluster.call(2, train, path(job.get("export", name)), batches, job)

    return types.SimpleNamespace(folder=folder, path=path, results=results)


def assert_close(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Two float32 computations of one value: twice the bound of whole models."""
    bound = 2 * tolerances.model("float32", expected).atol if expected.dtype.kind == "f" else 0
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound, err_msg=what)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_two_processes_make_the_step_of_the_joint_batch(steps, name):
    first, second = steps.results(name)
    alone = TrainingSession(steps.path(name))
    for step, counts in enumerate(SPLITS):
        loss = alone.step(joined(parts(step)))
        assert first["losses"][step] == pytest.approx(loss, rel=1e-5)
        for key, output in alone.outputs.items():
            for rank, part in enumerate(np.split(output, [counts[0]])):
                assert_close((first, second)[rank][f"{step}/{key}"], part, f"{key} of rank {rank} in step {step}")
    for key in alone._state.names():
        assert_close(first[f"state/{key}"], alone._state.get(key), key)
    assert int(first["state/norm.num_batches_tracked"]) == len(SPLITS)
    changed = float(np.abs(first["state/first.weight"] - net().first.weight.detach().numpy()).max())
    assert changed > 1e-3, "the test trains nothing"


@pytest.mark.parametrize("name", ["sgd", "adamw", "begun", "resumed", "sum", "weighted"])
def test_all_processes_have_the_same_bits(steps, name):
    first, second = steps.results(name)
    for key in first:
        if key == "losses" or key.startswith("state/") or name in {"sum", "weighted"}:
            assert first[key].tobytes() == second[key].tobytes(), key


def test_rank_0s_checkpoint_is_everyones(steps):
    first, _ = steps.results("sgd")
    alone = TrainingSession(steps.path("sgd"))
    alone.load_checkpoint(steps.folder / "sgd")
    assert all(np.array_equal(alone._state.get(name), first[f"state/{name}"]) for name in alone._state.names())


def test_all_resume_to_the_bits_of_a_training_without_a_stop(steps):
    (whole, _), (_, resumed) = steps.results("adamw"), steps.results("resumed")
    for key in whole:
        if key.startswith("state/"):
            assert whole[key].tobytes() == resumed[key].tobytes(), key
    assert np.array_equal(whole["losses"][3:], resumed["losses"])


@pytest.mark.parametrize("name", ["sum", "weighted"])
def test_gradients_are_those_of_the_joint_loss(steps, name):
    """A sum over rows, and a mean over the pixels that are not ignored."""
    first, _ = steps.results(name)
    alone = TrainingSession(steps.path(name))
    for step in range(len(SPLITS)):
        loss, gradients = alone.gradients(joined(parts(step, name == "weighted")))
        assert first["losses"][step] == pytest.approx(loss, rel=1e-5)
        for key, gradient in gradients.items():
            assert_close(first[f"{step}/{key}"], gradient, f"{key} in step {step}")


def test_what_goes_wrong_is_an_error_on_every_process(steps, cluster):
    """Ranks that disagree, and a refused batch; after each the group is whole."""
    path, batches = steps.path("sgd"), [parts(step) for step in range(2)]
    own, (images, labels) = batches[0]

    def errors(job: dict[str, Any], *second: Any) -> list[str]:
        found = cluster.run(2, train, path, [[own, second or (images, labels)]], job)
        assert all(isinstance(each, Raised) for each in found)
        return [f"{each.type}: {each.message}" for each in found]

    disagree = errors({"other_rate": 1})
    assert all(error.startswith("GroupError: learning_rate: the ranks have 0.05, 7;") for error in disagree)
    disagree = errors({"other_state": 1})
    assert all("the state or the graph of rank 1 is not that of rank 0" in error for error in disagree)
    for wrong, what in ((images.astype(np.float64), "an array of float64"), (images[:0], "an empty batch")):
        first, second = errors({}, wrong, labels)
        assert first.startswith("GroupError: the batch of rank 1 was refused there")
        assert second.startswith(f"UsageError: image: got {what}")
    diverged = errors({}, np.full_like(images, np.inf), labels)
    assert all(error.startswith("DivergedError: the loss of rank") for error in diverged)
    cluster.call(2, train, path, batches, {})


def test_a_killed_process_is_an_error(steps):
    # Less than the group's time: the connections of a killed process are closed.
    batches = [parts(step) for step in range(4)]
    survivor, killed = run_once(2, train_once, steps.path("sgd"), batches, {"dies": [1, 2]}, timeout=200)
    assert killed is None
    assert isinstance(survivor, Raised) and survivor.type == "GroupError" and "rank 0" in survivor.message


def test_shares_of_the_joint_loss():
    rows = np.array([3.0, 1.0])
    assert [share_of_loss(rows, rank, mean=True) for rank in (0, 1)] == [0.75, 0.25]
    assert share_of_loss(np.array([0.0, 1.0]), 0, mean=True) == 0.0
    assert share_of_loss(rows, 0, mean=False) == 1.0
    for wrong in ([-1.0, 1.0], [0.0, 0.0], [np.nan, 1.0]):
        with pytest.raises(GroupError, match=r"weight: the ranks have .*, expected numbers >= 0, one of them > 0"):
            share_of_loss(np.array(wrong), 0, mean=True)


def largest_so_far(self, x):
    self.largest = torch.maximum(self.largest, x.detach().amax(0))
    return self.out(self.norm(x) / (1 + self.largest))


def test_steps_that_would_differ_between_processes_are_refused(tmp_path):
    batch, path = (torch.randn(4, 4), torch.randint(0, 3, (4,))), tmp_path / "step.onnx"
    counting = compose(largest_so_far, norm=nn.BatchNorm1d(4), out=nn.Linear(4, 3), largest=torch.zeros(4))
    for model, standard, match in (
        (counting, False, "buffer 'largest': its update depends on the rows of a process"),
        (nn.Linear(4, 3), True, "without standard_ops_only"),
    ):
        options = {"standard_ops_only": standard, "verify": False, "overwrite": True}
        result = bnexport.export_training_step(model.train(), nn.functional.cross_entropy, batch, path, **options)
        with pytest.raises(UnsupportedModelError, match=match):
            keep_gradients(result.model, TrainingSession(path)._description, "world", 2, 0, str(path))


def test_a_group_needs_torch_distributed(steps):
    with pytest.raises(GroupError, match="init_process_group"):
        TrainingSession(steps.path("sgd"), group=object())
    with pytest.raises(UsageError, match="loss_reduction: got 'median', expected one of mean, sum"):
        TrainingSession(steps.path("sgd"), group=object(), loss_reduction="median")


def test_each_rank_draws_masks_of_its_own(tmp_path):
    """A network without batch norm needs no group: the graphs of two ranks run here."""
    model = nn.Sequential(nn.Linear(4, 32), nn.Dropout(0.5), nn.Linear(32, 3)).train()
    arrays = np.ones((6, 4), np.float32), np.arange(6) % 3
    path = tmp_path / "step.onnx"
    batch = tuple(torch.from_numpy(array) for array in arrays)
    bnexport.export_training_step(model, nn.functional.cross_entropy, batch, path, verify=False)
    alone = TrainingSession(path)
    state = {name: alone._state.get(name) for name in alone._state.names()} | {"seed": np.array(5)}
    losses = []
    for rank in range(3):
        graph = model_io.load(path)
        keep_gradients(graph, alone._description, "world", 3, rank, str(path))
        session = onnxruntime.InferenceSession(model_io.to_bytes(graph))
        feeds = {**state, "input": arrays[0], "target": arrays[1], "loss_weight": np.array(1.0)}
        feeds = {value.name: feeds[value.name] for value in session.get_inputs()}
        loss, seed = session.run(["loss", "seed.new"], feeds)
        assert seed == 6
        losses.append(float(loss))
        alone.load_state_dict(model.state_dict())
        alone.seed = 5 ^ (rank << 40)
        assert alone.step(arrays) == pytest.approx(losses[-1], rel=1e-6)
    assert len(set(losses)) == 3
