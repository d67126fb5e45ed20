"""Operators and their gradients in ONNX Runtime against torch in float64, many in one graph.

A case is a function of tensors. The graph of a group of cases computes each function's outputs and
the gradients of cos(y) summed over all its outputs y, by every floating-point input; tracing it once
for all cases makes a case cost milliseconds. The batch is dynamic and differs from the traced one.

Bound: twice the error that torch has in float32, and at least that of a few roundings of the largest
value (tolerances.forward).
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx

import bnexport
from bnexport import tolerances
from bnexport.training import dropout
from bnexport.training.translations import decompositions, translation_table
from bnexport.training.translations.resampling import Interpolation

Tensor = torch.Tensor

TRACED_BATCH = 3
BATCH = 5


@dataclasses.dataclass(frozen=True)
class Case:
    """`function` of inputs made by `make`, a function of the batch size; `batched` says which have it in dimension 0."""

    name: str
    function: Callable[..., Any]
    make: Callable[[int], Sequence[Tensor]]
    batched: tuple[bool, ...]


def case(name: str, function: Callable[..., Any], *shapes: Sequence[int | str] | Callable[[int], Tensor]) -> Case:
    """Inputs by shape: "N" stands for the batch size. A callable makes an input of a batch size itself."""

    def make(batch: int) -> list[Tensor]:
        return [
            shape(batch) if callable(shape) else torch.randn([batch if size == "N" else int(size) for size in shape])
            for shape in shapes
        ]

    return Case(name, function, make, tuple(callable(shape) or "N" in shape for shape in shapes))


def results(function: Callable[..., Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """The function's outputs, and the gradients by its floating-point inputs."""
    leaves = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    outputs = function(*leaves)
    outputs = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    differentiable = [y for y in outputs if y.requires_grad]
    wanted = [x for x in leaves if x.is_floating_point()]
    loss = sum(y.cos().sum() for y in differentiable)
    grads = torch.autograd.grad(loss, wanted, allow_unused=True) if differentiable else []  # type: ignore[arg-type]
    return [y.detach() for y in outputs] + [g for g in grads if g is not None]


class _Joint(torch.nn.Module):
    def __init__(self, recorded: torch.nn.Module) -> None:
        super().__init__()
        self.recorded = recorded

    def forward(self, *inputs: Tensor) -> Any:
        return self.recorded(*inputs)


def export(cases: Sequence[Case], standard_ops_only: bool = True) -> onnx.ModelProto:
    """One graph that computes `results` of all cases, one after another."""
    counts = [len(case.batched) for case in cases]
    inputs = [x for case in cases for x in case.make(TRACED_BATCH)]

    def joint(*flat: Tensor) -> list[Tensor]:
        outputs, start = [], 0
        with Interpolation():
            for case, count in zip(cases, counts):
                outputs += results(case.function, flat[start : start + count])
                start += count
        return outputs

    batch = torch.export.Dim("batch", min=2, max=4096)
    shapes = tuple({0: batch} if dynamic else None for case in cases for dynamic in case.batched)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph = make_fx(joint, decompositions(), tracing_mode="symbolic", _allow_non_fake_inputs=True)(
            *_fake(inputs, cases)
        )
        graph.graph.eliminate_dead_code()
        program = torch.export.export(_Joint(graph), tuple(inputs), dynamic_shapes=(shapes,), strict=False)
        exported = torch.onnx.export(
            program,
            dynamo=True,
            custom_translation_table={**translation_table(standard_ops_only), **dropout.TRANSLATIONS},
            dynamic_shapes=(shapes,),
            input_names=[f"x{index}" for index in range(len(inputs))],
            optimize=False,
            verbose=False,
        )
    assert exported is not None
    return exported.model_proto


def _fake(inputs: Sequence[Tensor], cases: Sequence[Case]) -> list[Tensor]:
    """Fake inputs whose sizes are static but for the batch's."""
    mode = FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv(), allow_non_fake_inputs=True)
    fakes = []
    for index, (x, dynamic) in enumerate(zip(inputs, (flag for case in cases for flag in case.batched))):
        sizes = [symbolic_shapes.DimDynamic.STATIC] * x.dim()
        if dynamic:
            sizes[0] = symbolic_shapes.DimDynamic.DUCK
        context = symbolic_shapes.StatelessSymbolicContext(dynamic_sizes=sizes)
        fakes.append(mode.from_tensor(x, symbolic_context=context, source=ConstantSource(f"x{index}")))
    return fakes


def run(model: onnx.ModelProto, inputs: Sequence[Tensor], library: bool = False) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if library:
        bnexport.register(options, training=True)
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {f"x{index}": x.numpy() for index, x in enumerate(inputs)}
    return session.run(None, {value.name: feeds[value.name] for value in session.get_inputs()})


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Waiting for a second thread would take longer than these small operators do."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def check(cases: Sequence[Case], standard_ops_only: bool = True, library: bool = False) -> None:
    """Fails with a list of the cases that miss the bound."""
    torch.manual_seed(1)
    model = export(cases, standard_ops_only)
    made = [case.make(BATCH) for case in cases]
    got = iter(run(model, [x for inputs in made for x in inputs], library))
    failures = []
    for case, inputs in zip(cases, made):
        single = results(case.function, inputs)
        exact = results(case.function, [x.double() if x.is_floating_point() else x for x in inputs])
        for index, (own, expected) in enumerate(zip(single, exact)):
            failures += failure(f"{case.name}, result {index}", next(got), own.numpy(), expected.numpy())
    assert not failures, "\n".join(failures)


def failure(name: str, got: np.ndarray, own: np.ndarray, expected: np.ndarray) -> list[str]:
    if got.shape != expected.shape or got.dtype != own.dtype:
        return [f"{name}: got {got.dtype} {got.shape}, expected {own.dtype} {expected.shape}"]
    if expected.size == 0:
        return []
    largest = float(np.abs(expected).max())
    bound = tolerances.forward("float32", weight=largest).atol
    error, allowed = np.abs(got - expected).max(), max(bound, 2 * float(np.abs(own - expected).max()))
    return [] if error <= allowed else [f"{name}: error {error:.2e}, allowed {allowed:.2e}, largest {largest:.2e}"]
