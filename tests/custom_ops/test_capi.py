"""The C API through ctypes: layouts, groups without processes, threads, instruction sets, refusals."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from bnexport import tolerances
from bnexport.errors import UsageError
from bnexport.native import capi, library
from bnexport.native.library import get_library_path
from tests.support import kernel_oracle as oracle

SHAPES = [
    (4, 3, 5, 7),
    (7, 5),
    (3, 130, 6),
    (8, 64, 14, 14),
    (1, 2, 5000),
    (300, 3, 1, 1),
    (129, 5, 3),
    (2, 1, 3, 3),
    (1, 1),
    (5, 200, 2, 2),
    (3, 1100, 1, 2),
    (260, 49, 33),
]


def to_layout(x, layout):
    return np.ascontiguousarray(x if layout == "NCS" else np.moveaxis(x, 1, -1))


def from_layout(x, layout):
    return x if layout == "NCS" else np.moveaxis(x, -1, 1)


def sizes(x):
    return {"N": x.shape[0], "C": x.shape[1], "S": int(np.prod(x.shape[2:], dtype=np.int64))}


def pointer(array):
    return 0 if array is None else array.ctypes.data


def forward(x, layout="NCS", *, dtype="float32", threads=2, in_place=False, gathered=None, **options):
    S, C = oracle.statistics_dtype(dtype), x.shape[1]
    data = to_layout(x, layout)
    y = data if in_place else np.empty_like(data)
    arrays = {k: options.pop(k, None) for k in ("weight", "bias", "running_mean", "running_var")}
    new_mean, new_var, saved_mean, saved_invstd = np.empty(C, S), np.empty(C, S), np.empty(C), np.empty(C)
    has = {"running_mean_out": arrays["running_mean"] is not None, "running_var_out": arrays["running_var"] is not None}
    params = capi.forward_params(
        dtype=capi.DTYPES[dtype],
        stats_dtype=capi.DTYPES[tolerances.STATISTICS_TYPE[dtype]],
        layout=capi.LAYOUTS[layout],
        **sizes(x),
        x=pointer(data),
        y=pointer(y),
        **{k: pointer(v) for k, v in arrays.items()},
        running_mean_out=pointer(new_mean) if has["running_mean_out"] else 0,
        running_var_out=pointer(new_var) if has["running_var_out"] else 0,
        saved_mean=pointer(saved_mean),
        saved_invstd=pointer(saved_invstd),
        gathered=pointer(gathered),
        group_size=1 if gathered is None else len(gathered),
        threads=threads,
        **options,
    )
    capi.run("forward", params)
    return oracle.Forward(from_layout(y, layout), saved_mean, saved_invstd, new_mean, new_var)


def moments(x, layout="NCS", *, dtype="float32", stats_mode="exact", threads=2):
    row, data = np.empty(2 * x.shape[1] + 1), to_layout(x, layout)
    params = capi.forward_params(
        dtype=capi.DTYPES[dtype], layout=capi.LAYOUTS[layout], **sizes(x), x=pointer(data),
        stats_mode=capi.STATS_MODES[stats_mode], threads=threads,
    )  # fmt: skip
    capi.run("moments", params, pointer(row))
    return row


def backward(
    dy,
    x,
    mean,
    invstd,
    layout="NCS",
    *,
    weight=None,
    dtype="float32",
    threads=2,
    gathered=None,
    local=None,
    in_place=False,
    **options,
):
    S, C = oracle.statistics_dtype(dtype), x.shape[1]
    dy_data, x_data = to_layout(dy, layout), to_layout(x, layout)
    dx = dy_data if in_place else np.empty_like(x_data)
    dweight, dbias = np.empty(C, S), np.empty(C, S)
    params = capi.backward_params(
        dtype=capi.DTYPES[dtype],
        stats_dtype=capi.DTYPES[tolerances.STATISTICS_TYPE[dtype]],
        layout=capi.LAYOUTS[layout],
        **sizes(x),
        dy=pointer(dy_data),
        x=pointer(x_data),
        dx=pointer(dx),
        weight=pointer(weight),
        saved_mean=pointer(mean),
        saved_invstd=pointer(invstd),
        dweight=pointer(dweight),
        dbias=pointer(dbias),
        gathered=pointer(gathered),
        local_moments=pointer(local),
        group_size=1 if gathered is None else len(gathered),
        threads=threads,
        **options,
    )
    capi.run("backward", params)
    return from_layout(dx, layout), dweight, dbias


def backward_moments(dy, x, mean, invstd, layout="NCS", *, stats_mode="exact"):
    row, dy_data, x_data = np.empty(2 * x.shape[1] + 1), to_layout(dy, layout), to_layout(x, layout)
    params = capi.backward_params(
        dtype=0, layout=capi.LAYOUTS[layout], **sizes(x), dy=pointer(dy_data), x=pointer(x_data), saved_mean=pointer(mean),
        saved_invstd=pointer(invstd), stats_mode=capi.STATS_MODES[stats_mode],
    )  # fmt: skip
    capi.run("backward_moments", params, pointer(row))
    return row


@pytest.mark.parametrize("layout", ["NCS", "NSC"])
@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_both_layouts(dtype, layout):
    for index, shape in enumerate(SHAPES):
        rng = np.random.default_rng(index)
        T, S = oracle.DTYPES[dtype], oracle.statistics_dtype(dtype)
        x, dy = (rng.normal(size=shape) + 3).astype(T), rng.normal(size=shape).astype(T)
        weight, bias = rng.normal(size=shape[1]).astype(S), rng.normal(size=shape[1]).astype(S)
        got = forward(x, layout, dtype=dtype, weight=weight, bias=bias)
        want = oracle.forward([x], weight, bias)[0]
        condition = oracle.condition_of(x, want.mean, want.invstd)
        oracle.assert_within(
            got.y,
            want.y,
            tolerances.forward(dtype, condition=condition, weight=float(np.abs(weight).max())),
            f"y {shape}",
        )
        dx, dweight, dbias = backward(dy, x, got.mean, got.invstd, layout, weight=weight, dtype=dtype)
        want = oracle.backward([dy], [x], weight, got.mean, got.invstd)[0]
        scale = float(np.abs(weight * got.invstd).max() * np.abs(oracle.wide(dy)).max())
        oracle.assert_within(
            dx, want.dx, tolerances.backward_input(dtype, condition=condition, scale=scale), f"dx {shape}"
        )
        for value, exact, absolute in (
            (dweight, want.dweight, want.absolute_dweight),
            (dbias, want.dbias, want.absolute_dbias),
        ):
            bound = tolerances.backward_sum(dtype, condition=condition, absolute_sum=float(absolute.max()))
            oracle.assert_within(value, exact, bound, f"sums {shape}")


GROUPS = [
    [(3, 4, 5, 5), (3, 4, 5, 5)],
    [(1, 4, 5, 5), (6, 4, 5, 5)],
    [(2, 4, 3, 3), (2, 4, 8, 7), (5, 4, 2, 9)],
    [(0, 4, 5, 5), (3, 4, 5, 5)],
    [(0, 4, 5, 5), (2, 4, 0, 5), (3, 4, 5, 5), (1, 4, 1, 1)],
    [(0, 4, 5, 5), (0, 4, 5, 5)],
    [(2, 4, 2, 2), (0, 4, 6, 6), (4, 4, 3, 1)],
]


@pytest.mark.parametrize("shapes", GROUPS, ids=str)
@pytest.mark.parametrize("stats_mode", list(capi.STATS_MODES))
def test_groups_equal_the_joint_batch(stats_mode, shapes):
    rng = np.random.default_rng(len(shapes))
    C, G = 4, len(shapes)
    xs = [(rng.normal(size=shape) + r).astype(np.float32) for r, shape in enumerate(shapes)]
    dys = [rng.normal(size=shape).astype(np.float32) for shape in shapes]
    weight = rng.normal(size=C).astype(np.float32)
    running_mean, running_var = rng.normal(size=C).astype(np.float32), rng.random(C).astype(np.float32)
    gathered = np.stack([moments(x, stats_mode=stats_mode) for x in xs])
    mode = capi.STATS_MODES[stats_mode]
    common = {"weight": weight, "running_mean": running_mean, "running_var": running_var, "momentum": 0.3}
    want = oracle.forward(xs, **common, stats_mode=stats_mode)
    statistic = tolerances.statistic("float32", scale=float(G))
    results = [forward(x, gathered=gathered, stats_mode=mode, **common) for x in xs]
    for x, got, expected in zip(xs, results, want, strict=True):
        condition = oracle.condition_of(x, expected.mean, expected.invstd)
        oracle.assert_within(
            got.y,
            expected.y,
            tolerances.forward("float32", condition=condition, weight=float(np.abs(weight).max())),
            "y",
        )
        oracle.assert_within(got.running_mean, expected.running_mean, statistic, "running_mean")
        oracle.assert_within(got.running_var, expected.running_var, statistic, "running_var")
    mean, invstd = results[0].mean, results[0].invstd
    rows = np.stack(
        [backward_moments(dy, x, mean, invstd, stats_mode=stats_mode) for dy, x in zip(dys, xs, strict=True)]
    )
    scale = float(np.abs(weight * invstd).max() * max(np.abs(dy).max(initial=0) for dy in dys))
    for reduction, value in capi.GRAD_REDUCTIONS.items():
        want = oracle.backward(dys, xs, weight, mean, invstd, stats_mode=stats_mode, grad_reduction=reduction)
        for r in range(G):
            dx, dweight, dbias = backward(
                dys[r],
                xs[r],
                mean,
                invstd,
                weight=weight,
                gathered=rows,
                local=rows[r],
                stats_mode=mode,
                grad_reduction=value,
            )
            oracle.assert_within(
                dx, want[r].dx, tolerances.backward_input("float32", condition=G + 1.0, scale=scale), "dx"
            )
            for got, exact, absolute in (
                (dweight, want[r].dweight, want[r].absolute_dweight),
                (dbias, want[r].dbias, want[r].absolute_dbias),
            ):
                bound = tolerances.backward_sum(
                    "float32", condition=G + 1.0, absolute_sum=float(absolute.max(initial=0))
                )
                oracle.assert_within(got, exact, bound, f"sums {reduction}")


@pytest.mark.parametrize("stats_mode", list(capi.STATS_MODES))
def test_gradient_is_the_derivative(stats_mode):
    """Central differences of the whole group's loss, uneven and empty ranks included: the closed form holds in every mode."""
    rng = np.random.default_rng(0)
    shapes = [(2, 2, 3), (0, 2, 3), (3, 2, 4)]
    xs, dys = [rng.normal(size=s) + 1 for s in shapes], [rng.normal(size=s) for s in shapes]
    weight = rng.normal(size=2)

    def loss(values):
        return sum(
            float((dy * f.y).sum())
            for dy, f in zip(dys, oracle.forward(values, weight, eps=1e-3, stats_mode=stats_mode), strict=True)
        )

    statistics = oracle.forward(xs, weight, eps=1e-3, stats_mode=stats_mode)[0]
    # The loss of the group is differentiated by one rank's x, whose own share in it is what that rank's dx holds.
    want = oracle.backward(dys, xs, weight, statistics.mean, statistics.invstd, stats_mode=stats_mode)
    for r, i in ((0, (0, 0, 0)), (0, (1, 1, 2)), (2, (2, 0, 3)), (2, (0, 1, 1))):
        plus, minus = [x.copy() for x in xs], [x.copy() for x in xs]
        plus[r][i] += 1e-5
        minus[r][i] -= 1e-5
        assert (loss(plus) - loss(minus)) / 2e-5 == pytest.approx(want[r].dx[i], rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("layout", ["NCS", "NSC"])
@pytest.mark.parametrize("dtype", list(oracle.DTYPES))
def test_in_place(dtype, layout):
    rng = np.random.default_rng(1)
    for shape in [(4, 3, 5, 7), (2, 40, 21, 21), (3, 5, 2), (1, 2, 5000), (2, 70, 3, 1), (3, 6, 7, 7)]:
        x, dy = rng.normal(size=shape).astype(oracle.DTYPES[dtype]), rng.normal(size=shape).astype(oracle.DTYPES[dtype])
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
    T = oracle.DTYPES[dtype]
    for rows, C in ((700, 53), (90, 200), (5, 3)):
        mean, std = np.array([kinds[c % len(kinds)] for c in range(C)]).T
        values = rng.normal(size=(rows, C))
        values[0] = 5  # the pivot
        x = (values * std + mean).astype(T)
        dy = rng.normal(size=(rows, C)).astype(T)
        got, want = forward(x, dtype=dtype, eps=0.25), oracle.forward([x], eps=0.25)[0]
        for c in range(C):
            condition = oracle.condition_of(x[:, c : c + 1], want.mean[c : c + 1], want.invstd[c : c + 1])
            bound = tolerances.forward(dtype, condition=condition)
            oracle.assert_within(got.y[:, c], want.y[:, c], bound, f"y, column {c} of {C}")
        with_nan = x.copy()
        with_nan[rows // 2, 1], with_nan[rows - 1, C - 1] = np.nan, np.inf
        other = forward(with_nan, dtype=dtype, eps=0.25)
        assert np.isnan(oracle.wide(other.y[:, 1])).all() and np.isnan(oracle.wide(other.y[:, C - 1])).all()
        sound = [c for c in range(C) if c not in (1, C - 1)]
        assert other.y[:, sound].tobytes() == got.y[:, sound].tobytes()
        dx = backward(dy, with_nan, got.mean, got.invstd, dtype=dtype)[0]
        assert dx[:, sound].tobytes() == backward(dy, x, got.mean, got.invstd, dtype=dtype)[0][:, sound].tobytes()


@pytest.mark.parametrize("shape", [(3, 5, 40), (40, 70, 1)], ids=str)
def test_a_parameter_that_is_nan_stays_nan(shape):
    """Whatever its bits are: rounding to bfloat16 must not carry them into the sign."""
    x = np.ones(shape, oracle.DTYPES["bfloat16"])
    weight, variance = np.ones(shape[1], np.float32), np.ones(shape[1], np.float32)
    bias = np.zeros(shape[1], np.float32)
    weight.view(np.uint32)[1], bias.view(np.uint32)[2] = 0x7FFFFFFF, 0xFFFFFFFF
    for options in ({}, {"training": 0, "running_mean": bias * 0, "running_var": variance}):
        y = oracle.wide(forward(x, dtype="bfloat16", weight=weight, bias=bias, **options).y)
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


def test_tensors_past_the_shared_cache():
    """Streaming stores, on rows that are and are not multiples of a cache line."""
    rng = np.random.default_rng(3)
    for S in (4096, 4099):
        x = np.resize(rng.normal(size=(1 << 18) + 5).astype(np.float32), (12, 64, S))
        got, want = forward(x), oracle.forward([x])[0]
        oracle.assert_within(got.y, want.y, tolerances.forward("float32"), f"y {S}")


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


def test_callers_in_several_threads():
    rng = np.random.default_rng(4)
    xs = [rng.normal(size=(4, 16, 40, 40)).astype(np.float32) for _ in range(4)]
    want = [forward(x, threads=1).y.tobytes() for x in xs]
    failures = []

    def work(index):
        for _ in range(30):
            if forward(xs[index], threads=3).y.tobytes() != want[index]:
                failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


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


@pytest.mark.cpp
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_lesser_instruction_sets(isa):
    """The same tests in a process that may use less than this processor has."""
    tests = ["test_both_layouts", "test_in_place"]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-p",
        "no:cacheprovider",
        *[f"{__file__}::{test}" for test in tests],
    ]
    environment = os.environ | {"BNEXPORT_ISA": isa, "BNEXPORT_LIBRARY": get_library_path()}
    root = Path(__file__).resolve().parents[2]
    result = subprocess.run(
        command, env=environment, cwd=root, capture_output=True, text=True, timeout=600, check=False
    )
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-1000:]


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


