import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from bnexport import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from bnexport.errors import NotConvertedWarning
from bnexport.sync_bn.recognition import is_sync_batch_norm, known_kind, recognise, unknown_batch_norms
from tests.corpus import classes
from tests.sync_bn import lookalikes


class Checked(nn.BatchNorm2d):
    """Overrides what does not reach the result."""

    momentum = 0.5  # hidden by the instance's

    def __init__(self, channels):
        super().__init__(channels)

    def _check_input_dim(self, input):
        pass

    def _load_from_state_dict(self, *args):
        super()._load_from_state_dict(*args)

    def extra_repr(self):
        return "checked"


class OwnWeight(nn.BatchNorm2d):
    def __getattr__(self, name):
        value = super().__getattr__(name)
        return value.abs() if name == "weight" else value


def _double(norm):
    norm.forward = lambda x: 2 * nn.BatchNorm2d.forward(norm, x)
    return norm


@pytest.mark.parametrize(
    ("module", "kind", "changed"),
    [
        (nn.Linear(2, 2), None, ()),
        (nn.InstanceNorm2d(2), None, ()),
        (nn.BatchNorm3d(2), "batch_norm", ()),
        (nn.LazyBatchNorm1d(), "batch_norm", ()),
        (nn.SyncBatchNorm(2), "torch_sync", ()),
        (Checked(2), "batch_norm", ()),
        (classes.MmengineSyncBatchNorm(2), "torch_sync", ()),
        (lookalikes.MmcvSyncBatchNorm(2), "mmcv", ()),
        (lookalikes.BatchNormAct2d(2), "batch_norm_act", ()),
        (classes.Activated(2), "batch_norm", ("forward",)),
        (classes.NeverTrains(2), "batch_norm", ("train",)),
        (classes.CallsTwice(2), "batch_norm", ("__call__",)),
        (classes.WideEps(2), "batch_norm", ("eps",)),
        (OwnWeight(2), "batch_norm", ("__getattr__",)),
        (_double(nn.BatchNorm2d(2)), "batch_norm", ("forward (set on the instance)",)),
        (classes.ActivatedTwiceTimm(2), "batch_norm_act", ("forward",)),
        (classes.ActivatedOurs(2), "ours", ("forward",)),
        (torch.jit.script(nn.BatchNorm2d(2)), "batch_norm", ("forward (compiled by TorchScript)",)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_kinds_and_changes(module, kind, changed):
    found = recognise(module)
    assert (found and found.kind) == kind
    assert (found.changed if found else ()) == changed
    assert known_kind(module) == (None if changed else kind)


def test_mmcvs_wrapper_of_torchs_class_is_torchs():
    wrapper = type("SyncBatchNorm", (nn.SyncBatchNorm,), {"__module__": "mmcv.utils.parrots_wrapper"})
    assert known_kind(wrapper(2)) == "torch_sync"


def test_a_parametrised_module_is_its_own_class():
    class Double(nn.Module):
        def forward(self, weight):
            return 2 * weight

    for norm, kind in ((nn.BatchNorm2d(2), "batch_norm"), (classes.InPlaceABN(2), None)):
        parametrize.register_parametrization(norm, "weight", Double())
        assert known_kind(norm) == kind


def test_what_stays_is_named_with_path_class_and_change():
    net = nn.Sequential(nn.Sequential(classes.Activated(3)), nn.BatchNorm2d(3))
    with pytest.warns(NotConvertedWarning) as caught:
        converted = convert_sync_batchnorm(net)
    assert type(converted[0][0]) is classes.Activated
    assert type(converted[1]) is SyncBatchNorm
    assert caught[0].filename == __file__
    message = str(caught[0].message)
    assert "0.0 (tests.corpus.classes.Activated changes forward)" in message
    assert "derive such a class from bnexport.SyncBatchNorm" in message
    assert [unknown.path for unknown in unknown_batch_norms(net)] == ["0.0"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        revert_sync_batchnorm(converted)  # a plain one is nothing to revert
    with pytest.warns(NotConvertedWarning, match=r"0 \(.*ActivatedTorchSync changes forward\)"):
        revert_sync_batchnorm(nn.Sequential(classes.ActivatedTorchSync(3)))


def test_of_many_that_stay_five_are_named():
    with pytest.warns(NotConvertedWarning, match=r"4 \(.*Activated changes forward\) and 2 more; derive"):
        convert_sync_batchnorm(nn.Sequential(*(classes.Activated(3) for _ in range(7))))
    with pytest.warns(NotConvertedWarning, match=r"4 \(.*Activated changes forward\); derive"):
        convert_sync_batchnorm(nn.Sequential(*(classes.Activated(3) for _ in range(5))))


def test_subclasses_of_ours_are_unknown_on_request():
    net = nn.Sequential(classes.ActivatedOurs(3), classes.Activated(3), SyncBatchNorm(3))
    assert [one.path for one in unknown_batch_norms(net)] == ["1"]
    assert [one.path for one in unknown_batch_norms(net, ours=True)] == ["0", "1"]


def test_sync_batch_norms():
    sync = (SyncBatchNorm(3), nn.SyncBatchNorm(3), lookalikes.ABN(3), classes.ActivatedOurs(3))
    assert [is_sync_batch_norm(module) for module in sync] == [True] * 4
    assert [is_sync_batch_norm(module) for module in (nn.BatchNorm2d(3), nn.Linear(2, 2))] == [False] * 2


def test_timms_classes_keep_dropout_and_activation():
    net = nn.Sequential(lookalikes.BatchNormAct2d(3, act=nn.SiLU(), drop=nn.Tanh()))
    other = nn.Sequential(lookalikes.timm_sync_batch_norm_act(3, nn.SiLU()))
    x = torch.randn(4, 3, 5, 5)
    expected = [copy.deepcopy(one)(x) for one in (net, other)]
    for one, y in zip((net, other), expected):
        kind, names = type(one[0]), list(one.state_dict())
        converted = convert_sync_batchnorm(one)
        torch.testing.assert_close(copy.deepcopy(converted)(x), y)
        assert isinstance(converted[0].act, nn.SiLU)
        back = revert_sync_batchnorm(converted)
        torch.testing.assert_close(copy.deepcopy(back)(x), y)
        assert list(back.state_dict()) == names
        assert type(back[0]) is kind or kind is lookalikes.SyncBatchNormAct


def test_what_refers_to_a_norm_refers_to_the_new_one():
    norm = nn.BatchNorm2d(3)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), norm)
    net.held = [norm]
    seen = []
    handle = norm.register_forward_hook(lambda *_: seen.append("hook"))
    convert_sync_batchnorm(net)
    assert net.held[0] is net[1] is norm
    net.eval()
    assert not net.held[0].training
    net(torch.randn(2, 3, 4, 4))
    handle.remove()
    net(torch.randn(2, 3, 4, 4))
    assert seen == ["hook"]
