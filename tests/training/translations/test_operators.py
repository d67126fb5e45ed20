"""Everything else that networks and losses use: most of it torch.onnx and torch's decompositions translate already.

The default run has what the networks of our tests use; the slow one has all of it.
"""

import pytest
import torch
from torch.nn import functional as F

from tests.training.translations.cases import case, check

M = ("N", 6)


def labels(classes, *shape):
    return lambda batch: torch.randint(0, classes, (batch, *shape))


def choose(everything, cases, common):
    return cases if everything else [case for case in cases if case.name in common]


EVERYTHING = pytest.mark.parametrize("everything", [False, pytest.param(True, marks=pytest.mark.slow)])


@EVERYTHING
def test_activations(everything):
    functions = {
        "relu": F.relu,
        "relu6": F.relu6,
        "hardtanh": F.hardtanh,
        "hardswish": F.hardswish,
        "hardsigmoid": F.hardsigmoid,
        "silu": F.silu,
        "mish": F.mish,
        "gelu": F.gelu,
        "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
        "elu": F.elu,
        "selu": F.selu,
        "celu": F.celu,
        "leaky_relu": lambda x: F.leaky_relu(x, 0.2),
        "threshold": lambda x: F.threshold(x, 0.1, 0.2),
        "softplus": F.softplus,
        "logsigmoid": F.logsigmoid,
        "sigmoid": torch.sigmoid,
        "tanh": torch.tanh,
        "glu": F.glu,
        "softmax": lambda x: F.softmax(x, 1),
        "log_softmax": lambda x: F.log_softmax(x, 1),
        "abs": torch.abs,
        "exp": torch.exp,
        "sqrt": lambda x: (x * x + 1).sqrt(),
        "pow": lambda x: (x * x + 1) ** 1.5,
        "pow of 1, 2, 3": lambda x: x**1 + x**2 + x**3,
        "pow of integers": lambda x: x * (x > 0).long() ** 2 * (x < 1).long() ** 1.5,
        "log": lambda x: (x * x + 1).log(),
        "erf": torch.erf,
        "clamp": lambda x: x.clamp(-0.5, 0.5),
    }
    cases = [case(name, lambda x, f=f: f(2 * x), M) for name, f in functions.items()]
    cases.append(case("prelu", F.prelu, M, (6,)))
    images = ("N", 5, 3, 4)
    for dim in (0, 1, -1):
        cases.append(case(f"softmax of images over {dim}", lambda x, dim=dim: F.softmax(x, dim), images))
        cases.append(case(f"log_softmax of images over {dim}", lambda x, dim=dim: F.log_softmax(x, dim), images))
    cases.append(case("softmax of large logits", lambda x: F.softmax(100 * x, 1), images))
    cases.append(case("log_softmax of large logits", lambda x: F.log_softmax(100 * x, 1), images))
    common = {"softmax of large logits", "log_softmax of large logits"}
    common |= {"relu", "relu6", "hardswish", "hardsigmoid", "silu", "gelu", "sigmoid", "softmax", "leaky_relu"}
    common |= {"pow of 1, 2, 3", "pow of integers", "softmax of images over 1", "log_softmax of images over 1"}
    check(choose(everything, cases, common))


@EVERYTHING
def test_losses(everything):
    def weighted(x, target, weight):
        return F.nll_loss(F.log_softmax(x, 1), target, weight.detach().abs(), ignore_index=1)

    def ignored(batch):
        return torch.arange(batch) % 3  # every third is the class that is ignored

    cases = [
        case("cross_entropy", F.cross_entropy, M, labels(6)),
        case("weights", weighted, M, ignored, (6,)),
        case("sum", lambda x, t: F.cross_entropy(x, t, reduction="sum"), M, labels(6)),
        case("none", lambda x, t: F.cross_entropy(x, t, reduction="none"), M, labels(6)),
        case("smoothing", lambda x, t: F.cross_entropy(x, t, ignore_index=1, label_smoothing=0.1), M, ignored),
        case("2d", lambda x, t: F.cross_entropy(x, t, ignore_index=2), ("N", 4, 3, 5), labels(4, 3, 5)),
        case("probabilities", lambda x, t: F.cross_entropy(x, t.softmax(1)), M, M),
        case("bce, logits", lambda x, t: F.binary_cross_entropy_with_logits(x, t.sigmoid()), M, M),
        case("bce", lambda x, t: F.binary_cross_entropy(x.sigmoid(), t.sigmoid()), M, M),
        case("mse", F.mse_loss, M, M),
        case("sum of integers", lambda x: x.sum() * (x > 0).sum() + (x > 0).sum(dtype=torch.float32) + x.mean(), M),
        case("l1", F.l1_loss, M, M),
        case("smooth_l1", F.smooth_l1_loss, M, M),
        case("huber", F.huber_loss, M, M),
        case("kl_div", lambda x, t: F.kl_div(x.log_softmax(1), t.softmax(1), reduction="batchmean"), M, M),
    ]
    common = {"2d", "bce, logits", "cross_entropy", "mse", "smooth_l1", "smoothing", "weights"}
    check(choose(everything, cases, common))


