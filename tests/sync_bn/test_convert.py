"""Which modules are batch norms, and what conversion and its reversal make of them."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from bnexport import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from bnexport.errors import NotConvertedWarning, UsageError
from bnexport.sync_bn.convert import split_activation
from bnexport.sync_bn.recognition import is_sync_batch_norm, known_kind, recognise, unknown_batch_norms
from tests.corpus import classes
from tests.sync_bn import lookalikes


def _inputs(rank=4):
    return torch.randn((4, 3, 5, 5)[:rank])


@pytest.mark.parametrize("cls", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_torchs_classes(cls):
    old = cls(3, eps=1e-3, momentum=0.3)
    new = convert_sync_batchnorm(old)
    assert type(new) is SyncBatchNorm
    assert (new.eps, new.momentum, new.stats_mode, new.grad_reduction) == (1e-3, 0.3, "exact", "local")
    assert new.weight is old.weight
    assert new.running_mean is old.running_mean
    new(torch.randn(4, 3, 5) if cls is nn.BatchNorm1d else torch.randn(4, 3, 5, *[2] * (1 + (cls is nn.BatchNorm3d))))
    assert type(revert_sync_batchnorm(new)) is (cls if cls is not nn.SyncBatchNorm else nn.BatchNorm2d)


@pytest.mark.parametrize(
    ("old", "stats_mode", "grad_reduction", "back"),
    [
        (lookalikes.MmcvSyncBatchNorm(3, "default"), "default", "mean", nn.BatchNorm2d),
        (lookalikes.MmcvSyncBatchNorm(3, "N"), "N", "mean", nn.BatchNorm2d),
        (lookalikes.NaiveSyncBatchNorm(3, stats_mode=""), "default", "local", nn.BatchNorm2d),
        (lookalikes.NaiveSyncBatchNorm(3, stats_mode="N"), "N", "local", nn.BatchNorm2d),
        (lookalikes.NaiveSyncBatchNorm1d(3), "default", "local", nn.BatchNorm1d),
        (lookalikes.NaiveSyncBatchNorm2d(3), "default", "local", nn.BatchNorm2d),
        (nn.BatchNorm2d(3).half(), "exact", "local", nn.BatchNorm2d),
    ],
    ids=["mmcv", "mmcv, N", "detectron2", "detectron2, N", "mmdet3d 1d", "mmdet3d 2d", "half"],
)
def test_other_classes(old, stats_mode, grad_reduction, back):
    """Their numbers are in tests/corpus."""
    said, before = (old.eps, old.momentum), {name: value.clone() for name, value in old.state_dict().items()}
    new = convert_sync_batchnorm(old)
    assert (new.stats_mode, new.grad_reduction, new.eps, new.momentum) == (stats_mode, grad_reduction, *said)
    for name, value in nn.BatchNorm2d(3).state_dict().items():
        kept = new.state_dict()[name]
        assert torch.equal(kept, before[name]) and kept.dtype == before[name].dtype and kept.shape == value.shape
    assert list(new.state_dict()) == list(nn.BatchNorm2d(3).state_dict())
    assert type(revert_sync_batchnorm(new)) is back


def test_foreign_attributes_come_along_and_hide_nothing():
    old = nn.BatchNorm2d(3)
    old.note, old._layer, old.group_size, old._update_statistics = "stem", "theirs", 8, None
    new = convert_sync_batchnorm(old)
    assert new.note == "stem"
    assert (new.group_size(), type(new._layer)) == (1, int)
    assert revert_sync_batchnorm(new).note == "stem"


def test_a_compiled_module_is_replaced():
    old = nn.BatchNorm2d(3)
    old.compile(backend="eager")
    new = convert_sync_batchnorm(nn.Sequential(old))[0]
    calls = []
    new.register_forward_hook(lambda module, *_: calls.append(module))
    new(_inputs())
    assert calls == [new]


def test_frozen_stays_frozen():
    new = convert_sync_batchnorm(nn.Sequential(lookalikes.FrozenBatchNorm2d(3)))
    for one in (new, revert_sync_batchnorm(copy.deepcopy(new))):
        assert one[0].train() is one[0] and not one[0].training
        assert not any(parameter.requires_grad for parameter in one.parameters())


ACTIVATIONS = {
    "leaky_relu": lambda v: nn.functional.leaky_relu(v, 0.2),
    "relu": torch.relu,
    "elu": lambda v: nn.functional.elu(v, 0.2),
    "identity": lambda v: v,
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_inplace_abn(activation):
    old, x = lookalikes.InPlaceABNSync(3, activation, 0.2), _inputs()
    new = convert_sync_batchnorm(old)
    y = nn.functional.batch_norm(x, None, None, old.weight.abs() + old.eps, old.bias, True, eps=old.eps)
    torch.testing.assert_close(new(x), ACTIVATIONS[activation](y))
    torch.testing.assert_close(revert_sync_batchnorm(new.eval())(x), new(x))


def test_activations_are_split_off_where_no_hook_sees_them():
    old = lookalikes.BatchNormAct2d(3, act=nn.SiLU(), drop=nn.Tanh()).eval()
    x = _inputs()
    expected = old(x)
    split = split_activation(old)
    assert [name for name, _ in split.named_children()] == ["norm", "drop", "act"] and not split.training
    torch.testing.assert_close(split(x), expected)
    old.register_forward_hook(lambda *_: None)
    assert split_activation(old) is None
    assert split_activation(nn.BatchNorm2d(3)) is None


def test_reverted_modules_fuse_in_fx():
    from torch.fx.experimental.optimization import fuse

    model = nn.Sequential(nn.Conv2d(3, 4, 3), SyncBatchNorm(4), nn.ReLU(), nn.Conv2d(4, 3, 1), SyncBatchNorm(3))
    model(_inputs())
    model = revert_sync_batchnorm(model).eval()
    fused = fuse(copy.deepcopy(model))
    assert not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in fused.modules())
    x = _inputs()
    torch.testing.assert_close(fused(x), model(x))


@pytest.mark.parametrize("rank", [2, 3, 4])
def test_reverted_without_a_known_use_accepts_every_rank(rank):
    ours = SyncBatchNorm(3).eval()
    back = revert_sync_batchnorm(copy.deepcopy(ours))
    x = _inputs(rank)
    torch.testing.assert_close(back(x), ours(x))
    with pytest.raises(ValueError, match="rank >= 2"):
        back(torch.zeros(3))


def test_other_modules_are_left_alone():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), nn.GroupNorm(1, 3), nn.InstanceNorm2d(3, affine=True))
    before = list(model)
    assert list(convert_sync_batchnorm(model)) == before
    assert list(revert_sync_batchnorm(model)) == before


def test_a_class_that_says_little_of_itself():
    """torchvision's FrozenBatchNorm2d has neither num_features nor momentum, affine or a training mode."""
    old = lookalikes.FrozenBatchNorm2d(3)
    del old.num_features
    new = convert_sync_batchnorm(old)
    said = (new.num_features, new.eps, new.momentum, new.affine, new.track_running_stats)
    assert said == (3, 1e-5, 0.1, True, True)
    old = lookalikes.FrozenBatchNorm2d(3)
    del old.weight, old.bias
    assert not convert_sync_batchnorm(old).affine
    abn = lookalikes.ABN(3, "leaky_relu")
    del abn.affine, abn.activation_param
    abn = convert_sync_batchnorm(abn)
    assert abn.affine and abn.fused_activation.negative_slope == 0.01


