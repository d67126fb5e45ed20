"""Models that tools are known to break: each folds right or stays, with the reason."""

from __future__ import annotations

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

import bnexport.errors
from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.folding.conv_bn import BN, CONV, X4, conv_bn
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

    @pytest.mark.parametrize("opset", [9, 14])
    def test_spatial_one_where_the_operator_has_it_no_more(self, opset: int) -> None:
        """No engine takes the attribute, which says what the operator does; the folded file runs."""
        source = conv_bn(norm="y = BatchNormalization <spatial=1> (z, p_s, p_b, p_m, p_v)", opset=opset)
        assert operators(to_proto(fold(source, verify=False).model)) == ["Conv"]

    def test_decomposed_training_is_not_folded(self) -> None:
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
    def test_conv_that_is_read_twice(self) -> None:
        proto = conv_bn(norm=f"{BN}\n q = Relu (z)", output="float[N,8,A,B] y, float[N,8,A,B] q")
        assert_refused(proto, "shared")

    def test_conv_whose_sizes_a_body_reads(self) -> None:
        body = """g (float[N,6,H,W] x, bool c) => (float[N,8,A,B] y, int64[4] s) {
            z = Conv (x, w) y = BatchNormalization (z, p_s, p_b, p_m, p_v)
            s = If (c) <then_branch = t () => (int64[4] a) { a = Shape (z) }, else_branch = e () => (int64[4] b) { b = Shape (x) }> }"""
        assert_refused(model(body, {"w": (8, 6, 1, 1), **batch_norm("p", 8)}), "captured")

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
        folded = to_proto(fold(proto, verify=False, certificate=False).model)
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
    def test_max_pool_with_positive_scales(self) -> None:
        scale = np.abs(parameters({"p_s": (8,)})["p_s"])
        proto = conv_bn("t = Conv (x, w)\n z = MaxPool <kernel_shape=[2,2], pads=[1,1,1,1]> (t)", values={"p_s": scale})
        folded, _ = fold_and_check(proto)
        assert operators(folded) == ["Conv", "MaxPool"]

    @pytest.mark.parametrize("size", ["1", "L"])
    def test_a_window_of_padding_alone(self, size: str) -> None:
        """Its elements are on both sides of the data, and its maximum is the lowest number."""
        pool = "<kernel_shape=[2], dilations=[2], pads=[1,1]>"
        for node in (f"MaxPool {pool} (x)", f"AveragePool {pool} (x)"):
            proto = model(
                f"g (float[N,4,{size}] x) => (float[N,4,A] y) {{ z = Conv (x, w) t = {node.replace('(x)', '(z)')}"
                " y = BatchNormalization (t, p_s, p_b, p_m, p_v) }",
                {"w": (4, 4, 1), **batch_norm("p", 4)},
                values={"p_s": np.ones(4, np.float32)},
                opset=19,
            )
            assert_refused(proto, "padding")

    def test_a_dilated_window_that_meets_data(self) -> None:
        proto = model(
            "g (float[N,4,8] x) => (float[N,4,A] y) { z = Conv (x, w)"
            " t = MaxPool <kernel_shape=[3], dilations=[2], pads=[2,2]> (z)"
            " y = BatchNormalization (t, p_s, p_b, p_m, p_v) }",
            {"w": (4, 4, 1), **batch_norm("p", 4)},
            values={"p_s": np.ones(4, np.float32)},
        )
        assert fold(proto).report.verification.status == "passed"  # type: ignore[union-attr]

    def test_a_negative_axis_before_opset_11(self) -> None:
        """ONNX Runtime takes it, where ONNX's inference leaves it out and gives another rank."""
        proto = model(
            "g (float[2,1,4] x) => (float[2,4] y) { t = MatMul (x, w) z = Squeeze <axes=[-2]> (t)"
            " y = BatchNormalization (z, p_s, p_b, p_m, p_v) }",
            {"w": (4, 4), **batch_norm("p", 4)},
            opset=9,
        )
        assert_refused(proto, "opset")

    def test_a_mean_of_no_elements(self) -> None:
        proto = model(
            f"g (float[0,4,3] x) => (float[1,4,1] y) {{ t = Conv (x, w) z = ReduceMean <axes=[0, 2]> (t)\n {BN} }}",
            {"w": (4, 4, 1), **batch_norm("p", 4)},
            opset=13,
        )
        assert_refused(proto, "shape")

    def test_a_constant_that_enlarges_a_free_axis_next_to_a_batch_norm(self) -> None:
        """The batch norm's channels are axis 1; the last axis may have size 1."""
        proto = model(
            "g (float[N,1,L] x) => (float[N,1,3] y) { t = BatchNormalization (x, q_s, q_b, q_m, q_v)"
            " u = Mul (t, c) v = Add (u, d) y = MatMul (v, w) }",
            {"c": (3,), "d": (3,), "w": (3, 3), **batch_norm("q", 1)},
        )
        folded = to_proto(fold(proto, verify=False).model)
        inputs = {"x": np.ones((2, 1, 1), np.float32)}
        assert_near(run(folded, inputs)[0], run(proto, inputs)[0])

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
