"""Models that torch.fx cannot trace: what is folded inside, and what is reached into and stays."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bnexport
from bnexport.errors import UnsupportedModelError, UsageError
from tests.folding.module.nets import fold_and_check, left, reasons, trained

X = torch.randn(2, 4, 7, 6, generator=torch.Generator().manual_seed(0))


def pair() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())


class Model(nn.Module):
    """A body, a list and a side branch. Control flow depends on values, and `fold_and_check` takes both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.side, self.missing = pair(), pair(), None
        self.layers = nn.ModuleList([pair(), pair()])
        self.kept = {"other": 1}


class BothWays(Model):
    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.side(self.body(x))


class Loop(Model):
    def forward(self, x):
        for layer in self.layers:
            if x.max() > 0:
                x = layer(x)
        return x


class Counted(Model):
    def forward(self, x):
        for index, layer in enumerate(self.layers):
            x = layer(x) * index if x.max() > 0 else x
        for layer, _ in zip(self.layers, "ab"):
            x = layer(x)
        return sum([layer(x) for layer in self.layers])


class Indexed(Model):
    def forward(self, x):
        return self.layers[int(x.max() > 4)](x)


class Helped(Model):
    def helper(self, x):
        return self.body(x) if x.max() > 4 else x

    @property
    def scale(self):
        return self.kept["other"]

    def forward(self, x):
        return self.helper(x) * self.scale


class Derived(Helped):
    @torch.no_grad()
    def forward(self, x):
        return super().forward(x) + 1


class Optional(Model):
    def forward(self, x):
        x = x if self.missing is None else self.missing(x)
        if self.body is not None and x.max() > 4:
            x = self.body(x)
        return self.side(x) if self.side else x


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = BothWays()

    def forward(self, x):
        return self.inner.body(x) if x.max() > 4 else x


class Grouped(nn.Sequential):
    def forward(self, x):
        return super().forward(x) if x.max() > 4 else x


FOLDED = {
    "both ways": (BothWays(), ["layers.0.1", "layers.1.1"]),
    "loop": (Loop(), ["body.1", "side.1"]),
    "enumerate, zip, comprehension": (Counted(), ["body.1", "side.1"]),
    "index": (Indexed(), ["body.1", "side.1"]),
    "method and property": (Helped(), ["side.1", "layers.0.1", "layers.1.1"]),
    "super and decorator": (Derived(), ["side.1", "layers.0.1", "layers.1.1"]),
    "asks whether it is there": (Optional(), ["layers.0.1", "layers.1.1"]),
    "below another module": (Nested(), ["inner.side.1", "inner.layers.0.1", "inner.layers.1.1"]),
    "Sequential with a forward": (Grouped(pair(), pair()), []),
    "untraceable below a traced one": (
        nn.Sequential(pair(), BothWays()),
        ["1.layers.0.1", "1.layers.1.1"],
    ),
    "untraceable below an untraceable one": (Grouped(pair(), BothWays()), ["1.layers.0.1", "1.layers.1.1"]),
}


@pytest.mark.parametrize("name", FOLDED)
def test_parts_that_are_only_called_are_folded(name):
    net, unused = FOLDED[name]
    folded = fold_and_check(trained(net), X)
    assert left(folded) == unused
    assert folded.fold_report.verification.passed


class ByIndex(Model):
    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.body[0](x)


class Sliced(Model):
    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.body[:1](x)


class Weight(Model):
    def forward(self, x):
        return self.body(x) if x.max() > 4 else nn.functional.conv2d(x, self.body[0].weight)


class Handed(Model):
    def forward(self, x):
        return apply(self.body, x) if x.max() > 4 else x


def apply(module, x):
    return module[0](x)


class ByName(Model):
    def forward(self, x):
        return getattr(self, "body")(x) if x.max() > 4 else getattr(self, "body")[0](x)  # noqa: B009


class Alias(Model):
    def forward(self, x):
        body = self.body
        return body(x) if x.max() > 4 else body[0](x)


