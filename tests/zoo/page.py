"""The zoo: each architecture through every export (`python -m tests.campaign zoo`), and the page of the results, docs/zoo.md."""

from __future__ import annotations

import collections
import json
import re
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.markdown import behind_summary, table
from tests.campaign.table import Campaign
from tests.zoo import catalogue, verdicts

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
EXPORTERS = ("dynamo", "torchscript")
ALL = (*verdicts.WAYS, *verdicts.PLAIN)
Result = dict[str, Any]

HEAD = """# Architectures that were tried

The table counts, per library, the architectures that each way of exporting wrote correctly. Each model was built by its library without
weights, with statistics as training leaves them, and its batch norms were converted by the library's own function. Both
exporters of bnexport wrote it, folded and with the operator kept, and the kept file was folded. Every file was compared with the
untouched model at the example's size and at two or three others. `torch.onnx.export` wrote the same models.
"""

JUDGED = """## How they were judged

- *right*: at every size that the file declares, the largest difference is at most 1e-4 of the output's largest value,
  or eight times the untouched model's own rounding error in float32. One of the sizes is odd, where the network runs
  at it.
- *fixed*: right, and dimensions are declared fixed, with a note that says why. `torch.onnx.export` gets dynamic
  sizes first, and static ones where it cannot make that.
- *wrong*: a file differs by more, though it was written without an error. *fails*: the file declares a size at which
  it does not run.
- *refused*: bnexport says why it does not export. *failed*: any other error. *stopped*: not done within a time limit.
- *deploy*: batch norms are folded. *kept*: sync batch norm stays an operator, and is folded afterwards.
- Seconds are those of a machine that did other work at the same time.
- torch's own conversion drops the activation of timm's batch norms. Such a model is compared with the converted one,
  and is marked in the table of all models.

`make campaign RUN=zoo` makes the results and this page; it takes hours, and goes on where it was stopped.
"""

FILES = """A `.pt` file is scripted, else traced; a `.pt2` file is a program of torch.export. Both are compared with the untouched
model, a trace at the example's size only, a program at those of the other sizes that it takes. ONNX is the better one of both
exporters. A batch norm of a part that the forward does not call, such as an auxiliary head, is no part of an ONNX file; in the others
it counts as left. The `.pt` way needs a forward that torch.fx can trace; a submodule that it cannot trace keeps its batch norms."""

TITLES = {
    "timm": "timm",
    "torchvision": "torchvision",
    "smp": "segmentation_models_pytorch",
    "hf": "transformers",
    "mmseg": "MMSegmentation",
    "mmpretrain": "MMPretrain",
    "mmdet": "MMDetection",
    "ultralytics": "ultralytics",
}


def exported(way: Result | None) -> bool:
    return way is not None and way["status"] in ("right", "wrong", "fails")


def word(way: Result | None, verdict: str) -> str:
    """A cell: the verdict, batch norms left, nodes and seconds."""
    if way is None or not exported(way):
        return "not reached" if verdict == "missing" else verdict
    fixed = " fixed" if verdict == "right" and (way.get("fixed") or way.get("dynamic") is False) else ""
    left = f", {way['batch_norm_nodes']} left" if way["batch_norm_nodes"] else ""
    return f"{verdict}{fixed}{left}, {way['nodes']} nodes, {way['seconds']:.0f} s"


def libraries(results: Iterable[Result]) -> str:
    """A row for each library: models, and how many of them each way wrote right."""
    shown = list(results)
    groups = {title: [each for each in shown if each["name"].startswith(f"{key}:")] for key, title in TITLES.items()}
    rows = []
    for name, members in {**groups, "all": shown}.items():
        if not members:
            continue
        found = {way: collections.Counter(verdicts.of_way(each, way) for each in members) for way in ALL}
        left = sum(1 for each in members if any(_left(each, exporter) for exporter in EXPORTERS))
        cells = [str(len(members))]
        for way in ALL:
            tried = len(members) - found[way]["missing"]
            cells.append(f"{found[way]['right']} of {tried}" if tried else "-")
        rows.append([name, *cells, str(left)])
    header = ["library", "models", *(_label(way) for way in ALL), "batch norms left, models"]
    return table(header, rows)


