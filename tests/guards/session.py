"""Judge guards in one pytest session that has imported and collected everything.

    python -m tests.guards.session ORDER.json

In the folder of a copy of the repository (`tests.guards` makes it). For each guard the file is written, this process forks,
the child puts the changed code into the functions in its memory and runs the tests that reach the line, the fastest first,
until one fails. A change that makes a test run on and on uses up its processor time, whatever else the machine does: it
"hangs", and is seen. Where only the clock ran out the outcome is "timeout", which says nothing; `--again` repeats it.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol

import bnexport
from bnexport.verification import process
from tests.guards.guards import Guard, guards
from tests.guards.live import functions_of, patch
from tests.support import warm

OTHERS = ("tests/verification", "tests/exporting", "tests/cli", "tests/recalibration", "tests/training")
# What is changed, and the tests that should see it.
GROUPS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "folding": (("bnexport/folding/**/*.py",), ("tests/folding", "tests/forms")),
    "verification": (
        ("bnexport/verification/**/*.py",),
        (
            *("tests/folding/test_corpus.py", "tests/folding/test_api.py", "tests/verification"),
            *("tests/miscompilations", "tests/exporting/test_against_file.py", "tests/exporting/test_reference.py"),
            *("tests/cli", "tests/recalibration", "tests/forms", "tests/malicious"),
        ),
    ),
    "graph": (
        ("bnexport/graph/*.py",),
        ("tests/graph", "tests/folding", "tests/forms", "tests/malicious", "tests/miscompilations", *OTHERS),
    ),
    "names": (("bnexport/graph/nodes.py",), ("tests/guards/example.py",)),  # for the test of this tool
}
# An editable installation imports bnexport from the checkout, whatever sys.path says.
NOT_INSTALLED = """import sys

for finder in list(sys.meta_path):
    if any(name.partition(".")[0] == "bnexport" for name in getattr(finder, "known_source_files", ())):
        sys.meta_path.remove(finder)
