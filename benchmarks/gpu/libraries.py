"""The two compiled libraries of the kit: where they are, how they are built, for a device or an emulated one."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
REHEARSES = "BNEXPORT_KIT_REHEARSAL" in os.environ
DEVICE = "cpu" if REHEARSES else "cuda"  # torch's name of it
BUILD = ROOT / ("build/kit_emulated" if REHEARSES else "build/kit")
NAMES = {"BNEXPORT_LIBRARY": "libbnexport_ops.so", "BNEXPORT_CUDA_LIBRARY": "libbnexport_ops_cuda.so"}
EMULATED = (
    "tests/cpp/cuda/emulated_kernels.cpp", "tests/cpp/cuda/emulator.cpp", "custom_ops/kernels/cuda/launch_plan.cpp",
    "custom_ops/capi/cuda_capi.cpp",
)  # fmt: skip


def steps(_: str) -> dict[str, Any]:
    return {"libraries": check}


def make() -> str:
    """Build the libraries unless the environment names both; return what was wrong, "" when nothing was."""
    if are_given():
        return ""
    return build_emulated() if REHEARSES else build(os.environ.get("BNEXPORT_KIT_ARCHITECTURE", "90"))


def check() -> str:
    """Load them, and ask for code for the device."""
    import torch

    from benchmarks.gpu.kit import NotRun
    from bnexport.native import capi, cuda, library

    cuda.library()  # of another version, it is refused
    text = f"version {library.version('cuda')}, operators for {capi.instruction_set()}, torch {torch.__version__}"
    if not REHEARSES and cuda.driver_version() is None:
        raise NotRun(f"no NVIDIA driver; {text}")
    count = cuda.device_count()
    assert count > 0, "no device"
    for index in range(count):
        cuda.check_device(index)
    return text if REHEARSES else f"{text}, {torch.cuda.get_device_name()}, CUDA {torch.version.cuda}"


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
