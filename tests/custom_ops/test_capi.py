"""The C API through ctypes: columns of every kind, in place, threads, refusals. tests/cpp has shapes, tests/sync_bn groups."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import sys

import numpy as np
import pytest

from bnexport import tolerances
from bnexport.errors import UsageError
from bnexport.native import capi, library
from tests.support import kernel_reference as reference


def to_layout(x, layout):
    return np.ascontiguousarray(x if layout == "NCS" else np.moveaxis(x, 1, -1))


def from_layout(x, layout):
    return x if layout == "NCS" else np.moveaxis(x, -1, 1)


def call(name, row=(), **values):
    """Call a function of the C API. Arrays become their addresses; sizes and types are those of x."""
    arrays = {key: value for key, value in values.items() if isinstance(value, np.ndarray)}
    make = capi.backward_params if name.startswith("backward") else capi.forward_params
    capi.run(name, make(**values | {key: value.ctypes.data for key, value in arrays.items()}), *row)


def common(x, layout, dtype, **more):
    types = {"dtype": capi.DTYPES[dtype], "stats_dtype": capi.DTYPES[tolerances.STATISTICS_TYPE[dtype]]}
    sizes = {"N": x.shape[0], "C": x.shape[1], "S": int(np.prod(x.shape[2:], dtype=np.int64))}
    return types | sizes | {"layout": capi.LAYOUTS[layout], "x": to_layout(x, layout), "threads": 2} | more


def of_group(gathered):
    return {} if gathered is None else {"gathered": gathered, "group_size": len(gathered)}


@dataclasses.dataclass
class Results:
    y: np.ndarray
    mean: np.ndarray
    invstd: np.ndarray


def forward(x, layout="NCS", *, dtype="float32", in_place=False, gathered=None, **options):
    S, C = reference.statistics_dtype(dtype), x.shape[1]
    values = common(x, layout, dtype, **of_group(gathered), **options)
    y = values["x"] if in_place else np.empty_like(values["x"])
    new = {f"{name}_out": np.empty(C, S) for name in ("running_mean", "running_var") if name in options}
    mean, invstd = np.empty(C), np.empty(C)
    call("forward", **values, y=y, saved_mean=mean, saved_invstd=invstd, **(new if options.get("training", 1) else {}))
    return Results(from_layout(y, layout), mean, invstd)


def moments(x, layout="NCS"):
    row = np.empty(2 * x.shape[1] + 1)
    call("moments", (row.ctypes.data,), **common(x, layout, "float32"))
    return row


def backward(dy, x, mean, invstd, layout="NCS", *, dtype="float32", in_place=False, gathered=None, **options):
    S, C = reference.statistics_dtype(dtype), x.shape[1]
    values = common(x, layout, dtype, dy=to_layout(dy, layout), **of_group(gathered), **options)
    dx = values["dy"] if in_place else np.empty_like(values["x"])
    dweight, dbias = np.empty(C, S), np.empty(C, S)
    call("backward", **values, dx=dx, saved_mean=mean, saved_invstd=invstd, dweight=dweight, dbias=dbias)
    return from_layout(dx, layout), dweight, dbias


@pytest.mark.parametrize("layout", ["NCS", "NSC"])
@pytest.mark.parametrize("dtype", list(reference.DTYPES))
def test_in_place(dtype, layout):
    rng = np.random.default_rng(1)
    for shape in [(4, 3, 5, 7), (2, 40, 21, 21), (3, 5, 2), (1, 2, 5000), (2, 70, 3, 1), (3, 6, 7, 7)]:
        x, dy = (
            rng.normal(size=shape).astype(reference.DTYPES[dtype]),
            rng.normal(size=shape).astype(reference.DTYPES[dtype]),
        )
        apart, same = forward(x, layout, dtype=dtype), forward(x.copy(), layout, dtype=dtype, in_place=True)
        assert apart.y.tobytes() == same.y.tobytes()
        statistics = apart.mean, apart.invstd
        apart, same = (
            backward(dy, x, *statistics, layout, dtype=dtype),
            backward(dy.copy(), x, *statistics, layout, dtype=dtype, in_place=True),
        )
        assert apart[0].tobytes() == same[0].tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])  # the oracle itself is in double
def test_columns_of_every_kind_side_by_side(dtype):
    """Constant, huge, tiny and far from zero, with a bad pivot, infinite or NaN: each as if it were alone."""
    rng = np.random.default_rng(7)
    kinds = [(0.0, 0.0), (7.0, 0.0), (0.0, 1.0), (300.0, 1.0)]
    if dtype != "float16":
        kinds += [(0.0, 1e20), (0.0, 1e-20), (-1e4, 1e3)]
    T = reference.DTYPES[dtype]
    for rows, C in ((700, 53), (90, 200), (5, 3)):
        mean, std = np.array([kinds[c % len(kinds)] for c in range(C)]).T
        values = rng.normal(size=(rows, C))
        values[0] = 5  # the pivot
        x = (values * std + mean).astype(T)
        dy = rng.normal(size=(rows, C)).astype(T)
        got = forward(x, dtype=dtype, eps=0.25)
        for c in range(C):
            reference.check_forward(dtype, reference.forward(x[:, c : c + 1], eps=0.25), output=got.y[:, c : c + 1])
        with_nan = x.copy()
        with_nan[rows // 2, 1], with_nan[rows - 1, C - 1] = np.nan, np.inf
        other = forward(with_nan, dtype=dtype, eps=0.25)
        assert np.isnan(reference.wide(other.y[:, 1])).all() and np.isnan(reference.wide(other.y[:, C - 1])).all()
        sound = [c for c in range(C) if c not in (1, C - 1)]
        assert other.y[:, sound].tobytes() == got.y[:, sound].tobytes()
        dx = backward(dy, with_nan, got.mean, got.invstd, dtype=dtype)[0]
        assert dx[:, sound].tobytes() == backward(dy, x, got.mean, got.invstd, dtype=dtype)[0][:, sound].tobytes()


@pytest.mark.parametrize("shape", [(3, 5, 40), (40, 70, 1)], ids=str)
def test_a_parameter_that_is_nan_stays_nan(shape):
    """Whatever its bits are: rounding to bfloat16 must not carry them into the sign."""
    x = np.ones(shape, reference.DTYPES["bfloat16"])
    weight, variance = np.ones(shape[1], np.float32), np.ones(shape[1], np.float32)
    bias = np.zeros(shape[1], np.float32)
    weight.view(np.uint32)[1], bias.view(np.uint32)[2] = 0x7FFFFFFF, 0xFFFFFFFF
    for options in ({}, {"training": 0, "running_mean": bias * 0, "running_var": variance}):
        y = reference.wide(forward(x, dtype="bfloat16", weight=weight, bias=bias, **options).y)
        assert np.isnan(y[:, 1:3]).all() and np.isfinite(y[:, [0, 3, 4]]).all()


@pytest.mark.parametrize("layout", ["NCS", "NSC"])
def test_same_bits_for_any_number_of_threads_and_any_strategy(layout):
    """The number of threads changes the strategy (groups of channels or two passes), never a bit; nor does the group path."""
    rng = np.random.default_rng(2)
    for shape in [(8, 24, 28, 28), (2, 3, 200, 200), (16, 300, 3, 3), (4, 600, 7, 7), (70, 2, 33), (300, 1100, 1)]:
        x, dy = rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32)
        first = forward(x, layout, threads=1)
        row = moments(x, layout)
        gathered = np.stack([row, np.zeros_like(row)])  # a second, empty process
        alone = backward(dy, x, first.mean, first.invstd, layout, threads=1)
        for threads in (2, 3, 8, 64):
            other = forward(x, layout, threads=threads)
            assert first.y.tobytes() == other.y.tobytes() and first.invstd.tobytes() == other.invstd.tobytes(), (
                shape,
                threads,
            )
            together = backward(dy, x, first.mean, first.invstd, layout, threads=threads)
            assert all(a.tobytes() == b.tobytes() for a, b in zip(alone, together, strict=True)), (shape, threads)
        assert first.y.tobytes() == forward(x, layout, gathered=gathered).y.tobytes()


@pytest.fixture(scope="module", autouse=True)
def lent():
    """Lend torch's threads to the calls that ask for more than one; a function that does so again."""
    from bnexport.sync_bn import kernels

    def lend():
        capi.lend_openmp(kernels._openmp_parallel())

    lend()
    return lend


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_without_threads_that_are_lent_the_caller_does_it_alone(lent):
    x = np.random.default_rng(6).normal(size=(4, 16, 40, 40)).astype(np.float32)
    want, before = forward(x, threads=2).y.tobytes(), len(os.listdir("/proc/self/task"))
    capi.lend_openmp(0)
    try:
        assert forward(x, threads=64).y.tobytes() == want
    finally:
        lent()
    assert len(os.listdir("/proc/self/task")) == before


