"""What the operator in ONNX Runtime aims for, and the tensors that miss it."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.markdown import Report, table

SMALLEST = 1.0  # megabytes
# column: the bound, and whether it is the least value
AIMS = {
    "train/(read+copy)": (1.15, False),
    "torch/train": (3.5, True),
    "ort/train": (3.0, True),
    "infer/ort": (1.0, False),
    "grad/(2read+combine)": (1.15, False),
}


def missed(reports: dict[str, Report]) -> str:
    """A row for each aim: the bound, and per instruction set how many float32 tensors miss it and by how much."""
    rows = []
    for column, (bound, least) in AIMS.items():
        cells = [f"`{column}`", f"at {'least' if least else 'most'} {bound:g}"]
        for report in reports.values():
            chosen = [row for row in report["rows"] if row["dtype"] == "float32" and row["megabytes"] >= SMALLEST]
            values = [row[column] for row in chosen if column in row]
            wrong = [value for value in values if (value < bound if least else value > bound)]
            worst = (min if least else max)(wrong, default=bound)
            cells.append(f"{len(wrong)} of {len(values)}" + (f", worst {worst:.2f}" if wrong else ""))
        rows.append(cells)
    return table(["column", "aim", *reports], rows, 2)


def load(results: Path) -> dict[str, Report]:
    """Reads the results of the instruction sets that were measured."""
    names = {"AVX-512": "ort_cpu", "AVX2": "ort_cpu_avx2", "baseline": "ort_cpu_baseline"}
    return {isa: json.loads((results / f"{name}.json").read_text()) for isa, name in names.items()}
