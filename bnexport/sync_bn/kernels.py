"""The compiled kernels behind the C API, on a CPU or a CUDA device if its library is there: one struct a direction.

Same interface as torch_operations.py. Tensors that are neither contiguous nor channels last go through one contiguous
copy. On a CUDA device the work is enqueued on torch's current stream, and nothing waits for the device.

A layer of a small image takes as long as twenty calls of torch from Python. So what calls on tensors of one shape,
layout, type and device share is prepared once (`Kernels`), and a call copies a struct that knows the sizes.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import math
import mmap
import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from bnexport import torch_versions
from bnexport.errors import LibraryError, UsageError
from bnexport.native import capi, cuda, library
from bnexport.sync_bn.torch_operations import DTYPES, statistics_type

Tensor = torch.Tensor

# "torch" does without the compiled kernels. Read once: a look into the environment costs as much as an allocation.
backend = os.environ.get("BNEXPORT_TORCH_BACKEND", "")

PLAIN = (Tensor, torch.nn.Parameter)
_DENSE, _is_wrapped, _is_grad_batched = torch.strided, torch_versions.is_wrapped, torch_versions.is_grad_batched

# Bytes from which an output is put on huge pages.
_LARGE = 4 << 20


@functools.cache
def _is_loaded() -> bool:
    """Whether there is a library; lend it torch's OpenMP runtime. Raises LibraryError for one that is not bnexport's."""
    if library.find("ops") is None:
        return False
    capi.lend_openmp(_openmp_parallel())
    return True


def _openmp_parallel() -> int:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch uses; 0 if there is none.

    Looked up through torch's own library: scikit-learn, say, brings another runtime along, and the
    spinning threads of two cost more than they do (88 ms for a batch that takes 6).
    """
    if not sys.platform.startswith("linux") or "OpenMP" not in torch.__config__.parallel_info():
        return 0
    return torch_versions.openmp_parallel()


@functools.cache
def _sees_devices() -> bool:
    """Whether there is a CUDA library and it sees a device, for a tensor that torch has put on one; warn once if it sees
    none. Raises LibraryError for a library that is not bnexport's.
    """
    # AMD's devices have the type "cuda", too.
    if torch.version.hip is not None or library.find("cuda") is None:
        return False
    reason = cuda.no_device()
    if reason is not None:
        warnings.warn(
            f"sync batch norm on CUDA uses torch's own operations, though bnexport's CUDA library is installed: {reason}; "
            "update the driver, or build the library with an older CUDA (docs/gpu.md)",
            RuntimeWarning,
            stacklevel=2,
        )
    return reason is None


# By CUDA device, whether the library has kernels for it. What may pass, such as a device without free memory, is not kept.
_has_kernels: dict[int, bool] = {}


def _runs_on(device: int) -> bool:
    """Whether the library has kernels for a CUDA device that can be used; warn why torch operations are used instead."""
    if device in _has_kernels:
        return _has_kernels[device]
    try:
        cuda.check_device(device)
    except LibraryError as error:
        warnings.warn(
            f"sync batch norm on cuda:{device} uses torch's own operations: {error}", RuntimeWarning, stacklevel=2
        )
        if isinstance(error, cuda.NoKernelsError):
            _has_kernels[device] = False
        return False
    _has_kernels[device] = True
    return True


def usable(device: torch.device) -> bool:
    """Whether the kernels run on a device, and shall be used."""
    if backend == "torch" or not _is_loaded():
        return False
    return device.type == "cpu" or (device.type == "cuda" and _sees_devices() and _runs_on(device.index))


