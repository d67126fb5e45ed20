"""Install a wheel into empty environments without torch; inspect, fold and verify a file there.

    python tools/check_install.py dist/bnexport-*.whl --python python3.12 --python python3.13

Prints the megabytes that pip downloads and the exit code of each command; fails on a code other than 0, above
MOST_MEGABYTES, or where torch or onnxruntime came along. Without a wheel it tries the installation of the running Python.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

MOST_MEGABYTES = 120
NEWEST_LIBC = 28

# Conv, MMCVSyncBatchNorm, Relu: written with what the base installation has.
MODEL = """
import numpy as np, onnx
from onnx import helper, numpy_helper

random = np.random.default_rng(0)
weights = {
    "kernel": random.standard_normal((4, 3, 3, 3)), "mean": random.standard_normal(4), "var": random.uniform(0.5, 2, 4),
    "weight": random.uniform(0.5, 2, 4), "bias": random.standard_normal(4),
}
graph = helper.make_graph(
    [
        helper.make_node("Conv", ["x", "kernel"], ["a"]),
        helper.make_node(
            "MMCVSyncBatchNorm", ["a", "mean", "var", "weight", "bias"], ["b"], domain="mmcv", training_mode=0
        ),
        helper.make_node("Relu", ["b"], ["y"]),
    ],
    "small",
    [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["N", 3, "H", "W"])],
    [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["N", 4, "H - 2", "W - 2"])],
    [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
)
opsets = [helper.make_opsetid("", 18), helper.make_opsetid("mmcv", 1)]
onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=8), "kept.onnx")
"""
COMMANDS = (
    ("inspect", "kept.onnx"),
    ("fold", "kept.onnx", "folded.onnx", "--json", "report.json"),
    ("verify", "kept.onnx", "folded.onnx", "--method", "local"),
    ("verify", "kept.onnx", "folded.onnx"),
    ("doctor",),
)


def run(*command: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, check=False)


def succeed(*command: str | Path, cwd: Path) -> str:
    done = run(*command, cwd=cwd)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def check(wheel: Path, python: str, folder: Path, constraints: Path | None) -> None:
    succeed(python, "-m", "venv", folder / "environment", cwd=folder)
    inside = folder / "environment/bin/python"
    pins = ["-c", constraints] if constraints else []
    succeed(inside, "-m", "pip", "download", "-q", "-d", folder / "downloads", *pins, wheel, cwd=folder)
    files = [path for path in (folder / "downloads").iterdir() if path.name != wheel.name]
    megabytes = sum(path.stat().st_size for path in [*files, wheel]) / 1e6
    offline = ["--no-index", "--find-links", folder / "downloads"]
    succeed(inside, "-m", "pip", "install", "-q", *offline, wheel, cwd=folder)
    version = succeed(inside, "--version", cwd=folder).strip()
    print(f"{version}: {len(files)} packages and the wheel, {megabytes:.1f} MB")
    if megabytes > MOST_MEGABYTES:
        raise SystemExit(f"downloads: got {megabytes:.1f} MB, expected at most {MOST_MEGABYTES}")
    libc = [int(minor) for minor in re.findall(r"manylinux_2_(\d+)_", wheel.name)]
    if libc and min(libc) > NEWEST_LIBC:
        raise SystemExit(f"{wheel.name}: needs the C library 2.{min(libc)}, expected 2.{NEWEST_LIBC} or an older one")
    for module in ("torch", "onnxruntime"):
        if run(inside, "-c", f"import {module}", cwd=folder).returncode == 0:
            raise SystemExit(f"{module} was installed, expected the base installation to leave it out")
    use(inside, folder)


def check_oldest(wheel: Path, python: str, folder: Path) -> None:
    """Try the lower bounds: the oldest packages that the wheel's metadata allows, and ONNX Runtime's."""
    with zipfile.ZipFile(wheel) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        lines = archive.read(name).decode().splitlines()
    needed = [line.partition(": ")[2] for line in lines if line.startswith("Requires-Dist: ") and "extra" not in line]
    oldest = next(line for line in lines if line.startswith("Requires-Dist: onnxruntime>"))
    needed.append(oldest.partition(": ")[2].partition(";")[0])
    uv, inside = [sys.executable, "-m", "uv"], folder / "oldest/bin/python"
    succeed(*uv, "venv", "-q", "--python", python, folder / "oldest", cwd=folder)
    succeed(*uv, "pip", "install", "-q", "--python", inside, "--resolution", "lowest-direct", *needed, cwd=folder)
    succeed(*uv, "pip", "install", "-q", "--python", inside, "--no-deps", wheel, cwd=folder)
    print(f"{python}, lower bounds: {', '.join(needed)}")
    use(inside, folder)


def use(python: str | Path, folder: Path) -> None:
    """Run the commands with `python`, which has bnexport, in `folder`."""
    succeed(python, "-c", MODEL, cwd=folder)
    for command in COMMANDS:
        done = run(python, "-m", "bnexport", *command, cwd=folder)
        line = (done.stderr.strip().splitlines() or [""])[-1]
        print(f"  {done.returncode}  bnexport {' '.join(command)}{'  # ' + line if line else ''}")
        if done.returncode != 0:
            raise SystemExit(done.stdout + done.stderr)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheel", type=Path, nargs="?")
    parser.add_argument("--python", action="append", help="an interpreter; again for more (the running one)")
    parser.add_argument("--oldest", action="store_true", help="the oldest packages that are allowed; needs uv")
    parser.add_argument("--constraints", type=Path, help="pins for the packages")
    arguments = parser.parse_args()
    if arguments.wheel is None:
        with tempfile.TemporaryDirectory() as folder:
            use(sys.executable, Path(folder))
        return
    for python in arguments.python or [sys.executable]:
        if shutil.which(python) is None:
            raise SystemExit(f"--python: got {python!r}, which is no program here")
        with tempfile.TemporaryDirectory() as folder:
            pins = arguments.constraints.resolve() if arguments.constraints else None
            if arguments.oldest:
                check_oldest(arguments.wheel.resolve(), python, Path(folder))
                continue
            check(arguments.wheel.resolve(), python, Path(folder), pins)


if __name__ == "__main__":
    main()
