"""Data flow of a module's forward: a symbolic trace by torch.fx, as evidence for folds.

Values are symbols in a trace, so what it shows holds for every input: code that looks at a value to choose its way cannot be
traced. A submodule in which that happens is taken as one opaque call. Where the outermost forward cannot be traced nothing is
known, and that is an error.

Hooks see values that a fold would change. They are not run here; what they see is noted.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError

from bnexport import torch_versions
from bnexport.errors import UnsupportedModelError, UsageError, first_line
from bnexport.modules.copies import copy_model
from bnexport.sync_bn.recognition import has_hooks, recognise
from bnexport.torch_versions import PLACEHOLDER, BatchNormBase, pytree

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_LAYERS = (*CONVS, *TRANSPOSED, nn.Linear)
_NORMS = ("batch_norm", "_native_batch_norm_legit_no_training")
_CONVOLUTIONS = ("convolution", *(f"conv{mode}{rank}d" for mode in ("", "_transpose") for rank in (1, 2, 3)))
_MODEL = "model"
# Modules of one tensor to one tensor that stand next to batch norms.
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Sigmoid, nn.Tanh, nn.Softmax, nn.Dropout, nn.Dropout2d, nn.Flatten),
)


class Zero(nn.Module):
    """A branch that was merged into another: adds nothing, whatever it reads."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return input.new_zeros(())


@dataclasses.dataclass(frozen=True)
class Trace:
    """A forward as a graph of symbols.

    paths: of each call of a submodule or program's layer, its path (the first one of a shared module). opaque: paths of the
    submodules that could not be traced, each with the reason. seen_by_hooks: the values that hooks see. tensors: paths of
    parameters and buffers that code reads itself, by their nodes. values: of these. layers: the operators of a program that
    are layers or batch norms, as modules.
    """

    root: nn.Module
    graph: fx.Graph
    paths: dict[fx.Node, str] = dataclasses.field(default_factory=dict)
    opaque: dict[str, str] = dataclasses.field(default_factory=dict)
    seen_by_hooks: frozenset[fx.Node] = frozenset()
    tensors: dict[fx.Node, str] = dataclasses.field(default_factory=dict)
    values: dict[fx.Node, torch.Tensor] = dataclasses.field(default_factory=dict)
    layers: dict[fx.Node, nn.Module] = dataclasses.field(default_factory=dict)

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder" and node not in self.tensors]

    def module(self, node: fx.Node) -> nn.Module | None:
        """Return the submodule that a node calls, or None."""
        return self.root.get_submodule(str(node.target)) if node.op == "call_module" else None

    def outline(self) -> list[str]:
        """Return every step, for a comparison of two traces."""
        return [f"{node.op} {node.target} {node.args} {node.kwargs}" for node in self.graph.nodes]

    def examples(self, inputs: tuple[torch.Tensor, ...] | None) -> dict[str, torch.Tensor]:
        """Run the trace and return tensors like its values by their names, without numbers. Raises UsageError where that fails."""
        if inputs is None:
            return {}
        recorder = _ExampleRecorder(self.root, self.graph)
        try:
            with torch.no_grad():
                # Code that works in place may change its inputs.
                recorder.run(*(value.clone() for value in inputs))
        except Exception as error:
            shapes = ", ".join(str(tuple(value.shape)) for value in inputs)
            raise UsageError(
                f"example_inputs: the model fails on inputs of shape {shapes}: {first_line(error)[:200]}"
            ) from error
        return recorder.examples


def is_layer(module: nn.Module) -> bool:
    """Whether it is a convolution or Linear whose forward is torch's own; a subclass, or an instance, may have changed it."""
    base = next((base for base in _LAYERS if isinstance(module, base)), None)
    if base is None:
        return False
    methods = ("forward", "_conv_forward") if base in CONVS else ("forward",)
    return all(name not in module.__dict__ and getattr(type(module), name) is getattr(base, name) for name in methods)


def is_plain_batch_norm(module: nn.Module) -> bool:
    """Whether the module computes in eval mode the same as torch's batch norm."""
    found = recognise(module) if isinstance(module, BatchNormBase) else None
    return found is not None and found.kind in ("batch_norm", "frozen") and set(found.changed) <= {"train", "eval"}


