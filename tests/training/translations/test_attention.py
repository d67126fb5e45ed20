"""Scaled dot-product attention in all its forms: masks, causal, scale, grouped heads, ranks, dropout, and what it builds on."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bnexport.exporting.substitutes import PlainWeightNorm
from bnexport.training.dropout import SeededDropout
from tests.training.translations.cases import case, check

QUERY, KEY = ("N", 4, 5, 6), ("N", 4, 7, 6)
EVERYTHING = pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])


def attention(name, *shapes, **options):
    return case(name, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, **options), *shapes)


def masked(name, kind, *mask, **options):
    """kind: of the mask that a tensor of the shape `mask` becomes."""

    def function(q, k, v, m):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=kind(m), **options)

    return case(name, function, QUERY, KEY, KEY, mask)


def allowed(m):
    """Rows and columns at random; one row is masked altogether."""
    rows = torch.arange(m.shape[-2], device=m.device)[:, None]
    return (m.detach() > -0.5) & (rows > 0)


@EVERYTHING
def test_forms(everything):
    cases = [
        attention("plain", QUERY, KEY, KEY),
        attention("other width of the values", QUERY, KEY, ("N", 4, 7, 3)),
        attention("causal", QUERY, QUERY, QUERY, is_causal=True),
        attention("causal, more keys", QUERY, KEY, KEY, is_causal=True),
        attention("causal, more queries", KEY, QUERY, QUERY, is_causal=True),
        attention("scale", QUERY, KEY, KEY, scale=0.3),
        attention("grouped heads", QUERY, ("N", 2, 7, 6), ("N", 2, 7, 6), enable_gqa=True),
        attention("grouped heads, causal", QUERY, ("N", 1, 5, 6), ("N", 1, 5, 6), enable_gqa=True, is_causal=True),
        attention("no heads", ("N", 5, 6), ("N", 7, 6), ("N", 7, 6)),
        attention("two batches", ("N", 2, 3, 5, 6), ("N", 2, 3, 7, 6), ("N", 2, 3, 7, 6)),
        masked("allowed", allowed, "N", 4, 5, 7),
        masked("allowed, all heads alike", allowed, "N", 1, 5, 7),
        masked("allowed, all images alike", allowed, 5, 7),
        masked("bias", lambda m: m.detach(), "N", 4, 5, 7),
        masked("bias, all alike", lambda m: m.detach(), 5, 7),
        masked("trained bias", lambda m: m, 4, 5, 7),
        masked("trained bias of each image", lambda m: m, "N", 1, 5, 7),
        masked("trained bias and scale", lambda m: m, 1, 4, 5, 7, scale=0.7),
    ]
    common = {"plain", "causal, more keys", "grouped heads", "no heads", "allowed", "bias, all alike", "trained bias"}
    check([each for each in cases if everything or each.name in common])


def _seeded(function):
    """The function with the random numbers of seed 3, as a step has them."""

    def drawn(*inputs):
        with SeededDropout(torch.tensor(3)):
            return function(*inputs)

    return drawn


@EVERYTHING
def test_random_numbers(everything):
    """Attention's dropout, stochastic depth of timm, torchvision and transformers, and what else draws."""

    def attended(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)

    def depth(x):
        return x * x.new_empty((x.shape[0], 1)).bernoulli_(0.8).div_(0.8)

    def rounded(x):
        return x * (0.7 + torch.rand((x.shape[0], 1), dtype=x.dtype)).floor_()

    cases = [
        case("attention", _seeded(attended), QUERY, KEY, KEY),
        case("stochastic depth", _seeded(depth), ("N", 6)),
        case("stochastic depth, uniform", _seeded(rounded), ("N", 6)),
        case("dropout", _seeded(lambda x: F.dropout(x, 0.4)), ("N", 6)),
        case("dropout2d", _seeded(lambda x: F.dropout2d(x, 0.4)), ("N", 6, 2, 3)),
        case("alpha dropout", _seeded(lambda x: F.alpha_dropout(x, 0.4, True)), ("N", 6)),
        case("uniform", _seeded(lambda x: x + torch.empty_like(x).uniform_(-1, 2)), ("N", 6)),
        case("bernoulli", _seeded(lambda x: x * torch.bernoulli(torch.sigmoid(x.detach()))), ("N", 6)),
        case("rand_like", _seeded(lambda x: x * torch.rand_like(x)), ("N", 6)),
    ]
    common = {"attention", "stochastic depth", "stochastic depth, uniform"}
    check([each for each in cases if everything or each.name in common])


