"""What fold_module folds: every layer, both directions, every batch norm class, every type."""

import copy
import pickle

import pytest
import torch
from torch import nn

import bnexport
import bnexport.errors
from bnexport import SyncBatchNorm
from models.resnet import digits_resnet
from models.segmentation import Segmenter
from tests.folding.module.nets import fold_and_check, left, reasons, trained
from tests.sync_bn import lookalikes

GENERATOR = torch.Generator().manual_seed(0)
X0, X1, X2, X3 = (torch.randn(2, 4, *sizes, generator=GENERATOR) for sizes in ((), (9,), (7, 6), (5, 6, 5)))

BACKWARD = {
    "conv1d": (nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6), X1),
    "conv2d": (nn.Conv2d(4, 6, (3, 2), padding=(1, 0), stride=2), nn.BatchNorm2d(6), X2),
    "conv3d": (nn.Conv3d(4, 6, 3, dilation=2, bias=False), nn.BatchNorm3d(6), X3),
    "groups": (nn.Conv2d(4, 6, 3, groups=2, padding="same"), nn.BatchNorm2d(6), X2),
    "depthwise": (nn.Conv2d(4, 8, 3, groups=4, bias=False), nn.BatchNorm2d(8), X2),
    "circular": (nn.Conv2d(4, 6, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(6), X2),
    "transposed1d": (nn.ConvTranspose1d(4, 6, 3, 2, output_padding=1), nn.BatchNorm1d(6), X1),
    "transposed2d": (nn.ConvTranspose2d(4, 6, 3, 2, 1, bias=False), nn.BatchNorm2d(6), X2),
    "transposed2d groups": (nn.ConvTranspose2d(4, 6, 3, groups=2), nn.BatchNorm2d(6), X2),
    "transposed3d": (nn.ConvTranspose3d(4, 6, 2, 2), nn.BatchNorm3d(6), X3),
    "linear": (nn.Linear(4, 6), nn.BatchNorm1d(6), X0),
    "linear without bias": (nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), X0),
    "no affine": (nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6, affine=False), X2),
    "dropout between": (nn.Conv2d(4, 6, 3), nn.Sequential(nn.Dropout2d(), nn.Identity(), nn.BatchNorm2d(6)), X2),
    "two norms": (nn.Conv2d(4, 6, 3), nn.Sequential(nn.BatchNorm2d(6), nn.BatchNorm2d(6, eps=0.1)), X2),
    "ours": (nn.Conv2d(4, 6, 3), SyncBatchNorm(6), X2),
    "torch's sync": (nn.Conv2d(4, 6, 3), nn.SyncBatchNorm(6), X2),
    "detectron2's frozen": (nn.Conv2d(4, 6, 3), lookalikes.FrozenBatchNorm2d(6), X2),
}
FORWARD = {
    "conv1d": (nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3), X1),
    "conv2d groups": (nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, groups=2, bias=False), X2),
    "conv2d stride": (nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, stride=2, dilation=2), X2),
    "conv3d": (nn.BatchNorm3d(4), nn.Conv3d(4, 6, 2), X3),
    "reflected": (nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), X2),
    "transposed pointwise": (nn.BatchNorm2d(4), nn.ConvTranspose2d(4, 6, 1, groups=2), X2),
    "linear": (nn.BatchNorm1d(4), nn.Linear(4, 6), X0),
    "through dropout": (nn.BatchNorm1d(4), nn.Sequential(nn.Dropout(), nn.Linear(4, 6)), X0),
    "flattened": (nn.BatchNorm2d(4), nn.Sequential(nn.Flatten(), nn.Linear(4 * 42, 6)), X2),
    "two norms": (nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)), nn.Conv2d(4, 6, 3), X2),
}


@pytest.mark.parametrize(
    "case", [*BACKWARD.values(), *FORWARD.values()], ids=[*BACKWARD, *(f"{n} <-" for n in FORWARD)]
)
def test_sequential_pairs(case):
    first, second, x = case
    folded = fold_and_check(trained(nn.Sequential(first, second, nn.Tanh())), x)
    assert left(folded) == []
    assert folded.fold_report.verification.passed
    assert not folded.training


def test_a_scale_alone_moves_through_zero_padding():
    norm = nn.BatchNorm2d(4)
    net = nn.Sequential(norm, nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.ConvTranspose2d(6, 2, 3, 2))
    trained(net)
    nn.init.zeros_(norm.running_mean)
    nn.init.zeros_(norm.bias)
    folded = fold_and_check(net, X2)
    assert left(folded) == []
    assert folded[1].bias is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_types(dtype):
    net = trained(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(), nn.Linear(120, 3)))
    folded = fold_and_check(net.to(dtype), X2.to(dtype))
    assert left(folded) == []
    assert {parameter.dtype for parameter in folded.parameters()} == {dtype}


