"""Reader of the wire format of a ModelProto that leaves large tensors in their file.

A protobuf message is a list of fields: a tag (number << 3 | wire type) and a value, which for bytes and
for messages inside is a length and as many bytes. `cut` walks these lists on the way to raw_data

    Model -> graph -> initializer | node -> attribute -> t | tensors | g | graphs;   Model -> functions -> node

and enters only what is long. What comes out is the same message without the raw_data of large tensors, or their
float_data or double_data, which are the same bytes, each marked as external data at a location that no file can
guess (one that is external already keeps empty raw_data, which `validate` refuses). Everything else is protobuf's to judge:
whatever `cut` does not enter is copied as it stands, so the rest of the model is parsed as it would have been.

What protobuf makes of it is bounded first. A message or text inside another one takes two bytes of a file at
least, and up to 200 in memory; each begins with a tag whose lowest three bits are 2, so there are no more of
them than such bytes. That is counted at the speed of memory, and is a tenth of what real models hold.

The input is hostile. Every length is checked against the message around it, lengths and tags are at most
ten bytes, the nesting is bounded, and each byte is looked at once.
"""

from __future__ import annotations

import dataclasses
import functools
import secrets
from collections.abc import Callable, Sequence

from bnexport.errors import MalformedModelError, UnsafeModelError
from bnexport.model_io.limits import Limits, pread, way_out

# raw_data of this size stays in the file. Below it, one read costs more than the copy.
SMALLEST_CUT = 1 << 12
_WINDOW = 1 << 16
_LONGEST_VARINT = 10

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# For each message on the way, the fields to enter; numbers are those of onnx.proto.
_ENTERED: dict[str, dict[int, str]] = {
    "model": {7: "graph", 25: "function"},
    "graph": {1: "node", 5: "tensor"},
    "function": {7: "node"},
    "node": {5: "attribute"},
    "attribute": {5: "tensor", 6: "graph", 10: "tensor", 11: "graph"},
    "tensor": {9: "raw_data", 4: "numbers", 5: "numbers", 7: "numbers", 10: "numbers", 11: "numbers"},
}
# Bytes that may begin a message or text.
_TAGS = bytes(byte for byte in range(256) if byte & 7 == _BYTES)
_DATA_TYPE, _RAW_DATA, _EXTERNAL_DATA, _DATA_LOCATION, _EXTERNAL = 2, 9, 13, 14, 1
# Repeated fields of float and double, packed, and the data type whose raw_data has the same bytes.
_PACKED = {4: 1, 10: 11}


@dataclasses.dataclass(frozen=True)
class Cut:
    """A serialised model without its large tensors. places: location -> (offset, length) in the file."""

    data: bytes
    places: dict[str, tuple[int, int]]


def cut(descriptor: int, size: int, limits: Limits, smallest: int = SMALLEST_CUT, window: int = _WINDOW) -> Cut:
    """Read the model in the first `size` bytes of an open file without its large tensors.

    smallest: bytes of raw_data from which a tensor is left out. window: bytes that are read at once, 10 or more.
    Raises MalformedModelError for what is no protobuf message, UnsafeModelError past a limit, OSError.
    """
    return _Cutter(functools.partial(pread, descriptor), size, limits, smallest, window).run()


def whole(data: bytes, limits: Limits) -> Cut:
    """Walk a complete serialised model in memory as `cut` does; raise the same errors."""
    _Cutter(lambda count, at: data[at : at + count], len(data), limits).run()
    return Cut(data, {})


def varint(value: int) -> bytes:
    """Encode a length or tag in base 128, low digits first."""
    digits = bytearray()
    while value > 127:
        digits.append(value & 127 | 128)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def field(number: int, content: bytes) -> bytes:
    """Encode a field of bytes, text, or a nested message."""
    return header(number, len(content)) + content


def header(number: int, length: int) -> bytes:
    """Encode the header of field `number` with `length` bytes."""
    return varint(number << 3 | _BYTES) + varint(length)


def _tags(data: bytes) -> int:
    return len(data) - len(data.translate(None, _TAGS))