class _Blocks(nn.Module):
    """Windows that are shifted, attend with a bias by distance, and go back: the block of Swin Transformers."""

    def __init__(self):
        super().__init__()
        self.register_buffer("index", torch.randint(0, 9, (16,), generator=torch.Generator().manual_seed(0)))

    def forward(self, x, table, weight):
        n, h, w, c = x.shape
        x = torch.roll(x, (-1, -1), (1, 2))
        windows = x.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, c)
        q, k, v = F.linear(windows, 0.3 * weight).view(-1, 4, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        bias = table[self.index].view(4, 4, 2).permute(2, 0, 1)[None]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).reshape(-1, 4, c)
        y = y.view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5).reshape(n, h, w, c)
        return torch.roll(y, (1, 1), (1, 2))


@EVERYTHING
def test_what_transformers_are_made_of(everything):
    def standardized(x, w):
        mean, var = w.mean((1, 2, 3), keepdim=True), w.var((1, 2, 3), keepdim=True, unbiased=False)
        return F.conv2d(x, (w - mean) * torch.rsqrt(var + 1e-5))

    def standardized_by_batch_norm(x, w, gain):
        """As timm does."""
        flat = F.batch_norm(w.reshape(1, len(w), -1), None, None, weight=gain, training=True, momentum=0.0)
        return F.conv2d(x, flat.reshape_as(w))

    def parametrized(x, g, v):
        with PlainWeightNorm():
            return F.linear(x, torch._weight_norm(v, g, 0))

    def spectral(x, w, u):
        u = F.normalize(u.detach(), dim=0)
        with torch.no_grad():
            v = F.normalize(w.t() @ u, dim=0)
        return F.linear(x, w / (u @ w @ v))

    image = ("N", 4, 6, 5)
    cases = [
        case("layer_norm", lambda x, w, b: F.layer_norm(x, (6,), w, b), ("N", 3, 6), (6,), (6,)),
        case("layer_norm, two axes", lambda x: F.layer_norm(x, (3, 6)), ("N", 3, 6)),
        case("layer_norm of channels", lambda x, w,
            b: F.layer_norm(x.permute(0, 2, 3, 1), (4,), w, b).permute(0, 3, 1, 2), image, (4,), (4,)),
        case("group_norm", lambda x, w, b: F.group_norm(x, 2, w, b), image, (4,), (4,)),
        case("group_norm of all", lambda x: F.group_norm(x, 1), image),
        case("rms_norm", lambda x, w: F.rms_norm(x, (6,), w, 1e-6), ("N", 3, 6), (6,)),
        case("rms_norm, own eps", lambda x: F.rms_norm(x, (6,)), ("N", 3, 6)),
        case("gelu", lambda x: F.gelu(2 * x), ("N", 6)),
        case("gelu, tanh", lambda x: F.gelu(2 * x, approximate="tanh"), ("N", 6)),
        case("pooling of channels last", lambda x: F.adaptive_avg_pool2d((2 * x).permute(0, 3, 1, 2), 1).flatten(1),
            ("N", 6, 5, 4)),
        case("windows", _Blocks(), ("N", 4, 6, 8), (9, 2), (24, 8)),
        case("einsum", lambda x, y: torch.einsum("nchw,cd->ndhw", x, y), image, (4, 3)),
        case("einsum, relative positions", lambda x, r: torch.einsum("nhwc,wkc->nhwk", x, r), ("N", 3, 5, 4),
            (5, 7, 4)),
        case("unfold", lambda x: F.unfold(x, 3, padding=1), image),
        case("fold", lambda x: F.fold(x, (4, 3), 2), ("N", 8, 6)),
        case("windows of a dimension", lambda x: x.unfold(3, 3, 2), image),
        case("as_strided", lambda x: x.as_strided((2, 4), (2, 1), 1) * 2, (3, 4)),
        case("positions", lambda i, w: F.embedding(i, w) + w[:4], lambda n: torch.randint(0, 5, (n, 4)), (5, 3)),
        case("class token", lambda x, t: torch.cat([t.expand(x.shape[0], -1, -1), x], 1), ("N", 3, 6), (1, 1, 6)),
        case("standardized weight", standardized, image, (3, 4, 2, 2)),
        case("standardized weight, batch norm", standardized_by_batch_norm, image, (3, 4, 2, 2), (3,)),
        case("weight norm", parametrized, ("N", 6), (4, 1), (4, 6)),
        case("spectral norm", spectral, ("N", 6), (4, 6), (4,)),
        case("normalize", lambda x: F.normalize(x, dim=-1), ("N", 3, 6)),
        case("std", lambda x: x.std((2, 3)), image),
        case("cumsum", lambda x: x.cumsum(1), ("N", 6)),
    ]  # fmt: skip
    common = {"layer_norm of channels", "group_norm", "rms_norm", "gelu", "windows", "einsum", "as_strided"}
    common |= {"standardized weight, batch norm", "windows of a dimension", "pooling of channels last"}
    check([each for each in cases if everything or each.name in common])
