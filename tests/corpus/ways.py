"""The ways of bnexport, each compared with the untouched network: right, or refused by name.

Each way builds the network twice: one goes through bnexport, the other stays as it is and says what is
right, in the same mode, on the same input.
"""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from torch import nn

import bnexport
from bnexport import tolerances
from bnexport.errors import BnexportError, NotConvertedWarning
from tests.corpus.modules import Case


class Wrong(AssertionError):
    """A result that differs from the untouched network's, or an error that names nothing."""


def outcome(case: Case, way: str, folder: Path) -> str:
    """ "right" or "refused"; Wrong otherwise."""
    try:
        WAYS[way](case, folder)
    except BnexportError as error:
        if case.dtype != torch.bfloat16:  # onnxruntime's own refusal, which names types
            _require_a_name(case, error)
        return "refused"
    return "right"


def _require_a_name(case: Case, error: BnexportError) -> None:
    named = [(path, type(module).__name__) for path, module in case.make().named_modules()]
    words = {path for path, _ in named if path} | {name for _, name in named}
    if not any(word in str(error) for word in words):
        raise Wrong(f"the error names no module and no class: {error}")


def inputs(case: Case, seed: int = 5, rows: int | None = None) -> torch.Tensor:
    shape = (rows or case.shape[0], *case.shape[1:])
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 1.5 + 0.5
    return values.to(torch.float32 if case.dtype == torch.bfloat16 else case.dtype)


def assert_close(name: str, got, expected, case: Case, scale: float = 0.0) -> None:
    """Within the bound of whole models; scale: a size to take it from, where it is larger than the values."""
    got, expected = (np.asarray(_array(value), np.float64) for value in (got, expected))
    if got.shape != expected.shape:
        raise Wrong(f"{name}: got shape {got.shape}, expected {expected.shape}")
    kind = str(case.dtype).removeprefix("torch.")
    # eps and momentum are float32 attributes in ONNX.
    bound = tolerances.model(kind, np.append(expected, scale)).atol + (1e-7 if kind == "float64" else 0.0)
    bound = max(bound, 1e-6 if kind == "float32" else 0.0)  # values that cancel to nothing
    worst = float(np.abs(got - expected).max(initial=0.0))
    if not worst <= bound:
        raise Wrong(f"{name}: differs by {worst:.3g}, allowed {bound:.3g}")


def _array(value):
    return (
        value.detach().float().numpy()
        if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16
        else (value.detach().numpy() if isinstance(value, torch.Tensor) else value)
    )


def _state(net: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: value.clone()
        for name, value in net.state_dict().items()
        if not isinstance(value, nn.parameter.UninitializedTensorMixin)
    }


def _restore(net: nn.Module, state: dict[str, torch.Tensor]) -> None:
    for name, value in net.state_dict().items():
        value.copy_(state[name])


def _compare_state(got: dict, expected: dict, case: Case) -> None:
    for name, value in expected.items():
        if name not in case.replaced and name in got:
            assert_close(name, got[name], value, case)


def _train_and_evaluate(net: nn.Module, case: Case) -> dict[str, torch.Tensor]:
    """Outputs, gradients and state of two training forwards and backwards, and of an evaluation."""
    results = {}
    for step in range(2):
        x = inputs(case, seed=step).requires_grad_()
        y = net(x)
        net.zero_grad()
        (y.double() * torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view(y.shape)).sum().backward()
        results |= {f"output {step}": y.detach(), f"gradient {step}": x.grad}
        results |= {
            f"gradient {step} of {name}": parameter.grad.clone()
            for name, parameter in net.named_parameters()
            if parameter.grad is not None and name not in case.replaced
        }
    results |= {name: value for name, value in _state(net).items() if name not in case.replaced}
    net.eval()
    with torch.no_grad():
        results["evaluation"] = net(inputs(case))
    return results


