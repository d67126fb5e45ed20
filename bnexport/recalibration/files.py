"""Re-estimation of the running statistics of an ONNX file, run in ONNX Runtime.

The model is cut in front of its batch norms (`Segments`), and each of them gets its statistics as inputs. Its own input is
measured where it lies, in float64. `together` goes through the segments once for each batch and gives a batch norm the
statistics of the batch; `stored` goes through them in the same way with the model's own. `one_by_one` finishes the batch norms of
one level after those before it, on all batches. Where the values between two levels fit into memory they are kept, so that the
next level starts from them; else the segments before run again.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx
import onnx_ir as ir

from bnexport import interface
from bnexport.errors import MissingFileError, UnsupportedModelError, UsageError
from bnexport.graph.conversion import convert, insert_casts
from bnexport.graph.evaluate import constant_tensor, read_tensor
from bnexport.graph.nodes import (
    Refused,
    get_float,
    input_at,
    is_portable_body,
    is_standard,
    is_sync_batch_norm,
    label,
)
from bnexport.graph.scopes import GraphContext, new_constant, scopes
from bnexport.graph.surgery import Surgery
from bnexport.interface import check_choice
from bnexport.model_io import check_space, to_proto, walk, write
from bnexport.model_io.read import ModelSource, Source, open_source
from bnexport.recalibration import moments
from bnexport.recalibration.report import LayerChange, RecalibrationReport
from bnexport.runtime import engine
from bnexport.runtime.engine import OnnxRuntime
from bnexport.verification import certificate

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

# Rows of NumPy files as batches for a model, read when they are needed.

Array = np.ndarray[Any, Any]


@dataclasses.dataclass(frozen=True)
class BatchedRows:
    """Arrays by input name, cut along dimension 0 into batches of `size` rows; the last one may be smaller."""

    arrays: Mapping[str, Sequence[Array]]
    size: int

    def __iter__(self) -> Iterator[dict[str, Array]]:
        for first in range(0, len(self), self.size):
            yield {name: _cut(pieces, first, self.size) for name, pieces in self.arrays.items()}

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(len(piece) for piece in next(iter(self.arrays.values())))


def open_rows(files: Mapping[str, str | os.PathLike[str]], size: int) -> BatchedRows:
    """Map the rows of each input: a .npy file, or a folder whose .npy files follow each other by name.

    Raises UsageError: a file is missing or no array of rows, or inputs have different numbers of rows.
    """
    arrays = {name: _pieces(name, Path(path)) for name, path in files.items()}
    lengths = {name: sum(len(piece) for piece in pieces) for name, pieces in arrays.items()}
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise UsageError(f"input: got different numbers of rows: {listed}; expected the same number for each input")
    if 0 in lengths.values():
        raise UsageError(f"input {next(iter(lengths))}: got no rows, expected one or more")
    return BatchedRows(arrays, size)


def _pieces(name: str, path: Path) -> list[Array]:
    paths = sorted(path.glob("*.npy")) if path.is_dir() else [path]
    if not paths:
        raise UsageError(f"input {name}: the folder {str(path)!r} has no .npy files")
    pieces = [_load(name, each) for each in paths]
    for each, piece in zip(paths, pieces, strict=True):
        if piece.shape[1:] != pieces[0].shape[1:] or piece.dtype != pieces[0].dtype:
            raise UsageError(
                f"input {name}: {str(each)!r} has {piece.dtype} rows of {piece.shape[1:]}, "
                f"{str(paths[0])!r} has {pieces[0].dtype} rows of {pieces[0].shape[1:]}; expected the same in all files"
            )
    return pieces


def _load(name: str, path: Path) -> Array:
    try:
        loaded = np.load(path, mmap_mode="r", allow_pickle=False)
    except FileNotFoundError as error:
        raise MissingFileError(f"input {name}: {str(path)!r}: no such file; check the path") from error
    except (OSError, ValueError, EOFError) as error:
        raise UsageError(f"input {name}: cannot read {str(path)!r}, expected a file that numpy.save wrote") from error
    if not isinstance(loaded, np.ndarray) or loaded.ndim == 0:
        raise UsageError(f"input {name}: {str(path)!r} holds no rows, expected an array with rows in dimension 0")
    return loaded


def _cut(pieces: Sequence[Array], first: int, count: int) -> Array:
    """Return rows `first` to `first + count` of arrays that follow each other."""
    found = []
    for piece in pieces:
        if first < len(piece) and count > 0:
            found.append(piece[first : first + count])
            count -= len(found[-1])
        first = max(0, first - len(piece))
    return np.ascontiguousarray(found[0] if len(found) == 1 else np.concatenate(found))


# Bytes of values between two levels that are kept for all batches.
KEPT = 1 << 30
_SYNC_PLACES, _PLACES = (1, 2), (3, 4)


@dataclasses.dataclass(frozen=True)
class RecalibrationResult:
    """model: with the new statistics, owned by the caller: a ModelProto if `source` was one, else an onnx_ir.Model.

    report: what changed.
    """

    model: Any
    report: RecalibrationReport

    def _repr_html_(self) -> str:
        return self.report._repr_html_()

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the command line prints it with --json."""
        return self.report.to_dict()


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One batch norm of the caller's model, and its place in the main graph.

    places: of mean and variance among the node's inputs. types: of the stored ones. stored: the mean. Two nodes that share tensors are two
    layers: exporters write equal tensors once, so sharing does not tell a module that runs twice.
    """

    node: ir.Node
    name: str
    places: tuple[int, int]
    types: tuple[Any, Any]
    old: tuple[moments.Row, moments.Row]
    eps: float
    stored: ir.TensorProtocol


def recalibrate_file(
    source: Source,
    target: str | os.PathLike[str] | None,
    batches: Iterable[Any],
    *,
    process_group: ProcessGroup | Callable[[Any], list[Any]] | None = None,
    layers: str = "one_by_one",
    overwrite: bool = False,
) -> RecalibrationResult:
    """Re-estimate the running statistics of the batch norms of an ONNX model on data; nothing else changes.

    BatchNormalization and MMCVSyncBatchNorm of the main graph; both normalise as in inference, whatever mode they are in.

    Args:
        source: a path, ModelProto or onnx_ir.Model; never changed.
        target: the file to write, atomically; None for no file. Of several processes that share a folder, one gives it.
        batches: the model's inputs by name; for a model with one input also arrays or tensors, or pairs of the input and a
            label, as a DataLoader gives them. `one_by_one` goes through them once for each level of batch norms: a list, or
            `bnexport.recalibration.files.open_rows`, not a generator.
        process_group, layers: as `bnexport.recalibrate` takes them. Batch norms that do not feed each other are measured in
            the same pass.
        overwrite: replace `target` if it exists, as a whole; it may be `source`.

    Raises:
        UsageError: no rows, one value a channel, a value that is not finite (its row is named), inputs that do not fit.
        ModelError: the model is refused, or ONNX Runtime cannot run it.
        GroupError: the processes have different models, or one of them failed.
    """
    check_choice("layers", layers, moments.MODES)
    write.check_new(target, overwrite)
    opened = open_source(source)
    model = opened.model
    if target is not None:
        check_space(target, write.tensor_total(model) * 9 // 10)
    changed, report = measure_file(opened, batches, process_group, layers)
    if changed:
        _write(model, list(zip(changed, report.layers, strict=True)))
        model.metadata_props.pop(certificate.KEY, None)  # the folds that it proves had other statistics
    if target is not None:
        own = [opened.path] if opened.path else []
        write.save(model, target, inputs=own, overwrite_input=overwrite)
    return RecalibrationResult(to_proto(model) if isinstance(source, onnx.ModelProto) else model, report)


def measure_file(
    opened: ModelSource, batches: Iterable[Any], process_group: Any, layers: str
) -> tuple[list[_Layer], RecalibrationReport]:
    """Measure the batch norms of a model, which stays as it is; return those that ran, and old and new statistics of each.

    layers: as `recalibrate_file` takes it, or "stored": in one pass, in which each normalises with its stored statistics.
    """
    found, left = _layers(opened.model)
    segments, inputs, reasons = _segments(opened.model, found)
    sums = moments.Measurement(
        {number: (layer.name, len(layer.old[0])) for number, layer in found.items()}, process_group
    )
    if len(segments):
        run = _FileRun(segments, inputs, found, sums)
        run.one_by_one(batches) if layers == "one_by_one" else run.in_one_pass(batches, stored=layers == "stored")
    reasons = {number: "no values reached it" for number in found if number not in sums.done} | reasons
    left += [(found[number].name, reason) for number, reason in reasons.items()]
    notes = (*opened.notes, *_notes([found[number] for number in sums.done]))
    changes = []
    for number, row in sums.done.items():
        layer, first = found[number], segments.level_of[number] == 0
        new = moments.statistics(row)
        changes.append(LayerChange(layer.name, int(row[0]), layer.eps, first, 1, *layer.old, *new))
    report = RecalibrationReport(tuple(changes), tuple(left), layers, sums.passes, sums.batches, sums.rows, notes)
    return [found[number] for number in sums.done], report


def _layers(model: ir.Model) -> tuple[dict[int, _Layer], list[tuple[str, str]]]:
    """Return the batch norms of the main graph with stored statistics, and those that are left alone, with the reason."""
    found, left = {}, []
    for number, node in enumerate(model.graph):
        if not _is_norm(node):
            continue
        sync = is_sync_batch_norm(node)
        places = _SYNC_PLACES if sync else _PLACES
        try:
            mean, var = (_stored(node, place) for place in places)
            eps = get_float(node, "eps" if sync else "epsilon", 1e-5)
        except Refused as reason:
            left.append((label(node), reason.text))
            continue
        types = mean.dtype.numpy(), var.dtype.numpy()
        old = read_tensor(mean).astype(np.float64), read_tensor(var).astype(np.float64)
        found[number] = _Layer(node, label(node), places, types, old, eps, mean)
    main = set(model.graph)
    for node in walk.nodes(model):
        if node not in main and _is_norm(node) and not _in_body(node):
            left.append((label(node), "it is in a function or a subgraph; inline it first with bnexport inline"))
    return found, left


def _notes(layers: Sequence[_Layer]) -> Iterator[str]:
    """Say which layers had one stored mean, by which they may be one module that runs several times."""
    readers: dict[int, list[str]] = {}
    for layer in layers:
        if layer.old[0].any():  # equal means of untrained layers are stored once, too
            readers.setdefault(id(layer.stored), []).append(layer.name)
    for names in readers.values():
        if len(names) > 1:
            yield (
                f"{', '.join(names)} had one running mean and get one each, of their own data; if they are one module that"
                " runs several times, recalibrate the module, which estimates it over all its runs, and export it again"
            )


def _is_norm(node: ir.Node) -> bool:
    return is_sync_batch_norm(node) or is_standard(node, "BatchNormalization")


def _in_body(node: ir.Node) -> bool:
    graph = node.graph
    return isinstance(graph, ir.Function) and is_portable_body(graph)


def _stored(node: ir.Node, place: int) -> ir.TensorProtocol:
    value = input_at(node, place)
    if value is None:
        raise Refused("no-statistics", "it has no running statistics")
    while (origin := value.producer()) is not None and is_standard(origin, "Identity") and origin.inputs[0] is not None:
        value = origin.inputs[0]  # exporters write equal tensors once
    tensor = value.const_value if value.is_initializer() else None
    if origin is not None and is_standard(origin, "Constant"):
        tensor = constant_tensor(origin)
    if tensor is None:
        raise Refused("not-constant", f"its running statistic {value.name!r} is computed, not stored")
    return tensor


def _segments(model: ir.Model, found: Mapping[int, _Layer]) -> tuple[Segments, list[ir.Value], dict[int, str]]:
    """Cut a copy of the model, with all batch norms in inference.

    Return also its inputs, and why batch norms are left alone.
    """
    copy = model.clone()
    nodes = list(copy.graph)
    numbers = {}
    for number in found:
        nodes[number].name = f"bnexport.{number}"  # conversion keeps names
        numbers[nodes[number].name] = number
    reasons = {}
    if found and not _in_inference(copy):
        done = [each for each in convert(copy, trained=True) if each.name in numbers]
        reasons = {numbers[each.name]: each.reason.text for each in done if each.reason}
        insert_casts(copy)
    norms = {}
    for node in copy.graph:
        if node.name not in numbers or numbers[node.name] in reasons or not is_standard(node, "BatchNormalization"):
            continue
        x, number = node.inputs[0], numbers[node.name]
        if x is not None and x.producer() is None and not x.is_graph_input():
            reasons[number] = "its input is a constant"
        else:
            norms[number] = node
    inputs = [value for value in copy.graph.inputs if not value.is_initializer()]
    return Segments(copy, norms), inputs, reasons


def _in_inference(model: ir.Model) -> bool:
    """Whether nothing is to be converted: in files for inference there are neither sync batch norms nor training nodes."""
    imports = model.graph.opset_imports
    plain = imports.get("", imports.get("ai.onnx", 0)) >= 7 and not model.functions
    return plain and not any(
        is_sync_batch_norm(node) or len(node.outputs) > 1 or "training_mode" in node.attributes
        for node in walk.nodes(model)
        if _is_norm(node)
    )


class _FileRun:
    """The passes of one re-estimation. statistics: with which batch norms normalise, by the names that `segments` has."""

    def __init__(
        self, segments: Segments, inputs: list[ir.Value], layers: Mapping[int, _Layer], sums: moments.Measurement
    ) -> None:
        self._segments, self._layers, self._sums = segments, layers, sums
        self._inputs = {str(value.name): value for value in inputs}
        self._statistics: dict[str, np.ndarray[Any, Any]] = {}
        # Rows and values of each batch behind the level that runs; None where they are too large.
        self._kept: collections.deque[tuple[int, Values]] | None = None
        self._bytes = 0

    def in_one_pass(self, batches: Iterable[Any], *, stored: bool) -> None:
        """Measure all layers in one pass, in which each normalises with its stored statistics or those of its batch."""
        for number, layer in self._layers.items() if stored else ():
            self._give(number, layer.old)

        def run(batch: Any) -> None:
            self._sums.size, values = self._begin(batch)
            for level in range(len(self._segments)):
                rows = self._step(level, values)
                for number, row in () if stored else rows:
                    self._give(number, self._sums.of_batch(number, row))

        self._sums.measure(batches, run)

    def one_by_one(self, batches: Iterable[Any]) -> None:
        """Finish the layers of one level after those before it."""
        count = len(self._segments)
        for level in range(count):
            interface.report("pass", level, count)
            kept, self._kept, self._bytes = self._kept, collections.deque(), 0
            given = batches if kept is None else (kept.popleft() for _ in range(len(kept)))
            run = functools.partial(self._level, 0 if kept is None else level, level)
            self._sums.measure(given, run, passes=count)
            for number in self._segments.segments[level].measured:
                if number in self._sums.done:
                    self._give(number, moments.statistics(self._sums.done[number]))

    def _level(self, start: int, level: int, batch: Any) -> None:
        """Measure one level, from the values that are kept behind `start - 1`, and keep what the next one reads."""
        self._sums.size, values = batch if start else self._begin(batch)
        for earlier in range(start, level):
            self._segments.run(earlier, values, self._statistics)
        self._step(level, values)
        self._segments.drop(level, values)
        self._bytes += sum(array.nbytes for array in values.values())
        if self._kept is not None:
            self._kept.append((self._sums.size, values))
        if self._bytes > KEPT:
            self._kept = None

    def _step(self, level: int, values: Values) -> list[tuple[int, moments.Row]]:
        """Run one segment and measure the batch norms behind it."""
        self._segments.run(level, values, self._statistics)
        rows = []
        for number, value in self._segments.segments[level].measured.items():
            x, layer = values[str(value.name)], self._layers[number]
            if x.ndim < 2 or x.shape[1] != len(layer.old[0]):
                raise UsageError(
                    f"batches: the input of {layer.name} has shape {x.shape}, expected (N, {len(layer.old[0])}, *); "
                    "nothing was changed"
                )
            rows.append((number, moments.of_array(x)))
            self._sums.add(*rows[-1], x)
        return rows

    def _give(self, number: int, vectors: tuple[moments.Row, moments.Row]) -> None:
        """Let one batch norm normalise with a mean and a variance."""
        for what, vector, dtype in zip(("mean", "var"), vectors, self._layers[number].types, strict=True):
            self._statistics[statistic(number, what)] = np.asarray(vector, dtype)

    def _begin(self, batch: Any) -> tuple[int, Values]:
        """Return the rows of one batch, and its arrays by input. Raises UsageError where it does not fit the model."""
        at, declared = f"batches: batch {self._sums.batch}", ", ".join(self._inputs)
        if isinstance(batch, (tuple, list)) and batch and hasattr(batch[0], "shape"):
            batch = batch[0]  # of an input and its label
        if not isinstance(batch, Mapping):
            if len(self._inputs) != 1:
                raise UsageError(f"{at} is one array, expected arrays by name for the inputs {declared}")
            batch = {declared: batch}
        for name in sorted(set(self._inputs) ^ set(map(str, batch))):
            raise UsageError(f"{at} {'lacks' if name in self._inputs else 'has'} {name!r}; the model takes {declared}")
        values = {name: np.asarray(batch[name]) for name in self._inputs}
        for name, array in values.items():
            _check_fit(f"{at} gives {name}", array, self._inputs[name])
        return next((len(array) for array in values.values() if array.ndim), 1), values


def _check_fit(what: str, array: np.ndarray[Any, Any], value: ir.Value) -> None:
    """Raise UsageError where an array has another shape or type than the model's input declares."""
    sizes = None if value.shape is None else [size if isinstance(size, int) else None for size in value.shape]
    if sizes is not None and (
        len(sizes) != array.ndim or any(size not in (None, got) for size, got in zip(sizes, array.shape, strict=True))
    ):
        shown = ", ".join(str(size) for size in value.shape or ())
        rows = sizes and array.ndim and sizes[0] not in (None, len(array))
        way_out = "; its rows must be a multiple of that" if rows else ""
        raise UsageError(f"{what} the shape {array.shape}, the model takes ({shown}){way_out}")
    if value.dtype is not None and array.dtype != value.dtype.numpy():
        raise UsageError(f"{what} as {array.dtype}, the model takes {value.dtype.numpy()}")


