"""Folds without a report: those of other tools, as they compute them, and what is no fold."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from benchmarks import fold_models, foreign_folds
from bnexport import verify
from bnexport.errors import UsageError
from bnexport.folding import fold
from bnexport.model_io import to_proto
from bnexport.verification.proof import weights
from bnexport.verification.verdict import Verification
from tests.support.onnx_text import batch_norm, model

BODY = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {
    a = Conv <pads=[1,1,1,1], kernel_shape=[3,3]> (x, u)
    r = Relu (a)
    z = Conv (r, w)
    n = BatchNormalization (z, p_s, p_b, p_m, p_v)
    y = Relu (n)
}"""
SHAPES = {"u": (6, 6, 3, 3), "w": (8, 6, 3, 3), **batch_norm("p", 8)}


def array_of(proto: onnx.ModelProto, name: str) -> np.ndarray:
    return onnx.numpy_helper.to_array(next(it for it in proto.graph.initializer if it.name == name))


OTHER = """g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ {} copy = Identity (x)
    v1 = Conv <pads=[1,1,1,1], dilations=[1,1], group=1> (copy, u) v2 = Relu (v1)
    v3 = Conv <strides=[1,1]> (v2, folded, shift) y = Relu (v3) }}"""


def foreign(source: onnx.ModelProto, dtype: type = np.float32) -> onnx.ModelProto:
    """The second Conv and the batch norm as one Conv, computed in `dtype`, with names and defaults of its own."""
    scale, bias, mean, var, weight = (
        array_of(source, name).astype(dtype) for name in ("p_s", "p_b", "p_m", "p_v", "w")
    )
    factor = scale / np.sqrt(var + dtype(1e-5))
    values = {"folded": weight * factor[:, None, None, None], "shift": bias - mean * factor, "u": array_of(source, "u")}
    return model(OTHER.format(""), values={name: value.astype(np.float32) for name, value in values.items()})


def with_initializer(proto: onnx.ModelProto, name: str, array: np.ndarray) -> onnx.ModelProto:
    changed = copy.deepcopy(proto)
    next(it for it in changed.graph.initializer if it.name == name).CopyFrom(onnx.numpy_helper.from_array(array, name))
    return changed


def marks(verdict: Verification) -> list[tuple[str, str]]:
    return [(proof.site, proof.method) for proof in verdict.sites]


