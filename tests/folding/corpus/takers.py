"""Operators that take a map in parameters of their own: deformable convolutions, norms, tables, recurrent layers, Einsum."""

from __future__ import annotations

from tests.folding.corpus.case import MMCV, Case

CASES: dict[str, Case] = {
    "deform": Case("z = DeformConv (x, w:8.6.3.3, o) y = Norm (z, p:8)", "DeformConv",
        ins="float[2,6,9,9] x, float[2,18,7,7] o", opset=22, judge="run"),
    "deform-mask-bias-19": Case("z = DeformConv (x, w:8.6.3.3, o, b:8, m) y = Norm (z, p:8)", "DeformConv",
        ins="float[2,6,9,9] x, float[2,18,7,7] o, float[2,9,7,7] m", opset=19, judge="run"),
    "deform-groups": Case("z = DeformConv <group = 2> (x, w:8.3.3.3, o) y = Norm (z, p:8)", "DeformConv",
        ins="float[2,6,9,9] x, float[2,18,7,7] o", opset=22, judge="run"),
    "deform-own-offset": Case("o = Conv (x, v:18.6.3.3, c:18) z = DeformConv (x, w:8.6.3.3, o) y = Norm (z, p:8)",
        "Conv DeformConv", ins="float[2,6,9,9] x", opset=22, judge="run"),
    "mmcv": Case("z = mmdeploy.MMCVModulatedDeformConv2d <groups = 2, deform_groups = 1> (x, o, m, w:8.3.3.3, b:8) "
        "y = Norm (z, p:8)", "DeformConv", ins="float[2,6,9,9] x, float[2,18,7,7] o, float[2,9,7,7] m", opset=22, header=MMCV,
        judge="proof"),
    "mmcv-no-bias": Case("z = mmdeploy.MMCVModulatedDeformConv2d (x, o, m, w:8.6.3.3) y = Norm (z, p:8)", "DeformConv",
        ins="float[2,6,9,9] x, float[2,18,7,7] o, float[2,9,7,7] m", opset=22, header=MMCV, judge="proof"),
    "instance": Case("z = InstanceNormalization (x, a:8, b:8) y = Norm (z, p:8)", "InstanceNormalization",
        ins="float[N,8,H,W] x", opset=22),
    "group": Case("z = GroupNormalization <num_groups = 2> (x, a:8, b:8) y = Norm (z, p:8)", "GroupNormalization",
        ins="float[N,8,H,W] x", outs="float[N,8,H,W] y", opset=22),
    "layer": Case("z = LayerNormalization (x, a:8, b:8) y = Norm (z, p:8)", "LayerNormalization", ins="float[N,8] x", opset=22),
    "layer-no-bias": Case("z = LayerNormalization (x, a:8) y = Norm (z, p:8)", "LayerNormalization", ins="float[N,8] x",
        opset=22),
    "layer-of-all": Case("z = LayerNormalization <axis = 1> (x, a:8.5) y = Norm (z, p:8)", "LayerNormalization",
        ins="float[N,8,5] x", opset=22),
    "layer-columns": Case("u = LayerNormalization (x, a:8) z = Transpose <perm=[0, 2, 1]> (u) y = Norm (z, p:8)",
        "LayerNormalization Transpose", ins="float[N,L,8] x", opset=22),
    "rms": Case("z = RMSNormalization (x, a:8) y = Mul (z, k_s:8)", "RMSNormalization", ins="float[N,8] x", opset=23,
        judge="proof"),
    "embedding": Case("z = Gather (t:20.8, i) y = Norm (z, p:8)", "Gather", ins="int64[N] i", opset=22),
    "embedding-sequence": Case("u = Gather (t:20.8, i) z = Transpose <perm=[0, 2, 1]> (u) y = Norm (z, p:8)",
        "Gather Transpose", ins="int64[N,L] i", opset=22),
    "lstm": Case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) y = LSTM <hidden_size = 4> (t, w:1.16.8, r:1.16.4)",
        "Transpose LSTM", ins="float[N,8,L] x", opset=22),
    "lstm-peepholes": Case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) "
        "y = LSTM <hidden_size = 4> (t, w:1.16.8, r:1.16.4, b:1.32, , , , q:1.12)", "Transpose LSTM", ins="float[N,8,L] x",
        opset=22),
    "lstm-states": Case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) _, y, "
        "c = LSTM <hidden_size = 4> (t, w:1.16.8, r:1.16.4, b:1.32)", "Transpose LSTM", ins="float[N,8,L] x", outs="y, c",
        opset=22),
    "lstm-states-of-its-size": Case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) e = Constant <value_ints=[1]> () "
        "f = Constant <value_ints=[2]> () i = Constant <value_ints=[4]> () a = Shape (t) b = Slice (a, e, f) "
        "c = Concat <axis = 0> (e, b, i) h = ConstantOfShape (c) j = Shape (t) k = Slice (j, e, f) "
        "l = Concat <axis = 0> (e, k, i) m = ConstantOfShape (l) y = LSTM <hidden_size = 4> (t, w:1.16.8, r:1.16.4, , , h, m)",
        "Transpose Constant Constant Constant Shape Slice Concat ConstantOfShape Shape Slice Concat ConstantOfShape LSTM",
        ins="float[N,8,L] x", opset=22),
    "gru-both-ways": Case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) "
        'y = GRU <hidden_size = 4, direction = "bidirectional"> (t, w:2.12.8, r:2.12.4)', "Transpose GRU", ins="float[N,8,L] x",
        opset=22),
    "rnn": Case("z = Norm (x, p:8) t = Transpose <perm=[2, 0, 1]> (z) y = RNN <hidden_size = 4> (t, w:1.4.8, r:1.4.4, b:1.8)",
        "Transpose RNN", ins="float[N,8,L] x", opset=22),
    "shuffled": Case("u = Conv (x, w:8.6.3.3) i = Constant <value_ints=[3, 1, 0, 2, -1, 6, 5, 4]> () "
        "z = Gather <axis = 1> (u, i) y = Norm (z, p:8)", "Conv Constant Gather", opset=22),
    "chosen-below": Case("z = Norm (x, p:8) i = Constant <value_ints=[7, 0, 0]> () u = Gather <axis = 1> (z, i) "
        "y = Conv (u, w:4.3.3.3)", "Constant Gather Conv", ins="float[N,8,H,W] x", opset=22),
    "channel-shuffle": Case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[0, 2, 4, 6, 6]> () "
        "t = Constant <value_ints=[0, 8, 6, 6]> () a = Reshape (u, s) b = Transpose <perm=[0, 2, 1, 3, 4]> (a) "
        "z = Reshape (b, t) y = Norm (z, p:8)", "Conv Constant Constant Reshape Transpose Reshape", ins="float[N,6,8,8] x",
        opset=22),
    "channel-shuffle-below": Case("u = Norm (x, p:8) s = Constant <value_ints=[0, 2, 4, 6, 6]> () "
        "t = Constant <value_ints=[0, 8, 6, 6]> () a = Reshape (u, s) b = Transpose <perm=[0, 2, 1, 3, 4]> (a) "
        "z = Reshape (b, t) y = Conv (z, w:4.8.3.3)", "Constant Constant Reshape Transpose Reshape Conv",
        ins="float[N,8,6,6] x", opset=22),
    "another-axis": Case("u = Conv (x, w:8.6.3.3) i = Constant <value_int = 1> () z = Gather <axis = 2> (u, i) "
        "y = Norm (z, p:8)", "Conv Constant Gather", opset=22),
    "expanded": Case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[3, 8, 5, 5]> () z = Expand (u, s) y = Norm (z, p:8)",
        "Conv Constant Expand", ins="float[1,6,3,3] x", opset=22),
    "tiled": Case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[1, 1, 2, 1]> () z = Tile (u, s) y = Norm (z, p:8)",
        "Conv Constant Tile", ins="float[N,6,4,4] x", opset=22),
    "summed": Case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[2, 3]> () z = ReduceSum (u, s) y = Mul (z, k_s:8.1.1)",
        "Conv Constant ReduceSum", ins="float[N,6,5,5] x", opset=22),
    "einsum": Case('u = Einsum <equation = "bi,io->bo"> (x, w:6.8) z = Add (u, b:8) y = Norm (z, p:8)', "Einsum Add",
        ins="float[N,6] x", opset=22),
    "einsum-weight-first": Case('u = Einsum <equation = "oi,bihw->bohw"> (w:8.6, x) z = Add (u, b:8.1.1) y = Norm (z, p:8)',
        "Einsum Add", opset=22),
    "einsum-heads": Case('u = Einsum <equation = "bldh, hdo -> bol"> (x, w:3.4.8) z = Add (u, b:8.1) y = Norm (z, p:8)',
        "Einsum Add", ins="float[N,L,4,3] x", opset=22),
    "einsum-ellipsis": Case('u = Einsum <equation = "...i,oi->...o"> (x, w:8.6) t = Transpose <perm=[0, 2, 1]> (u) '
        "z = Add (t, b:8.1) y = Norm (z, p:8)", "Einsum Transpose Add", ins="float[N,L,6] x", opset=22),
    "einsum-channel-of-both": Case('z = Einsum <equation = "bchw,ck->bchk"> (x, w:8.5) y = Mul (z, k_s:8.1.1)', "Einsum",
        ins="float[N,8,H,5] x", opset=22),
    "einsum-behind-a-scaling": Case('z = Mul (x, k_s:8.1.1) y = Einsum <equation = "bchw,ckw->bhk"> (z, w:8.3.5)', "Einsum",
        ins="float[N,8,H,5] x", opset=22),
    "einsum-below": Case('z = Norm (x, p:8) u = Einsum <equation = "bihw,oi->bhwo"> (z, w:4.8) y = Add (u, b:4)', "Einsum Add",
        ins="float[N,8,H,W] x", opset=22),
    "einsum-below-alone": Case('z = Norm (x, p:8) y = Einsum <equation = "bi,io->bo"> (z, w:8.4)', "Einsum Add",
        ins="float[N,8] x", opset=22),
    "stays-deform-shift-below": Case("z = Norm (x, p:8) y = DeformConv (z, w:4.8.3.3, o)", "BatchNormalization DeformConv",
        ins="float[2,8,9,9] x, float[2,18,7,7] o", opset=22, judge="run"),
    "stays-deform-of-its-offset": Case("a = Conv (x, v:18.6.3.3) o = Norm (a, p:18) s = Mul (o, o) "
        "y = DeformConv (x, w:8.6.3.3, s)", "Conv Mul DeformConv", ins="float[2,6,9,9] x", opset=22, judge="run"),
    "stays-mmcv-without-bias": Case("z = mmdeploy.MMCVDeformConv2d (x, o, w:8.6.3.3) y = Sigmoid (z)", "DeformConv Sigmoid",
        ins="float[2,6,9,9] x, float[2,18,7,7] o", opset=22, header=MMCV, judge="proof"),
    "stays-group-per-group": Case("z = GroupNormalization <num_groups = 2> (x, a:2, b:2) y = Norm (z, p:8)",
        "GroupNormalization BatchNormalization", ins="float[N,8,H,W] x", outs="float[N,8,H,W] y", opset=18, judge="proof"),
    "stays-in-front-of-instance": Case("z = Norm (x, p:8) y = InstanceNormalization (z, a:8, b:8)",
        "BatchNormalization InstanceNormalization", ins="float[N,8,H,W] x", opset=22),
    "stays-layer-of-others": Case("z = LayerNormalization (x, a:5) y = Norm (z, p:8)", "LayerNormalization BatchNormalization",
        ins="float[N,8,5] x", opset=22),
    "stays-rms-shift": Case("z = RMSNormalization (x, a:8) y = Norm (z, p:8)", "RMSNormalization Add", ins="float[N,8] x",
        opset=23),
    "stays-shared-table": Case("z = Gather (t:20.8, i) u = Gather (t, j) v = Norm (z, p:8) y = Mul (u, v)",
        "Gather Gather BatchNormalization Mul", ins="int64[N] i, int64[N] j", opset=22),
    "stays-rows-of-the-table": Case("z = Gather <axis = 1> (t:5.20, i) y = Norm (z, p:8)", "Gather BatchNormalization",
        ins="int64[8] i", opset=22),
    "stays-twice": Case("u = Conv (x, w:8.6.3.3) i = Constant <value_ints=[0, 1, 2, 3, 4, 5, 6, 6]> () "
        "z = Gather <axis = 1> (u, i) y = Norm (z, p:8)", "Conv Constant Gather BatchNormalization", opset=22),
    "stays-shuffle-read-between": Case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[0, 2, 4, 6, 6]> () "
        "t = Constant <value_ints=[0, 8, 6, 6]> () a = Reshape (u, s) b = Transpose <perm=[0, 2, 1, 3, 4]> (a) "
        "z = Reshape (b, t) m = Norm (z, p:8) n = Reshape (a, t) y = Mul (m, n)",
        "Conv Constant Constant Reshape Transpose Reshape BatchNormalization Reshape Mul", ins="float[N,6,8,8] x", opset=22),
    "stays-shuffle-with-positions": Case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[0, 2, 4, 6, 6]> () "
        "t = Constant <value_ints=[0, 8, 6, 6]> () a = Reshape (u, s) b = Transpose <perm=[0, 3, 2, 1, 4]> (a) "
        "z = Reshape (b, t) y = Norm (z, p:8)", "Conv Constant Constant Reshape Transpose Reshape BatchNormalization",
        ins="float[N,6,8,8] x", opset=22),
    "stays-indices-that-vary": Case("u = Conv (x, w:8.6.3.3) z = Gather <axis = 1> (u, i) y = Norm (z, p:8)",
        "Conv Gather BatchNormalization", ins="float[N,6,H,W] x, int64[8] i", opset=22),
    "stays-expanded-channels": Case("u = Conv (x, w:1.6.3.3) s = Constant <value_ints=[1, 8, 1, 1]> () z = Expand (u, s) "
        "y = Norm (z, p:8)", "Conv Constant Expand BatchNormalization", ins="float[N,6,5,5] x", opset=22),
    "stays-tiled-channels": Case("u = Conv (x, w:4.6.3.3) s = Constant <value_ints=[1, 2, 1, 1]> () z = Tile (u, s) "
        "y = Norm (z, p:8)", "Conv Constant Tile BatchNormalization", ins="float[N,6,5,5] x", opset=22),
    "stays-summed-shift": Case("u = Conv (x, w:8.6.3.3) s = Constant <value_ints=[2, 3]> () z = ReduceSum (u, s) "
        "y = Norm (z, p:8)", "Conv Constant ReduceSum Add", ins="float[N,6,5,5] x", opset=22),
    "stays-einsum-diagonal": Case('u = Einsum <equation = "bcc,co->boc"> (x, w:8.8) y = Norm (u, p:8)',
        "Einsum BatchNormalization", ins="float[N,8,8] x", opset=22),
    "stays-einsum-of-two": Case('u = Einsum <equation = "bij,bjk->bik"> (x, v) y = Norm (u, p:8)', "Einsum BatchNormalization",
        ins="float[N,8,5] x, float[N,5,8] v", opset=22),
    "stays-einsum-of-three": Case('u = Einsum <equation = "bi,io,o->bo"> (x, w:6.8, v:8) y = Norm (u, p:8)',
        "Einsum BatchNormalization", ins="float[N,6] x", opset=22),
    "stays-einsum-implicit": Case('u = Einsum <equation = "bi,io"> (x, w:6.8) y = Norm (u, p:8)', "Einsum BatchNormalization",
        ins="float[N,6] x", opset=22),
    "stays-einsum-axis-of-the-data": Case('u = Einsum <equation = "bchw,wk->bchk"> (x, w:8.8) y = Norm (u, p:8)',
        "Einsum BatchNormalization", ins="float[N,8,H,8] x", opset=22),
    "stays-einsum-shift-of-two-sums": Case('z = Norm (x, p:8) y = Einsum <equation = "bchw,cw->bh"> (z, w:8.5)',
        "BatchNormalization Einsum", ins="float[N,8,H,5] x", opset=22),
    "stays-lstm-of-time": Case("z = Norm (x, p:8) y = LSTM <hidden_size = 4> (z, w:1.16.8, r:1.16.4)",
        "BatchNormalization LSTM", ins="float[L,8,8] x", opset=22),
}  # fmt: skip
