"""Virtual environments with real frameworks and trainers under build/, made once and used until their lists change."""

import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# In this order: torch first, so that nothing brings another build of it. Without what they ask for: it is listed here.
WITH_DEPENDENCIES = (
    ("torch==2.13.0",),
    ("numpy", "onnx", "onnx-ir", "onnxscript", "onnxruntime", "safetensors", "typer", "rich", "ml_dtypes"),
    ("setuptools<81", "pillow", "pyyaml", "huggingface_hub", "opencv-python-headless", "addict", "yapf", "termcolor"),
    ("matplotlib", "scipy", "requests", "tqdm", "tokenizers", "regex", "ftfy", "prettytable", "terminaltables"),
    ("setuptools_scm", "wheel", "ninja"),
    ("einops", "psutil", "six", "importlib_metadata", "mat4py", "modelindex", "pycocotools", "shapely"),
)
ALONE = (
    "torchvision==0.28.0",
    "timm==1.0.31",
    "segmentation_models_pytorch==0.6.0",
    "transformers==5.23.0",
    "mmengine==0.10.7",
    "mmcv-lite==2.1.0",
    "mmsegmentation==1.2.2",
    "mmpretrain==1.2.0",
    "mmdet==3.3.0",
    "ultralytics==8.4.190",
    "ultralytics-thop==2.2.3",
    "polars==2.1.0",
    "polars-runtime-32==2.1.0",
)

# Compiled here, where there is a compiler; its tests are skipped where that fails.
BUILT = "inplace-abn==1.1.0"


# Packages with dependencies, in order; packages without; what is compiled.
ENVIRONMENTS: dict[str, tuple[tuple[tuple[str, ...], ...], tuple[str, ...], tuple[str, ...]]] = {
    "frameworks": (WITH_DEPENDENCIES, ALONE, (BUILT,)),
    "trainers": (
        (*WITH_DEPENDENCIES[:2], ("lightning==2.6.6", "accelerate==1.15.0", "mmengine==0.10.7", "ray[train]==2.60.0")),
        (),
        (),
    ),
}


def python(name: str = "frameworks") -> Path:
    """The interpreter of an environment, which is made where it is missing (ten minutes, needs a package index)."""
    folder, wanted = ROOT / "build" / name, repr(ENVIRONMENTS[name])
    done, interpreter = folder / "ready", folder / "bin" / "python"
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        groups, alone, built = ENVIRONMENTS[name]
        for packages in groups:
            subprocess.run([*pip, "-c", str(ROOT / "constraints.txt"), *packages], check=True)
        if alone:
            subprocess.run([*pip, "--no-deps", *alone], check=True)
        for package in built:
            subprocess.run([*pip, "--no-deps", "--no-build-isolation", package], check=False)
        done.write_text(wanted)
    return interpreter


class Skipped(Exception):
    """What a case needs is not here."""
