"""What fold_module folds: every layer, both directions, every batch norm class, every type."""

import copy
import pickle

import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
import bnexport.errors
from bnexport import SyncBatchNorm
from bnexport.modules.module_graph import ModuleGraph
from bnexport.modules.module_trace import trace
from models.resnet import digits_resnet
from models.segmentation import Segmenter
from tests.folding.module.nets import Called, fold_and_check, left, trained
from tests.sync_bn import lookalikes

GENERATOR = torch.Generator().manual_seed(0)
X0, X1, X2, X3 = (torch.randn(2, 4, *sizes, generator=GENERATOR) for sizes in ((), (9,), (7, 6), (5, 6, 5)))
functional = nn.functional


def conv(inputs=4, outputs=4, size=1, **options):
    return nn.Conv2d(inputs, outputs, size, **options)


def norm(channels=4, **options):
    return nn.BatchNorm2d(channels, **options)


# A layer and the norm behind it; below, a norm and the layer behind that.
BACKWARD = {
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), X1),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), padding=(1, 0), stride=2), norm(6), X2),
    "conv3d": (nn.Conv3d(4, 6, 3, dilation=2, bias=False), nn.BatchNorm3d(6), X3),
    "groups": (conv(4, 6, 3, groups=2, padding="same"), norm(6), X2),
    "depthwise": (conv(4, 8, 3, groups=4, bias=False), norm(8), X2),
    "circular": (conv(4, 6, 3, padding=1, padding_mode="circular"), norm(6), X2),
    "transposed1d": (nn.ConvTranspose1d(4, 6, 3, 2, output_padding=1), nn.BatchNorm1d(6), X1),
    "transposed2d": (nn.ConvTranspose2d(4, 6, 3, 2, 1, bias=False), norm(6), X2),
    "transposed2d groups": (nn.ConvTranspose2d(4, 6, 3, groups=2), norm(6), X2),
    "transposed3d": (nn.ConvTranspose3d(4, 6, 2, 2), nn.BatchNorm3d(6), X3),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d(6), X0),
    "linear without bias": (nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), X0),
    "no affine": (conv(4, 6, 3), norm(6, affine=False), X2),
    "dropout between": (conv(4, 6, 3), nn.Sequential(nn.Dropout2d(), nn.Identity(), norm(6)), X2),
    "two norms": (conv(4, 6, 3), nn.Sequential(norm(6), norm(6, eps=0.1)), X2),
    "half, the norm in float": (conv(4, 6, 3).half(), norm(6), X2.half()),
    "double": (conv(4, 6, 3).double(), norm(6).double(), X2.double()),
    "bfloat16": (conv(4, 6, 3).bfloat16(), norm(6).bfloat16(), X2.bfloat16()),
    "norm1d <-": (nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3), X1),
    "groups <-": (norm(), conv(4, 6, 3, groups=2, bias=False), X2),
    "stride <-": (norm(), conv(4, 6, 3, stride=2, dilation=2), X2),
    "conv3d <-": (nn.BatchNorm3d(4), nn.Conv3d(4, 6, 2), X3),
    "reflected <-": (norm(), conv(4, 6, 3, padding=1, padding_mode="reflect"), X2),
    "transposed pointwise <-": (norm(), nn.ConvTranspose2d(4, 6, 1, groups=2), X2),
    "linear <-": (nn.BatchNorm1d(4), nn.Linear(4, 6), X0),
    "through dropout <-": (nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), nn.Linear(4, 6)), X0),
    "flattened <-": (norm(), nn.Sequential(nn.Flatten(), nn.Linear(4 * 42, 6)), X2),
    "two norms <-": (nn.Sequential(norm(), norm()), conv(4, 6, 3), X2),
}  # fmt: skip
# Of other classes, which are converted first.
CONVERTED = {
    "ours": (conv(4, 6, 3), SyncBatchNorm(6), X2),
    "torch's sync": (conv(4, 6, 3), nn.SyncBatchNorm(6), X2),
    "detectron2's frozen": (conv(4, 6, 3), lookalikes.FrozenBatchNorm2d(6), X2),
}


class Derived(nn.Conv2d):
    """Of a package of its own, with torch's forward."""


def in_place(a, b):
    a += b
    return a


def residual(m, x):
    y = m.d(m.b(x))
    y += x
    return m.r(y)


def asks(m, x):
    """Its code asks for the class of what a norm made."""
    y = m.n(m.c(x))
    return y if isinstance(y, torch.Tensor) else y[0]


