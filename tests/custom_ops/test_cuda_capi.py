"""The CUDA library's C API and its loader, with the kernels on an emulated device (tests/cpp/cuda): host memory is
device memory. The same verification runs on a GPU in benchmarks/gpu.
"""

import ctypes
import dataclasses
import functools
import warnings
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from benchmarks.gpu import verify
from benchmarks.gpu.calls import DTYPES, Calls
from bnexport import torch_versions
from bnexport.cli import doctor
from bnexport.errors import LibraryError, UsageError
from bnexport.native import capi, cuda
from bnexport.native.library import CUDA_ENVIRONMENT_VARIABLE
from bnexport.schema import GRAD_REDUCTIONS
from bnexport.sync_bn import kernels


@pytest.mark.parametrize(
    ("name", "message"), [("none.so", r"none\.so', expected an existing .*make cuda"), ("text.so", "cannot be loaded")]
)
def test_a_missing_or_wrong_library_is_an_error(fresh, tmp_path, name, message):
    (tmp_path / "text.so").write_text("text")
    fresh.setenv(CUDA_ENVIRONMENT_VARIABLE, str(tmp_path / name))
    with pytest.raises(LibraryError, match=message):
        cuda.library()


def test_wrong_arguments_are_refused(emulated):
    row = 1 << 20  # an address that nobody reads
    for params, message in (
        (capi.forward_params(N=1, C=1, S=(1 << 30) + 1, x=256), r"params\.S: got 1073741825"),
        (capi.forward_params(N=1, C=1 << 31, S=1, x=256), r"params\.C: got 2147483648"),
        (capi.forward_params(N=1, C=1, S=1), r"params\.x: got NULL"),
        (capi.forward_params(N=1, C=1, S=1, dtype=9, x=256), r"params\.dtype: got 9"),
    ):
        with pytest.raises(UsageError, match=message):
            cuda.run("moments", params, row, 0, 0, 0)
    with pytest.raises(UsageError, match="row: got NULL"):
        cuda.run("moments", capi.forward_params(N=1, C=1, S=1, x=256), 0, 0, 0, 0)


def test_a_workspace_that_is_too_small_or_not_aligned_is_refused(emulated):
    x = torch.randn(2, 3, 5, 5)
    calls = Calls(x, x.clone())
    calls.size -= 256
    with pytest.raises(UsageError, match=r"bytes of the workspace: got \d+, expected \d+ or more"):
        calls.forward()
    calls.size += 256
    calls.workspace += 16
    with pytest.raises(UsageError, match="multiple of 256"):
        calls.forward()
    cuda.run("forward", capi.forward_params(N=2, C=0, S=4, x=256, y=256, saved_mean=256, saved_invstd=256), 0, 0, 0)


SMALL = ((65, 3), (5, 8, 9, 9), (2, 3, 60, 60))
LARGE = ((3, 2, 11111), (2000, 40), (2, 130, 10, 10), (9, 64, 6, 6), (7, 3, 49))


@pytest.mark.parametrize("shapes", [SMALL, pytest.param(LARGE, marks=pytest.mark.cpp)], ids=["small", "large"])
@pytest.mark.parametrize("dtype", list(DTYPES), ids=str)
def test_closed_forms(emulated, dtype, shapes):
    """Rows and columns of one part and of several, aligned or not, in place, twice in other orders of threads."""
    torch.manual_seed(3)
    for shape in shapes:
        for channels_last in (False, True) if len(shape) == 4 else (False,):
            verify.verify_all(verify.cases_of(shape, dtype, channels_last), "cpu")


@pytest.fixture
def many_multiprocessors(emulated):
    cuda.library().emulated_resize(ctypes.c_int64(160))
    yield
    cuda.library().emulated_resize(ctypes.c_int64(6))


