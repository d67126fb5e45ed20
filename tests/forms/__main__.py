"""python -m tests.forms [--operator NAME] [--quota N] [--json FILE]

Folds a batch norm next to every legal form of every operator that a rule or a lemma names, and compares results and
proofs with ONNX Runtime. Prints each finding and the counts; ends with 1 where something was found.
"""

from __future__ import annotations

import argparse
import collections
import gc
import json
import time
from pathlib import Path
from typing import Any

import onnx
import onnxruntime

from benchmarks import records
from tests.forms.engine import newest_opset
from tests.forms.recipes import RECIPES
from tests.forms.session import Row, judge, of_operator

QUOTA = 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.forms", description=__doc__)
    parser.add_argument("--operator", choices=sorted(RECIPES), action="append")
    parser.add_argument("--quota", type=int, default=QUOTA, help="forms of each version for each shape")
    parser.add_argument("--json", type=Path, help="write the counts; operators that were not run keep theirs")
    arguments = parser.parse_args()
    stored: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        stored = json.loads(arguments.json.read_text())["operators"]
    start, found = time.monotonic(), 0
    for op_type in arguments.operator or sorted(RECIPES):
        row = Row()
        for one in of_operator(op_type, arguments.quota):
            for place, finding in judge(one, row):
                found += 1
                print(f"{finding.kind.upper()} {found} {one.describe()}, {place}: {finding.text}", flush=True)
        gc.collect()  # a call leaves its cycles in the oldest generation, which is hardly ever collected
        _print(op_type, row, time.monotonic() - start)
        stored[op_type] = {**vars(row), "findings": dict(row.findings)}
        if arguments.json is not None:
            records.write(arguments.json, _report(stored))
    print(json.dumps(_report(stored)["total"]))
    return 1 if found else 0


def _print(name: str, row: Row, seconds: float) -> None:
    counts = ", ".join(f"{count} {kind}" for kind, count in sorted(row.findings.items())) or "no findings"
    print(
        f"{seconds:6.0f} s  {name}: {row.forms} forms ({row.not_run} not run), {row.models} models,"
        f" {row.folded} folded, {row.kept} kept; {row.proved} proved, {row.undecided} undecided;"
        f" {row.exchanged} exchanged; {counts}",
        flush=True,
    )


def _report(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    total: collections.Counter[str] = collections.Counter()
    for row in rows.values():
        total.update({name: value for name, value in row.items() if isinstance(value, int)})
        total.update({f"findings: {kind}": count for kind, count in row["findings"].items()})
    engine = {"newest_opset": newest_opset(), "onnxruntime": onnxruntime.__version__, "onnx": onnx.__version__}
    return {**engine, "total": dict(total), "operators": dict(sorted(rows.items()))}


if __name__ == "__main__":
    raise SystemExit(main())
