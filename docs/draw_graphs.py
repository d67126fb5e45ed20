"""Draws docs/before_after.svg: a small residual network as it is exported, and after folding.

    python -m docs.draw_graphs [--output docs/before_after.svg]

Both graphs are read from the files that bnexport writes; nothing is drawn that is not in them. Colours are
chosen to be read on white and on black.
"""

from __future__ import annotations

import argparse
import dataclasses
import html
import tempfile
from pathlib import Path

import onnx
import torch

import bnexport
from models.resnet import ResNet

PICTURE = Path(__file__).with_name("before_after.svg")
BOX, HEIGHT, ROW, LANE, GAP, TOP = 150, 21, 29, 166, 28, 46  # pixels
FILLS = {"norm": "#ffb35c", "changed": "#8fd19e", "other": "#ccd1d9"}
INK, LINE, CAPTION = "#1b1b1b", "#8a919c", "#7a828e"


@dataclasses.dataclass(frozen=True)
class Box:
    """A node: its row is the length of the longest path to it, its lane 1 beside the longest path of all."""

    label: str
    row: int
    lane: int
    kind: str
    sources: tuple[str, ...]


def layout(model: onnx.ModelProto, changed: set[str]) -> dict[str, Box]:
    """Boxes by the name of their nodes."""
    nodes = {node.name: node for node in model.graph.node}
    maker = {output: node.name for node in model.graph.node for output in node.output}
    sources = {
        name: tuple(
            maker[value] for value in node.input if value in maker and nodes[maker[value]].op_type != "Constant"
        )
        for name, node in nodes.items()
    }
    rows: dict[str, int] = {}
    for name in nodes:  # a graph is sorted
        rows[name] = max((rows[source] + 1 for source in sources[name]), default=0)
    longest: set[str] = set()
    name = max(rows, key=lambda name: rows[name])
    while True:
        longest.add(name)
        if not sources[name]:
            break
        name = max(sources[name], key=lambda source: rows[source])
    return {
        name: Box(node.op_type, rows[name], int(name not in longest), kind(node, changed), sources[name])
        for name, node in nodes.items()
    }


def kind(node: onnx.NodeProto, changed: set[str]) -> str:
    return "norm" if "BatchNorm" in node.op_type else "changed" if node.name in changed else "other"


def draw(boxes: dict[str, Box], left: int) -> list[str]:
    parts = []
    for box in boxes.values():
        for source in box.sources:
            parts.append(f'<path d="{edge(boxes[source], box, left)}"/>')
    for box in boxes.values():
        x, y = left + box.lane * LANE, TOP + box.row * ROW
        parts.append(f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="4" fill="{FILLS[box.kind]}"/>')
        parts.append(f'<text x="{x + BOX // 2}" y="{y + 15}" class="node">{html.escape(box.label)}</text>')
    return parts


def edge(source: Box, target: Box, left: int) -> str:
    """Down in one lane; around the boxes, or through the second lane, otherwise."""
    x, x_target = (left + box.lane * LANE + BOX // 2 for box in (source, target))
    y, y_target = TOP + source.row * ROW, TOP + target.row * ROW
    if x == x_target and target.row == source.row + 1:
        return f"M{x} {y + HEIGHT}V{y_target}"
    right = left + BOX
    if source.lane < target.lane:
        return f"M{right} {y + HEIGHT // 2}H{x_target - 6}q6 0 6 6V{y_target}"
    if source.lane > target.lane:
        return f"M{x} {y + HEIGHT}V{y_target + HEIGHT // 2 - 6}q0 6 -6 6H{right}"
    return f"M{right} {y + HEIGHT // 2}h8q6 0 6 6V{y_target + HEIGHT // 2 - 6}q0 6 -6 6H{right}"


def picture() -> str:
    torch.manual_seed(0)
    net = ResNet(in_channels=1, widths=(4, 8), blocks=1).eval()
    with tempfile.TemporaryDirectory() as folder:
        kept, folded = Path(folder, "kept.onnx"), Path(folder, "folded.onnx")
        bnexport.export(net, torch.randn(2, 1, 8, 8), kept, mode="custom_op")
        report = bnexport.fold(kept, folded).report
        before, after = onnx.load(kept), onnx.load(folded)
    if report.verification is None or not report.verification.passed or report.after.sync_batch_norm:
        raise SystemExit("the example does not fold any more")
    targets = {target for site in report.sites for target in site.targets}
    graphs = [layout(before, set()), layout(after, targets)]
    captions = [
        ("exported", f"{len(before.graph.node)} nodes, {report.before.sync_batch_norm} sync batch norms"),
        ("folded", f"{len(after.graph.node)} nodes, {len(targets)} with new weights"),
    ]
    column = LANE + BOX
    width = 2 * column + GAP
    height = TOP + ROW * (1 + max(box.row for boxes in graphs for box in boxes.values()))
    title = f"A small residual network as exported, {captions[0][1]}, and folded, {captions[1][1]}"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">',
        f"<title>{title}</title>",
        "<style>text{font-family:system-ui,-apple-system,'Segoe UI',sans-serif;font-size:12.5px}"
        f".node{{text-anchor:middle;fill:{INK}}}.caption{{fill:{CAPTION};font-size:13px}}"
        f".name{{font-weight:700}}path{{fill:none;stroke:{LINE};stroke-width:1.5}}</style>",
    ]
    for index, (boxes, (name, text)) in enumerate(zip(graphs, captions)):
        left = index * (column + GAP)
        parts.append(f'<text x="{left}" y="14" class="caption name">{name}</text>')
        parts.append(f'<text x="{left}" y="32" class="caption">{text}</text>')
        parts += draw(boxes, left)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=PICTURE)
    arguments = parser.parse_args()
    arguments.output.write_text(picture(), encoding="utf-8")


if __name__ == "__main__":
    main()
