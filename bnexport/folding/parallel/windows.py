"""Read the window of a Conv or a pool, and the zeros of a Pad."""

from __future__ import annotations

import onnx_ir as ir

from bnexport.folding.context import Context
from bnexport.folding.parallel.kernels import Window
from bnexport.folding.reading.pads import read_fill, read_pads
from bnexport.graph.nodes import get_ints, get_string, label
from bnexport.graph.refusal import Refused


def read_window(node: ir.Node, sizes: tuple[int, ...]) -> Window:
    """Return the window of a Conv or a pool. Raise Refused where its padding depends on the size of the input."""
    rank = len(sizes)
    strides = get_ints(node, "strides") or (1,) * rank
    dilations = get_ints(node, "dilations") or (1,) * rank
    pads = get_ints(node, "pads") or (0,) * 2 * rank
    if len(strides) != rank or len(dilations) != rank or len(pads) != 2 * rank:
        raise Refused("shape", f"the strides, dilations or pads of {label(node)} are not those of {rank} axes")
    if min((*strides, *dilations)) < 1 or min(pads) < 0:
        raise Refused("bad-attribute", f"{label(node)} has a stride, a dilation or pads below what is allowed")
    begins, ends = pads[:rank], pads[rank:]
    auto_pad = get_string(node, "auto_pad", "NOTSET")
    if auto_pad not in ("NOTSET", "") and any(pads):
        raise Refused("padding", f"{label(node)} has pads and auto_pad")
    if auto_pad in ("SAME_UPPER", "SAME_LOWER"):
        if any(stride != 1 for stride in strides):
            raise Refused("padding", f"the padding of {label(node)} depends on the size of its input")
        totals = [dilation * (size - 1) for size, dilation in zip(sizes, dilations, strict=True)]
        less = tuple(total // 2 for total in totals)
        more = tuple(total - half for total, half in zip(totals, less, strict=True))
        begins, ends = (less, more) if auto_pad == "SAME_UPPER" else (more, less)
    elif auto_pad not in ("NOTSET", "", "VALID"):
        raise Refused("padding", f"{label(node)} has the unknown auto_pad {auto_pad!r}")
    return Window(tuple(sizes), begins, ends, tuple(strides), tuple(dilations))


def read_zeros(node: ir.Node, rank: int, context: Context) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Zeros that a Pad adds before and behind each axis of positions. Refused where it does something else."""
    pads = read_pads(node, rank, context)
    cropped = any(number < 0 for pair in pads for number in pair)
    if get_string(node, "mode", "constant") != "constant" or cropped or read_fill(node, context) != 0:
        raise Refused("padding", f"{label(node)} crops, or pads with something else than zeros")
    if any(map(any, pads[:2])):
        raise Refused("axis", f"{label(node)} pads the channels or the batch")
    begins, ends = zip(*pads[2:], strict=True) if rank > 2 else ((), ())
    return begins, ends
