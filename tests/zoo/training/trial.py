"""One network of the training zoo: its step exported and run in ONNX Runtime, against torch in float32 and float64.

Errors are 2-norms of differences from float64 over the 2-norm there, all gradients together. Gradients are read from
the optimizer's state after its first step, from the same weights and other batches for each seed.
"""

import contextlib
import copy
import functools
import math
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import torch
from torch import nn

import bnexport
from bnexport import model_io, tolerances
from bnexport.errors import first_line
from bnexport.training import verification
from bnexport.training.dropout import SeededDropout
from bnexport.training.step import Follower, Kinks, Recorder
from tests.training import faults, following
from tests.training.torch_step import OPTIMIZERS, torch_step
from tests.zoo.training import networks
from tests.zoo.trial import Ways, import_libraries, limited

# For a network.
SECONDS = 1500
# Planted of each kind.
FAULTS = 1
_GRADIENTS = {"sgd": "momentum_buffer", "adamw": "exp_avg"}
SEEDS = 3
# The verdict: the error of the gradients against torch's own, and the least that counts as an error.
OWN_ERRORS, FLOOR = 5.0, 16 * tolerances.UNIT_ROUNDOFF["float32"]
# A tensor of gradients that is off by more of its norm is wrong, where torch's is not.
OF_A_TENSOR, OF_ALL = 2.0**-4, 1e-4

Errors = Sequence[Sequence[float]]
Named = dict[str, np.ndarray]


def run(name: str, place: Path, ways: Sequence[str]) -> None:
    Trial(networks.find(name), place, ways).run()


def warm() -> None:
    import_libraries()
    with tempfile.TemporaryDirectory() as folder:
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        batch = torch.randn(2, 3, 8, 8), torch.tensor([0, 1])
        bnexport.export_training_step(net, nn.functional.cross_entropy, batch, Path(folder, "s.onnx"), verify=False)