def test_float32_norm_in_a_half_model():
    net = trained(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    net[0].half()
    folded = fold_and_check(net, X2.half())
    assert left(folded) == []
    assert folded[0].bias.dtype == torch.float16


def test_channels_last_weights_stay_so():
    net = trained(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6))).to(memory_format=torch.channels_last)
    folded = fold_and_check(net, X2)
    assert folded[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_weights_are_rounded_once():
    """Each folded weight is the one nearest to the exact product, also under two norms at once."""
    net = trained(nn.Sequential(nn.BatchNorm2d(4), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.BatchNorm2d(6)))
    folded = bnexport.fold_module(net)
    assert left(folded) == []

    def scale(norm):
        return norm.weight.double() / torch.sqrt(norm.running_var.double() + norm.eps)

    rows = (scale(net[2]) * scale(net[3])).reshape(6, 1, 1, 1)
    exact = net[1].weight.double() * (rows * scale(net[0]).reshape(1, 4, 1, 1))
    torch.testing.assert_close(folded[1].weight, exact.float(), rtol=0, atol=0)


class Transposed(nn.Module):
    """Linear, transpose, norm, transpose: channels last in and out."""

    def __init__(self, method):
        super().__init__()
        self.linear, self.norm, self.method = nn.Linear(4, 5), nn.BatchNorm1d(5), method

    def forward(self, x):
        if self.method == "transpose":
            return self.norm(self.linear(x).transpose(1, -1)).transpose(1, 2)
        return torch.permute(self.norm(self.linear(x).permute(0, 2, 1).contiguous()), (0, 2, 1))


@pytest.mark.parametrize("method", ["transpose", "permute"])
@pytest.mark.parametrize("length", [3, 5], ids=["L != C", "L == C"])
def test_linear_before_a_transpose(method, length):
    assert left(fold_and_check(trained(Transposed(method)), torch.randn(2, length, 4))) == []


class TwoReaders(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.BatchNorm2d(4), nn.Conv2d(4, 5, 3), nn.Conv2d(4, 5, 1)

    def forward(self, x):
        y = self.norm(x)
        return self.first(y) + self.second(nn.functional.dropout(y, training=self.training))[:, :, 1:-1, 1:-1]


def test_a_norm_that_two_layers_read():
    assert left(fold_and_check(trained(TwoReaders()), X2)) == []


class PairTwice(nn.Module):
    """A convolution and its norm, called together on two inputs."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.other = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1)

    def forward(self, x):
        x = torch.relu(self.norm(self.conv(x)))
        x = torch.relu(self.norm(self.conv(x)))
        return self.norm(self.other(x))


def test_a_norm_that_several_layers_feed():
    assert left(fold_and_check(trained(PairTwice()), X2)) == []


def test_only_names_every_call():
    net = trained(PairTwice())
    assert left(fold_and_check(net, X2, only=["norm"])) == []
    assert left(fold_and_check(net, X2, skip=["norm"])) == ["norm"]


class Joined(nn.Module):
    """What feeds the norm, and what reads it, by functions of two values."""

    def __init__(self, join):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1, bias=False)
        self.norm, self.last, self.join = nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), join

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.join(self.first(x), self.second(x.relu())))))


def join_in_place(a, b):
    a += b
    return a


JOINED = {
    "sum": lambda a, b: a + b,
    "sum in place": join_in_place,
    "difference": torch.sub,
    "scaled": lambda a, b: a + 0.5 * b,
    "positions": lambda a, b: torch.cat((a, b), 2),
    "interpolated": lambda a, b: nn.functional.interpolate(a - b, scale_factor=2, mode="bilinear"),
}


@pytest.mark.parametrize("join", JOINED.values(), ids=JOINED)
def test_a_norm_behind_two_layers(join):
    """As in a file: a sum, a concatenation, an interpolation; no module is between the layers and the norm."""
    folded = fold_and_check(trained(Joined(join)), X2)
    assert left(folded) == []
    assert folded.fold_report.verification.passed
    assert folded.fold_report.sites[0].targets == ("first", "second")


def test_tied_weights_are_folded_apart():
    net = trained(
        nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 1))
    )
    net[2].weight = net[4].weight = net[0].weight
    folded = fold_and_check(net, X2)
    assert left(folded) == []
    torch.testing.assert_close(folded[4].weight, net[4].weight, rtol=0, atol=0)


def test_a_training_model_is_folded_with_its_running_statistics():
    net = trained(nn.Sequential(nn.Conv2d(4, 6, 3), SyncBatchNorm(6), nn.Dropout())).train()
    folded = fold_and_check(net, X2)
    report = folded.fold_report
    assert net.training
    assert not folded.training
    assert report.meaning_changed
    assert (report.sites[0].op_type, report.sites[0].training) == ("SyncBatchNorm", True)
    assert (report.before.sync_batch_norm, report.after.sync_batch_norm) == (1, 0)


@pytest.mark.parametrize(
    ("make", "x"),
    [
        (Segmenter, torch.randn(2, 3, 32, 32, generator=GENERATOR)),
        (digits_resnet, torch.randn(2, 1, 8, 8, generator=GENERATOR)),
    ],
    ids=["seg", "res"],
)
def test_networks_lose_all_batch_norms(make, x):
    net = trained(make())
    folded = bnexport.fold_module(net, x)
    assert left(folded) == []
    assert type(folded) is type(net)
    assert folded.fold_report.verification.passed
    again = pickle.loads(pickle.dumps(folded))
    assert again.fold_report.changed
    assert (
        sum(site.outcome == "folded" for site in again.fold_report.sites) == folded.fold_report.before.sync_batch_norm
    )


@pytest.mark.parametrize("make", [lookalikes.ABN, lookalikes.InPlaceABNSync])
def test_a_norm_with_its_activation_that_cannot_run_here(make):
    """inplace_abn's classes, here without a forward: the reference is the converted, unfolded module."""
    net = nn.Sequential(nn.Conv2d(4, 6, 3), make(6))
    nn.init.normal_(net[1].weight)
    nn.init.uniform_(net[1].running_var, 0.5, 2.0)
    folded = bnexport.fold_module(net, X2)
    assert left(folded) == []
    report = folded.fold_report
    assert report.sites[0].op_type == make.__name__
    assert (report.verification.status, report.verification.reference) == ("passed", "converted")
    plain = bnexport.revert_sync_batchnorm(copy.deepcopy(net)).eval()
    torch.testing.assert_close(folded(X2), plain(X2), rtol=1e-5, atol=1e-5)


def test_without_example_inputs():
    net = trained(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    folded = fold_and_check(net, X2, example=False)
    assert left(folded) == []
    verification = folded.fold_report.verification
    assert (verification.status, verification.method) == ("passed", "local")
    with pytest.raises(bnexport.errors.UsageError, match='verify: got "whole", which needs example_inputs'):
        bnexport.fold_module(net, verify="whole")


def test_only_and_skip():
    net = trained(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Conv2d(6, 6, 1), nn.BatchNorm2d(6)))
    assert left(fold_and_check(net, X2, only=["1"])) == ["3"]
    assert left(fold_and_check(net, X2, skip=["1"])) == ["1"]
    for option in ("only", "skip"):
        with pytest.raises(
            bnexport.errors.UsageError, match=f"{option}: got '0', expected a batch norm of the model: 1, 3"
        ):
            bnexport.fold_module(net, **{option: ["0"]})


def test_ill_conditioned_models_are_held_against_float64():
    """|mean| / std in the thousands: the model's own rounding errors are larger than the table's bound."""
    net = trained(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Tanh()))
    net[1].running_var.fill_(1e-8)
    net[1].eps = 1e-12
    with torch.no_grad():
        mean = net[0](X2).mean((0, 2, 3))
        net[0].bias += 1e4
        net[1].running_mean.copy_(mean + 1e4)
        net[1].weight.fill_(1e-4)
    folded = bnexport.fold_module(net, X2)
    assert left(folded) == []
    (output,) = folded.fold_report.verification.outputs
    assert output.bound == "float64"


class Exp(nn.Module):
    """exp(factor * x): infinite for large x."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return torch.exp(x * self.factor)


def test_infinite_outputs_are_compared_on_smaller_inputs():
    net = trained(nn.Sequential(Exp(200.0), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    folded = bnexport.fold_module(net, X2 * (3.0 / X2.max()))  # exp(600), and exp(75) on an eighth
    assert left(folded) == []
    verification = folded.fold_report.verification
    assert (verification.status, verification.input_scale) == ("passed", 2.0**-3)


@pytest.mark.parametrize(
    ("factor", "eps", "reason"),
    [(float("nan"), 1e-5, "no finite value to compare with"), (0.0, 1e-16, "the network is ill-conditioned")],
    ids=["nan", "rounding"],
)
def test_outputs_that_decide_nothing(factor, eps, reason):
    """exp(0 x) = 1: the Conv makes a constant, and a batch norm with its mean and no variance makes noise of it."""
    net = trained(nn.Sequential(Exp(factor), nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    net[2].running_var.zero_()
    net[2].eps = eps
    with torch.no_grad():
        net[2].running_mean.copy_(net[1](torch.ones(1, 4, 3, 3)).double().mean((0, 2, 3)))
        net[2].bias.zero_()
    folded = bnexport.fold_module(net, X2, max_scale=1e9, verify="whole")
    assert left(folded) == []
    verification = folded.fold_report.verification
    assert verification.status == "not_verified"
    assert reason in verification.reason
    # The fold itself is proved, whatever the model's outputs show.
    verification = bnexport.fold_module(net, X2, max_scale=1e9).fold_report.verification
    assert (verification.status, verification.method) == ("passed", "local")


@pytest.mark.parametrize("shift", [-0.2, 0.0], ids=["hidden-by-the-shift", "shown"])
def test_dead_channels_of_half_networks(shift):
    """A scale of 1e-6 makes weights of 2e-8, which half cannot hold; the channel's output is its shift."""
    net = trained(nn.Sequential(nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6)))
    with torch.no_grad():
        net[0].weight.mul_(0.1)
        net[1].weight[2], net[1].bias[2] = 1e-6, shift
    net = net.half()
    folded = bnexport.fold_module(net, X2.half())
    if shift:
        assert left(folded) == []
        assert folded.fold_report.verification.passed
    else:
        assert reasons(folded)["1"][0] == "underflow"


