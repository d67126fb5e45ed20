"""Writing of models: serialised by `encode`, moved into place atomically by `staging`."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import BinaryIO

import numpy as np
import onnx
import onnx_ir as ir

from bnexport import interface
from bnexport.errors import BnexportError, MalformedModelError, MissingFileError, UnsupportedModelError, UsageError
from bnexport.model_io import staging, walk
from bnexport.model_io.encode import Encoded, Piece, encode, replaced, size
from bnexport.model_io.external import ContainedTensor
from bnexport.model_io.staging import Staged, free_data_name, make_folder, write_error

# What one message of protobuf can hold.
PROTOBUF_LIMIT = 2**31 - 1
# Bytes of neighbouring tensors that one thread writes in a row.
_BATCH = 1 << 24
_THREADS = 4


def tensor_total(model: ir.Model) -> int:
    """Return the number of bytes of all tensors."""
    return sum(size(slot.get()) for slot in walk.tensors(model))


def has_external_data(model: ir.Model) -> bool:
    """Whether any tensor lies in another file than the model's own."""
    return any(not (isinstance(tensor, ContainedTensor) and tensor.file.is_model) for _, tensor in walk.external(model))


def to_proto(model: ir.Model | onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with all data inline; a proto as it is. Raise UnsupportedModelError over protobuf's 2 GiB."""
    if isinstance(model, onnx.ModelProto):
        return model
    return onnx.ModelProto.FromString(to_bytes(model))


def to_bytes(model: ir.Model) -> bytes:
    """Serialise `to_proto` for an inference session."""
    encoded = encode(model)
    total = encoded.model_size
    if total > PROTOBUF_LIMIT:
        raise UnsupportedModelError(
            f"the model has {total} bytes, one protobuf message ends at 2 GiB; save it to a path"
        )
    return b"".join(piece if isinstance(piece, bytes) else piece.tobytes() for piece in encoded.model)


def check_new(target: str | os.PathLike[str] | None, overwrite: bool) -> None:
    """Raise UsageError for a target that exists and must not be replaced."""
    if target is not None and not overwrite and (os.path.isfile(target) or os.path.islink(target)):
        raise UsageError(
            f"target: {os.fspath(target)!r} exists; write to another file, or replace it with overwrite=True"
        )


def stage(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    inputs: Sequence[str | os.PathLike[str]] = (),
    overwrite_input: bool = False,
    external_data: bool | None = None,
) -> Staged:
    """Write `model` completely under a temporary name. The caller commits or discards it.

    inputs: files that must not be replaced unless `overwrite_input`. external_data: None keeps data
    external where the model had it so, or where one protobuf message cannot hold it.
    """
    target = _target(path)
    _refuse_input(target, model, inputs, overwrite_input)
    folder = make_folder(target)
    try:
        if external_data is None and has_external_data(model):
            external_data = True
        encoded, data_name = _fitting(model, target, external_data)
        staged = Staged(folder, target, data_name, too_large=external_data is None and data_name is not None)
        if data_name is not None:
            _write(os.path.join(folder, data_name), encoded.data)
        _write(staged.path, encoded.model)
        return staged
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, BnexportError):
            raise write_error(path, error) from error
        raise


def stage_file(path: str | os.PathLike[str], write: Callable[[str], None]) -> Staged:
    """Stage a file of another format. write: makes it under the name that it is given."""
    target = _target(path)
    staged = Staged(make_folder(target), target, None)
    try:
        write(staged.path)
        with open(staged.path, "rb+") as file:
            os.fsync(file.fileno())
        return staged
    except BaseException as error:
        staged.discard()
        if isinstance(error, OSError) and not isinstance(error, BnexportError):
            raise write_error(path, error) from error
        raise


def save(
    model: ir.Model,
    path: str | os.PathLike[str],
    *,
    inputs: Sequence[str | os.PathLike[str]] = (),
    overwrite_input: bool = False,
    external_data: bool | None = None,
) -> None:
    """Write `model` to `path` atomically (`stage` and `commit`). `model` is unchanged."""
    staged = stage(model, path, inputs=inputs, overwrite_input=overwrite_input, external_data=external_data)
    try:
        staged.commit()
    finally:
        staged.discard()


