"""What fold_module leaves alone, and why: traps that other folding passes fall into among them."""

import copy
import operator

import pytest
import torch
from torch import nn

import bnexport
from bnexport.errors import UnsupportedModelError, UsageError, VerificationError
from tests.folding.module.nets import Called, fold_and_check, left, off_by, reasons, trained
from tests.sync_bn import lookalikes

X2 = torch.randn(2, 4, 7, 6, generator=torch.Generator().manual_seed(0))


def conv(size=1, **options):
    return nn.Conv2d(4, 4, size, **options)


def norm():
    return nn.BatchNorm2d(4)


class OwnForward(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input) + 1


CASES = {
    "conv called twice": (lambda m, x: m.n(m.c(x)) + m.p(m.c(x)), {"c": conv(), "n": norm(), "p": norm()}),
    "norm and something else read the conv": (lambda m, x: (y := m.c(x)) + m.n(y), {"c": conv(), "n": norm()}),
    "norm called on other things, too": (lambda m, x: m.n(m.n(m.c(x)) + x), {"c": conv(), "n": norm()}),
    "conv is an output": (lambda m, x: [(y := m.c(x)), m.n(y)], {"c": conv(), "n": norm()}),
    "relu between": (lambda m, x: m.n(torch.relu(m.c(x))), {"c": conv(), "n": norm()}),
    "relu between, norm with an activation": (lambda m, x: m.n(torch.relu(m.c(x))),
        {"c": conv(), "n": lookalikes.BatchNormAct2d(4)}),
    "in place between": (lambda m, x: m.n(m.c(x).add_(1)), {"c": conv(), "n": norm()}),
    "in place aside": (lambda m, x: ((y := m.c(x)).mul_(2), m.n(y))[1], {"c": conv(), "n": norm()}),
    "sum between": (lambda m, x: m.n(m.c(x) + x.sigmoid()), {"c": conv(), "n": norm()}),
    "max pool between": (lambda m, x: m.n(nn.functional.max_pool2d(m.c(x), 2)), {"c": conv(), "n": norm()}),
    "padded conv behind": (lambda m, x: m.c(m.n(x)), {"c": conv(3, padding=1), "n": norm()}),
    "padded by name": (lambda m, x: m.c(m.n(x)), {"c": conv(3, padding="same"), "n": norm()}),
    "overlapping transposed conv behind": (lambda m, x: m.c(m.n(x)), {"c": nn.ConvTranspose2d(4, 4, 3), "n": norm()}),
    "strided pointwise transposed conv behind": (lambda m, x: m.c(m.n(x)), {"c": nn.ConvTranspose2d(4, 4, 1, stride=2), "n": norm()}),
    "conv and an output behind": (lambda m, x: [(y := m.n(x)), m.c(y)], {"c": conv(), "n": norm()}),
    "conv behind is called elsewhere": (lambda m, x: m.c(m.n(x)) + m.c(x), {"c": conv(), "n": norm()}),
    "dropout that is always on": (lambda m, x: m.n(nn.functional.dropout(m.c(x), 1e-9)), {"c": conv(), "n": norm()}),
    "weight read by code": (lambda m, x: m.n(m.c(x)) + nn.functional.conv2d(x, m.c.weight), {"c": conv(), "n": norm()}),
    "statistics read by code": (lambda m, x: m.n(m.c(x)) + m.n.running_mean.sum(), {"c": conv(), "n": norm()}),
    "functional conv": (lambda m, x: m.n(nn.functional.conv2d(x, m.c.weight)), {"c": conv(), "n": norm()}),
    "norm with a forward of its own": (lambda m, x: m.n(m.c(x)), {"c": conv(), "n": OwnForward(4)}, ["own-forward"]),
    "nothing calls it": (lambda m, x: m.c(x), {"c": conv(), "n": norm()}, ["unused"]),
    "the input is an output": (lambda m, x: [m.n(x), x], {"n": norm()}, ["no-producer", "graph-output"], "'input_0'"),
    "flattened in part": (lambda m, x: m.c(m.n(x).flatten(2)), {"c": nn.Linear(42, 3), "n": norm()}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_left_alone(case):
    forward, layers, *said = case
    folded = fold_and_check(trained(Called(forward, **layers)), X2)
    assert reasons(folded)["n"] == (said[0] if said else reasons(folded)["n"])
    assert not folded.fold_report.changed
    texts = [refusal.text for site in folded.fold_report.sites for refusal in site.refusals]
    assert all(texts) and all(word in texts[0] for word in said[1:])


class Writes(nn.Module):
    """Changes its input, as any module may."""

    def forward(self, x):
        x += 1
        return x


# What changes the input of a norm between its call and that of the layer behind it, which would read that memory.
CHANGES = {
    "in place": lambda m, z: z.add_(1),
    "an operator": lambda m, z: operator.iadd(z, 1),
    "a view": lambda m, z: z.view(-1).mul_(2),
    "a module": lambda m, z: m.w(z),
    "an activation": lambda m, z: nn.functional.relu(z, inplace=True),
    "an activation's module": lambda m, z: m.r(z),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_memory_that_is_changed_behind_a_norm(change):
    def forward(m, x):
        z = x * 1.0
        y = m.n(z)
        change(m, z)
        return m.c(y)

    net = trained(Called(forward, c=conv(), n=norm(), w=Writes(), r=nn.ReLU(inplace=True)))
    assert reasons(fold_and_check(net, X2)) == {"n": ["shared", "in-place"]}


def in_place_that_others_see(m, x):
    """The second norm reads the sum, by a name of its first operand."""
    y = m.c(x)
    z = y.view_as(y)
    y += m.d(x)
    return m.n(y), m.p(z)


def half_overflows():
    net = trained(nn.Sequential(conv(), norm())).half()
    net[1].running_var.fill_(1e-7)
    net[1].eps = 0.0
    nn.init.constant_(net[0].weight, 60000.0)
    nn.init.constant_(net[1].weight, 2.0)
    return net


class OfAnotherClass(nn.Parameter):
    """May be anything, as a tensor of quantised values is."""


def of_another_class():
    net = nn.Sequential(conv(), norm())
    net[0].weight = OfAnotherClass(net[0].weight.data)
    return trained(net)


LINEAR = trained(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
CONV = trained(nn.Sequential(conv(), norm()))
WEIGHT_NORM = nn.utils.parametrizations.weight_norm(conv())
# (module, inputs, options, codes of what stays)
REASONS = {
    # The features of a Linear lie on the last axis, the norm's channels on axis 1.
    "positions of a linear": (LINEAR, torch.randn(2, 4, 4), {}, {"1": ["axis", "graph-output"]}),
    "features of a linear": (LINEAR, torch.randn(2, 4), {}, {}),
    "a linear on data of any rank": (LINEAR, torch.randn(2, 4), {"example": False}, {"1": ["rank", "graph-output"]}),
    # (C, L) is one input to Conv1d and L channels to BatchNorm1d.
    "no batch": (trained(nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(5))), torch.randn(4, 5), {}, {"1": ["no-rule", "graph-output"]}),
    "a sum in place that others see": (trained(Called(in_place_that_others_see, c=conv(), d=conv(), n=norm(), p=norm())), X2, {},
        {"n": ["shared", "graph-output"], "p": ["no-rule", "graph-output"]}),
    "parametrized": (trained(nn.Sequential(WEIGHT_NORM, norm())), X2, {}, {"1": ["parametrized", "graph-output"]}),
    "statistics of the batch": (nn.Sequential(conv(), nn.BatchNorm2d(4, track_running_stats=False)), X2, {}, {"1": ["training"]}),
    "scales beyond the bound": (CONV, X2, {"max_scale": 1e-3}, {"1": ["scale"]}),
    "half overflows": (half_overflows(), None, {}, {"1": ["overflow", "graph-output"]}),
    "of another class": (of_another_class(), None, {}, {"1": ["no-values", "graph-output"]}),
    **{str(dtype): (copy.deepcopy(CONV).to(dtype), None, {}, {"1": ["type"]}) for dtype in (torch.complex64, torch.float8_e5m2)},
    "a traced module, which is no program": (torch.fx.symbolic_trace(CONV), X2, {}, {}),
    "no values": (copy.deepcopy(CONV).to("meta"), None, {}, {"1": ["no-values"]}),
}  # fmt: skip


@pytest.mark.parametrize(("net", "x", "options", "codes"), REASONS.values(), ids=REASONS)
def test_reasons(net, x, options, codes):
    assert reasons(bnexport.fold_module(net, verify=False) if x is None else fold_and_check(net, x, **options)) == codes


@pytest.mark.parametrize("where", ["0.0", "0", "0.1", "1"], ids=["conv", "around the conv", "norm", "behind"])
def test_hooks_see_what_they_saw(where):
    """A hook between the two layers keeps them apart; one behind them does not. Tracing runs none."""
    net = nn.Sequential(nn.Sequential(conv()), norm()) if where == "0" else nn.Sequential(nn.Sequential(conv(), norm()))
    net.append(nn.ReLU())
    trained(net)
    seen = []
    module = net.get_submodule(where)
    if where == "1":
        module.register_forward_pre_hook(lambda m, inputs: seen.append(inputs[0]))
    else:
        module.register_forward_hook(lambda m, inputs, output: seen.append(output))
    folded = bnexport.fold_module(net)
    assert not seen
    assert bool(left(folded)) is (where != "1")
    assert all("hook" in site.reason for site in folded.fold_report.kept)
    codes = {refusal.code for site in folded.fold_report.kept for refusal in site.refusals}
    assert ("hook" in codes) is (where == "0.1")
    net(X2)
    folded(X2)
    torch.testing.assert_close(*seen)


def chooses():
    """Control flow that depends on values."""
    return Called(lambda m, x: m.n(y) if (y := m.c(x)).sum() > 0 else y, c=conv(), n=norm())


def test_a_part_that_cannot_be_traced_keeps_its_norms():
    net = trained(nn.Sequential(conv(), norm(), chooses(), conv(), norm()))
    folded = fold_and_check(net, X2)
    assert left(folded) == ["2.n"]
    (site,) = folded.fold_report.kept
    assert site.refusals[0].code == "opaque"
    assert "inside 2, which torch.fx cannot trace: symbolically traced variables" in site.reason
    net[2].c = net[0]  # a layer that it shares with others
    assert left(fold_and_check(net, X2)) == ["1", "2.n"]
    with pytest.raises(UnsupportedModelError, match=r"Called: its forward cannot be traced .* fold its parts instead"):
        bnexport.fold_module(net[2], X2)


LOOKS = {
    "attribute": lambda m: m.n.num_features,
    "class": lambda m: 1 if isinstance(m.n, nn.BatchNorm2d) else torch.zeros(1).sin(),
    "number": lambda m: 1 if isinstance(m.n, nn.BatchNorm2d) else 2,
}


@pytest.mark.parametrize("looks", LOOKS.values(), ids=LOOKS)
def test_code_that_looks_at_its_norms(looks):
    net = trained(Called(lambda m, x: m.n(m.c(x)) * looks(m), c=conv(), n=norm()))
    with pytest.raises(UnsupportedModelError, match=r"looks at batch norms .* skip=\[...\], folded were n"):
        bnexport.fold_module(net, X2)
    assert left(bnexport.fold_module(net, X2, skip=["n"])) == ["n"]


def test_a_wrong_fold_is_found(monkeypatch):
    """Everything else being right, a layer that is off by 1e-3 fails the comparison."""
    off_by(monkeypatch, 1e-3)
    shift = r"site 1: at 1: the shift of channel \d differs"
    for inputs, how, what in ((X2, "whole", "output 'output'"), (X2, True, shift), (None, True, shift)):
        with pytest.raises(VerificationError, match=f"the folded module differs from the original: {what}"):
            bnexport.fold_module(CONV, inputs, verify=how)
    bnexport.fold_module(CONV, X2, verify=False)


def test_random_models_are_not_called_verified():
    """By their outputs; the fold itself is proved."""
    net = trained(Called(lambda m, x: torch.rand_like(m.n(m.c(x))), c=conv(), n=norm()))
    result = bnexport.fold_module(net, X2, verify="whole").fold_report.verification
    assert (result.status, result.reason) == ("not_verified", "the model draws random numbers")
    result = bnexport.fold_module(net, X2).fold_report.verification
    assert (result.status, result.method, [proof.method for proof in result.sites]) == ("passed", "local", ["proved"])


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = conv(), norm()

    def forward(self, x, scale=2.0, *, deep=False):
        y = self.norm(self.conv(x)) * scale
        return [y, x] if deep else y


@pytest.mark.parametrize("example", [True, False])
def test_optional_arguments_keep_their_defaults(example):
    assert left(fold_and_check(trained(Optional()), X2, example=example)) == []


class Variadic(nn.Sequential):
    def forward(self, *inputs):
        return super().forward(inputs[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.relu,), "model: got builtin_function_or_method, expected a torch.nn.Module"),
        ((CONV, (1,)), r"example_inputs\[0\]: got int, expected a torch.Tensor"),
        ((CONV, torch.ones(2, 3, 5, 5)), r"the model fails on inputs of shape \(2, 3, 5, 5\)"),
        ((torch.jit.script(nn.ReLU()),), "model: got a RecursiveScriptModule; fold the module that it was made from"),
        ((Variadic(conv()),), "its forward takes any number of inputs, or keywords; give example_inputs"),
    ],
)
def test_usage_errors(arguments, message):
    with pytest.raises(UsageError, match=message):
        bnexport.fold_module(*arguments)


def _asks(m, x):
    """Adds 1 to a tensor. A symbol is none, so a trace might miss it."""
    y = m.c(x)
    if isinstance(y, torch.Tensor):
        y = y + 1
    return m.n(y)


def _asks_for_the_unknown(m, x):
    y = torch.chunk(m.c(x), 1)
    return m.n(y[0] if isinstance(y, tuple) else y)


@pytest.mark.parametrize("example", [True, False])
def test_code_that_asks_for_classes(example):
    net = trained(nn.Sequential(Called(_asks, c=conv(), n=norm()), nn.ReLU(), conv(), norm()))
    assert left(fold_and_check(net, X2, example=example)) == ["0.n"]
    net = trained(nn.Sequential(Called(_asks_for_the_unknown, c=conv(), n=norm()), conv(), norm()))
    folded = fold_and_check(net, X2, example=example)
    assert left(folded) == ["0.n"]
    assert "asks for the class of chunk" in folded.fold_report.kept[0].reason


def test_example_inputs_stay_as_they_are():
    x = X2.clone()
    folded = bnexport.fold_module(trained(Called(lambda m, x: m.n(m.c(x.relu_())), c=conv(), n=norm())), x)
    assert left(folded) == []
    torch.testing.assert_close(x, X2, rtol=0, atol=0)


def test_the_class_of_what_a_trace_does_not_know():
    """A tuple, as a module passes it on: its code must not take it for a tensor."""

    def forward(m, x):
        y = m.same(x.split(2, 1))
        return m.n(m.c(y[0] if isinstance(y, tuple) else y))

    net = trained(Called(forward, same=nn.Identity(), c=nn.Conv2d(2, 4, 1), n=norm()))
    with pytest.raises(UnsupportedModelError, match="its code asks for the class of"):
        bnexport.fold_module(net, X2, verify=False)