"""

UNPATCHED = 77  # exit status of a child: the changed code takes an import
OUTCOMES = {0: "survived", 1: "killed", UNPATCHED: "not judged", -signal.SIGXCPU: "hangs", -signal.SIGKILL: "timeout"}
SEEN = ("killed", "hangs")


class Plugin:
    """Runs guards instead of tests."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.folder, self.started = order, Path.cwd(), time.monotonic()
        globs, _ = GROUPS[order["group"]]
        found = {str(path.relative_to(self.folder)) for glob in globs for path in self.folder.glob(glob)}
        self.sources = sorted(path for path in found if not path.endswith("__init__.py"))

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return False
        assert Path(bnexport.__file__).is_relative_to(self.folder), "the tests run with another bnexport"
        self.items = session.items
        process._START = NOT_INSTALLED + process._START  # the engine's process hears of no PYTHONPATH
        reached = self.reached()
        os.environ["BNEXPORT_WARM"] = warm.executable()  # one server for all
        self.lines, self.seconds = reached["lines"], reached["seconds"]
        print(f"{len(self.items)} tests, {sum(self.seconds.values()):.0f} s; failed: {reached['failed']}", flush=True)
        gc.unfreeze()  # the functions that the collection of tests froze are to be found
        self.functions = {file: functions_of(str(self.folder / file)) for file in self.sources}
        chosen = sorted((it for file in self.sources for it in guards(self.folder, file)), key=Guard.order)
        log = Path(self.order["log"])
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        done = {row["guard"] for row in rows if row["outcome"] in SEEN or not self.order["again"]}
        for number, guard in enumerate(chosen, 1):
            if guard.name in done:
                continue
            if time.monotonic() - self.started > 60 * self.order["minutes"]:
                break
            start = time.monotonic()
            row = {"guard": guard.name, "line": guard.line, **self.judge(guard)}
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            took = time.monotonic() - start
            print(f"{number:4d} of {len(chosen)}: {row['outcome']:8s} {took:5.1f} s  {guard.name}", flush=True)
        return True

    # Which tests reach a line.

    def reached(self) -> dict[str, Any]:
        """Tests by file and line, their seconds, and those that fail as it is; kept in a file while the sources stay as they are.

        A test that is in the file is not run again, although it may have changed.
        """
        digest = hashlib.sha256()
        for file in self.sources:
            digest.update((self.folder / file).read_bytes())
        kept = Path(self.order["log"]).with_suffix(f".{digest.hexdigest()[:12]}.map")
        known: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
        missing = [item for item in self.items if item.nodeid not in known]
        if missing:
            pid = os.fork()
            if pid == 0:
                self._measure(missing, known, kept)
            os.waitpid(pid, 0)
            known = json.loads(kept.read_text())
        lines: dict[str, dict[int, list[int]]] = {file: defaultdict(list) for file in self.sources}
        for number, item in enumerate(self.items):
            for file, reached in known[item.nodeid]["lines"].items():
                for line in reached:
                    lines[file][line].append(number)
        seconds = {item.nodeid: known[item.nodeid]["seconds"] for item in self.items}
        return {
            "lines": lines,
            "seconds": seconds,
            "failed": [it.nodeid for it in self.items if known[it.nodeid]["failed"]],
        }

    def _measure(self, items: list[pytest.Item], known: dict[str, Any], kept: Path) -> None:
        """Run tests under coverage, here and in the processes that they start."""
        code = 1
        try:
            cover = coverage.Coverage(data_file=str(self.folder / "tmp/reached"), data_suffix=True)
            cover.set_option("run:patch", ["subprocess", "fork", "_exit"])
            cover.start()
            own, cases = cover.get_data(), Counter[str]()
            for item, following in zip(items, [*items[1:], None]):
                cover.switch_context(item.nodeid)
                function = item.nodeid.partition("[")[0]
                cases[function] += 1
                # Its next start takes a second: it ends with the first cases only, and the others' lines are lost.
                if apart := cases[function] <= 5:
                    _end_engine()
                    self._of_programs(Path(own.data_filename()))
                start = time.monotonic()  # the processor time of the programs that it starts is not in this process
                reports = runtestprotocol(item, nextitem=following, log=False)
                seconds = round(time.monotonic() - start, 3)
                failed = any(report.failed for report in reports)
                if apart:
                    _end_engine()
                lines = self._of_programs(Path(own.data_filename()))
                known[item.nodeid] = {"seconds": seconds, "failed": failed, "lines": lines}
            cover.stop()
            for file in self.sources:
                for line, names in cover.get_data().contexts_by_lineno(str(self.folder / file)).items():
                    for name in filter(None, names):
                        known[name]["lines"].setdefault(file, []).append(line)
            kept.write_text(json.dumps(known))
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)

    def _of_programs(self, own: Path) -> dict[str, list[int]]:
        """The lines that ended processes have run, by file."""
        lines: dict[str, list[int]] = defaultdict(list)
        for path in own.parent.glob("reached.*"):
            if path.name.startswith(own.name):
                continue
            with contextlib.suppress(coverage.CoverageException):  # of a process that was killed
                data = coverage.CoverageData(str(path))
                data.read()
                for file in self.sources:
                    lines[file] += data.lines(str(self.folder / file)) or ()
            path.unlink(missing_ok=True)
        return {file: found for file, found in lines.items() if found}

    def tests_of(self, guard: Guard) -> list[pytest.Item]:
        """The quickest tests, and then of each test function its quickest case, its second, ..., up to a limit of time."""
        lines = self.lines[guard.file]
        numbers = {it for line in range(guard.line, guard.last + 1) for it in lines.get(line, ())}
        functions: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in sorted((self.items[number] for number in numbers), key=self.time_of):
            functions[item.nodeid.partition("[")[0]].append(item)
        ranks = [(rank, self.time_of(it), it.nodeid, it) for of in functions.values() for rank, it in enumerate(of)]
        chosen: dict[str, pytest.Item] = {}
        spent, limit = 0.0, self.order["seconds"]
        for share, key in ((0.4, lambda it: it[1:3]), (1.0, lambda it: it[:3])):
            for _, seconds, name, item in sorted(ranks, key=key):
                if name not in chosen and (not chosen or spent + seconds <= share * limit):
                    chosen[name] = item
                    spent += seconds
        return list(chosen.values())

    def time_of(self, item: pytest.Item) -> float:
        return float(self.seconds[item.nodeid])

    # Judging one.

    def judge(self, guard: Guard) -> dict[str, Any]:
        items = self.tests_of(guard)
        if not items:
            return {"outcome": "survived", "by": "", "tests": 0}
        with _written(self.folder / guard.file, guard.text):
            verdict = self.folder / "verdict"
            verdict.write_text("")
            pid = os.fork()
            if pid == 0:
                self._run(guard, items, verdict)
            code = _wait(pid, 10 * sum(map(self.time_of, items)) + 60)
            return {"outcome": OUTCOMES.get(code, "killed"), "by": verdict.read_text(), "tests": len(items)}

    def _run(self, guard: Guard, items: list[pytest.Item], verdict: Path) -> None:
        code = 3
        try:
            os.setsid()  # a group of its own: what it starts ends with it
            silent = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(silent, number)
            functions = self.functions[guard.file]  # none of a module that is only imported from now on
            if functions and not patch(functions, guard.text, str(self.folder / guard.file)):
                os._exit(UNPATCHED)
            code = 0
            for item, following in zip(items, [*items[1:], None]):
                verdict.write_text(item.nodeid)  # also for a test that ends the process
                _limit_processor_time(time.process_time() + 5 * self.time_of(item) + 5)
                if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
                    code = 1
                    break
        finally:
            os._exit(code)


def _end_engine() -> None:
    """End the engine's process as one that is not needed any more: a killed one leaves no data."""
    if process.PROCESS._channel is not None and process.PROCESS._process is not None:
        process.PROCESS._channel.close()
        process.PROCESS._process.wait()
        process.PROCESS.close()


@contextlib.contextmanager
def _written(path: Path, text: str) -> Iterator[None]:
    original = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(original)


def _limit_processor_time(seconds: float) -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), resource.RLIM_INFINITY))


def _wait(pid: int, seconds: float) -> int:
    limit = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            break
        if time.monotonic() > limit:
            os.kill(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            break
        time.sleep(0.01)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what the tests left behind
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    order = json.loads(Path(sys.argv[1]).read_text())
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no"]
    sys.exit(pytest.main([*options, *GROUPS[order["group"]][1]], plugins=[Plugin(order)]))


if __name__ == "__main__":
    main()