class TestForeign:
    SOURCE = model(BODY, SHAPES)

    def test_it_is_proved(self) -> None:
        for dtype in (np.float32, np.float64):
            verdict = verify(self.SOURCE, foreign(self.SOURCE, dtype), method="local")
            assert (verdict.status, marks(verdict)) == ("passed", [("BatchNormalization -> n", "proved")])
            assert verdict.sites[0].bound < 1e-6

    def test_whole_models_run_as_well(self) -> None:
        verdict = verify(self.SOURCE, foreign(self.SOURCE))
        assert (verdict.status, verdict.method) == ("passed", "both")
        assert verdict.outputs
        assert marks(verdict) == [("BatchNormalization -> n", "proved")]
        assert not verify(self.SOURCE, foreign(self.SOURCE), method="whole").sites

    def test_a_weight_that_is_too_far_off_is_refuted(self) -> None:
        """32 units in the last place, which whole models do not show."""
        good = foreign(self.SOURCE)
        for name in ("folded", "shift"):
            array = array_of(good, name).copy()
            at = np.unravel_index(np.argmax(np.abs(array)), array.shape)
            array[at] += 32 * np.spacing(np.abs(array[at]))
            wrong = with_initializer(good, name, array)
            assert verify(self.SOURCE, wrong, method="whole").passed
            verdict = verify(self.SOURCE, wrong)
            assert verdict.status == "failed"
            assert "fold of BatchNormalization -> n is wrong" in verdict.reason

    def test_an_arithmetic_that_stays_in_the_graph(self) -> None:
        """As onnxoptimizer leaves it: the weight is an expression."""
        nodes = """t0 = Add (p_v, e) t1 = Sqrt (t0) t2 = Div (p_s, t1) t3 = Unsqueeze (t2, axes) folded = Mul (w, t3)
            t4 = Mul (p_m, t2) shift = Sub (p_b, t4)"""
        values = {name: array_of(self.SOURCE, name) for name in SHAPES}
        values |= {"e": np.array([1e-5], np.float32), "axes": np.array([1, 2, 3])}
        good = model(OTHER.format(nodes), values=values)
        verdict = verify(self.SOURCE, good, method="local")
        assert (verdict.status, marks(verdict)) == ("passed", [("BatchNormalization -> n", "proved")]), verdict

    def test_an_unchanged_model_has_no_folds(self) -> None:
        verdict = verify(self.SOURCE, self.SOURCE, method="local")
        assert (verdict.status, verdict.sites) == ("passed", ())

    def test_a_weight_outside_is_no_fold(self) -> None:
        """It is another model, perhaps on purpose; running both says how far it is off."""
        wrong = with_initializer(foreign(self.SOURCE), "u", array_of(self.SOURCE, "u") * np.float32(1.001))
        verdict = verify(self.SOURCE, wrong, method="local")
        assert verdict.status == "not_verified"
        assert "nothing was folded there" in verdict.reason
        result = verify(self.SOURCE, wrong)
        assert result.status == "failed"
        assert verify(self.SOURCE, wrong, atol=2 * result.max_abs_diff).passed

    def test_a_scale_that_the_next_layer_takes_back(self) -> None:
        """It passes the Relu, so that one region holds both layers."""
        changed = with_initializer(foreign(self.SOURCE), "u", array_of(self.SOURCE, "u") * np.float32(2.0))
        wrong = with_initializer(changed, "folded", array_of(changed, "folded") * np.float32(0.25))
        changed = with_initializer(changed, "folded", array_of(changed, "folded") * np.float32(0.5))
        verdict = verify(self.SOURCE, changed, method="local")
        assert (verdict.status, marks(verdict)) == ("passed", [("BatchNormalization -> n", "proved")]), verdict
        assert verify(self.SOURCE, wrong, method="local").status == "not_verified"

    def test_a_guess_above_what_is_proved_refutes_nothing(self) -> None:
        """Behind padding the Conv takes the scale alone; the other output is equal in a way that no lemma knows."""
        text = "g (float[N,6,H,W] x) => (float[N,8,H,W] y, float[N,6,H,W] z) {{ {} }}"
        source = model(
            text.format("""n = BatchNormalization (x, p_s, p_b, p_m, p_v)
            y = Conv <pads = [1, 1, 1, 1]> (n, w)
            a = BatchNormalization (x, q_s, q_b, q_m, q_v)
            z = Softplus (a)"""),
            {"w": (8, 6, 3, 3), **batch_norm("p", 6), **batch_norm("q", 6)},
        )
        factors, shifts = {}, {}
        for name in "pq":
            scale, bias, mean, var = (array_of(source, f"{name}_{each}").astype(np.float64) for each in "sbmv")
            factors[name] = scale / np.sqrt(var + 1e-5)
            shifts[name] = (bias - mean * factors[name]).reshape(-1, 1, 1)
        values = {
            "t": shifts["p"] / factors["p"].reshape(-1, 1, 1),
            "u": array_of(source, "w") * factors["p"].reshape(-1, 1, 1),
            "k": factors["q"].reshape(-1, 1, 1),
            "h": np.exp(shifts["q"]),
            "e": np.ones(()),
        }
        values = {name: array.astype(np.float32) for name, array in values.items()}
        body = text.format("""n = Add (x, t)
            y = Conv <pads = [1, 1, 1, 1]> (n, u)
            b = Mul (x, k)
            c = Exp (b)
            g = Mul (c, h)
            d = Add (g, e)
            z = Log (d)""")
        verdict = verify(source, model(body, values=values), method="local")
        assert verdict.status == "not_verified", verdict
        assert "wrong" not in verdict.reason

    def test_two_wrong_folds_on_one_path(self) -> None:
        """Each may be meant for the other."""
        body = """g (float[N,6,H,W] x) => (float[N,6,A,B] y) {
            a = Conv (x, u)
            n = BatchNormalization (a, p_s, p_b, p_m, p_v)
            r = Relu (n)
            z = Conv (r, v)
            y = BatchNormalization (z, p_s, p_b, p_m, p_v)
        }"""
        source = model(body, {"u": (6, 6, 3, 3), "v": (6, 6, 3, 3), **batch_norm("p", 6)})
        good = to_proto(fold(source, verify=False).model)
        assert verify(source, good, method="local").passed
        names = [node.input[1] for node in good.graph.node if node.op_type == "Conv"]
        one = with_initializer(good, names[0], array_of(good, names[0]) * np.float32(2))
        assert verify(source, one, method="local").status == "failed"
        both = with_initializer(one, names[1], array_of(good, names[1]) / np.float32(2))
        verdict = verify(source, both, method="local")
        assert verdict.status == "not_verified"
        assert [method for _, method in marks(verdict)] == ["not_run", "not_run"]

    def test_another_difference_is_no_fold(self) -> None:
        changed = foreign(self.SOURCE)
        changed.graph.node[2].op_type = "Sigmoid"
        verdict = verify(self.SOURCE, changed, method="local")
        assert verdict.status == "not_verified"
        assert "v2 (Sigmoid)" in verdict.reason
        assert verify(self.SOURCE, changed).status == "failed"

    def test_an_input_that_is_gone(self) -> None:
        """Parameters that a caller may give, made constant."""
        source = copy.deepcopy(self.SOURCE)
        source.graph.input.append(onnx.helper.make_tensor_value_info("p_b", 1, [8]))
        assert verify(source, foreign(self.SOURCE), method="local").status == "not_verified"

    @pytest.mark.parametrize("method", [True, "some"])
    def test_an_unknown_method(self, method: object) -> None:
        with pytest.raises(UsageError, match='expected "local", "whole" or "both"'):
            verify(self.SOURCE, self.SOURCE, method=method)  # type: ignore[arg-type]


