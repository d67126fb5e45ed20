"""Write a torch module's forward as a graph of ONNX operators, for the folder and for the local proof.

Layers and arithmetic that folds touch become ONNX operators; everything else becomes an operator of domain "torch" with its
arguments as text and its tensors as inputs, which has to be the same in two graphs that are compared. Submodules that cannot
be traced are such an operator, too, and so is what changes values in place that others read. The graph is read, never run as
a whole. Names lead back to modules: an operator has the path of its module, a parameter that and its own name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx, nn

from bnexport.modules.module_trace import (
    TRANSPOSED,
    Memory,
    Trace,
    Zero,
    is_layer,
    is_plain_batch_norm,
    is_torchs,
    name_of,
)
from bnexport.modules.tensors import to_array

OPSET = 19
_POOLS: dict[type, str] = {
    **dict.fromkeys((nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d), "AveragePool"),
    **dict.fromkeys((nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d), "MaxPool"),
}
_TO_ONE = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_PADS = (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d)
_MODES = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
_SPLITTING = ("split", "split_with_sizes", "chunk")
_PERMUTING = ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis")
# What code asks a value for without reading it.
_QUESTIONS = ("size", "sym_size", "dim", "shape", "ndim", "dtype", "device")
_FORMS = (("", ""), ("i", ""), ("", "_"))
_ARITHMETIC = {f"{form}{name}{end}": name.capitalize() for name in ("add", "sub", "mul") for form, end in _FORMS}


class ModuleGraph:
    """The graph of one trace.

    calls: operators that stand for a submodule, by its path, in order; those of a program, by the names of its nodes.
    """

    def __init__(self, trace: Trace, examples: Mapping[str, torch.Tensor]) -> None:
        """examples: tensors like the traced values, by name, which tell shapes and types."""
        self.calls: dict[str, list[ir.Node]] = {}
        # Names of the operators whose first operand is changed in place.
        self.in_place: set[str] = set()
        self._trace, self._examples, self._memory = trace, examples, Memory(trace, norms=False)
        self._values: dict[fx.Node, ir.Value] = {}
        self._parts: dict[fx.Node, list[ir.Value]] = {}
        self._made: list[ir.Node] = []
        self._initializers: dict[str, ir.Value] = {}
        self._names: set[str] = set()
        inputs: list[ir.Value] = []
        outputs: dict[ir.Value, str] = {}
        for node in trace.graph.nodes:
            if node in trace.tensors:
                self._shaped(self._initializer(trace.tensors[node], trace.values[node]), node)
            elif node.op == "placeholder":
                inputs.append(self._shaped(ir.Value(name=node.name), node))
            elif node.op == "output":
                fx.node.map_arg(node.args, lambda leaf: outputs.setdefault(self._values[leaf], ""))
            else:
                self._shaped(self._node(node), node)
            if node in trace.seen_by_hooks:
                # What a hook sees has to stay, as an output has.
                outputs.setdefault(self._values[node], f"{node.name}, which a hook sees,")
        for index, (value, name) in enumerate(outputs.items()):
            # Whichever operator makes it.
            value.name = value.name if value.producer() is None else name or f"output {index}"
        self.model = ir.Model(
            ir.Graph(
                inputs,
                list(outputs),
                nodes=self._made,
                initializers=[value for value in self._initializers.values() if value.uses() or value in outputs],
                opset_imports={"": OPSET, "torch": 1},
                name="forward",
            ),
            ir_version=10,
        )

    def _shaped(self, value: ir.Value, node: fx.Node) -> ir.Value:
        self._values[node] = value
        like = self._examples.get(node.name)
        if like is not None and value.const_value is None:
            value.shape = ir.Shape([size if isinstance(size, int) else str(size) for size in like.shape])
            number = to_array(torch.empty(0, dtype=like.dtype if like.is_floating_point() else torch.int64))
            value.dtype = ir.DataType.from_numpy(number.dtype)
        return value

    def _node(self, node: fx.Node) -> ir.Value:
        changed = self._memory.changed(node)
        if not self._memory.is_clean(node):
            value = self._opaque(node)
            for other in changed:
                seen = [self._values[other], value]
                self._values[other] = self._add("changed", self._unique(f"{other.name} changed"), seen, "torch")
            return value
        module = self._trace.module(node)
        value = self._function(node) if module is None else self._module(node, module)
        if changed:
            self.in_place.add(str(self._made[-1].name))
        return value

    def _module(self, node: fx.Node, module: Any) -> ir.Value:
        data = node.args[0] if len(node.args) == 1 and not node.kwargs else node.kwargs.get("input")
        if not isinstance(data, fx.Node) or len(node.args) + len(node.kwargs) != 1:
            return self._opaque(node)
        return self._call(node, self._trace.paths[node], module, data)

    def _call(self, node: fx.Node, path: str, module: nn.Module, data: fx.Node) -> ir.Value:
        before, name = len(self._made), self._unique(path or "model")
        value = self._layer(name, path, module, self._values[data])
        if value is None:
            self._names.discard(name)
            return self._opaque(node)
        if len(self._made) > before:
            self.calls.setdefault(path, []).append(next(each for each in self._made[before:] if each.name == name))
        return value

    def _layer(self, name: str, path: str, module: Any, x: ir.Value) -> ir.Value | None:
        """Add the operators of a module, the one with its weight first; None where it has none."""
        kind = type(module)
        if is_layer(module):
            return (
                self._linear(name, path, module, x)
                if isinstance(module, nn.Linear)
                else self._conv(name, path, module, x)
            )
        if is_plain_batch_norm(module):
            return self._norm(name, path, module, x)
        if kind is nn.Identity or (kind in _DROPOUTS and not module.training):
            return self._add("Identity", name, [x])
        if kind is Zero:
            return self._initializer(f"{path}.zero", np.zeros((), np.float32 if x.dtype is None else x.dtype.numpy()))
        if kind is nn.Flatten and (module.start_dim, module.end_dim) == (1, -1):
            return self._add("Flatten", name, [x], axis=1)
        if kind is nn.ReLU:
            return self._add("Relu", name, [x])
        if kind is nn.LeakyReLU:
            return self._add("LeakyRelu", name, [x], alpha=float(module.negative_slope))
        if kind in _POOLS:
            return self._pool(name, module, x, int(kind.__name__[-2]))
        if kind in _TO_ONE and set(_wide(module.output_size, 1)) == {1} and _has_rank(x, int(kind.__name__[-2]) + 2):
            return self._add("GlobalAveragePool", name, [x])
        if kind in _PADS and _has_rank(x, int(kind.__name__[-2]) + 2):
            return self._pad(name, x, list(module.padding), "constant")
        return None

    def _linear(self, name: str, path: str, module: Any, x: ir.Value) -> ir.Value | None:
        if module._parameters.get("weight") is None:
            return None
        weight = as_array(module.weight)
        # Without a bias it has one of zeros, which a fold may replace.
        bias = np.zeros(len(weight), weight.dtype) if module.bias is None else as_array(module.bias)
        product = self._add("MatMul", name, [x, self._initializer(f"{path}.weight.T", weight.T)])
        if x.shape is not None:
            product.shape = ir.Shape([*x.shape[:-1], len(weight)])
        return self._add("Add", self._unique(f"{name}.bias"), [product, self._initializer(f"{path}.bias", bias)])

    def _conv(self, name: str, path: str, module: Any, x: ir.Value) -> ir.Value | None:
        """Without shapes it is taken to get batches, as batch norms do."""
        weight = module._parameters.get("weight")
        if weight is None or not _has_rank(x, weight.dim()):
            return None
        settings: dict[str, Any] = {
            "strides": list(module.stride),
            "dilations": list(module.dilation),
            "group": module.groups,
        }
        parameters = [
            self._initializer(f"{path}.{each}", tensor)
            for each in ("weight", "bias")
            if (tensor := module._parameters.get(each)) is not None
        ]
        if isinstance(module, TRANSPOSED):
            settings |= {"pads": [*module.padding, *module.padding], "output_padding": list(module.output_padding)}
            return self._add("ConvTranspose", name, [x, *parameters], **settings)
        around = [int(size) for size in module._reversed_padding_repeated_twice]
        pads = [*around[::2][::-1], *around[1::2][::-1]]
        if module.padding_mode != "zeros":
            x = self._pad(self._unique(f"{name}.pad"), x, around, _MODES[module.padding_mode])
            pads = [0] * len(pads)
        return self._add("Conv", name, [x, *parameters], pads=pads, **settings)

    def _norm(self, name: str, path: str, module: Any, x: ir.Value) -> ir.Value | None:
        if module.running_mean is None or module.running_var is None or module.training:
            return None
        mean = module.running_mean
        scale = torch.ones_like(mean) if module.weight is None else module.weight
        shift = torch.zeros_like(mean) if module.bias is None else module.bias
        vectors = {"weight": scale, "bias": shift, "running_mean": mean, "running_var": module.running_var}
        inputs = [self._initializer(f"{path}.{each}", tensor) for each, tensor in vectors.items()]
        return self._add("BatchNormalization", name, [x, *inputs], epsilon=float(module.eps))

    def _pool(self, name: str, module: Any, x: ir.Value, rank: int) -> ir.Value | None:
        kind = _POOLS[type(module)]
        own: dict[str, Any] = {"count_include_pad": int(bool(getattr(module, "count_include_pad", False)))}
        if kind == "MaxPool":
            own = {"dilations": _wide(module.dilation, rank)}
        odd = module.ceil_mode or getattr(module, "divisor_override", None) or getattr(module, "return_indices", False)
        if odd or not _has_rank(x, rank + 2):
            return None
        sizes, strides, pads = (_wide(each, rank) for each in (module.kernel_size, module.stride, module.padding))
        return self._add(kind, name, [x], kernel_shape=sizes, strides=strides, pads=[*pads, *pads], **own)

    def _pad(self, name: str, x: ir.Value, around: list[int], mode: str) -> ir.Value:
        """Add a Pad. around: as torch gives it, the last axis first, before and behind."""
        pads = [0, 0, *around[::2][::-1], 0, 0, *around[1::2][::-1]]
        return self._add("Pad", name, [x, self._initializer(f"{name}.sizes", np.asarray(pads, np.int64))], mode=mode)

    def _function(self, node: fx.Node) -> ir.Value:
        if (layer := self._trace.layers.get(node)) is not None:
            return self._call(node, self._trace.paths[node], layer, node.args[0])  # type: ignore[arg-type]
        if node.op == "call_function" and not is_torchs(node.target):
            return self._opaque(node)
        name, args = self._unique(f"{node.name}()"), node.args
        value = self._arithmetic(node, name)
        if value is None and args and isinstance(args[0], fx.Node):
            value = self._rearranged(node, name, self._values[args[0]])
        if value is None:
            self._names.discard(name)
            return self._opaque(node)
        return value

    def _arithmetic(self, node: fx.Node, name: str) -> ir.Value | None:
        args, called = node.args, name_of(node)
        if called in _ARITHMETIC and len(args) == 2 and not node.kwargs:
            types = [self._values[each].dtype for each in args if isinstance(each, fx.Node)]
            # As exporters write a number next to floats.
            dtype = types[0] if types and types[0] is not None and types[0].is_floating_point() else ir.DataType.DOUBLE
            operands = [self._operand(f"{node.name}.{index}", each, dtype) for index, each in enumerate(args)]
            return None if None in operands else self._add(_ARITHMETIC[called], name, operands)
        if called in ("cat", "concat") and args and isinstance(args[0], list | tuple):
            axis = node.kwargs.get("dim", args[1] if len(args) > 1 else 0)
            parts = [self._values[each] for each in args[0] if isinstance(each, fx.Node)]
            if len(parts) == len(args[0]) and isinstance(axis, int):
                return self._add("Concat", name, parts, axis=axis)
        return None

    def _rearranged(self, node: fx.Node, name: str, data: ir.Value) -> ir.Value | None:
        """Add what leaves the values of one operand, or their order, as they are."""
        args, called = node.args, name_of(node)
        if called in ("relu", "relu_"):
            return self._add("Relu", name, [data])
        if called in ("contiguous", "clone") and len(args) == 1:
            return self._add("Identity", name, [data])
        training = node.kwargs.get("training", args[2] if len(args) > 2 else None)
        if called.startswith(("dropout", "alpha_dropout")) and training is False:
            return self._add("Identity", name, [data])
        if called == "getitem" and args[1:] == (0,) and args[0] in self._trace.layers:
            return data
        if called == "getitem" and args[0] in self._parts:
            return self._parts[args[0]][args[1]]  # type: ignore[index]
        if called in _SPLITTING and (split := _sizes_of_parts(node, data)):
            axis, lengths = split
            operands = [data, self._initializer(f"{name}.sizes", np.asarray(lengths, np.int64))]
            self._add("Split", name, operands, parts=len(lengths), axis=axis)
            self._parts[node] = list(self._made[-1].outputs)
            return self._parts[node][0]
        if called == "flatten" and (*args[1:], *node.kwargs.values()) in ((1,), (1, -1)):
            return self._add("Flatten", name, [data], axis=1)
        if called == "interpolate" and data.shape is not None:
            # How far is told by an operator of which nothing is known; the channels stay.
            sizes = self._opaque(node, "sizes", asks=True)
            return self._add("Resize", name, [data, None, None, sizes], axes=list(range(2, len(data.shape))))
        if called.startswith("adaptive_avg_pool") and args[1:] in ((1,), ([1] * _rank(data),), ((1,) * _rank(data),)):
            return self._add("GlobalAveragePool", name, [data])
        if called == "mean" and data.shape is not None:
            dim: Any = node.kwargs.get("dim", args[1] if len(args) > 1 else None)
            keep = node.kwargs.get("keepdim", args[2] if len(args) > 2 else False)
            if node.kwargs.keys() <= {"dim", "keepdim"} and isinstance(dim, int | list | tuple):
                axes = self._initializer(f"{name}.axes", np.asarray(_wide(dim, 1), np.int64))
                return self._add("ReduceMean", name, [data, axes], keepdims=int(bool(keep)))
        if called in _QUESTIONS or (called == "getattr" and args[1] in _QUESTIONS):
            return self._opaque(node, asks=True)
        order = _permutation(called, node, data)
        return None if order is None else self._add("Transpose", name, [data], perm=order)

    def _operand(self, name: str, value: Any, dtype: ir.DataType) -> ir.Value | None:
        if isinstance(value, fx.Node):
            return self._values[value]
        return self._initializer(name, np.asarray(value, dtype.numpy())) if type(value) in (int, float) else None

    def _opaque(self, node: fx.Node, part: str = "", *, asks: bool = False) -> ir.Value:
        """Add an operator of which nothing is known but itself: its arguments, its values, and a module's tensors and classes.

        asks: it reads no more than the sizes of its first operand.
        """
        leaves: list[fx.Node] = []
        text = fx.node.map_arg((node.args, node.kwargs), lambda leaf: leaves.append(leaf) or f"<{len(leaves)}>")  # type: ignore[func-returns-value]
        inputs, module, classes = [self._values[leaf] for leaf in leaves], self._trace.module(node), ""
        if asks:
            inputs[0] = self._add("Shape", self._unique(f"{node.name}().shape"), inputs[:1])
        path = self._trace.paths.get(node, "")
        for inner, each in () if module is None else module.named_modules():
            classes += f"{inner}: {type(each).__name__}; "
            for name, tensor in (*each._parameters.items(), *each._buffers.items()):
                if tensor is not None:
                    inputs.append(self._initializer(".".join(filter(None, (path, inner, name))), tensor))
        name = self._unique(path or f"{node.name}()")
        kind = part or (name_of(node) if module is None else type(module).__name__)
        return self._add(kind, name, inputs, "torch", code=f"{text} {classes}")

    def _initializer(self, name: str, tensor: np.ndarray | torch.Tensor) -> ir.Value:
        if name not in self._initializers:
            array = as_array(tensor) if isinstance(tensor, torch.Tensor) else tensor
            self._initializers[name] = ir.val(name, const_value=ir.Tensor(array, name=name))
        return self._initializers[name]

    def _unique(self, name: str) -> str:
        found, count = name, 1
        while found in self._names:
            count += 1
            found = f"{name} ({count})"
        self._names.add(found)
        return found

    def _add(
        self, kind: str, name: str, inputs: Iterable[ir.Value | None], domain: str = "", parts: int = 1, **settings: Any
    ) -> ir.Value:
        """Add an operator; return its first output."""
        attributes = [ir.convenience.convert_attribute(key, value) for key, value in settings.items()]
        outputs = [ir.Value(name=f"{name} value {index or ''}".rstrip()) for index in range(parts)]
        self._made.append(ir.Node(domain, kind, list(inputs), attributes, outputs=outputs, name=name))
        return outputs[0]


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the numbers of a tensor; none for one on the meta device."""
    if tensor.is_meta:
        return np.empty(0, np.float32)
    plain = tensor.detach()
    plain = plain.dequantize() if plain.is_quantized else plain
    plain = plain.to_dense() if plain.layout is not torch.strided else plain
    return to_array(plain.contiguous())