def _write(model: ir.Model, changes: list[tuple[_Layer, LayerChange]]) -> None:
    """Store the statistics: in place where a tensor serves this layer alone, else in a new one."""
    context: GraphContext | None = None
    for layer, change in changes:
        vectors = zip(("mean", "var"), layer.places, layer.types, (change.new_mean, change.new_var), strict=True)
        for what, place, dtype, vector in vectors:
            array, value = vector.astype(dtype), layer.node.inputs[place]
            assert value is not None
            if value.is_initializer() and len(value.uses()) == 1 and not value.is_graph_output():
                value.const_value = ir.Tensor(array, name=value.name)
                continue
            context = context or scopes(model, Surgery(), GraphContext)[0].context
            new = new_constant(context, model.graph, layer.node, array, f"{layer.name}.running_{what}")
            layer.node.replace_input_with(place, new)


# A model cut in front of its batch norms, so that their inputs can be measured and their statistics chosen.
#
# The level of a value is the largest number of batch norms on a path to it from an input. Segment s makes the values of level s
# that batch norms or later segments read: it begins with the batch norms whose inputs segment s - 1 made, with statistics that
# are inputs of the model. Batch norms of one level do not feed each other. What feeds no batch norm is left out.

Values = dict[str, np.ndarray[Any, Any]]

