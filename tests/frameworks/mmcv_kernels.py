"""MMCV with its operators: the CPU kernels of its source package that the tests call, compiled once under build/frameworks.

A whole build takes half an hour, and needs what these do not.
"""

import importlib
import subprocess
import sys
import tarfile
import types
from pathlib import Path
from typing import Any

from tests.frameworks.environment import ROOT

PLACE = ROOT / "build" / "frameworks" / "mmcv"
VERSION = "2.1.0"
NAMES = ("deform_conv", "modulated_deform_conv", "roi_align", "nms")
# The functions with their arguments, as MMCV's Python code names them.
_T, _I, _F, _B = "at::Tensor", "int", "float", "bool"
FUNCTIONS: dict[str, tuple[str, str]] = {
    "deform_conv_forward": (
        "void",
        f"{_T} input weight offset output columns ones {_I} kW kH dW dH padW padH dilationW dilationH group deformable_group"
        " im2col_step",
    ),
    "modulated_deform_conv_forward": (
        "void",
        f"{_T} input weight bias ones offset mask output columns {_I} kernel_h kernel_w stride_h stride_w pad_h pad_w"
        f" dilation_h dilation_w group deformable_group {_B} with_bias",
    ),
    "roi_align_forward": (
        "void",
        f"{_T} input rois output argmax_y argmax_x {_I} aligned_height aligned_width {_F} spatial_scale"
        f" {_I} sampling_ratio pool_mode {_B} aligned",
    ),
    "nms": (_T, f"{_T} boxes scores {_F} iou_threshold {_I} offset"),
}


def _binding() -> str:
    declared, defined = [], []
    for name, (result, words) in FUNCTIONS.items():
        kind, arguments = "", []
        for word in words.split():
            if word in (_T, _I, _F, _B):
                kind = word
            else:
                arguments.append((kind, word))
        declared.append(f"{result} {name}({', '.join(f'{kind} {word}' for kind, word in arguments)});")
        listed = ", ".join(f'pybind11::arg("{word}")' for _, word in arguments)
        defined.append(f'  module.def("{name}", &{name}, {listed});')
    lines = [
        "#include <torch/extension.h>",
        *declared,
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {",
        *defined,
        "}",
    ]
    return "\n".join(lines) + "\n"


def install() -> None:
    """Make `mmcv.ops` importable in this process, with these kernels; what else is called is None."""
    source = PLACE / f"mmcv-{VERSION}"
    if not source.exists():
        PLACE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
        subprocess.run([*command, "--no-build-isolation", "--dest", str(PLACE), f"mmcv=={VERSION}"], check=True)
        with tarfile.open(next(PLACE.glob("mmcv-*.tar.gz"))) as archive:
            archive.extractall(PLACE, filter="data")
    sys.path.insert(0, str(source))
    extension: Any = types.ModuleType("mmcv._ext")
    kernels = _kernels(source / "mmcv" / "ops" / "csrc")
    extension.__getattr__ = lambda name: getattr(kernels, name, None) if not name.startswith("__") else _missing(name)
    sys.modules["mmcv._ext"] = extension


def _missing(name: str) -> None:
    raise AttributeError(name)


def _kernels(csrc: Path) -> Any:
    """The compiled module; ten minutes when it is missing."""
    made = PLACE / "made"
    if (made / "mmcv_kernels.so").exists():
        sys.path.insert(0, str(made))
        return importlib.import_module("mmcv_kernels")
    from torch.utils.cpp_extension import load

    made.mkdir(exist_ok=True)
    files = {"binding.cpp": _binding()}
    for name in NAMES:  # two files of one name each, which one folder of objects does not hold
        files |= {
            f"{name}.cpp": f'#include "pytorch/{name}.cpp"\n',
            f"{name}_cpu.cpp": f'#include "pytorch/cpu/{name}.cpp"\n',
        }
    for name, text in files.items():
        (made / name).write_text(text)
    include = [str(csrc), str(csrc / "common"), str(csrc / "pytorch")]
    return load(
        "mmcv_kernels",
        [str(made / name) for name in files],
        extra_include_paths=include,
        extra_cflags=["-O1", "-w"],
        build_directory=str(made),
    )