def several(m, x):
    """A convolution and its norm, called together on two inputs, and a norm that several layers feed."""
    x = torch.relu(m.norm(m.c(x)))
    return m.norm(m.d(torch.relu(m.norm(m.c(x)))))


def two_readers(m, x):
    y = m.n(x)
    return m.c(y) + m.d(functional.dropout(y, training=m.training))[:, :, 1:-1, 1:-1]


def joined(join):
    """What feeds the norm, and what reads it, by a function of two values: no module is between."""
    return Called(
        lambda m, x: m.e(torch.relu(m.n(join(m.c(x), m.d(x.relu()))))),
        c=conv(size=3, padding=1), d=conv(bias=False), n=norm(), e=conv(),
    )  # fmt: skip


def linear(forward):
    return Called(forward, linear=nn.Linear(4, 5), n=nn.BatchNorm1d(5))


PERMUTED = linear(lambda m, x: torch.permute(m.n(m.linear(x).permute(0, 2, 1).contiguous()), (0, 2, 1)))
TRANSPOSED = linear(lambda m, x: m.n(m.linear(x).transpose(1, -1)).transpose(1, 2))
SEVERAL = Called(several, c=conv(), norm=norm(), d=conv())
BLOCK = Called(residual, b=nn.Sequential(Derived(4, 4, 1), norm(), nn.ReLU(True)), d=nn.Sequential(Derived(4, 4, 1), norm()),
    r=nn.ReLU(inplace=True))  # fmt: skip
JOINS = {
    "sum": lambda a, b: a + b,
    "sum in place": in_place,
    "difference": torch.sub,
    "scaled": lambda a, b: a + 0.5 * b,
    "positions": lambda a, b: torch.cat((a, b), 2),
    "interpolated": lambda a, b: functional.interpolate(a - b, scale_factor=2, mode="bilinear"),
}
NETS = {
    **{name: (nn.Sequential(first, second), x) for name, (first, second, x) in BACKWARD.items()},
    **{f"{name}, L {'=!'[length == 3]}= C": (net, torch.randn(2, length, 4)) for length in (3, 5)
        for name, net in (("transposed", TRANSPOSED), ("permuted", PERMUTED))},
    "a norm that two layers read": (Called(two_readers, n=norm(), c=conv(4, 5, 3), d=conv(4, 5)), X2),
    "a norm that several layers feed": (SEVERAL, X2),
    "activations in place, as in residual blocks": (nn.Sequential(BLOCK, copy.deepcopy(BLOCK)), X2),
    **{f"behind a {name}": (joined(join), X2) for name, join in JOINS.items()},
}  # fmt: skip
FOLDED = {
    **NETS,
    **{name: (nn.Sequential(first, second), x) for name, (first, second, x) in CONVERTED.items()},
    "asks for classes": (Called(asks, c=conv(), n=norm()), X2),
}


@pytest.mark.parametrize("name", FOLDED)
def test_every_norm_leaves(name):
    net, x = FOLDED[name]
    folded = fold_and_check(trained(net), x)
    report = folded.fold_report
    assert (left(folded), folded.training, report.verification.passed) == ([], False, True)
    assert {parameter.dtype for parameter in folded.parameters()} == {next(net.parameters()).dtype}
    assert name.removeprefix("behind a ") not in JOINS or report.sites[0].targets == ("c", "d")


def around(m, x):
    """Modules and functions next to layers."""
    x = m.leaky(m.pad(m.mean(m.most(x))) * 0.5 - 1)
    x = torch.cat((x, 2 * x.transpose(2, 3).permute(0, 1, 3, 2)), 1)
    x = m.relu(x.movedim(1, -1).movedim(-1, 1))
    x += 1
    return functional.dropout(x.contiguous(), training=m.training).flatten(1)


AROUND = Called(around, most=nn.MaxPool2d(3, 2, 1), mean=nn.AvgPool2d(2, 1, 1, count_include_pad=False),
    pad=nn.ZeroPad2d((1, 0, 2, 1)), leaky=nn.LeakyReLU(0.2), relu=nn.ReLU(inplace=True))  # fmt: skip
# ONNX Runtime has no convolution in double and bfloat16, and the graph no standard operator for a resize and an index.
LACKING = ("behind a interpolated", "a norm that two layers read")
RUN = {name: case for name, case in NETS.items() if case[1].dtype == torch.float32 and name not in LACKING}