def _rank(data: ir.Value) -> int:
    """Return the number of spatial axes of a value, 0 where it is not known."""
    return 0 if data.shape is None else len(data.shape) - 2


def _has_rank(value: ir.Value, rank: int) -> bool:
    """Whether a value may have this rank."""
    return value.shape is None or len(value.shape) == rank


def _permutation(name: str, node: fx.Node, data: ir.Value) -> list[int] | None:
    """Return the order of axes that a function gives; None where it is another function, or the rank is not known."""
    if name not in _PERMUTING or data.shape is None or len(node.all_input_nodes) > 1:
        return None
    # Each axis is told by its size.
    axes = torch.empty(tuple(range(2, 2 + len(data.shape))), device="meta")
    return [size - 2 for size in getattr(axes, name)(*node.args[1:], **node.kwargs).shape]


def _sizes_of_parts(node: fx.Node, data: ir.Value) -> tuple[int, list[int]] | None:
    """Return the axis along which a function splits, and the sizes of the parts; None where they are not known, or code
    takes the parts other than by their indices.
    """
    axis: Any = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    by_index = all(name_of(user) == "getitem" and isinstance(user.args[1], int) for user in node.users)
    if data.shape is None or not by_index or not isinstance(data.shape[axis], int) or len(node.all_input_nodes) > 1:
        return None
    like = torch.empty([size if isinstance(size, int) else 1 for size in data.shape], device="meta")
    function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    return axis, [part.shape[axis] for part in function(like, *node.args[1:], **node.kwargs)]


def _wide(value: Any, rank: int) -> list[int]:
    return [value] * rank if isinstance(value, int) else list(value)