def _fitting(model: ir.Model, target: str, external_data: bool | None) -> tuple[Encoded, str | None]:
    """Return the requested layout, or one that fits, and the name of its data file."""
    if not external_data:
        encoded = encode(model)
        if encoded.model_size <= PROTOBUF_LIMIT:
            return encoded, None
        if external_data is not None:
            raise UnsupportedModelError("the model file would end past the 2 GiB of protobuf; use external data")
    data_name = free_data_name(target)
    encoded = encode(model, data_name)
    if encoded.model_size > PROTOBUF_LIMIT:
        raise UnsupportedModelError(
            f"the model file would have {encoded.model_size} bytes without its weights, protobuf ends at 2 GiB"
        )
    return encoded, data_name


def _write(path: str, pieces: list[Piece]) -> None:
    """Write one file with several threads and flush it to the disk.

    Reading and scaling of one tensor overlap with the writing of another.
    """
    with open(path, "xb") as file:
        total = sum(map(size, pieces))
        _reserve(file, total)
        batches = list(_batches(pieces))
        if len(batches) == 1:
            _write_batch(file, batches[0])
        else:
            with concurrent.futures.ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
                done = 0
                for written in pool.map(lambda batch: _write_part(path, batch), batches):
                    done += written
                    interface.report("writing", done, total)
        file.flush()
        os.fsync(file.fileno())


def _reserve(file: BinaryIO, length: int) -> None:
    """Reserve disk space first: a full disk is detected early, and writing is a sixth faster."""
    if length >= _BATCH and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(file.fileno(), 0, length)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def _batches(pieces: list[Piece]) -> Iterator[list[tuple[int, Piece]]]:
    """Group adjacent pieces with their offsets into batches of about _BATCH bytes."""
    batch: list[tuple[int, Piece]] = []
    start = offset = 0
    for piece in pieces:
        batch.append((offset, piece))
        offset += size(piece)
        if offset - start >= _BATCH:
            yield batch
            batch, start = [], offset
    if batch or not start:
        yield batch


def _write_part(path: str, batch: list[tuple[int, Piece]]) -> int:
    """Write a batch at its place and return its bytes."""
    with open(path, "r+b") as file:
        file.seek(batch[0][0])
        _write_batch(file, batch)
        file.flush()
        written = file.tell() - batch[0][0]
        if hasattr(os, "posix_fadvise"):
            # Starts writing these pages to the disk now, so that the flush at the end waits for little.
            os.posix_fadvise(file.fileno(), batch[0][0], written, os.POSIX_FADV_DONTNEED)
        return written


def stream(tensor: ir.TensorProtocol, file: BinaryIO) -> None:
    """Write a tensor's bytes, in blocks if its class supports it."""
    in_blocks = getattr(tensor, "tofile", None)  # not part of the protocol
    if in_blocks is not None:
        in_blocks(file)
    else:
        file.write(tensor.tobytes())


def _write_batch(file: BinaryIO, batch: list[tuple[int, Piece]]) -> None:
    for offset, piece in batch:
        if isinstance(piece, bytes):
            file.write(piece)
            continue
        stream(piece, file)
        wrote = file.tell() - offset
        if wrote != size(piece):
            raise MalformedModelError(f"tensor {piece.name!r} wrote {wrote} bytes, expected {size(piece)}")


def _target(path: str | os.PathLike[str]) -> str:
    text = os.fspath(path)
    folder = os.path.realpath(os.path.dirname(text) or ".")
    target = os.path.join(folder, os.path.basename(text))
    if not os.path.basename(text) or os.path.isdir(target):
        raise UsageError(f"{text!r} is a folder, expected the name of a file to write")
    if not os.path.isdir(folder):
        raise UsageError(f"cannot write {text!r}: its folder does not exist")
    real = os.path.realpath(target)
    if os.path.exists(real) and not os.path.isfile(real):
        raise UsageError(
            f"{text!r} is a device or pipe, which a model would replace; expected the name of a file to write"
        )
    return real