def _child(x, queue):
    queue.put(forward(x, threads=2).y.tobytes())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_after_a_fork():
    x = np.random.default_rng(5).normal(size=(4, 16, 40, 40)).astype(np.float32)
    want = forward(x, threads=2).y.tobytes()  # the parent's threads exist now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(x, queue), daemon=True)
    child.start()
    assert queue.get(timeout=300) == want
    child.join(timeout=300)
    assert child.exitcode == 0


BAD = [
    ({"dtype": 4}, r"params\.dtype: got 4, expected 0 to 3"),
    ({"stats_dtype": 1}, r"params\.stats_dtype: got 1"),
    ({"layout": 2}, r"params\.layout: got 2"),
    ({"N": -1}, r"params\.N, C, S: got -1, 3, 4"),
    ({"N": 2**40, "S": 2**40}, r"params\.N, C, S: got .* product is below 2\^60"),
    ({"x": 0}, r"params\.x: got NULL"),
    ({"y": 0}, r"params\.y: got NULL"),
    ({"threads": 0}, r"params\.threads: got 0, expected 1 to 1024"),
    ({"eps": -1.0}, r"params\.eps: got -1"),
    ({"momentum": 2.0}, r"params\.momentum: got 2"),
    ({"training": 2}, r"params\.training: got 2"),
    ({"training": 0}, r"params\.running_mean \(training is 0\): got NULL"),
    ({"stats_mode": 3}, r"params\.stats_mode: got 3"),
    ({"group_size": 0}, r"params\.group_size: got 0"),
    ({"group_size": 2}, r"params\.gathered \(group_size > 1\): got NULL"),
    ({"running_var_out": 8}, r"params\.running_var \(running_var_out is set\): got NULL"),
]


