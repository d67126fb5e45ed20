"""The zoo: each architecture through every export (`python -m tests.campaign zoo`), and the page of the results, docs/zoo.md."""

import collections
import json
import re
import statistics
from pathlib import Path
from typing import Any

from benchmarks.markdown import behind_summary, table
from tests.campaign.table import Campaign
from tests.zoo import catalogue

RESULTS = Path(__file__).with_name("results.json")
PAGE = Path(__file__).parents[2] / "docs" / "zoo.md"
EXPORTERS = ("dynamo", "torchscript")
WAYS = ("deploy dynamo", "deploy torchscript", "kept dynamo", "kept torchscript")
FILES = ("deploy .pt", "deploy .pt2")
PLAIN = ("plain dynamo", "plain torchscript")
# The worst first.
ORDER = ("wrong", "fails", "failed", "refused", "stopped", "missing", "right")
ALL = (*WAYS, *PLAIN)
Result = dict[str, Any]
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


def of_way(result: dict[str, Any], name: str) -> str:
    """right; wrong; fails at a size that the file declares; failed or refused to export; stopped; missing; for `kept`, folded too."""
    way = result["ways"].get(name)
    if way is None:
        return "missing"
    found = [way["status"]]
    if "fold" in way:
        found.append(way["fold"]["status"])
    return min(found, key=ORDER.index)


def of_model(result: dict[str, Any]) -> str:
    """The worst of all ways; "unbuilt" where the model could not be built or run."""
    if not result["ways"] and result.get("died"):
        return "unbuilt"
    return min((of_way(result, name) for name in WAYS), key=ORDER.index)


def line(result: dict[str, Any]) -> str:
    """One line for a terminal."""
    ways = " ".join(f"{name.replace(' ', '/')}={of_way(result, name)}" for name in WAYS)
    plain = " ".join(f"{name.replace(' ', '/')}={of_way(result, name)}" for name in PLAIN)
    died = f" died: {result['died'][-200:]!r}" if result.get("died") else ""
    return f"{of_model(result):8} {result['name']} {result.get('wall_seconds')} s: {ways} {plain}{died}"


def exported(way: Result | None) -> bool:
    return way is not None and way["status"] in ("right", "wrong", "fails")


def is_fixed(way: Result) -> bool:
    """Whether the file is right, at sizes that it fixes."""
    return way["status"] == "right" and bool(way.get("fixed") or way.get("dynamic") is False)


def word(way: Result | None, verdict: str) -> str:
    """A cell: the verdict, batch norms left, nodes and seconds."""
    if way is None or not exported(way):
        return "not reached" if verdict == "missing" else verdict
    fixed = " fixed" if verdict == "right" and is_fixed(way) else ""
    left = f", {way['batch_norm_nodes']} left" if way["batch_norm_nodes"] else ""
    return f"{verdict}{fixed}{left}, {way['nodes']} nodes, {way['seconds']:.0f} s"


def _groups(results: list[Result]) -> dict[str, list[Result]]:
    """Results by the title of their library, and all of them."""
    groups = {title: [each for each in results if each["name"].startswith(f"{key}:")] for key, title in TITLES.items()}
    return {title: members for title, members in {**groups, "all": results}.items() if members}


def _counts(results: list[Result], way: str) -> collections.Counter[str]:
    return collections.Counter(of_way(each, way) for each in results)


def _norms(result: Result, way: str) -> int | None:
    """Batch norms in the file of a way; None where there is none."""
    found = result["ways"].get(way)
    return found["batch_norm_nodes"] if found and exported(found) else None


def libraries(results: list[Result]) -> str:
    """A row for each library: models, and how many of them each way wrote right."""
    rows = []
    for name, members in _groups(results).items():
        cells = []
        for way in ALL:
            found = _counts(members, way)
            tried = len(members) - found["missing"]
            cells.append(f"{found['right']} of {tried}" if tried else "-")
        left = sum(any(_norms(each, f"deploy {exporter}") for exporter in EXPORTERS) for each in members)
        rows.append([name, str(len(members)), *cells, str(left)])
    return table(["library", "models", *map(_label, ALL), "batch norms left, models"], rows)


def _label(way: str) -> str:
    kind, _, exporter = way.partition(" ")
    return f"`torch.onnx.export`, {exporter}" if kind == "plain" else f"{kind}, {exporter}"


def summary(results: list[Result]) -> str:
    """A row for each way out over all models."""
    rows = []
    for name in ALL:
        ways = [each["ways"][name] for each in results if name in each["ways"]]
        found, fixed = _counts(results, name), sum(map(is_fixed, ways))
        left = sum(1 for each in results if _norms(each, name))
        counts = [found[each] for each in ("right", "wrong", "fails", "refused", "failed", "stopped", "missing")]
        rows.append([_label(name), *map(str, (counts[0] - fixed, fixed, *counts[1:], left))])
    header = "|right|right, fixed sizes|wrong|fails|refused|failed|stopped|not reached|with batch norms left"
    return table(header.split("|"), rows)


def ratios(results: list[Result]) -> str:
    """Nodes and time against plain export with the same exporter, where both are right."""
    rows = []
    for exporter in EXPORTERS:
        pairs = [(each["ways"].get(f"deploy {exporter}"), each["ways"].get(f"plain {exporter}")) for each in results]
        both = [(ours, plain) for ours, plain in pairs if exported(ours) and exported(plain)]
        cells = [exporter, str(len(both))]
        for key in ("nodes", "seconds") if both else ():
            found = [ours[key] / max(plain[key], 0.01) for ours, plain in both]
            cells += [f"{statistics.median(found):.2f}", f"{max(found):.2f}"]
        rows += [cells] if both else []
    header = ["exporter", "models", "nodes, median", "largest", "seconds with verification, median", "largest"]
    return table(header, rows)


