"""Private names of torch, and the differences between its versions from OLDEST on.

No other file names what torch keeps private (a test reads the sources). "public in" says which version has a public
name, so that an entry can go once OLDEST reaches it; entries without it have none in 2.14.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.fx._symbolic_trace import PH
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from bnexport.errors import MissingPackageError

OLDEST = (2, 4)
# The first version whose torch.onnx.export(dynamo=True) takes a translation of our operator and dynamic sizes.
DYNAMO_EXPORTER = (2, 9)

VERSION = tuple(int(number) for number in torch.__version__.split("+")[0].split(".")[:2])


def has(version: tuple[int, int]) -> bool:
    return version <= VERSION


def require(version: tuple[int, int], way: str) -> None:
    """Raise MissingPackageError if torch is older than `way` needs."""
    if not has(version):
        wanted = ".".join(map(str, version))
        raise MissingPackageError(
            f"{way} needs torch {wanted} or newer, got {torch.__version__}; pip install 'torch>={wanted}'", name="torch"
        )


# Modules and values.
BatchNormBase = _BatchNorm  # of all batch norms of torch
DispatchMode = TorchDispatchMode
PLACEHOLDER: Any = PH  # an input of a symbolic trace
pytree: Any = _pytree
Operator = torch._ops.OpOverload
HigherOrderOperator = torch._ops.HigherOrderOperator
weight_norm: Any = torch._weight_norm  # what a torch function mode sees of torch.nn.utils.weight_norm
# Types with the values of a plain tensor. torch.nn.Buffer: from 2.5 on.
PLAIN_TENSORS: tuple[type, ...] = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.Tensor))
# Functions that pickles of tensors call.
REBUILD: dict[str, Any] = {
    name: getattr(torch._utils, name)
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_parameter_with_state")
}

# Who watches what is computed now. Plain names: each is called once or more in every eager forward.
below_autograd: Any = torch._C._AutoDispatchBelowAutograd
is_tracing: Any = torch._C._is_tracing
dispatch_modes: Any = torch._C._len_torch_dispatch_stack
function_modes: Any = torch._C._len_torch_function_stack
graph_task: Any = torch._C._current_graph_task_id  # -1 outside a backward pass
transform_level: Any = torch._C._functorch.maybe_current_level  # of torch.func; None outside
is_wrapped: Any = torch._C._functorch.is_functorch_wrapped_tensor
is_batched: Any = torch._C._functorch.is_batchedtensor
is_grad_batched: Any = torch._C._functorch.is_legacy_batchedtensor  # of torch.autograd.grad(is_grads_batched=True)


def alike(tensors: tuple[torch.Tensor, ...]) -> Callable[..., bool]:
    """Return a function of as many tensors: whether they have the classes, dispatch keys, types, devices, sizes, strides
    and requires_grad of these, and no two are one. A tenth of the time that asking the tensors from Python takes.
    """
    options: dict[str, Any] = {"dynamic_dims_sizes": None, "dynamic_dims_strides": None}
    return torch._C._dynamo.guards.TensorGuards(*tensors, **options).check


_DERIVATIVES = (torch._C._functorch.TransformType.Grad, torch._C._functorch.TransformType.Jvp)


def with_autograd() -> Any:
    """Return a context with autograd inside the kernel of an operator, which may have been called below autograd."""
    nothing = torch._C.DispatchKeySet(torch._C.DispatchKey.Undefined)
    return torch._C._ForceDispatchKeyGuard(torch._C._dispatch_tls_local_include_set(), nothing)


def call_backward_directly(function: type[torch.autograd.Function]) -> None:
    """Let autograd call `backward` without looking for a `vjp` first, which takes 3 of a small layer's 70 microseconds."""
    function._backward_cls.apply = function.backward  # type: ignore[attr-defined]


def differentiates() -> bool:
    """Whether the innermost transform of torch.func is a derivative."""
    return torch._C._functorch.peek_interpreter_stack().key() in _DERIVATIVES


def has_tangents() -> bool:
    """Whether forward-mode autograd is on."""
    return forward_ad._current_level >= 0


def _increment_one_by_one(tensors: tuple[torch.Tensor, ...]) -> None:
    for tensor in tensors:
        torch.autograd.graph.increment_version(tensor)


# Tells autograd of a change in place. Public in 2.5 for several tensors in one call.
increment_version: Any = torch.autograd.graph.increment_version if has((2, 5)) else _increment_one_by_one

# Public in 2.13 under the first name, which deprecates the second.
gather_single: Any = next(
    (getattr(dist, name) for name in ("all_gather_single", "all_gather_into_tensor") if hasattr(dist, name)), None
)


