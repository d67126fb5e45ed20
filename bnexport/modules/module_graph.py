"""Write a torch module's forward as a graph of ONNX operators, so that the local proof can read it.

The forward is traced by torch.fx. Layers and arithmetic that folds touch become ONNX operators; everything else becomes an
operator of domain "torch" with its arguments as text and its tensors as inputs, which has to be the same in both
graphs. Submodules that cannot be traced are such an operator, too. The graph is read, never run as a whole.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx, nn

from bnexport.errors import UnsupportedModelError, first_line
from bnexport.modules.copies import copy_model
from bnexport.modules.tensors import to_array
from bnexport.torch_versions import PLACEHOLDER, BatchNormBase

OPSET = 19
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_AVERAGES = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
_SUMS: dict[Any, str] = {
    **dict.fromkeys((operator.add, operator.iadd, torch.add, "add", "add_"), "Add"),
    **dict.fromkeys((operator.sub, operator.isub, torch.sub, "sub", "sub_"), "Sub"),
}


class ModuleGraph:
    """The graph of one module. nodes: of each submodule's calls, by its path."""

    def __init__(
        self, model: nn.Module, count: int, shapes: dict[str, tuple[int, ...]], changed: frozenset[str]
    ) -> None:
        """Trace model(*inputs) with `count` inputs. shapes: of traced values, by name. changed: paths of submodules whose
        tensors may differ inside an operator that was not traced.

        Raises UnsupportedModelError where its own forward cannot be traced.
        """
        self.root, graph = _trace(model, count)
        self.nodes: dict[str, list[ir.Node]] = {}
        self._modules = dict(self.root.named_modules())
        self._names = {id(module): _inner(path) for path, module in reversed(self._modules.items())}
        self._values: dict[fx.Node, ir.Value] = {}
        self._made: list[ir.Node] = []
        self._shapes, self._changed = shapes, changed
        self._initializers: dict[str, ir.Value] = {}
        inputs: list[ir.Value] = []
        outputs: list[ir.Value] = []
        for node in graph.nodes:
            if node.op == "placeholder":
                self._values[node] = self._shaped(ir.Value(name=node.name), node)
                inputs.append(self._values[node])
            elif node.op == "output":
                leaves: list[fx.Node] = []
                fx.node.map_arg(node.args, leaves.append)
                outputs = [self._values[leaf] for leaf in leaves]
            else:
                self._values[node] = self._shaped(self._node(node), node)
        self.model = ir.Model(
            ir.Graph(
                inputs,
                outputs,
                nodes=self._made,
                initializers=list(self._initializers.values()),
                opset_imports={"": OPSET, "torch": 1},
                name="forward",
            ),
            ir_version=10,
        )

    def _shaped(self, value: ir.Value, node: fx.Node) -> ir.Value:
        if node.name in self._shapes:
            value.shape = ir.Shape(self._shapes[node.name])
        return value

    def _node(self, node: fx.Node) -> ir.Value:
        if node.op == "get_attr":
            return self._initializer(str(node.target), _attribute(self.root, str(node.target)))
        if node.op == "call_module":
            module = self._modules[str(node.target)]
            before = len(self._made)
            result = self._module(node, module)
            self.nodes.setdefault(self._names[id(module)], []).extend(self._made[before:])
            return result
        return self._function(node)

    def _module(self, node: fx.Node, module: Any) -> ir.Value:
        data = node.args[0] if len(node.args) == 1 and not node.kwargs else node.kwargs.get("input")
        if not isinstance(data, fx.Node) or len(node.args) + len(node.kwargs) != 1:
            return self._opaque(node, module)
        x, kind = self._values[data], type(module)
        if isinstance(module, _CONVS) and _is_torchs(module, _CONVS):
            return self._conv(node, module, x)
        if isinstance(module, _TRANSPOSED) and _is_torchs(module, _TRANSPOSED):
            return self._conv_transpose(node, module, x)
        if isinstance(module, nn.Linear) and _is_torchs(module, (nn.Linear,)):
            weight = self._parameter(node, "weight", np.ascontiguousarray(as_array(module.weight).T))
            bias = None if module.bias is None else self._parameter(node, "bias", as_array(module.bias))
            result = self._add("MatMul", node.name, [x, weight])
            return result if bias is None else self._add("Add", f"{node.name}.bias", [result, bias])
        if isinstance(module, BatchNormBase) and module.running_mean is not None and not module.training:
            return self._norm(node, module, x)
        if kind is nn.Identity or (kind in _DROPOUTS and not module.training):
            return self._add("Identity", node.name, [x])
        if kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            return self._add("Flatten", node.name, [x], axis=1)
        if kind in _AVERAGES and not module.ceil_mode and getattr(module, "divisor_override", None) is None:
            rank = _AVERAGES.index(kind) + 1
            sizes, strides, pads = (_wide(each, rank) for each in (module.kernel_size, module.stride, module.padding))
            counted = int(bool(module.count_include_pad))
            return self._add(
                "AveragePool",
                node.name,
                [x],
                kernel_shape=sizes,
                strides=strides,
                pads=[*pads, *pads],
                count_include_pad=counted,
            )
        if kind in (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d):
            return self._pad(node, node.name, x, list(module.padding), "constant")
        return self._opaque(node, module)

    def _conv(self, node: fx.Node, module: Any, x: ir.Value) -> ir.Value:
        around = [int(size) for size in module._reversed_padding_repeated_twice]
        pads = [*around[::2][::-1], *around[1::2][::-1]]
        if module.padding_mode != "zeros":
            x = self._pad(node, f"{node.name}.pad", x, around, _MODES[module.padding_mode])
            pads = [0] * len(pads)
        return self._add(
            "Conv",
            node.name,
            [x, *self._parameters(node, module)],
            strides=list(module.stride),
            pads=pads,
            dilations=list(module.dilation),
            group=module.groups,
        )

    def _conv_transpose(self, node: fx.Node, module: Any, x: ir.Value) -> ir.Value:
        return self._add(
            "ConvTranspose",
            node.name,
            [x, *self._parameters(node, module)],
            strides=list(module.stride),
            pads=[*module.padding, *module.padding],
            dilations=list(module.dilation),
            output_padding=list(module.output_padding),
            group=module.groups,
        )

    def _norm(self, node: fx.Node, module: Any, x: ir.Value) -> ir.Value:
        mean, var = as_array(module.running_mean), as_array(module.running_var)
        scale = np.ones_like(mean) if module.weight is None else as_array(module.weight)
        shift = np.zeros_like(mean) if module.bias is None else as_array(module.bias)
        vectors = {"weight": scale, "bias": shift, "running_mean": mean, "running_var": var}
        inputs = [self._parameter(node, name, array) for name, array in vectors.items()]
        return self._add("BatchNormalization", node.name, [x, *inputs], epsilon=float(module.eps))

    def _pad(self, node: fx.Node, name: str, x: ir.Value, around: list[int], mode: str) -> ir.Value:
        """Add a Pad. around: as torch gives it, the last axis first, before and behind."""
        pads = [0, 0, *around[::2][::-1], 0, 0, *around[1::2][::-1]]
        sizes = self._initializer(f"{name}.sizes", np.asarray(pads, np.int64))
        return self._add("Pad", name, [x, sizes], mode=mode)

    def _function(self, node: fx.Node) -> ir.Value:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        args = node.args
        if node.target in _SUMS and len(args) == 2 and not node.kwargs:
            operands = [self._operand(node, index, each) for index, each in enumerate(args)]
            if None not in operands:
                return self._add(_SUMS[node.target], node.name, operands)
        data = self._values.get(args[0]) if args and isinstance(args[0], fx.Node) else None
        if data is None:
            return self._opaque(node)
        if name == "new_zeros" and args[1:] == ((),) and not node.kwargs:
            return self._initializer(f"{node.name}.zero", np.zeros(()))
        if name == "contiguous" and len(args) == 1:
            return self._add("Identity", node.name, [data])
        if name.startswith(("dropout", "alpha_dropout")) and node.kwargs.get("training") is False:
            return self._add("Identity", node.name, [data])
        if name == "flatten" and (*args[1:], *node.kwargs.values()) in ((1,), (1, -1)):
            return self._add("Flatten", node.name, [data], axis=1)
        order = _permutation(name, node, data)
        return self._opaque(node) if order is None else self._add("Transpose", node.name, [data], perm=order)

    def _operand(self, node: fx.Node, index: int, value: Any) -> ir.Value | None:
        if isinstance(value, fx.Node):
            return self._values[value]
        if type(value) in (int, float):
            return self._initializer(f"{node.name}.{index}", np.asarray(float(value)))
        return None

    def _opaque(self, node: fx.Node, module: nn.Module | None = None) -> ir.Value:
        """Add an operator of which nothing is known but itself: its arguments, its values, and a module's tensors and classes."""
        leaves: list[fx.Node] = []
        text = fx.node.map_arg((node.args, node.kwargs), lambda leaf: leaves.append(leaf) or f"<{len(leaves)}>")  # type: ignore[func-returns-value]
        inputs, classes = [self._values[leaf] for leaf in leaves], ""
        if module is not None:
            path = self._names[id(module)]
            for inner, part in module.named_modules():
                full = ".".join(each for each in (path, inner) if each)
                if any(full == each or full.startswith(f"{each}.") for each in self._changed):
                    continue
                classes += f"{inner}: {type(part).__name__}; "
                for name, tensor in (*part._parameters.items(), *part._buffers.items()):
                    if tensor is not None:
                        inputs.append(self._parameter(node, f"{inner}.{name}", as_array(tensor)))
        target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        return self._add(target, node.name, inputs, "torch", code=f"{text} {classes}")

    def _parameters(self, node: fx.Node, module: nn.Module) -> list[ir.Value]:
        tensors = ((name, module._parameters.get(name)) for name in ("weight", "bias"))
        return [self._parameter(node, name, as_array(tensor)) for name, tensor in tensors if tensor is not None]

    def _parameter(self, node: fx.Node, name: str, array: np.ndarray) -> ir.Value:
        return self._initializer(f"{node.name}.{name}", array)

    def _initializer(self, name: str, tensor: np.ndarray | torch.Tensor) -> ir.Value:
        if name not in self._initializers:
            array = as_array(tensor) if isinstance(tensor, torch.Tensor) else tensor
            value = ir.Value(name=name, const_value=ir.Tensor(array, name=name))
            value.shape, value.dtype = ir.Shape(array.shape), ir.DataType.from_numpy(array.dtype)
            self._initializers[name] = value
        return self._initializers[name]

    def _add(
        self, kind: str, name: str, inputs: Iterable[ir.Value | None], domain: str = "", **settings: Any
    ) -> ir.Value:
        attributes = [ir.convenience.convert_attribute(key, value) for key, value in settings.items()]
        value = ir.Value(name=f"{name} value")
        self._made.append(ir.Node(domain, kind, list(inputs), attributes, outputs=[value], name=name))
        return value


