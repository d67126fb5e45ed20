"""Operators that take a map in parameters of their own: deformable convolutions, norms, tables, recurrent layers, Einsum."""

from __future__ import annotations

import functools

from tests.folding.corpus.case import MMCV, Case

NORM, SWAP = "y = Norm (z, p:8)", "b = Transpose <perm=[0, 2, 1, 3, 4]> (a)"
_case = functools.partial(Case, opset=22)
CASES: dict[str, Case] = {
    "deform": _case(f"z = DeformConv (x, w:8.6.3.3, o) {NORM}", "DeformConv", ins="float[2,6,9,9] x, float[2,18,7,7] o", judge="run"),
    "deform-mask-bias-19": _case(f"z = DeformConv (x, w:8.6.3.3, o, b:8, m) {NORM}", "DeformConv",
        ins="float[2,6,9,9] x, float[2,18,7,7] o, float[2,9,7,7] m", opset=19, judge="run"),
    "deform-groups": _case(f"z = DeformConv <group = 2> (x, w:8.3.3.3, o) {NORM}", "DeformConv",
        ins="float[2,6,9,9] x, float[2,18,7,7] o", judge="run"),
    "deform-own-offset": _case(f"o = Conv (x, v:18.6.3.3, c:18) z = DeformConv (x, w:8.6.3.3, o) {NORM}",
        "Conv DeformConv", ins="float[2,6,9,9] x", judge="run"),
    "mmcv": _case(f"z = mmdeploy.MMCVModulatedDeformConv2d <groups = 2, deform_groups = 1> (x, o, m, w:8.3.3.3, b:8) {NORM}",
        "DeformConv", ins="float[2,6,9,9] x, float[2,18,7,7] o, float[2,9,7,7] m", header=MMCV, judge="proof"),
    "mmcv-no-bias": _case(f"z = mmdeploy.MMCVModulatedDeformConv2d (x, o, m, w:8.6.3.3) {NORM}", "DeformConv",
        ins="float[2,6,9,9] x, float[2,18,7,7] o, float[2,9,7,7] m", header=MMCV, judge="proof"),
    "instance": _case(f"z = InstanceNormalization (x, a:8, b:8) {NORM}", "InstanceNormalization", ins="float[N,8,H,W] x"),
    "group": _case(f"z = GroupNormalization <num_groups = 2> (x, a:8, b:8) {NORM}", "GroupNormalization",
        ins="float[N,8,H,W] x", outs="float[N,8,H,W] y"),
    "layer": _case(f"z = LayerNormalization (x, a:8, b:8) {NORM}", "LayerNormalization", ins="float[N,8] x"),
    "layer-no-bias": _case(f"z = LayerNormalization (x, a:8) {NORM}", "LayerNormalization", ins="float[N,8] x"),
    "layer-of-all": _case(f"z = LayerNormalization <axis = 1> (x, a:8.5) {NORM}", "LayerNormalization", ins="float[N,8,5] x"),
    "layer-columns": _case(f"u = LayerNormalization (x, a:8) z = Transpose <perm=[0, 2, 1]> (u) {NORM}",
        "LayerNormalization Transpose", ins="float[N,L,8] x"),
    "rms": _case("z = RMSNormalization (x, a:8) y = Mul (z, k_s:8)", "RMSNormalization", ins="float[N,8] x", opset=23, judge="proof"),
    "embedding": _case(f"z = Gather (t:20.8, i) {NORM}", "Gather", ins="int64[N] i"),
    "embedding-sequence": _case(f"u = Gather (t:20.8, i) z = Transpose <perm=[0, 2, 1]> (u) {NORM}",
        "Gather Transpose", ins="int64[N,L] i"),
    "lstm": _case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) y = LSTM <hidden_size = 4> (t, w:1.16.8, r:1.16.4)",
        "Transpose LSTM", ins="float[N,8,L] x"),
    "lstm-peepholes": _case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) "
        "y = LSTM <hidden_size = 4> (t, w:1.16.8, r:1.16.4, b:1.32, , , , q:1.12)", "Transpose LSTM", ins="float[N,8,L] x"),
    "lstm-states": _case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) _, y, "
        "c = LSTM <hidden_size = 4> (t, w:1.16.8, r:1.16.4, b:1.32)", "Transpose LSTM", ins="float[N,8,L] x", outs="y, c"),
    "lstm-states-of-its-size": _case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) e = Constant <value_ints=[1]> () f = Constant "
        "<value_ints=[2]> () i = Constant <value_ints=[4]> () a = Shape (t) b = Slice (a, e, f) c = Concat <axis = 0> (e, b, i) h = "
        "ConstantOfShape (c) j = Shape (t) k = Slice (j, e, f) l = Concat <axis = 0> (e, k, i) m = ConstantOfShape (l) y = LSTM "
        "<hidden_size = 4> (t, w:1.16.8, r:1.16.4, , , h, m)", "Transpose Constant Constant Constant Shape Slice Concat ConstantOfShape "
        "Shape Slice Concat ConstantOfShape LSTM", ins="float[N,8,L] x"),
    "gru-both-ways": _case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) "
        'y = GRU <hidden_size = 4, direction = "bidirectional"> (t, w:2.12.8, r:2.12.4)', "Transpose GRU", ins="float[N,8,L] x"),
    "rnn": _case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) y = RNN <hidden_size = 4> (t, w:1.4.8, r:1.4.4, b:1.8)",
        "Transpose RNN", ins="float[N,8,L] x"),
    "shuffled": _case("u = Conv (x, w:8.6.3.3) i = Constant <value_ints=[3, 1, 0, 2, -1, 6, 5, 4]> () z = Gather <axis = 1> (u, i) "
        f"{NORM}", "Conv Constant Gather"),
    "chosen-below": _case("z = Norm (x, p:8) i = Constant <value_ints=[7, 0, 0]> () u = Gather <axis = 1> (z, i) "
        "y = Conv (u, w:4.3.3.3)", "Constant Gather Conv", ins="float[N,8,H,W] x"),
    "channel-shuffle": _case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[0, 2, 4, 6, 6]> () t = Constant <value_ints=[0, 8, 6, 6]> "
        f"() a = Reshape (u, s) {SWAP} z = Reshape (b, t) {NORM}", "Conv Constant Constant Reshape Transpose Reshape",
        ins="float[N,6,8,8] x"),
    "channel-shuffle-below": _case("u = Norm (x, p:8) s = Constant <value_ints=[0, 2, 4, 6, 6]> () t = Constant <value_ints=[0, 8, 6, 6]> "
        f"() a = Reshape (u, s) {SWAP} z = Reshape (b, t) y = Conv (z, w:4.8.3.3)", "Constant Constant Reshape Transpose Reshape Conv",
        ins="float[N,8,6,6] x"),
    "another-axis": _case(f"u = Conv (x, w:8.6.3.3) i = Constant <value_int = 1> () z = Gather <axis = 2> (u, i) {NORM}",
        "Conv Constant Gather"),
    "expanded": _case(f"u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[3, 8, 5, 5]> () z = Expand (u, s) {NORM}",
        "Conv Constant Expand", ins="float[1,6,3,3] x"),
    "tiled": _case(f"u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[1, 1, 2, 1]> () z = Tile (u, s) {NORM}",
        "Conv Constant Tile", ins="float[N,6,4,4] x"),
    "summed": _case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[2, 3]> () z = ReduceSum (u, s) y = Mul (z, k_s:8.1.1)",
        "Conv Constant ReduceSum", ins="float[N,6,5,5] x"),
    "einsum": _case(f'u = Einsum <equation = "bi,io->bo"> (x, w:6.8) z = Add (u, b:8) {NORM}', "Einsum Add", ins="float[N,6] x"),
    "einsum-weight-first": _case(f'u = Einsum <equation = "oi,bihw->bohw"> (w:8.6, x) z = Add (u, b:8.1.1) {NORM}', "Einsum Add"),
    "einsum-heads": _case(f'u = Einsum <equation = "bldh, hdo -> bol"> (x, w:3.4.8) z = Add (u, b:8.1) {NORM}',
        "Einsum Add", ins="float[N,L,4,3] x"),
    "einsum-ellipsis": _case('u = Einsum <equation = "...i,oi->...o"> (x, w:8.6) t = Transpose <perm=[0, 2, 1]> (u) z = Add (t, b:8.1) '
        f'{NORM}', "Einsum Transpose Add", ins="float[N,L,6] x"),
    "einsum-channel-of-both": _case('z = Einsum <equation = "bchw,ck->bchk"> (x, w:8.5) y = Mul (z, k_s:8.1.1)', "Einsum",
        ins="float[N,8,H,5] x"),
    "einsum-behind-a-scaling": _case('z = Mul (x, k_s:8.1.1) y = Einsum <equation = "bchw,ckw->bhk"> (z, w:8.3.5)', "Einsum",
        ins="float[N,8,H,5] x"),
    "einsum-below": _case('z = Norm (x, p:8) u = Einsum <equation = "bihw,oi->bhwo"> (z, w:4.8) y = Add (u, b:4)', "Einsum Add",
        ins="float[N,8,H,W] x"),
    "einsum-below-alone": _case('z = Norm (x, p:8) y = Einsum <equation = "bi,io->bo"> (z, w:8.4)', "Einsum Add", ins="float[N,8] x"),
    "stays-deform-shift-below": _case("z = Norm (x, p:8) y = DeformConv (z, w:4.8.3.3, o)", "BatchNormalization DeformConv",
        ins="float[2,8,9,9] x, float[2,18,7,7] o", judge="run"),
    "stays-deform-of-its-offset": _case("a = Conv (x, v:18.6.3.3) o = Norm (a, p:18) s = Mul (o, o) "
        "y = DeformConv (x, w:8.6.3.3, s)", "Conv Mul DeformConv", ins="float[2,6,9,9] x", judge="run"),
    "stays-mmcv-without-bias": _case("z = mmdeploy.MMCVDeformConv2d (x, o, w:8.6.3.3) y = Sigmoid (z)", "DeformConv Sigmoid",
        ins="float[2,6,9,9] x, float[2,18,7,7] o", header=MMCV, judge="proof"),
    "stays-group-per-group": _case(f"z = GroupNormalization <num_groups = 2> (x, a:2, b:2) {NORM}",
        "GroupNormalization BatchNormalization", ins="float[N,8,H,W] x", outs="float[N,8,H,W] y", opset=18, judge="proof"),
    "stays-in-front-of-instance": _case("z = Norm (x, p:8) y = InstanceNormalization (z, a:8, b:8)",
        "BatchNormalization InstanceNormalization", ins="float[N,8,H,W] x"),
    "stays-layer-of-others": _case(f"z = LayerNormalization (x, a:5) {NORM}", "LayerNormalization BatchNormalization",
        ins="float[N,8,5] x"),
    "stays-rms-shift": _case(f"z = RMSNormalization (x, a:8) {NORM}", "RMSNormalization Add", ins="float[N,8] x", opset=23),
    "stays-shared-table": _case("z = Gather (t:20.8, i) u = Gather (t, j) v = Norm (z, p:8) y = Mul (u, v)",
        "Gather Gather BatchNormalization Mul", ins="int64[N] i, int64[N] j"),
    "stays-rows-of-the-table": _case(f"z = Gather <axis = 1> (t:5.20, i) {NORM}", "Gather BatchNormalization", ins="int64[8] i"),
    "stays-twice": _case("u = Conv (x, w:8.6.3.3) i = Constant <value_ints=[0, 1, 2, 3, 4, 5, 6, 6]> () z = Gather <axis = 1> (u, i) "
        f"{NORM}", "Conv Constant Gather BatchNormalization"),
    "stays-shuffle-read-between": _case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[0, 2, 4, 6, 6]> () t = Constant "
        f"<value_ints=[0, 8, 6, 6]> () a = Reshape (u, s) {SWAP} z = Reshape (b, t) m = Norm (z, p:8) n = Reshape (a, t) y = Mul (m, n)",
        "Conv Constant Constant Reshape Transpose Reshape BatchNormalization Reshape Mul", ins="float[N,6,8,8] x"),
    "stays-shuffle-with-positions": _case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[0, 2, 4, 6, 6]> () t = Constant "
        f"<value_ints=[0, 8, 6, 6]> () a = Reshape (u, s) b = Transpose <perm=[0, 3, 2, 1, 4]> (a) z = Reshape (b, t) {NORM}",
        "Conv Constant Constant Reshape Transpose Reshape BatchNormalization", ins="float[N,6,8,8] x"),
    "stays-indices-that-vary": _case(f"u = Conv (x, w:8.6.3.3) z = Gather <axis = 1> (u, i) {NORM}",
        "Conv Gather BatchNormalization", ins="float[N,6,H,W] x, int64[8] i"),
    "stays-expanded-channels": _case(f"u = Conv (x, w:1.6.3.3) s = Constant <value_ints=[1, 8, 1, 1]> () z = Expand (u, s) {NORM}",
        "Conv Constant Expand BatchNormalization", ins="float[N,6,5,5] x"),
    "stays-tiled-channels": _case(f"u = Conv (x, w:4.6.3.3) s = Constant <value_ints=[1, 2, 1, 1]> () z = Tile (u, s) {NORM}",
        "Conv Constant Tile BatchNormalization", ins="float[N,6,5,5] x"),
    "stays-summed-shift": _case(f"u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[2, 3]> () z = ReduceSum (u, s) {NORM}",
        "Conv Constant ReduceSum Add", ins="float[N,6,5,5] x"),
    "stays-einsum-diagonal": _case('u = Einsum <equation = "bcc,co->boc"> (x, w:8.8) y = Norm (u, p:8)',
        "Einsum BatchNormalization", ins="float[N,8,8] x"),
    "stays-einsum-of-two": _case('u = Einsum <equation = "bij,bjk->bik"> (x, v) y = Norm (u, p:8)', "Einsum BatchNormalization",
        ins="float[N,8,5] x, float[N,5,8] v"),
    "stays-einsum-of-three": _case('u = Einsum <equation = "bi,io,o->bo"> (x, w:6.8, v:8) y = Norm (u, p:8)',
        "Einsum BatchNormalization", ins="float[N,6] x"),
    "stays-einsum-implicit": _case('u = Einsum <equation = "bi,io"> (x, w:6.8) y = Norm (u, p:8)', "Einsum BatchNormalization",
        ins="float[N,6] x"),
    "stays-einsum-axis-of-the-data": _case('u = Einsum <equation = "bchw,wk->bchk"> (x, w:8.8) y = Norm (u, p:8)',
        "Einsum BatchNormalization", ins="float[N,8,H,8] x"),
    "stays-einsum-shift-of-two-sums": _case('z = Norm (x, p:8) y = Einsum <equation = "bchw,cw->bh"> (z, w:8.5)',
        "BatchNormalization Einsum", ins="float[N,8,H,5] x"),
    "stays-lstm-of-time": _case("z = Norm (x, p:8) y = LSTM <hidden_size = 4> (z, w:1.16.8, r:1.16.4)",
        "BatchNormalization LSTM", ins="float[L,8,8] x"),
}  # fmt: skip
