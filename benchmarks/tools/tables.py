"""Tables of the comparison with other tools, for docs/comparison.md."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.markdown import Report, setting, table

PEERS = Path(__file__).resolve().parents[1] / "results/proof_peers.json"
PROVERS = {"onnxsim": "certify, range", "bnexport": "bnexport"}
EXPORTER, OURS = "torch.onnx.export", "bnexport"
SHOWN_TOOLS = (EXPORTER, "onnxsim", "onnxslim", "onnxscript", "onnxruntime", "aimet-onnx", "amd-quark", OURS)
WORDS = {"folded": "yes", "right": "right", "does not load": "does not load", "wrong result": "**wrong result**"}


def word(result: dict[str, Any] | None) -> str:
    """Returns the cell of one tool in one row."""
    if result is None:
        return "-"
    status = result["status"]
    if status == f"{result.get('before')} left":
        return "no"
    if "is not a registered" in result.get("error", ""):
        return WORDS["does not load"]
    return WORDS.get(status, status)


def header(report: Report, names: tuple[str, ...]) -> list[str]:
    return ["", *(f"{name} {report['tools'][name]}" for name in names)]


def other_tools(report: Report) -> str:
    """What each tool makes of one network each."""
    rows = [row for row in report["rows"].values() if not row["trap"]]
    cells = [[row["what"], *(word(row["tools"].get(name)) for name in SHOWN_TOOLS)] for row in rows]
    own = {tool: proved(json.loads(PEERS.read_text()), judge) for tool, judge in PROVERS.items()}
    cells.append(["right folds that its own proof proves", *(own.get(name, "-") for name in SHOWN_TOOLS)])
    notes = [
        f"{name} {it['version']} ({it['date']}; {it['source']}) {it['text']}: not run here."
        for name, it in report["sources"].items()
    ]
    return "\n\n".join((table(header(report, SHOWN_TOOLS), cells, len(SHOWN_TOOLS) + 1), *notes))


def other_tools_traps(report: Report) -> str:
    """What each tool makes of graphs whose fold would change the result."""
    names = tuple(name for name in report["tools"] if name not in (EXPORTER, "onnxruntime-extensions"))
    rows = [row for row in report["rows"].values() if row["trap"]]

    def cell(result: dict[str, Any]) -> str:
        return (
            "right" if result["status"].endswith((" left", "folded")) else WORDS.get(result["status"], result["status"])
        )

    cells = [[row["what"], *(cell(row["tools"][name]) for name in names)] for row in rows]
    return table(header(report, names), cells, len(names) + 1)


def other_tools_models(report: Report) -> str:
    """Batch norms that each tool leaves in real models."""
    names = tuple(name for name in report["tools"] if name not in (EXPORTER, "onnxruntime-extensions"))
    rows = []
    for name, row in report["models"].items():
        results = [row["tools"][tool] for tool in names]
        before = next(result["before"] for result in results if "before" in result)
        cells = (str(result["left"]) if "left" in result else result["status"] for result in results)
        rows.append([f"`{name}` ({row['package']})", str(before), *cells])
    head = header(report, names)
    return table([f"batch norms in {head[0]}".strip(), "before", *head[1:]], rows)


_PROOFS = ("right, named sizes", "right, fixed sizes", "wrong, named sizes", "wrong, fixed sizes")


def proof_peers(report: Report) -> str:
    """Verdicts of each judge on right and wrong folds, and what a ResNet-50 takes."""
    cells = []
    for judge in report["rows"][0]["verdicts"]:
        for group in _PROOFS:
            kind, sizes = group.split(", ")
            rows = [
                row for row in report["rows"] if row["right"] == (kind == "right") and row["sizes"] == sizes.split()[0]
            ]
            verdicts = [row["verdicts"][judge] for row in rows]
            counts = [sum(each["status"] == status for each in verdicts) for status in ("proved", "refuted")]
            seconds = sorted(each["processor_seconds"] for each in verdicts if "processor_seconds" in each)
            middle = f"{seconds[len(seconds) // 2]:.2f}" if seconds else ""
            numbers = [len(rows), *counts, len(rows) - sum(counts)]
            cells.append([judge, group, *map(str, numbers), middle])
    resnet = [
        [f"{row['maker']}, {row['sizes']} sizes", *(_verdict(verdict) for verdict in row["verdicts"].values())]
        for row in report["rows"]
        if row["name"] == "ResNet-50" and row["right"]
    ]
    return "\n\n".join(
        (
            setting(report, *(f"{name} {version}" for name, version in report["versions"].items())),
            table(["judge", "folds", "pairs", "proved", "refuted", "neither", "median s"], cells, 2),
            table(["ResNet-50, folded by", *report["rows"][0]["verdicts"]], resnet, 4),
        )
    )


def _verdict(verdict: dict[str, Any]) -> str:
    seconds = verdict.get("processor_seconds")
    return verdict["status"] + ("" if seconds is None else f", {seconds:.1f} s")


def proved(report: Report, judge: str) -> str:
    """Return how many of the right folds a judge proves."""
    verdicts = [row["verdicts"][judge]["status"] for row in report["rows"] if row["right"]]
    return f"{verdicts.count('proved')} of {len(verdicts)}"