def test_a_wrong_axis_is_refuted() -> None:
    """What ONNX Runtime 1.31 makes of it: the map is along the rows, the weight took it along its columns."""
    source = model(
        """g (float[8,6] x) => (float[8,8] y) {
            t = MatMul (x, w)
            z = Transpose <perm=[1,0]> (t)
            y = BatchNormalization (z, p_s, p_b, p_m, p_v)
        }""",
        {"w": (6, 8), **batch_norm("p", 8)},
    )
    right = to_proto(fold(source, verify=False).model)
    assert verify(source, right, method="local").passed
    values = {name: array_of(source, name) for name in ("p_s", "p_b", "p_m", "p_v")}
    factor = values["p_s"] / np.sqrt(values["p_v"] + np.float32(1e-5))
    wrong = model(
        "g (float[8,6] x) => (float[8,8] y) { t = MatMul (x, w)\n z = Transpose <perm=[1,0]> (t)\n y = Add (z, b) }",
        values={
            "w": array_of(source, "w") * factor,
            "b": values["p_b"] - values["p_m"] * factor,
        },
    )
    assert verify(source, wrong, method="local").status == "failed"


@pytest.mark.slow
def test_the_table_holds(tmp_path: Path) -> None:
    """The marks of the tools in the documents' versions, out of the package index."""
    recorded = json.loads(foreign_folds.RESULT.read_text())
    packages = [f"{tool}=={version}" for tool, version in recorded["versions"].items()]
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    report = foreign_folds.measure(str(python))
    for now, then in zip(report["rows"], recorded["rows"], strict=True):
        for tool, mark in now["tools"].items():
            assert mark["mark"] == then["tools"][tool]["mark"], (now["model"], tool, mark)


def many_layers(seed: int, layers: int = 24) -> onnx.ModelProto:
    """Residual blocks of one shape."""
    shapes: dict[str, tuple[int, ...]] = {}
    lines, value = [], "x"
    for layer in range(layers):
        shapes |= {f"w{layer}": (4, 4, 3, 3), **batch_norm(f"p{layer}", 4)}
        parameters = ", ".join(f"p{layer}_{name}" for name in "sbmv")
        lines += [
            f"c{layer} = Conv <pads = [1, 1, 1, 1]> ({value}, w{layer})",
            f"n{layer} = BatchNormalization (c{layer}, {parameters})",
            f"a{layer} = Add (n{layer}, {value})",
            f"r{layer} = Relu (a{layer})",
        ]
        value = f"r{layer}"
    lines[-1] = f"y = Relu (a{layers - 1})"
    return model(f"g (float[N,4,H,W] x) => (float[N,4,H,W] y) {{ {chr(10).join(lines)} }}", shapes, seed=seed)


