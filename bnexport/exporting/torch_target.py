"""Files of torch's own formats, TorchScript and pt2: the module is folded, built, and checked in a new process."""

from __future__ import annotations

import contextlib
import functools
import inspect
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bnexport import model_io, torch_versions
from bnexport.errors import MissingDependencyError, UnsupportedModelError, VerificationError, first_line
from bnexport.exporting import dynamo, torchscript, wrapper
from bnexport.exporting.dimensions import SMALLEST, Dimensions, Limit, Note
from bnexport.exporting.job import Artifact, ExportJob
from bnexport.exporting.substitutes import with_plain_parameters
from bnexport.folding.context import Options
from bnexport.folding.report import FoldReport
from bnexport.folding.torch_module import fold_copy, fold_program
from bnexport.model_io import Staged
from bnexport.modules.copies import room_for
from bnexport.modules.tensors import Array, to_array
from bnexport.runtime.engine import Engine, EngineFailure
from bnexport.torch_versions import pytree

# Runs an exported file in a process of its own, without bnexport.

_RUNNER = Path(__file__).with_name("fresh_process_runner.py")
_TIMEOUT = 600  # seconds: a large model on a busy machine


class FreshProcess(contextlib.ExitStack):
    """An engine for a TorchScript or pt2 file. Use it as a context: the process ends with it.

    kind: "torchscript" or "pt2". `run` raises VerificationError where the file cannot be loaded.
    """

    def __init__(self, file: Path, kind: str) -> None:
        super().__init__()
        self.name = f"torch {torch.__version__}, a process without bnexport"
        self._folder = Path(self.enter_context(tempfile.TemporaryDirectory()))
        command = [sys.executable, "-c", _RUNNER.read_text(), kind, str(file.resolve()), str(self._folder)]
        self._errors, pipe = self.enter_context((self._folder / "errors").open("w+b")), subprocess.PIPE
        try:
            started = subprocess.Popen(command, 0, None, pipe, pipe, self._errors, cwd=self._folder)
        except OSError as error:
            self.close()
            raise _unavailable(error) from error
        self._process = self.enter_context(started)
        self.callback(self._process.kill)

    def run(self, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]) -> list[Array]:
        """Return all outputs. Raises EngineFailure."""
        # Without attributes that torch.export may have left on a caller's tensor, which the other process refuses.
        torch.save([value.detach() for value in feeds.values()], self._folder / "inputs.pt")
        asked, answers = self._process.stdin, self._process.stdout
        assert asked is not None and answers is not None
        with contextlib.suppress(BrokenPipeError):
            asked.write(b"\n")
        lines: list[bytes] = []
        # A pipe cannot be waited for on every system.
        waiting = threading.Thread(target=lambda: lines.append(answers.readline()), daemon=True)
        waiting.start()
        waiting.join(_TIMEOUT)
        if not lines:
            raise _unavailable(TimeoutError(f"it takes longer than {_TIMEOUT} s"))
        if not lines[0]:
            code = self._process.wait()
            self._errors.seek(0)
            written = self._errors.read().decode(errors="replace").strip().splitlines()
            last = written[-1] if written else f"exit code {code}"
            raise VerificationError(f"torch cannot load and run the exported file without bnexport: {last}")
        result = torch.load(self._folder / "outputs.pt", weights_only=True, map_location="cpu")
        if isinstance(result, str):
            raise EngineFailure(self.name, "run", RuntimeError(result))
        return list(map(to_array, result))


def _unavailable(error: OSError) -> MissingDependencyError:
    return MissingDependencyError(f"the exported file cannot be checked in a new process: {error}")


# pt2 files: torch.export of the folded module, with its own inputs and outputs, and dynamic sizes.

PROGRAM_NAMESPACES = ("aten", "prims", "prim")
_PYTHON = ("_operator", "operator", "math", "builtins", "torch")


def build_program(model: nn.Module, dimensions: Dimensions) -> tuple[torch.export.ExportedProgram, Dimensions]:
    """Return the program, and what it left dynamic. `model` is in eval mode.

    Raises UnsupportedModelError where torch.export fails, or where operators of other libraries remain.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    named = sum(each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD) for each in parameters)
    with dynamo.quiet():
        try:
            program, left = _program(model, dimensions, named)
        except Exception as error:
            raise UnsupportedModelError(
                f"{type(model).__name__}: torch.export fails: {str(error).strip()[:400]}; use format='torchscript',"
                " which keeps control flow where it can script it"
            ) from error
    _refuse_foreign_operators(program, type(model).__name__)
    return program, left


def _program(model: nn.Module, dimensions: Dimensions, named: int) -> tuple[torch.export.ExportedProgram, Dimensions]:
    """Record the model, before torch 2.6 with fewer dynamic sizes where it fails: there none may become constant."""
    try:
        return dynamo.export_program(model, dimensions, named=named)
    except Exception:
        if not torch_versions.has((2, 6)):
            for narrower in dimensions.narrower("this torch cannot record it for other sizes"):
                with contextlib.suppress(Exception):
                    return dynamo.export_program(model, narrower, named=named)
        raise


def program_allows(program: torch.export.ExportedProgram, inputs: tuple[torch.Tensor, ...]) -> bool:
    """Whether the ranges of the program allow inputs of these sizes; its guards may ask for more."""
    for value, given in zip(dynamo.program_inputs(program), inputs):
        for size, actual in zip(value.shape, given.shape):
            low, high = _limits(program, size)
            # Ranges start at 2 where sizes of 0 and 1 were not looked at.
            if (actual < low and low > SMALLEST) or (high is not None and actual > high):
                return False
    return True


def _limits(program: torch.export.ExportedProgram, size: int | torch.SymInt) -> tuple[int, int | None]:
    """Return smallest and largest value of an input's dimension; None for no largest."""
    constant = dynamo.constant(size)
    if constant is not None:
        return constant, constant
    assert isinstance(size, torch.SymInt)
    limits = program.range_constraints.get(size.node.expr)
    if limits is None:
        return 0, None
    return int(limits.lower), int(limits.upper) if limits.upper.is_Integer else None