class _FixedInputs(nn.Module):
    """Gives the model's forward a fixed number of inputs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> Any:
        return self.model(*inputs)


class _LayerTracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, opaque: frozenset[str]) -> None:
        super().__init__()
        self.failed = ""
        self._opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        known = isinstance(m, (BatchNormBase, *_CONVS, *_TRANSPOSED, nn.Linear))
        return known or module_qualified_name in self._opaque or super().is_leaf_module(m, module_qualified_name)

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        try:
            # Hooks are not traced: they see values, and are seen when whole modules run.
            return super().call_module(m, m.forward, args, kwargs)
        except Exception:
            self.failed = self.failed or self.path_of_module(m)
            raise


def _trace(model: nn.Module, count: int) -> tuple[_FixedInputs, fx.Graph]:
    opaque: set[str] = set()
    while True:
        root = _FixedInputs(copy_model(model, share_parameters=True))
        tracer = _LayerTracer(frozenset(opaque))
        try:
            with torch.no_grad():
                return root, tracer.trace(root, (PLACEHOLDER,) * count)  # type: ignore[arg-type]
        except Exception as error:  # whatever the model's code makes of symbols
            if tracer.failed in ("", "model"):
                raise UnsupportedModelError(f"torch.fx cannot trace it: {first_line(error)[:200]}") from error
            opaque.add(tracer.failed)


def shapes_of(model: nn.Module, inputs: tuple[torch.Tensor, ...]) -> dict[str, tuple[int, ...]]:
    """Run a model in torch.fx and return the shapes of its values, by the names that ModuleGraph gives them."""
    root, graph = _trace(model, len(inputs))
    recorder = _SizeInterpreter(root, graph=graph)
    with torch.no_grad():
        recorder.run(*(value.clone() for value in inputs))
    return recorder.shapes


class _SizeInterpreter(fx.Interpreter):
    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=True, graph=graph)
        self.shapes: dict[str, tuple[int, ...]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if isinstance(value, torch.Tensor):
            self.shapes[n.name] = tuple(value.shape)
        return value


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the numbers of a tensor; none for one on the meta device."""
    if tensor.is_meta:
        return np.empty(0, np.float32)
    plain = tensor.detach()
    plain = plain.dequantize() if plain.is_quantized else plain
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    return to_array(plain.contiguous())


