"""Stand-ins for other packages' batch norms: their class names, modules, attributes and state only."""

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def _in(module: str):
    def place(cls):
        cls.__module__ = module
        return cls

    return place


def _parameters(module: nn.Module, features: int) -> None:
    module.weight = nn.Parameter(torch.randn(features))
    module.bias = nn.Parameter(torch.randn(features))
    module.register_buffer("running_mean", torch.randn(features))
    module.register_buffer("running_var", torch.rand(features) + 0.5)


class _MmcvSyncBatchNorm(nn.Module):
    def __init__(self, num_features, stats_mode="default"):
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, 1e-3, 0.2
        self.affine = self.track_running_stats = True
        self.group, self.group_size, self.stats_mode = None, 1, stats_mode
        _parameters(self, num_features)
        self.register_buffer("num_batches_tracked", torch.tensor(5))


MmcvSyncBatchNorm = _in("mmcv.ops.sync_bn")(type("SyncBatchNorm", (_MmcvSyncBatchNorm,), {}))


@_in("mmengine.model.utils")
class _BatchNormXd(_BatchNorm):
    def _check_input_dim(self, input):
        return


class _ApexSyncBatchNorm(_BatchNorm):
    """apex/parallel/optimized_sync_batchnorm.py as of 37cdaf4a (2019-11-06), unchanged until apex dropped it (2025-05-08).

    Attributes next to those of torch's _BatchNorm: process_group, channel_last, fuse_relu. From the source alone: apex
    is in no package index, so that no test runs the class itself.
    """

    def __init__(self, num_features, fuse_relu=False):
        super().__init__(num_features)
        self.process_group, self.channel_last, self.fuse_relu = None, False, fuse_relu

    def _check_input_dim(self, input):
        return


ApexSyncBatchNorm = _in("apex.parallel.optimized_sync_batchnorm")(type("SyncBatchNorm", (_ApexSyncBatchNorm,), {}))


@_in("detectron2.layers.batch_norm")
class NaiveSyncBatchNorm(nn.BatchNorm2d):
    """detectron2/layers/batch_norm.py, detectron2 0.6 as of 2254a10d (2023-06-08).

    The attribute next to those of torch's BatchNorm2d: _stats_mode, "" or "N". From the source alone: detectron2 is in no
    package index, so that no test runs the class itself.
    """

    def __init__(self, *args, stats_mode="", **kwargs):
        super().__init__(*args, **kwargs)
        self._stats_mode = stats_mode


# mmdet3d/models/layers/norm.py of 1.4.0: no attribute of their own (tests/frameworks/mmdet3d.py runs the real ones).
NaiveSyncBatchNorm1d = _in("mmdet3d.models.layers.norm")(type("NaiveSyncBatchNorm1d", (nn.BatchNorm1d,), {}))
NaiveSyncBatchNorm2d = _in("mmdet3d.models.layers.norm")(type("NaiveSyncBatchNorm2d", (nn.BatchNorm2d,), {}))


@_in("detectron2.layers.batch_norm")
class FrozenBatchNorm2d(nn.Module):
    """The file of NaiveSyncBatchNorm, from the source alone: num_features, eps and buffers, weight and bias among them."""

    def __init__(self, num_features, eps=1e-5):
        super().__init__()
        self.num_features, self.eps = num_features, eps
        self.register_buffer("weight", torch.rand(num_features))
        self.register_buffer("bias", torch.randn(num_features))
        self.register_buffer("running_mean", torch.randn(num_features))
        self.register_buffer("running_var", torch.rand(num_features) + 0.5)
        self.register_buffer("num_batches_tracked", None)

    def forward(self, x):
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        return x * scale.view(1, -1, 1, 1) + (self.bias - self.running_mean * scale).view(1, -1, 1, 1)


class _Abn(nn.Module):
    def __init__(self, num_features, activation="leaky_relu", activation_param=0.01):
        super().__init__()
        self.num_features, self.eps, self.momentum, self.affine = num_features, 1e-5, 0.1, True
        self.track_running_stats = True
        self.activation, self.activation_param = activation, activation_param
        _parameters(self, num_features)
        self.register_buffer("num_batches_tracked", torch.tensor(5))


ABN = _in("inplace_abn.abn")(type("ABN", (_Abn,), {}))
InPlaceABNSync = _in("inplace_abn.abn")(type("InPlaceABNSync", (ABN,), {"group": None}))


# timm's, as of timm 1.0.31 (timm/layers/norm_act.py): attributes `drop` and `act`; the plain class has always
# both, the sync class those that timm's own conversion gives it.
@_in("timm.layers.norm_act")
class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, num_features, act=None, drop=None, **options):
        super().__init__(num_features, **options)
        self.drop = nn.Identity() if drop is None else drop
        self.act = nn.ReLU(inplace=True) if act is None else act

    def forward(self, x):
        assert x.ndim == 4
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        batch = self.training or self.running_mean is None
        statistics = (self.running_mean, self.running_var)
        y = nn.functional.batch_norm(x, *statistics, self.weight, self.bias, batch, self.momentum, self.eps)
        return self.act(self.drop(y))


@_in("timm.layers.norm_act")
class SyncBatchNormAct(nn.SyncBatchNorm):
    def forward(self, x):
        x = super().forward(x)
        for name in ("drop", "act"):
            if hasattr(self, name):
                x = getattr(self, name)(x)
        return x


def timm_sync_batch_norm_act(num_features, act):
    """What timm's convert_sync_batchnorm makes of a BatchNormAct2d."""
    module = SyncBatchNormAct(num_features)
    module.act, module.drop = act, nn.Identity()
    return module
