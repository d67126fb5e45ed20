"""The kit for a GPU (benchmarks/gpu_kit.py): what it imports, what survives a kill, and (slow) a rehearsal of it all."""

from __future__ import annotations

import ast
import json
import lzma
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import gpu_kit
from benchmarks.gpu import libraries, onnx_bytes, profile, report

ROOT = Path(__file__).parents[1]
FILES = [ROOT / "benchmarks/gpu_kit.py", *sorted((ROOT / "benchmarks/gpu").glob("*.py"))]
WITHOUT_TORCH = {
    "gpu_kit",
    "report",
    "libraries",
    "section",
    "bare",
    "bare_cases",
    "closed_forms",
    "onnx_bytes",
    "profile",
    "sanitize",
}
# All names of torch that the kit uses; each is in torch 2.11. Look there before you add one.
TORCH_NAMES = {
    "Tensor", "allclose", "autocast", "autograd", "backends", "batch_norm_backward_elemt", "batch_norm_backward_reduce", "batch_norm_elemt",
    "batch_norm_gather_stats_with_counts", "batch_norm_stats", "bfloat16", "cat", "channels_last", "compile", "contiguous_format",
    "cuda", "distributed", "dtype", "empty", "empty_like", "equal", "float16", "float32", "float64", "from_numpy", "full",
    "full_like", "int32", "manual_seed", "memory_format", "nan", "neg", "nn", "no_grad", "ones_like", "ops",
    "rand", "randn", "stack", "uint8", "version", "where", "zeros",
    "zeros_like", "__version__",
}  # fmt: skip


def imports(tree: ast.AST) -> set[str]:
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return names | {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_the_kit_needs_torch_numpy_and_onnxruntime_alone(file: Path) -> None:
    tree = ast.parse(file.read_text())
    tops = {name.split(".")[0] for name in imports(tree)}
    assert tops - set(sys.stdlib_module_names) <= {"torch", "numpy", "onnxruntime", "bnexport", "benchmarks"}
    if file.stem in WITHOUT_TORCH:
        assert "torch" not in tops
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch"
    }
    assert used <= TORCH_NAMES


