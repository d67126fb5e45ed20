"""Functions that refer to a model refer to the copy's modules and tensors in a copy."""

import functools

import torch
from torch import nn

import bnexport
from bnexport.modules.copies import copy_model

NORM = nn.BatchNorm2d(3)
_plain = NORM.forward


def _of_the_globals(x):
    return 2 * _plain(x)


def _net():
    net = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3))
    return net, net[1], net[1].forward


def _closure():
    net, norm, plain = _net()
    norm.forward = lambda x: 2 * plain(x)
    return net


def _nested_closure():
    net, norm, plain = _net()

    def inner(x):
        return plain(x)

    norm.forward = lambda x: 2 * inner(x)
    return net


def _default():
    net, norm, plain = _net()
    norm.forward = lambda x, plain=plain: 2 * plain(x)
    return net


def _keyword():
    net, norm, plain = _net()

    def forward(x, *, plain=plain):
        return 2 * plain(x)

    norm.forward = forward
    return net


def _partial():
    net, norm, plain = _net()
    norm.forward = functools.partial(lambda plain, x: 2 * plain(x), plain)
    return net


def _global():
    NORM.__dict__.pop("forward", None)
    NORM.forward = _of_the_globals
    return nn.Sequential(nn.Conv2d(3, 3, 1), NORM)


def _tensor_in_a_hook():
    net, norm, _ = _net()
    weight = net[0].weight
    norm.register_forward_hook(lambda module, args, output: output * weight.mean())
    return net


def test_a_copy_runs_its_own_modules_and_tensors():
    x = torch.randn(4, 3, 5, 5)
    for make in (_closure, _nested_closure, _default, _keyword, _partial, _global, _tensor_in_a_hook):
        net = make()
        copied = copy_model(net)
        before = {name: value.clone() for name, value in net.state_dict().items()}
        with torch.no_grad():
            copied[0].weight.mul_(3)
            copied.eval()
            y = copied(x)
        assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()), make.__name__
        with torch.no_grad():
            net[0].weight.mul_(3)
            torch.testing.assert_close(y, net.eval()(x), msg=make.__name__)


def test_other_functions_stay_themselves():
    calls = []
    net, norm, _ = _net()
    hook = lambda *_: calls.append("hook")  # noqa: E731
    norm.register_forward_hook(hook)
    copied = copy_model(net)
    assert list(copied[1]._forward_hooks.values()) == [hook]
    copied(torch.randn(2, 3, 4, 4))
    assert calls == ["hook"]


def test_copies_of_copies():
    net = copy_model(copy_model(_closure())).eval()
    x = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(net(x), 2 * nn.BatchNorm2d.forward(net[1], net[0](x)))


def test_an_attribute_that_is_called_group_is_the_copys_own(tmp_path):
    """Only a process group, and what a sync batch norm calls its group, are shared."""

    class Net(nn.Sequential):
        def __init__(self):
            super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
            self.group, self.process_group = [], {"calls": 0}

        def forward(self, x):
            self.group.append(x.shape)
            self.process_group["calls"] += 1
            return super().forward(x)

    net, connection = Net(), object()
    net.append(bnexport.SyncBatchNorm(4, group=connection))
    copied = copy_model(net.eval())
    copied(torch.randn(2, 3, 8, 8))
    assert len(copied.group) == 1 and copied[2].group is connection
    net[2].group = None
    bnexport.export(net, torch.randn(2, 3, 8, 8), tmp_path / "m.onnx", exporter="torchscript")
    assert net.group == [] and net.process_group == {"calls": 0}
