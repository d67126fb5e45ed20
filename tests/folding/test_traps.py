"""Models that tools are known to break: each folds right or stays, with the reason."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

import bnexport.errors
from bnexport import tolerances
from bnexport.folding import fold
from bnexport.model_io import to_proto
from bnexport.verification import precise
from bnexport.verification.runner import Serialised
from tests.support.onnx_text import (
    assert_near,
    assert_refused,
    batch_norm,
    batch_norms,
    exact,
    fold_and_check,
    make_inputs,
    model,
    operators,
    parameters,
    run,
)

BN = "y = BatchNormalization (z, p_s, p_b, p_m, p_v)"
CONV = "z = Conv (x, w)"
X4 = "float[N,6,H,W] x"


def conv_bn(
    between: str = CONV, *, inputs: str = X4, output: str = "float[N,8,A,B] y", channels: int = 8, **options: object
) -> onnx.ModelProto:
    shapes = {"w": (channels, 6, 1, 1), **batch_norm("p", channels), **options.pop("shapes", {})}  # type: ignore[dict-item]
    shapes = {name: shape for name, shape in shapes.items() if name not in options.get("values", {})}  # type: ignore[operator]
    norm = options.pop("norm", BN)
    return model(f"g ({inputs}) => ({output}) {{ {between}\n {norm} }}", shapes, **options)  # type: ignore[arg-type]


class TestWrongAxis:
    """Sizes that agree by chance: L = C."""

    def test_matmul_then_batch_norm_over_positions(self) -> None:
        proto = model(
            f"g (float[N,8,6] x) => (float[N,8,8] y) {{ z = MatMul (x, w)\n {BN} }}",
            {"w": (6, 8), **batch_norm("p", 8)},
        )
        assert_refused(proto, "axis")

    def test_batched_weight(self) -> None:
        proto = model(
            f"g (float[3,8,6] x) => (float[3,8,8] y) {{ z = MatMul (x, w)\n {BN} }}",
            {"w": (3, 6, 8), **batch_norm("p", 8)},
        )
        assert_refused(proto, "axis")

    def test_matmul_transpose_reads_the_right_axis(self) -> None:
        body = (
            f"g (float[N,8,6] x) => (float[N,8,8] y) {{ t = MatMul (x, w)\n z = Transpose <perm=[0,2,1]> (t)\n {BN} }}"
        )
        folded, _ = fold_and_check(model(body, {"w": (6, 8), **batch_norm("p", 8)}))
        assert operators(folded) == ["MatMul", "Transpose", "Add"]

    def test_reshape_that_moves_rows_to_channels(self) -> None:
        body = f"g (float[16,6] x, int64[3] s) => (float[2,8,8] y) {{ t = MatMul (x, w)\n z = Reshape (t, c)\n {BN} }}"
        proto = model(body, {"w": (6, 8), **batch_norm("p", 8)}, values={"c": np.array([2, 8, 8])})
        assert_refused(proto, "reshape")

    def test_vector_constant_meets_the_last_axis(self) -> None:
        """Mul by a vector of C elements on (N, C, H, C) is not per channel."""
        proto = conv_bn(
            "t = Conv (x, w)\n z = Mul (t, d)", inputs="float[2,6,3,8] x", output="float[2,8,3,8] y", shapes={"d": (8,)}
        )
        folded, result = fold_and_check(proto, left=1)
        assert "Mul" in operators(folded)
        assert result.report.kept[0].refusals

    def test_transposed_conv_columns(self) -> None:
        """OnnxSlim scales the wrong axis of a square ConvTranspose weight."""
        proto = model(
            f"g ({X4}) => (float[N,6,A,B] y) {{ z = ConvTranspose (x, w)\n {BN} }}",
            {"w": (6, 6, 3, 3), **batch_norm("p", 6)},
        )
        fold_and_check(proto)


class TestTraining:
    def test_training_mode(self) -> None:
        norm = "y, a, b = BatchNormalization <training_mode=1> (z, p_s, p_b, p_m, p_v)"
        assert_refused(conv_bn(norm=norm), "training")

    def test_training_mode_by_request(self) -> None:
        norm = "y, a, b = BatchNormalization <training_mode=1> (z, p_s, p_b, p_m, p_v)"
        result = fold(conv_bn(norm=norm, output="float[N,8,A,B] y, float[8] a, float[8] b"), training_to_inference=True)
        assert result.report.meaning_changed
        assert result.report.verification is not None
        assert result.report.verification.passed
        assert batch_norms(to_proto(result.model)) == 0
        inputs = make_inputs(conv_bn())
        expected = exact(conv_bn(), inputs)[0]
        y, mean, var = run(to_proto(result.model), inputs)
        assert_near(y, expected)
        values = parameters({"w": (8, 6, 1, 1), **batch_norm("p", 8)})
        np.testing.assert_array_equal(mean, values["p_m"])
        np.testing.assert_array_equal(var, values["p_v"])

    @pytest.mark.parametrize("opset", [1, 6])
    def test_is_test_zero(self, opset: int) -> None:
        norm = "y = BatchNormalization <is_test=0> (z, p_s, p_b, p_m, p_v)"
        assert_refused(conv_bn(norm=norm, opset=opset), "training")

    def test_is_test_absent_before_opset_7(self) -> None:
        assert_refused(conv_bn(opset=6), "training")

    def test_is_test_one(self) -> None:
        norm = "y = BatchNormalization <is_test=1> (z, p_s, p_b, p_m, p_v)"
        result = fold(conv_bn(norm=norm, opset=6), verify=False)
        assert batch_norms(to_proto(result.model)) == 0

    def test_five_outputs(self) -> None:
        norm = "y, a, b, c, d = BatchNormalization (z, p_s, p_b, p_m, p_v)"
        assert_refused(conv_bn(norm=norm, opset=9, output="float[N,8,A,B] y, float[8] a"), "training")

    def test_five_outputs_unused(self) -> None:
        norm = "y, a, b, c, d = BatchNormalization <is_test=1> (z, p_s, p_b, p_m, p_v)"
        result = fold(conv_bn(norm=norm, opset=6), verify=False)
        assert batch_norms(to_proto(result.model)) == 0

    @pytest.mark.parametrize("opset", [1, 7])
    def test_spatial_zero(self, opset: int) -> None:
        norm = (
            "y = BatchNormalization <spatial=0> (z, p_s, p_b, p_m, p_v)"
            if opset == 7
            else ("y = BatchNormalization <spatial=0, is_test=1> (z, p_s, p_b, p_m, p_v)")
        )
        assert_refused(conv_bn(norm=norm, opset=opset), "not-per-channel")

    def test_decomposed_training_is_reported(self) -> None:
        body = f"""g ({X4}) => (float[N,8,A,B] y) {{
            z = Conv (x, w)
            m = ReduceMean <axes=[0,2,3]> (z)
            d = Sub (z, m)
            q = Mul (d, d)
            v = ReduceMean <axes=[0,2,3]> (q)
            e = Sqrt (v)
            n = Div (d, e)
            s = Mul (n, a)
            y = Add (s, b) }}"""
        result = fold(model(body, {"w": (8, 6, 1, 1), "a": (1, 8, 1, 1), "b": (1, 8, 1, 1)}))
        codes = {refusal.code for site in result.report.sites for refusal in site.refusals}
        assert "training" in codes
        assert not result.report.folded


class TestForeign:
    def test_namesake_in_another_domain(self) -> None:
        header = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
        proto = conv_bn(norm="y = other.BatchNormalization (z, p_s, p_b, p_m, p_v)", header=header)
        result = fold(proto, verify=False)
        assert not result.report.sites
        assert operators(to_proto(result.model)) == ["Conv", "BatchNormalization"]

    def test_foreign_conv(self) -> None:
        header = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
        assert_refused(conv_bn("z = other.Conv (x, w)", header=header), "no-rule")

    def test_redefined_operator(self) -> None:
        proto = conv_bn()
        function = proto.functions.add(name="Conv", domain="")
        function.input.extend(["a", "b"])
        function.output.append("c")
        function.opset_import.add(domain="", version=17)
        function.node.add(op_type="Add", input=["a", "b"], output=["c"])
        with pytest.raises(bnexport.errors.UnsupportedModelError, match="redefines"):
            fold(proto)

    def test_unknown_opset(self) -> None:
        assert_refused(conv_bn(opset=999), "opset")

    def test_unknown_attribute(self) -> None:
        assert_refused(conv_bn(norm="y = BatchNormalization <surprise=1> (z, p_s, p_b, p_m, p_v)"), "unknown-attribute")


class TestOverridable:
    INPUTS = f"{X4}, float[8,6,1,1] w"

    def test_weight_that_a_caller_may_override(self) -> None:
        proto = conv_bn(inputs=self.INPUTS)
        assert_refused(proto, "overridable")
        result = fold(proto, verify=False)
        assert [value.name for value in result.model.graph.input] == ["x", "w"]

    def test_statistics_that_a_caller_may_override(self) -> None:
        assert_refused(conv_bn(inputs=f"{X4}, float[8] p_m"), "overridable")

    def test_statistics_that_are_inputs(self) -> None:
        shapes = {name: shape for name, shape in batch_norm("p", 8).items() if name != "p_m"}
        proto = model(
            f"g ({X4}, float[8] p_m) => (float[N,8,A,B] y) {{ {CONV}\n {BN} }}", {"w": (8, 6, 1, 1), **shapes}
        )
        assert_refused(proto, "not-constant")

    def test_ir_3_lists_every_initializer(self) -> None:
        proto = conv_bn(ir_version=3, opset=9)
        folded, _ = fold_and_check(proto, oracle=False)
        listed = {value.name for value in folded.graph.input}
        assert listed == {"x", *(tensor.name for tensor in folded.graph.initializer)}
        assert len(folded.graph.initializer) == 2


class TestShared:
    def test_conv_that_is_a_graph_output(self) -> None:
        assert_refused(conv_bn(output="float[N,8,A,B] y, float[N,8,A,B] z"), "graph-output")

    def test_conv_that_is_read_twice(self) -> None:
        proto = conv_bn(norm=f"{BN}\n q = Relu (z)", output="float[N,8,A,B] y, float[N,8,A,B] q")
        assert_refused(proto, "shared")

    def test_weight_of_two_convs(self) -> None:
        body = f"g ({X4}) => (float[N,8,A,B] y, float[N,8,A,B] q) {{ {CONV}\n q = Conv (x, w)\n {BN} }}"
        folded, _ = fold_and_check(model(body, {"w": (8, 6, 1, 1), **batch_norm("p", 8)}))
        assert folded.graph.node[0].input[1] != folded.graph.node[1].input[1]

    def test_two_convs_with_one_weight_and_a_batch_norm_each(self) -> None:
        body = f"""g ({X4}) => (float[N,8,A,B] y, float[N,8,A,B] q) {{ {CONV}
            z2 = Conv (x, w, c)
            q = BatchNormalization (z2, q_s, q_b, q_m, q_v)
            {BN} }}"""
        folded, _ = fold_and_check(
            model(body, {"w": (8, 6, 1, 1), "c": (8,), **batch_norm("p", 8), **batch_norm("q", 8)})
        )
        assert operators(folded) == ["Conv", "Conv"]

    def test_weight_that_is_a_graph_output(self) -> None:
        proto = conv_bn(output="float[N,8,A,B] y, float[8,6,1,1] w")
        folded, _ = fold_and_check(proto)
        assert folded.graph.node[0].input[1] != "w"

    def test_equal_statistics_merged_into_one_initializer(self) -> None:
        """An exporter may make bn.bias and running_mean one initializer."""
        fold_and_check(conv_bn(norm="y = BatchNormalization (z, p_s, p_b, p_b, p_v)"))

    def test_names_stay_unique(self) -> None:
        proto = conv_bn(
            "z = Conv (x, w)\n w_folded = Identity (x)",
            output="float[N,8,A,B] y, float[8,6,1,1] w, float[N,6,A,B] w_folded",
        )
        proto.graph.node[1].output[0] = proto.graph.output[2].name = "w.folded"
        folded, _ = fold_and_check(proto)
        names = [tensor.name for tensor in folded.graph.initializer] + [
            name for node in folded.graph.node for name in node.output
        ]
        assert len(names) == len(set(names))

    def test_residual(self) -> None:
        """An Add of a value that cannot take its share."""
        assert_refused(
            conv_bn("t = Conv (x, w)\n z = Add (t, x)", channels=6, output="float[N,6,A,B] y"),
            "no-producer",
            skip=["parallel"],
        )


class TestTheRest:
    """What is no part of a fold comes out as it went in."""

    def test_stays(self) -> None:
        header = '<ir_version: 10, opset_import: ["": 17, "other": 3], producer_name: "somebody", doc_string: "notes">'
        norm = f"{BN}\n a = other.Thing <alpha: float = 0.5> (y)\n q = Abs (a)\n r = LeakyRelu <alpha=0.25> (q)"
        proto = conv_bn(norm=norm, header=header, output="float[N,8,A,B] r, float[N,8,A,B] y")
        del proto.graph.output[1]
        proto.metadata_props.add(key="author", value="them")
        proto.graph.metadata_props.add(key="part", value="first")
        proto.graph.doc_string = "a graph"
        for node, name in zip(proto.graph.node, ("conv", "norm", "thing", "abs", "leaky"), strict=True):
            node.name, node.doc_string = name, f"about {name}"
            node.metadata_props.add(key="line", value=name)
            if not node.domain:
                node.ClearField("domain")  # written as an empty field by the parser
        for name in ("y", "a", "q"):
            proto.graph.value_info.append(
                onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, ("N", 8, "A", "B"))
            )
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.arange(3.0), "nobody reads this"))
        folded = to_proto(fold(proto, verify=False).model)
        for field in ("ir_version", "producer_name", "doc_string", "opset_import", "metadata_props"):
            assert getattr(folded, field) == getattr(proto, field), field
        for field in ("name", "input", "output", "doc_string", "metadata_props"):
            assert getattr(folded.graph, field) == getattr(proto.graph, field), field
        assert list(folded.graph.node[2:]) == list(proto.graph.node[3:])
        thing = folded.graph.node[1]
        assert (thing.input[0], thing.attribute, thing.doc_string) == (
            folded.graph.node[0].output[0],
            proto.graph.node[2].attribute,
            "about thing",
        )
        conv = folded.graph.node[0]
        assert (conv.name, conv.doc_string, conv.metadata_props) == (
            "conv",
            "about conv",
            proto.graph.node[0].metadata_props,
        )
        assert {value.name for value in folded.graph.value_info} >= {"a", "q"}
        tensors = {tensor.name: tensor for tensor in folded.graph.initializer}
        assert tensors["nobody reads this"] == proto.graph.initializer[-1]


class TestBetween:
    @pytest.mark.parametrize(
        ("node", "code"),
        [
            ("Relu (t)", "order"),
            ("MaxPool <kernel_shape=[2,2]> (t)", "order"),
            ("Softmax (t)", "no-rule"),
            ("Pad (t, k, f)", "padding"),
        ],
        ids=["relu", "max-pool", "softmax", "pad"],
    )
    def test_what_does_not_commute(self, node: str, code: str) -> None:
        values = {"k": np.array([0, 0, 1, 1, 0, 0, 1, 1]), "f": np.array(1.5, np.float32)}
        proto = conv_bn(f"t = Conv (x, w)\n z = {node}", values=values)
        assert_refused(proto, code)

    def test_max_pool_with_positive_scales(self) -> None:
        scale = np.abs(parameters({"p_s": (8,)})["p_s"])
        proto = conv_bn("t = Conv (x, w)\n z = MaxPool <kernel_shape=[2,2], pads=[1,1,1,1]> (t)", values={"p_s": scale})
        folded, _ = fold_and_check(proto)
        assert operators(folded) == ["Conv", "MaxPool"]

    def test_split_whose_other_part_is_read(self) -> None:
        nodes = "t = Conv (x, w)\n z, u = Split <axis=2> (t)"
        proto = conv_bn(
            nodes, inputs="float[N,6,4,4] x", output="float[N,8,2,4] y, float[N,8,2,4] r", norm=f"{BN}\n r = Relu (u)"
        )
        assert_refused(proto, "shared")

    def test_a_part_that_is_an_output(self) -> None:
        """The parts are mapped on their own, so the other one keeps its values to the bit."""
        nodes = "t = Conv (x, w)\n z, u = Split <axis=1> (t)"
        proto = model(
            f"g ({X4}) => (float[N,4,A,B] y, float[N,4,A,B] u) {{ {nodes}\n {BN} }}",
            {"w": (8, 6, 1, 1), **batch_norm("p", 4)},
        )
        folded, _ = fold_and_check(proto)
        inputs = make_inputs(proto)
        np.testing.assert_array_equal(run(folded, inputs)[1], run(proto, inputs)[1])

    def test_cast_that_rounds(self) -> None:
        body = f"""g ({X4}) => (float[N,8,A,B] y) {{ {CONV.replace("z", "t")}
            h = Cast <to=10> (t)
            z = Cast <to=1> (h)
            {BN} }}"""
        proto = model(body, {"w": (8, 6, 1, 1), **batch_norm("p", 8)})
        assert_refused(proto, "cast")


class TestConstants:
    def test_bias_at_run_time(self) -> None:
        assert_refused(conv_bn("z = Conv (x, w, c)", inputs=f"{X4}, float[8] c"), "not-constant")

    def test_empty_bias_name(self) -> None:
        proto = conv_bn()
        proto.graph.node[0].input.append("")
        fold_and_check(proto)

    @pytest.mark.parametrize(
        "form",
        [
            *("value_floats", "value", "identity", "unsqueeze", "cast", "of-shape", "of-shape-zero", "sqrt"),
            *("transpose", "expand-value_float", "cast-value_ints", "cast-value_int", "concat", "dequantized"),
        ],
    )
    def test_constants_in_every_form(self, form: str) -> None:
        values = [0.5, -1.25, 2.0, 1.5, -0.75, 3.0, 0.25, -2.5]
        text = ", ".join(str(value) for value in values)
        makes = {
            "value_floats": f"k = Constant <value_floats = [{text}]> ()",
            "value": f"k = Constant <value = float[8] {{{text}}}> ()",
            "identity": f"i = Constant <value = float[8] {{{text}}}> ()\n k = Identity (i)",
            "unsqueeze": (
                f"i = Constant <value = float[1,8] {{{text}}}> ()\n a = Constant <value = int64[1] {{0}}> ()\n k = Squeeze (i, a)"
            ),
            "cast": f"i = Constant <value = double[8] {{{text}}}> ()\n k = Cast <to=1> (i)",
            "of-shape": "n = Constant <value_ints = [8]> ()\n k = ConstantOfShape <value = float[1] {1.5}> (n)",
            "of-shape-zero": "n = Constant <value_ints = [8]> ()\n k = ConstantOfShape (n)",
            "transpose": (
                f"i = Constant <value = float[8,1] {{{text}}}> ()\n t = Transpose (i)\n n = Constant <value_ints = [8]> ()\n"
                " k = Reshape (t, n)"
            ),
            "expand-value_float": (
                "i = Constant <value_float = -1.5> ()\n n = Constant <value_ints = [8]> ()\n k = Expand (i, n)"
            ),
            "cast-value_ints": "i = Constant <value_ints = [1, -2, 3, 4, 5, 6, 7, 8]> ()\n k = Cast <to=1> (i)",
            "cast-value_int": (
                "i = Constant <value_int = -3> ()\n f = Cast <to=1> (i)\n n = Constant <value_ints = [8]> ()\n"
                " k = Expand (f, n)"
            ),
            "concat": (
                "i = Constant <value_floats = [1.0, 2.0, 3.0]> ()\n j = Constant <value_floats = [4.0, 5.0, 6.0, 7.0, 8.0]> ()\n"
                " k = Concat <axis=0> (i, j)"
            ),
            "dequantized": (
                "i = Constant <value = int8[8] {1, -2, 3, 4, 5, 6, 7, 8}> ()\n f = Constant <value_float = 0.25> ()\n"
                " k = DequantizeLinear (i, f)"
            ),
            "sqrt": "i = Constant <value_floats = [1.0, 4.0, 2.0, 3.0, 5.0, 6.0, 7.0, 8.0]> ()\n k = Sqrt (i)",
        }
        norm = f"{makes[form]}\n y = BatchNormalization (z, k, p_b, p_m, p_v)"
        folded, _ = fold_and_check(conv_bn(norm=norm, opset=19))
        assert operators(folded) == ["Conv"]

    def test_constants_that_are_no_numbers(self) -> None:
        """Such a file is invalid, and another tool crashes on it."""
        for text in ('value_string = "a"', 'value_strings = ["a", "b"]'):
            norm = f"k = Constant <{text}> ()\n y = BatchNormalization (z, k, p_b, p_m, p_v)"
            assert_refused(conv_bn(norm=norm), "type")

    def test_sparse_constant(self) -> None:
        norm = "k = Constant <value_float = 1.0> ()\n y = BatchNormalization (z, k, p_b, p_m, p_v)"
        proto = conv_bn(norm=norm)
        values = onnx.numpy_helper.from_array(np.array([1.0, 2.0], np.float32))
        places = onnx.numpy_helper.from_array(np.array([0, 5]))
        attribute = proto.graph.node[1].attribute[0]
        attribute.CopyFrom(
            onnx.helper.make_attribute("sparse_value", onnx.helper.make_sparse_tensor(values, places, [8]))
        )
        with pytest.raises(bnexport.errors.UnsupportedModelError, match="sparse"):
            fold(proto)

    def test_zero_bias_as_exporters_compute_it(self) -> None:
        """Expand(CastLike(0, x), Shape(weight)[:1]): what torch's exporter writes without optimisation."""
        nodes = """s = Shape <start=0, end=1> (w)
            one = Constant <value_ints = [1]> ()
            n = Expand (s, one)
            zero = Constant <value = double {0.0}> ()
            like = CastLike (zero, x)
            c = Expand (like, n)
            z = Conv (x, w, c)"""
        folded, _ = fold_and_check(conv_bn(nodes))
        assert operators(folded) == ["Conv"]

    def test_shape_that_is_free(self) -> None:
        nodes = "s = Shape <start=2, end=3> (x)\n one = Constant <value_float = 1.0> ()\n c = Expand (one, s)\n z = Conv (x, w, c)"
        assert_refused(conv_bn(nodes, output="float[N,8,A,B] y"), "not-constant", sizes={"H": 8})

    def test_shared_operands_do_not_explode(self) -> None:
        """k = k + k, thirty times: each sum is looked at once."""
        nodes = "\n".join(f"k{index + 1} = Add (k{index}, k{index})" for index in range(30))
        norm = f"k0 = Constant <value = float[8] {{1, 1, 1, 1, 1, 1, 1, 1}}> ()\n {nodes}\n y = BatchNormalization (z, k30, p_b, p_m, p_v)"
        assert fold(conv_bn(norm=norm), max_scale=1e12, verify=False).report.folded

    def test_quantized_weight_keeps_its_bytes(self) -> None:
        scale = np.abs(parameters({"p_s": (8,)})["p_s"])
        norm = "y = BatchNormalization (z, g, p_b, p_m, p_v)"
        values = {
            "q": np.random.default_rng(0).integers(-127, 128, (8, 6, 1, 1)).astype(np.int8),
            "d": np.float32(0.02),
            "g": scale,
        }
        proto = conv_bn(
            "k = DequantizeLinear (q, d)\n z = Conv (x, k)", norm=norm, values=values, opset=21, ir_version=10
        )
        folded, _ = fold_and_check(proto)
        assert operators(folded) == ["DequantizeLinear", "Conv"]
        assert [attribute.name for attribute in folded.graph.node[0].attribute] == ["axis"]
        kept = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
        np.testing.assert_array_equal(kept["q"], values["q"])

    def test_quantized_weight_with_a_scale_for_each_channel(self) -> None:
        generator = np.random.default_rng(0)
        values = {
            "q": generator.integers(0, 255, (8, 6, 1, 1)).astype(np.uint8),
            "d": np.abs(generator.standard_normal(8)).astype(np.float32) + np.float32(0.01),
            "o": generator.integers(100, 150, 8).astype(np.uint8),
            "p_s": np.abs(parameters({"p_s": (8,)})["p_s"]),
        }
        nodes = "k = DequantizeLinear <axis=0> (q, d, o)\n z = Conv (x, k)"
        folded, _ = fold_and_check(conv_bn(nodes, values=values, opset=21, ir_version=10))
        assert operators(folded) == ["DequantizeLinear", "Conv"]
        kept = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
        np.testing.assert_array_equal(kept["q"], values["q"])
        np.testing.assert_array_equal(kept["o"], values["o"])

    def test_quantized_weight_with_a_negative_scale(self) -> None:
        values = {"q": np.ones((8, 6, 1, 1), np.int8), "d": np.float32(0.02)}
        assert_refused(conv_bn("k = DequantizeLinear (q, d)\n z = Conv (x, k)", values=values), "quantized")


