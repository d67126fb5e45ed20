"""Training on two processes over gloo against one process with the joint batch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
from bnexport import model_io, tolerances
from bnexport.errors import GroupError, UnsupportedModelError, UsageError
from bnexport.training.graph import keep_gradients
from bnexport.training.processes import share_of_loss
from bnexport.training.session import TrainingSession
from tests.support.cluster import Cluster, run_once
from tests.training.running.parallel_jobs import run_jobs, run_jobs_once

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


def sum_loss(output, target):
    return nn.functional.cross_entropy(output, target, reduction="sum")


def ignoring_loss(output, target):
    return nn.functional.cross_entropy(output, target, ignore_index=IGNORED)


def save_batches(path: Path, dense: bool = False) -> None:
    """Those of each rank, and their joint batch as that of rank "all"."""
    arrays = {}
    for step, counts in enumerate(SPLITS):
        joint = rows(sum(counts), step, dense)
        for position, array in enumerate(joint):
            arrays[f"{step}/all/{position}"] = array
            for rank, part in enumerate(np.split(array, [counts[0]])):
                arrays[f"{step}/{rank}/{position}"] = part
    np.savez(path, **arrays)


EXPORTS = {
    "sgd": {"optimizer": "sgd", "optimizer_options": {"lr": 0.05, "momentum": 0.9, "nesterov": True},
        "clip_grad_norm": 0.5, "outputs": ["output"]},
    # A small eps would let rounding decide the sign of the first updates.
    "adamw": {"optimizer": "adamw", "optimizer_options": {"lr": 0.01, "eps": 1e-3, "groups": [{"params": "out.*",
        "lr": 0.02}], "decay_norms_and_biases": False}, "accumulate": 2},
    "sum": {"mode": "gradients", "loss": sum_loss},
    "weighted": {"mode": "gradients", "loss": ignoring_loss, "dense": True},
}  # fmt: skip


class Steps:
    """Exported steps with their batches beside them, and what two processes make of them: each made when it is asked for."""

    def __init__(self, folder: Path, cluster: Cluster) -> None:
        self.folder, self.cluster = folder, cluster

    def path(self, name: str) -> Path:
        path = self.folder / f"{name}.onnx"
        if not path.exists():
            options = dict(EXPORTS[name])
            dense, loss = options.pop("dense", False), options.pop("loss", nn.functional.cross_entropy)
            example = tuple(torch.from_numpy(array) for array in rows(4, 9, dense))
            save_batches(path.with_suffix(".npz"), dense)
            bnexport.export_training_step(net(dense), loss, example, path, verify=False, **options)
        return path

    def batches(self, name: str) -> dict[str, np.ndarray]:
        return dict(np.load(self.path(name).with_suffix(".npz")))

    def results(self, job: str) -> list[dict[str, np.ndarray]]:
        """What both processes have at the end of a job."""
        if not (self.folder / f"{job}_0.npz").exists():
            given = {"export": job, "steps": [0, len(SPLITS)], **JOBS[job]}
            name = given["export"]
            if "load" in given:
                self.results(given["load"])
            if name == "weighted":
                targets = self.batches(name)
                given["weights"] = [
                    [int((targets[f"{step}/{rank}/1"] != IGNORED).sum()) for rank in range(2)]
                    for step in range(len(SPLITS))
                ]
            self.cluster.call(2, run_jobs, [{**given, "name": job, "path": str(self.path(name))}], self.folder)
        return results(self.folder, job)


JOBS = {
    "sgd": {"save": "sgd"},
    "adamw": {},
    "begun": {"export": "adamw", "steps": [0, 3], "save": "begun"},
    "resumed": {"export": "adamw", "steps": [3, len(SPLITS)], "load": "begun"},
    "sum": {"gradients": True, "loss_reduction": "sum"},
    "weighted": {"gradients": True},
}


def results(folder: Path, job: str) -> list[dict[str, np.ndarray]]:
    for rank in range(2):
        error = folder / f"{job}_{rank}.txt"
        assert not error.exists(), error.read_text()
    return [dict(np.load(folder / f"{job}_{rank}.npz")) for rank in range(2)]


@pytest.fixture(scope="module")
def steps(cluster: Cluster, tmp_path_factory) -> Steps:
    return Steps(tmp_path_factory.mktemp("steps"), cluster)


def assert_close(got: np.ndarray, expected: np.ndarray, what: str) -> None:
    """Two float32 computations of one value: twice the bound of whole models."""
    if not np.issubdtype(expected.dtype, np.floating):
        assert np.array_equal(got, expected), what
        return
    bound = 2 * tolerances.model("float32", expected).atol
    np.testing.assert_allclose(got, expected, rtol=0, atol=bound, err_msg=what)


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_two_processes_make_the_step_of_the_joint_batch(steps, name):
    first, second = steps.results(name)
    alone = TrainingSession(steps.path(name))
    batches = steps.batches(name)
    for step, counts in enumerate(SPLITS):
        loss = alone.step((batches[f"{step}/all/0"], batches[f"{step}/all/1"]))
        assert first["losses"][step] == pytest.approx(loss, rel=1e-5)
        for key, output in alone.outputs.items():
            parts = np.split(output, [counts[0]])
            for rank, part in enumerate(parts):
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
    batches = steps.batches(name)
    alone = TrainingSession(steps.path(name))
    for step in range(len(SPLITS)):
        loss, gradients = alone.gradients((batches[f"{step}/all/0"], batches[f"{step}/all/1"]))
        assert first["losses"][step] == pytest.approx(loss, rel=1e-5)
        for key, gradient in gradients.items():
            assert_close(first[f"{step}/{key}"], gradient, f"{key} in step {step}")


def test_what_goes_wrong_is_an_error_on_every_process(steps, tmp_path):
    """Ranks that disagree, a refused batch and a killed process; after all but the last the group is whole."""
    path = str(steps.path("sgd"))
    bad = tmp_path / "bad.onnx"
    for suffix in (".onnx", ".eval.onnx", ".safetensors"):
        (tmp_path / f"bad{suffix}").write_bytes((steps.folder / f"sgd{suffix}").read_bytes())
    arrays = steps.batches("sgd")
    arrays["0/1/0"] = arrays["0/1/0"].astype(np.float64)
    arrays["1/1/0"] = arrays["1/1/0"][:0]
    arrays["4/1/0"] = np.full_like(arrays["4/1/0"], np.inf)
    np.savez(tmp_path / "bad.npz", **arrays)
    outcomes = run_once(
        2,
        run_jobs_once,
        [
            {"name": "rate", "path": path, "steps": [0, 1], "other_rate": 1},
            {"name": "state", "path": path, "steps": [0, 1], "other_state": 1},
            {"name": "refused", "path": str(bad), "steps": [0, 1]},
            {"name": "empty", "path": str(bad), "steps": [1, 2]},
            {"name": "nan", "path": str(bad), "steps": [4, 5]},
            {"name": "good", "path": path, "steps": [0, 2]},
            {"name": "killed", "path": path, "steps": [0, 4], "dies": [1, 2]},
        ],
        tmp_path,
        timeout=200,  # less than the group's: the connections of a killed process are closed
    )
    assert outcomes == ["done", None]

    def errors(job: str) -> list[str]:
        return [(tmp_path / f"{job}_{rank}.txt").read_text() for rank in range(2)]

    assert all(error.startswith("GroupError: learning_rate: the ranks have 0.05, 7;") for error in errors("rate"))
    assert all("the state or the graph of rank 1 is not that of rank 0" in error for error in errors("state"))
    assert errors("refused")[0].startswith("GroupError: the batch of rank 1 was refused there")
    assert errors("refused")[1].startswith("UsageError: image: got an array of float64")
    assert errors("empty")[0].startswith("GroupError: the batch of rank 1 was refused there")
    assert errors("empty")[1].startswith("UsageError: image: got an empty batch")
    assert all(error.startswith("DivergedError: the loss of rank") for error in errors("nan"))
    assert results(tmp_path, "good")
    killed = (tmp_path / "killed_0.txt").read_text()
    assert killed.startswith("GroupError: ") and "rank 0" in killed
    assert not (tmp_path / "killed_1.txt").exists()


def test_shares_of_the_joint_loss():
    rows = np.array([3.0, 1.0])
    assert [share_of_loss(rows, rank, mean=True) for rank in (0, 1)] == [0.75, 0.25]
    assert share_of_loss(np.array([0.0, 1.0]), 0, mean=True) == 0.0
    assert share_of_loss(rows, 0, mean=False) == 1.0
    for wrong in ([-1.0, 1.0], [0.0, 0.0], [np.nan, 1.0]):
        with pytest.raises(GroupError, match=r"weight: the ranks have .*, expected numbers >= 0, one of them > 0"):
            share_of_loss(np.array(wrong), 0, mean=True)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.BatchNorm1d(4), nn.Linear(4, 3)
        self.register_buffer("largest", torch.zeros(4))

    def forward(self, x):
        self.largest = torch.maximum(self.largest, x.detach().amax(0))
        return self.out(self.norm(x) / (1 + self.largest))


@pytest.mark.parametrize(
    ("model", "options", "match"),
    [
        (Counting, {}, "buffer 'largest': its update depends on the rows of a process"),
        (lambda: nn.Sequential(nn.Linear(4, 3)), {"standard_ops_only": True}, "without standard_ops_only"),
    ],
    ids=["local-buffer", "standard-ops"],
)
def test_steps_that_would_differ_between_processes_are_refused(tmp_path, model, options, match):
    batch = (torch.randn(4, 4), torch.randint(0, 3, (4,)))
    path = tmp_path / "step.onnx"
    result = bnexport.export_training_step(
        model().train(), nn.functional.cross_entropy, batch, path, verify=False, **options
    )
    description = TrainingSession(path)._description
    with pytest.raises(UnsupportedModelError, match=match):
        keep_gradients(result.model, description, "world", 2, 0, str(path))


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
