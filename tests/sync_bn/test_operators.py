"""The torch operators, on compiled kernels and on torch's operations; their numbers are in tests/custom_ops/test_numbers.py.

They refuse wrong operands before a kernel reads them; a slow test runs this file under AddressSanitizer.
"""

import ctypes
import itertools
import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch._subclasses import FakeTensorMode

from bnexport import SyncBatchNorm
from bnexport.errors import UsageError
from bnexport.native import cuda
from bnexport.sync_bn import kernels, operators, torch_operations
from tests.support import kernel_reference

ROOT = Path(__file__).parents[2]
LOCAL = ("", 1, "exact", "local", 0)
N, C, S = 4, 6, 5


def valid(name):
    """Return the tensors of a call by name, and the arguments after them."""
    x, dy, vector = torch.randn(N, C, S), torch.randn(N, C, S), torch.rand(C) + 0.5
    saved = {"saved_mean": vector.double(), "saved_invstd": vector.double()}
    tensors = {
        "sync_batch_norm": {"input": x, "running_mean": vector, "running_var": vector, "weight": vector, "bias": vector},
        "sync_batch_norm_backward": {"grad_output": dy, "input": x, "weight": vector, **saved},
        "sync_batch_norm_double_backward": {
            "grad_grad_input": dy, "grad_grad_weight": vector, "grad_grad_bias": vector, "grad_output": dy, "input": x,
            "weight": vector, **saved,
        },
    }  # fmt: skip
    rest = {"sync_batch_norm": (True, 0.1, 1e-5), "sync_batch_norm_backward": (True, [True] * 3)}
    return tensors[name], (*rest.get(name, (True,)), *LOCAL)


def call(name, tensors, rest):
    return getattr(torch.ops.bnexport, name).default(*tensors.values(), *rest)


def changes(operand, tensor):
    """Yield names and results of changes that no operator takes."""
    yield "meta", tensor.to("meta")
    yield "sparse", tensor.to_sparse()
    yield "scalar", tensor.flatten()[0]
    yield "rank", tensor[None]
    for axis, size in enumerate(tensor.shape):
        if operand == "input" and axis != 1:
            continue
        for other in (0, 1, size - 1, size + 1):
            yield f"axis {axis} of {other}", tensor.new_ones([*tensor.shape[:axis], other, *tensor.shape[axis + 1 :]])
    wrong = [torch.int32, torch.bool, torch.complex64]
    if operand in ("grad_output", "grad_grad_input", "saved_mean", "saved_invstd"):
        wrong += {torch.float16, torch.bfloat16, torch.float32, torch.float64} - {tensor.dtype}
    elif operand != "input":
        wrong.append(torch.float64)
    for dtype in wrong:
        yield str(dtype), tensor.to(dtype)


NAMES = ["sync_batch_norm", "sync_batch_norm_backward", "sync_batch_norm_double_backward"]


@pytest.mark.parametrize("backend", ["", "torch"], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_every_wrong_operand_is_refused_by_name(name, backend, monkeypatch):
    monkeypatch.setattr(kernels, "backend", backend)
    call(name, *valid(name))
    tensors, rest = valid(name)
    for operand, tensor in tensors.items():
        for change, wrong in changes(operand, tensor):
            with pytest.raises(UsageError) as caught:
                call(name, tensors | {operand: wrong}, rest)
            # A wrong input is told by the first operand that does not fit it.
            assert operand == "input" or str(caught.value).startswith(f"{operand}: "), (operand, change)


def test_a_device_that_differs_is_told_as_torch_tells_it():
    tensors, rest = valid("sync_batch_norm")
    tensors["weight"] = tensors["weight"].to("meta")
    with pytest.raises(UsageError, match=r"Expected all tensors to be on the same device, .* cpu .* meta"):
        call("sync_batch_norm", tensors, rest)
    with pytest.raises(UsageError, match="Expected all tensors to be on the same device"):
        SyncBatchNorm(C, device="meta")(torch.randn(N, C, S))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"group_size": 0}, "group_size: got 0"),
        ({"momentum": float("nan")}, "momentum: got nan"),
        ({"eps": -1.0}, "eps: got -1.0"),
        ({"stats_mode": "mean"}, "stats_mode: got 'mean'"),
        ({"grad_reduction": "max"}, "grad_reduction: got 'max'"),
        ({"training": False, "running_mean": None, "running_var": None}, "running_mean and running_var: got None"),
        ({"input": torch.zeros(1, C)}, "Expected more than 1 value per channel"),
    ],
)
@pytest.mark.parametrize("backend", ["", "torch"], ids=["kernels", "torch"])
def test_other_wrong_arguments(backend, change, message, monkeypatch):
    monkeypatch.setattr(kernels, "backend", backend)
    tensors, rest = valid("sync_batch_norm")
    names = ("training", "momentum", "eps", "group", "group_size", "stats_mode", "grad_reduction", "layer")
    with pytest.raises(UsageError, match=message):
        torch.ops.bnexport.sync_batch_norm(*(tensors | dict(zip(names, rest)) | change).values())