class TestNumbers:
    @staticmethod
    def with_norm(dtype: str = "float32", weight: float = 1.0, **changes: float) -> onnx.ModelProto:
        values = {
            "w": np.full((8, 6, 1, 1), weight, dtype),
            **{
                f"p_{name}": np.full(8, changes.get(name, default), dtype)
                for name, default in zip("sbmv", (1.0, 0.0, 0.0, 1.0), strict=True)
            },
        }
        kind = {"float32": "float", "float16": "float16", "float64": "double"}[dtype]
        return model(f"g ({kind}[N,6,H,W] x) => ({kind}[N,8,A,B] y) {{ {CONV}\n {BN} }}", values=values)

    @pytest.mark.parametrize(
        ("changes", "code"),
        [
            ({"v": -1.0}, "negative-variance"),
            ({"v": np.nan}, "not-finite"),
            ({"m": np.inf}, "not-finite"),
            ({"s": np.nan}, "not-finite"),
            ({"s": 1e8}, "scale"),
        ],
        ids=["negative-variance", "nan-variance", "infinite-mean", "nan-scale", "exploding-scale"],
    )
    def test_statistics_that_no_training_makes(self, changes: dict[str, float], code: str) -> None:
        assert_refused(self.with_norm(**changes), code)

    def test_overflow_of_float32(self) -> None:
        assert_refused(self.with_norm(weight=1e35, s=1e5), "overflow")

    def test_overflow_of_float16(self) -> None:
        assert_refused(self.with_norm("float16", weight=1000.0, s=100.0), "overflow")

    def test_overflow_of_a_float16_bias(self) -> None:
        assert_refused(self.with_norm("float16", weight=0.001, s=100.0, m=1000.0), "overflow")

    def test_flush_to_zero_in_float16(self) -> None:
        assert_refused(self.with_norm("float16", weight=1e-4, s=1e-4), "underflow")

    def test_lost_bits_in_float16(self) -> None:
        assert_refused(self.with_norm("float16", weight=1e-3, s=1e-3), "underflow")

    def test_scale_of_zero_is_no_underflow(self) -> None:
        fold_and_check(self.with_norm(s=0.0))

    def test_bound_on_the_scale_is_the_callers(self) -> None:
        assert fold(self.with_norm(s=1e8, m=1e-3), max_scale=1e9).report.folded

    def test_one_rounding(self) -> None:
        """Three maps in a row round once: every folded weight is the float32 nearest to the exact product."""
        body = f"""g ({X4}) => (float[N,8,A,B] y) {{ t = Conv (x, w)
            u = BatchNormalization (t, p_s, p_b, p_m, p_v)
            v = BatchNormalization (u, q_s, q_b, q_m, q_v)
            y = Mul (v, d) }}"""
        shapes = {"w": (8, 6, 1, 1), **batch_norm("p", 8), **batch_norm("q", 8), "d": (8, 1, 1)}
        values = {name: value.astype(np.float64) for name, value in parameters(shapes).items()}
        eps = np.float64(np.float32(1e-5))
        scale = (
            values["p_s"]
            / np.sqrt(values["p_v"] + eps)
            * (values["q_s"] / np.sqrt(values["q_v"] + eps))
            * values["d"].reshape(8)
        )
        folded, _ = fold_and_check(model(body, shapes))
        weight = onnx.numpy_helper.to_array(folded.graph.initializer[0])
        np.testing.assert_array_equal(weight, (values["w"] * scale.reshape(8, 1, 1, 1)).astype(np.float32))

    def test_large_mean_does_not_cancel(self) -> None:
        """b' = (b - mean) k + beta, exact to one rounding where b and mean agree to many digits."""
        values = {
            "w": np.ones((1, 6, 1, 1), np.float32),
            "c": np.full(1, 12345.678, np.float32),
            "p_m": np.full(1, 12345.67, np.float32),
        }
        values |= {
            "p_s": np.ones(1, np.float32),
            "p_b": np.full(1, 1e-3, np.float32),
            "p_v": np.full(1, 3.0, np.float32),
        }
        proto = model(f"g ({X4}) => (float[N,1,A,B] y) {{ z = Conv (x, w, c)\n {BN} }}", values=values)
        # The bound of `verify` is made for networks; this one's rounding errors are those of its mean.
        folded = to_proto(fold(proto, verify=False).model)
        bias = next(onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer if tensor.name == "c")
        wide = {name: np.float64(value.reshape(-1)[0]) for name, value in values.items()}
        expected = (wide["c"] - wide["p_m"]) / np.sqrt(wide["p_v"] + np.float64(np.float32(1e-5))) * wide["p_s"] + wide[
            "p_b"
        ]
        assert bias[0] == np.float32(expected)

    def test_float16(self) -> None:
        body = f"g (float16[N,6,H,W] x) => (float16[N,8,A,B] y) {{ {CONV}\n {BN} }}"
        fold_and_check(model(body, {"w": (8, 6, 1, 1), **batch_norm("p", 8)}, dtype="float16"), oracle=False)

    def test_bfloat16(self) -> None:
        """Nothing runs it here: the weights are compared with the product of the exact values, rounded once."""
        import ml_dtypes
        import onnx_ir as ir

        values = parameters({"w": (8, 6, 1, 1), "c": (8,), **batch_norm("p", 8)}, dtype=ml_dtypes.bfloat16)
        body = f"g (bfloat16[N,6,H,W] x) => (bfloat16[N,8,A,B] y) {{ z = Conv (x, w, c)\n {BN} }}"
        proto = model(body, opset=22)
        for name, value in values.items():
            proto.graph.initializer.append(ir.serde.serialize_tensor(ir.tensor(value, name=name)))
        result = fold(proto)
        assert operators(to_proto(result.model)) == ["Conv"]
        exact_values = {name: value.astype(np.float64) for name, value in values.items()}
        scale = exact_values["p_s"] / np.sqrt(exact_values["p_v"] + np.float64(np.float32(1e-5)))
        initializers = ir.from_proto(result.model).graph.initializers
        weight = exact_values["w"] * scale.reshape(8, 1, 1, 1)
        bias = (exact_values["c"] - exact_values["p_m"]) * scale + exact_values["p_b"]
        for name, expected in (("w", weight), ("c", bias)):
            got = initializers[name].const_value.numpy()
            assert got.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(got, expected.astype(ml_dtypes.bfloat16))

    def test_half_data_beside_single_statistics(self) -> None:
        """Opset 15 and up: the weights stay half, and are rounded once from the exact product."""
        half = parameters({"w": (8, 6, 1, 1)}, dtype="float16")
        single = parameters(batch_norm("p", 8), seed=1)
        proto = model(f"g (float16[N,6,H,W] x) => (float16[N,8,A,B] y) {{ {CONV}\n {BN} }}", values={**half, **single})
        folded, _ = fold_and_check(proto, oracle=False)
        kept = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in folded.graph.initializer}
        scale = single["p_s"].astype(np.float64) / np.sqrt(single["p_v"] + np.float64(np.float32(1e-5)))
        expected = half["w"].astype(np.float64) * scale.reshape(8, 1, 1, 1)
        np.testing.assert_array_equal(kept["w"], expected.astype(np.float16))
        assert {array.dtype for array in kept.values()} == {np.dtype(np.float16)}

    def test_float64(self) -> None:
        """ONNX Runtime has no such Conv; the reference implementation verifies it."""
        body = f"g (double[N,6,H,W] x) => (double[N,8,A,B] y) {{ {CONV}\n {BN} }}"
        proto = model(body, {"w": (8, 6, 1, 1), **batch_norm("p", 8)}, dtype="float64")
        result = fold(proto)
        assert operators(to_proto(result.model)) == ["Conv"]
        assert result.report.verification is not None
        assert result.report.verification.passed
        assert result.report.verification.engine.startswith("onnx.reference ")
        inputs = make_inputs(proto)
        assert_near(exact(to_proto(result.model), inputs)[0], exact(proto, inputs)[0])


