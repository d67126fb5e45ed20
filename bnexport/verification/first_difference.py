"""Where two models start to differ: the first value that is wrong, by the module that made it, and how it is wrong.

A diagnosis, never a verdict. Each model runs once more on the inputs that show the difference, with three small outputs for
each value v of its main graph:

    Shape(v)      every n-th number of v, some thousand at most      sum(v - v), which is NaN where v is not finite

The engine frees every value as in any run, so this takes the memory of a run and of the samples. A value of the reference is
matched where one of the candidate has its shape and, in the sample, its numbers within the bound of `tolerances.model`.

A fold removes values, so one without a match says nothing by itself. From an output that differs the search goes back through
values without a match. The candidate's first one there is where it starts to be wrong; the reference's value of the same shape
that is nearest to it names the module. A function that is not linear on the way to that one is missing in the candidate.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport import tolerances
from bnexport.errors import BnexportError
from bnexport.graph.functions import inline_calls
from bnexport.graph.nodes import Names, label, module_path
from bnexport.graph.shapes import Shapes
from bnexport.verification.file_engine import FileEngine
from bnexport.verification.verdict import Terms, Verification

# Numbers of a sample; up to twice as many where a value has so few.
_SAMPLE = 4096
_OBSERVED = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
# The first opset whose Slice takes its numbers as inputs.
_OPSET = 10
_NONLINEAR = frozenset(
    (
        "Relu",
        "LeakyRelu",
        "PRelu",
        "Clip",
        "Sigmoid",
        "HardSigmoid",
        "HardSwish",
        "Tanh",
        "Softplus",
        "Softsign",
        "Elu",
        "Selu",
    )
    + ("Celu", "Gelu", "Mish", "Swish", "Erf", "Exp", "Softmax", "ThresholdedRelu", "Abs", "Min", "Max", "MaxPool")
    + ("LayerNormalization", "InstanceNormalization")
)
# What ONNX Runtime says of the node that it cannot run.
_FAILING = re.compile(r"Name:'([^']+)'")
# Share of a channel's difference that a scale and a shift may leave, where they are named.
_LEFT = 0.05
_NAMED = 4


@dataclasses.dataclass(frozen=True)
class _Seen:
    """A value of one run: its sample in float64, and whether all of it is finite."""

    value: ir.Value
    shape: tuple[int, ...]
    sample: np.ndarray
    finite: bool

    @property
    def node(self) -> ir.Node | None:
        return self.value.producer()


def find_place(reference: ir.Model, candidate: ir.Model, verdict: Verification, terms: Terms) -> str:
    """Return where the candidate starts to differ from the reference, in a sentence; empty where that is not known."""
    failing = _FAILING.search(verdict.reason)
    if not verdict.outputs and failing is not None:
        nodes = {node.name: node for node in candidate.graph}
        return _at_node(nodes.get(failing[1]), verdict.witness)
    try:
        return _compare(*_both(reference, candidate, verdict.witness, terms), verdict.witness)
    except BnexportError:
        return ""


def find_layers(
    reference: ir.Model, candidate: ir.Model, inputs: Mapping[str, Any], terms: Terms
) -> list[tuple[str, str, str, float, float, str]]:
    """Return, for the last value of each module of the reference, the nearest one of the candidate.

    In each row: the module, the candidate's node, the shape, the largest difference and the largest number in the sample, and
    whether they agree. Raises BnexportError.
    """
    sides = _both(reference, candidate, inputs, terms)
    working = _working(sides)
    last = {module_path(seen.node): seen for seen in sides[0].seen.values() if seen.node is not None}
    rows = []
    for path, seen in last.items():
        alike = [each for each in sides[1].seen.values() if each.shape == seen.shape]
        if path and alike:
            near = min(alike, key=lambda each: _distance(seen, each))
            difference = float(np.abs(seen.sample - near.sample).max(initial=0.0))
            size, shape = float(np.abs(seen.sample).max(initial=0.0)), "x".join(map(str, seen.shape))
            agree = "equal" if _agree(seen, near, working) else "different, or not in the candidate"
            rows.append((path, label(near.node) if near.node else "an input", shape, difference, size, agree))
    return rows


def _both(
    reference: ir.Model, candidate: ir.Model, inputs: Mapping[str, Any], terms: Terms
) -> tuple[_Observed, _Observed]:
    sides = _Observed(reference, (), terms.timeout), _Observed(candidate, terms.providers, terms.timeout)
    for side in sides:
        side.observe(inputs)
    return sides


def _working(sides: Sequence[_Observed]) -> str:
    dtypes = {seen.value.dtype for side in sides for seen in side.seen.values()}
    return "float16" if ir.DataType.FLOAT16 in dtypes else "float32"


def _at_node(node: ir.Node | None, inputs: Mapping[str, Any]) -> str:
    if node is None:
        return ""
    shapes = " + ".join("x".join(map(str, np.shape(value))) for value in inputs.values())
    return f"it stops behind {_where(node)}, at {shapes}"


class _Observed:
    """A model, and its values for some inputs."""

    def __init__(self, model: ir.Model, providers: Sequence[str], timeout: float | None) -> None:
        self._model, self._where = model.clone(), (providers, timeout)
        inline_calls(self._model)
        self.outputs = {str(value.name): value for value in self._model.graph.outputs}
        self.seen: dict[ir.Value, _Seen] = {}

    def observe(self, inputs: Mapping[str, Any]) -> None:
        """Run the model, sampling its values. Raises BnexportError."""
        graph = self._model.graph
        self._live = _live(graph)
        if graph.opset_imports.get("", 0) < _OPSET:
            return
        shapes = Shapes(self._model)
        wanted = [value for value in self._live if shapes.dtype(value) in _OBSERVED]
        probed = self._model.clone()
        names = _with_samples(probed, [str(value.name) for value in wanted])
        found = iter(FileEngine(probed, *self._where).run(inputs, names))
        for value, shape, sample, finite in zip(wanted, found, found, found):
            self.seen[value] = _Seen(value, tuple(shape.tolist()), sample.astype(np.float64), bool(np.isfinite(finite)))

    def read_by(self, value: ir.Value) -> Iterator[ir.Value]:
        """Yield the sampled values that a value is made of; of others, those that they are made of."""
        node = value.producer()
        for operand in () if node is None else node.inputs:
            if operand in self.seen:
                yield operand
            elif operand is not None and operand in self._live:
                yield from self.read_by(operand)

    def back(self, starts: Iterable[ir.Value], matched: Collection[ir.Value]) -> list[_Seen]:
        """Return the values without a match on the way back from `starts`, in the order of the graph."""
        left, found = list(starts), set[ir.Value]()
        while left:
            value = left.pop()
            if value not in found:
                found.add(value)
                left += [each for each in self.read_by(value) if each not in matched]
        return [seen for value, seen in self.seen.items() if value in found]

    def whole(self, seen: _Seen, inputs: Mapping[str, Any]) -> np.ndarray:
        """Return all numbers of a value. Raises BnexportError."""
        model, name = self._model.clone(), str(seen.value.name)
        if name not in self.outputs:
            model.graph.outputs.append(next(each for each in _live(model.graph) if each.name == name))
        return FileEngine(model, *self._where).run(inputs, [name])[0].astype(np.float64)


def _live(graph: ir.Graph) -> dict[ir.Value, None]:
    """Return the values that depend on an input, in the order of the graph."""
    live: dict[ir.Value, None] = {value: None for value in graph.inputs if not value.is_initializer()}
    for node in graph:
        if any(value in live for value in node.inputs if value is not None):
            live.update((value, None) for value in node.outputs if value.name)
    return live


def _with_samples(model: ir.Model, names: Sequence[str]) -> list[str]:
    """Add the three outputs of each value of these names, in place, as the only outputs; return their names."""
    graph, fresh = model.graph, Names(model)
    # Before, each initializer is an input as well.
    model.ir_version = max(model.ir_version, 4)
    values = {str(value.name): value for value in _live(graph)}

    def constant(number: int) -> ir.Value:
        value = ir.val(fresh.fresh("number"), const_value=ir.tensor(np.array([number], np.int64)))
        graph.register_initializer(value)
        return value

    def add(operator: str, *operands: ir.Value) -> ir.Value:
        node = ir.node(operator, operands)
        node.outputs[0].name = fresh.fresh("sample")
        graph.append(node)
        return node.outputs[0]

    start, end, two, most, all_of_it = (constant(number) for number in (0, 2**62, 2, 2 * _SAMPLE, -1))
    one, outputs = constant(1), list[ir.Value]()
    for name in names:
        flat = add("Reshape", values[name], all_of_it)
        # An odd step meets every channel of a batch of rows.
        step = add("Add", add("Mul", add("Div", add("Shape", flat), most), two), one)
        sample = add("Slice", flat, start, end, start, step)
        outputs += [add("Shape", values[name]), sample, add("ReduceSum", add("Sub", flat, flat))]
    graph.outputs[:] = outputs
    return [str(value.name) for value in outputs]


def _compare(reference: _Observed, candidate: _Observed, inputs: Mapping[str, Any]) -> str:
    working = _working((reference, candidate))
    by_shape: dict[tuple[int, ...], list[_Seen]] = {}
    for seen in candidate.seen.values():
        by_shape.setdefault(seen.shape, []).append(seen)
    pairs = [
        (one.value, other.value)
        for one in reference.seen.values()
        for other in by_shape.get(one.shape, ())
        if _agree(one, other, working)
    ]
    matched, theirs = {one for one, _ in pairs}, {other for _, other in pairs}
    wrong = [
        name
        for name, value in reference.outputs.items()
        if name in candidate.outputs and (value, candidate.outputs[name]) not in set(pairs)
    ]
    own = reference.back([reference.outputs[name] for name in wrong], matched)
    others = candidate.back([candidate.outputs[name] for name in wrong], theirs)
    if not own or not others:
        return ""
    first = others[0]
    near = min(own, key=lambda seen: _distance(seen, first))
    missing = next((seen for seen in _behind(reference, near, own) if _is_nonlinear(seen)), None)
    if missing is not None:
        return f"first difference behind {_where(missing.node)}: the candidate has no value like its result"
    text = f"first difference behind {_where(near.node, first.node)}"
    if near.shape != first.shape:
        return f"{text}: the reference has no value like that of the candidate's {_where(first.node)}"
    return f"{text}: {_how(reference.whole(near, inputs), candidate.whole(first, inputs), working)}"


def _agree(one: _Seen, other: _Seen, working: str) -> bool:
    if not (one.finite and other.finite):
        return one.finite == other.finite and np.array_equal(one.sample, other.sample, equal_nan=True)
    return bool(np.abs(one.sample - other.sample).max(initial=0.0) <= tolerances.model(working, one.sample).atol)


def _distance(one: _Seen, other: _Seen) -> float:
    """Return the distance of two samples, relative to the first; none of another shape is near."""
    if one.shape != other.shape:
        return np.inf
    finite = np.isfinite(one.sample) & np.isfinite(other.sample)
    size = float(np.linalg.norm(one.sample[finite]))
    return float(np.linalg.norm(one.sample[finite] - other.sample[finite])) / (size or 1.0)


def _behind(side: _Observed, end: _Seen, among: Sequence[_Seen]) -> list[_Seen]:
    """Return those of some values that `end` is made of, in the order of the graph, without itself."""
    others = {seen.value for seen in side.seen.values()} - {seen.value for seen in among}
    return [seen for seen in side.back([end.value], others) if seen is not end]


def _is_nonlinear(seen: _Seen) -> bool:
    return seen.node is not None and seen.node.op_type in _NONLINEAR


def _where(*nodes: ir.Node | None) -> str:
    """Return the first module that made one of these nodes; the first node's own name where none is known."""
    known = [node for node in nodes if node is not None]
    return next(filter(None, map(module_path, known)), f"node {label(known[0])!r}" if known else "the inputs")


