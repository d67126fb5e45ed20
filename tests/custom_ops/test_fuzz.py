"""Random nodes, attributes and feeds, and random calls of the C API, valid and invalid: no crash, no hang, no wrong number, no
silent acceptance.

A case of batch norm knows on its own whether it must run or fail. BNEXPORT_FUZZ_CASES (default a few hundred) and
BNEXPORT_FUZZ_SEED choose how many and which; the first line of a failure names the case's seed. tests/cpp/fuzz.sh runs this under
sanitizers, where each tensor is a block of its own.
"""

import os

import numpy as np
import onnxruntime as ort
import pytest

from bnexport import schema
from bnexport.errors import UsageError
from bnexport.native import capi
from tests.custom_ops.test_bad_input import VALID
from tests.support import kernel_reference as reference
from tests.support import training_nodes
from tests.support.node_models import (
    FORWARD_INPUTS,
    FORWARD_OUTPUTS,
    GRAD_INPUTS,
    GRAD_OUTPUTS,
    echo,
    node_model,
    run,
    session,
)

CASES = int(os.environ.get("BNEXPORT_FUZZ_CASES", "400"))
SEED = int(os.environ.get("BNEXPORT_FUZZ_SEED", "0"))
BATCHES = 8
# An old ONNX Runtime cannot be fed with bfloat16.
TYPES = [
    it for it in reference.DTYPES if it != "bfloat16" or hasattr(ort.OrtValue, "ortvalue_from_numpy_with_onnx_type")
]


@capi.ALL_GATHER
def _broken(_, send, receive, count, error, capacity):
    return 1


@pytest.fixture(scope="module", autouse=True)
def groups():
    capi.register_group("echo", 2, 0, echo)
    capi.register_group("broken", 2, 0, _broken)
    yield
    capi.unregister_group("echo")
    capi.unregister_group("broken")


def pick(rng, values, weights=None):
    return values[int(rng.choice(len(values), p=weights))]


def random_shape(rng):
    kind = rng.random()
    rank = int(rng.integers(2, 6))
    if kind < 0.04:
        return tuple(int(v) for v in rng.integers(0, 4, size=int(rng.integers(0, 2))))  # rank 0 or 1: refused
    if kind < 0.12:
        return tuple(int(v) for v in rng.integers(0, 3, size=rank))  # zeros among them
    if kind < 0.2:
        return (int(rng.integers(1, 3)), int(rng.integers(1, 4)), int(rng.integers(4000, 13000)))
    if kind < 0.3:
        return (int(rng.integers(1, 200)), int(rng.integers(1, 200)))
    limit = {2: 60, 3: 24, 4: 12, 5: 6}[rank]
    return tuple(int(v) for v in rng.integers(1, limit, size=rank))


# Values of each attribute, right and wrong ones; every text may be the name of a group.
NUMBERS = {
    "momentum": ([0.0, 0.1, 0.9, 1.0], [-0.1, 1.01, float("nan"), float("inf")]),
    "eps": ([0.0, 1e-12, 1e-5, 1e-3, 10.0], [-1e-9, float("nan"), float("inf")]),
    "group": (["", "world", "echo", "broken", "x" * 5000, "näme", 0, -(2**63)], []),
    "group_size": ([1, 1, 1, 2, 2, 3], [0, -1, 2**40, 2**63 - 1, -(2**63)]),
    "training_mode": ([0, 1], [2, -1, 2**33]),
}
TEXTS, OTHER_TYPES = ["", "EXACT", "mean\0", "\N{SNOWMAN}"], [[1, 2], ["a"], [0.5]]


def random_attributes(rng, operator):
    """Attributes, and whether a session must refuse them."""
    attributes, refused = {}, False
    for attribute in operator.attributes:
        if rng.random() < 0.45:
            continue
        right, wrong = NUMBERS.get(attribute.name, (attribute.allowed, TEXTS))
        is_wrong, is_other = bool(wrong) and rng.random() < 0.025, rng.random() < 0.01
        attributes[attribute.name] = pick(rng, OTHER_TYPES if is_other else wrong if is_wrong else right)
        refused |= is_wrong or is_other
    return attributes, refused