class TestDeadChannels:
    """Half networks whose training left channels with scales near 0: their output is their shift."""

    # Layers with 16 outputs; the sizes of x, and of w.
    LAYERS: ClassVar = {
        "conv": ("z = Conv <pads = [1, 1, 1, 1]> (x, w)", "N,32,5,5", (16, 32, 3, 3)),
        "transposed-conv": ("z = ConvTranspose (x, w)", "N,32,5,5", (32, 16, 3, 3)),
        "gemm": ("z = Gemm (x, w)", "N,32", (32, 16)),
        "gemm-alpha": ("z = Gemm <transB = 1, alpha = 4.0> (x, w)", "N,32", (16, 32)),
        "large": ("z = Conv <dilations = [5, 5], pads = [5, 5, 5, 5]> (x, w)", "N,512,5,5", (16, 512, 3, 3)),
    }

    @classmethod
    def build(cls, layer: str, *, scale: float = 1e-6, shift: float = -0.2) -> onnx.ModelProto:
        """Channels 3 and 11 are dead."""
        text, sizes, shape = cls.LAYERS[layer]
        generator = np.random.default_rng(5)
        values = {"w": generator.standard_normal(shape) * 0.02, "p_m": generator.standard_normal(16) * 0.1}
        values |= {"p_s": generator.uniform(0.5, 2, 16), "p_b": generator.standard_normal(16)}
        values["p_v"] = generator.uniform(0.5, 2, 16)
        values["p_s"][[3, 11]], values["p_b"][[3, 11]] = scale, shift
        rank = "N,16" if len(shape) == 2 else "N,16,A,B"
        body = f"g (float16[{sizes}] x) => (float16[{rank}] y) {{ {text}\n {BN} }}"
        return model(body, values={name: value.astype(np.float16) for name, value in values.items()})

    @pytest.mark.parametrize("layer", LAYERS)
    def test_they_fold(self, layer: str, tmp_path: Path) -> None:
        """Some weights become zero; what they made is below the rounding error of the output."""
        proto = self.build(layer)
        result = fold(proto, tmp_path / "out.onnx")
        assert [site.outcome for site in result.report.sites] == ["folded"]
        assert result.report.verification is not None
        assert result.report.verification.passed
        folded = to_proto(result.model)
        inputs = make_inputs(proto)
        inputs["x"] = (np.sign(inputs["x"]) * tolerances.ACTIVATION).astype(np.float16)
        wide = {"x": inputs["x"].astype(np.float64)}
        double = [
            precise.run(Serialised(each.SerializeToString(), {}), [wide], ["y"], 30.0)[0][0] for each in (proto, folded)
        ]
        dead = np.abs(double[1] - double[0])[:, [3, 11]].max()
        # One rounding of the bias, and what the inputs' bound gives the weights' errors.
        assert 0 < dead <= 2 * 2.0**-11 * 0.2

    @pytest.mark.parametrize("shift", [0.0, 1e-3])
    def test_they_stay_where_an_output_would_show(self, shift: float) -> None:
        assert_refused(self.build("conv", shift=shift), "underflow")

    def test_not_when_they_are_inputs(self) -> None:
        """A scale that goes forward meets every output, whose shifts say nothing about it."""
        body = f"g (float16[N,16,5,5] x) => (float16[N,4,A,B] y) {{ {BN.replace('(z', '(x').replace('y =', 't =')}\n y = Conv (t, w) }}"
        values = {
            "w": np.full((4, 16, 3, 3), 0.02, np.float16),
            **dict.fromkeys(("p_b", "p_m"), np.zeros(16, np.float16)),
        }
        values |= {"p_v": np.ones(16, np.float16), "p_s": np.where(np.arange(16) == 3, 1e-6, 1).astype(np.float16)}
        assert_refused(model(body, values=values), "underflow")
