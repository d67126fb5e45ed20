"""The torch operators, on compiled kernels and on torch's operations; their numbers are in tests/custom_ops/test_numbers.py."""

import ctypes
import itertools
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bnexport.errors import UsageError
from bnexport.native import cuda
from bnexport.sync_bn import kernels, operators, torch_operations
from tests.support import kernel_reference

LOCAL = ("", 1, "exact", "local", 0)


@pytest.fixture(params=["kernels", "torch"])
def backend(request, monkeypatch):
    if request.param == "torch":
        monkeypatch.setattr(kernels, "backend", "torch")
    elif not kernels.usable(torch.device("cpu")):
        pytest.fail("the compiled library is not installed")
    return request.param


@pytest.mark.parametrize(
    "mask", [[True, False, False], [False, True, False], [False, False, True], [False, True, True]], ids=str
)
def test_only_needed_gradients(backend, mask):
    x, dy = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    *_, mean, invstd = operators.sync_batch_norm(x, None, None, None, None, True, 0.1, 1e-5, *LOCAL)
    full = operators.sync_batch_norm_backward(dy, x, None, mean, invstd, True, [True] * 3, *LOCAL)
    part = operators.sync_batch_norm_backward(dy, x, None, mean, invstd, True, mask, *LOCAL)
    for one, two, needed in zip(full, part, mask):
        assert torch.equal(one, two) if needed else two.numel() == 0


def test_gradients_of_fixed_statistics_that_need_no_rows_of_others(backend):
    x, dy = torch.randn(2, 3, 2, 4, dtype=torch.float64)
    w, mean, invstd = torch.randn(2, dtype=torch.float64), torch.tensor([0.5, -1.0]), torch.tensor([0.5, 1.5])
    engine = torch_operations if backend == "torch" else kernels.kernels_for(x)
    arguments = (dy, x, w, mean.double(), invstd.double(), False)
    want = kernel_reference.backward(*arguments[:5], training=False)
    row = engine.backward_row(*arguments[:2], *arguments[3:5], "exact")
    for mask, reduction, rows in (([True] * 3, "local", (row, None)), ([True, False, False], "mean", (None, None))):
        got = engine.backward(*arguments, mask, "exact", reduction, *rows)
        for one, other, needed in zip(got, (want.grad_input, want.grad_weight, want.grad_bias), mask, strict=True):
            assert (one is not None) == needed
            if needed:
                torch.testing.assert_close(one, torch.from_numpy(other))