_STATISTICS = {"mean": 3, "var": 4}


@dataclasses.dataclass
class Segment:
    """Part of a model. made: what it computes. measured: inputs of the batch norms behind it. given: what it reads.

    last: names of the values that no later segment reads or measures.
    """

    made: list[ir.Value]
    measured: dict[int, ir.Value]
    given: dict[ir.Value, None] = dataclasses.field(default_factory=dict)
    last: list[str] = dataclasses.field(default_factory=list)
    runtime: OnnxRuntime | None = None

    def collect(self, level: int, levels: Mapping[ir.Value, int]) -> None:
        """Find the inputs of the model and the values of lower levels that its values are made from."""
        open_nodes = [node for value in self.made if (node := value.producer())]
        seen = set(open_nodes)
        while open_nodes:
            node = open_nodes.pop()
            for value in _sources(node):
                producer = value.producer()
                if producer is not None and levels.get(value, -1) == level:
                    open_nodes += [] if producer in seen else [producer]
                    seen.add(producer)
                elif value in levels or (value.graph is node.graph and not value.is_initializer()):
                    self.given[value] = None


class Segments:
    """A model in segments. Gives the model an input for each statistic of `norms`, named by `statistic`.

    norms: the BatchNormalization nodes of the main graph to measure, in inference, by any number.
    """

    def __init__(self, model: ir.Model, norms: Mapping[int, ir.Node]) -> None:
        self._model = model
        for number, node in norms.items():
            for what, place in _STATISTICS.items():
                old = node.inputs[place]
                assert old is not None
                new = ir.Value(name=statistic(number, what), type=old.type)
                model.graph.inputs.append(new)
                node.replace_input_with(place, new)
        levels = _levels(model.graph, set(norms.values()))
        inputs = {number: x for number, node in norms.items() if (x := node.inputs[0]) is not None}
        self.level_of = {number: levels.get(x, 0) for number, x in inputs.items()}
        self.segments: list[Segment] = []
        needed, seen = dict.fromkeys(inputs.values()), set[str]()
        for level in range(max(self.level_of.values(), default=-1), -1, -1):
            measured = {number: x for number, x in inputs.items() if self.level_of[number] == level}
            made = [value for value in needed if value.producer() is not None and levels[value] == level]
            segment = Segment(made, measured)
            segment.collect(level, levels)
            needed |= segment.given
            names = {str(value.name) for value in (*segment.given, *measured.values())}
            segment.last = sorted(names - seen)
            seen |= names
            self.segments.insert(0, segment)

    def __len__(self) -> int:
        return len(self.segments)

    def run(self, level: int, values: Values, statistics: Values) -> None:
        """Run one segment: add to `values` what later segments need and the inputs of the batch norms behind it, and drop
        what nothing reads any more.

        values: of the segments before, or the model's inputs.
        """
        segment = self.segments[level]
        if segment.made:
            names = [str(value.name) for value in segment.given]
            feeds = {name: statistics[name] if name in statistics else values[name] for name in names}
            if segment.runtime is None:
                segment.runtime = self._open(segment, feeds)
            made = [str(value.name) for value in segment.made]
            values.update(zip(made, segment.runtime.run(feeds, made), strict=True))
        self.drop(level - 1, values)

    def drop(self, level: int, values: Values) -> None:
        """Drop the values that no segment behind `level` reads."""
        for name in self.segments[level].last if level >= 0 else ():
            values.pop(name, None)

    def _open(self, segment: Segment, feeds: Values) -> OnnxRuntime:
        graph = ir.convenience.extract(self._model.graph, list(segment.given), segment.made)
        for value in graph.inputs:
            array = feeds[str(value.name)]
            if not isinstance(array, np.ndarray):
                raise UnsupportedModelError(f"{value.name}, which a batch norm depends on, is no tensor")
            value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
            value.shape = ir.Shape([None] * array.ndim)
        for value in graph.outputs:
            value.shape = None
        functions = list(self._model.functions.values())
        # Threads that spin after a run would keep the next session's from the cores.
        options = engine.default_options()
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        return engine.open(
            ir.Model(graph, ir_version=max(self._model.ir_version, 4), functions=functions), options=options
        )


def statistic(number: int, what: str) -> str:
    """Return the name of the input that is "mean" or "var" of a batch norm."""
    return f"bnexport.{number}.{what}"


def _levels(graph: ir.Graph, norms: set[ir.Node]) -> dict[ir.Value, int]:
    """Return the levels of the values that the nodes of a graph make."""
    levels: dict[ir.Value, int] = {}
    for node in graph:
        level = max((levels.get(value, 0) for value in _sources(node)), default=0) + (node in norms)
        levels.update((output, level) for output in node.outputs)
    return levels


def _sources(node: ir.Node) -> Iterable[ir.Value]:
    """Return what a node reads, in its bodies too."""
    return (value for each in (node, *walk.inner_nodes(node)) for value in each.inputs if value is not None)