BAD_GRADIENTS = [
    ({"dy": 0}, r"params\.dy: got NULL"),
    ({"saved_mean": 0}, r"params\.saved_mean: got NULL"),
    ({"grad_reduction": 5}, r"params\.grad_reduction: got 5"),
    ({"group_size": 2}, r"params\.gathered"),
]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [*(("forward", *bad) for bad in BAD), *(("backward", *bad) for bad in BAD_GRADIENTS)],
    ids=str,
)
def test_refusals(name, change, message):
    x, saved = np.zeros((2, 3, 4), np.float32), np.zeros(3)
    given = {"y": x.copy()} if name == "forward" else {"dy": x.copy()}
    with pytest.raises(UsageError, match=message):
        call(name, **common(x, "NCS", "float32", **given, saved_mean=saved, saved_invstd=saved) | change)


def test_group_registration():
    callback = capi.ALL_GATHER(lambda *_: 0)
    for size, rank in ((0, 0), (2, 2), (2, -1)):
        with pytest.raises(UsageError, match=r"size|rank"):
            capi.register_group("somewhere", size, rank, callback)
    capi.register_group("somewhere", 2, 1, callback)
    capi.unregister_group("somewhere")
    with pytest.raises(UsageError, match="'somewhere'"):
        capi.unregister_group("somewhere")


def test_names():
    assert capi.instruction_set() in ("baseline", "avx2", "avx512")
    assert library.version("ops")