def _label(way: str) -> str:
    kind, _, exporter = way.partition(" ")
    return f"`torch.onnx.export`, {exporter}" if kind == "plain" else f"{kind}, {exporter}"


def _left(result: Result, exporter: str) -> int:
    way = result["ways"].get(f"deploy {exporter}")
    return way["batch_norm_nodes"] if way and exported(way) else 0


def summary(results: Iterable[Result]) -> str:
    """A row for each way out over all models."""
    results = list(results)
    rows = []
    for name in ALL:
        ways = [each["ways"].get(name) for each in results]
        found = collections.Counter(verdicts.of_way(each, name) for each in results)
        fixed = sum(
            1 for way in ways if way and way["status"] == "right" and (way.get("fixed") or way.get("dynamic") is False)
        )
        left = sum(1 for way in ways if exported(way) and way["batch_norm_nodes"])
        counts = [found[each] for each in ("right", "wrong", "fails", "refused", "failed", "stopped", "missing")]
        rows.append([_label(name), *map(str, (counts[0] - fixed, fixed, *counts[1:], left))])
    header = [
        "",
        "right",
        "right, fixed sizes",
        "wrong",
        "fails",
        "refused",
        "failed",
        "stopped",
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


def in_files(results: Iterable[Result]) -> str:
    """Batch norms left in ONNX, TorchScript and pt2 files, and the models with more in one of these."""
    tried = [
        each
        for each in results
        if any(way in each["ways"] for way in verdicts.FILES)
        and any(_norms(each, f"deploy {exporter}") is not None for exporter in EXPORTERS)
    ]
    groups = {title: [each for each in tried if each["name"].startswith(f"{key}:")] for key, title in TITLES.items()}
    rows, more = [], []
    for name, members in {**groups, "all": tried}.items():
        if members:
            found = {way: collections.Counter(verdicts.of_way(each, way) for each in members) for way in verdicts.FILES}
            right = [
                f"{found[way]['right']} of {len(members) - found[way]['missing']}, {found[way]['wrong']} wrong"
                for way in verdicts.FILES
            ]
            both = [each for each in members if all(_norms(each, way) is not None for way in verdicts.FILES)]
            left = [sum(map(_in_onnx, both)), *(sum(_norms(each, way) or 0 for each in both) for way in verdicts.FILES)]
            rows.append([name, str(len(members)), *right, str(len(both)), *map(str, left)])
    for each in tried:
        counts = [_norms(each, way) for way in verdicts.FILES]
        if any(count is not None and count > _in_onnx(each) for count in counts):
            way = max(verdicts.FILES, key=lambda way: _norms(each, way) or 0)
            why = collections.Counter(text for _, _, text in each["ways"][way]["kept"]).most_common(1)
            shown = ["-" if count is None else str(count) for count in counts]
            more.append([each["name"], str(_in_onnx(each)), *shown, cell(why[0][0] if why else "")])
    header = [
        "library",
        "models",
        "`.pt` right",
        "`.pt2` right",
        "written in all",
        "left in ONNX",
        "in `.pt`",
        "in `.pt2`",
    ]
    worse = table(["model", "ONNX", "`.pt`", "`.pt2`", "why, mostly"], more) if more else "None."
    return f"{table(header, rows)}\n\nModels with more of them than in ONNX:\n\n{worse}"


def _norms(result: Result, way: str) -> int | None:
    found = result["ways"].get(way)
    return found["batch_norm_nodes"] if found and exported(found) else None


def _in_onnx(result: Result) -> int:
    return min(count for exporter in EXPORTERS if (count := _norms(result, f"deploy {exporter}")) is not None)


def models(results: Iterable[Result]) -> str:
    header = ["model (conversion)", *ALL]
    rows = []
    for each in results:
        cells = [word(each["ways"].get(name), verdicts.of_way(each, name)) for name in header[1:]]
        mark = ", changed by the conversion" if "changed_by_conversion" in each else ""
        rows.append([each["name"] + mark, *cells])
    return table(header, rows, left=len(header))


def reasons(results: Iterable[Result]) -> str:
    """Batch norms that are left, with the reason, by model."""
    rows = []
    for each in results:
        for exporter in EXPORTERS:
            way = each["ways"].get(f"deploy {exporter}")
            if way and exported(way) and way["batch_norm_nodes"]:
                found = collections.Counter(f"{outcome}: {why or 'no reason'}" for outcome, _, why in way["kept"])
                why = "; ".join(f"{count} x {text}" for text, count in found.most_common(3))
                rows.append([each["name"], exporter, str(way["batch_norm_nodes"]), cell(why)])
    return table(["model", "exporter", "left", "why"], rows, left=4) if rows else "None."


def restated(results: Iterable[Result]) -> str:
    """What `leftover="conv"` leaves of the models above."""
    found = [way["restated"] for each in results for way in each["ways"].values() if "restated" in way]
    right = [each for each in found if each["status"] == "right" and not each["batch_norm_nodes"]]
    proved, sites = (sum(each[key] for each in right) for key in ("proved", "sites"))
    return (
        f'Folded with `leftover="conv"`, {len(right)} of {len(found)} such files have no batch norm left and are right; '
        f"{proved} of the {sites} depthwise convolutions were proved, the others compared."
    )


def errors(results: Iterable[Result]) -> str:
    """What was not exported, and what was wrong, with the message."""
    rows = []
    for each in results:
        for name, way in each["ways"].items():
            verdict = verdicts.of_way(each, name)
            if verdict == "right" or name.startswith("plain"):
                continue
            said = way.get("error") or str({**way.get("errors", {}), **way.get("fold", {}).get("errors", {})})
            # The first sentence: torch's further ones ask for reports.
            rows.append([each["name"], name, verdict, cell(re.split(r"\. (?=[A-Z])", said)[0])])
        if each.get("died"):
            rows.append([each["name"], "", "stopped", cell(each["died"].splitlines()[-1])])
    return table(["model", "way", "", "message"], rows, left=4) if rows else "None."


def cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").replace("](", "] (").split())[:260]


def render(results: dict[str, Result]) -> str:
    shown = [each for _, each in sorted(results.items())]
    built = [each for each in shown if verdicts.of_model(each) != "unbuilt"]
    parts = [
        HEAD,
        f"{len(built)} of the {len(catalogue.entries())} architectures of the catalogue have run, "
        f"{sum(all(way in each['ways'] for way in ALL) for each in built)} of them in every way. "
        f"Correct exports per method, of those tried:\n\n{libraries(built)}",
        parity(built),
        JUDGED,
        f"## Results by way\n\n{summary(built)}",
        f"bnexport over `torch.onnx.export`, the same exporter, both with what they check by default:\n\n{ratios(built)}",
        f"## Not right\n\n{errors(shown)}",
        f"## Batch norms that are left\n\n{reasons(built)}\n\n{restated(built)}",
        f"## TorchScript and pt2 files\n\n{FILES}\n\n{in_files(built)}",
        f"## All models\n\n{models(built)}",
    ]
    return behind_summary("\n\n".join(part.strip() for part in parts)) + "\n"


def cost(name: str, results: dict[str, Result]) -> tuple[bool, bool, float]:
    """What comes first: small models, begun ones, and of these the ones whose ways so far took the least time."""
    ways = results.get(name, {"ways": {}})["ways"].values()
    return catalogue.is_large(name), not ways, sum(way.get("total_seconds", 0.0) for way in ways)


CAMPAIGN = Campaign(
    cases=lambda: [entry.name for entry in catalogue.entries()],
    trial="tests.zoo.trial",
    results=RESULTS,
    ways=(*verdicts.WAYS, *verdicts.PLAIN, *verdicts.FILES),
    environment="frameworks",
    verdict=verdicts.of_model,
    line=verdicts.line,
    bad=("wrong", "fails"),
    page=lambda: PAGE.write_text(render(json.loads(RESULTS.read_text()))),
    cost=cost,
)
