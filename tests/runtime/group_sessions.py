"""What the processes of a group do in test_communicator.py: register the group, run a session, and say what came out."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import onnxruntime as ort
import torch.distributed as dist

from bnexport.native.library import register
from bnexport.runtime.groups import register_group, unregister_group
from tests.support.cluster import join

Steps = list[dict[str, np.ndarray]]


def run_steps(group: Any, models: list[bytes], feeds: list[Steps]) -> Steps | str:
    """The outputs of each step of this rank's model, or the error that ended them."""
    rank = dist.get_rank(group)
    register_group("world", group)
    try:
        session = _open(models[rank % len(models)])
        return [_run(session, step) for step in feeds[rank]]
    except Exception as error:
        return str(error)
    finally:
        unregister_group("world")


def run_until_a_peer_dies(rank: int, size: int, port: int, model: bytes, step: dict[str, np.ndarray]) -> Steps | str:
    """Two steps, before the second of which rank 1 is gone."""
    join(rank, size, port)
    register_group("world", dist.group.WORLD)
    session = _open(model)
    _run(session, step)
    if rank == 1:
        os._exit(0)
    try:
        return [_run(session, step)]
    except Exception as error:
        return str(error)


def _open(model: bytes) -> ort.InferenceSession:
    options = ort.SessionOptions()
    register(options)
    return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def _run(session: ort.InferenceSession, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))