@EVERYTHING
def test_indexing(everything):
    index = torch.tensor([0, 2, 2, 1])
    cases = [
        case("slice", lambda x: x[:, 1:5:2], M),
        case("select", lambda x: x[:, 1], M),
        case("index", lambda x: x[:, index], M),
        case("index_select", lambda x: x.index_select(1, index), M),
        case("gather", lambda x, i: x.gather(1, i), M, labels(6, 3)),
        case("embedding", lambda i, w: F.embedding(i, w, padding_idx=2), labels(5, 4), (5, 3)),
        case("cat", lambda x, y: torch.cat([x, y], 1), M, ("N", 2)),
        case("split", lambda x: torch.split(x, 2, 1)[1], M),
        case("chunk", lambda x: torch.chunk(x, 3, 1)[2], M),
        case("stack", lambda x, y: torch.stack([x, y], 1), M, M),
        case("unbind", lambda x: x.unbind(1)[1], M),
        case("flip", lambda x: x.flip(1), M),
        case("roll", lambda x: torch.roll(x, 2, 1), M),
        case("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), ("N", 8, 3, 2)),
        case("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, 2), ("N", 2, 4, 6)),
        case("channel shuffle", lambda x: x.view(-1, 2, 3, 4).transpose(1, 2).reshape(-1, 6, 4), ("N", 6, 4)),
        case("expand", lambda x: x.expand(-1, 4, 3).contiguous(), ("N", 4, 1)),
        case("repeat", lambda x: x.repeat(1, 2), M),
        case("empty", lambda x: torch.empty_like(x).copy_(x) * x, M),
        case("tril", torch.tril, ("N", 4, 4)),
        case("where", lambda x, y: torch.where(x > 0, x, y), M, M),
    ]
    common = {"cat", "channel shuffle", "chunk", "embedding", "index", "pixel_shuffle", "select", "slice"}
    check(choose(everything, cases, common))


@EVERYTHING
def test_products_and_reductions(everything):
    def attention(q, k, v, **options):
        return F.scaled_dot_product_attention(q, k, v, **options)

    heads = ("N", 2, 5, 4)
    cases = [
        case("linear", F.linear, M, (4, 6), (4,)),
        case("linear, 3d", F.linear, ("N", 3, 6), (4, 6), (4,)),
        case("matmul", torch.matmul, ("N", 3, 4), ("N", 4, 5)),
        case("einsum", lambda x, y: torch.einsum("nij,jk->nik", x, y), ("N", 3, 4), (4, 5)),
        case("attention", attention, heads, heads, heads),
        case("attention, causal", lambda *a: attention(*a, is_causal=True), heads, heads, heads),
        case("attention, scale", lambda *a: attention(*a, scale=0.3), heads, ("N", 2, 7, 4), ("N", 2, 7, 4)),
        case("attention, mask", lambda q, k, v, m: attention(q, k, v, attn_mask=m.detach() > 0.5), heads, heads, heads,
            ("N", 1, 5, 5)),
        case("mean", lambda x: x.mean((2, 3)), ("N", 3, 4, 2)),
        case("mean of all", lambda x: x.mean(), M),
        case("sum", lambda x: x.sum(1, keepdim=True), M),
        case("max", lambda x: x.max(1)[0], M),
        case("min", lambda x: x.min(1)[0], M),
        case("amax", lambda x: x.amax(1), M),
        case("maximum", torch.maximum, M, M),
        case("minimum", torch.minimum, M, M),
        case("cumsum", lambda x: x.cumsum(1), M),
        case("topk", lambda x: x.topk(2, 1)[0], M),
        case("sort", lambda x: x.sort(1)[0], M),
        case("logsumexp", lambda x: x.logsumexp(1), M),
    ]  # fmt: skip
    common = {"attention", "attention, mask", "linear", "matmul", "max", "mean", "mean of all", "sum"}
    check(choose(everything, cases, common))