@pytest.mark.parametrize("name", [*RUN, "around"])
def test_the_graph_of_a_module_computes_what_it_does(name: str) -> None:
    net, x = {**RUN, "around": (AROUND, X2)}[name]
    traced = trace(trained(net), 1)
    model = ModuleGraph(traced, traced.examples((x,))).model
    assert not any(node.domain for node in model.graph)
    model.opset_imports.pop("torch")
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString())
    (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(got), net(x.clone()), rtol=1e-4, atol=1e-5)


def test_a_scale_alone_moves_through_zero_padding():
    net = trained(nn.Sequential(norm(), conv(4, 6, 3, padding=1, bias=False), nn.ConvTranspose2d(6, 2, 3, 2)))
    nn.init.zeros_(net[0].running_mean)
    nn.init.zeros_(net[0].bias)
    folded = fold_and_check(net, X2)
    assert (left(folded), folded[1].bias) == ([], None)


def test_weights_are_rounded_once_and_keep_their_layout():
    """Each folded weight is the one nearest to the exact product, also under three norms at once."""
    net = trained(nn.Sequential(norm(), conv(4, 6, 3), norm(6), norm(6))).to(memory_format=torch.channels_last)
    folded = bnexport.fold_module(net)
    assert left(folded) == []
    assert folded[1].weight.is_contiguous(memory_format=torch.channels_last)
    before, first, second = (
        each.weight.double() / torch.sqrt(each.running_var.double() + each.eps) for each in (net[0], net[2], net[3])
    )
    exact = net[1].weight.double() * ((first * second).reshape(6, 1, 1, 1) * before.reshape(1, 4, 1, 1))
    torch.testing.assert_close(folded[1].weight, exact.float(), rtol=0, atol=0)


def test_tied_weights_are_folded_apart():
    net = trained(nn.Sequential(conv(), norm(), conv(), norm(), conv()))
    net[2].weight = net[4].weight = net[0].weight
    folded = fold_and_check(net, X2)
    assert left(folded) == []
    torch.testing.assert_close(folded[4].weight, net[4].weight, rtol=0, atol=0)


def test_a_training_model_is_folded_with_its_running_statistics():
    net = trained(nn.Sequential(conv(4, 6, 3), SyncBatchNorm(6), nn.Dropout())).train()
    folded = fold_and_check(net, X2)
    report = folded.fold_report
    assert (net.training, folded.training, report.meaning_changed) == (True, False, True)
    assert (report.sites[0].op_type, report.sites[0].training) == ("SyncBatchNorm", True)
    assert (report.before.sync_batch_norm, report.after.sync_batch_norm) == (1, 0)


@pytest.mark.parametrize(("make", "shape"), [(Segmenter, (2, 3, 32, 32)), (digits_resnet, (2, 1, 8, 8))])
def test_networks_lose_all_batch_norms(make, shape):
    net = trained(make())
    folded = bnexport.fold_module(net, torch.randn(shape, generator=GENERATOR))
    assert (left(folded), type(folded)) == ([], type(net))
    assert folded.fold_report.verification.passed
    report = pickle.loads(pickle.dumps(folded)).fold_report
    assert sum(site.outcome == "folded" for site in report.sites) == folded.fold_report.before.sync_batch_norm > 0


@pytest.mark.parametrize("make", [lookalikes.ABN, lookalikes.InPlaceABNSync])
def test_a_norm_with_its_activation_that_cannot_run_here(make):
    """inplace_abn's classes, here without a forward: the reference is the converted, unfolded module."""
    net = nn.Sequential(conv(4, 6, 3), make(6))
    nn.init.normal_(net[1].weight)
    nn.init.uniform_(net[1].running_var, 0.5, 2.0)
    folded = bnexport.fold_module(net, X2)
    report = folded.fold_report
    assert (left(folded), report.sites[0].op_type) == ([], make.__name__)
    assert (report.verification.status, report.verification.reference) == ("passed", "converted")
    plain = bnexport.revert_sync_batchnorm(copy.deepcopy(net)).eval()
    torch.testing.assert_close(folded(X2), plain(X2), rtol=1e-5, atol=1e-5)


def test_without_example_inputs():
    net = trained(nn.Sequential(conv(4, 6, 3), norm(6)))
    folded = fold_and_check(net, X2, example=False)
    assert (left(folded), folded.fold_report.verification.method) == ([], "local")
    with pytest.raises(bnexport.errors.UsageError, match='verify: got "whole", which needs example_inputs'):
        bnexport.fold_module(net, verify="whole")


