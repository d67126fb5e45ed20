"""Classes that derive from a batch norm: those that compute something else, and other packages' that do not.

The second half are stand-ins: the class names, packages and attributes of the originals, their forward
written from their definition, on one process.
"""

import torch
from torch import nn
from torch.nn.functional import batch_norm
from torch.nn.modules.batchnorm import _BatchNorm

from bnexport import SyncBatchNorm
from tests.sync_bn import lookalikes
from tests.sync_bn.lookalikes import _in


class Activated(nn.BatchNorm2d):
    def forward(self, x):
        return torch.relu(super().forward(x))


def _normalised(module, x, weight, training=None, momentum=None):
    """Batch norm with the statistics and the bias of a module."""
    training = module.training if training is None else training
    momentum = module.momentum if momentum is None else momentum
    return batch_norm(x, module.running_mean, module.running_var, weight, module.bias, training, momentum, module.eps)


class AbsoluteWeight(nn.BatchNorm2d):
    def forward(self, x):
        return _normalised(self, x, self.weight.abs())


class OnePlusWeight(nn.BatchNorm2d):
    """As zero-centred scales are written."""

    def forward(self, x):
        return _normalised(self, x, 1 + self.weight)


class Residual(nn.BatchNorm2d):
    def forward(self, x):
        return x + super().forward(x)


class Halves(nn.BatchNorm2d):
    """Ghost batch norm: each half of the batch has its own statistics in training."""

    def forward(self, x):
        if not self.training:
            return super().forward(x)
        half = x.shape[0] // 2
        return torch.cat([super().forward(x[:half]), self.of_second_half(x[half:])])

    def of_second_half(self, x):
        return super().forward(x)


class Split(Halves):
    """A second norm for the second half of the batch, as timm's SplitBatchNorm2d."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.other = nn.BatchNorm2d(num_features)

    def of_second_half(self, x):
        return self.other(x)


class NeverTrains(nn.BatchNorm2d):
    def train(self, mode=True):
        return super().train(False)


class FixedStatistics(nn.BatchNorm2d):
    """Uses its running statistics in train mode, too, and trains weight and bias."""

    def forward(self, x):
        return _normalised(self, x, self.weight, False, 0.0)


class WideEps(nn.BatchNorm2d):
    @property
    def eps(self):
        return 0.5

    @eps.setter
    def eps(self, value):
        pass


class CallsTwice(nn.BatchNorm2d):
    def __call__(self, x):
        return 2 * super().__call__(x)


class ChecksOnly(nn.BatchNorm2d):
    """Overrides nothing that forward's result depends on."""

    def __init__(self, num_features):
        super().__init__(num_features)
        self.note = "stem"

    def _check_input_dim(self, input):
        assert input.dim() == 4

    def extra_repr(self):
        return f"{super().extra_repr()}, note={self.note}"

    def reset_parameters(self):
        super().reset_parameters()

    def scale(self):
        return self.weight / (self.running_var + self.eps).sqrt()


class ActivatedTorchSync(nn.SyncBatchNorm):
    def forward(self, x):
        return torch.relu(super().forward(x))


class ActivatedOurs(SyncBatchNorm):
    def forward(self, x):
        return torch.relu(super().forward(x))


class ActivatedTwiceTimm(lookalikes.BatchNormAct2d):
    def forward(self, x):
        return torch.tanh(super().forward(x))


class UserFrozenBatchNorm2d(nn.Module):
    """FrozenBatchNorm2d as projects copy it, with an eps of its own: no batch norm class."""

    def __init__(self, num_features):
        super().__init__()
        for name in ("weight", "bias", "running_mean"):
            self.register_buffer(name, torch.randn(num_features))
        self.register_buffer("running_var", torch.rand(num_features) + 0.5)

    def forward(self, x):
        scale = self.weight * (self.running_var + 1e-2).rsqrt()
        return x * scale.view(1, -1, 1, 1) + (self.bias - self.running_mean * scale).view(1, -1, 1, 1)


UserFrozenBatchNorm2d.__name__ = "FrozenBatchNorm2d"


def _counted(module, x, weight):
    if module.training and hasattr(module, "num_batches_tracked"):
        module.num_batches_tracked.add_(1)
    return _normalised(module, x, weight)


@_in("mmcv.ops.sync_bn")
class MmcvSyncBatchNorm(lookalikes._MmcvSyncBatchNorm):
    def forward(self, x):
        return _counted(self, x, self.weight)


MmcvSyncBatchNorm.__name__ = "SyncBatchNorm"


@_in("apex.parallel.optimized_sync_batchnorm")
class ApexSyncBatchNorm(lookalikes._ApexSyncBatchNorm):
    def forward(self, x):
        y = super().forward(x)
        return torch.relu(y) if self.fuse_relu else y


ApexSyncBatchNorm.__name__ = "SyncBatchNorm"


def _activated(module, y):
    if module.activation == "leaky_relu":
        return nn.functional.leaky_relu(y, module.activation_param)
    assert module.activation == "identity"
    return y


@_in("inplace_abn.abn")
class ABN(lookalikes._Abn):
    def forward(self, x):
        return _activated(self, _counted(self, x, self.weight))


@_in("inplace_abn.abn")
class InPlaceABN(ABN):
    def forward(self, x):
        return _activated(self, _counted(self, x, self.weight.abs() + self.eps))


@_in("mmengine.utils.dl_utils.parrots_wrapper")
class MmengineSyncBatchNorm(nn.SyncBatchNorm):
    def _check_input_dim(self, input):
        super()._check_input_dim(input)


MmengineSyncBatchNorm.__name__ = "SyncBatchNorm"


class AnyRank(_BatchNorm):
    def _check_input_dim(self, input):
        return
