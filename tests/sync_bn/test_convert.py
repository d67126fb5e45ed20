import copy

import pytest
import torch
from torch import nn

from bnexport import SyncBatchNorm, convert_sync_batchnorm, revert_sync_batchnorm
from bnexport.errors import UsageError
from bnexport.sync_bn.convert import split_activation
from tests.sync_bn import lookalikes


def _inputs(rank=4):
    return torch.randn((4, 3, 5, 5)[:rank])


@pytest.mark.parametrize("cls", [nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_torchs_classes(cls):
    old = cls(3, eps=1e-3, momentum=0.3)
    nn.init.normal_(old.weight)
    new = convert_sync_batchnorm(old)
    assert type(new) is SyncBatchNorm
    assert (new.eps, new.momentum, new.stats_mode, new.grad_reduction) == (1e-3, 0.3, "exact", "local")
    assert new.weight is old.weight
    assert new.running_mean is old.running_mean
    shape = {nn.BatchNorm1d: (4, 3, 5), nn.BatchNorm3d: (4, 3, 2, 2, 2)}.get(cls, (4, 3, 5, 5))
    x = torch.randn(shape)
    torch.testing.assert_close(new(x), nn.functional.batch_norm(x, None, None, old.weight, old.bias, True, eps=1e-3))
    back = revert_sync_batchnorm(new)
    assert type(back) is (cls if cls is not nn.SyncBatchNorm else nn.BatchNorm2d)
    torch.testing.assert_close(back.eval()(x), new.eval()(x))


def test_mmcv_keeps_its_statistics_and_gradients():
    for mode in ("default", "N"):
        old = lookalikes.MmcvSyncBatchNorm(3, mode)
        new = convert_sync_batchnorm(old)
        assert (new.stats_mode, new.grad_reduction, new.eps, new.momentum) == (mode, "mean", 1e-3, 0.2)
        assert list(new.state_dict()) == list(nn.BatchNorm2d(3).state_dict())
        assert new.num_batches_tracked == 5
        x = _inputs()
        expected = nn.functional.batch_norm(x, old.running_mean, old.running_var, old.weight, old.bias, eps=1e-3)
        torch.testing.assert_close(revert_sync_batchnorm(old).eval()(x), expected)


def test_foreign_attributes_come_along_and_hide_nothing():
    old = nn.BatchNorm2d(3)
    old.note, old._layer, old.group_size, old._update_statistics = "stem", "theirs", 8, None
    new = convert_sync_batchnorm(old)
    assert new.note == "stem"
    assert (new.group_size(), type(new._layer)) == (1, int)
    new(_inputs())
    back = revert_sync_batchnorm(new)
    assert back.note == "stem"
    back(_inputs())


def test_a_compiled_module_is_replaced():
    old = nn.BatchNorm2d(3)
    old.compile(backend="eager")
    new = convert_sync_batchnorm(nn.Sequential(old))[0]
    calls = []
    new.register_forward_hook(lambda module, *_: calls.append(module))
    new(_inputs())
    assert calls == [new]


@pytest.mark.parametrize(("mode", "expected"), [("", "default"), ("N", "N")])
def test_detectron2_naive(mode, expected):
    new = convert_sync_batchnorm(lookalikes.NaiveSyncBatchNorm(3, stats_mode=mode))
    assert (new.stats_mode, new.grad_reduction) == (expected, "local")
    assert type(revert_sync_batchnorm(new)) is nn.BatchNorm2d


@pytest.mark.parametrize("n", [1, 2])
def test_mmdet3d_naive(n):
    new = convert_sync_batchnorm(getattr(lookalikes, f"NaiveSyncBatchNorm{n}d")(3))
    assert (new.stats_mode, new.grad_reduction) == ("default", "local")
    assert type(revert_sync_batchnorm(new)) is getattr(nn, f"BatchNorm{n}d")


def test_frozen_stays_frozen():
    old = lookalikes.FrozenBatchNorm2d(3)
    x = _inputs()
    expected = old(x)
    new = convert_sync_batchnorm(nn.Sequential(old))
    before = {name: value.clone() for name, value in new.state_dict().items()}
    new.train()
    torch.testing.assert_close(new(x), expected)
    assert all(torch.equal(value, before[name]) for name, value in new.state_dict().items())
    assert not any(p.requires_grad for p in new.parameters())
    torch.testing.assert_close(revert_sync_batchnorm(new).eval()(x), expected)


@pytest.mark.parametrize(
    ("activation", "parameter"), [("leaky_relu", 0.2), ("relu", 0.0), ("elu", 0.5), ("identity", 0.0)]
)
def test_inplace_abn(activation, parameter):
    old = lookalikes.InPlaceABNSync(3, activation, parameter)
    new = convert_sync_batchnorm(old)
    x = _inputs()
    y = nn.functional.batch_norm(x, None, None, old.weight.abs() + old.eps, old.bias, True, eps=old.eps)
    act = {"leaky_relu": lambda v: nn.functional.leaky_relu(v, parameter), "relu": torch.relu,
           "elu": lambda v: nn.functional.elu(v, parameter), "identity": lambda v: v}[activation]  # fmt: skip
    torch.testing.assert_close(new(x), act(y))
    torch.testing.assert_close(revert_sync_batchnorm(new.eval())(x), new(x))


def test_the_slope_that_inplace_abn_has_by_default():
    old = lookalikes.InPlaceABNSync(3, "leaky_relu")
    del old.activation_param
    assert convert_sync_batchnorm(old).fused_activation.negative_slope == 0.01


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


def test_unknown_activation():
    with pytest.raises(UsageError, match="activation 'swish'"):
        convert_sync_batchnorm(lookalikes.InPlaceABNSync(3, "swish"))


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


def test_dtype_and_device_survive():
    new = convert_sync_batchnorm(nn.BatchNorm2d(3).half())
    assert (new.weight.dtype, new.running_var.dtype) == (torch.float16, torch.float16)


@pytest.mark.parametrize(
    "cls", [nn.BatchNorm2d, nn.SyncBatchNorm, lookalikes.MmcvSyncBatchNorm, lookalikes.ApexSyncBatchNorm]
)
def test_checkpoints_go_both_ways(cls):
    theirs, ours = cls(3), SyncBatchNorm(3)
    nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    assert torch.equal(ours.weight, theirs.weight)
    ours(_inputs())
    theirs.load_state_dict(ours.state_dict())
    assert torch.equal(theirs.running_var, ours.running_var)


def test_a_class_that_says_little_of_itself():
    """torchvision's FrozenBatchNorm2d has neither num_features nor momentum, affine or a training mode."""
    old = lookalikes.FrozenBatchNorm2d(3)
    del old.num_features
    new = convert_sync_batchnorm(old)
    said = (new.num_features, new.eps, new.momentum, new.affine, new.track_running_stats)
    assert said == (3, 1e-5, 0.1, True, True)
    assert not _without_weight().affine
    abn = lookalikes.ABN(3)
    del abn.affine
    assert convert_sync_batchnorm(abn).affine


def _without_weight():
    old = lookalikes.FrozenBatchNorm2d(3)
    del old.weight, old.bias
    return convert_sync_batchnorm(old)


def test_the_group_is_the_new_one_else_the_modules_own():
    mine, theirs = object(), object()
    for old, name in ((nn.SyncBatchNorm(3), "process_group"), (lookalikes.MmcvSyncBatchNorm(3), "group")):
        setattr(old, name, theirs)
        assert convert_sync_batchnorm(copy.copy(old)).group is theirs
        assert convert_sync_batchnorm(copy.copy(old), mine).group is mine
    ours = nn.Sequential(SyncBatchNorm(3, group=theirs))
    assert convert_sync_batchnorm(ours)[0].group is theirs
    assert convert_sync_batchnorm(ours, mine)[0].group is mine


def test_a_norm_that_gets_another_group_reverts_to_its_first_class():
    ours = convert_sync_batchnorm(convert_sync_batchnorm(nn.BatchNorm1d(3)), object())
    assert type(revert_sync_batchnorm(ours)) is nn.BatchNorm1d


def test_a_weight_that_a_hook_computes_stays_computed():
    old = torch.nn.utils.weight_norm(nn.BatchNorm2d(3))
    new = convert_sync_batchnorm(old)
    assert "weight" not in new._parameters and {"weight_g", "weight_v"} <= set(new._parameters)
    with torch.no_grad():
        new.weight_g.mul_(2)
    x = _inputs()
    expected = nn.functional.batch_norm(x, None, None, new.weight_g.abs() * new.weight_v.sign(), new.bias, True)
    torch.testing.assert_close(new(x), expected)


def test_an_error_names_the_path():
    with pytest.raises(UsageError, match=r"^stem\.norm: LazyBatchNorm2d: its parameters are uninitialised"):
        convert_sync_batchnorm(nn.ModuleDict({"stem": nn.ModuleDict({"norm": nn.LazyBatchNorm2d()})}))


def test_train_returns_the_module_of_a_frozen_class():
    sync = convert_sync_batchnorm(lookalikes.FrozenBatchNorm2d(3))
    assert sync.train() is sync and not sync.training
    plain = revert_sync_batchnorm(sync)
    assert plain.train() is plain and not plain.training


@pytest.mark.parametrize("function", [convert_sync_batchnorm, revert_sync_batchnorm])
def test_what_is_no_module(function):
    with pytest.raises(UsageError, match=r"module: got str, expected a torch\.nn\.Module"):
        function("x")
