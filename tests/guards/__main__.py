"""Remove the guards of the package, one at a time, and see whether a test notices.

    python -m tests.guards folding --minutes 30

Works on a copy of the repository. Results are appended to build/guards/GROUP.jsonl, a line for each guard, so a run goes on
where an earlier one stopped; `--again` judges once more what has survived. At the end, and with `--report` alone, it prints
the survivors: each is a missing test or a needless guard.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.guards.session import GROUPS, NOT_INSTALLED

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("bnexport", "tests", "models", "docs", "benchmarks", "examples", "pyproject.toml", "README.md", "mkdocs.yml")


def run(arguments: argparse.Namespace, log: Path) -> int:
    from bnexport.native.library import get_library_path

    with tempfile.TemporaryDirectory(prefix="guards") as name:
        folder = Path(name).resolve()
        for copied in COPIED:
            source = ROOT / copied
            copy = shutil.copytree if source.is_dir() else shutil.copy
            copy(source, folder / copied)
        (folder / "sitecustomize.py").write_text(NOT_INSTALLED)
        (folder / "tmp").mkdir()
        library = Path(get_library_path())
        wanted = ("group", "minutes", "seconds", "again")
        order = {"log": str(log), **{key: getattr(arguments, key) for key in wanted}}
        (folder / "order.json").write_text(json.dumps(order))
        environment = {
            **os.environ,
            # Of its own, too: an installation that changes meanwhile must not decide.
            "BNEXPORT_LIBRARY": str(shutil.copytree(library.parent, folder / "lib") / library.name),
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(folder / "tmp"),
        }
        command = [sys.executable, "-m", "tests.guards.session", "order.json"]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def report(log: Path) -> None:
    rows = {row["guard"]: row for row in map(json.loads, log.read_text().splitlines())}  # the last one counts
    alive = sorted(name for name, row in rows.items() if row["outcome"] not in ("killed", "hangs"))
    print(f"{log.stem}: {len(rows) - len(alive)} of {len(rows)} seen by a test")
    for name in alive:
        print(f"  {name}  line {rows[name]['line']}, {rows[name]['outcome']} {rows[name]['tests']} tests")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=GROUPS)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many")
    parser.add_argument(
        "--seconds", type=float, default=10, help="for the tests of one guard, as they take without the change"
    )
    parser.add_argument("--again", action="store_true", help="judge survivors and timeouts of an earlier run once more")
    parser.add_argument("--report", action="store_true", help="print the results so far")
    parser.add_argument("--results", type=Path, default=ROOT / "build/guards")
    arguments = parser.parse_args()
    log = arguments.results.absolute() / f"{arguments.group}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    code = 0 if arguments.report else run(arguments, log)
    report(log)
    return code


if __name__ == "__main__":
    sys.exit(main())
