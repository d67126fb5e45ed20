"""The two compiled libraries of the kit: where they are, how they are built; a driver or an emulated device."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
REHEARSAL = "BNEXPORT_KIT_REHEARSAL"  # set in all processes of a rehearsal
BUILD = ROOT / ("build/kit_emulated" if os.environ.get(REHEARSAL) else "build/kit")
NAMES = ("libbnexport_ops.so", "libbnexport_ops_cuda.so")
VARIABLES = ("BNEXPORT_LIBRARY", "BNEXPORT_CUDA_LIBRARY")


def find() -> dict[str, Path]:
    """Those that exist: named by the environment, in a packed copy, or built by the section `build`."""
    found = {}
    for name, variable in zip(NAMES, VARIABLES, strict=True):
        for path in (Path(os.environ.get(variable) or "/"), ROOT / "bnexport/lib" / name, BUILD / name):
            if path.is_file():
                found[name] = path
                break
    return found


def environment() -> dict[str, str]:
    """Variables of a section's process. cuBLAS needs its workspace fixed for the same bits on every run."""
    found = find()
    named = {variable: str(found[name]) for name, variable in zip(NAMES, VARIABLES, strict=True) if name in found}
    return named | {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def tool(name: str) -> str | None:
    """Find a program of the CUDA toolkit: on PATH, or where CMake looks for nvcc; ncu in the newest Nsight Compute, too."""
    folders = [Path(os.environ[key]) / "bin" for key in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(key)]
    folders += [Path("/usr/local/cuda/bin"), *sorted(Path("/opt/nvidia/nsight-compute").glob("*"), reverse=True)]
    return shutil.which(name) or next((str(each / name) for each in folders if os.access(each / name, os.X_OK)), None)


def are_given() -> bool:
    """Whether both are named by the environment or lie in a packed copy: then nothing is built."""
    found = find()
    return len(found) == len(NAMES) and all(path.parent != BUILD for path in found.values())


def build(architecture: str) -> str:
    """Builds both for one architecture, or what has changed since; takes carried ones where the tools are missing.

    Returns what was wrong, "" when nothing was.
    """
    missing = [name for name in ("cmake", "nvcc") if tool(name) is None]
    if missing and len(find()) == len(NAMES):
        return ""
    if missing:
        return f"{', '.join(missing)}: not found; carry built libraries in {BUILD.relative_to(ROOT)}"
    cache = BUILD / "CMakeCache.txt"
    if cache.exists() and f"CMAKE_HOME_DIRECTORY:INTERNAL={ROOT}\n" not in cache.read_text(errors="replace"):
        cache.unlink()  # carried from another folder, where its paths were right
        shutil.rmtree(BUILD / "CMakeFiles", ignore_errors=True)
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


EMULATED = (
    "tests/cpp/cuda/emulated_kernels.cpp",
    "tests/cpp/cuda/emulator.cpp",
    "custom_ops/kernels/cuda/launch_plan.cpp",
    "custom_ops/capi/cuda_capi.cpp",
)


def build_emulated() -> str:
    """The CUDA library on an emulated device, beside a copy of the operators' library. Returns what was wrong."""
    from bnexport import __version__
    from bnexport.native.library import get_library_path

    BUILD.mkdir(parents=True, exist_ok=True)
    if os.environ.get(VARIABLES[0]) == str(BUILD / NAMES[0]):
        del os.environ[VARIABLES[0]]  # an earlier copy; the installed one may be newer
    shutil.copyfile(get_library_path(), BUILD / NAMES[0])
    sources = [path for folder in ("custom_ops", "tests/cpp/cuda") for path in (ROOT / folder).rglob("*.[ch]*")]
    target = BUILD / NAMES[1]
    if target.exists() and target.stat().st_mtime > max(path.stat().st_mtime for path in sources):
        return ""
    includes = [f"-I{ROOT / 'tests/cpp/cuda'}", f"-I{ROOT / 'custom_ops/include'}"]
    version = f'-DBNEXPORT_VERSION="{__version__}"'
    command = ["g++", "-std=gnu++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", version, *includes]
    command += [*(str(ROOT / source) for source in EMULATED), "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr[-1000:]


def driver_problem() -> str | None:
    """Why there is no device to use, by the driver's own word; None when there is one."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver: libcuda.so.1 cannot be loaded"
    code, count, version = driver.cuInit(0), ctypes.c_int(), ctypes.c_int()
    if code != 0:
        return f"the NVIDIA driver gives error {code} (cuInit)"
    driver.cuDriverGetVersion(ctypes.byref(version))
    driver.cuDeviceGetCount(ctypes.byref(count))
    return None if count.value else f"the NVIDIA driver {version.value} sees no device"
