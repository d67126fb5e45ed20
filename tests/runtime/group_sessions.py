"""What the processes of a group do in test_communicator.py: register the group, run a session, and say what came out."""

import os
from typing import Any

import numpy as np
import torch.distributed as dist

from bnexport.runtime.groups import register_group, unregister_group
from tests.support.cluster import join
from tests.support.node_models import run, session

Steps = list[dict[str, np.ndarray]]


def run_steps(group: Any, models: list[bytes], feeds: list[Steps]) -> Steps | str:
    """The outputs of each step of this rank's model, or the error that ended them."""
    rank = dist.get_rank(group)
    register_group("world", group)
    try:
        opened = session(models[rank % len(models)])
        return [run(opened, step) for step in feeds[rank]]
    except Exception as error:
        return str(error)
    finally:
        unregister_group("world")


def run_until_a_peer_dies(rank: int, size: int, port: int, model: bytes, step: dict[str, np.ndarray]) -> Steps | str:
    """Two steps, before the second of which rank 1 is gone."""
    join(rank, size, port)
    register_group("world", dist.group.WORLD)
    opened = session(model)
    run(opened, step)
    if rank == 1:
        os._exit(0)
    try:
        return [run(opened, step)]
    except Exception as error:
        return str(error)
