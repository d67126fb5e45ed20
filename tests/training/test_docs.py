"""docs/training.md lists every operator that has a translation of ours, and its example runs."""

import re
import textwrap
from pathlib import Path

import numpy as np
import torch

from bnexport.training.dropout import TRANSLATIONS
from bnexport.training.translations import translation_table

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/training.md").read_text()


def operators() -> str:
    """aten's names without namespace and overload; bnexport's own with it."""
    targets = [*translation_table(), *TRANSLATIONS]
    names = sorted({str(target).removesuffix(".default").removeprefix("aten.") for target in targets})
    listed = ", ".join(f"`{name}`" for name in names) + "."
    return "\n".join(textwrap.wrap(listed, 112, break_long_words=False, break_on_hyphens=False))


def test_every_operator_is_listed():
    section = TEXT.split("## Operators")[1].split("## ")[0]
    listed = re.search(r"^`.*?`\.$", section, re.MULTILINE | re.DOTALL)
    assert listed and listed.group() == operators(), f"write this into docs/training.md:\n{operators()}"


def test_the_example_runs(tmp_path, monkeypatch):
    code = TEXT.split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    layers = [torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten(), torch.nn.Linear(144, 10)]
    images, labels = torch.randn(8, 1, 8, 8), torch.randint(0, 10, (8,))
    arrays = (images.numpy(), labels.numpy())
    names = {"model": torch.nn.Sequential(*layers), "images": images, "labels": labels, "batches": [arrays, arrays]}
    exec(code, names)
    assert np.isfinite(names["loss"])
    assert {"step.onnx", "step.eval.onnx", "step.safetensors", "last.safetensors", "model.onnx"} <= {
        file.name for file in tmp_path.iterdir()
    }
