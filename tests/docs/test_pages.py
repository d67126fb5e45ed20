"""What the documents show is run: Python and shell blocks, in order, in an empty folder."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, run

PAGES = sorted((ROOT / "docs/tutorials").glob("*.md"))
# Run elsewhere: by tests/test_examples.py, and with real packages by tests/frameworks/test_tutorial.py.
ELSEWHERE = ("cpp", "mmsegmentation")


@pytest.mark.parametrize("page", [page for page in PAGES if page.stem not in ELSEWHERE], ids=lambda page: page.stem)
def test_a_tutorial_runs(page: Path, tmp_path: Path) -> None:
    run(blocks(page.read_text(), "python", "sh"), tmp_path)


def test_the_tutorial_on_cpp_shows_lines_of_the_examples() -> None:
    """tests/test_examples.py runs it."""
    sources = {"c": "examples/ort_run/main.c", "cpp": "examples/libtorch_run/main.cpp"}
    shown = blocks((ROOT / "docs/tutorials/cpp.md").read_text(), *sources)
    assert {language for language, _ in shown} == set(sources)
    for language, code in shown:
        source = " ".join((ROOT / sources[language]).read_text().split())
        lines = code.splitlines() if language == "cpp" else [code]
        for line in lines:
            assert " ".join(line.split()) in source, f"{sources[language]} has no {line!r}"


def test_there_are_tutorials() -> None:
    assert {"mmsegmentation", "ddp", "apex", "cpp"} <= {page.stem for page in PAGES}
    listed = (ROOT / "mkdocs.yml").read_text()
    for page in PAGES:
        assert f"tutorials/{page.name}" in listed


README = (ROOT / "README.md").read_text()
README_MODEL = """
import torch
from torch import nn


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.SyncBatchNorm(8), nn.ReLU())
        self.classify = nn.Linear(8, 4)

    def forward(self, x):
        return self.classify(self.features(x).mean((2, 3)))


def network():
    torch.manual_seed(0)
    return Network()


model = network()
images, labels = torch.randn(6, 3, 224, 224), torch.randint(0, 4, (6,))
"""
# What the reader of the README has: a module that builds the network, and its checkpoint.
README_CHECKPOINT = 'import torch, package\ntorch.save({"state_dict": package.network().state_dict()}, "weights.pth")'


def test_the_readme_runs(tmp_path: Path) -> None:
    python = [("python", README_MODEL), *blocks(README, "python")]
    shell = [(language, code) for language, code in blocks(README, "sh") if code.startswith("bnexport ")]
    assert len(python) >= 3 and len(shell) >= 2
    (tmp_path / "package.py").write_text(README_MODEL)
    run([*python, ("sh", ""), ("python", README_CHECKPOINT), *shell], tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert {"model.onnx", "kept.onnx", "folded.onnx", "model.pt", "step.onnx", "report.html", "latency.png"} <= made


def test_the_readme_names_every_command_and_target() -> None:
    from bnexport.cli import app

    page = (ROOT / "docs/command_line.md").read_text()
    for command in app.registered_commands:
        name = f"bnexport {command.name or command.callback.__name__}"
        assert name in README and f"`{name}" in page
    targets = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    listed = set(re.findall(r"\bmake ([a-z-]+)", README))
    assert listed and listed <= targets | {"help"}


def test_links_of_the_readme_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