def is_plain(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor lie in memory as they are. A transform's wrapper has the type Tensor, even after
    the transform; so has a batch of gradients, and a view that negates what it reads.
    """
    return (
        type(tensor) in PLAIN
        and tensor.layout is _DENSE
        and not (tensor.is_neg() or _is_wrapped(tensor) or _is_grad_batched(tensor))
    )


def kernels_for(x: Tensor) -> Kernels | None:
    """Return the kernels for a dense tensor; None if they do not support its layout, type or device, or are not used."""
    if backend == "torch":
        return None
    try:
        return _prepare(x.shape, x.stride(), x.dtype, x.device)
    except _UnusableError:
        return None


class _UnusableError(Exception):
    """A device on which kernels are not used now; the cache keeps no exception."""


@functools.lru_cache(maxsize=4096)
def _prepare(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Kernels | None:
    if not usable(device):
        raise _UnusableError
    x = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    if x.dim() < 2 or dtype not in DTYPES:
        return None
    layout = "NCS" if x.is_contiguous() else "NSC"
    if layout == "NSC" and not x.permute(0, *range(2, x.dim()), 1).is_contiguous():
        return None
    S = statistics_type(dtype)
    types = [capi.DTYPES[str(it).removeprefix("torch.")] for it in (dtype, S)]
    sizes = {
        "dtype": types[0],
        "stats_dtype": types[1],
        "layout": capi.LAYOUTS[layout],
        "N": shape[0],
        "C": shape[1],
        "S": math.prod(shape[2:]),
    }
    forward, backward = capi.forward_params(**sizes), capi.backward_params(**sizes)
    if device.type == "cpu":
        large = x.numel() * x.element_size() >= _LARGE
        return Kernels(device, shape[1:2], S, forward, backward, capi.run, large)
    with torch.cuda.device(device):
        size = cuda.workspace_size(forward)  # serves both directions
    return Kernels(device, shape[1:2], S, forward, backward, functools.partial(_run_on_device, device, size), False)


@dataclasses.dataclass(frozen=True, slots=True)
class Kernels:
    """The kernels for tensors of one shape, layout, type and device.

    channels, statistics: shape and type of vectors that the kernels read where they lie. large: outputs belong on huge
    pages. alike: by number of tensors, whether others are like those that were read last.
    """

    device: torch.device
    channels: torch.Size
    statistics: torch.dtype
    forward_params: Any
    backward_params: Any
    run: Callable[..., None]
    large: bool
    alike: dict[int, Callable[..., bool]] = dataclasses.field(default_factory=dict)

    def read(self, x: Tensor, vectors: Sequence[Tensor | None], *gradient: Tensor) -> bool:
        """Whether the kernels read tensors where they lie. gradient: dy and the saved mean in a backward."""
        tensors = (x, *vectors, *gradient)
        alike = self.alike.get(len(tensors))
        if alike is not None and alike(*tensors):
            return True
        # A saved input may have changed: `tensor.data = ...`.
        if not (
            is_plain(x)
            and kernels_for(x) is self
            and all(map(self._read, vectors))
            and (not gradient or self._fit(x, *gradient))
        ):
            return False
        given = tuple(tensor for tensor in tensors if tensor is not None)
        if len(given) == len(tensors):
            self.alike[len(tensors)] = torch_versions.alike(given)
        return True

    def _read(self, vector: Tensor | None) -> bool:
        return vector is None or (
            is_plain(vector)
            and vector.dtype is self.statistics
            and vector.shape == self.channels
            and vector.device == self.device
            and vector.is_contiguous()
        )

    def _fit(self, x: Tensor, dy: Tensor, mean: Tensor) -> bool:
        """Whether a gradient and a saved statistic belong to an input."""
        return (
            is_plain(dy)
            and dy.shape == x.shape
            and dy.dtype is x.dtype
            and dy.device == self.device
            and mean.shape == self.channels
        )

    def vector(self, found: Tensor | None) -> Tensor | None:
        """Return a vector, or a copy that the kernels read."""
        return None if found is None else found.detach().to(self.statistics).contiguous()

    def forward_row(self, x: Tensor, stats_mode: str) -> Tensor:
        """Compute this process's row [weight, mean.., spread..] (2 C + 1,) float64."""
        return self._row("moments", _filled(self.forward_params, x, stats_mode))

    def forward(
        self,
        x: Tensor,
        vectors: Sequence[Tensor | None],
        training: bool,
        momentum: float,
        eps: float,
        stats_mode: str,
        rows: Tensor | None,
        in_place: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
        """Compute y, new running statistics, saved mean and invstd.

        vectors: running_mean, running_var, weight, bias. rows: the group's, or None for one process. in_place: new
        running statistics are the old ones, changed if `training`.
        """
        old_mean, old_var, weight, bias = vectors
        y, double = self._output(x), torch.float64
        # new_empty takes three times as long.
        mean = x.new_empty(self.channels, dtype=double) if weight is None else torch.empty_like(weight, dtype=double)
        invstd = torch.empty_like(mean)
        params = _filled(self.forward_params, x, stats_mode)
        params.y, params.weight, params.bias = y.data_ptr(), _pointer(weight), _pointer(bias)
        params.running_mean, params.running_var = _pointer(old_mean), _pointer(old_var)
        params.saved_mean, params.saved_invstd = mean.data_ptr(), invstd.data_ptr()
        params.training, params.momentum, params.eps = training, momentum, eps
        new_mean, new_var = old_mean, old_var
        if not in_place:
            new_mean, new_var = (None if old is None else torch.empty_like(old) for old in (old_mean, old_var))
        if training or not in_place:
            params.running_mean_out, params.running_var_out = _pointer(new_mean), _pointer(new_var)
        if rows is not None:
            params.group_size, params.gathered = rows.shape[0], rows.data_ptr()
        self.run("forward", params)
        return y, new_mean, new_var, mean, invstd

    def backward_row(self, dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, stats_mode: str) -> Tensor:
        """Compute this process's row [weight, sum dy.., sum dy * x_hat..] (2 C + 1,) float64."""
        params = _filled(self.backward_params, x, stats_mode)
        params.dy, params.saved_mean, params.saved_invstd = dy.data_ptr(), mean.data_ptr(), invstd.data_ptr()
        return self._row("backward_moments", params)

    def backward(
        self,
        dy: Tensor,
        x: Tensor,
        weight: Tensor | None,
        mean: Tensor,
        invstd: Tensor,
        training: bool,
        output_mask: Sequence[bool],
        stats_mode: str,
        grad_reduction: str,
        row: Tensor | None,
        rows: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Compute dx, dweight, dbias, None if not needed. row, rows: this process's and the group's, or None for one
        process.
        """
        dx = self._output(x) if output_mask[0] else None
        dweight = torch.empty_like(mean, dtype=self.statistics) if output_mask[1] else None
        dbias = torch.empty_like(mean, dtype=self.statistics) if output_mask[2] else None
        params = _filled(self.backward_params, x, stats_mode)
        params.dy, params.dx, params.weight = dy.data_ptr(), _pointer(dx), _pointer(weight)
        params.saved_mean, params.saved_invstd = mean.data_ptr(), invstd.data_ptr()
        params.dweight, params.dbias, params.training = _pointer(dweight), _pointer(dbias), training
        params.grad_reduction = capi.GRAD_REDUCTIONS[grad_reduction]
        if rows is not None:
            params.group_size, params.gathered = rows.shape[0], rows.data_ptr()
        params.local_moments = _pointer(row)
        self.run("backward", params)
        return dx, dweight, dbias

    def _output(self, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        if self.large:
            _use_huge_pages(y)
        return y

    def _row(self, name: str, params: Any) -> Tensor:
        row = torch.empty(2 * self.channels[0] + 1, dtype=torch.float64, device=self.device)
        self.run(name, params, row.data_ptr())
        return row


def _run_on_device(device: torch.device, size: int, name: str, params: Any, *row: int) -> None:
    """Enqueue a kernel on torch's current stream of a CUDA device; as `capi.run` otherwise."""
    if torch.cuda.current_device() != device.index:
        with torch.cuda.device(device):
            return _run_on_device(device, size, name, params, *row)
    stream = torch_versions.cuda_stream(device.index)
    workspace = _workspace(device, stream, size)
    cuda.run(name, params, *row, workspace.data_ptr(), workspace.numel(), stream)
    return None


class _Workspaces(threading.local):
    """The workspaces of a thread by device and stream. A call is several kernels, between which no call of another thread may
    use their workspace.
    """

    def __init__(self) -> None:
        self.kept: dict[tuple[int, int], Tensor] = {}


_workspaces = _Workspaces()


def _workspace(device: torch.device, stream: int, size: int) -> Tensor:
    if torch.cuda.is_current_stream_capturing():
        return torch.empty(size, dtype=torch.uint8, device=device)  # the graph's, which may run on any stream
    kept = _workspaces.kept.get((device.index, stream))
    if kept is None or kept.numel() < size:
        kept = torch.empty(size, dtype=torch.uint8, device=device)
        _workspaces.kept[device.index, stream] = kept
    return kept


def _filled(sizes: Any, x: Tensor, stats_mode: str) -> Any:
    """Return a copy of a struct, with x."""
    params = type(sizes).from_buffer_copy(sizes)
    params.x, params.stats_mode, params.threads = x.data_ptr(), capi.STATS_MODES[stats_mode], torch.get_num_threads()
    return params


def _pointer(tensor: Tensor | None) -> int:
    """Return the address of a tensor's data, 0 for None. Raise UsageError for a tensor without memory: to the kernels
    address 0 means an absent vector.
    """
    if tensor is None:
        return 0
    address = tensor.data_ptr()
    if address == 0 and tensor.numel() != 0:
        raise UsageError(
            f"got a tensor of shape {tuple(tensor.shape)} without memory, expected its data in memory:"
            " was its storage freed, as FSDP does outside forward?"
        )
    return address


def _use_huge_pages(y: Tensor) -> None:
    """Ask for huge pages under an output that nothing is written to yet.

    The allocator returns large blocks to the system, so that a kernel that writes at memory speed
    spends most of its time in page faults: 9.3 ms against 1.3 ms for one pass over 26 MB.
    """
    madvise = _madvise()
    if madvise is not None:
        start = -(-y.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (y.data_ptr() + y.numel() * y.element_size() - start) // mmap.PAGESIZE * mmap.PAGESIZE
        # A refusal changes nothing but the speed.
        madvise(start, length, mmap.MADV_HUGEPAGE)


@functools.cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function
