"""One process of a group that trains: `python parallel_worker.py RANK SIZE PORT FOLDER`.

FOLDER holds plan.json, a list of jobs, and for each step file NAME.onnx its batches NAME.npz with arrays
"STEP/RANK/POSITION". A job writes JOB_RANK.npz with losses, outputs and the state after all of its steps, or
JOB_RANK.txt with the error that stopped it.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import torch.distributed as dist

import bnexport


def main() -> None:
    rank, size, port, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    plan = json.loads((folder / "plan.json").read_text())
    timeout = datetime.timedelta(seconds=plan["timeout"])
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=size, timeout=timeout)
    for job in plan["jobs"]:
        try:
            train(rank, job, folder)
        except Exception as error:
            (folder / f"{job['name']}_{rank}.txt").write_text(f"{type(error).__name__}: {error}")
            if "dies" in job:
                os._exit(0)  # the group is broken: a barrier would wait for the other
    dist.barrier()
    os._exit(0)  # without torch's clean-up, whose threads now and then abort a process at its end


def train(rank: int, job: dict, folder: Path) -> None:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    session = bnexport.TrainingSession(
        job["path"],
        session_options=options,
        group=dist.group.WORLD,
        loss_reduction=job.get("loss_reduction", "mean"),
    )
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
        session.save_checkpoint(folder / job["save"])
    dist.barrier()
    np.savez(folder / f"{job['name']}_{rank}.npz", losses=losses, **results)


if __name__ == "__main__":
    main()
