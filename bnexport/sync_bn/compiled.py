"""Sync batch norm through the compiled kernels (the C API), used on a CPU or a CUDA device if its library is there.

Same interface as torch_operations.py. Tensors that are neither contiguous nor channels last go
through one contiguous copy. On a CUDA device the work is enqueued on torch's current stream, and nothing
waits for the device.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from bnexport import torch_versions
from bnexport.errors import LibraryError, UsageError
from bnexport.sync_bn.moments import spatial_size, statistics_type

Tensor = torch.Tensor

# "torch" does without the compiled kernels. Read once: a look into the environment costs as much as an allocation.
backend = os.environ.get("BNEXPORT_TORCH_BACKEND", "")

# Bytes from which an output is put on huge pages.
_LARGE = 4 << 20


@functools.cache
def _capi() -> Any:
    from bnexport.native import capi

    try:
        capi.library()
    except LibraryError:
        return None
    capi.lend_openmp(_openmp_parallel())
    return capi


def _openmp_parallel() -> int:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch uses; 0 if there is none.

    Looked up through torch's own library: scikit-learn, say, brings another runtime along, and the
    spinning threads of two cost more than they do (88 ms for a batch that takes 6).
    """
    if not sys.platform.startswith("linux") or "OpenMP" not in torch.__config__.parallel_info():
        return 0
    return torch_versions.openmp_parallel()


@functools.cache
def _cuda() -> Any:
    """Return the CUDA kernels, for a tensor that torch has put on a device; warn once if they see no device."""
    from bnexport.native import cuda

    if cuda.available():
        return cuda
    reason = cuda.no_device()
    if reason is not None:
        warnings.warn(
            f"sync batch norm on CUDA uses torch's own operations, though bnexport's CUDA library is installed: {reason}; "
            "update the driver, or build the library with an older CUDA (docs/gpu.md)",
            RuntimeWarning,
            stacklevel=2,
        )
    return None


def usable(x: Tensor) -> bool:
    if backend == "torch":
        return False
    if x.device.type == "cpu":
        return _capi() is not None
    if x.device.type != "cuda" or _capi() is None or _cuda() is None:
        return False
    return _runs_on(x.device.index)


@functools.cache
def _runs_on(device: int) -> bool:
    """Whether the library has kernels for a CUDA device; log once why torch operations are used instead."""
    try:
        _cuda().check_device(device)
    except LibraryError as error:
        warnings.warn(
            f"sync batch norm on cuda:{device} uses torch's own operations: {error}", RuntimeWarning, stacklevel=2
        )
        return False
    return True


@functools.cache
def _type_codes(dtype: torch.dtype) -> tuple[int, int]:
    """Return the codes of a type and of its statistics' type."""
    codes = [_capi().DTYPES[str(it).removeprefix("torch.")] for it in (dtype, statistics_type(dtype))]
    return codes[0], codes[1]


def arrange(x: Tensor) -> Tensor:
    """Return x, or a contiguous copy if the kernels do not support its memory layout."""
    return x if memory_layout(x) is not None else x.contiguous()


def memory_layout(x: Tensor) -> str | None:
    """Return the C API's name of a memory layout; None for one that the kernels do not support."""
    if x.is_contiguous():
        return "NCS"
    return "NSC" if x.permute(0, *range(2, x.dim()), 1).is_contiguous() else None


def _geometry(x: Tensor) -> dict[str, int]:
    return dict(zip(("dtype", "stats_dtype", "layout", "N", "C", "S"), sizes(x), strict=True))


def sizes(x: Tensor) -> tuple[int, ...]:
    """Return the first fields of the C API's structs: type, type of the statistics, layout, N, C, S."""
    layout = memory_layout(x)
    assert layout is not None
    N, C, *_ = x.shape
    return (*_type_codes(x.dtype), _capi().LAYOUTS[layout], N, C, spatial_size(x))


def _run(name: str, data: Tensor, geometry: dict[str, int], /, **params: Any) -> None:
    """Call the kernel `name` ("forward", "moments", ...) on the device of `data`."""
    if not data.is_cuda:
        getattr(_capi(), f"cpu_{name}")(threads=torch.get_num_threads(), **geometry, **params)
        return
    cuda, capi = _cuda(), _capi()
    row = (params.pop("row"),) if "row" in params else ()
    filled = (capi.backward_params if name.startswith("backward") else capi.forward_params)(**geometry, **params)
    with torch.cuda.device(data.device):
        size = cuda.workspace_size(filled)
        # Freed memory is used again by later work of the same stream only.
        workspace = torch.empty(size, dtype=torch.uint8, device=data.device)
        stream = torch.cuda.current_stream().cuda_stream
        getattr(cuda, name)(filled, *row, workspace.data_ptr(), size, stream)