def parity(results: list[Result]) -> str:
    """The share that bnexport exports of what torch.onnx.export does."""
    lines = []
    for exporter in EXPORTERS:
        plain = [each for each in results if exported(each["ways"].get(f"plain {exporter}"))]
        ours = [each for each in plain if exported(each["ways"].get(f"deploy {exporter}"))]
        lines.append(f"{exporter}: {len(ours)} of {len(plain)} ({100 * len(ours) / max(1, len(plain)):.1f} %)")
    return f"Of the models that `torch.onnx.export` exports, bnexport exports, for deployment: {'; '.join(lines)}."


def in_files(results: list[Result]) -> str:
    """Batch norms left in ONNX, TorchScript and pt2 files, and the models with more in one of these."""

    def in_onnx(result: Result) -> int | None:
        counts = [_norms(result, f"deploy {exporter}") for exporter in EXPORTERS]
        return min((count for count in counts if count is not None), default=None)

    tried = [each for each in results if any(way in each["ways"] for way in FILES) and in_onnx(each) is not None]
    rows, more = [], []
    for name, members in _groups(tried).items():
        found = {way: _counts(members, way) for way in FILES}
        right = [
            f"{counts['right']} of {len(members) - counts['missing']}, {counts['wrong']} wrong"
            for counts in found.values()
        ]
        both = [each for each in members if all(_norms(each, way) is not None for way in FILES)]
        left = [
            sum(in_onnx(each) or 0 for each in both),
            *(sum(_norms(each, way) or 0 for each in both) for way in FILES),
        ]
        rows.append([name, str(len(members)), *right, str(len(both)), *map(str, left)])
    for each in tried:
        counts, least = [_norms(each, way) for way in FILES], in_onnx(each) or 0
        if any(count is not None and count > least for count in counts):
            way = max(FILES, key=lambda way: _norms(each, way) or 0)
            why = collections.Counter(text for _, _, text in each["ways"][way]["kept"]).most_common(1)
            shown = ["-" if count is None else str(count) for count in counts]
            more.append([each["name"], str(least), *shown, cell(why[0][0] if why else "")])
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


def models(results: list[Result]) -> str:
    header = ["model (conversion)", *ALL]
    rows = []
    for each in results:
        cells = [word(each["ways"].get(name), of_way(each, name)) for name in header[1:]]
        mark = ", changed by the conversion" if "changed_by_conversion" in each else ""
        rows.append([each["name"] + mark, *cells])
    return table(header, rows, left=len(header))


def reasons(results: list[Result]) -> str:
    """Batch norms that are left, with the reason, by model."""
    rows = []
    for each in results:
        for exporter in EXPORTERS:
            if left := _norms(each, f"deploy {exporter}"):
                kept = each["ways"][f"deploy {exporter}"]["kept"]
                found = collections.Counter(f"{outcome}: {why or 'no reason'}" for outcome, _, why in kept)
                why = "; ".join(f"{count} x {text}" for text, count in found.most_common(3))
                rows.append([each["name"], exporter, str(left), cell(why)])
    return table(["model", "exporter", "left", "why"], rows, left=4) if rows else "None."


def restated(results: list[Result]) -> str:
    """What `leftover="conv"` leaves of the models above."""
    found = [way["restated"] for each in results for way in each["ways"].values() if "restated" in way]
    right = [each for each in found if each["status"] == "right" and not each["batch_norm_nodes"]]
    proved, sites = (sum(each[key] for each in right) for key in ("proved", "sites"))
    return (
        f'Folded with `leftover="conv"`, {len(right)} of {len(found)} such files have no batch norm left and are right; '
        f"{proved} of the {sites} depthwise convolutions were proved, the others compared."
    )


def errors(results: list[Result]) -> str:
    """What was not exported, and what was wrong, with the message."""
    rows = []
    for each in results:
        for name, way in each["ways"].items():
            verdict = of_way(each, name)
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
    built = [each for each in shown if of_model(each) != "unbuilt"]
    text = Path(__file__).with_name("page.md").read_text()
    counts = len(built), len(catalogue.entries()), sum(all(way in each["ways"] for way in ALL) for each in built)
    values = dict(zip(("built", "known", "everywhere"), counts))
    sections = (libraries, parity, summary, ratios, reasons, restated, in_files, models)
    return (
        behind_summary(
            text.format(**values, errors=errors(shown), **{each.__name__: each(built) for each in sections}).strip()
        )
        + "\n"
    )


def cost(name: str, results: dict[str, Result]) -> tuple[bool, bool, float]:
    """What comes first: small models, begun ones, and of these the ones whose ways so far took the least time."""
    ways = results.get(name, {"ways": {}})["ways"].values()
    return catalogue.is_large(name), not ways, sum(way.get("total_seconds", 0.0) for way in ways)


CAMPAIGN = Campaign(
    cases=lambda: [entry.name for entry in catalogue.entries()],
    trial="tests.zoo.trial",
    results=RESULTS,
    ways=(*WAYS, *PLAIN, *FILES),
    environment="frameworks",
    verdict=of_model,
    line=line,
    bad=("wrong", "fails"),
    page=lambda: PAGE.write_text(render(json.loads(RESULTS.read_text()))),
    cost=cost,
)
