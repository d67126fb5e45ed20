"""A common view of torch's linear layers under per-channel maps.

A weight is seen as W[g, a, b, k] with g the group and k the kernel position:

    Conv            (out, in / groups, kernel...)     a = output, b = input channel of the group
    ConvTranspose   (in, out / groups, kernel...)     a = input,  b = output channel of the group
    Linear          (out, in)                         one group, one position; a = output, b = input

A map behind the layer (backward fold): W' = scale[out] W and the bias scale (b - center) + shift.
A map in front of it (forward fold), x = scale * x0 + offset: W' = W scale[in] and the bias
b + sum over inputs and positions of W offset[in], where every output position sees the whole kernel.

Factors are kept in float64 apart from the weight and meet it once, in `write`.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir
import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from bnexport import torch_versions
from bnexport.errors import UnsupportedModelError, UsageError, first_line
from bnexport.folding.affine import ChannelAffine, Outputs, round_vector
from bnexport.folding.scaled_tensor import ScaledTensor, check_scaled, weighted_sums
from bnexport.graph.nodes import FLOAT_TYPES, Refused
from bnexport.modules.copies import copy_model
from bnexport.modules.tensors import to_array
from bnexport.sync_bn.recognition import recognise
from bnexport.torch_versions import PLACEHOLDER, PLAIN_TENSORS, BatchNormBase, pytree

# Conversion between torch parameters and NumPy arrays, bfloat16 included.


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """Return the values in their own type, on the CPU. Raise Refused for anything but a plain float tensor."""
    name = str(tensor.dtype).removeprefix("torch.")
    if type(tensor) not in PLAIN_TENSORS or tensor.is_quantized or tensor.layout is not torch.strided or tensor.is_meta:
        raise Refused("no-values", f"a {type(tensor).__name__} on {tensor.device.type} has no values to compute with")
    if name not in FLOAT_TYPES:
        raise Refused("type", f"a parameter is {name}, expected one of {', '.join(FLOAT_TYPES)}")
    return to_array(tensor.contiguous())


def from_numpy(array: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """Copy an array into a new tensor, on the device and in the memory format of `like`."""
    array = np.ascontiguousarray(array)
    bfloat16 = array.dtype == ml_dtypes.bfloat16
    values = torch.from_numpy(array.view(np.int16) if bfloat16 else array)
    values = values.view(torch.bfloat16) if bfloat16 else values
    if values.shape != like.shape:
        return values.to(like.device).clone()
    return torch.empty_like(like, dtype=values.dtype, requires_grad=False).copy_(values)


_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CLASSES = (*_CONVS, *_TRANSPOSED, nn.Linear)


def is_known(module: nn.Module) -> bool:
    """Whether the forward is torch's own; a subclass, or an instance, may have changed it."""
    base = next((base for base in _CLASSES if isinstance(module, base)), None)
    if base is None:
        return False
    methods = ("forward", "_conv_forward") if base in _CONVS else ("forward",)
    return all(name not in module.__dict__ and getattr(type(module), name) is getattr(base, name) for name in methods)