def test_only_and_skip():
    """A name stands for every call of its module."""
    assert left(fold_and_check(trained(SEVERAL), X2, only=["norm"])) == []
    assert left(fold_and_check(trained(SEVERAL), X2, skip=["norm"])) == ["norm"]
    net = trained(nn.Sequential(conv(), norm(), conv(), norm()))
    assert left(fold_and_check(net, X2, only=["1"])) == ["3"]
    assert left(fold_and_check(net, X2, skip=["1"])) == ["1"]
    for option in ("only", "skip"):
        message = f"{option}: got '0', expected a batch norm of the model: 1, 3"
        with pytest.raises(bnexport.errors.UsageError, match=message):
            bnexport.fold_module(net, **{option: ["0"]})


def exp(factor):
    """exp(factor x) in front of a Conv and its norm: infinite for large x."""
    return Called(lambda m, x: m.n(m.c(torch.exp(x * factor))), c=conv(4, 6, 3), n=norm(6))


@pytest.mark.parametrize(
    ("factor", "eps", "reason"),
    [(float("nan"), 1e-5, "no finite value to compare with"), (0.0, 1e-16, "the network is ill-conditioned")],
)
def test_outputs_that_decide_nothing(factor, eps, reason):
    """exp(0 x) = 1: the Conv makes a constant, and a batch norm with its mean and no variance makes noise of it."""
    net = trained(exp(factor))
    net.n.running_var.zero_()
    net.n.eps = eps
    with torch.no_grad():
        net.n.running_mean.copy_(net.c(torch.ones(1, 4, 3, 3)).double().mean((0, 2, 3)))
        net.n.bias.zero_()
    folded = bnexport.fold_module(net, X2, max_scale=1e9, verify="whole")
    verification = folded.fold_report.verification
    assert (left(folded), verification.status) == ([], "not_verified")
    assert reason in verification.reason
    # The fold itself is proved, whatever the model's outputs show.
    verification = bnexport.fold_module(net, X2, max_scale=1e9).fold_report.verification
    assert (verification.status, verification.method) == ("passed", "local")


def halves(split):
    """The block of IBN-Net: one half of the channels through an instance norm, the other through a batch norm."""

    def forward(m, x):
        parts = split(m.c(x))
        return torch.relu(torch.cat((m.i(parts[0].contiguous()), m.n(parts[1].contiguous())), 1))

    return trained(Called(forward, c=conv(4, 6, 3), i=nn.InstanceNorm2d(3, affine=True), n=norm(3)))


def pooled(pool):
    """A batch norm that only a mean over the image separates from the layer that takes it."""

    def forward(m, x):
        return m.linear(pool(m.n(torch.relu(m.c(x)))))

    return trained(Called(forward, c=conv(4, 6, 3), n=norm(6), linear=nn.Linear(6, 5)))


POOLED = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 5)
IN_PROGRAMS = {
    "split": halves(lambda x: torch.split(x, 3, 1)),
    "split by sizes": halves(lambda x: x.split([3, 3], dim=1)),
    "chunk": halves(lambda x: x.chunk(2, dim=1)),
    "pooled by a module": trained(nn.Sequential(conv(4, 6, 3), nn.ReLU(), norm(6), *POOLED)),
    "pooled by a function": pooled(lambda x: functional.adaptive_avg_pool2d(x, (1, 1)).flatten(1)),
    "mean": pooled(lambda x: x.mean(keepdim=True, dim=[-1, -2]).flatten(1)),
    "mean of one axis each": pooled(lambda x: x.mean(3).mean(-1)),
}


@pytest.mark.parametrize("name", IN_PROGRAMS)
def test_norms_of_some_channels_and_in_front_of_means(name, tmp_path):
    """In modules and in programs."""
    net = IN_PROGRAMS[name]
    assert left(fold_and_check(net, X2)) == []
    program = bnexport.fold_module(torch.export.export(net, (X2,)))
    assert program.fold_report.after.batch_norm == 0
    if name == "split":
        result = bnexport.export(net, X2, tmp_path / "m.onnx", exporter="torchscript")
        assert result.report.after.batch_norm == 0


@pytest.mark.parametrize("inputs", [None, X2])
def test_parts_that_are_not_taken_by_their_index_stay(inputs):
    """Without example inputs, the number of parts is not known, either."""
    net = IN_PROGRAMS["split"] if inputs is None else halves(lambda x: torch.split(x, 3, 1)[0:2])
    assert left(bnexport.fold_module(net, inputs)) == ["n"]
