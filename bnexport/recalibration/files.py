"""Re-estimation of the running statistics of an ONNX file, run in ONNX Runtime.

The model is cut in front of its batch norms (`segments`), and each of them gets its statistics as inputs. Its own input is
measured where it lies, in float64. `together` goes through the segments once for each batch and gives a batch norm the
statistics of the batch. `one_by_one` finishes the batch norms of one level after those before it, on all batches. Where the
values between two levels fit into memory they are kept, so that the next level starts from them; else the segments before run
again.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from bnexport import interface
from bnexport.errors import MissingFileError, UsageError
from bnexport.graph.constants import Constants
from bnexport.graph.conversion import convert
from bnexport.graph.evaluate import constant_tensor, read_tensor
from bnexport.graph.nodes import Refused, get_float, input_at, is_portable_body, is_standard, is_sync_batch_norm, label
from bnexport.graph.scopes import GraphContext, new_constant, scopes
from bnexport.graph.shapes import Shapes
from bnexport.graph.simplify import insert_casts
from bnexport.graph.surgery import Surgery
from bnexport.interface import check_choice
from bnexport.model_io import check_space, to_proto, walk, write
from bnexport.model_io.read import Source, open_source
from bnexport.recalibration import moments
from bnexport.recalibration.report import LayerChange, RecalibrationReport
from bnexport.recalibration.segments import Segments, Values
from bnexport.verification import certificate

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


MODES = ("one_by_one", "together")
# Bytes of values between two levels that are kept for all batches.
KEPT = 1 << 30
_SYNC_PLACES, _PLACES = (1, 2), (3, 4)
_UNCHANGED = "nothing was written"


@dataclasses.dataclass(frozen=True)
class RecalibrationResult:
    """model: with the new statistics, owned by the caller: a ModelProto if `source` was one, else an onnx_ir.Model.

    report: what changed.
    """

    model: Any
    report: RecalibrationReport

    def to_dict(self) -> dict[str, Any]:
        """Return the report as the command line prints it with --json."""
        return self.report.to_dict()


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One batch norm of the caller's model, and its place in the main graph.

    places: of mean and variance among the node's inputs. tensors: mean and variance. Two nodes that share tensors are two
    layers: exporters write equal tensors once, so sharing does not tell a module that runs twice.
    """

    node: ir.Node
    number: int
    places: tuple[int, int]
    tensors: tuple[ir.TensorProtocol, ir.TensorProtocol]
    eps: float

    @property
    def name(self) -> str:
        return label(self.node)

    @functools.cached_property
    def old(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        mean, var = (read_tensor(tensor).astype(np.float64) for tensor in self.tensors)
        return mean, var


def recalibrate_file(
    source: Source,
    target: str | os.PathLike[str] | None,
    batches: Iterable[Any],
    *,
    layers: str = "one_by_one",
    method: str = "exact",
    overwrite: bool = False,
) -> RecalibrationResult:
    """Re-estimate the running statistics of the batch norms of an ONNX model on data; nothing else changes.

    BatchNormalization and MMCVSyncBatchNorm of the main graph; both normalise as in inference, whatever mode they are in.

    Args:
        source: a path, ModelProto or onnx_ir.Model; never changed.
        target: the file to write, atomically; None for no file.
        batches: the model's inputs by name; for a model with one input also arrays or tensors, or pairs of the input and a
            label, as a DataLoader gives them. `one_by_one` goes through them once for each level of batch norms: a list, or
            `bnexport.recalibration.files.open_rows`, not a generator.
        layers, method: as `bnexport.recalibrate` takes them. Batch norms that do not feed each other are measured in the
            same pass.
        overwrite: replace `target` if it exists, as a whole; it may be `source`.

    Raises:
        UsageError: no rows, one value a channel, a value that is not finite (its row is named), inputs that do not fit.
        ModelError: the model is refused, or ONNX Runtime cannot run it.
    """
    check_choice("method", method, moments.METHODS)
    check_choice("layers", layers, MODES)
    write.check_new(target, overwrite)
    opened = open_source(source)
    model = opened.model
    if target is not None:
        check_space(target, write.tensor_total(model) * 9 // 10)
    found, left = _layers(model)
    done: dict[int, tuple[float, moments.Row]] = {}
    run = None
    if found:
        run, refused = _prepare(model, found)
        left += refused
        found = [layer for layer in found if layer.number in run.segments.level_of]
    if run is not None and found:
        if layers == "together":
            run.together(batches, found, method)
        else:
            run.one_by_one(batches, found, method)
        done = run.sums
        _write(model, [(layer, moments.statistics(done[layer.number][1], method)) for layer in found])
        model.metadata_props.pop(certificate.KEY, None)  # the folds that it proves had other statistics
    if target is not None:
        own = [opened.path] if opened.path else []
        write.save(model, target, inputs=own, overwrite_input=overwrite)
    report = RecalibrationReport(
        tuple(_change(layer, done[layer.number], method, run) for layer in found if run is not None),
        tuple(left),
        layers,
        method,
        0 if run is None else run.passes,
        0 if run is None else run.batches,
        0 if run is None else run.rows,
        opened.notes,
    )
    return RecalibrationResult(to_proto(model) if isinstance(source, onnx.ModelProto) else model, report)


def passes_of(source: Source) -> int:
    """Return how often `one_by_one` goes through the batches: the number of levels of batch norms."""
    model = open_source(source).model
    found, _ = _layers(model)
    return len(_prepare(model, found)[0].segments) if found else 0


def _layers(model: ir.Model) -> tuple[list[_Layer], list[tuple[str, str]]]:
    """Return the batch norms of the main graph with stored statistics, and those that are left alone, with the reason."""
    found, left = [], []
    constants = Constants(model, Shapes(model))
    for number, node in enumerate(model.graph):
        if not _is_norm(node):
            continue
        sync = is_sync_batch_norm(node)
        places = _SYNC_PLACES if sync else _PLACES
        try:
            mean, var = (_stored(node, place, constants) for place in places)
            eps = get_float(node, "eps" if sync else "epsilon", 1e-5)
            found.append(_Layer(node, number, places, (mean, var), eps))
        except Refused as reason:
            left.append((label(node), reason.text))
    main = set(model.graph)
    for node in walk.nodes(model):
        if node not in main and _is_norm(node) and not _in_body(node):
            left.append((label(node), "it is in a function or a subgraph; inline it first with bnexport inline"))
    return found, left


def _is_norm(node: ir.Node) -> bool:
    return is_sync_batch_norm(node) or is_standard(node, "BatchNormalization")


def _in_body(node: ir.Node) -> bool:
    graph = node.graph
    return isinstance(graph, ir.Function) and is_portable_body(graph)


def _stored(node: ir.Node, place: int, constants: Constants) -> ir.TensorProtocol:
    value = input_at(node, place)
    if value is None:
        raise Refused("no-statistics", "it has no running statistics")
    while (origin := value.producer()) is not None and is_standard(origin, "Identity") and origin.inputs[0] is not None:
        value = origin.inputs[0]  # exporters write equal tensors once
    tensor = value.const_value if value.is_graph_input() else constants.stored(value, "running statistic")
    if tensor is None and origin is not None and is_standard(origin, "Constant"):
        tensor = constant_tensor(origin)
    if tensor is None:
        raise Refused("not-constant", f"its running statistic {value.name!r} is computed, not stored")
    return tensor


def _prepare(model: ir.Model, layers: list[_Layer]) -> tuple[_FileRun, list[tuple[str, str]]]:
    """Cut a copy of the model, with all batch norms in inference; return what could not be converted."""
    copy = model.clone()
    nodes = list(copy.graph)
    names = {}
    for layer in layers:
        nodes[layer.number].name = f"bnexport.{layer.number}"  # conversion keeps names
        names[nodes[layer.number].name] = layer
    conversions = convert(copy, trained=True)
    reasons = {names[each.name].number: each.reason.text for each in conversions if each.reason and each.name in names}
    insert_casts(copy)
    norms = {}
    for node in copy.graph:
        if node.name in names and is_standard(node, "BatchNormalization"):
            x, number = node.inputs[0], names[node.name].number
            if x is not None and x.producer() is None and not x.is_graph_input():
                reasons[number] = "its input is a constant"
            elif number not in reasons:
                norms[number] = node
    left = [(layer.name, reasons[layer.number]) for layer in layers if layer.number in reasons]
    inputs = [value for value in copy.graph.inputs if not value.is_initializer()]
    return _FileRun(inputs, Segments(copy, norms)), left


class _FileRun:
    """One re-estimation. sums: for each finished layer the values of a channel and its sum."""

    def __init__(self, inputs: list[ir.Value], segments: Segments) -> None:
        self.segments = segments
        self.sums: dict[int, tuple[float, moments.Row]] = {}
        self.passes = self.batches = self.rows = 0
        self._inputs = inputs
        self._first_rows: list[int] = []  # of each batch
        self._statistics: dict[str, np.ndarray[Any, Any]] = {}

    def together(self, batches: Iterable[Mapping[str, Any]], layers: list[_Layer], method: str) -> None:
        """Measure all layers in one pass, in which each normalises with the statistics of its batch."""
        of = {layer.number: layer for layer in layers}
        for index, feeds in self._batches(batches, first=True):
            values = dict(feeds)
            for level in range(len(self.segments)):
                self.segments.run(level, values, self._statistics)
                for number, x in self._measured(level, values):
                    row = self._row(of[number], x, index)
                    if row[0] == 1:
                        raise UsageError(
                            f"batches: {of[number].name} got one value a channel in a batch, expected two or more; give "
                            f"larger batches, or layers='one_by_one'; {_UNCHANGED}"
                        )
                    self._add(of[number], row, method)
                    self._give(of[number], *moments.batch_statistics(row))
        self.passes = 1
        self._check(layers)

    def one_by_one(self, batches: Iterable[Mapping[str, Any]], layers: list[_Layer], method: str) -> None:
        """Finish the layers of one level after those before it."""
        of = {layer.number: layer for layer in layers}
        for layer in layers:
            self._give(layer, *layer.old)
        if len(self.segments) > 1 and isinstance(batches, Iterator):
            raise UsageError(
                f"batches: got a {type(batches).__name__}, which can be gone through once; one_by_one needs "
                f"{len(self.segments)} passes: give a list, or layers='together'; {_UNCHANGED}"
            )
        kept: list[Values] | None = None
        for level in range(len(self.segments)):
            interface.report("pass", level, len(self.segments))
            keep: list[Values] | None = []
            size = 0
            for index, given in self._batches(
                batches if kept is None else kept, first=level == 0, kept=kept is not None
            ):
                values = dict(given)
                for earlier in range(0 if kept is None else level, level + 1):
                    self.segments.run(earlier, values, self._statistics)
                for number, x in self._measured(level, values):
                    self._add(of[number], self._row(of[number], x, index), method)
                if kept is not None:
                    kept[index] = {}
                self.segments.drop(level, values)
                size += sum(array.nbytes for array in values.values())
                keep = None if keep is None or size > KEPT else [*keep, values]
            kept = keep
            for number in self.segments.segments[level].measured:
                self._check([of[number]])
                self._give(of[number], *moments.statistics(self.sums[number][1], method))
        self.passes = len(self.segments)

    def _batches(self, batches: Iterable[Any], *, first: bool, kept: bool = False) -> Iterable[tuple[int, Values]]:
        """Yield the batches by number. kept: they are values of an earlier pass, not the caller's."""
        number = 0
        for number, batch in enumerate(batches, 1):
            values = batch if kept else self._fitting(batch, number - 1)
            if first:
                self._first_rows.append(self.rows)
                self.rows += next((len(array) for array in values.values() if array.ndim), 1)
            yield number - 1, values
        if first:
            self.batches = number
            if not self.rows:
                raise UsageError(f"batches: got no rows, expected one or more; {_UNCHANGED}")
        elif number != self.batches:
            raise UsageError(
                f"batches: got {number} in a later pass, expected {self.batches} as in the first: each pass must give the "
                f"same rows; {_UNCHANGED}"
            )

    def _measured(self, level: int, values: Values) -> Iterable[tuple[int, np.ndarray[Any, Any]]]:
        return ((number, values[str(x.name)]) for number, x in self.segments.segments[level].measured.items())

    def _row(self, layer: _Layer, x: np.ndarray[Any, Any], index: int) -> moments.Row:
        channels = len(layer.old[0])
        if x.ndim < 2 or x.shape[1] != channels:
            raise UsageError(
                f"batches: the input of {layer.name} has shape {x.shape}, expected (N, {channels}, *); {_UNCHANGED}"
            )
        row = moments.of_array(x)
        if not np.isfinite(row).all():
            first, end = (*self._first_rows, self.rows)[index : index + 2]
            place = moments.unfinished_row(x, np.isfinite)
            where = f"batch {index}" + (f", row {first + place}" if place is not None and len(x) == end - first else "")
            raise UsageError(f"batches: {where} gives NaN or infinity to {layer.name}; {_UNCHANGED}")
        return row

    def _add(self, layer: _Layer, row: moments.Row, method: str) -> None:
        values, before = self.sums.get(layer.number, (0.0, np.zeros_like(row)))
        self.sums[layer.number] = (values + row[0], moments.merge(before, moments.start(row, method), method))

    def _check(self, layers: list[_Layer]) -> None:
        for layer in layers:
            if self.sums[layer.number][0] < 2:
                raise UsageError(
                    f"batches: {layer.name} saw one value a channel in all, which has no variance; {_UNCHANGED}"
                )

    def _give(self, layer: _Layer, *vectors: np.ndarray[Any, Any]) -> None:
        """Let one batch norm normalise with a mean and a variance."""
        for what, vector, tensor in zip(("mean", "var"), vectors, layer.tensors, strict=True):
            self._statistics[f"bnexport.{layer.number}.{what}"] = np.asarray(vector, tensor.dtype.numpy())

    def _fitting(self, batch: Any, index: int) -> Values:
        """Return one batch as arrays by input. Raises UsageError where it does not fit the model."""
        if isinstance(batch, (tuple, list)) and batch and hasattr(batch[0], "shape"):
            batch = batch[0]  # of an input and its label
        if not isinstance(batch, Mapping):
            if len(self._inputs) != 1:
                names = ", ".join(str(value.name) for value in self._inputs)
                raise UsageError(f"batches: batch {index} is one array, expected arrays by name for the inputs {names}")
            batch = {str(self._inputs[0].name): batch}
        values = {}
        declared = {str(value.name): value for value in self._inputs}
        different = sorted(set(declared) ^ set(map(str, batch)))
        if different:
            what = "lacks" if different[0] in declared else "has"
            raise UsageError(f"batches: batch {index} {what} {different[0]!r}; the model takes {', '.join(declared)}")
        for name, value in declared.items():
            array = np.asarray(batch[name])
            wanted = None if value.dtype is None else value.dtype.numpy()
            sizes = None if value.shape is None else [size if isinstance(size, int) else None for size in value.shape]
            if sizes is not None and (
                len(sizes) != array.ndim
                or any(size not in (None, got) for size, got in zip(sizes, array.shape, strict=True))
            ):
                shown = ", ".join(str(size) for size in value.shape or ())
                rest = (
                    "; its rows must be a multiple of that"
                    if sizes and array.ndim and sizes[0] not in (None, len(array))
                    else ""
                )
                raise UsageError(
                    f"batches: batch {index} gives {name} the shape {array.shape}, the model takes ({shown}){rest}"
                )
            if wanted is not None and array.dtype != wanted:
                raise UsageError(
                    f"batches: batch {index} gives {name} as {array.dtype}, the model takes {np.dtype(wanted)}"
                )
            values[name] = array
        return values


def _change(layer: _Layer, done: tuple[float, moments.Row], method: str, run: _FileRun) -> LayerChange:
    first = run.segments.level_of[layer.number] == 0
    return LayerChange(layer.name, int(done[0]), layer.eps, first, 1, *layer.old, *moments.statistics(done[1], method))


def _write(model: ir.Model, changes: list[tuple[_Layer, tuple[moments.Row, moments.Row]]]) -> None:
    """Store the statistics: in place where a tensor serves this layer alone, else in a new one."""
    context = scopes(model, Surgery(), GraphContext)[0].context
    for layer, vectors in changes:
        for what, place, vector, tensor in zip(("mean", "var"), layer.places, vectors, layer.tensors, strict=True):
            array = vector.astype(tensor.dtype.numpy())
            value = layer.node.inputs[place]
            assert value is not None
            if value.is_initializer() and len(value.uses()) == 1 and not value.is_graph_output():
                value.const_value = ir.Tensor(array, name=value.name)
                continue
            new = new_constant(context, model.graph, layer.node, array, f"{layer.name}.running_{what}")
            layer.node.replace_input_with(place, new)
