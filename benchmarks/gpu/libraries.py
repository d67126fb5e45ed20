"""Section `build`, and the two compiled libraries of the kit: where they are, how they are built, for a device or an emulated one."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.gpu.report import Report
    from benchmarks.gpu.section import Options

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = "BNEXPORT_KIT_REHEARSAL"  # set in all processes of a rehearsal
BUILD = ROOT / ("build/kit_emulated" if os.environ.get(REHEARSAL) else "build/kit")
NAMES = {"BNEXPORT_LIBRARY": "libbnexport_ops.so", "BNEXPORT_CUDA_LIBRARY": "libbnexport_ops_cuda.so"}
EMULATED = (
    "tests/cpp/cuda/emulated_kernels.cpp", "tests/cpp/cuda/emulator.cpp", "custom_ops/kernels/cuda/launch_plan.cpp",
    "custom_ops/capi/cuda_capi.cpp",
)  # fmt: skip


def run(report: Report, options: Options) -> None:
    with report.step("libraries", report.left()) as row:
        problem = "" if are_given() else build_emulated() if options.rehearse else build(options.architecture)
        os.environ.update(environment())
        found = find()
        row.ok = not problem and len(found) == len(NAMES)
        row.value = problem or ", ".join(f"{path.name} {path.stat().st_size / 1e6:.1f} MB" for path in found.values())
    from bnexport.native import capi, cuda, library

    with report.step("loading") as row:
        cuda.library()  # of another version, it is refused
        row.value = f"version {library.version('cuda')}, operators for {capi.instruction_set()}"
    with report.step("code for the device") as row:
        from benchmarks.gpu.report import NotRun

        if not options.rehearse and cuda.driver_version() is None:
            raise NotRun("no NVIDIA driver")
        count = cuda.device_count()
        for index in range(max(count, 1)):  # without one, device 0 gives the driver's reason
            cuda.check_device(index)
        row.ok, row.value = count > 0, f"{count} devices"
    with report.step("machine") as row:
        row.ok, row.value = None, describe(options.rehearse)


def describe(rehearse: bool) -> str:
    text = f"Python {sys.version.split()[0]}, {platform.machine()}"
    try:
        import torch
    except ImportError:
        return f"{text}, no torch"
    text += f", torch {torch.__version__}"
    if rehearse or not torch.cuda.is_available():
        return text
    return f"{text}, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


def find() -> dict[str, Path]:
    """Those that exist, by their variables: named by the environment, or built by the section `build`."""
    places = {variable: Path(os.environ.get(variable) or BUILD / name) for variable, name in NAMES.items()}
    return {variable: path for variable, path in places.items() if path.is_file()}


def are_given() -> bool:
    """Whether the environment names both: then nothing is built."""
    found = find().values()
    return len(found) == len(NAMES) and all(path.parent != BUILD for path in found)


def environment() -> dict[str, str]:
    """Variables of a section's process. cuBLAS needs its workspace fixed for the same bits on every run."""
    return {variable: str(path) for variable, path in find().items()} | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def tool(name: str) -> str | None:
    """Find a program of the CUDA toolkit: on PATH, or where CMake looks for nvcc; ncu in the newest Nsight Compute, too."""
    folders = [Path(os.environ[key]) / "bin" for key in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(key)]
    folders += [Path("/usr/local/cuda/bin"), *sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True)]
    return shutil.which(name) or next((str(each / name) for each in folders if os.access(each / name, os.X_OK)), None)


def build(architecture: str) -> str:
    """Build both for one architecture, or what has changed since; take carried ones where the tools are missing.

    Returns what was wrong, "" when nothing was.
    """
    missing = [name for name in ("cmake", "nvcc") if tool(name) is None]
    if missing:
        carried = f"{', '.join(missing)}: not found; carry built libraries in {BUILD.relative_to(ROOT)}"
        return "" if len(find()) == len(NAMES) else carried
    cache = BUILD / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text(errors="replace"):
        shutil.rmtree(BUILD)  # carried from another folder, where its paths were right
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    settings = ["-DBNEXPORT_CUDA=ON", f"-DBNEXPORT_CUDA_ARCHITECTURES={architecture}", "-DCMAKE_BUILD_TYPE=Release"]
    for command in (
        ["cmake", "-S", str(ROOT), "-B", str(BUILD), *generator, *settings],
        ["cmake", "--build", str(BUILD), "--target", "bnexport_ops", "bnexport_ops_cuda", "-j"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{' '.join(command)}: {(done.stderr or done.stdout)[-1000:]}"
    return ""


def build_emulated() -> str:
    """Build the CUDA library on an emulated device, beside a link to the installed operators' library; return what was wrong."""
    from bnexport import __version__
    from bnexport.native.library import get_library_path

    BUILD.mkdir(parents=True, exist_ok=True)
    operators, target = (BUILD / name for name in NAMES.values())
    if not operators.exists():
        operators.unlink(missing_ok=True)  # a link to one that is gone
        operators.symlink_to(get_library_path())
    sources = [path for folder in ("custom_ops", "tests/cpp/cuda") for path in (ROOT / folder).rglob("*.[ch]*")]
    if target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return ""
    includes = [
        f"-I{ROOT / 'tests/cpp/cuda'}",
        f"-I{ROOT / 'custom_ops/include'}",
        f'-DBNEXPORT_VERSION="{__version__}"',
    ]
    command = ["g++", "-std=gnu++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", *includes]
    command += [
        *os.environ.get("BNEXPORT_EMULATED_FLAGS", "").split(),
        *(str(ROOT / source) for source in EMULATED),
        "-o",
        str(target),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr[-1000:]