@dataclasses.dataclass(frozen=True)
class Layer:
    """A layer and its pending parameters.

    weight: the old one as (groups, a, b, positions), in its own type. factor: float64, broadcasts to
    it. bias: float64 (out,). bias_size: size of the terms whose sum the bias is. output_axis: 1 or 2.
    """

    module: nn.Module
    weight: np.ndarray
    factor: np.ndarray
    bias: np.ndarray
    bias_size: np.ndarray
    output_axis: int

    @classmethod
    def read(cls, module: nn.Module) -> Layer:
        """Read a layer. Raise Refused for parameters that cannot be replaced."""
        if hasattr(module, "parametrizations"):
            raise Refused("parametrized", "its layer's parameters are computed; remove the parametrization first")
        weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
        if weight is None:
            raise Refused("no-weight", f"its {type(module).__name__} has no parameter `weight`")
        array = to_numpy(weight)
        transposed = isinstance(module, _TRANSPOSED)
        groups = int(getattr(module, "groups", 1))
        view = array.reshape(groups, array.shape[0] // groups, array.shape[1], -1)
        outputs = groups * view.shape[2 if transposed else 1]
        values = np.zeros(outputs) if bias is None else to_numpy(bias).astype(np.float64)
        return cls(module, view, np.ones((1, 1, 1, 1)), values, np.abs(values), 2 if transposed else 1)

    @property
    def rule(self) -> str:
        """The name of the rule that folds into such a layer of an ONNX graph."""
        if isinstance(self.module, nn.Linear):
            return "gemm"
        return "conv_transpose" if isinstance(self.module, _TRANSPOSED) else "conv"

    @property
    def is_linear(self) -> bool:
        return isinstance(self.module, nn.Linear)

    @property
    def rank(self) -> int:
        """Rank of the layer's input and output, the batch of a convolution included."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        return weight.dim()

    @property
    def outputs(self) -> int:
        return int(self.weight.shape[0] * self.weight.shape[self.output_axis])

    @property
    def inputs(self) -> int:
        return int(self.weight.shape[0] * self.weight.shape[3 - self.output_axis])

    def mapped(self, affine: ChannelAffine) -> Layer:
        """Apply `affine` after the layer."""
        if affine.channels != self.outputs:
            raise Refused("shape", f"{self._name} makes {self.outputs} channels, the map has {affine.channels}")
        size = np.abs(affine.scale) * (self.bias_size + np.abs(affine.center)) + np.abs(affine.shift)
        factor = self.factor * self._along(affine.scale, self.output_axis)
        shift = self._along(affine.shift, self.output_axis)
        outputs = Outputs(shift, self.weight.size // max(self.outputs, 1))
        return self._checked(factor, affine.apply(self.bias), size, outputs)

    def preceded(self, affine: ChannelAffine) -> Layer:
        """Apply `affine` before the layer."""
        if affine.channels != self.inputs:
            raise Refused("shape", f"{self._name} reads {self.inputs} channels, the map has {affine.channels}")
        bias, size, axis = self.bias, self.bias_size, 3 - self.output_axis
        if not affine.is_scaling:
            if not self._sees_whole_kernel():
                raise Refused("padding", f"{self._name} pads or overlaps, so the shift would differ at the borders")
            factor = self.factor * self._along(affine.offset, axis)
            sums, sizes = weighted_sums(self.weight, factor, self.weight.shape, kept=(0, self.output_axis))
            bias, size = bias + sums.reshape(-1), size + sizes.reshape(-1)
        return self._checked(self.factor * self._along(affine.scale, axis), bias, size)

    def write(self) -> None:
        """Set the module's new parameters; the old tensors are not changed."""
        weight = self.module._parameters["weight"]
        assert weight is not None
        scaled = ScaledTensor(ir.Tensor(self.weight), self.factor, self.weight.shape).numpy()
        self._set("weight", scaled.reshape(tuple(weight.shape)))
        if self.module._parameters.get("bias") is not None or self.bias.any():
            self._set("bias", round_vector(self.bias, self.weight.dtype, f"{self._name} bias", self.bias_size))

    def _set(self, name: str, array: np.ndarray) -> None:
        like = self.module._parameters["weight"]
        assert like is not None
        old = self.module._parameters.get(name)
        requires_grad = (like if old is None else old).requires_grad
        self.module._parameters[name] = nn.Parameter(from_numpy(array, like), requires_grad=requires_grad)

    def _checked(self, factor: np.ndarray, bias: np.ndarray, size: np.ndarray, outputs: Outputs | None = None) -> Layer:
        check_scaled(self.weight, factor, self.weight.shape, outputs)
        round_vector(bias, self.weight.dtype, f"{self._name} bias", size)
        return dataclasses.replace(self, factor=factor, bias=bias, bias_size=size)

    def _along(self, vector: np.ndarray, axis: int) -> np.ndarray:
        shape = [self.weight.shape[0], 1, 1, 1]
        shape[axis] = -1
        return vector.reshape(shape)

    def _sees_whole_kernel(self) -> bool:
        """Whether each output position is a sum over the whole kernel, of values of the input."""
        module: Any = self.module
        if isinstance(module, nn.Linear):
            return True
        if isinstance(module, _TRANSPOSED):
            once = self.weight.shape[3] == 1 and all(stride == 1 for stride in module.stride)
            return once and not any(module.padding) and not any(module.output_padding)
        # Other modes than zeros pad with values of the input, which the map has mapped as well.
        return module.padding_mode != "zeros" or not any(module._reversed_padding_repeated_twice)

    @property
    def _name(self) -> str:
        return type(self.module).__name__


def read_batch_norm(module: Any, max_scale: float) -> ChannelAffine:
    """Return the map of a torch batch norm with its running statistics. Raise Refused if it has none."""
    if hasattr(module, "parametrizations"):
        raise Refused("parametrized", "its parameters are computed; remove the parametrization first")
    mean, var = module._buffers.get("running_mean"), module._buffers.get("running_var")
    if mean is None or var is None:
        raise Refused("training", "it has no running statistics, so it normalises with those of the batch")
    mean, var = to_numpy(mean), to_numpy(var)
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    gamma = np.ones_like(mean) if weight is None else to_numpy(weight)
    beta = np.zeros_like(mean) if bias is None else to_numpy(bias)
    affine = ChannelAffine.from_batch_norm(gamma, beta, mean, var, module.eps)
    largest = float(np.abs(affine.scale).max(initial=0.0))
    if largest > max_scale:
        raise Refused("scale", f"|gamma| / std reaches {largest:.3g}, the bound is {max_scale:.3g} (max_scale)")
    return affine


# Data flow of a module's forward: a symbolic trace by torch.fx, as evidence for folds.
#
# Values are symbols in a trace, so what it shows holds for every input: code that looks at a value to
# choose its way cannot be traced. A submodule in which that happens is taken as one opaque call. Where
# the outermost forward cannot be traced nothing is known, and that is an error.
#
# Hooks see values that a fold would change. They are not run here; what they see is noted.

_MODEL = "model"
# Modules of one tensor to one tensor that stand next to batch norms.
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Sigmoid, nn.Tanh, nn.Softmax, nn.Dropout, nn.Dropout2d, nn.Flatten),
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Zero(nn.Module):
    """A branch that was merged into another: adds nothing, whatever it reads."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.new_zeros(())


@dataclasses.dataclass(frozen=True)
class Trace:
    """A forward as a graph of symbols, or several graphs of submodules.

    paths: of each call of a submodule, its path (the first one of a shared module). opaque: paths of
    the submodules that could not be traced, each with the reason. seen_by_hooks: the values that hooks
    see. read: paths of parameters and buffers that code reads itself. shapes: of tensors, where example
    inputs were given. parts: paths of submodules below opaque ones with a graph of their own.
    """

    graphs: tuple[fx.Graph, ...]
    paths: dict[fx.Node, str]
    opaque: dict[str, str]
    seen_by_hooks: frozenset[fx.Node]
    read: tuple[str, ...]
    shapes: dict[fx.Node, tuple[int, ...]]
    parts: tuple[str, ...] = ()

    def calls(self) -> dict[str, list[fx.Node]]:
        """Return the calls of each submodule, by its path."""
        found: dict[str, list[fx.Node]] = {}
        for node, path in self.paths.items():
            found.setdefault(path, []).append(node)
        return found

    def outline(self) -> list[str]:
        """Return every step, for a comparison of two traces."""
        return [f"{node.op} {node.target}" for graph in self.graphs for node in graph.nodes]


def reason(error: UnsupportedModelError) -> str:
    """Return the reason for a failure of torch.fx from an error that `trace` raised."""
    return first_line(error.__cause__ or error)[:200]


def has_hooks(module: nn.Module) -> bool:
    return any(module.__dict__.get(name) for name in _HOOKS)


def is_plain_batch_norm(module: nn.Module) -> bool:
    """Whether the module computes in eval mode the same as torch's batch norm."""
    found = recognise(module) if isinstance(module, BatchNormBase) else None
    return found is not None and found.kind in ("batch_norm", "frozen") and set(found.changed) <= {"train", "eval"}


