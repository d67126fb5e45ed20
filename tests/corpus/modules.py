"""The corpus: small networks around a batch norm, with what each way of bnexport is to make of them."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from bnexport import SyncBatchNorm
from tests.corpus import classes
from tests.sync_bn import lookalikes

C = 4


@dataclasses.dataclass(frozen=True)
class Case:
    """build: the network, in train mode. make: the same, with the same random numbers each time.

    shape: of the example input. dtype: the coarsest type inside; a bfloat16 network takes float32.
    left: paths of the modules that conversion leaves and names. refused: the ways that refuse the network, on
    purpose; all others are right. replaced: parameters for which conversion has others of the same meaning.
    other_modules: whether conversion changes the list of modules.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...] = (4, 3, 6, 5)
    dtype: torch.dtype = torch.float32
    left: tuple[str, ...] = ()
    refused: frozenset[str] = frozenset()
    replaced: tuple[str, ...] = ()
    other_modules: bool = False

    def make(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()


def around(norm: nn.Module, *, seed: int = 0) -> nn.Module:
    """A convolution, the norm with statistics and parameters of its own, an activation and a convolution."""
    net = nn.Sequential(OrderedDict(conv=nn.Conv2d(3, C, 3), norm=norm, act=nn.LeakyReLU(), head=nn.Conv2d(C, 2, 1)))
    return randomised(net, seed)


def randomised(net: nn.Module, seed: int = 0) -> nn.Module:
    """Draws every parameter, and the statistics of every norm; negative weights among them."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in (*net.named_parameters(), *net.named_buffers()):
            if not tensor.is_floating_point() or isinstance(tensor, nn.parameter.UninitializedTensorMixin):
                continue
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif "_u" not in name and "_v" not in name:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.7)
    return net


def trained(net: nn.Module, shape: tuple[int, ...] = (4, 3, 6, 5)) -> nn.Module:
    net.train()
    with torch.no_grad():
        net(torch.randn(shape, generator=torch.Generator().manual_seed(1)))
    return net


class Calls(nn.Module):
    """Calls its parts in an order of its own."""

    def __init__(self, forward: Callable[[Calls, torch.Tensor], torch.Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self._forward = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x):
        return self._forward(self, x)


def _ranks(norm, convolution):
    return randomised(nn.Sequential(OrderedDict(conv=convolution, norm=norm, relu=nn.ReLU())))


def _changed(change, norm=None):
    net = around(nn.BatchNorm2d(C) if norm is None else norm)
    change(net.norm)
    return net


def _with(**values):
    return lambda norm: [setattr(norm, name, value) for name, value in values.items()]


def _forward_hook(norm):
    norm.register_forward_hook(lambda module, args, output: 3 * output)


def _hook_on_another():
    net = around(nn.BatchNorm2d(C))
    conv = net.conv
    net.norm.register_forward_hook(lambda module, args, output: output * conv.weight.mean())
    return net


class _Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


def _parametrized(norm):
    parametrize.register_parametrization(norm, "weight", _Double())


def _conv_with(wrap):
    net = around(nn.BatchNorm2d(C))
    wrap(net.conv)
    return net.eval().train()


def _tied():
    norm = nn.BatchNorm2d(C)
    net = nn.Sequential(nn.Conv2d(3, C, 3), norm, nn.ReLU(), norm, nn.Conv2d(C, 2, 1))
    return randomised(net)


def _twice(norm):
    return randomised(
        Calls(lambda self, x: self.norm(torch.relu(self.norm(self.conv(x)))), conv=nn.Conv2d(3, C, 3), norm=norm)
    )


def _pair(*shared):
    """Two norms, the second with these parameters or statistics of the first."""
    net = Calls(
        lambda self, x: self.second(torch.relu(self.first(self.conv(x)))),
        conv=nn.Conv2d(3, C, 3),
        first=nn.BatchNorm2d(C),
        second=nn.BatchNorm2d(C),
    )
    for name in shared:
        setattr(net.second, name, getattr(net.first, name))
    return randomised(net)


def _patched(forward):
    """A norm whose attribute `forward` is what is made of the norm and its own forward."""
    return _changed(lambda norm: setattr(norm, "forward", forward(norm, norm.forward)))


def _scaled(factor, forward, x):
    return factor * forward(x)


PATCHES = {
    "closure": lambda norm, plain: lambda x: torch.tanh(plain(x)),
    "method": lambda norm, plain: types.MethodType(lambda self, x: torch.tanh(type(self).forward(self, x)), norm),
    "partial": lambda norm, plain: functools.partial(_scaled, 3.0, plain),
}


def _scripted():
    net = around(nn.BatchNorm2d(C))
    net.norm = torch.jit.script(net.norm)
    return net


def _scripted_block():
    net = around(nn.BatchNorm2d(C))
    return nn.Sequential(OrderedDict(body=torch.jit.script(net), tail=nn.Conv2d(2, 2, 1)))


def _timm():
    stem = nn.Sequential(nn.Conv2d(3, C, 3), lookalikes.BatchNormAct2d(C))
    body = nn.Sequential(nn.Conv2d(C, C, 1), lookalikes.BatchNormAct2d(C, act=nn.SiLU(), drop=nn.Tanh()))
    return randomised(nn.Sequential(stem, body, nn.BatchNorm2d(C), nn.Conv2d(C, 2, 1)))


def _in_lists():
    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms["all"]):
            x = torch.relu(norm(conv(x)))
        return x

    convs = nn.ModuleList([nn.Conv2d(3, C, 3), nn.Conv2d(C, C, 1)])
    norms = nn.ModuleDict({"all": nn.ModuleList([nn.BatchNorm2d(C), SyncBatchNorm(C)])})
    return randomised(Calls(forward, convs=convs, norms=norms))


def _held_in_a_plain_list():
    net = Calls(lambda self, x: torch.relu(self.held[0](self.conv(x))), conv=nn.Conv2d(3, C, 3), norm=nn.BatchNorm2d(C))
    net.held = [net.norm]
    return randomised(net)


def _functional():
    def forward(self, x):
        norm = self.norm
        tensors = norm.running_mean, norm.running_var, norm.weight, norm.bias
        return nn.functional.batch_norm(self.conv(x), *tensors, self.training, 0.1, norm.eps)

    return randomised(Calls(forward, conv=nn.Conv2d(3, C, 3), norm=nn.BatchNorm2d(C)))


def _bfloat16():
    net = Calls(
        lambda self, x: self.norm(self.conv(x).bfloat16()).float(), conv=nn.Conv2d(3, C, 3), norm=nn.BatchNorm2d(C)
    )
    net.norm.bfloat16()
    return randomised(net)


def _frozen_norm():
    net = trained(around(nn.BatchNorm2d(C)))
    net.norm.eval()
    return net


def _lazy():
    net = around(nn.LazyBatchNorm2d())
    return randomised(trained(net))


TRAIN_EXPORTS = frozenset(f"{exporter}-custom_op-train" for exporter in ("dynamo", "torchscript"))
EVAL_EXPORTS = frozenset(f"{exporter}-custom_op-eval" for exporter in ("dynamo", "torchscript"))
DEPLOY = frozenset(f"{exporter}-deploy-{mode}" for exporter in ("dynamo", "torchscript") for mode in ("train", "eval"))
STEP = frozenset({"training_step"})
EVERY_EXPORT = TRAIN_EXPORTS | EVAL_EXPORTS | DEPLOY
EVERY_WAY = EVERY_EXPORT | STEP | {"convert", "revert", "fold_module"}

bn = functools.partial(nn.BatchNorm2d, C)

CASES: dict[str, Case] = {
    # torch's, ours, and what can be set on them
    "BatchNorm2d": Case(lambda: around(bn())),
    "BatchNorm1d (N, C)": Case(lambda: _ranks(nn.BatchNorm1d(C), nn.Linear(3, C)), (6, 3)),
    "BatchNorm1d (N, C, L)": Case(lambda: _ranks(nn.BatchNorm1d(C), nn.Conv1d(3, C, 3)), (4, 3, 7)),
    "BatchNorm3d": Case(lambda: _ranks(nn.BatchNorm3d(C), nn.Conv3d(3, C, 2)), (3, 3, 4, 3, 5)),
    "torch.nn.SyncBatchNorm": Case(lambda: around(nn.SyncBatchNorm(C))),
    "SyncBatchNorm": Case(lambda: around(SyncBatchNorm(C, momentum=0.3, eps=0.1))),
    "momentum None": Case(lambda: trained(around(bn(momentum=None)))),
    "no running statistics": Case(lambda: around(bn(track_running_stats=False))),
    "ours without running statistics": Case(lambda: around(SyncBatchNorm(C, track_running_stats=False))),
    "affine False": Case(lambda: around(bn(affine=False))),
    "no bias": Case(lambda: around(bn(bias=False))),
    "tracking switched off": Case(lambda: _changed(_with(track_running_stats=False))),
    "no count": Case(lambda: _changed(_with(num_batches_tracked=None))),
    "own attributes": Case(lambda: _changed(_with(group_size=8, act=nn.Sigmoid(), weight_scale=3, _layer="theirs"))),
    "half": Case(lambda: around(bn()).half(), dtype=torch.float16),
    "bfloat16 norm": Case(_bfloat16, dtype=torch.bfloat16, refused=EVERY_EXPORT | STEP),
    "double": Case(lambda: _ranks(nn.BatchNorm1d(C), nn.Linear(3, C)).double(), (6, 3), torch.float64),
    "norm in eval mode": Case(_frozen_norm),
    "norm without gradient": Case(lambda: _changed(lambda norm: norm.requires_grad_(False))),
    "lazy, after a forward": Case(_lazy),
    "lazy, before a forward": Case(lambda: around(nn.LazyBatchNorm2d()), refused=EVERY_WAY),
    # subclasses that compute something else
    "activation": Case(lambda: around(classes.Activated(C)), left=("norm",), refused=TRAIN_EXPORTS),
    "absolute weight": Case(lambda: around(classes.AbsoluteWeight(C)), left=("norm",), refused=TRAIN_EXPORTS),
    "1 + weight": Case(lambda: around(classes.OnePlusWeight(C)), left=("norm",), refused=TRAIN_EXPORTS),
    "residual": Case(lambda: around(classes.Residual(C)), left=("norm",), refused=TRAIN_EXPORTS),
    "halves": Case(lambda: around(classes.Halves(C)), left=("norm",), refused=TRAIN_EXPORTS),
    "split": Case(lambda: around(classes.Split(C)), left=("norm",), refused=TRAIN_EXPORTS),
    "never trains": Case(lambda: around(classes.NeverTrains(C)).train(), left=("norm",)),
    "fixed statistics": Case(lambda: around(classes.FixedStatistics(C)), left=("norm",), refused=TRAIN_EXPORTS),
    "eps as a property": Case(lambda: around(classes.WideEps(C)), left=("norm",), refused=TRAIN_EXPORTS),
    "__call__": Case(lambda: around(classes.CallsTwice(C)), left=("norm",), refused=TRAIN_EXPORTS),
    "torch's sync with activation": Case(lambda: around(classes.ActivatedTorchSync(C)), left=("norm",),
        refused=TRAIN_EXPORTS | EVAL_EXPORTS | STEP),
    "ours with activation": Case(lambda: around(classes.ActivatedOurs(C))),
    "timm's with activation": Case(lambda: around(classes.ActivatedTwiceTimm(C)), left=("norm",),
        refused=TRAIN_EXPORTS),
    **{
        f"forward set, {name}": Case(functools.partial(_patched, make), left=("norm",), refused=TRAIN_EXPORTS)
        for name, make in PATCHES.items()
    },
    "scripted": Case(_scripted, left=("norm",), refused=EVERY_EXPORT | STEP),
    "scripted block": Case(_scripted_block, left=("body.norm",), refused=EVERY_EXPORT | STEP),
    # subclasses that do not
    "checks only": Case(lambda: around(classes.ChecksOnly(C))),
    "any rank": Case(lambda: around(classes.AnyRank(C))),
    # hooks and parametrisations
    "forward hook": Case(lambda: _changed(_forward_hook)),
    "forward hook, torch's sync": Case(lambda: _changed(_forward_hook, nn.SyncBatchNorm(C))),
    "forward hook, apex with ReLU": Case(lambda: _changed(_forward_hook, classes.ApexSyncBatchNorm(C, fuse_relu=True)),
        other_modules=True),
    "forward pre-hook": Case(lambda: _changed(lambda norm: norm.register_forward_pre_hook(lambda module, args: (args[0] * 2 + 1,)))),
    "backward hook": Case(lambda: _changed(
        lambda norm: norm.register_full_backward_hook(lambda module, grad_input, grad_output: (3 * grad_input[0],)))),
    "hook that reads another module": Case(_hook_on_another),
    "parametrised weight": Case(lambda: _changed(_parametrized)),
    "parametrised, torch's sync": Case(lambda: _changed(_parametrized, nn.SyncBatchNorm(C))),
    "parametrised, InPlaceABN": Case(lambda: _changed(_parametrized, classes.InPlaceABN(C)), left=("norm",),
        refused=TRAIN_EXPORTS | EVAL_EXPORTS | STEP),
    "weight norm by a hook": Case(lambda: _changed(lambda norm: weight_norm(norm, "weight"))),
    "weight norm on the convolution": Case(lambda: _conv_with(parametrizations.weight_norm)),
    "spectral norm on the convolution": Case(lambda: _conv_with(parametrizations.spectral_norm),
        refused=frozenset(way for way in EVERY_EXPORT if way.startswith("torchscript"))),
    "spectral norm by a hook": Case(lambda: _conv_with(spectral_norm),
        refused=frozenset({"torchscript-custom_op-train"})),
    # sharing
    "one module under two names": Case(_tied),
    "one module called twice": Case(lambda: _twice(bn())),
    "ours called twice": Case(lambda: _twice(SyncBatchNorm(C))),
    "momentum None called twice": Case(lambda: _twice(bn(momentum=None))),
    "shared parameters": Case(lambda: _pair("weight", "bias")),
    "shared statistics": Case(lambda: _pair("running_mean", "running_var")),
    "in lists": Case(_in_lists),
    "held in a plain list": Case(_held_in_a_plain_list, refused=frozenset({"fold_module"})),
    "functional": Case(_functional, refused=TRAIN_EXPORTS),
    # other packages
    "timm BatchNormAct2d": Case(_timm),
    "timm SyncBatchNormAct": Case(lambda: around(lookalikes.timm_sync_batch_norm_act(C, nn.SiLU()))),
    "mmcv": Case(lambda: around(classes.MmcvSyncBatchNorm(C))),
    "mmengine's sync": Case(lambda: around(classes.MmengineSyncBatchNorm(C))),
    "mmengine's reverted": Case(lambda: around(lookalikes._BatchNormXd(C))),
    "apex": Case(lambda: around(classes.ApexSyncBatchNorm(C))),
    "apex with ReLU": Case(lambda: around(classes.ApexSyncBatchNorm(C, fuse_relu=True)), other_modules=True),
    "detectron2 naive": Case(lambda: around(lookalikes.NaiveSyncBatchNorm(C))),
    "detectron2 frozen": Case(lambda: around(lookalikes.FrozenBatchNorm2d(C)), other_modules=True),
    "frozen, copied": Case(lambda: around(classes.UserFrozenBatchNorm2d(C))),
    "ABN": Case(lambda: around(classes.ABN(C)), other_modules=True),
    "InPlaceABN": Case(lambda: around(classes.InPlaceABN(C)), replaced=("norm.weight", "norm.0.weight"),
        other_modules=True),
}  # fmt: skip