def trace(model: nn.Module, count: int | None = None) -> Trace:
    """Trace model(*inputs); `model` is not changed. Other parameters of its forward keep their defaults.

    count: of the inputs; None for those without a default.

    Raises UnsupportedModelError where the outermost forward cannot be traced, UsageError where the number of its inputs
    cannot be told.
    """
    if count is None:
        count = _input_count(model)
    opaque: dict[str, str] = {}
    while True:
        root = _Root(copy_model(model, share_parameters=True))
        tracer = _Tracer(frozenset(opaque))
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
    read = {node: _attribute(root, str(node.target)) for node in graph.nodes if node.op == "get_attr"}
    values = {node: value for node, value in read.items() if isinstance(value, torch.Tensor)}
    tensors = {node: _inner(str(node.target)) for node in values}
    return Trace(root, graph, paths, opaque, frozenset(tracer.seen_by_hooks), tensors, values)


def _attribute(root: nn.Module, path: str) -> Any:
    owner, _, name = path.rpartition(".")
    return getattr(root.get_submodule(owner), name)


def trace_program(program: torch.export.ExportedProgram) -> Trace:
    """Return the graph of a program. Its layers and batch norms are operators, with paths of the modules that they were."""
    signature = program.graph_signature
    paths = {
        **signature.inputs_to_parameters,
        **signature.inputs_to_buffers,
        **signature.inputs_to_lifted_tensor_constants,
    }
    values = {**program.constants, **program.state_dict}
    tensors = {
        node: paths[node.name] for node in program.graph.nodes if node.op == "placeholder" and node.name in paths
    }
    found = Trace(
        program.graph_module,
        program.graph,
        tensors=tensors,
        values={node: values[paths[node.name]] for node in tensors},
    )
    for node in program.graph.nodes:
        layer = _layer(node, found)
        if layer is not None:
            found.layers[node] = layer
            found.paths[node] = next(tensors[each].rpartition(".")[0] for each in node.args[1:] if each in tensors)
    return found


def _layer(node: fx.Node, trace: Trace) -> Any:
    """Return the layer or batch norm that an operator of torch computes with parameters, as a module, or None."""
    if not isinstance(node.target, torch_versions.Operator):
        return None
    defaults = {each.name: each.default_value for each in node.target._schema.arguments}
    given: dict[str, Any] = {**defaults, **dict(zip(defaults, node.args)), **node.kwargs}
    operands = {name: each for name, each in given.items() if name != "input" and isinstance(each, fx.Node)}
    if not isinstance(given.get("input"), fx.Node) or not all(each in trace.tensors for each in operands.values()):
        return None
    tensors = {name: trace.values[each] for name, each in operands.items()}
    name, weight = node.target.overloadpacket.__name__, tensors.get("weight")
    made: Any = None
    if name in _NORMS and not given.get("training") and {"running_mean", "running_var"} <= tensors.keys():
        made = nn.BatchNorm1d(len(tensors["running_mean"]), given["eps"], device="meta").eval()
    elif name == "linear" and weight is not None and weight.dim() == 2:
        made = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    elif name in _CONVOLUTIONS and weight is not None and not isinstance(given["padding"], str):
        made = _convolution(weight, given, given.get("transposed", "transpose" in name))
    for held in () if made is None else (made._parameters, made._buffers):
        held.update({each: tensors.get(each) for each in held})
    return made


def _convolution(weight: torch.Tensor, given: Mapping[str, Any], transposed: bool) -> Any:
    rank, names = weight.dim() - 2, ["stride", "padding", "dilation", *["output_padding"] * transposed]
    sizes = {name: tuple(given[name]) * (rank // len(given[name])) for name in names}
    groups: int = given["groups"]
    kinds: Any = TRANSPOSED if transposed else CONVS
    return kinds[rank - 1](groups, groups, tuple(weight.shape[2:]), groups=groups, device="meta", **sizes)


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

    def __init__(self, opaque: frozenset[str]) -> None:
        super().__init__()
        self.failed = ""  # path of the innermost submodule that could not be traced
        self.seen_by_hooks: set[fx.Node] = set()
        self._opaque = opaque

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Symbol(node, self)

    def create_arg(self, a: Any) -> Any:
        return a.node if type(a) is _Symbol else super().create_arg(a)

    def is_tensor(self, node: fx.Node) -> bool:
        """Whether a value is known to be a tensor: an input, or a result of these modules."""
        if node.op != "call_module":
            return node.op == "placeholder"
        module = self.root.get_submodule(str(node.target))
        if _inner(str(node.target)) in self._opaque:
            return False
        if type(module) is nn.Identity:
            return all(map(self.is_tensor, node.all_input_nodes))
        known = is_layer(module) or is_plain_batch_norm(module)
        return known or type(module) in _ELEMENTWISE or isinstance(module, Zero)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        if _inner(module_qualified_name) in self._opaque or is_layer(m) or isinstance(m, Zero):
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


class _ExampleRecorder(fx.Interpreter):
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=True, graph=graph)
        self.examples: dict[str, torch.Tensor] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.examples[n.name] = torch.empty(value.shape, dtype=value.dtype, device="meta")
        return value


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


# Memory of a traced forward: which of its values share it, and where code changes it in place.
#
# A graph of operators has values only. It says what the code computes as long as nobody reads a value after its memory was
# changed; where somebody does, or may, the change is no operator of the graph.

# Modules and functions whose result is memory of its own; that of any other may be the memory of its inputs.
_FRESH_MODULES = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, Zero)
_ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.SiLU, nn.Hardswish, nn.Sigmoid, nn.GELU)
_FRESH_FUNCTIONS = ("add", "sub", "mul", "truediv", "div", "matmul", "cat", "relu", "sigmoid", "silu", "gelu")