def _is_torchs(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> bool:
    """Whether the forward is torch's own, and the parameters are plain."""
    base = next(each for each in classes if isinstance(module, each))
    methods = [name for name in ("forward", "_conv_forward") if hasattr(base, name)]
    own = all(name not in module.__dict__ and getattr(type(module), name) is getattr(base, name) for name in methods)
    return own and module._parameters.get("weight") is not None


def _permutation(name: str, node: fx.Node, data: ir.Value) -> list[int] | None:
    """Return the order of axes that permute or transpose gives; None where it is another function or the rank is not known."""
    if name not in ("permute", "transpose") or data.shape is None:
        return None
    given: Any = [*node.args[1:], *node.kwargs.values()]
    dims = list(given[0]) if len(given) == 1 and isinstance(given[0], list | tuple) else given
    if not all(isinstance(dim, int) for dim in dims):
        return None
    rank = len(data.shape)
    dims = [dim % rank for dim in dims]
    if name == "permute":
        return dims
    order = list(range(rank))
    order[dims[0]], order[dims[1]] = order[dims[1]], order[dims[0]]
    return order


def _attribute(root: nn.Module, path: str) -> torch.Tensor:
    owner, _, name = path.rpartition(".")
    found = getattr(root.get_submodule(owner), name)
    if not isinstance(found, torch.Tensor):
        raise UnsupportedModelError(f"{path} is no tensor")
    return found


def _wide(value: Any, rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)


def _inner(path: str) -> str:
    return path.removeprefix("model").removeprefix(".")