def group_store(group: Any) -> Any:
    """Return the key-value store of a group. Public in 2.9, as a method."""
    if hasattr(group, "get_group_store"):
        return group.get_group_store()
    return dist.distributed_c10d._get_process_group_store(group)


def cuda_stream(device: int) -> int:
    """Return the cudaStream_t of torch's current stream on a device. Public as an object, which costs ten times as much."""
    return torch._C._cuda_getCurrentRawStream(device)


def openmp_parallel() -> int:
    """Return the address of GOMP_parallel in the OpenMP runtime that torch's own library links; 0 if there is none."""
    try:
        function = ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(function, ctypes.c_void_p).value or 0


# The TorchScript exporter. torch.onnx is loaded where it is used: it takes longer than folding a module.
if TYPE_CHECKING:
    GraphContext = Any
else:
    # What a symbolic writes to. torch 2.4 asks the annotation for its base classes, and Any is no class in Python 3.10.
    GraphContext = object


def is_none(value: Any) -> bool:
    return torch.onnx.symbolic_helper._is_none(value)


def is_float(value: Any) -> bool:
    return torch.onnx.symbolic_helper._is_fp(value)


def constant(value: Any, kind: str, name: str) -> Any:
    """Return the number of a constant. kind: as in torch.onnx.symbolic_helper.parse_args."""
    return torch.onnx.symbolic_helper._get_const(value, kind, name)


def scalar(value: Any) -> Any:
    """Return a constant as a tensor, or the value itself."""
    return torch.onnx.symbolic_helper._maybe_get_scalar(value)


def replace_graph_log(log: Any) -> Any:
    """Set the function that prints a graph which cannot be exported; return the old one."""
    old = torch._C._jit_onnx_log
    torch._C._jit_onnx_log = log
    return old


def key_of(entry: Any) -> Any:
    """Return the index, key or attribute name of one step of a path in a pytree."""
    return next((getattr(entry, name) for name in ("key", "idx", "name") if hasattr(entry, name)), "")


def fx_asks() -> bool:
    """Whether the caller's caller is torch.fx, which asks each value of a trace for its class before 2.8."""
    return not has((2, 8)) and sys._getframe(2).f_globals["__name__"].startswith("torch.fx.")


@contextlib.contextmanager
def without_recomputation(entered: Callable[[bool], None]) -> Iterator[None]:
    """Let torch.utils.checkpoint(use_reentrant=False) compute nothing a second time. entered: called at both of its ends."""
    import torch.utils.checkpoint as module

    def once(*_: Any, **__: Any) -> Iterator[None]:
        entered(True)
        try:
            yield
        finally:
            entered(False)

    name = "_checkpoint_without_reentrant_generator"
    before = getattr(module, name)
    setattr(module, name, once)
    try:
        yield
    finally:
        setattr(module, name, before)


# torch.export. Its modules take half a second to import, and most commands need none.
def dynamic_size(axis: tuple[int, int], automatic: bool) -> Any:
    """Return what torch.export takes for a dynamic dimension, of an input and an index.

    automatic: it may become constant. Before 2.6, which has neither, it may not.
    """
    if has((2, 6)):
        return torch.export.Dim.AUTO if automatic else torch.export.Dim.DYNAMIC
    return torch.export.Dim("size_{}_{}".format(*axis))


def translation(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a translation for the dynamo exporter.

    2.9 compares arguments with its signature, and refuses None; of what has no name it infers none.
    """
    return function if has((2, 10)) else _Unnamed(function)


class _Unnamed:
    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def drop_guards(program: Any) -> None:
    """Leave out the checks that calling a program makes: 2.9 writes some that it cannot run while it decomposes."""
    if getattr(program, "_guards_code", None) and not has((2, 10)):
        program._guards_code = []


def user_error() -> type[Exception]:
    """Return what torch.export raises for code that it cannot record."""
    return torch._dynamo.exc.UserError


def compiled_module(model: torch.nn.Module) -> torch.nn.Module | None:
    """Return the module inside what torch.compile returned for one."""
    return model._modules.get("_orig_mod") if type(model).__name__ == "OptimizedModule" else None


def data_dependent_errors() -> tuple[type[Exception], ...]:
    from torch._subclasses import fake_tensor

    return fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


def fake_tensors(environment: Any) -> Any:
    """Return a mode whose from_tensor makes fake tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)


def source(name: str) -> Any:
    """Return what a symbolic size is said to come from."""
    from torch._dynamo.source import ConstantSource

    return ConstantSource(name)
