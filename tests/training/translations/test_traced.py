"""Functions of networks and losses through torch's exporter, forward and backward: one graph a family.

A name that begins with ~ is in `make test-slow` alone. What torch.onnx and torch's decompositions translate without us is met in
`make campaign RUN=zoo-training`.
"""

import pytest
import torch
from torch.nn import functional as F

from bnexport.exporting.substitutes import PlainWeightNorm
from bnexport.sync_bn import operators
from bnexport.training.dropout import SeededDropout
from tests.training.translations.cases import case, check, integers

M, IMAGE, SIGNAL, PIXELS, FEATURES = ("N", 6), ("N", 4, 9, 8), ("N", 3, 9), ("N", 2, 5, 6), ("N", 4, 6, 5)
QUERY, KEY, VECTOR = ("N", 4, 5, 6), ("N", 4, 7, 6), (4,)


def ignored(batch):
    return torch.arange(batch) % 3  # every third is class 1, which is ignored


def weighted(x, target, weight):
    return F.nll_loss(F.log_softmax(x, 1), target, weight.detach().abs(), ignore_index=1)


def interpolated(name, shape, **options):
    return case(name, lambda x: F.interpolate(x, **options), ("N", 2, *shape))


def padded(name, padding, mode="constant", shape=PIXELS, **options):
    return case(name, lambda x: F.pad(x, padding, mode=mode, **options), shape)


def attention(name, *shapes, **options):
    return case(name, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), *shapes)


def masked(name, kind, *mask, **options):
    """kind: of the mask that a tensor of the shape `mask` becomes."""
    attend = F.scaled_dot_product_attention
    return case(name, lambda q, k, v, m: attend(q, k, v, attn_mask=kind(m), **options), QUERY, KEY, KEY, mask)


def allowed(m):
    """Rows and columns at random; one row is masked altogether."""
    rows = torch.arange(m.shape[-2], device=m.device)[:, None]
    return (m.detach() > -0.5) & (rows > 0)


def seeded(name, function, *shapes):
    """The function with the random numbers of seed 3, as a step has them."""

    def drawn(*inputs):
        with SeededDropout(torch.tensor(3)):
            return function(*inputs)

    return case(name, drawn, *shapes)