def trace(
    model: nn.Module,
    example_inputs: tuple[torch.Tensor, ...] | None,
    *,
    shapes: bool = True,
    count: int | None = None,
) -> Trace:
    """Trace model(*inputs); `model` is not changed. Other parameters of its forward keep their defaults.

    shapes: run the model on the example inputs, for the shapes in it. count: of inputs that may be anything, instead of
    example inputs, which are tensors.

    Raises UnsupportedModelError where the outermost forward cannot be traced, UsageError where the
    number of its inputs cannot be told.
    """
    tensors = count is None
    if count is None:
        count = _input_count(model) if example_inputs is None else len(example_inputs)
    opaque: dict[str, str] = {}
    while True:
        root = _Root(copy_model(model, share_parameters=True))
        tracer = _Tracer(frozenset(opaque), tensors)
        try:
            with torch.no_grad():
                graph = tracer.trace(root, (PLACEHOLDER,) * count)  # type: ignore[arg-type]
            break
        except Exception as error:  # whatever the model's code makes of symbols
            if not tracer.failed:
                raise UnsupportedModelError(
                    f"{type(model).__name__}: its forward cannot be traced by torch.fx ({first_line(error)[:200]}), so where"
                    " values go is not known; fold its parts instead, such as"
                    f" model.{_some_child(model)} = bnexport.fold_module(model.{_some_child(model)})"
                ) from error
            opaque[tracer.failed] = first_line(error)[:200]
    paths = {node: _inner(str(node.target)) for node in graph.nodes if node.op == "call_module"}
    read = tuple(
        _inner(str(node.target))
        for node in graph.nodes
        if node.op == "get_attr" and str(node.target).startswith(f"{_MODEL}.")
    )
    known = _shapes(root, graph, example_inputs) if shapes and example_inputs is not None else {}
    return Trace((graph,), paths, opaque, frozenset(tracer.seen_by_hooks), read, known)


