"""What the proof of a fold takes: `python -m benchmarks.bench_proof [--rounds 3] [--work FOLDER] [--json PATH]`.

With `--peers [PYTHON]` instead what onnxsim's certify says of the same folds: see tools/proofs.py. PYTHON is the
interpreter of an environment with tools.compare's packages; without it they are installed into a temporary one.

A fold of each model is proved from its report: both models loaded anew, every site in float64, everything else compared.
"cmp" reads the weights of the largest model and a copy of them, in turn with the proof: nothing that looks at both files
can take less. 2.6 GB of weights, twice, and their copy need 8 GB of disk. Every site must be proved, else nothing is
written. Prints a table, writes benchmarks/results/proof.json.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx

from benchmarks import fold_models, machine, records
from benchmarks.tools import compare, proofs
from bnexport import model_io
from bnexport.folding import fold
from bnexport.verification.api import prove_fold

CASES: dict[str, Callable[[Path], None]] = {
    "ResNet-50": lambda path: onnx.save(fold_models.resnet50(), path),
    "10,000 pairs": lambda path: fold_models.pairs(10_000, 8, path, external=False),
    "2.6 GB, external": lambda path: fold_models.pairs(70, 1024, path, external=True),
}


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """Fold the model and time its proof; with external data, `cmp` of as many bytes in turn."""
    folded = path.with_name("folded.onnx")
    report = fold(path, folded, verify=False).report
    data = path.with_name(path.name + ".data")
    copy = path.with_name("copy")
    if data.exists() and data.stat().st_size:
        shutil.copyfile(data, copy)
    proofs, compares = [], []
    for _ in range(rounds):
        if copy.exists():
            start = time.perf_counter()
            subprocess.run(["cmp", data, copy], check=True)
            compares.append(time.perf_counter() - start)
        start = time.perf_counter()
        verdict = prove_fold(model_io.load(path), model_io.load(folded), report.claims)
        proofs.append(time.perf_counter() - start)
        methods = Counter(proof.method for proof in verdict.sites)
        if verdict.status != "passed" or set(methods) != {"proved"}:
            raise SystemExit(f"{path}: {verdict.summary()}, by {dict(methods)}: expected a proof of every site")
    row: dict[str, Any] = {"sites": methods.total(), "seconds": statistics.median(proofs)}
    if compares:
        row["cmp_seconds"] = statistics.median(compares)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", type=Path, help="a folder for the models, instead of a temporary one")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results" / "proof.json")
    parser.add_argument("--peers", nargs="?", const="", metavar="PYTHON", help="certify instead, next to our proof")
    parser.add_argument("--processes", type=int, default=1, help="with --peers: of each judge, at a time")
    arguments = parser.parse_args()
    if arguments.peers is not None:
        with tempfile.TemporaryDirectory() as folder:
            proofs.main(arguments.peers or compare.environment(Path(folder)), arguments.processes)
        return
    rows = {}
    for name, write in CASES.items():
        with tempfile.TemporaryDirectory(dir=arguments.work) as folder:
            write(Path(folder) / "model.onnx")
            rows[name] = row = measure(Path(folder) / "model.onnx", arguments.rounds)
        beside = f", cmp {row['cmp_seconds']:.2f} s" if "cmp_seconds" in row else ""
        print(f"{name:18} {row['sites']:6} sites proved in {row['seconds']:.2f} s{beside}", flush=True)
    report = {"machine": machine.describe(), "rounds": arguments.rounds, "cases": rows}
    records.write(arguments.json, report)


if __name__ == "__main__":
    main()
