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


def without_numbers(text: str) -> str:
    """Errors and bounds differ between processors: any number in exponent form is one."""
    return re.sub(r"\d(\.\d+)?e-\d+", "#", re.sub(r"onnxruntime [\d.]+", "onnxruntime", text)).strip()


def test_the_first_block_of_the_readme_prints_what_follows_it(tmp_path: Path) -> None:
    ((_, program), *_), ((_, shown), *_) = blocks(README, "python"), blocks(README, "text")
    assert README.index(program) < README.index(shown)
    printed = run([("python", program)], tmp_path)
    assert without_numbers(printed).endswith(without_numbers(shown))


def test_the_readme_runs(tmp_path: Path) -> None:
    python = [("python", f"import bnexport\n{README_MODEL}"), *blocks(README, "python")[1:]]
    shell = [(language, code) for language, code in blocks(README, "sh") if code.startswith("bnexport ")]
    assert len(python) >= 3 and len(shell) >= 2
    (tmp_path / "package.py").write_text(README_MODEL)
    run([*python, ("sh", ""), ("python", README_CHECKPOINT), *shell], tmp_path)
    made = {path.name for path in tmp_path.iterdir()}
    assert {"model.onnx", "kept.onnx", "folded.onnx", "model.pt", "step.onnx", "report.html", "latency.png"} <= made


def test_the_readme_begins_with_what_a_newcomer_needs() -> None:
    """The picture, the installation and the two commands, in this order, before anything else."""
    order = ["# bnexport", "before_after.svg", "## Install", "pip install '.", "make demo", "make test", "## Try it"]
    places = [README.index(text) for text in order]
    assert places == sorted(places)
    assert README[: places[-1]].count("\n") <= 34


def test_no_page_installs_from_an_index_that_has_no_such_package() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    assert [page.name for page in pages if re.search(r"pip install [\"']?bnexport", page.read_text())] == []


def test_the_page_on_quantization_shows_lines_of_its_benchmark() -> None:
    source = (ROOT / "benchmarks/lower_precision.py").read_text()
    ((_, shown),) = blocks((ROOT / "docs/guides/quantization.md").read_text(), "python")
    for line in filter(None, (line.strip() for line in shown.splitlines())):
        assert line in source, line


def test_the_page_on_opsets_has_the_ir_versions_that_are_written() -> None:
    """bnexport.exporting.finish asks onnx for the lowest IR version of an opset, which is 8 at least."""
    import onnx.helper

    table = re.findall(r"^\| ([\d, ]+) \| (\d+) \|$", (ROOT / "docs/guides/opsets.md").read_text(), re.MULTILINE)
    shown = {int(opset): int(version) for opsets, version in table for opset in opsets.split(",")}
    assert sorted(shown) == list(range(18, 24))
    for opset, version in shown.items():
        lowest = onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)])
        assert version == max(lowest, 8), opset


def test_the_readme_names_every_command_and_target() -> None:
    from bnexport.cli.application import app

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