class _Root(nn.Module):
    """A wrapper that gives the model a name, a caller and a fixed number of inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)


class _Symbol(fx.Proxy):
    """A value of the trace, for code that asks for its class.

    An ordinary symbol is no torch.Tensor, and such code would silently take the way for something else.
    This one is a Tensor where that is certain, and ends the trace where it is not.
    """

    _is_param = _is_buffer = False

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        if torch_versions.fx_asks():
            return fx.Proxy
        if not self.tracer.is_tensor(self.node):  # type: ignore[attr-defined]
            raise TraceError(f"its code asks for the class of {self.node}, which the trace does not know")
        return torch.Tensor

    # Without these, code that changes a value in place looks like code that makes a new one.
    def __iadd__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.iadd, other)

    def __isub__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.isub, other)

    def __imul__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.imul, other)

    def __itruediv__(self, other: Any) -> fx.Proxy:
        return self._in_place(operator.itruediv, other)

    def _in_place(self, function: Callable[..., Any], other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", function, (self, other), {})


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, opaque: frozenset[str], tensors: bool) -> None:
        super().__init__()
        self.failed = ""  # path of the innermost submodule that could not be traced
        self.seen_by_hooks: set[fx.Node] = set()
        self._opaque = opaque
        self._tensors = tensors

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Symbol(node, self)

    def create_arg(self, a: Any) -> Any:
        return a.node if type(a) is _Symbol else super().create_arg(a)

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a value is known to be a tensor: an input, or a result of these modules."""
        if node.op != "call_module":
            return node.op == "placeholder" and self._tensors
        module = self.root.get_submodule(str(node.target))
        if _inner(str(node.target)) in self._opaque:
            return False
        known = is_known(module) or is_plain_batch_norm(module)
        return known or type(module) in _ELEMENTWISE or isinstance(module, Zero)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if _inner(module_qualified_name) in self._opaque or is_known(m) or isinstance(m, Zero):
            return True
        if isinstance(m, BatchNormBase):
            return is_plain_batch_norm(m)
        return super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        hooked = has_hooks(m)
        if hooked:
            self._note((args, kwargs))
        try:
            result = super().call_module(m, m.forward, args, kwargs)
        except Exception:
            self.failed = self.failed or _inner(self.path_of_module(m))
            raise
        if hooked:
            self._note(result)
        return result

    def _note(self, values: Any) -> None:
        leaves = pytree.tree_leaves(values)
        self.seen_by_hooks.update(value.node for value in leaves if isinstance(value, fx.Proxy))


class _ShapeRecorder(fx.Interpreter):
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=True, graph=graph)
        self.shapes: dict[fx.Node, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.shapes[n] = tuple(value.shape)
        return value


def _shapes(root: nn.Module, graph: fx.Graph, inputs: tuple[torch.Tensor, ...]) -> dict[fx.Node, tuple[int, ...]]:
    recorder = _ShapeRecorder(root, graph)
    run(recorder.run, inputs)
    return recorder.shapes


def run(model: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """Run the model on its example inputs. Raises UsageError if it fails on them."""
    try:
        with torch.no_grad():
            # Code that works in place may change its inputs.
            model(*(value.clone() for value in inputs))
    except Exception as error:
        shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
        raise UsageError(
            f"example_inputs: the model fails on inputs of shape {shapes}: {first_line(error)[:200]}"
        ) from error


def _input_count(model: nn.Module) -> int:
    parameters = inspect.signature(model.forward).parameters.values()
    required = [
        p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if any(p.kind is p.VAR_POSITIONAL or (p.kind is p.KEYWORD_ONLY and p.default is p.empty) for p in parameters):
        raise UsageError(
            f"{type(model).__name__}: its forward takes any number of inputs, or keywords; give example_inputs"
        )
    return len(required)


def _inner(path: str) -> str:
    return path.removeprefix(_MODEL).removeprefix(".")


def _some_child(model: nn.Module) -> str:
    return max(model.named_children(), key=lambda child: len(list(child[1].modules())), default=("part", model))[0]
