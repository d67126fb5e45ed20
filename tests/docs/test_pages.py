"""The Python blocks of tutorials run, in order, as one program in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run(script: str, folder: Path) -> None:
    (folder / "page.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "page.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    run("\n".join(blocks(page.read_text(), "python")), tmp_path)


def test_there_are_tutorials() -> None:
    assert {"mmsegmentation", "ddp", "apex"} <= {page.stem for page in PAGES}


README_MODEL = """
import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(3, 8, 3, 4), nn.SyncBatchNorm(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
)
images, labels = torch.randn(6, 3, 224, 224), torch.randint(0, 4, (6,))
"""


def test_the_readme_runs(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text()
    start, more = blocks(text, "python")
    start = start.replace("model = bnexport.convert", "model.eval()\nmodel = bnexport.convert")
    start = start.replace('{"x": images}', '{"input": images.numpy()}')
    run("\n".join((README_MODEL, start, more)), tmp_path)
    assert {"model.onnx", "kept.onnx", "folded.onnx", "model.pt", "step.onnx"} <= {
        path.name for path in tmp_path.iterdir()
    }


def test_the_readme_names_every_command_and_target() -> None:
    text = (ROOT / "README.md").read_text()
    from bnexport.cli import app

    for command in app.registered_commands:
        assert f"bnexport {command.name or command.callback.__name__}" in text.replace(
            "bnexport\ndoctor", "bnexport doctor"
        )
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    listed = next(line for line in text.splitlines() if line.startswith("`make help` lists"))
    assert set(re.findall(r"`(?:make )?([a-z-]+)`", listed)) <= targets | {"help"}