def _looks(tensors):
    return [(tensor.shape, tensor.dtype, tensor.stride()) for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("given", [True, False], ids=["all vectors", "no vectors"])
def test_fakes_look_like_the_results(backend, dtype, given):
    """Of each operator, whatever is absent or not needed."""
    S = torch.float64 if dtype == torch.float64 else torch.float32
    x, dy = torch.randn(2, 4, 3, 5, dtype=dtype), torch.randn(2, 4, 3, 5, dtype=dtype)
    vector = torch.ones(3, dtype=S).abs() if given else None
    x, dy = x.transpose(1, 2), dy.transpose(1, 2)  # memory that an output does not have
    with FakeTensorMode() as mode:
        fake_x, fake_dy = mode.from_tensor(x), mode.from_tensor(dy)
        fake_vector = None if vector is None else mode.from_tensor(vector)
    forward = operators.sync_batch_norm(x, *[vector] * 4, True, 0.1, 1e-5, *LOCAL)
    fakes = operators.sync_batch_norm(fake_x, *[fake_vector] * 4, True, 0.1, 1e-5, *LOCAL)
    assert _looks(fakes) == _looks(forward)
    real, fake = (dy, x, vector, *forward[3:]), (fake_dy, fake_x, fake_vector, *fakes[3:])
    for mask in itertools.product([True, False], repeat=3):
        got = operators.sync_batch_norm_backward(*fake, True, list(mask), *LOCAL)
        assert _looks(got) == _looks(operators.sync_batch_norm_backward(*real, True, list(mask), *LOCAL))
    twice = torch.ops.bnexport.sync_batch_norm_double_backward.default
    got = twice(fake_dy, None, None, *fake, True, *LOCAL)
    assert _looks(got)[2] == _looks(twice(dy, None, None, *real, True, *LOCAL))[2]


def test_a_gradient_of_nothing_is_none():
    x, dy = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    *_, mean, invstd = operators.sync_batch_norm(x.detach(), None, None, None, None, True, 0.1, 1e-5, *LOCAL)
    _, dw, _ = operators.sync_batch_norm_backward(dy, x, None, mean, invstd, True, [True, False, False], *LOCAL)
    assert torch.autograd.grad(dw.sum(), (dy, x), allow_unused=True) == (None, None)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
def test_gradcheck(backend, training, affine):
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    vectors = [torch.randn(2, dtype=torch.float64, requires_grad=True) for _ in range(2)] if affine else []
    mean, var = torch.randn(2, dtype=torch.float64), torch.rand(2, dtype=torch.float64) + 0.5

    def function(x, w=None, b=None):
        return operators.sync_batch_norm(x, mean, var, w, b, training, 0.1, 1e-5, *LOCAL)[0]

    assert torch.autograd.gradcheck(function, (x, *vectors))
    assert torch.autograd.gradgradcheck(function, (x, *vectors))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_opcheck(backend, training):
    x = torch.randn(3, 2, 4, requires_grad=True)
    w, b = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    torch.library.opcheck(
        operators.sync_batch_norm, (x, torch.zeros(2), torch.ones(2), w, b, training, 0.1, 1e-5, *LOCAL)
    )
    *_, mean, invstd = operators.sync_batch_norm(x.detach(), None, None, None, None, True, 0.1, 1e-5, *LOCAL)
    arguments = (torch.randn(3, 2, 4), x.detach(), w.detach(), mean, invstd, training, [True, True, True], *LOCAL)
    torch.library.opcheck(operators.sync_batch_norm_backward, arguments)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.zeros(3)}, "input: got rank 1"),
        ({"input": torch.zeros(2, 3, dtype=torch.int32)}, "input: got torch.int32"),
        ({"weight": torch.zeros(2)}, r"weight: got shape \(2,\), expected \(3,\)"),
        ({"running_var": torch.zeros(3, dtype=torch.float64)}, "running_var: got torch.float64"),
        ({"training": False}, "running_mean and running_var: got None"),
        ({"stats_mode": "mean"}, "stats_mode: got 'mean'"),
        ({"grad_reduction": "max"}, "grad_reduction: got 'max'"),
        ({"input": torch.zeros(1, 3)}, "Expected more than 1 value per channel"),
    ],
)
def test_bad_input(change, message):
    arguments = {
        "input": torch.zeros(2, 3), "running_mean": None, "running_var": None, "weight": None, "bias": None, "training": True,
        "momentum": 0.1, "eps": 1e-5, "group": "", "group_size": 1, "stats_mode": "exact", "grad_reduction": "local", "layer": 0,
    }  # fmt: skip
    with pytest.raises(UsageError, match=message):
        operators.sync_batch_norm(*(arguments | change).values())


def test_the_kernels_run_in_the_openmp_runtime_that_torch_links():
    """Whatever other runtimes are loaded before: their threads would fight torch's for the cores."""
    script = (
        "import sklearn.metrics, torch, ctypes\n"
        "from bnexport.sync_bn import kernels\n"
        "address = kernels._openmp_parallel()\n"
        "for line in open('/proc/self/maps'):\n"
        "    first, last = (int(part, 16) for part in line.split()[0].split('-'))\n"
        "    if first <= address < last: print(line.split()[-1])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "omp" in done.stdout
    assert "sklearn" not in done.stdout and "scikit_learn" not in done.stdout


def test_addresses_reach_the_system_whole():
    """ctypes would cut what it takes for an int to 32 bits."""
    assert kernels._madvise() is None or kernels._madvise().argtypes[:2] == (ctypes.c_void_p, ctypes.c_size_t)


def test_kernels_are_used_on_a_cuda_device_that_they_support(monkeypatch):
    """Without a device: the way to the decision."""
    device = torch.device("cuda", 1)
    monkeypatch.setattr(kernels, "_sees_devices", lambda: True)
    for error, used in ((None, True), (cuda.NoKernelsError("no code for it"), False)):

        def check(index, error=error):
            if error is not None:
                raise error

        monkeypatch.setattr(kernels, "_has_kernels", {})
        monkeypatch.setattr(cuda, "check_device", check)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert kernels.usable(device) == kernels.usable(device) == used
        told = [str(one.message) for one in caught]
        assert told == ([] if used else ["sync batch norm on cuda:1 uses torch's own operations: no code for it"])
    for name in ("_is_loaded", "_sees_devices"):
        with monkeypatch.context() as context:
            context.setattr(kernels, name, lambda: False)
            assert not kernels.usable(device)
    assert not kernels.usable(torch.device("meta"))
