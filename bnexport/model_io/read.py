"""Loading of paths, protos and models into a checked onnx_ir.Model."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import os
import stat
from collections.abc import Callable, Iterator

import google.protobuf.message  # type: ignore[import-untyped]
import onnx
import onnx_ir as ir

from bnexport.errors import (
    BnexportError,
    MalformedModelError,
    MissingFileError,
    UnsafeModelError,
    UsageError,
    first_line,
)
from bnexport.model_io import validate, walk, wire
from bnexport.model_io.external import DataFile, Folder
from bnexport.model_io.limits import READ, Limits, current
from bnexport.model_io.validate import mend

# Suspension of Python's cyclic garbage collector while a model is built.
#
# Each full collection visits every object there is. A model of 10,000 convolutions is a million objects, none
# of them garbage, and visiting them took half of the time of loading and of folding it.

# Objects from which a look at them is worth avoiding. Fewer are collected as usual: in the oldest generation their garbage
# would stay until that has grown by a quarter, which a process that folds many small models takes for a leak.
_MANY = 100_000


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Disable cyclic garbage collection inside, then restore the previous state. Also a decorator."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        if gc.get_count()[0] > _MANY and not gc.get_freeze_count():
            # Into the oldest generation, without a look at them, which the first collection would take.
            gc.freeze()
            gc.unfreeze()
        gc.enable()


# Initializers that a note names.
_NAMED = 3

Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """A model with no other owner, and the file it came from (None for a model in memory).

    notes: how the model differs from the file.
    """

    model: ir.Model
    path: str | None
    notes: tuple[str, ...] = ()


def load(path: str | os.PathLike[str], *, limits: Limits | None = None) -> ir.Model:
    """Load the model in the file `path`; external data and tensors of 4 KiB and more stay on disk until they are used.

    limits: None for `limits.current()`.
    Raises MissingFileError, MalformedModelError (directory, empty, truncated, not ONNX), UnsafeModelError
    (external data outside the folder, links, wrong sizes) or UnsupportedModelError.
    """
    return open_source(path, limits=limits).model


def as_model(source: Source, *, limits: Limits | None = None) -> ir.Model:
    """Load a model from a path, or copy the given one."""
    return open_source(source, limits=limits).model


def open_source(source: Source, *, limits: Limits | None = None, fixed_initializers: bool = False) -> ModelSource:
    """Load a model as `as_model` does, and return the file's real path, too.

    fixed_initializers: initializers that are inputs as well, which a caller could override, are constants.
    """
    opened = _open(source, limits or current())
    return _fixed(opened) if fixed_initializers else opened


def _fixed(opened: ModelSource) -> ModelSource:
    """Take initializers out of the inputs. Before IR version 4 they have to be there, and no caller can give them."""
    graph = opened.model.graph
    given = [str(value.name) for value in graph.inputs if value.is_initializer()]
    if opened.model.ir_version < 4 or not given:
        return opened
    graph.inputs[:] = [value for value in graph.inputs if not value.is_initializer()]
    names = ", ".join(repr(validate.printable(name)) for name in given[:_NAMED]) + ", ..." * (len(given) > _NAMED)
    note = f"initializers that were inputs as well are constants only: {len(given)}, {names}"
    return dataclasses.replace(opened, notes=(*opened.notes, note))


@paused_collection()
def _open(source: Source, limits: Limits) -> ModelSource:
    if isinstance(source, ir.Model):
        try:
            return ModelSource(source.clone(), None)
        except RuntimeError as error:  # what onnx_ir raises on the way out of each level
            raise MalformedModelError(
                "the onnx_ir.Model cannot be copied: a node reads a value that no node before it makes; put the nodes in order "
                "with model.graph.sort()"
            ) from error
    if isinstance(source, onnx.ModelProto):
        own = onnx.ModelProto()
        own.CopyFrom(source)
        return _build(own, Folder(None, limits), limits, None)
    if isinstance(source, (str, os.PathLike)):
        real = os.path.realpath(os.fspath(source))
        proto, files = read_proto(real, str(source), limits)
        return _build(proto, files, limits, real)
    raise UsageError(f"expected a path, onnx.ModelProto or onnx_ir.Model, got {type(source).__name__}")


def from_proto(proto: onnx.ModelProto, *, limits: Limits | None = None) -> ir.Model:
    """Check `proto`, which holds all its weights, and build a model that shares its tensors.

    `proto` is mended where it has to be.
    """
    limits = limits or current()
    return _build(proto, Folder(None, limits), limits, None).model


def _check_proto(proto: onnx.ModelProto, files: Folder, limits: Limits) -> tuple[bool, tuple[str, ...]]:
    """Validate the proto, mended where it has to be; return whether it refers to tensors in files, and notes."""
    notes: tuple[str, ...] = ()
    try:
        external = validate.validate(proto, limits)
    except validate.MendableError:
        notes = mend(proto, limits)
        external = _validate_mended(proto, limits)
    for declared in external:
        files.check(declared)
    return bool(external), notes


def _validate_mended(proto: onnx.ModelProto, limits: Limits) -> list[onnx.TensorProto]:
    try:
        return validate.validate(proto, limits)
    except validate.MendableError as error:
        raise MalformedModelError(str(error)) from None


def _build(proto: onnx.ModelProto, files: Folder, limits: Limits, path: str | None) -> ModelSource:
    external, notes = _check_proto(proto, files, limits)
    try:
        model = ir.serde.deserialize_model(proto)
    except BnexportError:
        raise
    except Exception as error:  # onnx-ir chains the place into one long text; the first line says what.
        raise MalformedModelError(f"not a valid ONNX model: {innermost(error)}") from error
    if external:
        for slot, tensor in walk.external(model):
            slot.set(files.tensor(tensor))
    return ModelSource(model, path, notes)


def check(data: bytes, *, limits: Limits | None = None) -> None:
    """Raise ModelError if `load` would refuse the serialised model, which holds all its weights.

    Raises what `load` raises.
    """
    limits = limits or current()
    proto, _ = _parse(functools.partial(wire.whole, data, limits), "in memory")
    _check_proto(proto, Folder(None, limits), limits)


def innermost(error: BaseException) -> str:
    """Return the first line of the error that started a chain."""
    while error.__cause__ is not None:
        error = error.__cause__
    return validate.printable(first_line(error))


def read_proto(real: str, shown: str, limits: Limits) -> tuple[onnx.ModelProto, Folder]:
    """Read the model at a real path; its large tensors become external data of the returned folder."""
    try:
        descriptor = os.open(real, READ)
    except FileNotFoundError as error:
        raise MissingFileError(f"model file {shown!r} does not exist") from error
    except (OSError, ValueError) as error:
        reason = os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)
        raise MalformedModelError(f"model file {shown!r} cannot be read: {reason}") from error
    try:
        status = os.fstat(descriptor)
        _check_file(status, shown, limits)
        try:
            proto, places = _parse(functools.partial(wire.cut, descriptor, status.st_size, limits), shown)
        except MalformedModelError as error:
            raise (_of_others(descriptor, shown) or error) from error
    finally:
        os.close(descriptor)
    model = DataFile.of_model(real, status)
    return proto, Folder(model.folder, limits, model, places)


def _parse(walk_wire: Callable[[], wire.Cut], shown: str) -> tuple[onnx.ModelProto, dict[str, tuple[int, int]]]:
    proto = onnx.ModelProto()
    try:
        cut = walk_wire()
        proto.ParseFromString(cut.data)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise MalformedModelError(f"model file {shown!r} cannot be read: {reason}") from error
    except MalformedModelError as error:
        raise MalformedModelError(f"model file {shown!r} is truncated or not an ONNX file: {error}") from error
    except (google.protobuf.message.DecodeError, RecursionError, MemoryError) as error:
        del proto  # What was parsed so far may leave no room for the message.
        if isinstance(error, MemoryError) or "alloc" in str(error):
            raise UnsafeModelError(f"model file {shown!r} needs more memory than there is") from None
        raise MalformedModelError(f"model file {shown!r} is truncated or not an ONNX file") from error
    if not proto.HasField("graph") or proto.ir_version < 1:
        raise MalformedModelError(f"model file {shown!r} is not an ONNX file: it has no graph or IR version")
    return proto, cut.places


# Bytes at the end of an archive, which has the names of its files there.
_DIRECTORY = 1 << 16


def _of_others(descriptor: int, shown: str) -> MalformedModelError | None:
    """Return the error for a file in ORT format, or one that torch.save or torch.jit.save wrote, as its first bytes show."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    head = os.read(descriptor, 8)
    if head[4:] == b"ORTM":
        return MalformedModelError(
            f"model file {shown!r} is in ORT format, which is not read; expected the ONNX file that it was made from"
        )
    if not head.startswith((b"PK\x03\x04", b"\x80\x02")):
        return None
    if shown.endswith(".pt2"):
        return MalformedModelError(
            f"model file {shown!r} is not an ONNX file, but one of torch.export; bnexport export {shown} OUT.onnx"
            " --input x:1,3,224,224 writes and folds one"
        )
    os.lseek(descriptor, max(0, os.fstat(descriptor).st_size - _DIRECTORY), os.SEEK_SET)
    if b"/constants.pkl" in os.read(descriptor, _DIRECTORY):
        return MalformedModelError(
            f"model file {shown!r} is not an ONNX file, but TorchScript: torch.onnx.export(torch.jit.load({shown!r}), args,"
            " 'model.onnx', dynamo=False) writes one, which bnexport fold takes"
        )
    return MalformedModelError(
        f"model file {shown!r} is not an ONNX file, but one that torch.save or torch.jit.save wrote; for a checkpoint: "
        f"bnexport export MODULE:FACTORY OUT.onnx --checkpoint {shown} --input x:1,3,224,224"
    )


def _check_file(status: os.stat_result, shown: str, limits: Limits) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise MalformedModelError(f"model file {shown!r} is a directory, expected an .onnx file")
    if not stat.S_ISREG(status.st_mode):
        raise UnsafeModelError(f"model file {shown!r} is not a regular file")
    if status.st_size == 0:
        raise MalformedModelError(f"model file {shown!r} is empty")
    if status.st_size > limits.model_bytes:
        raise UnsafeModelError(
            f"model file {shown!r} has {status.st_size} bytes, the limit is {limits.model_bytes} (model_bytes);"
            " store its weights as external data"
        )