class Derived(nn.Conv2d):
    """Of a package of its own, with torch's forward."""


def test_an_activation_in_place_behind_the_norm():
    """As in residual blocks: what it changes, nobody else reads."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(Derived(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
            self.second = nn.Sequential(Derived(4, 4, 1), nn.BatchNorm2d(4))
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x):
            y = self.second(self.first(x))
            y += x
            return self.relu(y)

    assert left(fold_and_check(trained(nn.Sequential(Block(), Block())), X2)) == []


def test_code_that_asks_for_the_class_of_what_a_norm_made():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.norm(self.conv(x))
            return y if isinstance(y, torch.Tensor) else y[0]

    assert left(fold_and_check(trained(Asks()), X2)) == []


class InstanceBatch(nn.Module):
    """The block of IBN-Net: one half of the channels through an instance norm, the other through a batch norm."""

    def __init__(self, split):
        super().__init__()
        self.conv, self.instance, self.norm = nn.Conv2d(4, 6, 3), nn.InstanceNorm2d(3, affine=True), nn.BatchNorm2d(3)
        self.split = split

    def forward(self, x):
        parts = self.split(self.conv(x))
        return torch.relu(torch.cat((self.instance(parts[0].contiguous()), self.norm(parts[1].contiguous())), 1))


SPLITS = {
    "split": lambda x: torch.split(x, 3, 1),
    "split by sizes": lambda x: x.split([3, 3], dim=1),
    "chunk": lambda x: x.chunk(2, dim=1),
}


@pytest.mark.parametrize("split", SPLITS.values(), ids=SPLITS)
def test_a_norm_of_some_channels(split, tmp_path):
    net = trained(InstanceBatch(split))
    assert left(fold_and_check(net, X2)) == []
    program = bnexport.fold_module(torch.export.export(net, (X2,)))
    assert [site.outcome for site in program.fold_report.sites] == ["folded"]
    if split is SPLITS["split"]:
        result = bnexport.export(net, X2, tmp_path / "m.onnx", exporter="torchscript")
        assert result.report.after.batch_norm == 0


@pytest.mark.parametrize("inputs", [None, X2])
def test_parts_that_are_not_taken_by_their_index_stay(inputs):
    """Without example inputs, the number of parts is not known, either."""
    net = trained(InstanceBatch(SPLITS["split"] if inputs is None else lambda x: torch.split(x, 3, 1)[0:2]))
    assert left(bnexport.fold_module(net, inputs)) == ["norm"]


class Pooled(nn.Module):
    """A batch norm that only a mean over the image separates from the layer that takes it."""

    def __init__(self, pool):
        super().__init__()
        self.conv, self.norm, self.linear = nn.Conv2d(4, 6, 3), nn.BatchNorm2d(6), nn.Linear(6, 5)
        self.pool = pool

    def forward(self, x):
        return self.linear(self.pool(self.norm(torch.relu(self.conv(x)))))


POOLS = {
    "module": nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()),
    "function": lambda x: nn.functional.adaptive_avg_pool2d(x, (1, 1)).flatten(1),
    "mean": lambda x: x.mean(keepdim=True, dim=[-1, -2]).flatten(1),
    "one axis each": lambda x: x.mean(3).mean(-1),
}


@pytest.mark.parametrize("pool", POOLS.values(), ids=POOLS)
def test_a_norm_in_front_of_a_mean(pool):
    net = trained(Pooled(pool))
    assert left(fold_and_check(net, X2)) == []
    assert bnexport.fold_module(torch.export.export(net, (X2,))).fold_report.after.batch_norm == 0
