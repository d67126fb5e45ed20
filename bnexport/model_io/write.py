"""A model out: staged in a folder beside the target, flushed, and renamed into place.

An interrupted run leaves the old file or the new one. External data is written under a name that no
existing model refers to, so the rename of the model file is the single moment of change.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from typing import BinaryIO

import google.protobuf.message  # type: ignore[import-untyped]
import onnx
import onnx_ir as ir

from bnexport.errors import MalformedModelError, UnsafeModelError, UnsupportedModelError, UsageError
from bnexport.model_io import walk
from bnexport.model_io.external import ContainedTensor
from bnexport.model_io.read import innermost
from bnexport.model_io.validate import tensors

# Above this many bytes of tensors the weights go into a file of their own; protobuf ends at 2 GiB.
EXTERNAL_THRESHOLD = 2**30
# Smaller tensors stay in the model file: shapes and scalars that tools want to see.
_SMALLEST_EXTERNAL = 1024
_ALIGNMENT = 64
_PROTOBUF_LIMIT = 2**31 - 1


def tensor_total(model: ir.Model) -> int:
    """Bytes of all tensors."""
    return sum(_size(slot.get()) for slot in walk.tensors(model))


def _size(tensor: ir.TensorProtocol) -> int:
    if tensor.dtype is ir.DataType.STRING:
        return 0
    if isinstance(tensor, ir.serde.TensorProtoTensor):  # without the Shape object that `nbytes` makes
        return (math.prod(tensor.raw.dims) * tensor.dtype.bitwidth + 7) // 8
    return tensor.nbytes


def has_external_data(model: ir.Model) -> bool:
    return any(isinstance(slot.get(), ir.ExternalTensor) for slot in walk.tensors(model))


def to_proto(model: ir.Model) -> onnx.ModelProto:
    """The model with all data inline. Raises UnsupportedModelError over protobuf's 2 GiB."""
    total = tensor_total(model)
    if total > _PROTOBUF_LIMIT:
        raise UnsupportedModelError(
            f"the model holds {total} bytes of tensors, one protobuf message ends at 2 GiB; save it to a path"
        )
    with _replaced(((slot, _in_memory(tensor)) for slot, tensor in _external_slots(model))):
        return _serialise(model)


def to_bytes(model: ir.Model) -> bytes:
    """`to_proto`, serialised, as an inference session takes it."""
    return to_proto(model).SerializeToString()


