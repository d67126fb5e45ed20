"""The portable body: MMCVSyncBatchNorm of one process in standard ONNX operators.

Attached to a model as a local function under the node's own (domain, name), it lets a runtime
without our library run the node; a runtime with the library runs the kernel. Right for
group_size 1 only: for larger groups it would normalise locally without a word, so those nodes get
no body.

    d      = x - mean        centred twice in training, so that float sums keep |mean| >> std
    invstd = 1 / sqrt(var + eps), 0 where var and eps are both 0
    y      = d * (weight * invstd) + bias

An If on training_mode serves both modes. Sums instead of means survive an empty batch. The caller
passes all five inputs (ones, zeros or neutral statistics for absent ones): ONNX does not infer
types through an absent input of a function.
"""

from __future__ import annotations

import onnx
import onnx.parser

from bnexport import schema

_TEXT = """
<domain: "{domain}", opset_import: ["" : {opset}]>
{name} <{attributes}> ({inputs}) => ({outputs})
{{
    x = CastLike (input, running_mean)
    shape = Shape (input)
    rank = Size (shape)
    zero = Constant <value_ints = [0]> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_int = 2> ()
    step = Constant <value_int = 1> ()
    spatial_rank = Sub (rank, two)
    spatial_rank_1d = Unsqueeze (spatial_rank, zero)
    channels = Shape <start = 1, end = 2> (input)
    spatial_ones = Expand (one, spatial_rank_1d)
    wide = Concat <axis = 0> (one, channels, spatial_ones)
    spatial_axes = Range (two, rank, step)
    axes = Concat <axis = 0> (zero, spatial_axes)
    reduced = Gather <axis = 0> (shape, axes)
    count_int = ReduceProd <keepdims = 0> (reduced)
    count = CastLike (count_int, running_mean)
    mode = Constant <value_int: int = @training_mode> ()
    training = Cast <to = 9> (mode)
    zero_float = Constant <value_float = 0.0> ()
    one_float = Constant <value_float = 1.0> ()
    eps_float = Constant <value_float: float = @eps> ()
    momentum_float = Constant <value_float: float = @momentum> ()
    zero_s = CastLike (zero_float, running_mean)
    one_s = CastLike (one_float, running_mean)
    eps_s = CastLike (eps_float, running_mean)
    momentum_s = CastLike (momentum_float, running_mean)
    centred, saved_mean, var, running_mean_out, running_var_out = If (training) <
        then_branch = from_batch () => (t_centred, t_mean, t_var, t_running_mean, t_running_var) {{
            t_divisor = Max (count, one_s)
            t_sum = ReduceSum <keepdims = 0> (x, axes)
            t_first_mean = Div (t_sum, t_divisor)
            t_first_mean_wide = Reshape <allowzero = 1> (t_first_mean, wide)
            t_first_centred = Sub (x, t_first_mean_wide)
            t_rest_sum = ReduceSum <keepdims = 0> (t_first_centred, axes)
            t_rest = Div (t_rest_sum, t_divisor)
            t_rest_wide = Reshape <allowzero = 1> (t_rest, wide)
            t_centred = Sub (t_first_centred, t_rest_wide)
            t_mean = Add (t_first_mean, t_rest)
            t_square = Mul (t_centred, t_centred)
            t_m2 = ReduceSum <keepdims = 0> (t_square, axes)
            t_var = Div (t_m2, t_divisor)
            t_count_less_one = Sub (count, one_s)
            t_bessel = Max (t_count_less_one, one_s)
            t_unbiased = Div (t_m2, t_bessel)
            t_is_empty = Equal (count, zero_s)
            t_m = Where (t_is_empty, zero_s, momentum_s)
            t_keep = Sub (one_s, t_m)
            t_old_mean = Mul (running_mean, t_keep)
            t_new_mean = Mul (t_mean, t_m)
            t_running_mean = Add (t_old_mean, t_new_mean)
            t_old_var = Mul (running_var, t_keep)
            t_new_var = Mul (t_unbiased, t_m)
            t_running_var = Add (t_old_var, t_new_var)
        }},
        else_branch = from_running () => (e_centred, e_mean, e_var, e_running_mean, e_running_var) {{
            e_mean = Identity (running_mean)
            e_var = Identity (running_var)
            e_running_mean = Identity (running_mean)
            e_running_var = Identity (running_var)
            e_mean_wide = Reshape <allowzero = 1> (running_mean, wide)
            e_centred = Sub (x, e_mean_wide)
        }}
    >
    total = Add (var, eps_s)
    constant_channel = Equal (total, zero_s)
    std = Sqrt (total)
    safe_std = Where (constant_channel, one_s, std)
    inverse = Div (one_s, safe_std)
    saved_invstd = Where (constant_channel, zero_s, inverse)
    scale = Mul (weight, saved_invstd)
    scale_wide = Reshape <allowzero = 1> (scale, wide)
    bias_wide = Reshape <allowzero = 1> (bias, wide)
    scaled = Mul (centred, scale_wide)
    shifted = Add (scaled, bias_wide)
    output = CastLike (shifted, input)
}}
"""

# The first opset with axes as an input of the reductions.
MINIMUM_OPSET = 18


def portable_body(opset: int) -> onnx.FunctionProto:
    """Return the body as a FunctionProto of domain `mmcv` for a model of the given default-domain opset (>= 18)."""
    operator = schema.SYNC_BATCH_NORM
    text = _TEXT.format(
        domain=operator.domain,
        name=operator.name,
        opset=max(opset, MINIMUM_OPSET),
        attributes=", ".join(attribute.name for attribute in operator.attributes),
        inputs=", ".join(value.name for value in operator.inputs),
        outputs=", ".join(value.name for value in operator.outputs),
    )
    return onnx.parser.parse_function(text)
