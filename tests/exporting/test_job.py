"""The way of an export: in one direction, with few runs of the caller's code, and nothing left behind where it ends early."""

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

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Counting(size_corpus.Net):
    """A network of the corpus that counts the runs of its code, by size and type; a trace has symbols and fakes."""

    runs: ClassVar[list[str]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        traced = torch.jit.is_tracing() or type(x) is not torch.Tensor or "Sym" in str([type(size) for size in x.shape])
        Counting.runs.append("trace" if traced else f"{tuple(x.shape)} {x.dtype}")
        return super().forward(x)


KINDS = [
    *("convolution", "average to one number", "skip of odd size", "pad to a multiple", "windows", "square grid"),
    *("flatten into Linear", "halves of the batch", "large batch", "odd height"),
]


@pytest.mark.filterwarnings("ignore:scripting fails")
@pytest.mark.parametrize(
    ("name", "file"), [*((name, "m.onnx") for name in KINDS), ("convolution", "m.pt"), ("convolution", "m.pt2")]
)
def test_runs_of_the_callers_code(name: str, file: str, tmp_path: Path) -> None:
    """Once at each size and type, also where a network does not take it; a second one of the example; and traces."""
    Counting.runs.clear()
    model = Counting(size_corpus.CASES[name].function).eval()
    result = bnexport.export(model, torch.randn(4, 3, 8, 8), tmp_path / file, exporter="torchscript")
    assert result.verification.passed
    found = set(Counting.runs)
    assert len(Counting.runs) <= len(found) + 4, Counting.runs
    assert len(Counting.runs) <= 10 or not name.startswith("flatten"), Counting.runs
    assert len(found - {"trace"}) >= len(set(result.verification.sizes))


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


ENDS = [*((stage, KeyboardInterrupt) for stage in STAGES), ("trace", MemoryError), ("judge", ImportError)]


@pytest.mark.parametrize(("stage", "error"), ENDS)
def test_an_end_at_any_stage(stage: str, error: type[BaseException], tmp_path: Path, monkeypatch: Any) -> None:
    """No file, no folder, no patched module, no other limit of recursion. An ImportError is no missing onnxruntime."""
    owner, name, file = STAGES[stage]
    model = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.SyncBatchNorm(4))).eval()
    before = state_of(model)
    original = getattr(owner, name)

    def ends(*arguments: Any, **options: Any) -> Any:
        if name not in ("commit", "open", "verdict"):
            original(*arguments, **options)
        raise error("stop")

    monkeypatch.setattr(owner, name, ends)
    with pytest.raises(error, match="stop"):
        bnexport.export(model, X, tmp_path / file, exporter="torchscript")
    assert not list(tmp_path.iterdir())
    assert state_of(model) == before
    monkeypatch.undo()
    assert bnexport.export(model, X, tmp_path / file, exporter="torchscript").verification.passed


def state_of(model: nn.Module) -> tuple[Any, ...]:
    def modules() -> Iterator[Any]:
        for path, module in model.named_modules():
            yield path, type(module), module.training, sorted(map(str, module.__dict__)), id(module.forward.__func__)

    tensors = {name: (id(value), value.sum().item()) for name, value in model.state_dict(keep_vars=True).items()}
    process = sys.getrecursionlimit(), threading.active_count(), torch.onnx.is_in_onnx_export()
    return list(modules()), tensors, process


class Refuses(jobs.Session):
    def run(self, feeds: Any, outputs: Any) -> Any:
        raise EngineFailure("an engine", "run", RuntimeError("no kernel"))


def test_a_model_that_does_not_run_on_the_example_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "Session", Refuses)
    monkeypatch.setattr(onnx_target, "Session", Refuses, raising=False)
    with pytest.raises(VerificationError, match=r"the exported model cannot run: .*no kernel"):
        bnexport.export(trained(nn.Conv2d(3, 4, 3)), X, tmp_path / "m.onnx", dynamic=False, exporter="torchscript")


def test_an_output_twice_gets_two_names() -> None:
    text = '<ir_version: 8, opset_import: ["": 18]> g (float[N] x) => (float[N] y) { y = Neg (x) }'
    graph = from_onnx_text(text).graph
    graph.outputs.append(graph.outputs[0])
    finish._name_outputs(graph, ["a", "b"])
    assert [output.name for output in graph.outputs] == ["a", "b"]
    assert [node.op_type for node in graph] == ["Neg", "Identity"]


def test_the_channels_of_a_node_are_those_of_its_data() -> None:
    x = ir.val("x", ir.DataType.FLOAT, ir.Shape([2, 5, 7]))
    assert finish._channels(ir.node("MMCVSyncBatchNorm", [x])) == 5
