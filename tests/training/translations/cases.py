"""Operators and their gradients in ONNX Runtime against torch in float64, many in one graph.

A case is a function of tensors. The graph of a group of cases computes each function's outputs and
the gradients of cos(y) summed over all its outputs y, by every floating-point input; tracing it once
for all cases makes a case cost milliseconds. The batch is dynamic and differs from the traced one.

A call is an overload with its arguments: a translation by itself, without tracing.

Bound: twice the error that torch has in float32, and at least that of a few roundings of the largest
value (tolerances.forward).
"""

import dataclasses
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import torch
from onnxscript import evaluator, opset18
from torch._dynamo.source import ConstantSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import symbolic_shapes
from torch.fx.experimental.proxy_tensor import make_fx
from torch.onnx._internal.exporter._building import OpRecorder

import bnexport
from bnexport import tolerances
from bnexport.training import contract, dropout
from bnexport.training.translations import decompositions, translation_table
from bnexport.training.translations.resampling import Interpolation
from tests.support.modules import compose

Tensor = torch.Tensor
Shape = Sequence[int | str] | Callable[[int], Tensor]
TRACED_BATCH, BATCH, CALL_BATCH = 3, 5, 3


@dataclasses.dataclass(frozen=True)
class Case:
    """`function` of inputs by shape: "N" stands for the batch size. A callable makes an input of a batch size itself."""

    name: str
    function: Callable[..., Any]
    shapes: tuple[Shape, ...]

    def make(self, batch: int) -> list[Tensor]:
        return [
            shape(batch) if callable(shape) else torch.randn([batch if size == "N" else int(size) for size in shape])
            for shape in self.shapes
        ]

    @property
    def batched(self) -> list[bool]:
        """Which inputs have the batch in dimension 0."""
        return [callable(shape) or "N" in shape for shape in self.shapes]


def case(name: str, function: Callable[..., Any], *shapes: Shape) -> Case:
    return Case(name, function, shapes)


def integers(below: int, *shape: int | str) -> Callable[[int], Tensor]:
    return lambda batch: torch.randint(0, below, [batch if size == "N" else int(size) for size in shape])


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


def export(cases: Sequence[Case], standard_ops_only: bool = True) -> onnx.ModelProto:
    """One graph that computes `results` of all cases, one after another."""
    inputs = [x for case in cases for x in case.make(TRACED_BATCH)]
    batched = [flag for case in cases for flag in case.batched]

    def joint(*flat: Tensor) -> list[Tensor]:
        rest, outputs = iter(flat), []
        with Interpolation():
            for case in cases:
                outputs += results(case.function, list(itertools.islice(rest, len(case.shapes))))
        return outputs

    batch = torch.export.Dim("batch", min=2, max=4096)
    shapes = tuple({0: batch} if dynamic else None for dynamic in batched)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        record = make_fx(joint, decompositions(), tracing_mode="symbolic", _allow_non_fake_inputs=True)
        graph = record(*_fake(inputs, batched))
        graph.graph.eliminate_dead_code()
        whole = compose(lambda self, *inputs: self.recorded(*inputs), recorded=graph)
        program = torch.export.export(whole, tuple(inputs), dynamic_shapes=(shapes,), strict=False)
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


def _fake(inputs: Sequence[Tensor], batched: Sequence[bool]) -> list[Tensor]:
    """Fake inputs whose sizes are static but for the batch's."""
    mode = FakeTensorMode(shape_env=symbolic_shapes.ShapeEnv(), allow_non_fake_inputs=True)
    fakes = []
    for index, (x, dynamic) in enumerate(zip(inputs, batched)):
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


def check(cases: Sequence[Case], standard_ops_only: bool = True, library: bool = False) -> None:
    torch.manual_seed(1)
    model = export(cases, standard_ops_only)
    made = [case.make(BATCH) for case in cases]
    got = iter(run(model, [x for inputs in made for x in inputs], library))
    failures = []
    for case, inputs in zip(cases, made):
        single = results(case.function, inputs)
        exact = results(case.function, double(inputs))
        for index, (own, expected) in enumerate(zip(single, exact)):
            failures += failure(f"{case.name}, result {index}", next(got), own.numpy(), expected.numpy())
    assert not failures, "\n".join(failures)


def double(arguments: Sequence[Any]) -> list[Any]:
    return [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in arguments]


def failure(name: str, got: np.ndarray, own: np.ndarray, expected: np.ndarray) -> list[str]:
    if got.shape != expected.shape or got.dtype != own.dtype:
        return [f"{name}: got {got.dtype} {got.shape}, expected {own.dtype} {expected.shape}"]
    if expected.size == 0:
        return []
    largest = float(np.abs(expected).max())
    bound = tolerances.forward("float32", weight=largest).atol
    error, allowed = np.abs(got - expected).max(), max(bound, 2 * float(np.abs(own - expected).max()))
    return [] if error <= allowed else [f"{name}: error {error:.2e}, allowed {allowed:.2e}, largest {largest:.2e}"]


@dataclasses.dataclass(frozen=True)
class Call:
    """`arguments`: the operator's; dimension 0 of the tensors at the positions `batched` is dynamic."""

    name: str
    overload: Any
    arguments: tuple[Any, ...]
    batched: tuple[int, ...] = (0,)


def graph(calls: Sequence[Call], with_cpu_kernels: bool = False) -> tuple[onnx.ModelProto, list[Tensor]]:
    """One graph of all calls, and its inputs."""
    table = translation_table(with_cpu_kernels=with_cpu_kernels)
    tensors: list[Tensor] = []
    inputs: list[ir.Value] = []
    outputs: list[ir.Value] = []

    def value(position: int, argument: Any, call: Call) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        shape = ["batch" if index == 0 and position in call.batched else n for index, n in enumerate(argument.shape)]
        dtype = ir.DataType.FLOAT if argument.is_floating_point() else ir.DataType.INT64
        inputs.append(ir.Value(name=f"x{len(inputs)}", shape=ir.Shape(shape), type=ir.TensorType(dtype)))
        tensors.append(argument)
        return inputs[-1]

    recorder = OpRecorder(opset18, {})
    with evaluator.default_as(recorder):
        for call in calls:
            arguments = [value(position, argument, call) for position, argument in enumerate(call.arguments)]
            # An argument can be the result: a convolution with one tap and nothing to sum.
            outputs += [opset18.Identity(output) for output in _tuple(table[call.overload](*arguments))]
    for index, output in enumerate(outputs):
        output.name = f"y{index}"
    imports = {"": 18, contract.DOMAIN: contract.VERSION}
    model = ir.Model(ir.Graph(inputs, outputs, nodes=recorder.nodes, opset_imports=imports), ir_version=9)
    for index, output in enumerate(output for node in recorder.nodes for output in node.outputs):
        output.name = output.name or f"v{index}"
    return ir.to_proto(model), tensors


def check_calls(calls: Sequence[Call], with_cpu_kernels: bool = False) -> None:
    model, tensors = graph(calls, with_cpu_kernels)
    got = iter(run(model, tensors, library=True))
    failures = []
    for call in calls:
        single = _tuple(call.overload(*call.arguments))
        exact = _tuple(call.overload(*double(call.arguments)))
        for index, (own, expected) in enumerate(zip(single, exact)):
            result = next(got)
            if own is not None and expected is not None and own.numel():
                failures += failure(f"{call.name}, output {index}", result, own.numpy(), expected.numpy())
    assert not failures, "\n".join(failures)


def _tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
