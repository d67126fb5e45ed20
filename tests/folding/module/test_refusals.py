"""What fold_module leaves alone, and why: traps that other folding passes fall into among them."""

import operator

import pytest
import torch
from torch import nn

import bnexport
from bnexport.errors import UnsupportedModelError, UsageError, VerificationError
from tests.folding.module.nets import fold_and_check, left, off_by, reasons, trained

X2 = torch.randn(2, 4, 7, 6, generator=torch.Generator().manual_seed(0))


class Called(nn.Module):
    """Layers under their names, and a forward given as a function of them."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            self.add_module(name, layer)
        self.calls = forward

    def forward(self, *inputs):
        return self.calls(self, *inputs)


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
    "in place between": (lambda m, x: m.n(m.c(x).add_(1)), {"c": conv(), "n": norm()}),
    "in place aside": (lambda m, x: ((y := m.c(x)).mul_(2), m.n(y))[1], {"c": conv(), "n": norm()}),
    "sum between": (lambda m, x: m.n(m.c(x) + x.sigmoid()), {"c": conv(), "n": norm()}),
    "max pool between": (lambda m, x: m.n(nn.functional.max_pool2d(m.c(x), 2)), {"c": conv(), "n": norm()}),
    "padded conv behind": (lambda m, x: m.c(m.n(x)), {"c": conv(3, padding=1), "n": norm()}),
    "padded by name": (lambda m, x: m.c(m.n(x)), {"c": conv(3, padding="same"), "n": norm()}),
    "overlapping transposed conv behind": (lambda m, x: m.c(m.n(x)), {"c": nn.ConvTranspose2d(4, 4, 3), "n": norm()}),
    "strided pointwise transposed conv behind": (lambda m, x: m.c(m.n(x)),
        {"c": nn.ConvTranspose2d(4, 4, 1, stride=2), "n": norm()}),
    "conv and an output behind": (lambda m, x: [(y := m.n(x)), m.c(y)], {"c": conv(), "n": norm()}),
    "conv behind is called elsewhere": (lambda m, x: m.c(m.n(x)) + m.c(x), {"c": conv(), "n": norm()}),
    "dropout that is always on": (lambda m, x: m.n(nn.functional.dropout(m.c(x), 1e-9)), {"c": conv(), "n": norm()}),
    "weight read by code": (lambda m, x: m.n(m.c(x)) + nn.functional.conv2d(x, m.c.weight), {"c": conv(), "n": norm()}),
    "statistics read by code": (lambda m, x: m.n(m.c(x)) + m.n.running_mean.sum(), {"c": conv(), "n": norm()}),
    "functional conv": (lambda m, x: m.n(nn.functional.conv2d(x, m.c.weight)), {"c": conv(), "n": norm()}),
    "norm with a forward of its own": (lambda m, x: m.n(m.c(x)), {"c": conv(), "n": OwnForward(4)}, ["own-forward"]),
    "nothing calls it": (lambda m, x: m.c(x), {"c": conv(), "n": norm()}, ["unused"]),
    "flattened in part": (lambda m, x: m.c(m.n(x).flatten(2)), {"c": nn.Linear(42, 3), "n": norm()}),
}  # fmt: skip


class Writes(nn.Module):
    """Changes its input, as any module may."""

    def forward(self, x):
        x += 1
        return x


def changed(change):
    """A norm whose input is changed between its call and that of the layer behind it."""

    def forward(m, x):
        z = x * 1.0
        y = m.n(z)
        change(m, z)
        return m.c(y)

    return forward


# Without the norm, what the layer reads is the memory that the code changes.
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
    net = trained(Called(changed(change), c=conv(), n=norm(), w=Writes(), r=nn.ReLU(inplace=True)))
    folded = fold_and_check(net, X2)
    assert reasons(folded) == {"n": ["shared", "in-place"]}


def test_a_sum_in_place_that_others_see():
    """The second norm reads the sum, by a name of its first operand."""

    def forward(m, x):
        y = m.c(x)
        z = y.view_as(y)
        y += m.d(x)
        return m.n(y), m.p(z)

    net = trained(Called(forward, c=conv(), d=conv(), n=norm(), p=norm()))
    assert left(fold_and_check(net, X2)) == ["n", "p"]


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_left_alone(case):
    forward, layers, *codes = case
    net = trained(Called(forward, **layers))
    folded = fold_and_check(net, X2)
    assert reasons(folded)["n"] == (codes[0] if codes else reasons(folded)["n"])
    assert not folded.fold_report.changed
    assert all(refusal.text for site in folded.fold_report.sites for refusal in site.refusals)


def test_a_norm_over_the_positions_of_a_linear():
    """(N, C, L) with C == L: the features of the Linear lie on the last axis, the norm's channels on axis 1."""
    net = trained(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    assert reasons(fold_and_check(net, torch.randn(2, 4, 4))) == {"1": ["axis", "graph-output"]}
    assert left(fold_and_check(net, torch.randn(2, 4))) == []
    kept = fold_and_check(net, torch.randn(2, 4), example=False)
    assert reasons(kept) == {"1": ["rank", "graph-output"]}
    assert "the rank of 0.bias is not known" in kept.fold_report.sites[0].reason


def test_a_convolution_without_a_batch():
    """(C, L) is one input to Conv1d and L channels to BatchNorm1d."""
    net = trained(nn.Sequential(nn.Conv1d(4, 4, 1), nn.BatchNorm1d(5)))
    assert reasons(fold_and_check(net, torch.randn(4, 5))) == {"1": ["no-rule", "graph-output"]}


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


def test_parametrized_weights():
    net = nn.Sequential(nn.utils.parametrizations.weight_norm(conv()), norm())
    assert reasons(fold_and_check(trained(net), X2)) == {"1": ["parametrized", "graph-output"]}


def test_statistics_of_the_batch():
    net = nn.Sequential(conv(), nn.BatchNorm2d(4, track_running_stats=False))
    assert reasons(fold_and_check(net, X2)) == {"1": ["training"]}


def test_values_that_half_cannot_hold():
    net = trained(nn.Sequential(conv(), norm())).half()
    net[1].running_var.fill_(1e-7)
    net[1].eps = 0.0
    net[0].weight.data.fill_(60000.0)
    with torch.no_grad():
        net[1].weight.fill_(2.0)
    assert reasons(bnexport.fold_module(net)) == {"1": ["overflow", "graph-output"]}


class OfAnotherClass(nn.Parameter):
    """May be anything, as a tensor of quantised values is."""


def _of_another_class(net):
    net[0].weight = OfAnotherClass(net[0].weight.data)
    return net


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda net: net.to("meta"), "no-values"),
        (_of_another_class, "no-values"),
        (lambda net: net.to(torch.complex64), "type"),
    ],
    ids=["meta", "class", "complex"],
)
def test_parameters_without_values(change, code):
    net = change(trained(nn.Sequential(conv(), norm())))
    assert code in reasons(bnexport.fold_module(net, verify=False))["1"]