@dataclasses.dataclass(frozen=True)
class Staged:
    """A complete model in a temporary folder beside its target; `commit` moves it into place."""

    folder: str
    target: str
    data_name: str | None

    @property
    def path(self) -> str:
        """The staged model file; it loads as the final one will."""
        return os.path.join(self.folder, os.path.basename(self.target))

    def commit(self) -> None:
        directory = os.path.dirname(self.target)
        stale = _stale_data(self.target) if os.path.exists(self.target) else []
        if self.data_name:
            os.rename(os.path.join(self.folder, self.data_name), os.path.join(directory, self.data_name))
        os.rename(self.path, self.target)
        _sync_folder(directory)
        for name in stale:
            if name != self.data_name:
                os.unlink(os.path.join(directory, name))
        self.discard()

    def discard(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def stage(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    inputs: Sequence[str | os.PathLike[str]] = (),
    overwrite_input: bool = False,
    external_data: bool | None = None,
) -> Staged:
    """Writes `model` completely, but not yet under its name. The caller commits or discards.

    inputs: files that must not be replaced unless `overwrite_input`. external_data: None keeps data
    external where the model had it so or holds more than EXTERNAL_THRESHOLD bytes.
    """
    target = _target(path)
    _refuse_input(target, model, inputs, overwrite_input)
    if external_data is None:
        external_data = has_external_data(model) or tensor_total(model) > EXTERNAL_THRESHOLD
    folder = _temporary_folder(target)
    try:
        data_name = _free_data_name(target) if external_data else None
        proto = to_proto(model) if data_name is None else _write_data(model, folder, data_name)
        size = proto.ByteSize()
        if size > _PROTOBUF_LIMIT:
            raise UnsupportedModelError(
                f"the model file would have {size} bytes, protobuf ends at 2 GiB; use external data"
            )
        with open(os.path.join(folder, os.path.basename(target)), "xb") as file:
            file.write(proto.SerializeToString())
            _flush(file.fileno())
        return Staged(folder, target, data_name)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UsageError(
                f"cannot write {os.fspath(path)!r}: {error.strerror or error}; nothing was changed"
            ) from error
        raise


def save(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    inputs: Sequence[str | os.PathLike[str]] = (),
    overwrite_input: bool = False,
    external_data: bool | None = None,
) -> None:
    """`stage` and `commit`: the file appears whole or not at all. `model` is unchanged."""
    staged = stage(model, path, inputs=inputs, overwrite_input=overwrite_input, external_data=external_data)
    try:
        staged.commit()
    finally:
        staged.discard()


def _target(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    folder = os.path.realpath(os.path.dirname(text) or ".")
    target = os.path.join(folder, os.path.basename(text))
    if not os.path.basename(text) or os.path.isdir(target):
        raise UsageError(f"{text!r} is a folder, expected the name of a file to write")
    if not os.path.isdir(folder):
        raise UsageError(f"cannot write {text!r}: its folder does not exist")
    return os.path.realpath(target)


def _refuse_input(target: str, model: ir.Model, inputs: Sequence[str | os.PathLike[str]], allowed: bool) -> None:
    if allowed or not os.path.exists(target):
        return
    held = [slot.get() for slot in walk.tensors(model)]
    data = {tensor.file.path for tensor in held if isinstance(tensor, ContainedTensor)}
    for name in (*inputs, *data):
        if os.path.exists(name) and os.path.samefile(name, target):
            raise UsageError(
                f"{os.path.basename(target)!r} is an input of this run; write to another file or ask to overwrite it"
            )


def _temporary_folder(target: str) -> str:
    directory, name = os.path.split(target)
    _remove_leftovers(directory, name)
    folder = os.path.join(directory, f".{name}.{os.getpid()}-{secrets.token_hex(4)}.bnexport")
    try:
        os.mkdir(folder)
    except OSError as error:
        raise UsageError(f"cannot write {target!r}: {error.strerror}") from error
    return folder


def _remove_leftovers(directory: str, name: str) -> None:
    """Temporary folders of this target whose process has ended."""
    pattern = re.compile(rf"\.{re.escape(name)}\.([0-9]+)-[0-9a-f]{{8}}\.bnexport\Z")
    with contextlib.suppress(OSError):
        for entry in os.listdir(directory):
            match = pattern.match(entry)
            if match and not _alive(int(match.group(1))):
                shutil.rmtree(os.path.join(directory, entry), ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _free_data_name(target: str) -> str:
    """model.onnx.data, or with a number where that name is taken."""
    directory, name = os.path.split(target)
    candidate, number = f"{name}.data", 1
    while os.path.lexists(os.path.join(directory, candidate)):
        candidate, number = f"{name}.{number}.data", number + 1
    return candidate


def _stale_data(target: str) -> list[str]:
    """Data files that the model now at `target` refers to and that carry its name."""
    name = os.path.basename(target)
    pattern = re.compile(rf"{re.escape(name)}(\.[0-9]+)?\.data\Z")
    try:
        with open(target, "rb") as file:
            old = onnx.ModelProto.FromString(file.read())
    except (OSError, google.protobuf.message.DecodeError):
        return []
    used = {entry.value for tensor in tensors(old) for entry in tensor.external_data if entry.key == "location"}
    return sorted(entry for entry in used if pattern.match(entry))


def _external_slots(model: ir.Model) -> Iterator[tuple[walk.TensorSlot, ir.TensorProtocol]]:
    for slot in walk.tensors(model):
        tensor = slot.get()
        if isinstance(tensor, ir.ExternalTensor):
            yield slot, tensor


def _in_memory(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
    proto = onnx.TensorProto(data_type=tensor.dtype.value, dims=tensor.shape.numpy(), raw_data=tensor.tobytes())
    proto.name = tensor.name or ""
    return ir.serde.TensorProtoTensor(proto)


def _write_data(model: ir.Model, folder: str, data_name: str) -> onnx.ModelProto:
    """Streams the large tensors into one file; the proto that refers to it."""
    replacements: list[tuple[walk.TensorSlot, ir.TensorProtocol]] = []
    written: dict[int, ir.ExternalTensor] = {}
    with open(os.path.join(folder, data_name), "xb") as file:
        offset = 0
        for slot in walk.tensors(model):
            tensor = slot.get()
            # Runtimes look for external data in initializers only; attributes stay inline.
            if slot.is_attribute or tensor.dtype is ir.DataType.STRING or tensor.nbytes < _SMALLEST_EXTERNAL:
                if isinstance(tensor, ir.ExternalTensor):
                    replacements.append((slot, _in_memory(tensor)))
                continue
            if id(tensor) not in written:
                padding = -offset % _ALIGNMENT
                file.write(b"\0" * padding)
                offset += padding
                _copy(tensor, file)
                written[id(tensor)] = _external(tensor, data_name, offset)
                offset += tensor.nbytes
                if file.tell() != offset:
                    raise UnsafeModelError(
                        f"tensor {tensor.name!r} wrote {file.tell() - offset + tensor.nbytes} bytes, expected {tensor.nbytes}"
                    )
            replacements.append((slot, written[id(tensor)]))
        _flush(file.fileno())
    with _replaced(replacements):
        return _serialise(model)


def _serialise(model: ir.Model) -> onnx.ModelProto:
    """onnx-ir repeats type and shape of every initializer as value_info; files do not have that."""
    try:
        proto = ir.serde.serialize_model(model)
    except ir.serde.SerdeError as error:
        raise MalformedModelError(f"the model cannot be written: {innermost(error)}") from error
    graphs = [proto.graph]
    while graphs:
        graph = graphs.pop()
        stored = {tensor.name for tensor in graph.initializer}
        kept = [value for value in graph.value_info if value.name not in stored]
        if len(kept) != len(graph.value_info):
            del graph.value_info[:]
            graph.value_info.extend(kept)
        for node in graph.node:
            for attribute in node.attribute:
                graphs += [attribute.g] if attribute.HasField("g") else []
                graphs += attribute.graphs
    return proto


def _copy(tensor: ir.TensorProtocol, file: BinaryIO) -> None:
    if isinstance(tensor, ContainedTensor):
        tensor.tofile(file)
    else:
        file.write(tensor.tobytes())


def _external(tensor: ir.TensorProtocol, data_name: str, offset: int) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        data_name,
        offset,
        tensor.nbytes,
        tensor.dtype,
        shape=ir.Shape(tensor.shape.numpy()),
        name=tensor.name or "",
        doc_string=tensor.doc_string,
        metadata_props=dict(tensor.metadata_props) or None,
    )


@contextlib.contextmanager
def _replaced(replacements: Iterable[tuple[walk.TensorSlot, ir.TensorProtocol]]) -> Iterator[None]:
    """Other tensors in some slots, for the time of one serialisation."""
    undo: list[tuple[walk.TensorSlot, ir.TensorProtocol]] = []
    try:
        for slot, tensor in replacements:
            undo.append((slot, slot.get()))
            slot.set(tensor)
        yield
    finally:
        for slot, tensor in reversed(undo):
            slot.set(tensor)


def _flush(descriptor: int) -> None:
    os.fsync(descriptor)


def _sync_folder(directory: str) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
