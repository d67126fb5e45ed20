"""The page of the zoo's results: python -m tests.zoo.page, from tests/zoo/results.json into docs/zoo.md."""

from __future__ import annotations

import collections
import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.page import table
from tests.zoo import catalogue, verdicts

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
EXPORTERS = ("dynamo", "torchscript")
Result = dict[str, Any]

HEAD = """# Architectures that were tried

Real architectures, built by their libraries without weights, with statistics as training leaves them. Each one was
exported by both exporters for deployment and with the node kept, the kept file was folded, and every file was compared
with the untouched model at the example's size and at two or three others, an odd one among them where the network runs
at it; next to it plain `torch.onnx.export`. `make test-zoo` makes the results and this page; it takes hours, and goes on
where it was stopped. Seconds are those of a machine that did other work at the same time.

- *right*: the largest difference is at most 1e-4 of the output's largest value, or eight times the untouched model's
  own rounding error in float32.
- *wrong*: a file differs by more, though it was written without an error. *fails*: the file declares a size at which
  it does not run.
- *fixed*: right, and dimensions are declared fixed, with a note that says why. `torch.onnx.export` gets dynamic
  sizes first, and static ones where it cannot make that.
- *refused*: bnexport says why it does not export. *failed*: any other error.
"""


def exported(way: Result | None) -> bool:
    return way is not None and way["status"] in ("right", "wrong", "fails")


def word(way: Result | None, verdict: str) -> str:
    """A cell: the verdict, batch norms left, nodes and seconds."""
    if way is None or not exported(way):
        return verdict
    fixed = " fixed" if verdict == "right" and (way.get("fixed") or way.get("dynamic") is False) else ""
    left = f", {way['batch_norm_nodes']} left" if way["batch_norm_nodes"] else ""
    return f"{verdict}{fixed}{left}, {way['nodes']} nodes, {way['seconds']:.0f} s"


def summary(results: Iterable[Result]) -> str:
    """A row for each way out over all models."""
    results = list(results)
    rows = []
    for name in (*verdicts.WAYS, *(f"plain {exporter}" for exporter in EXPORTERS)):
        ways = [each["ways"].get(name) for each in results]
        found = collections.Counter(verdicts.of_way(each, name) for each in results)
        fixed = sum(
            1 for way in ways if way and way["status"] == "right" and (way.get("fixed") or way.get("dynamic") is False)
        )
        left = sum(1 for way in ways if exported(way) and way["batch_norm_nodes"])
        label = (
            f"`torch.onnx.export`, {name.partition(' ')[2]}" if name.startswith("plain") else name.replace(" ", ", ")
        )
        counts = [found[each] for each in ("right", "wrong", "fails", "refused", "failed", "missing")]
        rows.append([label, *map(str, (counts[0] - fixed, fixed, *counts[1:], left))])
    header = [
        "",
        "right",
        "right, fixed sizes",
        "wrong",
        "fails",
        "refused",
        "failed",
        "not reached",
        "with batch norms left",
    ]
    return table(header, rows)


def ratios(results: Iterable[Result]) -> str:
    """Nodes and time against plain export with the same exporter, where both are right."""
    rows = []
    for exporter in EXPORTERS:
        pairs = [(each["ways"].get(f"deploy {exporter}"), each["ways"].get(f"plain {exporter}")) for each in results]
        both = [(ours, plain) for ours, plain in pairs if exported(ours) and exported(plain)]
        if not both:
            continue
        cells = [exporter, str(len(both))]
        for key in ("nodes", "seconds"):
            found = [ours[key] / max(plain[key], 0.01) for ours, plain in both]
            cells += [f"{statistics.median(found):.2f}", f"{max(found):.2f}"]
        rows.append(cells)
    header = ["exporter", "models", "nodes, median", "largest", "seconds with verification, median", "largest"]
    return table(header, rows)


def parity(results: Iterable[Result]) -> str:
    """The share that bnexport exports of what torch.onnx.export does."""
    lines = []
    for exporter in EXPORTERS:
        plain = [each for each in results if exported(each["ways"].get(f"plain {exporter}"))]
        ours = [each for each in plain if exported(each["ways"].get(f"deploy {exporter}"))]
        lines.append(f"{exporter}: {len(ours)} of {len(plain)} ({100 * len(ours) / max(1, len(plain)):.1f} %)")
    return f"Of the models that `torch.onnx.export` exports, bnexport exports, for deployment: {'; '.join(lines)}."


def models(results: Iterable[Result]) -> str:
    header = ["model (conversion)", *verdicts.WAYS, *(f"plain {exporter}" for exporter in EXPORTERS)]
    rows = []
    for each in results:
        cells = [word(each["ways"].get(name), verdicts.of_way(each, name)) for name in header[1:]]
        rows.append([each["name"], *cells])
    return table(header, rows, left=len(header))


def reasons(results: Iterable[Result]) -> str:
    """Batch norms that are left, with the reason, by model."""
    rows = []
    for each in results:
        for exporter in EXPORTERS:
            way = each["ways"].get(f"deploy {exporter}") or {}
            if exported(way) and way["batch_norm_nodes"]:
                found = collections.Counter(f"{outcome}: {why or 'no reason'}" for outcome, _, why in way["kept"])
                why = "; ".join(f"{count} x {text}" for text, count in found.most_common(3))
                rows.append([each["name"], exporter, str(way["batch_norm_nodes"]), _cell(why)])
    return table(["model", "exporter", "left", "why"], rows, left=4) if rows else "None."


def errors(results: Iterable[Result]) -> str:
    """What was not exported, and what was wrong, with the message."""
    rows = []
    for each in results:
        for name, way in each["ways"].items():
            verdict = verdicts.of_way(each, name)
            if verdict == "right" or name.startswith("plain"):
                continue
            said = way.get("error") or str({**way.get("errors", {}), **way.get("fold", {}).get("errors", {})})
            rows.append([each["name"], name, verdict, _cell(said)])
        if each.get("died"):
            rows.append([each["name"], "", "stopped", _cell(each["died"].splitlines()[-1])])
    return table(["model", "way", "", "message"], rows, left=4) if rows else "None."


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").split())[:260]


def render(results: dict[str, Result]) -> str:
    shown = [each for _, each in sorted(results.items())]
    built = [each for each in shown if verdicts.of_model(each) != "unbuilt"]
    parts = [
        HEAD,
        f"{len(built)} of the {len(catalogue.entries())} architectures of the catalogue so far; *not reached* are ways that "
        f"a run has not come to yet.\n\n{summary(built)}",
        parity(built),
        f"bnexport over `torch.onnx.export`, the same exporter, both with what they check by default:\n\n{ratios(built)}",
        f"## Batch norms that are left\n\n{reasons(built)}",
        f"## Not right\n\n{errors(shown)}",
        f"## All models\n\n{models(built)}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


if __name__ == "__main__":
    PAGE.write_text(render(json.loads(RESULTS.read_text())))
    print(f"{PAGE} written")