def test_the_group_is_the_new_one_else_the_modules_own():
    mine, theirs = object(), object()
    for old, name in ((nn.SyncBatchNorm(3), "process_group"), (lookalikes.MmcvSyncBatchNorm(3), "group")):
        setattr(old, name, theirs)
        assert convert_sync_batchnorm(copy.copy(old)).group is theirs
        assert convert_sync_batchnorm(copy.copy(old), mine).group is mine
    ours = nn.Sequential(SyncBatchNorm(3, group=theirs))
    assert convert_sync_batchnorm(ours)[0].group is theirs
    assert convert_sync_batchnorm(ours, mine)[0].group is mine


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (lookalikes.InPlaceABNSync(3, "swish"), "activation 'swish'"),
        (nn.ModuleDict({"stem": nn.ModuleDict({"norm": nn.LazyBatchNorm2d()})}),
            r"^stem\.norm: LazyBatchNorm2d: its parameters are uninitialised"),
        ("x", r"module: got str, expected a torch\.nn\.Module"),
    ],
)  # fmt: skip
def test_what_cannot_be_converted(module, message):
    with pytest.raises(UsageError, match=message):
        convert_sync_batchnorm(module)
    if module == "x":
        with pytest.raises(UsageError, match=message):
            revert_sync_batchnorm(module)


def test_a_norm_that_gets_another_group_reverts_to_its_first_class():
    ours = convert_sync_batchnorm(convert_sync_batchnorm(nn.BatchNorm1d(3)), object())
    assert type(revert_sync_batchnorm(ours)) is nn.BatchNorm1d


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
        (type("SyncBatchNorm", (nn.SyncBatchNorm,), {"__module__": "mmcv.utils.parrots_wrapper"})(2), "torch_sync", ()),
        (Checked(2), "batch_norm", ()),
        (classes.MmengineSyncBatchNorm(2), "torch_sync", ()),
        (lookalikes.MmcvSyncBatchNorm(2), "mmcv", ()),
        (lookalikes.ABN(2), "inplace_abn", ()),
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
    sync = {"torch_sync", "mmcv", "ours", "inplace_abn"}
    assert is_sync_batch_norm(module) == (kind in sync), kind


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
    for count, words in ((7, r"\) and 2 more; derive"), (5, r"\); derive")):
        with pytest.warns(NotConvertedWarning, match=r"4 \(.*Activated changes forward" + words):
            convert_sync_batchnorm(nn.Sequential(*(classes.Activated(3) for _ in range(count))))


def test_subclasses_of_ours_are_unknown_on_request():
    net = nn.Sequential(classes.ActivatedOurs(3), classes.Activated(3), SyncBatchNorm(3))
    assert [one.path for one in unknown_batch_norms(net)] == ["1"]
    assert [one.path for one in unknown_batch_norms(net, ours=True)] == ["0", "1"]


def test_timms_classes_come_back():
    plain, sync = lookalikes.BatchNormAct2d(3, act=nn.SiLU()), lookalikes.timm_sync_batch_norm_act(3, nn.SiLU())
    for norm in (plain, sync):
        kind, names = type(norm), list(norm.state_dict())
        converted = convert_sync_batchnorm(norm)
        assert isinstance(converted.act, nn.SiLU)
        back = revert_sync_batchnorm(converted)
        assert list(back.state_dict()) == names
        assert type(back) is kind or kind is lookalikes.SyncBatchNormAct


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
