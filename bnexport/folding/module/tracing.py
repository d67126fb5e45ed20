"""Data flow of a module's forward: a symbolic trace by torch.fx, as evidence for folds.

Values are symbols in a trace, so what it shows holds for every input: code that looks at a value to
choose its way cannot be traced. A submodule in which that happens is taken as one opaque call. Where
the outermost forward cannot be traced nothing is known, and that is an error.

Hooks see values that a fold would change. They are not run here; what they see is noted.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from bnexport import torch_versions
from bnexport.errors import UnsupportedModelError, UsageError, first_line
from bnexport.folding.module import layers
from bnexport.sync_bn.copies import copy_model
from bnexport.sync_bn.recognition import recognise
from bnexport.torch_versions import PLACEHOLDER, BatchNormBase, pytree

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
        known = layers.is_known(module) or is_plain_batch_norm(module)
        return known or type(module) in _ELEMENTWISE or isinstance(module, Zero)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if _inner(module_qualified_name) in self._opaque or layers.is_known(m) or isinstance(m, Zero):
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
