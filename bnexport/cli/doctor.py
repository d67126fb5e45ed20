"""The command that checks the installation."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import os
import platform
from collections.abc import Callable
from typing import Annotated

import typer
from rich.text import Text

from bnexport import interface
from bnexport.cli.common import Json, app
from bnexport.cli.output import check_targets, emit, say
from bnexport.errors import BnexportError, LibraryError, MissingDependencyError
from bnexport.native import capi, cuda, library
from bnexport.pages import table

# Check of the installation.

__all__ = ["Check", "examine"]

# Distributions that hold onnxruntime. They share one folder: of two, each overwrites files of the other.
_RUNTIMES = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-rocm")
_MODULES = {"onnx-ir": "onnx_ir", "onnxruntime-gpu": "onnxruntime"}


@dataclasses.dataclass(frozen=True)
class Check:
    """ok: True if it works, False if a required part is broken, None if an optional part is missing."""

    name: str
    value: str
    ok: bool | None


def examine(*, deep: bool) -> list[Check]:
    """Check versions, the libraries, ONNX Runtime's providers and CUDA.

    deep: import each package, and run a batch norm of torch and one in ONNX Runtime; else versions are read from the
    packages' metadata and nothing that imports torch is imported.
    """
    from bnexport import __version__

    missing = None if library.is_pure() else False
    return [
        Check("bnexport", __version__, True),
        Check("Python", f"{platform.python_version()} on {platform.system()} {platform.machine()}", True),
        *(_package(name, deep=deep, needed=True) for name in interface.REQUIRED),
        *_optional(deep),
        _checked("operators' library", lambda: _library("ops"), broken=missing),
        _checked("training library", lambda: _library("training"), broken=missing),
        _providers(),
        _checked("registration in ONNX Runtime", _registration, broken=missing),
        *_cuda(),
        *([_checked("operators in torch", _torch_operator)] if deep and _version("torch") else []),
    ]


def _optional(deep: bool) -> list[Check]:
    """Check the packages of the extras: a missing one is broken where the first package of its extra is installed."""
    checks = []
    for extra, names in interface.EXTRAS.items():
        if extra == "cpu":
            checks.append(_runtime(deep))
        elif extra != "gpu":  # the check of cpu sees both
            installed = _version(names[0]) is not None
            checks += [_package(name, deep=deep, needed=installed) for name in names]
    return checks


def _package(name: str, *, deep: bool, needed: bool) -> Check:
    module = _MODULES.get(name, name)
    version = _version(name)
    if version is None:
        return Check(module, f"missing: {interface.advice(name)}", False if needed else None)
    if deep:
        try:
            importlib.import_module(module)
        except (ImportError, OSError) as error:
            return Check(module, f"broken: {error}", False)
    return Check(module, version, True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _runtime(deep: bool) -> Check:
    """Check onnxruntime, of which there may be one distribution only."""
    found = {name: version for name in _RUNTIMES if (version := _version(name)) is not None}
    if len(found) > 1:
        listed = " and ".join(f"{name} {version}" for name, version in found.items())
        way_out = f"pip uninstall {' '.join(found)}, then install one of them"
        return Check("onnxruntime", f"{listed} are installed and overwrite each other's files; {way_out}", False)
    return _package(next(iter(found), "onnxruntime"), deep=deep, needed=False)


def _torch_operator() -> str:
    import torch

    from bnexport.sync_bn import SyncBatchNorm

    # A batch norm of random numbers has mean 0 in every channel.
    mean = SyncBatchNorm(3)(torch.randn(2, 3, 4, 4)).detach().mean((0, 2, 3)).abs().max()
    if not float(mean) < 1e-5:
        raise LibraryError(f"a batch norm of random numbers has mean {float(mean):.3g}, expected 0")
    return "works"


def _cuda() -> list[Check]:
    """Check the CUDA library and, if it is there, the parts that depend on it."""
    found = _checked("CUDA library", lambda: _library("cuda"), broken=None)
    return [found, *_cuda_devices()] if found.ok else [found]


def _checked(name: str, look: Callable[[], str], broken: bool | None = False) -> Check:
    try:
        return Check(name, look(), True)
    except ImportError as error:
        return Check(name, f"missing: {error}", None)
    except BnexportError as error:
        return Check(name, str(error), broken)


def _library(kind: library.Kind) -> str:
    path = library.get_library_path(kind)
    more = (
        f", {capi.instruction_set()}" if kind == "ops" else f", CUDA {cuda.runtime_version()}" if kind == "cuda" else ""
    )
    return f"{path} ({library.version(kind)}, {os.path.getsize(path) / 1000:,.0f} kB{more})"


def _registration() -> str:
    import onnxruntime

    library.register(onnxruntime.SessionOptions(), training=True)
    return "works"


def _providers() -> Check:
    try:
        import onnxruntime
    except ImportError:
        return Check("execution providers", "none without onnxruntime", None)
    names = onnxruntime.get_available_providers()
    hint = "" if "CUDAExecutionProvider" in names else " (for CUDA: onnxruntime-gpu in the place of onnxruntime)"
    return Check("execution providers", ", ".join(names) + hint, True)


def _cuda_devices() -> list[Check]:
    """Check the devices: how many there are, and what each one gets from modules on it."""
    name = "CUDA devices"
    try:
        count = cuda.device_count()
    except BnexportError as error:
        return [Check(name, str(error), None)]
    if count == 0:
        reason = "no NVIDIA driver" if cuda.driver_version() is None else cuda.no_device()
        return [Check(name, f"none: {reason}", None)]
    return [Check(name, str(count), True), *map(_cuda_device, range(count))]


def _cuda_device(index: int) -> Check:
    """Check one device: our kernels, or torch's operations and why."""
    name = f"CUDA device {index}"
    try:
        cuda.check_device(index)
    except BnexportError as error:
        return Check(name, f"torch's own operations: {error}", None)
    return Check(name, f"{cuda.device_name(index)}: our kernels", True)


@app.command(
    place=110,
    examples=(
        "bnexport doctor",
        "bnexport doctor --deep",
    ),
)
def doctor(
    deep: Annotated[bool, typer.Option("--deep", help="Import every package, torch too, and run an operator.")] = False,
    json_target: Json = None,
) -> None:
    """Checks the installation."""

    check_targets(json=json_target)
    checks = examine(deep=deep)
    marks = {True: Text("ok", "green"), False: Text("no", "red"), None: Text("--", "yellow")}
    rows = [(marks[check.ok], check.name, check.value) for check in checks]
    emit(
        {"deep": deep, "checks": [dataclasses.asdict(check) for check in checks]},
        json_target,
        [table("bnexport doctor", ("", "", ""), rows)],
    )
    missing = sum(check.ok is None for check in checks)
    broken = [f"{check.name}: {check.value}" for check in checks if check.ok is False]
    if broken:
        raise MissingDependencyError("; ".join(broken))
    optional = f"; {missing} optional part{'s' * (missing != 1)} missing, marked --" if missing else ""
    say(f"all good: {len(checks) - missing} checks passed{optional}{'' if deep else '; --deep runs an operator, too'}")
