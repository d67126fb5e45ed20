"""The kit for a GPU (benchmarks/gpu_kit.py): what it imports, what survives a kill, and (slow) a rehearsal of it all."""

from __future__ import annotations

import ast
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import gpu_kit
from benchmarks.gpu import report

ROOT = Path(__file__).parents[1]
KIT = ["benchmarks/gpu_kit.py", "benchmarks/__init__.py", "benchmarks/gpu/*.py"]
WITHOUT_TORCH = {"gpu_kit", "report", "section", "bare", "expected", "onnx_bytes", "tools"}


@pytest.mark.parametrize("file", [file for part in KIT for file in sorted(ROOT.glob(part))], ids=lambda file: file.stem)
def test_the_kit_needs_torch_numpy_and_onnxruntime_alone(file: Path) -> None:
    nodes = list(ast.walk(ast.parse(file.read_text())))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)}
    tops = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
    assert tops <= {"torch", "numpy", "onnxruntime", "bnexport", "benchmarks"}
    assert "torch" not in tops or file.stem not in WITHOUT_TORCH


def test_the_packages_that_it_uses_of_bnexport_need_no_other() -> None:
    banned = ["onnx", "onnx_ir", "onnxscript", "ml_dtypes", "typer", "rich", "safetensors"]
    program = (
        f"import sys\nsys.modules.update(dict.fromkeys({banned}))\n"
        "import benchmarks.gpu.torch_checks, benchmarks.gpu.verify, benchmarks.gpu.bench\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--only", "verify"], 4, "gpu_kit: no NVIDIA driver; --rehearse runs"),
        (["--only", "verify,speed"], 2, "got speed, expected some of build,bare,verify"),
    ],
    ids=["driver", "section"],
)
def test_refusals(options: list[str], code: int, message: str, tmp_path: Path) -> None:
    if code == 4 and gpu_kit.cuda.driver_version() is not None:
        pytest.skip("there is a driver")
    command = [sys.executable, str(ROOT / "benchmarks/gpu_kit.py"), "--output", str(tmp_path / "out"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == code and message in done.stderr


def test_rows_survive_what_ends_the_process(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    made = report.Report(file, 100)
    with made.step("first") as row:
        row.value = "1"
    with made.step("second"):
        raise ValueError("no")
    with made.step("third"):
        raise report.NotRun("not here")
    report.append(file, {"name": "fourth", "started": 0.0, "limit": 30})  # of a kit that was killed
    assert (report.running_step(file) or {})["name"] == "fourth"
    with file.open("a") as stream:
        stream.write('{"name": "half a li')
    rows = {row["name"]: row for row in report.read_rows(file)}
    assert {name: row["ok"] for name, row in rows.items()} == {"first": True, "second": False, "third": None}
    assert rows["second"]["value"] == "ValueError: no" and made.failed
    again = report.Report(file, 100)
    assert [again.wanted(name) for name in ("first", "second", "third", "fourth")] == [False, True, True, True]
    assert not report.Report(file, 1).wanted("fourth")


Run = Callable[..., str]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A function that runs the kit's section `build`, which is the source that it is given, in a checkout of its own."""
    package = tmp_path / "benchmarks/gpu"
    package.mkdir(parents=True)
    for name in ("section.py", "report.py", "__init__.py", "../__init__.py"):
        shutil.copyfile(ROOT / "benchmarks/gpu" / name, package / name)
    monkeypatch.setattr(gpu_kit, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_kit, "SHORTEST_SECTION", 0)

    def run(source: str | None = None, seconds: float = 60) -> str:
        if source is not None:
            (package / "libraries.py").write_text(source)
        return gpu_kit.run_section("build", options_in(tmp_path), time.monotonic() + seconds)

    return run


def options_in(folder: Path) -> SimpleNamespace:
    return SimpleNamespace(output=folder, provider="installed", architecture="90", rehearse=True)


def names_in(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "build.jsonl").read_text().splitlines()[1:]]
    return [row["name"] for row in rows if "ok" in row]


STEPS = """
import os, subprocess, sys, time
from benchmarks.gpu.report import NotRun

def run(report, options):
    for index in range({count}):
        if report.wanted(str(index), 0):
            with report.step(str(index), {limit}) as row:
                {body}
"""


def steps(count: int, body: str, limit: float = 30) -> str:
    return STEPS.format(count=count, body=body, limit=limit)


def is_gone(pid: int) -> bool:
    """Whether a process ends within half a minute."""
    state, deadline = Path(f"/proc/{pid}/stat"), time.monotonic() + 30
    while time.monotonic() < deadline:
        try:
            if state.read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.01)
    return False


def test_a_section_that_does_not_end_is_killed_with_its_children_and_goes_on_later(run: Run, tmp_path: Path) -> None:
    sleeper = "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(1000)'])"
    pid_file = tmp_path / "pid"
    body = f"index == 1 and (open({str(pid_file)!r}, 'w').write(str({sleeper}.pid)), time.sleep(1000))"
    assert run(steps(2, body), 15).startswith("killed after")
    assert is_gone(int(pid_file.read_text()))
    collected = gpu_kit.collect(tmp_path)["sections"]["build"]
    assert collected["status"].startswith("killed") and [row["name"] for row in collected["rows"]] == ["0"]
    assert run(steps(2, "pass")) == "passed" and names_in(tmp_path) == ["0", "1"]
    assert run("a section that has passed is not started again") == "passed"


def test_a_step_that_hangs_or_ends_its_process_is_named_and_skipped(run: Run, tmp_path: Path) -> None:
    source = steps(4, "index == 1 and time.sleep(1000) or index == 2 and os._exit(9)", 3.0)
    for _ in range(2):  # no later call tries it again
        assert run(source) == "2 wrong"
        assert names_in(tmp_path) == ["0", "1", "2", "3"]
    rows = report.read_rows(tmp_path / "build.jsonl")
    assert [row["ok"] for row in rows] == [True, False, False, True]
    assert rows[1]["value"] == "hung: no end within 3 s" and rows[2]["value"] == "ended its process with code 9"
    assert "WRONG 1 hung" in " ".join(report.table(rows).split())


def test_a_section_without_time_for_all_steps_is_incomplete_and_goes_on(run: Run, tmp_path: Path) -> None:
    ends = "if index == 5: report.end = 0"
    assert run(steps(30, ends)) == "incomplete, 0 wrong: no time was left for 24 steps, from '6' on"
    assert names_in(tmp_path) == [str(index) for index in range(6)]
    assert run(steps(30, "pass")) == "passed" and names_in(tmp_path) == [str(index) for index in range(30)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_a_killed_kit_takes_its_section_along_and_no_row_is_lost_or_made_twice(
    run: Run, tmp_path: Path, number: int
) -> None:
    pid_file, go = tmp_path / "pid", tmp_path / "go"
    waits = f"[time.sleep(0.01) for _ in iter(lambda: os.path.exists({str(go)!r}), True)]"
    body = f"index == 3 and (open({str(pid_file)!r}, 'w').write(f'{{os.getpid()}} '), {waits})"
    (tmp_path / "benchmarks/gpu/libraries.py").write_text(steps(5, body, 1000))
    program = (
        "import signal, sys, time\nfrom pathlib import Path\nfrom tests.test_gpu_kit import gpu_kit, options_in\n"
        "signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))\n"
        "gpu_kit.ROOT = folder = Path(sys.argv[1])\n"
        "gpu_kit.run_section('build', options_in(folder), time.monotonic() + 400)\n"
    )
    kit = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    while not (pid_file.exists() and pid_file.read_text().endswith(" ")):
        assert kit.poll() is None
        time.sleep(0.02)
    kit.send_signal(number)
    kit.wait(60)
    assert is_gone(int(pid_file.read_text())) and names_in(tmp_path) == ["0", "1", "2"]
    go.touch()
    assert run() == "passed" and names_in(tmp_path) == ["0", "1", "2", "3", "4"]


TOOLS = {
    "compute-sanitizer": 'while [ "$1" != "--error-exitcode" ]; do shift; done; shift 2; '
    '"$@" && echo "========= ERROR SUMMARY: 0 errors"',
    "ncu": 'while [ "$1" != "--metrics" ]; do shift; done; shift 2; "$@" >/dev/null || exit 1\n'
    'echo \'"ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"\'\n'
    'echo \'"0","moments","(1, 1, 1)","gpu__time_duration.sum","nsecond","1,000"\'',
}
PACKAGES = ("torch==2.13.0", "onnxruntime==1.30.0", "numpy==2.4.*")


@pytest.mark.slow
def test_rehearsal_of_every_section_in_a_bare_environment(tmp_path: Path) -> None:
    python, output = tmp_path / "environment/bin/python", tmp_path / "output"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "environment")], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "-q", *PACKAGES], check=True)
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("BNEXPORT", "PYTHON"))}
    kit = ["benchmarks/gpu_kit.py", "--rehearse", "--output", str(output)]
    # Here the library is installed; the environment without it takes what is built.
    subprocess.run([sys.executable, *kit, "--only", "build"], cwd=ROOT, env=variables, check=True)
    for name, text in TOOLS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    variables["PATH"] = f"{tmp_path}:/usr/bin:/bin"
    first = subprocess.Popen([str(python), *kit], cwd=ROOT, env=variables, stdout=subprocess.DEVNULL)
    rows = output / "verify.jsonl"
    while not (rows.exists() and len(report.read_rows(rows)) > 20):
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.wait()
    time.sleep(1)
    before = rows.read_text()
    done = subprocess.run([str(python), *kit], cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert rows.read_text().startswith(before)  # no row is lost
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    sections = json.loads((output / "gpu_kit.json").read_text())["sections"]
    assert {name: section["status"] for name, section in sections.items()} == dict.fromkeys(gpu_kit.SECTIONS, "passed")
    assert sum(len(section["rows"]) for section in sections.values()) > 100