class Case:
    def __init__(self, seed: int):
        rng = self.rng = np.random.default_rng([SEED, seed])
        self.operator = pick(rng, schema.OPERATORS)
        self.forward = self.operator is schema.SYNC_BATCH_NORM
        self.dtype = pick(rng, TYPES)
        self.shape = random_shape(rng)
        self.attributes, self.refused = random_attributes(rng, self.operator)
        self.threads = int(rng.integers(1, 4))
        self.domain = pick(rng, schema.ACCEPTED_DOMAINS)
        C = self.channels = self.shape[1] if len(self.shape) > 1 else 3
        T, S = reference.DTYPES[self.dtype], reference.statistics_dtype(self.dtype)
        self.mean, self.std = pick(rng, [(0, 1), (5, 1), (1e3, 1), (-20, 1e-3), (0, 300), (2, 0)])

        def statistic(positive=False):
            values = rng.normal(size=C)
            return (np.abs(values) + 0.1 if positive else values).astype(S)

        data, dy = rng.normal(size=self.shape) * self.std + self.mean, rng.normal(size=self.shape)
        data, dy = np.asarray(data).astype(T), np.asarray(dy).astype(T)
        self.fails = self.refused or len(self.shape) < 2
        given, names, required = (
            (FORWARD_INPUTS, FORWARD_OUTPUTS, (0,)) if self.forward else (GRAD_INPUTS, GRAD_OUTPUTS, (0, 1, 3, 4))
        )
        self.inputs = [name if i in required or rng.random() < 0.8 else "" for i, name in enumerate(given)]
        self.outputs = [name if rng.random() < 0.75 else "" for name in names]
        training = exchanges = self.attributes.get("training_mode", 1) == 1
        if self.forward:
            self.outputs[0] = "output"
            arrays = (data, statistic(), statistic(True), statistic(), statistic())
            self.fails |= not training and not all(self.inputs[1:3])
            self.fails |= any(self.outputs[i] and not self.inputs[i] for i in (1, 2))
        else:
            self.outputs[0] = self.outputs[0] or ("" if any(self.outputs) else "grad_input")
            arrays = (dy, data, statistic(), statistic(), statistic(True))
            exchanges = training or self.attributes.get("grad_reduction", "local") != "local"
            if rng.random() < 0.02:
                self.outputs[1], self.fails = "surplus", True
        self.feeds = dict(zip(given, arrays, strict=True))
        for names in (self.inputs, self.outputs):
            while names and not names[-1]:
                names.pop()
        self.group_size = self.attributes.get("group_size", 1)
        if self.group_size != 1 and exchanges:
            self.fails |= not (self.attributes.get("group", "") == "echo" and self.group_size == 2)
        used = [name for name in self.inputs if name and name not in ("input", "grad_output")]
        if used and rng.random() < 0.04:  # a statistic of another length
            self.feeds[pick(rng, used)] = np.ones(C + int(pick(rng, [-1, 1, 5])) if C else 2, S)
            self.fails = True
        if not self.forward and rng.random() < 0.03 and len(self.shape) > 1 and data.size:
            self.feeds["grad_output"] = dy[:-1]
            self.fails = True
        self.feeds = {name: self.feeds[name] for name in self.inputs if name}

    def model(self):
        ends = {"inputs": self.inputs, "outputs": self.outputs, "ranks": len(self.shape)}
        return node_model(self.operator, **ends, dtype=self.dtype, domain=self.domain, **self.attributes)

    def attribute(self, name):
        value = self.attributes.get(name, self.operator.attribute(name).default)
        return float(np.float32(value)) if isinstance(value, float) else value

    def check(self, got):
        self.check_forward(got) if self.forward else self.check_backward(got)

    def check_forward(self, got):
        feeds, training = self.feeds, self.attribute("training_mode")
        copies = 2 if self.group_size == 2 and training else 1
        options = {name: self.attribute(name) for name in ("momentum", "eps", "stats_mode")}
        vectors = [feeds.get(n) for n in ("weight", "bias", "running_mean", "running_var")]
        want = reference.group_forward([feeds["input"]] * copies, *vectors, training=training, **options)[0]
        assert got["output"].shape == self.shape
        results = {name.removesuffix("_out").removeprefix("saved_"): value for name, value in got.items()}
        old = [np.zeros(1) if vector is None else vector for vector in vectors[2:]]
        reference.check_forward(self.dtype, want, vectors[0], old, **results)

    def check_backward(self, got):
        feeds = self.feeds
        options = {name: self.attribute(name) for name in ("training_mode", "stats_mode", "grad_reduction")}
        options["training"] = options.pop("training_mode")
        exchanges = options["training"] or options["grad_reduction"] != "local"
        copies = 2 if self.group_size == 2 and exchanges else 1
        given = (feeds.get("weight"), feeds["saved_mean"], feeds["saved_invstd"])
        dy, x = feeds["grad_output"], reference.wide(feeds["input"])
        want = reference.group_backward([dy] * copies, [x] * copies, *given, **options)[0]
        # The statistics are made up, so x_hat may be large; it takes the place of 1 in the bound.
        mean, invstd = map(reference.wide, given[1:])
        x_hat = np.abs((x - reference.along(mean, x)) * reference.along(invstd, x)).max(initial=0)
        condition = 1 + float(np.max(np.abs(mean) * invstd, initial=0)) + float(x_hat) ** 2
        reference.check_backward(self.dtype, want, *given, dy, condition=condition, **got)

    def __str__(self):
        node = f"{self.operator.name} {self.dtype} {self.shape} {self.inputs} -> {self.outputs} {self.attributes}"
        return f"{node} data {self.mean} +- {self.std}"