class Trial(Ways):
    """The ways of one network: "step"; "faults", planted into its graph; "compile", torch.compile's time."""

    seconds = 150

    def __init__(self, network: networks.Network, place: Path, names: Sequence[str]) -> None:
        super().__init__(place, network.name, network.shape, names)
        self.network = network
        self.exported: tuple[Any, tuple[Any, ...]] | None = None
        self._reached: following.Reached

    def run(self) -> None:
        with limited(self.seconds):
            try:
                task = networks.make(self.network)
                batch = self._batch(task, 0)
                parameters = torch_step(task.model, task.loss, *self._rule(), _state(task.model), batch, torch.float32)
            except Exception as error:
                self.save(does_not_train=f"{type(error).__name__}: {first_line(error)[:300]}")
                return
        if not np.isfinite(parameters["loss"]):
            self.save(does_not_train=f"its loss is {parameters['loss']}")
            return
        count = sum(value.numel() for value in task.model.parameters())
        self.save(optimizer=self.network.optimizer, loss=task.kind, parameters=count)
        for name, function in (("step", self._step), ("faults", self._faults), ("compile", self._compile)):
            self.go(name, functools.partial(function, task))

    def _rule(self) -> tuple[str, dict[str, float]]:
        return self.network.optimizer, self.network.options

    def _batch(self, task: networks.Task, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(seed)
        return torch.randn(self.network.shape, generator=source), task.target(source)

    def _export(self, task: networks.Task, path: Path) -> tuple[Any, tuple[Any, ...]]:
        """Export once, for all ways. Return the result, and what verification compared the graph with."""
        if self.exported is None:
            name, options = self._rule()
            rule = {"optimizer": name, "optimizer_options": options, "dynamic": self.network.dynamic}
            with mock.patch.object(verification, "check", side_effect=verification.check) as check:
                result, self._reached = following.export(task.model, task.loss, self._batch(task, 0), path, **rule)
            self.exported = result, check.call_args_list[0].args[1:]
        return self.exported

    def _step(self, task: networks.Task, folder: Path) -> dict[str, Any]:
        path = folder / "step.onnx"
        begin, processor = time.perf_counter(), time.process_time()
        result, _ = self._export(task, path)
        way: dict[str, Any] = {
            "export_seconds": round(time.perf_counter() - begin, 1),
            "export_processor_seconds": round(time.process_time() - processor, 1),
            "nodes": sum(1 for _ in result.model.graph),
            "verification": result.verification.status,
        }
        if result.verification.status != "passed":
            way["reason"] = result.verification.summary(folds=False)[:400]
        batch = self._batch(task, 0)
        session_options = onnxruntime.SessionOptions()
        session_options.intra_op_num_threads = 1
        session_options.log_severity_level = 4
        session = bnexport.TrainingSession(path, session_options=session_options)
        way |= self._compared(task, session, folder)
        session.load_checkpoint(path.with_suffix(".safetensors"))
        arrays = [tensor.numpy() for tensor in batch]
        eager, ours = _alternately(_eager(task.model, task.loss, batch, *self._rule()), lambda: session.step(arrays))
        return way | {"eager_ms": eager, "ms": ours, "ratio": round(ours / eager, 3)}

    def _compared(self, task: networks.Task, session: Any, folder: Path) -> dict[str, Any]:
        """status: right or wrong, and the errors of each seed."""
        initial = _state_of(session, folder)
        found, worst = [], {}
        for seed in range(SEEDS):
            session.load_checkpoint(folder / "step.safetensors")
            batch = self._batch(task, seed)
            loss = session.step([tensor.numpy() for tensor in batch])
            states = {key: self._torch(task, initial, batch, getattr(torch, key)) for key in ("float32", "float64")}
            found.append(
                self._errors({**states, "ours": {**_state_of(session, folder), "loss": np.array(loss)}}, worst)
            )
        followed = [] if settled(found) else [self._followed(task, session, folder, seed) for seed in range(SEEDS)]
        wrong = [
            (name, float(f"{error:.3g}"), float(f"{allowed:.3g}"))
            for name, values in worst.items()
            for error, allowed in [tuple(statistics.median(each) for each in zip(*values))]
            if not error <= allowed
        ]
        return {
            "status": "wrong" if wrong else judged(found, followed),
            "errors": [[float(f"{value:.3g}") for value in each] for each in found],
            **({"followed": [[float(f"{value:.3g}") for value in each] for each in followed]} if followed else {}),
            **({"wrong": wrong[:8]} if wrong else {}),
        }

    def _followed(self, task: networks.Task, session: Any, folder: Path, seed: int) -> list[float]:
        """The errors of all gradients, ours and float32's, each from a float64 that follows it at kinks."""
        session.load_checkpoint(folder / "step.safetensors")
        initial, batch = _state_of(session, folder), self._batch(task, seed)
        session.step([tensor.numpy() for tensor in batch])
        recorder = Recorder()
        states = _state_of(session, folder), self._torch(task, initial, batch, torch.float32, recorder)
        reached = self._reached(initial, batch), [value.numpy() for value in recorder.values]
        errors = []
        for state, values in zip(states, reached):
            exact = self._torch(task, initial, batch, torch.float64, Follower(values, batch))
            off, size = self._distances(state, exact), self._distances(None, exact)
            errors.append(_total(off) / max(_total(size), 1e-300))
        return errors

    def _distances(self, state: Named | None, exact: Named) -> dict[str, float]:
        """Of each tensor of gradients from float64's; from zero without a state."""
        names = [name for name in exact if name.endswith(_GRADIENTS[self.network.optimizer])]
        return {name: float(np.linalg.norm(exact[name] - (0 if state is None else state[name]))) for name in names}

    def _torch(
        self,
        task: networks.Task,
        state: Named,
        batch: tuple[torch.Tensor, ...],
        dtype: torch.dtype,
        at_kinks: Kinks | None = None,
    ) -> Named:
        """A step of torch itself; dropout draws our masks. In float64 the state comes from float32 at first."""
        seed = torch.from_numpy(np.array(state.get("seed", 0)))
        with at_kinks or contextlib.nullcontext(), SeededDropout(seed):
            result = torch_step(task.model, task.loss, *self._rule(), state, batch, dtype)
        return {**result, "seed": seed.numpy() + 1}

    def _errors(self, states: dict[str, Named], worst: dict[str, list[tuple[float, float]]]) -> list[float]:
        """The errors of gradients and loss, ours and float32's; in `worst` each tensor's with what is allowed."""
        exact = states["float64"]
        ours, own, norms = (self._distances(state, exact) for state in (states["ours"], states["float32"], None))
        size = _total(norms)
        for name, norm in norms.items():
            allowed = max(OWN_ERRORS * own[name], OF_A_TENSOR * norm) + OF_ALL * size
            worst.setdefault(name, []).append((ours[name], allowed))
        loss = exact["loss"]
        of_loss = [float(abs(states[key]["loss"] - loss) / max(abs(loss), 1e-30)) for key in ("ours", "float32")]
        return [*(_total(each) / max(size, 1e-300) for each in (ours, own)), *of_loss]

    def _faults(self, task: networks.Task, folder: Path) -> dict[str, Any]:
        """found: what verification says to a step with a wrong gradient, by kind and place."""
        result, reference = self._export(task, folder / "step.onnx")
        found = {}
        for kind in faults.KINDS:
            for seed in range(FAULTS):
                wrong = faults.planted(result.model, reference[0].problem.trainable, kind, seed)
                if wrong is not None:
                    found[f"{kind} {seed}"] = verification.check(wrong, *reference).status
        return {"status": "right", "unchanged": result.verification.status, "found": found}

    def _compile(self, task: networks.Task, folder: Path) -> dict[str, Any]:
        batch = self._batch(task, 0)
        begin = time.process_time()
        step = _eager(task.model, task.loss, batch, *self._rule(), compiled=True)
        step()
        seconds = time.process_time() - begin
        eager, own = _alternately(_eager(task.model, task.loss, batch, *self._rule()), step)
        return {"status": "right", "seconds": round(seconds, 1), "ratio": round(own / eager, 3)}


def settled(found: Errors) -> bool:
    """Whether the median error of the gradients is within OWN_ERRORS of torch's."""
    errors, own, *_ = zip(*found)
    return statistics.median(errors) <= max(OWN_ERRORS * statistics.median(own), FLOOR)


def judged(found: Errors, followed: Errors = ()) -> str:
    """right or wrong, by the errors of gradients, torch's own, and those of the loss, for each seed.

    followed: the first two, from a float64 that goes the way of each at a ReLU whose input is zero but for rounding; they decide
    where the others do not say "right". The loss is one number, which may be right by chance: the largest error of torch's counts.
    """
    _, _, of_loss, own_loss = zip(*found)
    right = settled(found) or bool(followed and settled(followed))
    return "right" if right and statistics.median(of_loss) <= max(OWN_ERRORS * max(own_loss), FLOOR) else "wrong"


def _total(norms: dict[str, float]) -> float:
    return math.hypot(*norms.values())


def _state(model: nn.Module) -> Named:
    return {**{name: value.numpy() for name, value in model.state_dict().items()}, "optimizer.step": np.array(0)}


def _state_of(session: Any, folder: Path) -> Named:
    """All state of a session, with aliases."""
    session.save_checkpoint(folder / "now.safetensors", overwrite=True)
    return {**model_io.load_tensors(folder / "now.safetensors")[0], **session.state_dict()}


def _eager(
    model: nn.Module,
    loss: networks.Loss,
    batch: tuple[torch.Tensor, ...],
    optimizer: str,
    options: dict[str, float],
    compiled: bool = False,
) -> Callable[[], Any]:
    own = copy.deepcopy(model)
    rule = OPTIMIZERS[optimizer](own.parameters(), **options)
    called = torch.compile(own) if compiled else own

    def step() -> float:
        rule.zero_grad()
        value = loss(called(*batch[:-1]), batch[-1])
        value.backward()
        rule.step()
        return value.item()

    return step


def _alternately(*functions: Callable[[], Any], samples: int = 5, seconds: float = 0.15) -> list[float]:
    """Milliseconds of processor time of each, one thread: medians of runs in turn, each of as many calls as take `seconds`,
    since the clock may tick in 4 ms.
    """

    def timed(function: Callable[[], Any], calls: int) -> float:
        start = time.process_time()
        for _ in range(calls):
            function()
        return time.process_time() - start

    for function in functions:
        function()
    calls = [max(1, math.ceil(seconds * 3 / max(timed(function, 3), 1e-3))) for function in functions]
    times = [[timed(function, count) / count for function, count in zip(functions, calls)] for _ in range(samples)]
    return [round(1e3 * statistics.median(own), 2) for own in zip(*times)]


warnings.filterwarnings("ignore")
