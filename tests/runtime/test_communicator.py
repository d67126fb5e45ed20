"""Groups of real processes over gloo, against the joint batch in float64."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import kernel_oracle as oracle
import numpy as np
import pytest
from node_models import forward_feeds, forward_model, grad_model, run

from bnexport import tolerances
from bnexport.errors import GroupError, UsageError
from bnexport.runtime import communicator
from bnexport.runtime.library import get_library_path

WORKER = Path(__file__).parent / "group_worker.py"


def run_group(
    folder: Path, size: int, feeds, *, model: bytes | list[bytes], steps: int = 1, timeout: int = 60, dies=None
):
    """Runs `size` processes; returns their outputs as a list of dicts, or error texts where they failed."""
    for rank, one in enumerate(model if isinstance(model, list) else [model]):
        (folder / (f"model_{rank}.onnx" if isinstance(model, list) else "model.onnx")).write_bytes(one)
    (folder / "options.json").write_text(json.dumps({"steps": steps, "timeout": timeout, "dies": dies}))
    for rank in range(size):
        np.savez(folder / f"feeds_{rank}.npz", **feeds[rank])
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "BNEXPORT_LIBRARY": get_library_path(),
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(rank), str(size), str(folder)],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    errors = [process.communicate(timeout=180)[1] for process in processes]
    results = []
    for rank, process in enumerate(processes):
        assert process.returncode == 0, f"rank {rank}: exit code {process.returncode}: {errors[rank][-2000:]}"
        error = folder / f"error_{rank}.txt"
        outputs = folder / f"outputs_{rank}.npz"
        results.append(error.read_text() if error.exists() else dict(np.load(outputs)) if outputs.exists() else None)
    return results


def check_forward(results, xs, common, step, **options):
    expected = oracle.forward(
        xs, common["weight"], common["bias"], common["running_mean"], common["running_var"], **options
    )
    weight = float(np.abs(common["weight"]).max())
    for rank, (got, want) in enumerate(zip(results, expected, strict=True)):
        bound = tolerances.forward(
            "float32", condition=oracle.condition_of(xs[rank], want.mean, want.invstd), weight=weight
        )
        what = f"rank {rank} {options}"
        oracle.assert_within(got[f"{step}/output"], want.y, bound, f"output of {what}")
        statistic = tolerances.statistic("float32", scale=4.0)
        for name in ("running_mean", "running_var"):
            oracle.assert_within(got[f"{step}/{name}_out"], getattr(want, name), statistic, f"{name} of {what}")
        oracle.assert_within(got[f"{step}/saved_mean"], want.mean, statistic, f"saved_mean of {what}")


# Every step of one group of processes is another split of the batch; one start of Python serves all.
SPLITS = {
    2: [
        ((3, 5, 4, 6), (3, 5, 4, 6)),
        ((1, 5, 4, 6), (6, 5, 4, 6)),
        ((2, 5, 3, 3), (2, 5, 8, 7)),
        ((0, 5, 4, 6), (3, 5, 4, 6)),
        ((0, 5, 4, 6), (0, 5, 4, 6)),
    ],
    3: [((2, 5, 4, 4), (1, 5, 9, 9), (0, 5, 4, 4))],
}


@pytest.mark.parametrize(("size", "stats_mode"), [(2, "exact"), (2, "default"), (2, "N"), (3, "exact"), (3, "default")])
def test_forward_equals_joint_batch(tmp_path, size, stats_mode):
    rng = np.random.default_rng(size)
    common = forward_feeds(rng, (1, 5, 1, 1))
    feeds = [{} for _ in range(size)]
    for step, shapes in enumerate(SPLITS[size]):
        for rank, shape in enumerate(shapes):
            feeds[rank] |= {f"{step}/{k}": v for k, v in common.items()}
            feeds[rank][f"{step}/input"] = (rng.normal(size=shape) + rank).astype(np.float32)
    model = forward_model(group="world", group_size=size, stats_mode=stats_mode, momentum=0.25)
    steps = len(SPLITS[size])
    results = run_group(tmp_path, size, feeds, model=model, steps=steps)
    for step in range(steps):
        xs = [feeds[rank][f"{step}/input"] for rank in range(size)]
        assert not any(isinstance(result, str) for result in results), results
        check_forward(results, xs, common, step, stats_mode=stats_mode, momentum=0.25)


@pytest.mark.parametrize(
    ("size", "stats_mode", "reduction"),
    [(2, "exact", "sum"), (2, "N", "mean"), (3, "default", "local"), (3, "exact", "mean")],
)
def test_backward_equals_joint_batch(tmp_path, size, stats_mode, reduction):
    rng = np.random.default_rng(10 + size)
    shapes = [(3, 5, 4, 6), (1, 5, 7, 2), (0, 5, 4, 6)][:size]
    xs = [(rng.normal(size=shape) + rank).astype(np.float32) for rank, shape in enumerate(shapes)]
    dys = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    weight = rng.normal(size=5).astype(np.float32)
    statistics = oracle.forward(xs, weight, stats_mode=stats_mode)[0]
    mean, invstd = statistics.mean.astype(np.float32), statistics.invstd.astype(np.float32)
    feeds = [
        {"0/grad_output": dy, "0/input": x, "0/weight": weight, "0/saved_mean": mean, "0/saved_invstd": invstd}
        for dy, x in zip(dys, xs, strict=True)
    ]
    model = grad_model(group="world", group_size=size, stats_mode=stats_mode, grad_reduction=reduction)
    results = run_group(tmp_path, size, feeds, model=model)
    expected = oracle.backward(dys, xs, weight, mean, invstd, stats_mode=stats_mode, grad_reduction=reduction)
    scale = float(np.abs(weight * invstd).max() * max(np.abs(dy).max(initial=0) for dy in dys))
    for rank, (got, want) in enumerate(zip(results, expected, strict=True)):
        bound = tolerances.backward_input("float32", condition=4.0, scale=scale)
        oracle.assert_within(got["0/grad_input"], want.dx, bound, f"grad_input of rank {rank}")
        for name, value, absolute in (
            ("grad_weight", want.dweight, want.absolute_dweight),
            ("grad_bias", want.dbias, want.absolute_dbias),
        ):
            bound = tolerances.backward_sum("float32", condition=4.0, absolute_sum=float(absolute.max()))
            oracle.assert_within(got[f"0/{name}"], value, bound, f"{name} of rank {rank}")


def test_many_channels_take_a_second_collective(tmp_path):
    rng = np.random.default_rng(3)
    common = forward_feeds(rng, (1, 3000, 1, 1))
    xs = [rng.normal(size=(rows, 3000, 1, 2)).astype(np.float32) for rows in (2, 3)]
    feeds = [{f"0/{k}": v for k, v in (common | {"input": x}).items()} for x in xs]
    results = run_group(tmp_path, 2, feeds, model=forward_model(group="world", group_size=2))
    check_forward(results, xs, common, 0)


def test_different_channels_are_an_error_on_every_rank(tmp_path):
    rng = np.random.default_rng(4)
    feeds = [{f"0/{k}": v for k, v in forward_feeds(rng, (2, channels, 3, 3)).items()} for channels in (4, 6)]
    results = run_group(tmp_path, 2, feeds, model=forward_model(group="world", group_size=2))
    assert "number of channels of rank 1: got 6, expected 4" in results[0], results
    assert "number of channels of rank 0: got 4, expected 6" in results[1], results


def test_different_nodes_are_an_error_on_every_rank(tmp_path):
    rng = np.random.default_rng(5)
    feeds = [{f"0/{k}": v for k, v in forward_feeds(rng, (2, 4, 3, 3)).items()} for _ in range(2)]
    models = [forward_model(group="world", group_size=2, name=name) for name in ("layer1", "layer2")]
    results = run_group(tmp_path, 2, feeds, model=models)
    assert all("not running the same node: node name" in result for result in results), results


def test_group_size_differs_from_registered_group(tmp_path):
    rng = np.random.default_rng(6)
    feeds = [{f"0/{k}": v for k, v in forward_feeds(rng, (2, 4, 3, 3)).items()} for _ in range(2)]
    results = run_group(tmp_path, 2, feeds, model=forward_model(group="world", group_size=3))
    assert all("attribute 'group_size': got 3, expected 2" in result for result in results), results


def test_dead_peer_is_an_error_within_the_timeout(tmp_path):
    rng = np.random.default_rng(7)
    common = forward_feeds(rng, (2, 4, 3, 3))
    feeds = [{f"{step}/{k}": v for k, v in common.items() for step in range(2)} for _ in range(2)]
    start = time.monotonic()
    results = run_group(
        tmp_path, 2, feeds, model=forward_model(group="world", group_size=2), steps=2, timeout=5, dies=[1, 1]
    )
    assert results[1] is None
    assert "MMCVSyncBatchNorm" in results[0] and "the collective failed" in results[0], results
    assert time.monotonic() - start < 60


def test_unregistered_group_is_an_error_and_says_what_to_call():
    feeds = forward_feeds(np.random.default_rng(8), (2, 4, 3, 3))
    with pytest.raises(Exception, match=r"bn1.*'nowhere'.*bnexport\.register_group"):
        run(forward_model(group="nowhere", group_size=2), feeds)


def test_unregistered_group_does_not_matter_in_inference():
    feeds = forward_feeds(np.random.default_rng(8), (2, 4, 3, 3))
    run(forward_model(group="nowhere", group_size=2, training_mode=0), feeds)


@pytest.mark.parametrize("name", ["", None, 3, "a\0b"])
def test_bad_group_names(name):
    with pytest.raises(UsageError, match="register_group: name"):
        communicator.register_group(name)


def test_without_torch_distributed():
    with pytest.raises(GroupError, match="init_process_group"):
        communicator.register_group("world")
    with pytest.raises(GroupError, match="unregister_group"):
        communicator.unregister_group("world")