def run_case(seed: int) -> bool:
    case = Case(seed)
    try:
        got = run(session(case.model(), threads=case.threads), case.feeds)
    except Exception as error:
        assert case.fails, f"case {SEED}/{seed}: must run, but: {error}\n{case}"
        assert case.operator.name in str(error), f"case {SEED}/{seed}: without the operator's name: {error}\n{case}"
        return False
    assert not case.fails, f"case {SEED}/{seed}: must fail, but ran\n{case}"
    try:
        case.check(got)
    except AssertionError as error:
        raise AssertionError(f"case {SEED}/{seed}: {error}\n{case}") from error
    return True


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_nodes(batch):
    ort.set_default_logger_severity(4)
    ran = [run_case(seed) for seed in range(batch, CASES, BATCHES)]
    assert any(ran) and not all(ran)


def random_window(rng):
    """Shapes and attributes that fit together, by operator of training steps."""
    rank = int(rng.integers(1, 4))
    batch, group, ins, outs = (int(it) for it in rng.integers(1, 5, 4))
    batch = 0 if rng.random() < 0.08 else batch
    kernel, stride = rng.integers(1, 4, rank), rng.integers(1, 4, rank)
    dilation, padding = rng.integers(1, 3, rank), rng.integers(0, 3, rank)
    reach = dilation * (kernel - 1) + 1
    extents = reach + rng.integers(0, 20 if rank < 3 else 4, rank)
    out = (extents + 2 * padding - reach) // stride + 1
    extents, out, kernel = extents.tolist(), out.tolist(), kernel.tolist()
    x, y, w = (batch, group * ins, *extents), (batch, group * outs, *out), (group * outs, ins, *kernel)
    lists = {"strides": stride, "pads": padding, "dilations": dilation}
    window = {name: values.tolist() for name, values in lists.items()}
    grouped, kernel_shape = {**window, "group": group}, {"kernel_shape": kernel}
    pool = {"grad_output": (batch, group * ins, *out), "input": x}
    return {
        "Conv": ({"input": x, "weight": w, "bias": (group * outs,)}, grouped),
        "ConvInputGrad": ({"grad_output": y, "weight": w}, {**grouped, "input_shape": extents}),
        "ConvWeightGrad": ({"grad_output": y, "input": x}, {**grouped, **kernel_shape}),
        **({"MaxPoolGrad": (pool, {**window, **kernel_shape})} if rank == 2 else {}),
    }


ODD = [
    0,
    -1,
    2,
    1000001,
    2**31 - 1,
    2**63 - 1,
    -(2**63),
    0.5,
    float("nan"),
    float("inf"),
    [],
    [1],
    [1] * 5,
    [2**31, 1],
    "x",
]


