"""What one process of a group does in test_parallel.py: train as a list of jobs says.

A job names a step file NAME.onnx, beside which NAME.npz holds its batches as arrays "STEP/RANK/POSITION". It writes
JOB_RANK.npz with losses, outputs and the state after all of its steps, or JOB_RANK.txt with the error that stopped it.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch.distributed as dist

import bnexport
from bnexport.sync_bn import distributed
from tests.support.cluster import join


def run_jobs(group: Any, jobs: list[dict], folder: Path) -> None:
    """All jobs, one after the other, in a group that outlives them."""
    rank = dist.get_rank(group)
    for job in jobs:
        try:
            train(rank, group, job, folder)
        except Exception as error:
            (folder / f"{job['name']}_{rank}.txt").write_text(f"{type(error).__name__}: {error}")


def run_jobs_once(rank: int, size: int, port: int, jobs: list[dict], folder: Path) -> str:
    """The same in a group of their own, which the last job may break."""
    join(rank, size, port)
    run_jobs(dist.group.WORLD, jobs, folder)
    return "done"


def train(rank: int, group: Any, job: dict, folder: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = bnexport.TrainingSession(
        job["path"],
        session_options=options,
        group=group,
        loss_reduction=job.get("loss_reduction", "mean"),
    )
    assert distributed.published_name(distributed.name_of(group)) in (None, "world"), "exports would write the name"
    if "load" in job:
        session.load_checkpoint(folder / job["load"])
    if job.get("other_state") == rank:
        session.load_state_dict({"out.bias": np.full(3, 7.0, np.float32)}, strict=False)
    if job.get("other_rate") == rank:
        session.learning_rate = 7.0
    batches = np.load(Path(job["path"]).with_suffix(".npz"))
    results, losses = {}, []
    for step in range(*job["steps"]):
        if job.get("dies") == [rank, step]:
            os.kill(os.getpid(), signal.SIGKILL)
        arrays = [batches[f"{step}/{rank}/{position}"] for position in range(len(session.input_names))]
        weight = job["weights"][step][rank] if "weights" in job else None
        if job.get("gradients"):
            loss, gradients = session.gradients(arrays, weight=weight)
            results |= {f"{step}/{name}": array for name, array in gradients.items()}
        else:
            loss = session.step(arrays, weight=weight)
        losses.append(loss)
        results |= {f"{step}/{name}": array for name, array in session.outputs.items()}
    results |= {f"state/{name}": session._state.get(name) for name in session._state.names()}
    if rank == 0 and "save" in job:
        session.save_checkpoint(folder / job["save"], overwrite=True)
    dist.barrier(group)
    np.savez(folder / f"{job['name']}_{rank}.npz", losses=losses, **results)