def convert(case: Case, folder: Path) -> None:
    net, untouched = case.make(), case.make()
    modes = [module.training for module in net.modules()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        converted = bnexport.convert_sync_batchnorm(net)
    texts = [str(one.message) for one in caught if issubclass(one.category, NotConvertedWarning)]
    for path in case.left:
        if not any(path in text for text in texts):
            raise Wrong(f"{path} was left, and no warning names it: {texts}")
    if texts and not case.left:
        raise Wrong(f"a warning for a network that is converted whole: {texts}")
    if not case.other_modules and [module.training for module in converted.modules()] != modes:
        raise Wrong("conversion changed a mode")
    _compare_runs(converted, untouched, case)


def revert(case: Case, folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NotConvertedWarning)
        back = bnexport.revert_sync_batchnorm(bnexport.convert_sync_batchnorm(case.make()))
    _compare_runs(back, case.make(), case)


def _compare_runs(net: nn.Module, untouched: nn.Module, case: Case) -> None:
    got, expected = _train_and_evaluate(net, case), _train_and_evaluate(untouched, case)
    largest = max(float(value.abs().max()) for name, value in expected.items() if "gradient" in name)
    for name, value in expected.items():
        if name in got:
            # A bias in front of a batch norm has no gradient but rounding errors.
            scale = largest if "gradient" in name else 0.0
            assert_close(name, got[name], value, case, scale)
        elif "gradient" not in name and not case.other_modules:
            raise Wrong(f"{name}: missing")


def _export(exporter: str, mode: str, training: bool) -> Callable[[Case, Path], None]:
    def way(case: Case, folder: Path) -> None:
        net, untouched = case.make(), case.make()
        if not training:
            net.eval(), untouched.eval()
        before, modes = _state(net), [module.training for module in net.modules()]
        path = folder / "m.onnx"
        # Verification would find what is wrong; here each graph has to be right by itself. onnxruntime on CPUs has no
        # convolution and no batch norm in bfloat16: there a file that nothing can run is refused by verification.
        verify = case.dtype == torch.bfloat16
        bnexport.export(net, inputs(case), path, mode=mode, exporter=exporter, verify=verify)
        _require_untouched(net, before, modes)
        session = bnexport.InferenceSession(path) if mode == "custom_op" else onnxruntime.InferenceSession(path)
        if mode == "deploy":
            untouched.eval()
        start = copy.deepcopy(_state(untouched))
        for rows in (case.shape[0], case.shape[0] + 2):
            x = inputs(case, seed=rows, rows=rows)
            outputs = [value.name for value in session.get_outputs()]
            got = dict(zip(outputs, session.run(None, {session.get_inputs()[0].name: x.numpy()})))
            with torch.no_grad():
                _restore(untouched, start)
                assert_close("output", got["output"], untouched(x), case)
            after = _state(untouched)
            changed = {name for name, value in after.items() if not torch.equal(value, start[name])}
            for name in changed:
                if f"{name}.new" not in got and not _is_an_alias(untouched, name, got):
                    raise Wrong(f"{name}: the forward changes it, and the graph does not return it")
            new = {name.removesuffix(".new"): value for name, value in got.items() if name.endswith(".new")}
            _compare_state(new, after, case)

    return way


def _is_an_alias(net: nn.Module, name: str, got: dict) -> bool:
    buffers = dict(net.named_buffers(remove_duplicate=False))
    return any(buffers.get(other) is buffers[name] and f"{other}.new" in got for other in buffers)


def _require_untouched(net: nn.Module, before: dict, modes: list[bool]) -> None:
    after = _state(net)
    if [module.training for module in net.modules()] != modes:
        raise Wrong("the given network's modes changed")
    for name, value in before.items():
        if not torch.equal(value, after[name]):
            raise Wrong(f"{name}: changed in the given network")


def training_step(case: Case, folder: Path) -> None:
    net, untouched = case.make(), case.make()
    before, modes = _state(net), [module.training for module in net.modules()]
    x = inputs(case)
    with torch.no_grad():
        target = torch.zeros_like(case.make()(x))
    loss = nn.functional.mse_loss
    options = {"lr": 0.1, "momentum": 0.9}
    path = folder / "s.onnx"
    bnexport.export_training_step(net, loss, (x, target), path, optimizer_options=options, verify=False)
    _require_untouched(net, before, modes)
    session = bnexport.TrainingSession(path)
    optimizer = torch.optim.SGD(untouched.parameters(), **options)
    for step in range(2):
        x = inputs(case, seed=step, rows=case.shape[0] + step)
        y = untouched(x)
        value = loss(y, torch.zeros_like(y))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        got = session.step((x.numpy(), np.zeros(tuple(y.shape), y.detach().numpy().dtype)))
        assert_close(f"loss {step}", np.array(got), value, case)
    state = session.state_dict()
    missing = [name for name in _state(untouched) if name not in state]
    if missing:
        raise Wrong(f"{missing[0]}: not in the state")
    _compare_state(state, _state(untouched), case)
    untouched.eval()
    x = inputs(case)
    with torch.no_grad():
        y = untouched(x)
    got = session.evaluate((x.numpy(), np.zeros(tuple(y.shape), y.numpy().dtype)))
    assert_close("evaluation", np.asarray(got.outputs["output"]), y, case)


def fold_module(case: Case, folder: Path) -> None:
    net, untouched = case.make(), case.make()
    before, modes = _state(net), [module.training for module in net.modules()]
    folded = bnexport.fold_module(net, inputs(case), verify=False)
    _require_untouched(net, before, modes)
    untouched.eval()
    with torch.no_grad():
        for rows in (case.shape[0], case.shape[0] + 2):
            x = inputs(case, seed=rows, rows=rows)
            assert_close("output", folded(x), untouched(x), case)


EXPORTS = {
    f"{exporter}-{mode}-{'train' if training else 'eval'}": _export(exporter, mode, training)
    for exporter in ("dynamo", "torchscript")
    for mode in ("deploy", "custom_op")
    for training in (True, False)
}
WAYS: dict[str, Callable[[Case, Path], None]] = {
    "convert": convert,
    "revert": revert,
    "fold_module": fold_module,
    "training_step": training_step,
    **EXPORTS,
}