class Children(Model):
    def forward(self, x):
        for child in self.children():
            return child(x) if x.max() > 4 else child[0](x)


class Dictionary(Model):
    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.__dict__["_modules"]["body"][0](x)


class WithoutHooks(Model):
    def forward(self, x):
        return self.body.forward(x) if x.max() > 4 else x


class Statistic(Model):
    def forward(self, x):
        return self.body(x) * self.body[1].eps if x.max() > 4 else x


class LoopOverLayers(Model):
    def forward(self, x):
        for layer in self.layers:
            x = layer(x) if x.max() > 4 else layer[0](x)
        return x


class Unregistered(Model):
    def __init__(self) -> None:
        super().__init__()
        self.kept = [self.body[0]]

    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.kept[0](x)


class Bound(Model):
    def __init__(self) -> None:
        super().__init__()
        self.kept = self.body[0].forward

    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.kept(x)


class Shared(Model):
    def __init__(self) -> None:
        super().__init__()
        self.first = self.body[0]

    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.first(x)


class Returns(Model):
    @property
    def first(self):
        return self.body[0]

    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.first(x)


class Nonlocal(Model):
    def forward(self, x):
        def inner(self):
            return self[0](x)

        return self.body(x) if x.max() > 4 else inner(self.body)


class Class(Model):
    def __getattr__(self, name):
        return super().__getattr__("body")[0] if name == "first" else super().__getattr__(name)

    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.first(x)


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x, normalise=True):
        x = self.conv(x)
        return self.norm(x) if normalise else x


class Arguments(Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = Two()

    def forward(self, x):
        return self.body(x, x.max() > 4)


class SometimesArguments(Arguments):
    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.body(x, False)


class AsksForClass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x):
        if isinstance(x, list):
            return self.conv(x[0])
        return self.norm(self.conv(x))


class Listed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.body = AsksForClass()

    def forward(self, x):
        return self.body(x) if x.max() > 4 else self.body([x])


KEPT = [
    *(ByIndex, Sliced, Weight, Handed, ByName, Alias, Children, Dictionary, WithoutHooks, Statistic, LoopOverLayers),
    *(Unregistered, Bound, Shared, Returns, Nonlocal, Class, Arguments, SometimesArguments, Listed),
]


@pytest.mark.parametrize("kind", KEPT)
def test_parts_that_are_reached_into_stay(kind):
    net = nn.Sequential(trained(kind()))
    folded = fold_and_check(net, X)
    assert left(folded) == left(net)
    assert reasons(folded)["0.body.norm" if "0.body.norm" in left(net) else "0.body.1"] == ["opaque"]


def test_a_hook_may_reach_anywhere():
    net = trained(BothWays())
    net.register_forward_hook(lambda module, inputs, output: module.body[0](inputs[0]))
    with pytest.raises(UnsupportedModelError, match="cannot be traced"):
        bnexport.fold_module(net)


def test_code_without_a_source():
    space = {"Model": Model}
    exec("class Made(Model):\n    def forward(self, x): return self.body(x) if x.max() > 4 else x", space)
    with pytest.raises(UnsupportedModelError, match="cannot be traced"):
        bnexport.fold_module(trained(space["Made"]()))


def test_ranks_are_not_known_in_parts():
    """The examples show one call only."""

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6))

        def forward(self, x):
            return self.body(x) if x.max() > 4 else x

    folded = fold_and_check(trained(Mlp()), torch.randn(3, 6))
    assert reasons(folded) == {"body.1": ["rank", "not-linear"]}


def test_only_and_skip_name_norms_of_parts():
    net = trained(BothWays())
    assert "body.1" in left(bnexport.fold_module(net, skip=["body.1"]))
    assert left(bnexport.fold_module(net, only=["body.1"])) == ["side.1", "layers.0.1", "layers.1.1"]


def test_inputs_that_the_model_does_not_take():
    with pytest.raises(UsageError, match=r"example_inputs: the model fails on inputs of shape \(2, 3, 7, 6\)"):
        bnexport.fold_module(trained(BothWays()), X[:, :3])
