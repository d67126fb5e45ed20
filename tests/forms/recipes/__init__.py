"""How the forms of each operator are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from tests.forms.case import Case, Setting
from tests.forms.recipes import arithmetic, interpolation, moving, parametric, windows

Recipe = Callable[[Setting], Iterator[Case]]
RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(("Add", "Sub", "Mul", "Div"), arithmetic.binary),
    "AveragePool": windows.pool,
    "BatchNormalization": arithmetic.batch_normalization,
    "Cast": arithmetic.cast,
    "CastLike": arithmetic.cast_like,
    "Clip": arithmetic.clip,
    "Concat": moving.concat,
    **dict.fromkeys(("Conv", "ConvTranspose"), windows.conv),
    **dict.fromkeys(("DepthToSpace", "SpaceToDepth"), moving.blocks),
    "DeformConv": parametric.deform_conv,
    "Dropout": arithmetic.dropout,
    "Einsum": arithmetic.einsum,
    "Expand": moving.expand,
    "Flatten": moving.flatten,
    "Gather": moving.gather,
    "Gemm": arithmetic.gemm,
    **dict.fromkeys(("LeakyRelu", "Elu", "HardSigmoid"), arithmetic.alpha),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), parametric.of_channels),
    **dict.fromkeys(("LSTM", "GRU", "RNN"), parametric.recurrent),
    **dict.fromkeys(("LayerNormalization", "RMSNormalization"), parametric.of_last_axes),
    "MatMul": arithmetic.matmul,
    "MaxPool": windows.pool,
    "PRelu": arithmetic.sloped,
    "Pad": moving.pad,
    **dict.fromkeys(("ReduceMean", "ReduceSum", "ReduceMax"), moving.reduction),
    "Reshape": moving.reshape,
    "Resize": interpolation.resize,
    "Shape": moving.shape_of,
    "Slice": moving.slices,
    "Split": moving.split,
    "Squeeze": moving.squeeze,
    "Sum": arithmetic.variadic,
    "Tile": moving.tile,
    "Transpose": moving.transpose,
    "Unsqueeze": moving.unsqueeze,
    "Upsample": interpolation.upsample,
    **dict.fromkeys(
        (
            *("GlobalAveragePool", "GlobalMaxPool", "Identity", "Neg", "Relu"),
            *("Sigmoid", "HardSwish", "Tanh", "Softplus"),
        ),
        windows.plain,
    ),
}
