"""One process of a group: runs a script of session calls and writes what they returned.

Started by test_communicator.py as `python group_worker.py RANK SIZE FOLDER`. The folder holds
model.onnx, feeds_R.npz with arrays "STEP/NAME", options.json; this writes outputs_R.npz or error_R.txt.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import sys
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch.distributed as dist

from bnexport.runtime.communicator import register_group
from bnexport.runtime.library import register

sys.path.insert(0, str(Path(__file__).parents[1] / "custom_ops"))
from providers import open_session


def main() -> None:
    rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    options = json.loads((folder / "options.json").read_text())
    timeout = datetime.timedelta(seconds=options.get("timeout", 60))
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout)
    register_group("world", dist.group.WORLD)
    model = folder / f"model_{rank}.onnx"
    session_options = ort.SessionOptions()
    register(session_options)
    session = open_session(str(model if model.exists() else folder / "model.onnx"), session_options)
    feeds = np.load(folder / f"feeds_{rank}.npz")
    names = [output.name for output in session.get_outputs()]
    results = {}
    try:
        for step in range(options["steps"]):
            if options.get("dies") == [rank, step]:
                os._exit(0)
            values = session.run(None, {i.name: feeds[f"{step}/{i.name}"] for i in session.get_inputs()})
            results |= {f"{step}/{name}": value for name, value in zip(names, values, strict=True)}
    except Exception as error:
        (folder / f"error_{rank}.txt").write_text(str(error))
        os._exit(0)  # the group is broken: a barrier would wait for the others
    np.savez(folder / f"outputs_{rank}.npz", **results)
    # Leave together, and without torch's clean-up, whose threads now and then abort a process at its end.
    with contextlib.suppress(RuntimeError):
        dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    main()
