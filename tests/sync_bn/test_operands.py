"""The torch operators refuse wrong operands before a kernel reads them; a slow test runs this file under AddressSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bnexport import SyncBatchNorm
from bnexport.errors import UsageError
from bnexport.sync_bn import kernels

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
CASES = [
    (name, operand, change)
    for name in NAMES
    for operand, tensor in valid(name)[0].items()
    for change, _ in changes(operand, tensor)
]


@pytest.mark.parametrize("backend", ["", "torch"], ids=["kernels", "torch"])
@pytest.mark.parametrize("name", NAMES)
def test_every_wrong_operand_is_refused_by_name(name, backend, monkeypatch):
    monkeypatch.setattr(kernels, "backend", backend)
    call(name, *valid(name))
    for operand, change in [case[1:] for case in CASES if case[0] == name]:
        tensors, rest = valid(name)
        tensors[operand] = dict(changes(operand, tensors[operand]))[change]
        with pytest.raises(UsageError) as caught:
            call(name, tensors, rest)
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
    ],
)
@pytest.mark.parametrize("backend", ["", "torch"], ids=["kernels", "torch"])
def test_numbers_out_of_range(backend, change, message, monkeypatch):
    monkeypatch.setattr(kernels, "backend", backend)
    tensors, rest = valid("sync_batch_norm")
    names = ("training", "momentum", "eps", "group", "group_size", "stats_mode", "grad_reduction", "layer")
    with pytest.raises(UsageError, match=message):
        call("sync_batch_norm", tensors, (dict(zip(names, rest)) | change).values())


def test_saved_statistics_that_are_strided_views_are_read_as_they_are():
    tensors, rest = valid("sync_batch_norm_backward")
    want = call("sync_batch_norm_backward", tensors, rest)
    tensors["saved_mean"] = torch.stack([tensors["saved_mean"], torch.zeros(C).double()], dim=1)[:, 0]
    assert not tensors["saved_mean"].is_contiguous()
    for got, expected in zip(call("sync_batch_norm_backward", tensors, rest), want, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_opcheck_of_gradients(name, training):
    tensors, rest = valid(name)
    rest = tuple(training if each is True else each for each in rest)
    torch.library.opcheck(getattr(torch.ops.bnexport, name).default, (*tensors.values(), *rest))


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
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", __file__, *files]
    done = subprocess.run(command, check=False, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "AddressSanitizer" not in done.stderr, done.stdout[-4000:] + done.stderr[-4000:]