# The fields of the C API's structs between their sizes and the number of threads.
_FORWARD_FIELDS = (
    "x", "y", "weight", "bias", "running_mean", "running_var", "running_mean_out", "running_var_out", "saved_mean",
    "saved_invstd", "momentum", "eps", "training", "stats_mode", "group_size", "gathered",
)  # fmt: skip
_BACKWARD_FIELDS = (
    "dy", "x", "dx", "weight", "saved_mean", "saved_invstd", "dweight", "dbias", "training", "stats_mode",
    "grad_reduction", "group_size", "gathered", "local_moments",
)  # fmt: skip


def vector(found: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return a vector as the kernels read it: contiguous and of the statistics' type."""
    if found is None or (found.dtype == dtype and found.is_contiguous()):
        return found
    return found.detach().to(dtype).contiguous()


def is_large(x: Tensor) -> bool:
    """Whether `empty_like` puts a tensor like x on huge pages."""
    return x.numel() * x.element_size() >= _LARGE


def empty_like(x: Tensor) -> Tensor:
    """Allocate an uninitialised tensor like x, on huge pages if it is large.

    The allocator returns large blocks to the system, so that a kernel that writes at memory speed
    spends most of its time in page faults: 9.3 ms against 1.3 ms for one pass over 26 MB.
    """
    y = torch.empty_like(x)
    madvise = _madvise() if is_large(y) and not y.is_cuda else None
    if madvise is not None:
        size = y.numel() * y.element_size()
        start = -(-y.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        length = (y.data_ptr() + size - start) // mmap.PAGESIZE * mmap.PAGESIZE
        # A refusal changes nothing but the speed.
        madvise(start, length, mmap.MADV_HUGEPAGE)
    return y


@functools.cache
def _madvise() -> Any:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    function = ctypes.CDLL(None).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return function


def pointer(tensor: Tensor | None) -> int:
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


def forward_row(x: Tensor, stats_mode: str) -> Tensor:
    """Compute this process's row [weight, mean.., spread..] (2 C + 1,) float64."""
    row = x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64)
    mode = _capi().STATS_MODES[stats_mode]
    _run("moments", x, _geometry(x), x=x.data_ptr(), row=row.data_ptr(), stats_mode=mode)
    return row


def forward(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    stats_mode: str,
    rows: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, Tensor]:
    """Compute y, new running statistics, saved mean and invstd. rows: the group's, or None for one process."""
    capi, C, S = _capi(), x.shape[1], statistics_type(x.dtype)
    old_mean, old_var, w, b = (vector(found, S) for found in (running_mean, running_var, weight, bias))
    y = empty_like(x)
    new_mean = None if old_mean is None else x.new_empty(C, dtype=S)
    new_var = None if old_var is None else x.new_empty(C, dtype=S)
    mean, invstd = x.new_empty(C, dtype=torch.float64), x.new_empty(C, dtype=torch.float64)
    fields = (
        x.data_ptr(), y.data_ptr(), pointer(w), pointer(b), pointer(old_mean), pointer(old_var), pointer(new_mean),
        pointer(new_var), mean.data_ptr(), invstd.data_ptr(), momentum, eps, int(training), capi.STATS_MODES[stats_mode],
        1 if rows is None else rows.shape[0], pointer(rows),
    )  # fmt: skip
    if not x.is_cuda:
        capi.run_forward(*sizes(x), *fields, torch.get_num_threads(), 0)
    else:
        _run("forward", x, _geometry(x), **dict(zip(_FORWARD_FIELDS, fields, strict=True)))
    return y, new_mean, new_var, mean, invstd


def backward_row(dy: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, stats_mode: str) -> Tensor:
    """Compute this process's row [weight, sum dy.., sum dy * x_hat..] (2 C + 1,) float64."""
    row = x.new_empty(2 * x.shape[1] + 1, dtype=torch.float64)
    _run(
        "backward_moments",
        x,
        _geometry(x),
        dy=dy.data_ptr(),
        x=x.data_ptr(),
        saved_mean=mean.data_ptr(),
        saved_invstd=invstd.data_ptr(),
        row=row.data_ptr(),
        stats_mode=_capi().STATS_MODES[stats_mode],
    )
    return row


def backward(
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
    capi, C, S = _capi(), x.shape[1], statistics_type(x.dtype)
    w = vector(weight, S)
    dx = empty_like(x) if output_mask[0] else None
    dweight, dbias = (x.new_empty(C, dtype=S) if needed else None for needed in output_mask[1:])
    fields = (
        dy.data_ptr(), x.data_ptr(), pointer(dx), pointer(w), mean.data_ptr(), invstd.data_ptr(), pointer(dweight),
        pointer(dbias), int(training), capi.STATS_MODES[stats_mode], capi.GRAD_REDUCTIONS[grad_reduction],
        1 if rows is None else rows.shape[0], pointer(rows), pointer(row),
    )  # fmt: skip
    if not x.is_cuda:
        capi.run_backward(*sizes(x), *fields, torch.get_num_threads(), 0)
    else:
        _run("backward", x, _geometry(x), **dict(zip(_BACKWARD_FIELDS, fields, strict=True)))
    return dx, dweight, dbias
