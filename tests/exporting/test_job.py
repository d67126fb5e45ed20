"""The way of an export: in one direction, with few runs of the caller's code, and nothing left behind where it ends early."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import onnx_ir as ir
import pytest
import torch
from onnx_ir import from_onnx_text
from torch import nn

import bnexport
from bnexport.errors import VerificationError
from bnexport.exporting import finish, onnx_target, torch_target
from bnexport.exporting import job as jobs
from bnexport.model_io import write
from bnexport.runtime.engine import EngineFailure
from tests.exporting import size_corpus
from tests.folding.module.nets import trained

PACKAGE = str(Path(bnexport.__file__).parent)
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FILES = ["m.onnx", "m.pt", "m.pt2"]


class Counting(nn.Module):
    """Counts the runs of its code, by the sizes and types of the inputs; a trace has symbols and fakes."""

    runs: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, padding=1), nn.SyncBatchNorm(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.runs.append((type(x).__name__, *map(str, x.shape), x.dtype))
        return torch.relu(self.norm(self.conv(x)))


@pytest.mark.filterwarnings("ignore:scripting fails")
@pytest.mark.parametrize("file", FILES)
def test_runs_of_the_callers_code(file: str, tmp_path: Path) -> None:
    """One for each size and type that is compared, and four more: a second one of the example, traces."""
    Counting.runs.clear()
    result = bnexport.export(trained(Counting()).eval(), X, tmp_path / file)
    assert result.verification.passed
    probed = len(set(result.verification.sizes))
    own = [run for run in Counting.runs if run[0] == "Tensor"]
    assert len(Counting.runs) <= probed + 4, Counting.runs
    assert len({run for run in own if "Sym" not in str(run)}) >= probed


class Corpus(size_corpus.Net):
    """A network of the corpus that counts the runs of its code, by size and type; a trace has symbols."""

    runs: ClassVar[list[str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Corpus.runs.append("trace" if torch.jit.is_tracing() else f"{tuple(x.shape)} {x.dtype}")
        return super().forward(x)


KINDS = [
    *("convolution", "average to one number", "skip of odd size", "pad to a multiple", "windows", "square grid"),
    *("flatten into Linear", "halves of the batch", "large batch", "odd height"),
]


@pytest.mark.parametrize("name", KINDS)
def test_runs_of_networks_that_take_few_sizes(name: str, tmp_path: Path) -> None:
    """Once at each size and type, also where a network does not take it; a second one of the example; and traces."""
    Corpus.runs.clear()
    model = Corpus(size_corpus.CASES[name].function).eval()
    result = bnexport.export(model, torch.randn(4, 3, 8, 8), tmp_path / "m.onnx", exporter="torchscript")
    assert result.verification.passed
    assert len(Corpus.runs) <= len(set(Corpus.runs)) + 4, Corpus.runs
    assert len(Corpus.runs) <= 10 or not name.startswith("flatten"), Corpus.runs


STAGES = {
    "trace": (onnx_target.OnnxTarget, "_trace", "m.onnx"),
    "finish": (onnx_target, "finish", "m.onnx"),
    "fold": (onnx_target.OnnxTarget, "_fold", "m.onnx"),
    "write": (write, "_write", "m.onnx"),
    "open": (onnx_target.OnnxTarget, "open", "m.onnx"),
    "judge": (jobs, "verdict", "m.onnx"),
    "commit": (jobs.Staged, "commit", "m.onnx"),
    "script": (torch_target.torchscript, "build", "m.pt"),
    "save": (torch_target.torchscript, "save", "m.pt"),
    "open the script": (torch_target.TorchTarget, "open", "m.pt"),
    "save pt2": (torch_target, "save_program", "m.pt2"),
}


@pytest.mark.parametrize(
    ("stage", "error"), [*((stage, KeyboardInterrupt) for stage in STAGES), ("trace", MemoryError)]
)
def test_an_end_at_any_stage(stage: str, error: type[BaseException], tmp_path: Path, monkeypatch: Any) -> None:
    """No file, no folder, no patched module, no other limit of recursion."""
    owner, name, file = STAGES[stage]
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4))).eval()
    before = state_of(model)
    original = getattr(owner, name)

    def ends(*arguments: Any, **options: Any) -> Any:
        if name not in ("commit", "open", "verdict"):
            original(*arguments, **options)
        raise error("stop")

    monkeypatch.setattr(owner, name, ends)
    with pytest.raises(error):
        bnexport.export(model, X, tmp_path / file, exporter="torchscript")
    assert not list(tmp_path.iterdir())
    assert state_of(model) == before
    monkeypatch.undo()
    assert bnexport.export(model, X, tmp_path / file, exporter="torchscript").verification.passed


def test_only_a_missing_engine_is_called_one(tmp_path: Path, monkeypatch: Any) -> None:
    """An ImportError of the model's own code, at another size, is no missing onnxruntime."""

    def fails(*arguments: Any) -> Any:
        raise ImportError("a library of the model")

    monkeypatch.setattr(jobs, "verdict", fails)
    with pytest.raises(ImportError, match="a library of the model"):
        bnexport.export(nn.Conv2d(3, 4, 3), X, tmp_path / "m.onnx", exporter="torchscript")
    assert not list(tmp_path.iterdir())


def state_of(model: nn.Module) -> dict[str, Any]:
    def modules() -> Iterator[Any]:
        for path, module in model.named_modules():
            yield path, type(module), module.training, sorted(map(str, module.__dict__)), id(module.forward.__func__)

    tensors = {name: (id(value), value.sum().item()) for name, value in model.state_dict(keep_vars=True).items()}
    return {
        "modules": list(modules()),
        "tensors": tensors,
        "recursion": sys.getrecursionlimit(),
        "threads": threading.active_count(),
        "jit": torch.onnx.is_in_onnx_export(),
    }


class Refuses(jobs.Session):
    """An engine that runs nothing."""

    def run(self, feeds: Any, outputs: Any) -> Any:
        raise EngineFailure("an engine", "run", RuntimeError("no kernel"))


def test_a_model_that_does_not_run_on_the_example_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "Session", Refuses)
    monkeypatch.setattr(onnx_target, "Session", Refuses, raising=False)
    with pytest.raises(VerificationError, match=r"the exported model cannot run: .*no kernel"):
        bnexport.export(trained(nn.Conv2d(3, 4, 3)), X, tmp_path / "m.onnx", dynamic=False, exporter="torchscript")


def test_an_example_of_zeros_is_no_evidence(tmp_path: Path) -> None:
    """Random inputs of its size are compared, too."""
    options = {"dynamic": False, "exporter": "torchscript", "overwrite": True}
    results = [bnexport.export(trained(nn.Conv2d(3, 4, 3)), x, tmp_path / "m.onnx", **options) for x in (X, 0 * X)]
    assert [result.verification.samples for result in results] == [1, 2]


def test_an_output_twice_gets_two_names() -> None:
    graph = from_onnx_text(
        '<ir_version: 8, opset_import: ["": 18]> g (float[N] x) => (float[N] y) { y = Neg (x) }'
    ).graph
    graph.outputs.append(graph.outputs[0])
    finish._name_outputs(graph, ["a", "b"])
    assert [output.name for output in graph.outputs] == ["a", "b"]
    assert [node.op_type for node in graph] == ["Neg", "Identity"]


def test_the_channels_of_a_node_are_those_of_its_data() -> None:
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape([2, 5, 7]))
    assert finish._channels(ir.node("MMCVSyncBatchNorm", [x])) == 5