def save_program(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write a program. Raises UnsupportedModelError for one that torch cannot write, such as one that rounds sizes up."""
    with dynamo.quiet(), path.open("wb") as file:
        try:
            torch.export.save(program, file)
        except OSError:
            raise
        except Exception as error:  # torch's serializer raises several types
            raise UnsupportedModelError(
                f"torch.export.save fails: {first_line(error)[:200]}; use format='torchscript'"
            ) from error


def program_operators(program: torch.export.ExportedProgram) -> set[str]:
    """Return names of all called operators, those of inner graphs included."""
    found: set[str] = set()
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            found.update(_name(node.target) for node in module.graph.nodes if node.op == "call_function")
    return found


def _name(target: Any) -> str:
    if isinstance(target, torch_versions.Operator):
        return target.name()
    if isinstance(target, (types.FunctionType, types.BuiltinFunctionType)):
        return f"{target.__module__}.{target.__name__}"
    return f"torch.{target}" if isinstance(target, torch_versions.HigherOrderOperator) else str(target)


def _refuse_foreign_operators(program: torch.export.ExportedProgram, name: str) -> None:
    foreign = sorted(
        operator
        for operator in program_operators(program)
        if (
            operator.partition("::")[0] not in PROGRAM_NAMESPACES
            if "::" in operator
            else operator.split(".")[0] not in _PYTHON
        )
    )
    if foreign:
        raise UnsupportedModelError(
            f"{name}: the program needs {', '.join(foreign[:8])}, which torch alone cannot load;"
            " replace it by torch's own operators before export"
        )


class TorchTarget:
    """The model in eval mode; every sync batch norm is folded or becomes torch's own operator.

    format: "torchscript" or "pt2". A TorchScript file declares no sizes.
    """

    place = "a process of its own"
    unverifiable = ""

    def __init__(self, job: ExportJob, format: str, *, fold: bool) -> None:
        self._job, self._format = job, format
        self.guarded = self.declares = format == "pt2"
        converted = self._work = wrapper.for_deploy(job.model)
        self._outputs = _output_names(wrapper.run(job.model, converted, job.inputs))
        self._report: FoldReport | None = None
        self._notes: list[Note] = []
        self._fold_later = False
        if fold:
            self._fold()
        if job.reference is not None:
            job.reference.complete(converted)

    def _fold(self) -> None:
        job = self._job
        try:
            folded, report = fold_copy(job.model, job.inputs, Options(), prove=job.reference is not None)
        except UnsupportedModelError as error:
            self._fold_later = self._format == "pt2"
            if not self._fold_later:
                self._notes.append(Note("unfolded", f"nothing was folded: {error}"))
            return
        # A program has one way through the code, whatever torch.fx makes of it.
        opaque = any(refusal.code == "opaque" for site in report.kept for refusal in site.refusals)
        self._fold_later = self._format == "pt2" and opaque
        if self._fold_later:
            return
        self._report = report
        self._refuse_wrong(report, "module")
        self._work = wrapper.with_torchs_operators(folded)

    def _refuse_wrong(self, report: FoldReport, kind: str) -> None:
        proof = report.verification
        if proof is not None and proof.status == "failed":
            raise VerificationError(
                f"{self._job.path}: the folded {kind} differs from the model, nothing was written: {proof.reason}"
            )

    def build(self, dimensions: Dimensions) -> Artifact:
        model: Any
        allows, method = None, "torch.export"
        notes: list[Note] = []
        bounds: tuple[Limit, ...] = ()
        with room_for(self._work):
            if self._format == "pt2":
                model, dimensions = build_program(self._work, dimensions)
                if self._fold_later:
                    model, self._report = fold_program(model, Options(), prove=self._job.reference is not None)
                    self._refuse_wrong(self._report, "program")
                allows, bounds = functools.partial(program_allows, model), dynamo.limits_of(model, dimensions)
            else:
                model, method, notes = torchscript.build(with_plain_parameters(self._work), dimensions.inputs)
        return Artifact(
            model,
            method,
            self._outputs,
            dimensions,
            (*self._notes, *notes),
            report=self._report,
            allows=allows,
            limits=bounds,
        )

    def stage(self, artifact: Artifact) -> Staged:
        save = save_program if self._format == "pt2" else torchscript.save
        return model_io.stage_file(self._job.path, lambda path: save(artifact.model, Path(path)))

    @contextlib.contextmanager
    def open(self, artifact: Artifact, file: str) -> Iterator[Sequence[Engine]]:
        with FreshProcess(Path(file), self._format) as engine:
            yield [engine]


def _output_names(output: Any) -> tuple[str, ...]:
    """Return names for the tensors among the model's outputs, as an ONNX graph would have them."""
    leaves, spec = pytree.tree_flatten(output)
    names = wrapper.output_names(spec, len(leaves))
    return tuple(name for name, value in zip(names, leaves) if isinstance(value, torch.Tensor))