def _how(expected: np.ndarray, got: np.ndarray, working: str) -> str:
    """Say how a value differs: where it is not finite, by a scale or a shift of channels, or by other channels' numbers."""
    bad = np.isfinite(expected) & ~np.isfinite(got)
    if bad.any():
        limit = ", and float16 ends at 65504" if working == "float16" else ""
        largest = np.abs(expected[bad]).max()
        return f"{int(bad.sum()):,} numbers are NaN or infinite where the reference's largest is {largest:.3g}{limit}"
    odd = ~np.isfinite(expected)
    other = odd & ~((got == expected) | (np.isnan(got) & np.isnan(expected)))
    if other.any():
        return f"{int(other.sum()):,} numbers differ from the reference's, which are NaN or infinite there"
    expected, got = np.where(odd, 0.0, expected), np.where(odd, 0.0, got)
    largest = float(np.abs(got - expected).max(initial=0.0))
    axis = 1 if expected.ndim in (2, 4, 5) else max(expected.ndim - 1, 0)
    if expected.ndim < 2:
        return f"largest {largest:.3g}"
    rows = [np.moveaxis(value, axis, 0).reshape(value.shape[axis], -1) for value in (expected, got)]
    allowed = tolerances.model(working, expected).atol
    wrong = np.flatnonzero(np.abs(rows[1] - rows[0]).max(axis=1) > allowed)
    return f"largest {largest:.3g}{_of_channels(rows[0], rows[1], wrong, allowed)}"


