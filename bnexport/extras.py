"""Packages of the base installation and of the extras, and the advice for one that is missing."""

from __future__ import annotations

from bnexport.errors import MissingPackageError, first_line

# Distributions as pyproject.toml names them (a test compares). An extra counts as installed if its first one is.
REQUIRED = ("numpy", "ml_dtypes", "onnx", "onnx-ir", "jinja2", "typer", "rich")
EXTRAS = {
    "torch": ("torch", "onnxscript", "safetensors"),
    "cpu": ("onnxruntime",),
    "gpu": ("onnxruntime-gpu",),
    "plot": ("matplotlib",),
}
PURPOSES = {
    "torch": "modules, export and training steps",
    "cpu": "running models",
    "gpu": "running models on NVIDIA GPUs",
    "plot": "charts",
}
_ADVICE = {
    "torch": "pip install torch onnxscript safetensors (extra [torch]), torch in the build for your device",
    "onnxruntime": "pip install onnxruntime (extra [cpu]), or onnxruntime-gpu (extra [gpu]), not both",
}


def advice(package: str) -> str | None:
    """Return what to install for a missing package; None for a package that no extra has."""
    if package in _ADVICE:
        return _ADVICE[package]
    if package in REQUIRED or package.replace("_", "-") in REQUIRED:
        return f"pip install {package}, or install bnexport again"
    for extra, packages in EXTRAS.items():
        if package in packages:
            return f"pip install {package} (extra [{extra}])"
    return None


def broken(package: str, error: BaseException) -> MissingPackageError:
    """Return the error for a package that is installed and cannot be loaded, as a build without its libraries."""
    return MissingPackageError(
        f"{package} is installed and cannot be loaded: {first_line(error)}; install it again, with what its build needs:"
        f" {advice(package)}",
        name=package,
    )


def missing(package: str, use: str = "") -> MissingPackageError:
    """Return the error for a package that is not installed. use: a clause such as "HTML reports need it"."""
    way_out = advice(package) or f"pip install {package}"
    return MissingPackageError(f"{package} is not installed{', ' * bool(use)}{use}; {way_out}", name=package)