def test_more_parts_than_a_block_has_threads(many_multiprocessors):
    for shape in [(1, 1, 300_000), (300_000, 2)]:
        calls = Calls(*(torch.randn(shape, dtype=torch.float64) + 3 for _ in range(2)))
        assert calls.size > 128 * shape[1] * 24  # bytes of the parts' moments
        calls.forward()
        calls.backward()
        verify.check(calls, verify.expected(calls), shape)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_bytes_that_move(emulated, layout):
    """In sectors of 32 bytes, each once a launch: x, x and y; then dy and x, twice, and dx."""
    library = cuda.library()
    library.emulated_traffic.argtypes, library.emulated_traffic.restype = [ctypes.c_int64], ctypes.c_int64
    x = torch.randn(4, 64, 28, 28).half().contiguous(memory_format=layout)
    calls = Calls(x, x.clone(memory_format=torch.preserve_format))
    for run, tensors in ((calls.forward, 3), (calls.backward, 5)):
        library.emulated_traffic(0)
        run()
        moved = library.emulated_traffic(-1) / (2 * x.numel())
        assert tensors <= moved < 1.03 * tensors


@pytest.fixture
def refuse(emulated):
    yield cuda.library().emulated_refuse
    cuda.library().emulated_refuse(False)


def test_doctor_says_what_a_device_gets(refuse):
    assert doctor._cuda()[0].value.endswith(", CUDA 12.9)")
    devices = doctor._cuda_devices()
    assert [(check.name, check.ok) for check in devices] == [("CUDA devices", True), ("CUDA device 0", True)]
    assert devices[1].value == "device 0: our kernels"
    refuse(True)
    (_, device) = doctor._cuda_devices()
    assert (
        device.ok is None and device.value.startswith("torch's own operations: ") and "no kernels for" in device.value
    )


@pytest.fixture
def no_memory(fresh):
    """Devices are asked for anew."""
    fresh.setattr(kernels, "_has_kernels", {})
    fresh.setattr(kernels, "_sees_devices", lambda: True)


def test_torch_s_operations_run_where_the_library_has_no_kernels(refuse, no_memory):
    device = torch.device("cuda", 0)
    refuse(True)
    with pytest.warns(RuntimeWarning, match="cuda:0 uses torch's own operations: .*no kernels for") as warned:
        assert [kernels.usable(device) for _ in range(3)] == [False] * 3
    assert len(warned) == 1
    refuse(False)
    assert not kernels.usable(device)  # for good


def test_a_device_that_fails_is_asked_again(emulated, no_memory, monkeypatch):
    device, check = torch.device("cuda", 0), cuda.check_device

    def full(index):
        raise LibraryError("CUDA: cannot use device 0: cudaErrorMemoryAllocation (out of memory)")

    monkeypatch.setattr(cuda, "check_device", full)
    with pytest.warns(RuntimeWarning, match="out of memory"):
        assert not kernels.usable(device)
        with pytest.raises(kernels._UnusableError):
            kernels._prepare(torch.Size((2, 3, 4)), (12, 4, 1), torch.float32, device)
    monkeypatch.setattr(cuda, "check_device", check)
    assert kernels.usable(device)
    assert not kernels.usable(torch.device("meta", 0))


def test_devices_of_rocm_are_not_ours(emulated, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "6.4")
    kernels._sees_devices.cache_clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not kernels._sees_devices()
    kernels._sees_devices.cache_clear()


