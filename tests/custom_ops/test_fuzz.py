"""Random nodes, attributes and feeds, valid and invalid: no crash, no hang, no wrong number, no silent acceptance.

Each case knows on its own whether it must run or fail. BNEXPORT_FUZZ_CASES (default a few hundred) and
BNEXPORT_FUZZ_SEED choose how many and which; the first line of a failure names the case's seed.
"""

from __future__ import annotations

import os

import numpy as np
import onnxruntime as ort
import pytest

from bnexport import schema
from bnexport.native import capi
from tests.support import kernel_reference as reference
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


def random_attributes(rng, operator):
    """Attributes, and whether a session must refuse them."""
    attributes, refused = {}, False
    for attribute in operator.attributes:
        if rng.random() < 0.45:
            continue
        name = attribute.name
        bad = rng.random() < 0.025 and name != "group"  # every text may be the name of a group
        if name == "momentum":
            attributes[name] = float(
                pick(rng, [-0.1, 1.01, float("nan"), float("inf")] if bad else [0.0, 0.1, 0.9, 1.0])
            )
        elif name == "eps":
            attributes[name] = float(
                pick(rng, [-1e-9, float("nan"), float("inf")] if bad else [0.0, 1e-12, 1e-5, 1e-3, 10.0])
            )
        elif name == "group":
            attributes[name] = pick(rng, ["", "world", "echo", "broken", "x" * 5000, "näme", 0, -(2**63)])
        elif name == "group_size":
            attributes[name] = int(pick(rng, [0, -1, 2**40, 2**63 - 1, -(2**63)] if bad else [1, 1, 1, 2, 2, 3]))
        elif name == "training_mode":
            attributes[name] = int(pick(rng, [2, -1, 2**33] if bad else [0, 1]))
        else:
            attributes[name] = pick(rng, ["", "EXACT", "mean\0", "\N{SNOWMAN}"] if bad else list(attribute.allowed))
        refused |= bad
        if rng.random() < 0.01:  # another type altogether
            attributes[name] = pick(rng, [[1, 2], ["a"], [0.5]])
            refused = True
    return attributes, refused


class Case:
    def __init__(self, seed: int):
        rng = self.rng = np.random.default_rng([SEED, seed])
        self.operator = pick(rng, schema.OPERATORS)
        self.forward = self.operator is schema.SYNC_BATCH_NORM
        self.dtype = pick(rng, list(reference.DTYPES))
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

        data = np.asarray(rng.normal(size=self.shape) * self.std + self.mean).astype(T)
        self.fails = self.refused or len(self.shape) < 2
        if self.forward:
            self.inputs = [n if i == 0 or rng.random() < 0.8 else "" for i, n in enumerate(FORWARD_INPUTS)]
            self.outputs = [n if i == 0 or rng.random() < 0.7 else "" for i, n in enumerate(FORWARD_OUTPUTS)]
            arrays = (data, statistic(), statistic(True), statistic(), statistic())
            self.feeds = dict(zip(FORWARD_INPUTS, arrays, strict=True))
            training = self.attributes.get("training_mode", 1)
            self.fails |= not training and not (self.inputs[1] and self.inputs[2])
            self.fails |= bool(self.outputs[1] and not self.inputs[1]) or bool(self.outputs[2] and not self.inputs[2])
            exchanges = training == 1
        else:
            self.inputs = [n if i != 2 or rng.random() < 0.8 else "" for i, n in enumerate(GRAD_INPUTS)]
            self.outputs = [n if n and rng.random() < 0.8 else "" for n in GRAD_OUTPUTS]
            if not any(self.outputs):
                self.outputs[0] = "grad_input"
            if rng.random() < 0.02:
                self.outputs[1] = "surplus"
                self.fails = True
            dy = np.asarray(rng.normal(size=self.shape)).astype(T)
            self.feeds = dict(zip(GRAD_INPUTS, (dy, data, statistic(), statistic(), statistic(True)), strict=True))
            exchanges = (
                self.attributes.get("training_mode", 1) == 1
                or self.attributes.get("grad_reduction", "local") != "local"
            )
        while self.inputs and not self.inputs[-1]:
            self.inputs.pop()
        while self.outputs and not self.outputs[-1]:
            self.outputs.pop()
        self.group_size = self.attributes.get("group_size", 1)
        if self.group_size != 1 and exchanges:
            self.fails |= not (self.attributes.get("group", "") == "echo" and self.group_size == 2)
        used = [n for n in self.inputs if n and self.feeds[n].shape == (C,) and n not in ("input", "grad_output")]
        if used and rng.random() < 0.04:  # a statistic of another length
            name = pick(rng, used)
            self.feeds[name] = np.ones(C + int(pick(rng, [-1, 1, 5])) if C else 2, S)
            self.fails = True
        if not self.forward and rng.random() < 0.03 and len(self.shape) > 1 and data.size:
            self.feeds["grad_output"] = self.feeds["grad_output"][:-1]
            self.fails = True
        self.feeds = {name: self.feeds[name] for name in self.inputs if name}

    def model(self):
        return node_model(
            self.operator,
            inputs=self.inputs,
            outputs=self.outputs,
            dtype=self.dtype,
            domain=self.domain,
            ranks=len(self.shape),
            **self.attributes,
        )

    def attribute(self, name):
        value = self.attributes.get(name, self.operator.attribute(name).default)
        return float(np.float32(value)) if isinstance(value, float) else value

    def check(self, got):
        if self.forward:
            self.check_forward(got)
        else:
            self.check_backward(got)

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
        assert case.operator.name in str(error), (
            f"case {SEED}/{seed}: the message does not name the operator: {error}\n{case}"
        )
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
