"""The C API through ctypes: what it refuses. Its numbers: tests/custom_ops/test_numbers.py, tests/cpp; groups: tests/sync_bn."""

import numpy as np
import pytest

from bnexport.errors import UsageError
from bnexport.native import capi, library

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
    x, y, saved = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.float32), np.zeros(3)
    addresses = {"x": x, "y" if name == "forward" else "dy": y, "saved_mean": saved, "saved_invstd": saved}
    make = capi.forward_params if name == "forward" else capi.backward_params
    given = {"N": 2, "C": 3, "S": 4, **{key: value.ctypes.data for key, value in addresses.items()}}
    with pytest.raises(UsageError, match=message):
        capi.run(name, make(**given | change))


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
