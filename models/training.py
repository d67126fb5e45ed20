"""Trains a network with sync batch norm on several processes (gloo, DistributedDataParallel)."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from models.digits import Digits

TIMEOUT = datetime.timedelta(seconds=300)  # a busy machine may start the second process late


def train(
    build: Callable[[], nn.Module],
    digits: Digits,
    checkpoint: Path,
    *,
    epochs: int,
    batch: int = 32,
    processes: int = 2,
    seed: int = 0,
) -> None:
    """Trains on `processes` processes and saves rank 0's state_dict to `checkpoint`.

    batch: images a process and step; the last step of an epoch is uneven, which sync batch norm
    takes as it is.
    """
    # Port 0: the system chooses one that is free.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    mp.spawn(_work, (processes, store.port, build, digits, checkpoint, epochs, batch, seed), nprocs=processes)


def _work(
    rank: int,
    processes: int,
    port: int,
    build: Callable[[], nn.Module],
    digits: Digits,
    checkpoint: Path,
    epochs: int,
    batch: int,
    seed: int,
) -> None:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // processes))
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=processes, timeout=TIMEOUT)
    torch.manual_seed(seed)
    model = nn.parallel.DistributedDataParallel(build())
    images, labels = torch.from_numpy(digits.train_images), torch.from_numpy(digits.train_labels)
    order = np.random.default_rng(seed)
    shift = np.random.default_rng(seed + 1 + rank)
    steps = epochs * -(-len(images) // (batch * processes))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps)
    loss_of = nn.CrossEntropyLoss()
    for epoch in range(epochs):
        total, seen = 0.0, 0
        for indices in _steps(order.permutation(len(images)), batch * processes):
            mine = indices[rank::processes]
            optimizer.zero_grad()
            loss = loss_of(model(_shifted(images[mine], shift)), labels[mine])
            loss.backward()
            optimizer.step()
            schedule.step()
            total, seen = total + loss.item() * len(mine), seen + len(mine)
        if rank == 0:
            print(f"  epoch {epoch + 1:2d}/{epochs}  loss {total / seen:.4f}", flush=True)
    if rank == 0:
        torch.save(model.module.state_dict(), checkpoint)
    dist.barrier()
    # DDP holds the group as well. Dropped after the group's end, it may wait for a thread that waits for Python.
    del model
    dist.destroy_process_group()


def _steps(order: np.ndarray, size: int) -> list[np.ndarray]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def _shifted(images: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Each image moved by up to one pixel; the border repeats the background."""
    padded = nn.functional.pad(images, (1, 1, 1, 1), mode="replicate")
    height, width = images.shape[2:]
    offsets = generator.integers(0, 3, (len(images), 2))
    return torch.stack([image[:, y : y + height, x : x + width] for image, (y, x) in zip(padded, offsets)])
