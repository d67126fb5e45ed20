"""Changes of serialised models, of single bytes and of protobuf's fields.

A message is taken apart into its fields by ONNX's own descriptors, one or a few fields are changed, and it is
put together again: so that most of what comes out still parses, and reaches what lies behind the parser. What
nobody's parser should accept comes too: lengths that lie, tags of other types, bytes that were cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
import struct
from collections.abc import Sequence
from typing import Any

import onnx

from bnexport.model_io.wire import varint

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
LARGEST = 1 << 16  # bytes of a mutated input
_DEEPEST = 24
NUMBERS = (0, 1, 2, 3, 7, 8, 16, 127, 128, 255, 2**16, 2**31 - 1, 2**31, 2**32, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 1e-45, 1e-12, 1e30, 3.4e38, float("inf"), float("-inf"), float("nan"))
TEXTS = (
    *("", "x", "y", "w", "\0", "n" * 300, "../secret", "/etc/passwd", "data", "*/_ORT_MEM_ADDR_/*", "\N{SNOWMAN}"),
    *("Conv", "ConvTranspose", "Gemm", "MatMul", "BatchNormalization", "MMCVSyncBatchNorm", "MMCVSyncBatchNormGrad"),
    *("Relu", "Identity", "Constant", "If", "Loop", "Add", "Mul", "Concat", "Split", "Pad", "Reshape", "Transpose"),
    *("mmcv", "ai.onnx", "local", "group", "group_size", "training_mode", "eps", "epsilon", "momentum", "axis"),
    *("value", "transB", "alpha", "kernel_shape", "pads", "strides", "location", "offset", "length", "-1", "8192"),
)


@dataclasses.dataclass
class Field:
    """One field; value is a number, bytes, or the fields inside. lie: added to the length that is written."""

    number: int
    wire_type: int
    value: int | bytes | list[Field]
    lie: int = 0

    def copy(self) -> Field:
        value = [inner.copy() for inner in self.value] if isinstance(self.value, list) else self.value
        return Field(self.number, self.wire_type, value, self.lie)


def parse(data: bytes, descriptor: Any = onnx.ModelProto.DESCRIPTOR, depth: int = 0) -> list[Field]:
    """The fields of a message. Raises ValueError for what is none."""
    fields, at = [], 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        number, wire_type = tag >> 3, tag & 7
        value: int | bytes | list[Field]
        if wire_type == VARINT:
            value, at = _read_varint(data, at)
        elif wire_type in (FIXED32, FIXED64):
            width = 4 if wire_type == FIXED32 else 8
            value, at = int.from_bytes(data[at : at + width], "little"), at + width
        elif wire_type == BYTES:
            length, at = _read_varint(data, at)
            value, at = data[at : at + length], at + length
            known = descriptor.fields_by_number.get(number)
            if known is not None and known.message_type is not None and depth < _DEEPEST:
                with contextlib.suppress(ValueError):  # Then it stays bytes.
                    value = parse(value, known.message_type, depth + 1)
        else:
            raise ValueError("a tag of another type")
        if at > len(data):
            raise ValueError("the message ends inside a field")
        fields.append(Field(number, wire_type, value))
    return fields


def serialise(fields: Sequence[Field]) -> bytes:
    pieces = []
    for field in fields:
        pieces.append(varint(field.number << 3 | field.wire_type))
        if isinstance(field.value, int):
            width, number = {FIXED32: 4, FIXED64: 8}.get(field.wire_type), field.value & (2**64 - 1)
            pieces.append((number & (1 << 8 * width) - 1).to_bytes(width, "little") if width else varint(number))
        else:
            content = field.value if isinstance(field.value, bytes) else serialise(field.value)
            pieces += [varint(max(0, len(content) + field.lie)), content]
    return b"".join(pieces)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(data) or shift > 63:
            raise ValueError("no number")
        digit = data[at]
        value |= (digit & 127) << shift
        at, shift = at + 1, shift + 7
        if digit < 128:
            return value, at


def mutate(data: bytes, generator: random.Random, others: Sequence[bytes] = ()) -> bytes:
    """`data` after one or a few changes. others: models whose parts may be put in."""
    if generator.random() < 0.2:
        return mutate_bytes(data, generator)
    try:
        tree = parse(data)
        other = parse(generator.choice(others)) if others and generator.random() < 0.3 else tree
    except ValueError:
        return mutate_bytes(data, generator)
    for _ in range(generator.choice((1, 1, 1, 2, 2, 4, 8))):
        _change(tree, other, generator)
    changed = serialise(tree)[:LARGEST]
    return mutate_bytes(changed, generator) if generator.random() < 0.05 else changed


def mutate_bytes(data: bytes, generator: random.Random) -> bytes:
    """Bytes flipped, set, taken out, repeated, put in, or cut off."""
    buffer = bytearray(data or b"\0")
    for _ in range(generator.choice((1, 1, 2, 4))):
        at = generator.randrange(len(buffer))
        kind = generator.randrange(6)
        if kind == 0:
            buffer[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            buffer[at] = generator.randrange(256)
        elif kind == 2:
            del buffer[at : at + generator.randrange(1, 40)]
        elif kind == 3:
            buffer[at:at] = buffer[at : at + generator.randrange(1, 200)]
        elif kind == 4:
            buffer[at:at] = varint(generator.choice(NUMBERS))
        else:
            del buffer[max(1, at) :]
        buffer = buffer or bytearray(b"\0")
    return bytes(buffer[:LARGEST])


def _places(fields: list[Field]) -> list[tuple[list[Field], int]]:
    """Every field, as the list that holds it and its index."""
    found, waiting = [], [fields]
    while waiting:
        holder = waiting.pop()
        for index, field in enumerate(holder):
            found.append((holder, index))
            if isinstance(field.value, list):
                waiting.append(field.value)
    return found


# The commonest changes stand twice or more.
_CHANGES = (
    *("drop", "repeat", "swap", "transplant", "transplant", "value", "value", "value", "name", "name"),
    *("number", "wire type", "lie", "nest"),
)


def _change(tree: list[Field], other: list[Field], generator: random.Random) -> None:
    """Change one field. other: the fields of a model whose parts may be put in."""
    places = _places(tree)
    if not places:
        return
    holder, index = generator.choice(places)
    field, kind = holder[index], generator.choice(_CHANGES)
    if kind == "drop":
        del holder[index]
    elif kind == "repeat":
        holder[index:index] = [field.copy() for _ in range(generator.choice((1, 1, 1, 2, 30, 300)))]
    elif kind == "swap":
        second = generator.randrange(len(holder))
        holder[index], holder[second] = holder[second], field
    elif kind == "transplant":  # of the same number, which mostly is one of the same type
        found = [where[at] for where, at in _places(other)]
        same = [each for each in found if each.number == field.number]
        holder[index] = generator.choice(same if same and generator.random() < 0.8 else found).copy()
    elif kind == "value":
        field.value = _other_value(field, generator)
    elif kind == "name":  # a text that stands elsewhere: names that are confused, doubled, or defined too late
        texts = [where[at].value for where, at in _places(other)]
        texts = [text for text in texts if isinstance(text, bytes) and len(text) < 64]
        if isinstance(field.value, bytes) and texts:
            field.value = generator.choice(texts)
    elif kind == "number":
        field.number = generator.choice((*range(1, 26), field.number + 1, 2**29 - 1))
    elif kind == "wire type":
        holder[index] = Field(field.number, generator.choice((VARINT, FIXED64, FIXED32)), generator.choice(NUMBERS))
    elif kind == "lie":
        field.lie = generator.choice((-1, 1, -4, 4, 1000, 2**31, 2**62))
    else:  # a field inside itself, a few or many times over
        for _ in range(generator.choice((1, 2, 40, 120))):
            holder[index] = Field(field.number, BYTES, [holder[index]])


def _other_value(field: Field, generator: random.Random) -> int | bytes | list[Field]:
    """Return another number, text or length, or no content."""
    value = field.value
    if isinstance(value, list):
        return []
    if isinstance(value, int):
        if field.wire_type == FIXED32:
            return int.from_bytes(struct.pack("<f", generator.choice(FLOATS)), "little")
        return generator.choice((*NUMBERS, value + 1, value - 1, generator.randrange(32)))
    kind = generator.randrange(6)
    if kind < 3:
        return generator.choice(TEXTS).encode()
    if kind == 3:
        return value[: generator.randrange(len(value) + 1)]
    return mutate_bytes(value, generator) if kind == 4 else value + bytes(generator.choice((1, 4, 64, 4096)))