class _Cutter:
    def __init__(
        self,
        read: Callable[[int, int], bytes],
        size: int,
        limits: Limits,
        smallest: int = SMALLEST_CUT,
        window: int = _WINDOW,
    ) -> None:
        self._read = read  # so many bytes, at an offset
        self._size = size
        self._limits = limits
        self._smallest = smallest
        self._at_once = window
        self._window, self._start = b"", 0
        self._kept = 0
        self._no_tags = 0  # bytes that only look like tags
        self._places: dict[str, tuple[int, int]] = {}
        self._secret = secrets.token_hex(16)

    def run(self) -> Cut:
        pieces, _ = self._message("model", 0, self._size, 0)
        data = b"".join(pieces)
        if len(data) // 2 > self._limits.elements and _tags(data) - self._no_tags > self._limits.elements:
            raise UnsafeModelError(
                f"the model may hold more than {self._limits.elements} texts and messages; {way_out('elements')}"
            )
        return Cut(data, self._places)

    def _message(self, kind: str, start: int, end: int, depth: int) -> tuple[Sequence[bytes], int]:
        """Return the pieces of a message between two offsets without its large tensors, and their total length."""
        if depth > self._limits.graph_depth:
            raise UnsafeModelError(
                f"graphs are nested deeper than {self._limits.graph_depth}; {way_out('graph_depth')}"
            )
        entered, smallest = _ENTERED[kind], self._smallest
        pieces: list[bytes] = []
        length, copied, at = 0, start, start
        cut_here: int | None = None
        left_out: tuple[int, int] | None = None
        is_external = False
        data_type = several = 0
        while at < end:
            tag_at = at
            tag, at = self._varint(at)
            wire_type = tag & 7
            if wire_type == _BYTES:
                size, at = self._varint(at)
                stop = at + size
            elif wire_type == _VARINT:
                number, stop = self._varint(at)
                if kind == "tensor" and tag >> 3 == _DATA_LOCATION:
                    is_external = number == _EXTERNAL
                elif kind == "tensor" and tag >> 3 == _DATA_TYPE:
                    several += data_type not in (0, number)
                    data_type = number
            elif wire_type in (_FIXED64, _FIXED32):
                stop = at + (8 if wire_type == _FIXED64 else 4)
            else:
                raise MalformedModelError(f"byte {tag_at} is no field of a protobuf message")
            if stop > end:
                raise MalformedModelError(f"a field at byte {tag_at} is longer than what it stands in")
            several += kind == "tensor" and tag >> 3 in _PACKED
            if wire_type == _BYTES:
                inner = entered.get(tag >> 3)
                if inner == "numbers" and size >= smallest and _PACKED.get(tag >> 3) == data_type:
                    inner = "raw_data"
                    several += 1
                if inner == "raw_data":
                    if cut_here is not None:
                        raise MalformedModelError(f"a tensor has raw_data twice, again at byte {tag_at}")
                    cut_here = tag_at
                if inner is not None and size >= smallest:
                    piece = self._copy(copied, tag_at)
                    if inner == "raw_data":
                        left_out = at, size
                        inside: Sequence[bytes] = ()
                        inside_length = 0
                    elif inner == "numbers":
                        inside = [self._copy(tag_at, stop)]
                        inside_length = len(inside[0])
                        self._no_tags += _tags(inside[0])
                    else:
                        body, body_length = self._message(inner, at, stop, depth + (inner == "graph"))
                        head = header(tag >> 3, body_length)
                        inside, inside_length = [head, *body], len(head) + body_length
                    pieces.append(piece)
                    pieces.extend(inside)
                    length += len(piece) + inside_length
                    copied = stop
            at = stop
        pieces.append(self._copy(copied, end))
        length += len(pieces[-1])
        if left_out is not None:
            if several > 2:
                raise MalformedModelError(f"a tensor before byte {end} has its numbers in several pieces")
            # At the end: the last data_location counts, and the tensor may name the default one.
            pieces.append(field(_RAW_DATA, b"") if is_external else self._reference(*left_out))
            length += len(pieces[-1])
        return pieces, length

    def _reference(self, offset: int, length: int) -> bytes:
        location = f"{self._secret}:{len(self._places)}"
        self._places[location] = (offset, length)
        entry = field(1, b"location") + field(2, location.encode())
        return field(_EXTERNAL_DATA, entry) + varint(_DATA_LOCATION << 3 | _VARINT) + varint(_EXTERNAL)

    def _varint(self, at: int) -> tuple[int, int]:
        """Return the number at an offset, and the offset after it."""
        place = at - self._start
        if place < 0 or place + _LONGEST_VARINT > len(self._window):
            self._window, self._start, place = self._read(self._at_once, at), at, 0
        window = self._window
        try:
            digit = window[place]
            if digit < 128:
                return digit, at + 1
            value, shift = digit & 127, 7
            for next_place in range(place + 1, place + _LONGEST_VARINT):
                digit = window[next_place]
                value |= (digit & 127) << shift
                if digit < 128:
                    return value, at + shift // 7 + 1
                shift += 7
        except IndexError:
            raise MalformedModelError(f"the file ends inside a field, at byte {at}") from None
        raise MalformedModelError(f"the number at byte {at} has more than {_LONGEST_VARINT} digits")

    def _copy(self, start: int, end: int) -> bytes:
        """Copy bytes unchanged."""
        self._kept += end - start
        if self._kept > self._limits.structure_bytes:
            raise UnsafeModelError(
                f"the model has more than {self._limits.structure_bytes} bytes without its large tensors;"
                f" {way_out('structure_bytes')}"
            )
        if start == end:
            return b""
        place = start - self._start
        if place >= 0 and place + end - start <= len(self._window):
            return self._window[place : place + end - start]
        piece = self._read(end - start, start)
        if len(piece) != end - start:
            raise MalformedModelError("the file became shorter while it was read")
        return piece