def run_training_case(seed: int) -> bool:
    """Most run as they are; in the others an attribute, a shape or an input is another one."""
    rng = np.random.default_rng([SEED, seed])
    name = pick(rng, list(VALID)[2:])
    operator, given, attributes = VALID[name]
    shapes = {key: value.shape for key, value in given.items()}
    shapes, attributes = random_window(rng).get(name, (shapes, attributes))
    shapes, attributes = dict(shapes), dict(attributes)
    kind, key = rng.random(), pick(rng, list(shapes))
    if kind < 0.2:
        attributes[pick(rng, list(attributes))] = pick(rng, ODD)
    elif kind < 0.4:
        shapes[key] = pick(rng, [(), (1,), (0, 2, 3), (0, 1, 2**40), (2, 1, 3, 5), tuple(it + 1 for it in shapes[key])])
    elif kind < 0.45:
        del shapes[key]
    feeds = {key: rng.random(shape, np.float32) for key, shape in shapes.items()}
    case = f"case {SEED}/{seed}: {name} {shapes} {attributes}"
    try:
        got = training_nodes.run(operator, feeds, **attributes)
    except Exception as error:
        assert kind < 0.45 or "dilations" in str(error), f"{case}: must run, but: {error}"  # with strides above 1
        assert name in str(error) or "ttribute" in str(error), (
            f"{case}: the message does not name the operator: {error}"
        )
        return False
    assert kind < 0.2 or all(np.isfinite(value).all() for value in got.values()), case
    return True


def run_capi_case(seed: int) -> bool:
    """A call of the C API whose memory is as large as its sizes say, with a field or two that are wrong."""
    rng = np.random.default_rng([SEED, seed])
    direction = pick(rng, ["forward", "backward"])
    N, C, S = (int(it) for it in rng.integers(0, 24, 3))
    group, dtype = int(rng.integers(1, 4)), pick(rng, [0, 1, 2, 3])
    stats = np.float64 if dtype == 3 else np.float32
    item = {0: np.float32, 3: np.float64}.get(dtype, np.float16)
    arrays = {name: np.full(N * C * S, 1.5, item) for name in ("x", "y" if direction == "forward" else "dy", "dx")}
    names = ("weight", "bias", "running_mean", "running_var", "running_mean_out", "running_var_out", "dweight", "dbias")
    arrays |= {name: np.ones(C, stats) for name in names}
    arrays |= {name: np.ones(C) for name in ("saved_mean", "saved_invstd")}
    arrays |= {"gathered": np.ones(group * (2 * C + 1)), "local_moments": np.ones(2 * C + 1)}
    make = capi.forward_params if direction == "forward" else capi.backward_params
    fields = [name for name, _ in make()._fields_]
    values = {name: array.ctypes.data for name, array in arrays.items() if name in fields and rng.random() < 0.9}
    values |= {"dtype": dtype, "stats_dtype": 3 if dtype == 3 else 0, "N": N, "C": C, "S": S, "group_size": group}
    values |= {"layout": int(rng.integers(2)), "training": int(rng.integers(2)), "threads": int(rng.integers(1, 4))}
    for name in rng.choice([it for it in fields if it not in ("N", "C", "S")], int(rng.integers(0, 3))):
        if name not in arrays:  # an address that is none cannot be told from one that is
            values[name] = pick(rng, [5, -1, 2**31 - 1] if "dtype" in name else [0, -1, 2, 5, 2**31 - 1])
    if rng.random() < 0.1:
        values |= {"N": int(pick(rng, [0, -1])), "S": int(pick(rng, [2**62, 2**63 - 1]))}
    row = np.empty(2 * C + 1)
    moments = {"forward": "moments", "backward": "backward_moments"}[direction]
    name, more = pick(rng, [(direction, ()), (moments, (row.ctypes.data,))])
    try:
        if values.get("group_size", 1) <= group:
            capi.run(name, make(**values), *more)
    except UsageError as error:
        assert "got" in str(error), f"case {SEED}/{seed}: {error}"
        return False
    return True


@pytest.mark.parametrize("run_one", [run_training_case, run_capi_case])
def test_random_calls(run_one):
    ran = [run_one(seed) for seed in range(CASES // 2)]
    assert any(ran) and not all(ran)