def _refuse_input(target: str, model: ir.Model, inputs: Sequence[str | os.PathLike[str]], allowed: bool) -> None:
    if allowed or not os.path.exists(target):
        return
    data = {tensor.file.path for _, tensor in walk.external(model) if isinstance(tensor, ContainedTensor)}
    for name in (*inputs, *data):
        if os.path.exists(name) and os.path.samefile(name, target):
            raise UsageError(
                f"{os.path.basename(target)!r} is an input of this run; write to another file or ask to overwrite it"
            )


# A model in two parts for ONNX Runtime: one serialised message, and large weights by name.
#
# The engine sees no file name, so what it reads is what was checked when the model was loaded.

# Smaller tensors travel inside the message.
_SMALLEST = 1 << 16
# Types that NumPy has of its own: engines take them as arrays.
_NATIVE = frozenset(
    (
        *(ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.FLOAT16, ir.DataType.BOOL),
        *(ir.DataType.INT8, ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64),
        *(ir.DataType.UINT8, ir.DataType.UINT16, ir.DataType.UINT32, ir.DataType.UINT64),
    )
)


@dataclasses.dataclass(frozen=True)
class Parts:
    """data: the serialised model. weights: initializers that its graph declares but does not hold."""

    data: bytes
    weights: dict[str, ir.TensorProtocol]


def to_parts(model: ir.Model) -> Parts:
    """Split the large initializers off the main graph; `model` is unchanged and nothing large is read.

    Raises UnsupportedModelError where the rest exceeds one message of protobuf.
    """
    weights: dict[str, ir.TensorProtocol] = {}
    marks: list[tuple[walk.TensorSlot, ir.TensorProtocol]] = []
    for value in model.graph.initializers.values():
        tensor = value.const_value
        if tensor is None or tensor.dtype not in _NATIVE or value.is_graph_input():
            continue
        # ONNX Runtime drops what nothing reads from its graph, and misses it there if it is given.
        if not value.uses() and not value.is_graph_output():
            continue
        if isinstance(tensor, ContainedTensor) or size(tensor) >= _SMALLEST:
            name = str(value.name)
            weights[name] = tensor
            mark = ir.ExternalTensor(
                "given", 0, size(tensor), tensor.dtype, shape=ir.Shape(tensor.shape.numpy()), name=name
            )
            marks.append((walk.TensorSlot(value), mark))
    with replaced(marks):
        encoded = encode(model, given=True)
    if encoded.model_size > PROTOBUF_LIMIT:
        raise UnsupportedModelError(
            f"the graph has {encoded.model_size} bytes without its weights, protobuf ends at 2 GiB"
        )
    pieces = (piece if isinstance(piece, bytes) else piece.tobytes() for piece in encoded.model)
    return Parts(b"".join(pieces), weights)


# Named tensors in safetensors files: initial values and checkpoints of a training graph.

Tensors = dict[str, np.ndarray]


def save_tensors(tensors: Mapping[str, np.ndarray], metadata: Mapping[str, str], path: str | os.PathLike[str]) -> None:
    """Write a safetensors file atomically; the same tensors give the same bytes."""
    numpy_format = _safetensors()
    import safetensors

    contiguous = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
    try:
        with staging.whole_file(path) as staged:
            numpy_format.save_file(contiguous, staged, dict(metadata))
    except (OSError, safetensors.SafetensorError) as error:
        raise staging.write_error(path, error) from error


def load_tensors(path: str | os.PathLike[str]) -> tuple[Tensors, dict[str, str]]:
    """Read the tensors and the metadata of a safetensors file completely.

    Raises MissingFileError, or MalformedModelError: the file is truncated, or no safetensors file.
    """
    _safetensors()
    import safetensors

    name = os.fspath(path)
    if not os.path.isfile(name):
        raise MissingFileError(f"{name}: got no such file, expected a safetensors file; check the path")
    try:
        with safetensors.safe_open(name, framework="numpy") as file:
            names = file.keys()
            return {key: file.get_tensor(key) for key in names}, dict(file.metadata() or {})
    except (safetensors.SafetensorError, OSError, TypeError, KeyError) as error:
        raise MalformedModelError(f"{name}: not a whole safetensors file: {error}") from error


def _safetensors():  # type: ignore[no-untyped-def]
    try:
        import safetensors.numpy
    except ImportError as error:
        raise interface.missing("safetensors", "training graphs keep their state in its format") from error
    return safetensors.numpy