class Memory:
    """Values of one trace that share memory. norms: also those that share it once a batch norm returns its input."""

    def __init__(self, trace: Trace, *, norms: bool) -> None:
        self._trace, self._norms = trace, norms
        self._order = {node: index for index, node in enumerate(trace.graph.nodes)}
        self._groups: dict[fx.Node, list[fx.Node]] = {}
        for node in trace.graph.nodes:
            self._groups[node] = [node]
            if not self._is_fresh(node):
                # What changes its input in place returns it.
                for source in _written(node, trace.module(node)) or node.all_input_nodes:
                    self._join(node, source)

    def changed(self, node: fx.Node) -> list[fx.Node]:
        """Return the values whose memory a node may change, in order, those that share memory with its inputs."""
        found = {value: None for source in _written(node, self._trace.module(node)) for value in self._groups[source]}
        return [value for value in found if self._order[value] < self._order[node]]

    def is_clean(self, node: fx.Node) -> bool:
        """Whether nobody sees what a node changes in place, other than in its result."""
        changed = self.changed(node)
        return not any(
            value.op in ("placeholder", "get_attr")
            or value in self._trace.seen_by_hooks
            or any(user is not node and self._order[user] > self._order[node] for user in value.users)
            for value in changed
        )

    def _is_fresh(self, node: fx.Node) -> bool:
        module = self._trace.module(node)
        if module is not None:
            if isinstance(module, BatchNormBase):
                return not self._norms
            plain = isinstance(module, _ACTIVATIONS) and not getattr(module, "inplace", False)
            return is_layer(module) or isinstance(module, _FRESH_MODULES) or plain
        if (layer := self._trace.layers.get(node)) is not None:
            return not (self._norms and isinstance(layer, BatchNormBase))
        return node.op in ("call_function", "call_method") and name_of(node) in _FRESH_FUNCTIONS and not _written(node)

    def _join(self, one: fx.Node, two: fx.Node) -> None:
        mine, theirs = self._groups[one], self._groups[two]
        if mine is not theirs:
            theirs += mine
            self._groups.update(dict.fromkeys(mine, theirs))


def name_of(node: fx.Node) -> str:
    """Return the name of the function, method or torch operator that a node calls."""
    if isinstance(node.target, torch_versions.Operator):
        return str(node.target.overloadpacket.__name__)
    return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))


def _written(node: fx.Node, module: nn.Module | None = None) -> list[fx.Node]:
    """Return the inputs that a node may change in place: by the names that torch gives such functions."""
    if module is not None:
        own = type(module).__module__.startswith(("torch.nn.", "bnexport."))
        return [] if (own or is_layer(module)) and not getattr(module, "inplace", False) else node.all_input_nodes
    if node.op not in ("call_function", "call_method"):
        return []
    if isinstance(node.target, torch_versions.Operator):
        written = (each.alias_info is not None and each.alias_info.is_write for each in node.target._schema.arguments)
        return [value for value, writes in zip(node.args, written) if writes and isinstance(value, fx.Node)]
    if node.op == "call_function" and not is_torchs(node.target):
        return node.all_input_nodes
    name = name_of(node)
    in_place = name.startswith("i") and getattr(operator, f"__{name}__", None) is node.target
    by_name = name in ("setitem", "setattr") or (name.endswith("_") and not name.endswith("__"))
    return node.all_input_nodes[:1] if in_place or by_name or _asks_in_place(node) else []


def _asks_in_place(node: fx.Node) -> bool:
    """Whether a function of torch is told to write into its input, or into another tensor."""
    if node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    names = list(inspect.signature(node.target).parameters) if isinstance(node.target, types.FunctionType) else []
    return "inplace" in names and node.args[names.index("inplace") : names.index("inplace") + 1] == (True,)


def is_torchs(function: Any) -> bool:
    """Whether a function is torch's or Python's own."""
    module = getattr(function, "__module__", None) or ""
    return module.partition(".")[0] in ("", "torch", "_operator", "operator", "math", "builtins")