def test_the_packages_that_it_uses_of_bnexport_need_no_other() -> None:
    program = (
        "import sys\n"
        "class Ban:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'onnx', 'onnx_ir', 'onnxscript', 'ml_dtypes', 'typer', 'rich', 'safetensors'}:\n"
        "            raise ImportError(f'{name} is not on the device machine')\n"
        "sys.meta_path.insert(0, Ban())\n"
        "import benchmarks.gpu.torch_checks, benchmarks.gpu.verify, benchmarks.gpu.onnx_runtime\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=120)


def test_without_a_driver_there_is_one_line(tmp_path: Path) -> None:
    if libraries.driver_problem() is None:
        pytest.skip("there is a GPU")
    command = [sys.executable, str(ROOT / "benchmarks/gpu_kit.py"), "--output", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 4
    assert done.stderr.startswith("gpu_kit: ") and done.stderr.count("\n") == 1 and "NVIDIA driver" in done.stderr


def test_an_unknown_section_is_a_usage_error() -> None:
    command = [sys.executable, str(ROOT / "benchmarks/gpu_kit.py"), "--only", "verify,speed"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "got speed, expected some of build,bare,verify" in done.stderr


def test_rows_survive_what_ends_the_process(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    made = report.Report(file, 100)
    with made.step("first") as row:
        row.value = "1"
    with made.step("second"):
        raise ValueError("no")
    with made.step("third"):
        raise report.NotRun("not here")
    with file.open("a") as stream:
        stream.write('{"name": "half a li')
    rows = {row["name"]: row for row in report.read_rows(file)}
    assert [rows[name]["ok"] for name in ("first", "second", "third")] == [True, False, None]
    assert rows["second"]["value"] == "ValueError: no"
    assert made.failed
    again = report.Report(file, 100)
    assert [again.wanted(name) for name in ("first", "second", "third", "fourth")] == [False, True, True, True]
    assert not report.Report(file, 1).wanted("fourth")


STUB = """
import subprocess, sys, time
from benchmarks.gpu.report import Report
from pathlib import Path

arguments = dict(zip(sys.argv[2::2], sys.argv[3::2]))
report = Report(Path(arguments["--rows"]), float(arguments["--seconds"]))
for name in ("one", "two"):
    if report.wanted(name, 0):
        with report.step(name) as row:
            row.value = "measured"
        if name == "one":
            grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
            Path(__file__).with_name("pid").write_text(str(grandchild.pid))
            time.sleep(100)
"""


def is_running(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_section_that_does_not_end_is_killed_with_its_children_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "benchmarks/gpu"
    package.mkdir(parents=True)
    for file in (package / "__init__.py", package.parent / "__init__.py"):
        file.touch()
    (package / "section.py").write_text(STUB)
    (package / "report.py").write_text(Path(report.__file__).read_text())
    monkeypatch.setattr(gpu_kit, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_kit, "SHORTEST_SECTION", 0)
    options = SimpleNamespace(output=tmp_path, provider="installed", architecture="90", rehearse=True)

    def run(seconds: float) -> str:
        return gpu_kit.run_section("build", options, time.monotonic() + seconds)

    assert run(4).startswith("killed after")
    pid = int((package / "pid").read_text())
    deadline = time.monotonic() + 5
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not is_running(pid)
    assert [row["name"] for row in report.read_rows(tmp_path / "build.jsonl")] == ["one"]
    collected = gpu_kit.collect(tmp_path)["sections"]["build"]
    assert collected["status"].startswith("killed") and collected["rows"][0]["value"] == "measured"
    assert run(20) == "passed"
    assert [row["name"] for row in report.read_rows(tmp_path / "build.jsonl")] == ["one", "two"]
    (package / "section.py").unlink()
    assert run(20) == "passed"  # and is not started again
    monkeypatch.setattr(gpu_kit, "SHORTEST_SECTION", 15)
    (tmp_path / "build.status").unlink()
    assert run(5) == "not run, 5 s of --deadline are left"


LONG = """
import time

def run(report, options):
    for index in range(30):
        if report.wanted(str(index), 1):
            with report.step(str(index)) as row:
                row.value = "measured"
                time.sleep(0.05)
            late = report.path.with_name("late")
            if index == 5 and late.exists():
                late.unlink()
                report.end = time.monotonic()
"""


def section_of(folder: Path, source: str) -> SimpleNamespace:
    """A checkout whose section `build` is `source`, and the options of the kit there."""
    package = folder / "benchmarks/gpu"
    package.mkdir(parents=True, exist_ok=True)
    for file in (package / "__init__.py", package.parent / "__init__.py"):
        file.touch()
    for name in ("section.py", "report.py"):
        (package / name).write_text((ROOT / "benchmarks/gpu" / name).read_text())
    (package / "build.py").write_text(source)
    return SimpleNamespace(output=folder, provider="installed", architecture="90", rehearse=True)


def names_in(folder: Path) -> list[str]:
    rows = [json.loads(line) for line in (folder / "build.jsonl").read_text().splitlines()[1:]]
    return [row["name"] for row in rows if "ok" in row]


HANGS = """
import os
import time

def run(report, options):
    for name in "abcd":
        if report.wanted(name, 1):
            with report.step(name, 1.0):
                if name == "b":
                    time.sleep(100)
                if name == "c":
                    os._exit(9)
"""


def test_a_step_that_hangs_or_ends_its_process_is_named_and_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = section_of(tmp_path, HANGS)
    monkeypatch.setattr(gpu_kit, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_kit, "SHORTEST_SECTION", 0)
    for _ in range(2):  # no later call tries it again
        assert gpu_kit.run_section("build", options, time.monotonic() + 60) == "2 wrong"
        assert names_in(tmp_path) == ["a", "b", "c", "d"]
    rows = {row["name"]: row for row in report.read_rows(tmp_path / "build.jsonl")}
    assert rows["b"]["value"] == "hung: no end within 1 s" and [rows[name]["ok"] for name in "ad"] == [True] * 2
    assert rows["c"]["value"] == "ended its process with code 9"
    assert "WRONG b hung" in " ".join(report.table(list(rows.values())).split())
    assert report.running_step(tmp_path / "build.jsonl") is None


def test_a_step_that_a_killed_kit_left_is_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    report.append(path, {"name": "first", "started": 0.0, "limit": 30})
    assert report.running_step(path)["name"] == "first"
    assert report.Report(path, 100).wanted("first") and report.read_rows(path) == []


def test_a_section_without_time_for_all_steps_is_incomplete_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = section_of(tmp_path, LONG)
    monkeypatch.setattr(gpu_kit, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_kit, "SHORTEST_SECTION", 0)
    (tmp_path / "late").touch()
    status = gpu_kit.run_section("build", options, time.monotonic() + 30)
    assert status == "incomplete, 0 wrong: no time was left for 24 steps, from '6' on"
    assert names_in(tmp_path) == [str(index) for index in range(6)]
    assert gpu_kit.run_section("build", options, time.monotonic() + 30) == "passed"
    assert names_in(tmp_path) == [str(index) for index in range(30)]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["KILL", "TERM"])
def test_a_killed_kit_takes_its_section_along_and_no_row_is_lost_or_made_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    options = section_of(tmp_path, LONG)
    program = (
        "import signal, sys, time\nfrom pathlib import Path\nfrom types import SimpleNamespace\n"
        "from benchmarks import gpu_kit\n"
        "signal.signal(signal.SIGTERM, lambda number, _: sys.exit(number))\n"
        "gpu_kit.ROOT = folder = Path(sys.argv[1])\n"
        "options = SimpleNamespace(output=folder, provider='installed', architecture='90', rehearse=True)\n"
        "gpu_kit.run_section('build', options, time.monotonic() + 60)\n"
    )
    kit = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], cwd=ROOT)
    deadline = time.monotonic() + 20
    while not ((tmp_path / "build.jsonl").exists() and len(names_in(tmp_path)) > 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    kit.send_signal(number)
    kit.wait(10)
    time.sleep(0.4)
    reached = names_in(tmp_path)
    time.sleep(0.4)
    assert names_in(tmp_path) == reached and 2 < len(reached) < 30
    monkeypatch.setattr(gpu_kit, "ROOT", tmp_path)
    assert gpu_kit.run_section("build", options, time.monotonic() + 30) == "passed"
    assert names_in(tmp_path) == [str(index) for index in range(30)]


def test_a_section_waits_for_one_that_is_still_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = section_of(tmp_path, LONG)
    monkeypatch.setattr(gpu_kit, "ROOT", tmp_path)
    report.write_json(tmp_path / "build.jsonl", {"fingerprint": gpu_kit.fingerprint(options)}, indent=None)
    with ThreadPoolExecutor(2) as pool:
        runs = [pool.submit(gpu_kit.run_section, "build", options, time.monotonic() + 60) for _ in range(2)]
        assert [run.result() for run in runs] == ["passed", "passed"]
    assert names_in(tmp_path) == [str(index) for index in range(30)]


def test_a_section_of_nothing_but_not_run_is_not_run_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = (
        "from benchmarks.gpu.report import NotRun\ndef run(report, options):\n"
        "    if report.wanted('ncu', 0):\n        with report.step('ncu'):\n            raise NotRun('no tool')\n"
    )
    options = section_of(tmp_path, stub)
    monkeypatch.setattr(gpu_kit, "ROOT", tmp_path)
    for _ in range(2):
        assert gpu_kit.run_section("build", options, time.monotonic() + 30) == "not run: no tool"
    assert names_in(tmp_path) == ["ncu", "ncu"]


def test_without_a_provider_ort_is_not_run() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    from benchmarks.gpu import onnx_runtime
    from benchmarks.gpu.section import Options

    if onnx_runtime.PROVIDER in onnxruntime.get_available_providers():
        pytest.skip("it has the provider")
    with pytest.raises(report.NotRun, match="has no CUDAExecutionProvider; give one with --provider"):
        onnx_runtime.Sessions(Options(rehearse=False, provider="installed", architecture="90"))


def test_a_packed_provider_is_unpacked_and_one_that_is_missing_ends_no_other_section(tmp_path: Path) -> None:
    (tmp_path / "a.so.xz").write_bytes(lzma.compress(b"library"))
    output = tmp_path / "output"
    output.mkdir()
    options = SimpleNamespace(provider=str(tmp_path / "a.so.xz"), output=output)
    assert Path(gpu_kit.provider(options)).read_bytes() == b"library"
    missing = SimpleNamespace(provider="none.so.xz", output=output, architecture="90", rehearse=True)
    assert gpu_kit.run_section("ort", missing, time.monotonic() + 60).startswith("not run, --provider none.so.xz")


def test_tools_are_found_where_cmake_finds_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/a-tool").touch(0o755)
    assert libraries.tool("a-tool") is None
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert libraries.tool("a-tool") == str(tmp_path / "bin/a-tool")
    assert libraries.tool("sh") == shutil.which("sh")


def test_a_carried_build_folder_is_configured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("cmake", "nvcc"):
        (tools / name).write_text("#!/bin/sh\nexit 0\n")
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tools), prepend=os.pathsep)
    monkeypatch.setattr(libraries, "BUILD", tmp_path / "kit")
    cache = tmp_path / "kit/CMakeCache.txt"
    cache.parent.mkdir()
    for root, kept in ((ROOT, True), (Path("/elsewhere"), False)):
        cache.write_text(f"// a cache\nCMAKE_HOME_DIRECTORY:INTERNAL={root}\n")
        assert libraries.build("90") == ""
        assert cache.exists() is kept


def test_bandwidth_is_judged() -> None:
    pytest.importorskip("torch")
    from benchmarks.gpu import bench

    def row(forward: float, backward: float, size: int = 1 << 25) -> dict[str, Any]:
        times = {"forward": {"ours": 1 / forward}, "backward": {"ours": 1 / backward}}
        return {"bytes": size, "floor_us": {"forward": 1.0, "backward": 1.0}, "us": times}

    assert bench.judge(row(0.86, 0.86))
    assert not bench.judge(row(0.84, 0.9)) and not bench.judge(row(0.9, 0.84))
    assert bench.judge(row(0.1, 0.1, 1 << 20)) is None
    slower = row(0.9, 0.9)
    slower["us"]["forward"]["sync"] = 1.0
    assert not bench.judge(slower)  # faster than the floor's share, slower than torch


def test_results_are_one_archive_under_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, out = tmp_path / "results", tmp_path / "out"
    for folder in (results, out):
        folder.mkdir()
    (results / "bench.jsonl").write_text("{}")
    (results / "provider.so").write_text("large")
    gpu_kit.archive(results)  # nothing without OUT
    monkeypatch.setenv("OUT", str(out))
    gpu_kit.archive(results)
    with tarfile.open(out / "gpu_kit.tar.gz") as packed:
        assert packed.getnames() == ["gpu_kit/bench.jsonl"]


def test_models_without_the_onnx_package_are_onnx_models() -> None:
    onnx = pytest.importorskip("onnx")
    from benchmarks.gpu import onnx_runtime

    for made in (onnx_runtime.forward_model("float16", (2, 3, 4)), onnx_runtime.chain(2, (2, 3, 4), ours=False)):
        model = onnx.load_model_from_string(made)
        onnx.checker.check_model(model)
    node = onnx.load_model_from_string(onnx_runtime.backward_model("float64", (2, 3, 4))).graph.node[0]
    assert (node.op_type, node.domain, list(node.output)[:3]) == (
        "MMCVSyncBatchNormGrad",
        "mmcv",
        ["grad_input", "", ""],
    )
    assert {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}["group_size"] == 1
    assert onnx_bytes.TYPES == {"float32": 1, "float16": 10, "float64": 11}


def test_counters_of_ncu_are_read() -> None:
    text = (
        "==PROF== Connected\n"
        '"ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"\n'
        '"0","void bnexport::cuda::moments<RowPlace<Vector<Float16, 8>>>(bnexport::cuda::ForwardArguments)","(256, 1, 1)",'
        '"dram__bytes_read.sum","byte","51,380,224"\n'
        '"0","void bnexport::cuda::moments<RowPlace<Vector<Float16, 8>>>(bnexport::cuda::ForwardArguments)","(256, 1, 1)",'
        '"launch__registers_per_thread","","72"\n'
    )
    (launch,) = profile.launches_of(text)
    assert launch["kernel"] == "moments<RowPlace<Vector<Float16, 8>>>"
    assert launch["dram__bytes_read.sum"] == 51380224.0
    assert launch["launch__registers_per_thread"] == 72.0


TOOLS = {
    "compute-sanitizer": """#!/bin/sh
while [ "$1" != "--error-exitcode" ]; do shift; done
shift 2
"$@" && echo "========= ERROR SUMMARY: 0 errors"
""",
    "ncu": """#!/bin/sh
while [ "$1" != "--metrics" ]; do shift; done
shift 2
"$@" >/dev/null || exit 1
echo '"ID","Kernel Name","Grid Size","Metric Name","Metric Unit","Metric Value"'
echo '"0","moments","(1, 1, 1)","gpu__time_duration.sum","nsecond","1,000"'
""",
}
PACKAGES = ("torch==2.13.0", "onnxruntime==1.30.0", "numpy==2.4.*")


@pytest.mark.slow
def test_rehearsal_of_every_section_from_a_bare_folder(tmp_path: Path) -> None:
    python = tmp_path / "environment/bin/python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "environment")], check=True)
    for package in PACKAGES:
        subprocess.run([str(python), "-m", "pip", "install", "-q", package], check=True)
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("BNEXPORT", "PYTHON"))}
    kit = ["benchmarks/gpu_kit.py", "--rehearse"]
    built = tmp_path / "built"
    subprocess.run(
        [sys.executable, *kit, "--only", "build", "--output", str(built)], cwd=ROOT, env=variables, check=True
    )
    bare = tmp_path / "bare"
    subprocess.run([sys.executable, *kit, "--pack", str(bare)], cwd=ROOT, env=variables, check=True)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name, text in TOOLS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    variables["PATH"] = f"{tools}:/usr/bin:/bin"
    first = subprocess.Popen([str(python), *kit], cwd=bare, env=variables, stdout=subprocess.DEVNULL)
    rows = bare / "build/gpu_kit/verify.jsonl"
    while not (rows.exists() and len(report.read_rows(rows)) > 20):
        assert first.poll() is None
        time.sleep(0.05)
    first.kill()
    first.wait()
    time.sleep(1)
    before = rows.read_text()
    done = subprocess.run([str(python), *kit], cwd=bare, env=variables, capture_output=True, text=True, check=False)
    assert rows.read_text().startswith(before)  # no row is lost
    made = [json.loads(line) for line in rows.read_text().splitlines()[1:]]
    names = [row["name"] for row in made if row.get("ok") is not None]
    assert len(names) == len(set(names))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    result = json.loads((bare / "build/gpu_kit/gpu_kit.json").read_text())
    assert {name: section["status"] for name, section in result["sections"].items()} == dict.fromkeys(
        gpu_kit.SECTIONS, "passed"
    )
    assert sum(len(section["rows"]) for section in result["sections"].values()) > 100