def test_scales_beyond_the_bound():
    net = trained(nn.Sequential(conv(), norm()))
    assert reasons(fold_and_check(net, X2, max_scale=1e-3)) == {"1": ["scale"]}


class Chooses(nn.Module):
    """Control flow that depends on values."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = conv(), norm()

    def forward(self, x):
        y = self.conv(x)
        return self.norm(y) if y.sum() > 0 else y


def test_a_part_that_cannot_be_traced_keeps_its_norms():
    net = trained(nn.Sequential(conv(), norm(), Chooses(), conv(), norm()))
    folded = fold_and_check(net, X2)
    assert left(folded) == ["2.norm"]
    (site,) = folded.fold_report.kept
    assert site.refusals[0].code == "opaque"
    assert "inside 2, which torch.fx cannot trace: symbolically traced variables" in site.reason


def test_a_layer_shared_with_an_untraceable_part():
    net = trained(nn.Sequential(conv(), norm(), Chooses()))
    net[2].conv = net[0]
    assert left(fold_and_check(net, X2)) == ["1", "2.norm"]


def test_an_untraceable_model_is_an_error_with_a_way_out():
    net = trained(Chooses())
    with pytest.raises(UnsupportedModelError, match=r"Chooses: its forward cannot be traced .* fold its parts instead"):
        bnexport.fold_module(net, X2)
    assert left(bnexport.fold_module(nn.Sequential(net), X2)) == ["0.norm"]


@pytest.mark.parametrize(
    "looks",
    [
        lambda m: m.n.num_features,
        lambda m: 1 if isinstance(m.n, nn.BatchNorm2d) else torch.zeros(1).sin(),
        lambda m: 1 if isinstance(m.n, nn.BatchNorm2d) else 2,
    ],
    ids=["attribute", "class", "number"],
)
def test_code_that_looks_at_its_norms(looks):
    net = trained(Called(lambda m, x: m.n(m.c(x)) * looks(m), c=conv(), n=norm()))
    with pytest.raises(UnsupportedModelError, match=r"looks at batch norms .* skip=\[...\], folded were n"):
        bnexport.fold_module(net, X2)
    assert left(bnexport.fold_module(net, X2, skip=["n"])) == ["n"]


def test_a_wrong_fold_is_found(monkeypatch):
    """Everything else being right, a layer that is off by 1e-3 fails the comparison."""
    off_by(monkeypatch, 1e-3)
    net = trained(nn.Sequential(conv(), norm()))
    with pytest.raises(VerificationError, match="the folded module differs from the original: output 'output'"):
        bnexport.fold_module(net, X2, verify="whole")
    for inputs in (X2, None):
        with pytest.raises(
            VerificationError, match=r"from the original: site 1: at 1: the shift of channel \d differs"
        ):
            bnexport.fold_module(net, inputs)
    bnexport.fold_module(net, X2, verify=False)


def test_random_models_are_not_called_verified():
    """By their outputs; the fold itself is proved."""
    net = trained(Called(lambda m, x: torch.rand_like(m.n(m.c(x))), c=conv(), n=norm()))
    result = bnexport.fold_module(net, X2, verify="whole").fold_report.verification
    assert (result.status, result.reason) == ("not_verified", "the model draws random numbers")
    result = bnexport.fold_module(net, X2).fold_report.verification
    assert (result.status, result.method, [proof.method for proof in result.sites]) == ("passed", "local", ["proved"])


def test_a_traced_module_is_no_program():
    net = torch.fx.symbolic_trace(trained(nn.Sequential(conv(), norm())))
    assert left(fold_and_check(net, X2)) == []


def test_optional_arguments_keep_their_defaults():
    class Optional(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = conv(), norm()

        def forward(self, x, scale=2.0, *, deep=False):
            y = self.norm(self.conv(x)) * scale
            return [y, x] if deep else y

    net = trained(Optional())
    assert left(fold_and_check(net, X2)) == []
    assert left(fold_and_check(net, X2, example=False)) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.relu,), "model: got builtin_function_or_method, expected a torch.nn.Module"),
        ((nn.Sequential(conv()), (1,)), r"example_inputs\[0\]: got int, expected a torch.Tensor"),
        ((nn.Sequential(conv(), norm()), torch.ones(2, 3, 5, 5)), r"the model fails on inputs of shape \(2, 3, 5, 5\)"),
        ((Called(lambda m, x: x),), "its forward takes any number of inputs, or keywords; give example_inputs"),
        ((torch.jit.script(nn.ReLU()),), "model: got a RecursiveScriptModule; fold the module that it was made from"),
    ],
    ids=["not a module", "not a tensor", "wrong shape", "variadic", "script"],
)
def test_usage_errors(arguments, message):
    with pytest.raises(UsageError, match=message):
        bnexport.fold_module(*arguments)


def test_folding_files_needs_no_torch():
    import subprocess
    import sys

    code = "import sys, bnexport.folding, bnexport; bnexport.fold; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


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

    with pytest.raises(UnsupportedModelError, match="its code asks for the class of"):
        bnexport.fold_module(
            trained(Called(forward, same=nn.Identity(), c=nn.Conv2d(2, 4, 1), n=norm())), X2, verify=False
        )