class TestManyDifferences:
    def test_another_network_is_named(self) -> None:
        verdict = verify(many_layers(0), many_layers(1), method="local")
        assert verdict.status == "not_verified"
        assert verdict.another

    def test_a_deeper_one_is_given_up(self) -> None:
        verdict = verify(many_layers(0, 80), many_layers(1, 80), method="local")
        assert verdict.status == "not_verified"
        assert "in more places than are tried" in verdict.reason

    @pytest.mark.parametrize("place", [0, 11, 23])
    def test_one_wrong_fold_is_refuted_among_many(self, place: int) -> None:
        source = many_layers(0)
        folded = fold(source, verify=False).model
        weights = [each for each in folded.graph.initializer if len(each.dims) == 4]
        array = onnx.numpy_helper.to_array(weights[place]).copy()
        array[0] *= 1.1
        weights[place].CopyFrom(onnx.numpy_helper.from_array(array, weights[place].name))
        verdict = verify(source, folded, method="local")
        assert verdict.status == "failed"
        assert len([proof for proof in verdict.sites if proof.method == "proved"]) == 23


@pytest.mark.parametrize("change", [1e-3, 1e-2])
def test_a_weight_that_a_sum_hides_is_not_passed(change: float) -> None:
    """Two large convolutions are compared in random directions, where each result is a sum of thousands of weights."""
    body = """g (float[N,64,H,W] x) => (float[N,64,A,B] y) {
        c = Conv <pads=[1,1,1,1]> (x, w)
        d = Conv <pads=[1,1,1,1]> (c, v)
        y = BatchNormalization (d, p_s, p_b, p_m, p_v)
    }"""
    source = model(body, {"w": (64, 64, 3, 3), "v": (64, 64, 3, 3), **batch_norm("p", 64)})
    changed = fold(source, verify=False).model
    array = array_of(changed, "w").copy()
    array[0, 0, 0, 0] += change
    verdict = verify(source, with_initializer(changed, "w", array), method="local")
    assert verdict.status == "not_verified", verdict


def test_a_thousand_equal_layers_are_not_compared_each_with_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = []
    relate = weights.relate
    monkeypatch.setattr(weights, "relate", lambda *arguments: compared.append(1) or relate(*arguments))
    fold_models.pairs(300, 2, tmp_path / "a.onnx", external=False)
    assert fold(tmp_path / "a.onnx", tmp_path / "b.onnx", verify="local").report.verification.passed
    assert len(compared) == 300


def test_branches_that_are_exchanged() -> None:
    """A file may hold the attributes of an If in any order: their names say which branch is which."""
    source = model(
        """g (float[N,4] x, bool c) => (float[N,4] y) {
        y = If (c) <then_branch = t () => (float[N,4] a) { a = Neg (x) }, else_branch = e () => (float[N,4] b) { b = Relu (x) }>
        }"""
    )
    first, second = copy.deepcopy(source), copy.deepcopy(source)
    first.graph.node[0].attribute.reverse()
    for branch in second.graph.node[0].attribute:
        branch.name = "else_branch" if branch.name == "then_branch" else "then_branch"
    assert verify(source, first, method="local").passed
    assert verify(source, second, method="local").status == "not_verified"


def test_a_default_written_out_on_the_way_of_a_fold_changes_nothing() -> None:
    """The map of the fold passes a MaxPool, to which a tool has added an attribute that says what its absence says."""
    source = model(
        """
        g (float[N,3,8,8] x) => (float[N,4,A,B] y) {
            c = Conv (x, w)
            m = MaxPool <kernel_shape = [2, 2]> (c)
            y = BatchNormalization (m, p_s, p_b, p_m, p_v)
        }
        """,
        {"w": (4, 3, 3, 3), **batch_norm("p", 4)},
    )
    scale = next(each for each in source.graph.initializer if each.name == "p_s")
    scale.CopyFrom(onnx.numpy_helper.from_array(np.abs(onnx.numpy_helper.to_array(scale)) + 0.5, "p_s"))
    result = fold(source, verify=False)
    assert [site.outcome for site in result.report.sites] == ["folded"]
    changed = copy.deepcopy(result.model)
    pool = next(node for node in changed.graph.node if node.op_type == "MaxPool")
    pool.attribute.append(onnx.helper.make_attribute("dilations", [1, 1]))
    del changed.metadata_props[:]
    assert verify(source, changed, method="local").passed
    pool.attribute[-1].ints[:] = [2, 2]
    assert not verify(source, changed, method="local").passed
