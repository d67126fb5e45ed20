"""Judge mutants in one pytest session that has imported and collected everything.

    python -m tests.mutation.session ORDER.json

In the folder of a copy of the repository (`tests.mutation` makes it). For each mutant the file is written, this
process forks, the child puts the changed code into the functions in its memory and runs the tests that reach the
changed line until the first one fails. What runs when a module is imported is judged by a pytest in a process of its
own, which imports the changed file, as are changes that only tests in other processes can notice.

A change that makes a test run on and on uses up its processor time, whatever else the machine does: it "hangs", and
counts as killed. Where only the clock ran out the outcome is "timeout", which says nothing; `--again` repeats it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest
from _pytest.runner import runtestprotocol

from tests.mutation.groups import GROUPS
from tests.mutation.live import functions_of, patch
from tests.mutation.mutants import Mutant, mutants
from tests.support import warm

COLD = 77  # exit status of a child: the change takes an import
OUTCOMES = {0: "survived", 1: "killed", COLD: "cold", -signal.SIGXCPU: "hangs", -signal.SIGKILL: "timeout"}
# Not frozen, as the server's objects are: asking how many those are, which a load does, takes 0.1 seconds.
COLD_START = "import gc, sys; gc.unfreeze(); import pytest; sys.exit(pytest.main(sys.argv[1:]))"
AGAIN = ("survived", "timeout")
PLANTED = "raise ImportError('a planted mutant')\n"


class Plugin:
    """Runs mutants instead of tests."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.order, self.group, self.folder = order, GROUPS[order["group"]], Path.cwd()
        self.started = time.monotonic()
        self.cover = self._coverage()
        self.cover.start()

    def _coverage(self) -> coverage.Coverage:
        files = [str(self.folder / file) for file in self.group.sources()]
        return coverage.Coverage(data_file=None, config_file=False, include=files)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            return False
        self.items = session.items
        self.cover.stop()
        data = self.cover.get_data()
        self.imported = {file: set(data.lines(str(self.folder / file)) or ()) for file in self.group.sources()}
        warm.address()  # one server for all
        os.environ["BNEXPORT_WARM"] = warm.address()
        reached = self.reached()
        self.lines, self.seconds = reached["lines"], reached["seconds"]
        print(f"{len(self.items)} tests, {sum(self.seconds.values()):.0f} s; left out: {reached['failed']}", flush=True)
        sources = self.group.sources()
        self.functions = {file: functions_of(str(self.folder / file)) for file in sources}
        planted = self.cold(Mutant(sources[0], 1, 1, "planted", PLANTED, False), self.whole_file(sources[0]))
        print(f"a planted mutant: {planted['outcome']}", flush=True)
        assert planted["outcome"] == "killed", "the tests run with another bnexport"
        everything = [mutant for file in sources for mutant in mutants(self.folder, file)]
        everything.sort(key=lambda it: it.order(self.order["seed"]))
        log = Path(self.order["log"])
        rows = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        done = {row["mutant"] for row in rows if row["outcome"] not in AGAIN or not self.order["again"]}
        chosen = everything[: self.order["count"]]
        for number, mutant in enumerate(chosen, 1):
            if mutant.name in done:
                continue
            if time.monotonic() - self.started > 60 * self.order["minutes"]:
                break
            start = time.monotonic()
            row = {"mutant": mutant.name, "line": mutant.line, **self.judge(mutant)}
            row["seconds"] = round(time.monotonic() - start, 1)
            with log.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                f"{number:4d} of {len(chosen)}: {row['outcome']:8s} {row['seconds']:5.1f} s  {mutant.name}", flush=True
            )
        return True

    # Which tests reach a line.

    def reached(self) -> dict[str, Any]:
        """Tests by file and line, their seconds, and those that fail as it is; kept in a file."""
        digest = hashlib.sha256(repr([item.nodeid for item in self.items]).encode())
        for path in sorted(self.folder.glob("bnexport/**/*.py")) + sorted(self.folder.glob("tests/**/*.py")):
            if "mutation" not in path.parts:
                digest.update(path.read_bytes())
        kept = Path(self.order["log"]).with_suffix(f".{digest.hexdigest()[:12]}.map")
        if not kept.exists():
            pid = os.fork()
            if pid == 0:
                self._measure(kept)
            os.waitpid(pid, 0)
        return json.loads(kept.read_text())

    def _measure(self, kept: Path) -> None:
        code = 1
        try:
            cover = self._coverage()
            cover.start()
            seconds, failed = {}, []
            for number, (item, following) in enumerate(zip(self.items, [*self.items[1:], None])):
                cover.switch_context(str(number))
                start = time.monotonic()  # the processor time of the programs that it starts is not in this process
                reports = runtestprotocol(item, nextitem=following, log=False)
                seconds[item.nodeid] = round(time.monotonic() - start, 3)
                if any(report.failed for report in reports):
                    failed.append(item.nodeid)
            cover.stop()
            data = cover.get_data()
            lines = {
                file: {
                    line: sorted({int(it) for it in contexts if it})
                    for line, contexts in data.contexts_by_lineno(str(self.folder / file)).items()
                }
                for file in self.group.sources()
            }
            kept.write_text(json.dumps({"lines": lines, "seconds": seconds, "failed": failed}))
            code = 0
        finally:
            os._exit(code)

    def tests_of(self, mutant: Mutant) -> list[pytest.Item]:
        lines = self.lines[mutant.file]
        numbers = {it for line in range(mutant.line, mutant.last + 1) for it in lines.get(str(line), [])}
        return self.spread(numbers)

    def whole_file(self, file: str) -> list[pytest.Item]:
        return self.spread({number for numbers in self.lines[file].values() for number in numbers})

    def spread(self, numbers: set[int]) -> list[pytest.Item]:
        """The quickest tests, and then of each test function its quickest case, its second, ..., up to a limit of time."""
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

    def judge(self, mutant: Mutant) -> dict[str, Any]:
        if not mutant.in_function:
            return self.cold(mutant, self.whole_file(mutant.file))
        items = self.tests_of(mutant)
        verdict: dict[str, Any] = {"outcome": "survived", "by": "", "tests": 0}
        if items:
            verdict = self.hot(mutant, items)
            if verdict["outcome"] not in ("survived", "cold"):
                return verdict
        if verdict["outcome"] == "cold" or self.imported[mutant.file] & set(range(mutant.line, mutant.last + 1)):
            return self.cold(mutant, items or self.whole_file(mutant.file))
        return verdict if items else self.cold(mutant, [])

    def hot(self, mutant: Mutant, items: list[pytest.Item]) -> dict[str, Any]:
        with _written(self.folder / mutant.file, mutant.text):
            verdict = self.folder / "verdict"
            verdict.write_text("")
            pid = os.fork()
            if pid == 0:
                self._run(mutant, items, verdict)
            code = _wait(pid, 10 * sum(map(self.time_of, items)) + 60)
            return {"outcome": OUTCOMES.get(code, "killed"), "by": verdict.read_text(), "tests": len(items)}

    def _run(self, mutant: Mutant, items: list[pytest.Item], verdict: Path) -> None:
        code = 3
        try:
            os.setsid()  # a group of its own: what it starts ends with it
            silent = os.open(os.devnull, os.O_RDWR)
            for number in range(3):
                os.dup2(silent, number)
            if not patch(self.functions[mutant.file], mutant.text, str(self.folder / mutant.file)):
                os._exit(COLD)
            code = 0
            for item, following in zip(items, [*items[1:], None]):
                verdict.write_text(item.nodeid)  # also for a test that ends the process
                _limit(os.getpid(), time.process_time() + 5 * self.time_of(item) + 5)
                if any(report.failed for report in runtestprotocol(item, nextitem=following, log=False)):
                    code = 1
                    break
        finally:
            os._exit(code)

    def cold(self, mutant: Mutant, items: list[pytest.Item]) -> dict[str, Any]:
        names = [item.nodeid for item in items] or list(self.group.far)
        if not names:
            return {"outcome": "survived", "by": "", "tests": 0}
        assert not any("\n" in name for name in names)
        (self.folder / "names").write_text("\n".join(names))
        with _written(self.folder / mutant.file, mutant.text):
            process = warm.start(
                *("-c", COLD_START, "-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "@names"),
                cwd=self.folder,
                stdout=os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC),
                stderr=subprocess.STDOUT,
            )
            _limit(process.pid, 5 * self.order["seconds"] + 30)
            try:
                code = process.wait(10 * self.order["seconds"] + 60)
            except subprocess.TimeoutExpired:
                process.kill()
                return {"outcome": "timeout", "by": "", "tests": len(names)}
        lines = (self.folder / "output").read_text().splitlines()
        assert not any("not found:" in line for line in lines), lines[-20:]
        by = next((line for line in lines if line.startswith(("FAILED", "ERROR", "ImportError"))), "")
        outcome = "hangs" if code == -signal.SIGXCPU else "killed" if code else "survived"
        return {"outcome": outcome, "by": by[:200], "tests": len(names), "cold": True}


@contextlib.contextmanager
def _written(path: Path, text: str) -> Iterator[None]:
    original = path.read_text()
    path.write_text(text)
    try:
        yield
    finally:
        path.write_text(original)


def _limit(pid: int, seconds: float) -> None:
    """Let the process end after so many seconds of processor time."""
    resource.prlimit(pid, resource.RLIMIT_CPU, (int(seconds), resource.RLIM_INFINITY))


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
    tests = [test for test in GROUPS[order["group"]].tests if Path(test).exists()]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no"]
    sys.exit(pytest.main([*options, *tests], plugins=[Plugin(order)]))


if __name__ == "__main__":
    main()