def windows(x, table, weight):
    """Windows that are shifted, attend with a bias by distance, and go back: the block of Swin Transformers."""
    n, h, w, c = x.shape
    index = torch.tensor([4, 3, 1, 0, 5, 4, 2, 1, 7, 6, 4, 3, 8, 7, 5, 4])
    x = torch.roll(x, (-1, -1), (1, 2))
    parts = x.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
    q, k, v = F.linear(parts, 0.3 * weight).view(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
    bias = table[index].view(4, 4, 2).permute(2, 0, 1)[None]
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(-1, 4, c)
    y = y.view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
    return torch.roll(y, (1, 1), (1, 2))


def standardized_by_batch_norm(x, w, gain):
    """As timm does."""
    flat = F.batch_norm(w.reshape(1, len(w), -1), None, None, weight=gain, training=True, momentum=0.0)
    return F.conv2d(x, flat.reshape_as(w))


def parametrized(x, g, v):
    with PlainWeightNorm():
        return F.linear(x, torch._weight_norm(v, g, 0))


def batch_norm(training, **options):
    def function(x, mean, var, weight, bias):
        # cos(var), say, would be a negative variance.
        mean, var = mean.detach().clone(), var.detach().abs() + 0.5
        return F.batch_norm(x, mean, var, weight, bias, training, **options), mean, var

    return function


def sync(training, affine=True, tracked=True):
    def function(x, mean, var, weight, bias):
        statistics = (mean.detach(), var.detach().abs() + 0.5) if tracked else (None, None)
        parameters = (weight, bias) if affine else (None, None)
        rest = (training, 0.3, 1e-3, "", 1, "exact", "local", 0)
        return operators.sync_batch_norm(x, *statistics, *parameters, *rest)[:3]

    return function


def partly_frozen(x, weight, bias):
    first = F.batch_norm(x.detach(), None, None, weight, bias, True)
    second = F.batch_norm(first * x, None, None, weight.detach(), bias, True)
    return F.batch_norm(second, None, None, None, None, True)


ACTIVATIONS = {
    "relu": F.relu, "relu6": F.relu6, "hardtanh": F.hardtanh, "hardswish": F.hardswish, "hardsigmoid": F.hardsigmoid,
    "silu": F.silu, "gelu": F.gelu, "leaky_relu": lambda x: F.leaky_relu(x, 0.2), "~threshold": lambda x: F.threshold(x, 0.1, 0.2),
    "sigmoid": torch.sigmoid, "softmax": lambda x: F.softmax(x, 1), "~log_softmax": lambda x: F.log_softmax(x, 1),
    "~pow": lambda x: (x * x + 1) ** 1.5, "pow of 1, 2, 3": lambda x: x**1 + x**2 + x**3,
    "pow of integers": lambda x: x * (x > 0).long() ** 2 * (x < 1).long() ** 1.5,
    "softmax of large logits": lambda x: F.softmax(50 * x, 1), "log_softmax of large logits": lambda x: F.log_softmax(50 * x, 1),
}  # fmt: skip
FAMILIES = {
    "activations": [
        *(case(name, lambda x, f=f: f(2 * x), M) for name, f in ACTIVATIONS.items()),
        *(case(f"{'' if dim == 1 else '~'}{f.__name__} of images over {dim}", lambda x, f=f, dim=dim: f(x, dim), ("N", 5, 3, 4))
            for f in (F.softmax, F.log_softmax) for dim in (0, 1, -1)),
    ],
    "losses": [
        case("cross_entropy", F.cross_entropy, M, integers(6, "N")),
        case("weights", weighted, M, ignored, (6,)),
        case("~sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), M, integers(6, "N")),
        case("~none", lambda x, t: F.cross_entropy(x, t, reduction="none"), M, integers(6, "N")),
        case("smoothing", lambda x, t: F.cross_entropy(x, t, ignore_index=1, label_smoothing=0.1), M, ignored),
        case("2d", lambda x, t: F.cross_entropy(x, t, ignore_index=2), ("N", 4, 3, 5), integers(4, "N", 3, 5)),
        case("bce, logits", lambda x, t: F.binary_cross_entropy_with_logits(x, t.sigmoid()), M, M),
        case("mse", F.mse_loss, M, M),
        case("~sum of integers", lambda x: x.sum() * (x > 0).sum() + (x > 0).sum(dtype=torch.float32) + x.mean(), M),
        case("smooth_l1", F.smooth_l1_loss, M, M),
    ],
    "means and norms": [
        case("empty", lambda x: torch.empty_like(x).copy_(x) * x, M),
        case("mean", lambda x: x.mean((2, 3)), ("N", 3, 4, 2)),
        case("mean of all", lambda x: x.mean(), M),
        case("var_mean", lambda x: torch.var_mean(x, (0, 2)), ("N", 4, 5)),
        case("std", lambda x: x.std((1, 2)), ("N", 4, 5)),
        case("layer", lambda x, w: F.layer_norm(x, (5, 6), w), ("N", 5, 6), (5, 6)),
        case("group", lambda x, w, b: F.group_norm(x, 2, w, b), ("N", 6, 5, 3), (6,), (6,)),
    ],
    "attention": [
        attention("plain", QUERY, KEY, KEY),
        attention("~other width of the values", QUERY, KEY, ("N", 4, 7, 3)),
        attention("~causal", QUERY, QUERY, QUERY, is_causal=True),
        attention("causal, more keys", QUERY, KEY, KEY, is_causal=True),
        attention("~causal, more queries", KEY, QUERY, QUERY, is_causal=True),
        attention("~scale", QUERY, KEY, KEY, scale=0.3),
        attention("grouped heads", QUERY, ("N", 2, 7, 6), ("N", 2, 7, 6), enable_gqa=True),
        attention("~grouped heads, causal", QUERY, ("N", 1, 5, 6), ("N", 1, 5, 6), enable_gqa=True, is_causal=True),
        attention("no heads", ("N", 5, 6), ("N", 7, 6), ("N", 7, 6)),
        attention("~two batches", ("N", 2, 3, 5, 6), ("N", 2, 3, 7, 6), ("N", 2, 3, 7, 6)),
        masked("allowed", allowed, "N", 4, 5, 7),
        masked("~allowed, all heads alike", allowed, "N", 1, 5, 7),
        masked("~allowed, all images alike", allowed, 5, 7),
        masked("~bias", lambda m: m.detach(), "N", 4, 5, 7),
        masked("bias, all alike", lambda m: m.detach(), 5, 7),
        masked("trained bias", lambda m: m, 4, 5, 7),
        masked("~trained bias of each image", lambda m: m, "N", 1, 5, 7),
        masked("~trained bias and scale", lambda m: m, 1, 4, 5, 7, scale=0.7),
    ],
    # Attention's dropout, stochastic depth of timm, torchvision and transformers, and what else draws.
    "random numbers": [
        seeded("attention", lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), QUERY, KEY, KEY),
        seeded("stochastic depth", lambda x: x * x.new_empty((x.shape[0], 1)).bernoulli_(0.8).div_(0.8), M),
        seeded("uniform depth", lambda x: x * (0.7 + torch.rand((x.shape[0], 1), dtype=x.dtype)).floor_(), M),
        seeded("~dropout", lambda x: F.dropout(x, 0.4), M),
        seeded("~dropout2d", lambda x: F.dropout2d(x, 0.4), ("N", 6, 2, 3)),
        seeded("~alpha dropout", lambda x: F.alpha_dropout(x, 0.4, True), M),
        seeded("~uniform", lambda x: x + torch.empty_like(x).uniform_(-1, 2), M),
        seeded("~bernoulli", lambda x: x * torch.bernoulli(torch.sigmoid(x.detach())), M),
        seeded("~rand_like", lambda x: x * torch.rand_like(x), M),
    ],
    "parts of transformers": [
        case("layer_norm of channels", lambda x, w,
            b: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w, b).permute(0, 3, 1, 2), FEATURES, (4,), (4,)),
        case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w, 1e-6), ("N", 3, 6), (6,)),
        case("pooling of channels last", lambda x: F.adaptive_avg_pool2d((2 * x).permute(0, 3, 1, 2), 1).flatten(1),
            ("N", 6, 5, 4)),
        case("windows", windows, ("N", 4, 6, 8), (9, 2), (24, 8)),
        case("windows of a dimension", lambda x: x.unfold(3, 3, 2), FEATURES),
        case("as_strided", lambda x: x.as_strided((2, 4), (2, 1), 1) * 2, (3, 4)),
        case("standardized weight, batch norm", standardized_by_batch_norm, FEATURES, (3, 4, 2, 2), (3,)),
        case("~weight norm", parametrized, M, (4, 1), (4, 6)),
    ],
    "batch norms": [
        case("1d", batch_norm(True), ("N", 4), *[VECTOR] * 4),
        case("2d", batch_norm(True, momentum=0.3, eps=1e-3), ("N", 4, 5, 3), *[VECTOR] * 4),
        case("3d", batch_norm(True), ("N", 4, 2, 5, 3), *[VECTOR] * 4),
        case("evaluation", batch_norm(False), ("N", 4, 5, 3), *[VECTOR] * 4),
        case("no statistics", lambda x, w, b: F.batch_norm(x, None, None, w, b, True), ("N", 4, 5), VECTOR, VECTOR),
        case("not affine", lambda x: F.batch_norm(x, None, None, None, None, True), ("N", 4, 5, 3)),
        case("partly frozen", partly_frozen, ("N", 4, 5, 3), VECTOR, VECTOR),
        case("instance norm", lambda x, w, b: F.instance_norm(x, None, None, w, b), ("N", 4, 5, 3), VECTOR, VECTOR),
        # |mean| = 1000 std: sums of squares would lose everything.
        case("offset", lambda x, w: F.batch_norm(x / 8 + 128, None, None, w, None, True), ("N", 4, 7, 5), VECTOR),
        case("sync", sync(True), ("N", 4, 5, 3), *[VECTOR] * 4),
        case("sync, evaluation", sync(False), ("N", 4, 5, 3), *[VECTOR] * 4),
        case("sync, not affine", sync(True, affine=False), ("N", 4, 5), *[VECTOR] * 4),
        case("sync, no statistics", sync(True, tracked=False), ("N", 4, 5, 3), *[VECTOR] * 4),
    ],
    "convolution": [
        case("1d", lambda x, w, b: F.conv1d(x, w, b, 2, 1), ("N", 8, 9), (6, 8, 3), (6,)),
        case("2d", lambda x, w, b: F.conv2d(x, w, b, 2, 1, 2, 2), IMAGE, (6, 2, 3, 3), (6,)),
        case("3d", lambda x, w: F.conv3d(x, w, None, 2, 1), ("N", 2, 5, 4, 6), (3, 2, 3, 3, 3)),
        case("same", lambda x, w: F.conv2d(x, w, padding="same"), IMAGE, (3, 4, 3, 2)),
        case("transposed", lambda x, w, b: F.conv_transpose2d(x, w, b, 2, 1, 1, 2), IMAGE, (4, 3, 3, 3), (6,)),
        case("transposed 1d", lambda x, w: F.conv_transpose1d(x, w, None, 3, 0, 2), ("N", 4, 5), (4, 3, 3)),
        case("frozen weight", lambda x, w, b: F.conv2d(x, w.detach(), b), IMAGE, (3, 4, 3, 3), (3,)),
        case("first layer", lambda x, w, b: F.conv2d(x.detach(), w, b), IMAGE, (3, 4, 3, 3), (3,)),
    ],
    "pooling": [
        case("max 1d", lambda x: F.max_pool1d(x, 3, 2, 1), SIGNAL),
        case("max 2d", lambda x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True), IMAGE),
        case("max 2d, indices", lambda x: F.max_pool2d(x, 2, return_indices=True), IMAGE),
        case("max 3d", lambda x: F.max_pool3d(x, 2), ("N", 2, 5, 6, 7)),
        case("average 1d", lambda x: F.avg_pool1d(x, 3, 2, 1), SIGNAL),
        case("average 2d", lambda x: F.avg_pool2d(x, 2), IMAGE),
        case("average 3d", lambda x: F.avg_pool3d(x, 2), ("N", 2, 5, 6, 7)),
        case("adaptive average 1d", lambda x: F.adaptive_avg_pool1d(x, 4), SIGNAL),
        case("adaptive average 2d", lambda x: F.adaptive_avg_pool2d(x, (3, 2)), IMAGE),
        case("global", lambda x: F.adaptive_avg_pool2d(x, 1), IMAGE),
        case("adaptive max 1d", lambda x: F.adaptive_max_pool1d(x, 4), SIGNAL),
        case("adaptive max 2d", lambda x: F.adaptive_max_pool2d(x, (3, 2)), IMAGE),
    ],
    "interpolation": [
        interpolated("nearest", (5, 7), scale_factor=2),
        interpolated("nearest 1d", (7,), size=11),
        interpolated("bilinear", (5, 7), scale_factor=(1.6, 0.5), mode="bilinear"),
        interpolated("recomputed", (5, 7), scale_factor=1.6, mode="bilinear", recompute_scale_factor=True),
        interpolated("corners", (5, 7), size=(9, 12), mode="bilinear", align_corners=True),
        interpolated("antialias", (5, 7), size=3, mode="bicubic", antialias=True),
        interpolated("trilinear", (3, 4, 5), scale_factor=2.0, mode="trilinear"),
    ],
    "padding": [
        padded("replicate", (1, 2, 0, 3), "replicate"),
        padded("reflect", (1, 2, 0, 3), "reflect"),
        padded("replicate, negative", (-1, 2, 3, -2), "replicate"),
        padded("reflect, negative", (-1, 2, 3, -2), "reflect"),
        padded("~reflect1d", (1, 2), "reflect", ("N", 2, 5)),
        padded("~reflect3d", (1, 2, 0, 1, 2, 1), "reflect", ("N", 2, 3, 4, 5)),
        padded("~replicate3d", (1, 2, 0, 1, 2, 1), "replicate", ("N", 2, 3, 4, 5)),
    ],
}  # fmt: skip


def _runs():
    for family, cases in FAMILIES.items():
        for name, rare, marks in ((family, False, ()), (f"{family}, rare", True, pytest.mark.slow)):
            if chosen := [each for each in cases if each.name.startswith("~") == rare]:
                yield pytest.param(chosen, id=name, marks=marks)


@pytest.mark.parametrize("cases", _runs())
def test_standard_operators(cases):
    check(cases, standard_ops_only=True)


def test_our_nodes():
    # Their ranks and types are the library's matter.
    cases = [each for each in FAMILIES["batch norms"] if each.name not in ("1d", "3d", "instance norm")]
    check(cases, standard_ops_only=False, library=True)