@pytest.mark.parametrize(("change", "message"), BAD, ids=str)
def test_refusals(change, message):
    x, y, saved = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.float32), np.zeros(6)
    arguments = {
        "dtype": 0, "stats_dtype": 0, "layout": 0, "N": 2, "C": 3, "S": 4, "x": pointer(x), "y": pointer(y),
        "saved_mean": pointer(saved), "saved_invstd": pointer(saved[3:]),
    }  # fmt: skip
    with pytest.raises(UsageError, match=message):
        capi.run("forward", capi.forward_params(**(arguments | change)))


def test_refusals_of_the_gradient():
    x, saved = np.zeros((2, 3, 4), np.float32), np.zeros(6)
    arguments = {"dtype": 0, "stats_dtype": 0, "layout": 0, "N": 2, "C": 3, "S": 4, "dy": pointer(x), "x": pointer(x)}
    saved = {"saved_mean": pointer(saved), "saved_invstd": pointer(saved)}
    for change, message in [
        (saved | {"dy": 0}, r"params\.dy: got NULL"),
        ({"saved_mean": 0, "saved_invstd": 0}, r"params\.saved_mean: got NULL"),
        (saved | {"grad_reduction": 5}, r"params\.grad_reduction: got 5"),
        (saved | {"group_size": 2}, r"params\.gathered"),
    ]:
        with pytest.raises(UsageError, match=message):
            capi.run("backward", capi.backward_params(**(arguments | change)))


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