@pytest.fixture
def device_kernels(emulated, monkeypatch):
    """What a layer calls on a device, on a tensor of the host: a function that returns its kernels."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch_versions, "cuda_stream", lambda index: 0)

    def workspace(device, stream, size):
        memory = torch.zeros(size + 256, dtype=torch.uint8)
        start = -memory.data_ptr() % 256
        return memory[start : start + size]

    monkeypatch.setattr(kernels, "_workspace", workspace)

    def of(x):
        made = kernels.kernels_for(x)
        size = cuda.workspace_size(made.forward_params)
        return dataclasses.replace(made, run=functools.partial(kernels._run_on_device, x.device, size))

    return of


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_a_layer_makes_the_same_call_on_both_devices(device_kernels, channels_last):
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, dy = (torch.randn(4, 5, 6, 6).contiguous(memory_format=layout) for _ in range(2))
    results = []
    for of in (kernels.kernels_for, device_kernels):
        layer, (mean, var, weight, bias) = of(x), torch.linspace(0.5, 2.0, 20).view(4, 5).clone()
        row = layer.forward_row(x, "N")
        y, new_mean, new_var, *saved = layer.forward(
            x, (mean, var, weight, bias), True, 0.3, 1e-3, "N", torch.stack([row, 2 * row]), in_place=True
        )
        assert new_mean is mean and new_var is var
        sums = layer.backward_row(dy, x, *saved, "N")
        rows = torch.stack([sums, 3 * sums])
        grads = [
            grad
            for reduction in GRAD_REDUCTIONS
            for grad in layer.backward(dy, x, weight, *saved, True, (True,) * 3, "N", reduction, sums, rows)
        ]
        alone = layer.forward(x, (mean, None, None, bias), True, 1.0, 0.0, "exact", None)
        fixed = layer.forward(x, (mean, var, None, bias), False, 1.0, 0.5, "exact", None)
        results.append([row, y, mean, var, *saved, sums, *grads, *(it for it in (*alone, *fixed) if it is not None)])
    for host, device in zip(*results, strict=True):
        torch.testing.assert_close(device, host, rtol=1e-5, atol=1e-5)


def test_workspaces_belong_to_a_stream_of_a_thread(monkeypatch):
    device, capturing = torch.device("cpu"), False
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(kernels, "_workspaces", kernels._Workspaces())
    first = kernels._workspace(device, 1, 100)
    assert kernels._workspace(device, 1, 50) is first
    with ThreadPoolExecutor(1) as pool:
        other_thread = pool.submit(kernels._workspace, device, 1, 100).result()
    capturing = True
    captured = kernels._workspace(device, 1, 100)
    capturing = False
    for other in (kernels._workspace(device, 2, 100), kernels._workspace(device, 1, 200), other_thread, captured):
        assert other is not first and other.data_ptr() != first.data_ptr()


CHECKS = {
    **{f"group, {mode}": functools.partial(verify.verify_group, mode) for mode in capi.STATS_MODES},
    "fixed": verify.verify_fixed,
    "absent": verify.verify_absent,
}


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("check", CHECKS)
def test_cases_beside_the_grid(emulated, check, dtype, channels_last):
    torch.manual_seed(7)
    CHECKS[check](dtype, channels_last, "cpu")


def test_verification_sees_wrong_results(emulated, monkeypatch):
    """What the benchmark relies on: one wrong value in the output, or one outside of it, is found."""
    case = verify.Case((4, 3, 8, 8), torch.float32, False)
    forward = Calls.forward
    for where in (5, 4 * 3 * 64):  # the second lies behind the tensor

        def wrong(calls, where=where):
            forward(calls)
            y = calls.at["y"]
            value = y.as_strided((1,), (1,), y.storage_offset() + where)
            value.copy_(torch.where(value.isnan(), 0.0, value + 1e-3))

        monkeypatch.setattr(Calls, "forward", wrong)
        with pytest.raises(AssertionError, match="values off" if where == 5 else "written outside"):
            verify.verify(case, "cpu")


@pytest.mark.parametrize("shape", [(5, 8, 9, 9), (2, 3, 30, 30)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
def test_saved_statistics_in_the_statistics_type(emulated, shape, channels_last):
    """The forward rounds them to it, and the backward starts from the rounded ones: the same bits as through float64."""
    layout = torch.channels_last if channels_last else torch.contiguous_format
    x, dy = (torch.randn(shape).contiguous(memory_format=layout) for _ in range(2))
    runs, saved = [], ("saved_mean", "saved_invstd")
    torch.manual_seed(5)
    vectors = {name: tensor for name, tensor in Calls(x, dy).at.items() if name in ("weight", "bias")}
    for narrow in (False, True):
        calls = Calls(x, dy)
        calls.at |= vectors
        if narrow:
            calls.at |= {name: torch.full((shape[1],), torch.nan) for name in saved}
        calls.prepare(saved_as_statistics=int(narrow))
        calls.forward()
        for name in saved if not narrow else ():
            calls.at[name].copy_(calls.at[name].float())
        calls.backward()
        runs.append([calls.at[name].float() for name in (*saved, "dx", "dweight", "dbias")])
    for wide, narrow_ in zip(*runs, strict=True):
        assert torch.equal(wide, narrow_)
        assert not narrow_.isnan().any()


def test_copies(emulated):
    loaded = cuda.library()
    values, back = np.array([1.0, 0.1]), np.zeros(2)
    from_, to = ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(back.ctypes.data)
    assert loaded.bnexport_cuda_copy(to, from_, ctypes.c_size_t(16), 1, None, None, 0) == 0
    assert back.tolist() == values.tolist()
    assert loaded.bnexport_cuda_copy(to, from_, ctypes.c_size_t(16), 2, None, None, 0) == 1