def test_saved_statistics_that_are_strided_views_are_read_as_they_are():
    tensors, rest = valid("sync_batch_norm_backward")
    want = call("sync_batch_norm_backward", tensors, rest)
    tensors["saved_mean"] = torch.stack([tensors["saved_mean"], torch.zeros(C).double()], dim=1)[:, 0]
    assert not tensors["saved_mean"].is_contiguous()
    for got, expected in zip(call("sync_batch_norm_backward", tensors, rest), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("backend", ["", "torch"], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_opcheck(name, training, backend, monkeypatch):
    monkeypatch.setattr(kernels, "backend", backend)
    tensors, rest = valid(name)
    trained = ("input", "weight", "bias") if name == NAMES[0] else ()
    tensors = [tensor.clone().requires_grad_(operand in trained) for operand, tensor in tensors.items()]
    rest = [training if each is True else each for each in rest]
    torch.library.opcheck(getattr(torch.ops.bnexport, name).default, (*tensors, *rest))


# The short path of eager mode.


def test_a_view_that_negates_is_read_as_it_looks():
    x = torch.randn(N, C, S)
    module, plain = SyncBatchNorm(C), torch.nn.BatchNorm1d(C)
    for given in (torch._neg_view(x), torch.randn(N, C, S, dtype=torch.complex64).conj().imag.contiguous()):
        torch.testing.assert_close(module(given), plain(given))
    module.running_mean = torch._neg_view(torch.ones(C))
    plain.running_mean = -torch.ones(C)
    torch.testing.assert_close(module(x), plain(x))
    torch.testing.assert_close(module.running_mean.resolve_neg(), plain.running_mean)
    torch.testing.assert_close(module.eval()(x), plain.eval()(x))


@pytest.mark.parametrize("name", ["weight", "bias", "running_mean", "running_var"])
def test_a_vector_whose_memory_was_freed_is_no_absent_one(name):
    module = SyncBatchNorm(C)
    getattr(module, name).untyped_storage().resize_(0)
    with pytest.raises(UsageError, match=r"\(6,\) without memory"):
        module(torch.randn(N, C, S))


@pytest.mark.parametrize("name", ["weight", "input"])
def test_data_that_is_exchanged_after_the_forward(name):
    """Autograd does not see it."""
    module, x = SyncBatchNorm(C), torch.randn(N, C, S, requires_grad=True)
    y = module(x)
    if name == "weight":
        module.weight.data = torch.ones(1)
    else:
        x.data = torch.ones(1, C, S)
    with pytest.raises(UsageError, match=r"weight: got shape \(1,\)|grad_output: got shape \(4, 6, 5\)"):
        y.sum().backward()


@pytest.mark.slow
def test_sanitized(tmp_path):
    """With the libraries built for AddressSanitizer: no operand is read past its end, on an emulated device either."""
    build, flags = tmp_path / "library", ["-DBNEXPORT_CUDA=OFF", "-DBNEXPORT_SANITIZE=address,undefined"]
    subprocess.run(["cmake", "-S", ROOT, "-B", build, "-G", "Ninja", *flags], check=True, capture_output=True)
    subprocess.run(["cmake", "--build", build, "--target", "bnexport_ops"], check=True, capture_output=True)
    runtimes = [
        subprocess.run(["gcc", f"-print-file-name={name}"], check=True, capture_output=True, text=True).stdout.strip()
        for name in ("libasan.so", "libubsan.so")
    ]
    environment = os.environ | {
        "BNEXPORT_LIBRARY": str(build / "libbnexport_ops.so"),
        "BNEXPORT_EMULATED_FLAGS": "-fsanitize=address,undefined -fno-sanitize-recover=undefined -g",
        "LD_PRELOAD": " ".join(runtimes),
        "ASAN_OPTIONS": "detect_leaks=0:allocator_may_return_null=1",
    }
    files = [ROOT / f"tests/custom_ops/test_{name}.py" for name in ("numbers", "cuda_capi")]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        "not slow",
        "-k",
        "not openmp",
        __file__,
        *files,
    ]
    done = subprocess.run(command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "AddressSanitizer" not in done.stderr, done.stdout[-4000:] + done.stderr[-4000:]


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
