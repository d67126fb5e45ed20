"""Operators that take a map in their parameters: deformable convolutions, normalisations, embeddings, recurrent layers, Einsum."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import onnx
import onnx.numpy_helper
import pytest

from bnexport.folding import fold
from bnexport.model_io import to_proto
from tests.folding.reading.test_decomposed import operators_of
from tests.support.claims import prove_claims
from tests.support.onnx_text import batch_norm, batch_norms, fold_and_check, model

AFTER = "y = BatchNormalization (z, p_s, p_b, p_m, p_v)"
BEFORE = "z = BatchNormalization (x, p_s, p_b, p_m, p_v)"
X, Y = "float[N,8,H,W] x", "float[N,8,H,W] y"
P = batch_norm("p", 8)
MMCV = '<ir_version: 10, opset_import: ["": 17, "mmdeploy": 1]>'
LSTM = {"w": (1, 16, 8), "r": (1, 16, 4)}


@dataclasses.dataclass(frozen=True)
class Case:
    body: str
    shapes: dict[str, tuple[int, ...]]
    inputs: str = X
    output: str = Y
    opset: int = 22
    left: int = 0
    runs: bool = True  # in an engine
    header: str | None = None

    def model(self, seed: int = 0) -> onnx.ModelProto:
        text = f"g ({self.inputs}) => ({self.output}) {{ {self.body} }}"
        return model(text, self.shapes, opset=self.opset, ir_version=10, seed=seed, header=self.header)


DEFORM = {"inputs": "float[2,6,9,9] x, float[2,18,7,7] o", "output": "float[2,8,7,7] y"}
MASKED = {"inputs": "float[2,6,9,9] x, float[2,18,7,7] o, float[2,9,7,7] m", "output": "float[2,8,7,7] y"}
LEAVES = {
    "deform": Case(f"z = DeformConv (x, w, o)\n {AFTER}", {"w": (8, 6, 3, 3), **P}, **DEFORM),
    "deform-mask-bias-19": Case(f"z = DeformConv (x, w, o, b, m)\n {AFTER}", {"w": (8, 6, 3, 3), "b": (8,), **P}, **MASKED, opset=19),
    "deform-groups": Case(f"z = DeformConv <group = 2> (x, w, o)\n {AFTER}", {"w": (8, 3, 3, 3), **P}, **DEFORM),
    "deform-own-offset": Case(f"o = Conv (x, v, c)\n z = DeformConv (x, w, o)\n {AFTER}",
        {"v": (18, 6, 3, 3), "c": (18,), "w": (8, 6, 3, 3), **P}, "float[2,6,9,9] x", "float[2,8,7,7] y"),
    "mmcv": Case(f"z = mmdeploy.MMCVModulatedDeformConv2d <groups = 2, deform_groups = 1> (x, o, m, w, b)\n {AFTER}",
        {"w": (8, 3, 3, 3), "b": (8,), **P}, **MASKED, runs=False, header=MMCV),
    "mmcv-no-bias": Case(f"z = mmdeploy.MMCVModulatedDeformConv2d (x, o, m, w)\n {AFTER}", {"w": (8, 6, 3, 3), **P},
        **MASKED, runs=False, header=MMCV),
    "instance": Case(f"z = InstanceNormalization (x, a, b)\n {AFTER}", {"a": (8,), "b": (8,), **P}),
    "group": Case(f"z = GroupNormalization <num_groups = 2> (x, a, b)\n {AFTER}", {"a": (8,), "b": (8,), **P}),
    "layer": Case(f"z = LayerNormalization (x, a, b)\n {AFTER}", {"a": (8,), "b": (8,), **P}, "float[N,8] x", "float[N,8] y"),
    "layer-no-bias": Case(f"z = LayerNormalization (x, a)\n {AFTER}", {"a": (8,), **P}, "float[N,8] x", "float[N,8] y"),
    "layer-of-all": Case(f"z = LayerNormalization <axis = 1> (x, a)\n {AFTER}", {"a": (8, 5), **P}, "float[N,8,5] x", "float[N,8,5] y"),
    "layer-columns": Case(f"u = LayerNormalization (x, a)\n z = Transpose <perm = [0, 2, 1]> (u)\n {AFTER}",
        {"a": (8,), **P}, "float[N,L,8] x", "float[N,8,L] y"),
    "rms": Case("z = RMSNormalization (x, a)\n y = Mul (z, k_s)", {"a": (8,), "k_s": (8,)}, "float[N,8] x", "float[N,8] y", opset=23),
    "embedding": Case(f"z = Gather (t, i)\n {AFTER}", {"t": (20, 8), **P}, "int64[N] i", "float[N,8] y"),
    "embedding-sequence": Case(f"u = Gather (t, i)\n z = Transpose <perm = [0, 2, 1]> (u)\n {AFTER}",
        {"t": (20, 8), **P}, "int64[N,L] i", "float[N,8,L] y"),
    "lstm": Case(f"{BEFORE}\n t = Transpose <perm = [2, 0, 1]> (z)\n y = LSTM <hidden_size = 4> (t, w, r)",
        {**LSTM, **P}, "float[N,8,L] x", "float[L,1,N,4] y"),
    "lstm-peepholes": Case(f"{BEFORE}\n t = Transpose <perm = [2, 0, 1]> (z)\n y = LSTM <hidden_size = 4> (t, w, r, b, , , , q)",
        {**LSTM, "b": (1, 32), "q": (1, 12), **P}, "float[N,8,L] x", "float[L,1,N,4] y"),
    "lstm-states": Case(f"{BEFORE}\n t = Transpose <perm = [2, 0, 1]> (z)\n _, y, c = LSTM <hidden_size = 4> (t, w, r, b)",
        {**LSTM, "b": (1, 32), **P}, "float[N,8,L] x", "float[1,N,4] y, float[1,N,4] c"),
    "lstm-states-of-its-size": Case(f"{BEFORE}\n t = Transpose <perm = [2, 0, 1]> (z)\n e = Constant <value_ints = [1]> ()\n"
        " f = Constant <value_ints = [2]> ()\n i = Constant <value_ints = [4]> ()\n"
        " a = Shape (t)\n b = Slice (a, e, f)\n c = Concat <axis = 0> (e, b, i)\n h = ConstantOfShape (c)\n"
        " j = Shape (t)\n k = Slice (j, e, f)\n l = Concat <axis = 0> (e, k, i)\n m = ConstantOfShape (l)\n"
        " y = LSTM <hidden_size = 4> (t, w, r, , , h, m)", {**LSTM, **P}, "float[N,8,L] x", "float[L,1,N,4] y"),
    "gru-both-ways": Case(
        f'{BEFORE}\n t = Transpose <perm = [2, 0, 1]> (z)\n y = GRU <hidden_size = 4, direction = "bidirectional"> (t, w, r)',
        {"w": (2, 12, 8), "r": (2, 12, 4), **P}, "float[N,8,L] x", "float[L,2,N,4] y",
    ),
    "rnn": Case(f"{BEFORE}\n t = Transpose <perm = [2, 0, 1]> (z)\n y = RNN <hidden_size = 4> (t, w, r, b)",
        {"w": (1, 4, 8), "r": (1, 4, 4), "b": (1, 8), **P}, "float[N,8,L] x", "float[L,1,N,4] y"),
    "shuffled": Case(f"u = Conv (x, w)\n i = Constant <value_ints = [3, 1, 0, 2, -1, 6, 5, 4]> ()\n z = Gather <axis = 1> (u, i)\n {AFTER}",
        {"w": (8, 6, 3, 3), **P}, "float[N,6,H,W] x"),
    "chosen-below": Case(f"{BEFORE}\n i = Constant <value_ints = [7, 0, 0]> ()\n u = Gather <axis = 1> (z, i)\n y = Conv (u, w)",
        {"w": (4, 3, 3, 3), **P}, X, "float[N,4,A,B] y"),
    "channel-shuffle": Case("u = Conv (x, w)\n"
        " s = Constant <value_ints = [0, 2, 4, 6, 6]> ()\n t = Constant <value_ints = [0, 8, 6, 6]> ()\n"
        " a = Reshape (u, s)\n b = Transpose <perm = [0, 2, 1, 3, 4]> (a)\n" f" z = Reshape (b, t)\n {AFTER}",
        {"w": (8, 6, 3, 3), **P}, "float[N,6,8,8] x", "float[N,8,6,6] y"),
    "channel-shuffle-below": Case(f"{BEFORE.replace('z =', 'u =')}\n"
        " s = Constant <value_ints = [0, 2, 4, 6, 6]> ()\n t = Constant <value_ints = [0, 8, 6, 6]> ()\n"
        " a = Reshape (u, s)\n b = Transpose <perm = [0, 2, 1, 3, 4]> (a)\n" " z = Reshape (b, t)\n y = Conv (z, w)",
        {"w": (4, 8, 3, 3), **P}, "float[N,8,6,6] x", "float[N,4,4,4] y"),
    "another-axis": Case(f"u = Conv (x, w)\n i = Constant <value_int = 1> ()\n z = Gather <axis = 2> (u, i)\n {AFTER}",
        {"w": (8, 6, 3, 3), **P}, "float[N,6,H,W] x", "float[N,8,A] y"),
    "expanded": Case(f"u = Conv (x, w)\n s = Constant <value_ints = [3, 8, 5, 5]> ()\n z = Expand (u, s)\n {AFTER}",
        {"w": (8, 6, 3, 3), **P}, "float[1,6,3,3] x", "float[3,8,5,5] y"),
    "tiled": Case(f"u = Conv (x, w)\n s = Constant <value_ints = [1, 1, 2, 1]> ()\n z = Tile (u, s)\n {AFTER}",
        {"w": (8, 6, 3, 3), **P}, "float[N,6,4,4] x", "float[N,8,4,2] y"),
    "summed": Case("u = Conv (x, w)\n s = Constant <value_ints = [2, 3]> ()\n z = ReduceSum (u, s)\n y = Mul (z, k_s)",
        {"w": (8, 6, 3, 3), "k_s": (8, 1, 1)}, "float[N,6,5,5] x", "float[N,8,1,1] y"),
    "einsum": Case(f'u = Einsum <equation = "bi,io->bo"> (x, w)\n z = Add (u, b)\n {AFTER}',
        {"w": (6, 8), "b": (8,), **P}, "float[N,6] x", "float[N,8] y"),
    "einsum-weight-first": Case(f'u = Einsum <equation = "oi,bihw->bohw"> (w, x)\n z = Add (u, b)\n {AFTER}',
        {"w": (8, 6), "b": (8, 1, 1), **P}, "float[N,6,H,W] x"),
    "einsum-heads": Case(f'u = Einsum <equation = "bldh, hdo -> bol"> (x, w)\n z = Add (u, b)\n {AFTER}',
        {"w": (3, 4, 8), "b": (8, 1), **P}, "float[N,L,4,3] x", "float[N,8,L] y"),
    "einsum-ellipsis": Case(
        f'u = Einsum <equation = "...i,oi->...o"> (x, w)\n t = Transpose <perm = [0, 2, 1]> (u)\n z = Add (t, b)\n {AFTER}',
        {"w": (8, 6), "b": (8, 1), **P}, "float[N,L,6] x", "float[N,8,L] y",
    ),
    "einsum-channel-of-both": Case('z = Einsum <equation = "bchw,ck->bchk"> (x, w)\n y = Mul (z, k_s)',
        {"w": (8, 5), "k_s": (8, 1, 1)}, "float[N,8,H,5] x", "float[N,8,H,5] y"),
    "einsum-behind-a-scaling": Case('z = Mul (x, k_s)\n y = Einsum <equation = "bchw,ckw->bhk"> (z, w)',
        {"w": (8, 3, 5), "k_s": (8, 1, 1)}, "float[N,8,H,5] x", "float[N,H,3] y"),
    "einsum-below": Case(f'{BEFORE}\n u = Einsum <equation = "bihw,oi->bhwo"> (z, w)\n y = Add (u, b)',
        {"w": (4, 8), "b": (4,), **P}, X, "float[N,H,W,4] y"),
    "einsum-below-alone": Case(f'{BEFORE}\n y = Einsum <equation = "bi,io->bo"> (z, w)', {"w": (8, 4), **P},
        "float[N,8] x", "float[N,4] y"),
}  # fmt: skip
STAYS = {
    "deform-shift-below": Case(f"{BEFORE}\n y = DeformConv (z, w, o)", {"w": (4, 8, 3, 3), **P},
        "float[2,8,9,9] x, float[2,18,7,7] o", "float[2,4,7,7] y", left=1),
    "deform-of-its-offset": Case(
        "a = Conv (x, v)\n o = BatchNormalization (a, p_s, p_b, p_m, p_v)\n s = Mul (o, o)\n y = DeformConv (x, w, s)",
        {"v": (18, 6, 3, 3), "w": (8, 6, 3, 3), **batch_norm("p", 18)}, "float[2,6,9,9] x", "float[2,8,7,7] y",
    ),
    "mmcv-without-bias": Case("z = mmdeploy.MMCVDeformConv2d (x, o, w)\n y = Sigmoid (z)", {"w": (8, 6, 3, 3)},
        **DEFORM, runs=False, header=MMCV),
    "group-per-group": Case(f"z = GroupNormalization <num_groups = 2> (x, a, b)\n {AFTER}", {"a": (2,), "b": (2,), **P}, opset=18, left=1),
    "in-front-of-instance": Case(f"{BEFORE}\n y = InstanceNormalization (z, a, b)", {"a": (8,), "b": (8,), **P}, left=1),
    "layer-of-others": Case(f"z = LayerNormalization (x, a)\n {AFTER}", {"a": (5,), **P}, "float[N,8,5] x", "float[N,8,5] y", left=1),
    "rms-shift": Case(f"z = RMSNormalization (x, a)\n {AFTER}", {"a": (8,), **P}, "float[N,8] x", "float[N,8] y", opset=23),
    "shared-table": Case("z = Gather (t, i)\n u = Gather (t, j)\n v = BatchNormalization (z, p_s, p_b, p_m, p_v)\n y = Mul (u, v)",
        {"t": (20, 8), **P}, "int64[N] i, int64[N] j", "float[N,8] y", left=1),
    "rows-of-the-table": Case(f"z = Gather <axis = 1> (t, i)\n {AFTER}", {"t": (5, 20), **P}, "int64[8] i", "float[5,8] y", left=1),
    "twice": Case(f"u = Conv (x, w)\n i = Constant <value_ints = [0, 1, 2, 3, 4, 5, 6, 6]> ()\n z = Gather <axis = 1> (u, i)\n {AFTER}",
        {"w": (8, 6, 3, 3), **P}, "float[N,6,H,W] x", left=1),
    "shuffle-read-between": Case("u = Conv (x, w)\n"
        " s = Constant <value_ints = [0, 2, 4, 6, 6]> ()\n t = Constant <value_ints = [0, 8, 6, 6]> ()\n"
        " a = Reshape (u, s)\n b = Transpose <perm = [0, 2, 1, 3, 4]> (a)\n"
        " z = Reshape (b, t)\n m = BatchNormalization (z, p_s, p_b, p_m, p_v)\n n = Reshape (a, t)\n y = Mul (m, n)",
        {"w": (8, 6, 3, 3), **P}, "float[N,6,8,8] x", "float[N,8,6,6] y", left=1),
    "shuffle-with-positions": Case(
        "u = Conv (x, w)\n s = Constant <value_ints = [0, 2, 4, 6, 6]> ()\n t = Constant <value_ints = [0, 8, 6, 6]> ()\n"
        f" a = Reshape (u, s)\n b = Transpose <perm = [0, 3, 2, 1, 4]> (a)\n z = Reshape (b, t)\n {AFTER}",
        {"w": (8, 6, 3, 3), **P}, "float[N,6,8,8] x", "float[N,8,6,6] y", left=1,
    ),
    "indices-that-vary": Case(f"u = Conv (x, w)\n z = Gather <axis = 1> (u, i)\n {AFTER}", {"w": (8, 6, 3, 3), **P},
        "float[N,6,H,W] x, int64[8] i", left=1),
    "expanded-channels": Case(f"u = Conv (x, w)\n s = Constant <value_ints = [1, 8, 1, 1]> ()\n z = Expand (u, s)\n {AFTER}",
        {"w": (1, 6, 3, 3), **P}, "float[N,6,5,5] x", "float[N,8,3,3] y", left=1),
    "tiled-channels": Case(f"u = Conv (x, w)\n s = Constant <value_ints = [1, 2, 1, 1]> ()\n z = Tile (u, s)\n {AFTER}",
        {"w": (4, 6, 3, 3), **P}, "float[N,6,5,5] x", "float[N,8,3,3] y", left=1),
    "summed-shift": Case(f"u = Conv (x, w)\n s = Constant <value_ints = [2, 3]> ()\n z = ReduceSum (u, s)\n {AFTER}\n",
        {"w": (8, 6, 3, 3), **P}, "float[N,6,5,5] x", "float[N,8,1,1] y"),
    "einsum-diagonal": Case(f'u = Einsum <equation = "bcc,co->boc"> (x, w)\n {AFTER.replace("(z", "(u")}',
        {"w": (8, 8), **P}, "float[N,8,8] x", "float[N,8,8] y", left=1),
    "einsum-of-two": Case(f'u = Einsum <equation = "bij,bjk->bik"> (x, v)\n {AFTER.replace("(z", "(u")}', P,
        "float[N,8,5] x, float[N,5,8] v", "float[N,8,8] y", left=1),
    "einsum-of-three": Case(f'u = Einsum <equation = "bi,io,o->bo"> (x, w, v)\n {AFTER.replace("(z", "(u")}',
        {"w": (6, 8), "v": (8,), **P}, "float[N,6] x", "float[N,8] y", left=1),
    "einsum-implicit": Case(f'u = Einsum <equation = "bi,io"> (x, w)\n {AFTER.replace("(z", "(u")}', {"w": (6, 8), **P},
        "float[N,6] x", "float[N,8] y", left=1),
    "einsum-axis-of-the-data": Case(f'u = Einsum <equation = "bchw,wk->bchk"> (x, w)\n {AFTER.replace("(z", "(u")}',
        {"w": (8, 8), **P}, "float[N,8,H,8] x", "float[N,8,H,8] y", left=1),
    "einsum-shift-of-two-sums": Case(f'{BEFORE}\n y = Einsum <equation = "bchw,cw->bh"> (z, w)', {"w": (8, 5), **P},
        "float[N,8,H,5] x", "float[N,H] y", left=1),
    "lstm-of-time": Case("z = BatchNormalization (x, p_s, p_b, p_m, p_v)\n y = LSTM <hidden_size = 4> (z, w, r)",
        {"w": (1, 16, 8), "r": (1, 16, 4), **P}, "float[L,8,8] x", "float[L,1,8,4] y", left=1),
}  # fmt: skip


@pytest.mark.parametrize("name", LEAVES)
def test_it_takes_the_map(name: str) -> None:
    case = LEAVES[name]
    sizes = {"H": 6, "W": 5, "L": 4}
    if case.runs and "int64" not in case.inputs and case.opset < 23:
        _, result = fold_and_check(case.model(), sizes=sizes, oracle=False)
    else:
        result = fold(case.model(), verify="both" if case.runs else "local")
    assert batch_norms(to_proto(result.model)) == 0
    assert [site.outcome for site in result.report.sites] == ["folded"]
    assert {proof.method for proof in result.report.verification.sites} == {"proved"}


@pytest.mark.parametrize("name", STAYS)
def test_it_stays_with_a_reason(name: str) -> None:
    case = STAYS[name]
    result = fold(case.model(), verify="both" if case.runs else "local")
    assert batch_norms(to_proto(result.model)) == case.left
    if case.left:
        assert all(site.reason for site in result.report.kept)
    verdict = result.report.verification
    assert verdict is None or verdict.passed


@pytest.mark.parametrize("name", LEAVES)
def test_wrong_parameters_are_not_proved(name: str) -> None:
    """One element of each parameter is off by 1 % of the largest, or two are exchanged."""
    source = LEAVES[name].model()
    result = fold(source, verify=False)
    report, folded = result.report, to_proto(result.model)
    assert prove_claims(source, folded, report).passed
    generator = np.random.default_rng(0)
    for index, tensor in enumerate(folded.graph.initializer):
        if tensor.data_type != onnx.TensorProto.FLOAT:
            continue
        values = onnx.numpy_helper.to_array(tensor)
        for kind in ("off", "exchanged"):
            wrong, changed = copy.deepcopy(folded), values.copy().reshape(-1)
            place = generator.integers(changed.size)
            if kind == "off":
                changed[place] += np.float32(0.01) * (np.abs(values).max() or 1)
            else:
                other = (place + changed.size // 2) % changed.size
                changed[[place, other]] = changed[[other, place]]
            wrong.graph.initializer[index].CopyFrom(
                onnx.numpy_helper.from_array(changed.reshape(values.shape), tensor.name)
            )
            assert not prove_claims(source, wrong, report).passed, (tensor.name, kind)


@pytest.mark.parametrize("name", ["deform-mask-bias-19", "instance", "layer"])
def test_a_bias_of_another_rank_is_no_fold(name: str) -> None:
    source = LEAVES[name].model()
    result = fold(source, verify=False)
    folded = to_proto(result.model)
    for tensor in folded.graph.initializer:
        if list(tensor.dims) == [8]:
            tensor.dims.insert(0, 1)
    assert not prove_claims(source, folded, result.report).passed


def test_without_a_bias_an_add_stays() -> None:
    case = Case(f"z = mmdeploy.MMCVDeformConv2d (x, o, w)\n {AFTER}", {"w": (8, 6, 3, 3), **P}, **DEFORM, header=MMCV)
    result = fold(case.model(), verify="local", standard_ops=False)
    # Their outputs' rank is known to nobody, unless the file tells: then no Add can take the shift.
    assert operators_of(result) == ["MMCVDeformConv2d", "BatchNormalization"]
    told = case.model()
    told.graph.value_info.append(onnx.helper.make_tensor_value_info("z", 1, [2, 8, 7, 7]))
    result = fold(told, verify="local", standard_ops=False)
    assert operators_of(result) == ["MMCVDeformConv2d", "Add"]
    assert {proof.method for proof in result.report.verification.sites} == {"proved"}


def check_random(seeds: range) -> None:
    names = list(LEAVES)
    for seed in seeds:
        case = LEAVES[names[seed % len(names)]]
        source = case.model(seed)
        generator = np.random.default_rng(seed)
        for tensor in source.graph.initializer:
            values = onnx.numpy_helper.to_array(tensor)
            if values.dtype == np.float32 and not tensor.name.endswith(("_v", "t")):
                scaled = values * np.float32(10.0 ** generator.uniform(-3, 3))
                tensor.CopyFrom(onnx.numpy_helper.from_array(scaled, tensor.name))
        result = fold(source, verify="both" if case.runs and seed % 2 else "local")
        verdict = result.report.verification
        assert verdict.passed and {proof.method for proof in verdict.sites} == {"proved"}, (seed, verdict)
        assert batch_norms(to_proto(result.model)) == 0, seed


def test_random_parameters() -> None:
    check_random(range(30))


@pytest.mark.slow
def test_300_random_parameters() -> None:
    check_random(range(1000, 1300))
