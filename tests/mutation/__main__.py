"""Change the source in small ways, one at a time, and count the changes that the tests notice.

    python -m tests.mutation folding --count 300

Works on a copy of the repository, which a planted mutant shows to be the one that the tests import. Results are
appended to build/mutation/GROUP.jsonl, a line for each mutant; the sequence of mutants depends on the seed alone, so a
run goes on where an earlier one stopped. After new tests, `--again` judges once more what has survived or timed out.
`python -m tests.mutation report` prints the scores and the survivors of all groups.
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

from bnexport.native.library import get_library_path
from tests.mutation.groups import GROUPS, ROOT

COPIED = ("bnexport", "tests", "models", "docs", "benchmarks", "examples", "pyproject.toml", "README.md", "mkdocs.yml")
# An editable installation imports bnexport from the checkout, whatever sys.path says.
NOT_INSTALLED = """import sys

for finder in list(sys.meta_path):
    if any(name.partition(".")[0] == "bnexport" for name in getattr(finder, "known_source_files", ())):
        sys.meta_path.remove(finder)
"""


def copy_repository(folder: Path) -> Path:
    for name in COPIED:
        original = ROOT / name
        if original.is_dir():
            shutil.copytree(original, folder / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules"))
        else:
            shutil.copy(original, folder / name)
    (folder / "sitecustomize.py").write_text(NOT_INSTALLED)
    (folder / "tmp").mkdir()
    return folder


def run(arguments: argparse.Namespace) -> int:
    log = arguments.results.absolute() / f"{arguments.group}.jsonl"
    log.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mutation") as name:
        folder = copy_repository(Path(name).resolve())
        wanted = ("group", "count", "seed", "minutes", "seconds", "again")
        order = {"log": str(log), **{key: getattr(arguments, key) for key in wanted}}
        (folder / "order.json").write_text(json.dumps(order))
        # Of its own, too: an installation that changes meanwhile must not decide about mutants.
        library = shutil.copy(get_library_path(), folder)
        environment = {
            **os.environ,
            "BNEXPORT_LIBRARY": str(library),
            "PYTHONPATH": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "TMPDIR": str(folder / "tmp"),
        }
        command = [sys.executable, "-m", "tests.mutation.session", "order.json"]
        return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def report(results: Path) -> None:
    for group in GROUPS:
        log = results / f"{group}.jsonl"
        if not log.exists():
            continue
        rows = {row["mutant"]: row for row in map(json.loads, log.read_text().splitlines())}  # the last one counts
        alive = sorted(name for name, row in rows.items() if row["outcome"] not in ("killed", "hangs"))
        print(f"{group}: {len(rows) - len(alive)} of {len(rows)} killed, {1 - len(alive) / len(rows):.1%}")
        for name in alive:
            row = rows[name]
            print(f"  {name}  line {row['line']}, {row['outcome']} {row['tests']} tests")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("group", choices=[*GROUPS, "report"])
    parser.add_argument("--count", type=int, default=300, help="mutants, of the sequence that the seed makes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=1e6, help="stop after so many")
    parser.add_argument(
        "--seconds", type=float, default=10, help="for the tests of one mutant, as they take without it"
    )
    parser.add_argument("--again", action="store_true", help="judge survivors and timeouts of an earlier run once more")
    parser.add_argument("--results", type=Path, default=ROOT / "build/mutation")
    arguments = parser.parse_args()
    if arguments.group == "report":
        report(arguments.results)
        return 0
    return run(arguments)


if __name__ == "__main__":
    sys.exit(main())