def _of_channels(expected: np.ndarray, got: np.ndarray, wrong: np.ndarray, allowed: float) -> str:
    """Say what one channel, or all that are wrong, have in common. Rows are channels."""
    if not wrong.size:
        return ""
    worst = int(wrong[np.abs(got - expected)[wrong].max(axis=1).argmax()])
    which = f"channel {worst}" if wrong.size == 1 else f"{wrong.size} of {len(expected)} channels, most in {worst}"
    source = [int(row) for row in range(len(expected)) if np.abs(expected[row] - got[worst]).max() <= allowed]
    if source and worst not in source:
        return f", in {which}: it has what is in channel {source[0]} of the reference"
    scale, shift, left = _fit(expected[worst], got[worst])
    if left > _LEFT * np.abs(got[worst] - expected[worst]).max():
        return f", in {which}"
    parts = [f"scale of channel {worst} by {scale:.4g}"] * bool(
        abs(scale - 1) * np.abs(expected[worst]).max() > allowed
    )
    parts += [f"shift of channel {worst} by {shift:.3g}"] * bool(abs(shift) > allowed)
    return f", in {which}: {' and '.join(parts)}" if parts else f", in {which}"


def _fit(x: np.ndarray, y: np.ndarray) -> tuple[float, float, float]:
    """Fit y = scale x + shift; return both, and the largest difference that is left. One number has a scale only."""
    if x.std() == 0.0:
        scale, shift = 1.0, float((y - x).mean())
    else:
        scale, shift = map(float, np.polyfit(x, y, 1))
    return scale, shift, float(np.abs(scale * x + shift - y).max())
