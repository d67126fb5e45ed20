"""Builds a model of the catalogue: its library's own SyncBN conversion, statistics as after training."""

import copy
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bnexport.cli.input_options import parse_name
from bnexport.exporting import builders
from tests.frameworks import stand_ins
from tests.zoo.catalogue import Entry

_NORMS = {"BN", "BN2d", "SyncBN", "MMSyncBN", "naiveSyncBN"}


@dataclasses.dataclass(frozen=True)
class Pair:
    """The untouched model, the one whose batch norms synchronise, and what was converted."""

    plain: nn.Module
    sync: nn.Module
    batch_norms: int


def make(entry: Entry) -> Pair:
    """The models of an entry in eval mode, with statistics of a forward in train mode, changed at random."""
    torch.manual_seed(0)
    plain = build(entry).eval()
    as_trained(plain, torch.randn(max(4, entry.shape[0]), *entry.shape[1:]))
    sync = plain
    if entry.conversion == "timm":
        from timm.layers import convert_sync_batchnorm

        sync = convert_sync_batchnorm(copy.deepcopy(plain)).eval()
    elif entry.conversion == "torch":
        sync = nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain)).eval()
    return Pair(plain, sync, len(_batch_norms(plain)))


def build(entry: Entry) -> nn.Module:
    stand_ins.torchvision()
    if entry.library in ("mmseg", "mmdet", "mmpretrain"):
        return _openmmlab(entry)
    if entry.library == "ultralytics":
        from ultralytics.nn import tasks
        from ultralytics.nn.tasks import yaml_model_load

        config = yaml_model_load(entry.target)
        cls = {"seg": tasks.SegmentationModel, "cls": tasks.ClassificationModel, "pose": tasks.PoseModel}.get(
            Path(entry.target).stem.partition("-")[2], tasks.DetectionModel
        )
        return cls(config, verbose=False)
    if entry.library == "hf":
        return _transformers(entry)
    if entry.library == "smp":
        return _segmentation_models(entry)
    name = parse_name(f"{entry.library}:{entry.target}")
    assert name is not None
    return builders.build(name.library, name.target, name.options, shown=name.text).module


def _transformers(entry: Entry) -> nn.Module:
    """The defaults of a configuration class, made smaller."""
    import transformers

    config = getattr(transformers, entry.target + "Config")(**entry.options)
    if getattr(config, "use_pretrained_backbone", False):
        config.use_pretrained_backbone = False
    return getattr(transformers, entry.architecture or entry.target + "Model")(config)


def _segmentation_models(entry: Entry) -> nn.Module:
    import segmentation_models_pytorch as smp

    name, _, query = entry.target.partition("?")
    options = dict(part.split("=") for part in query.split("&"))
    return getattr(smp, name)(**{key: text.strip("'") for key, text in options.items()}, encoder_weights=None)


def _openmmlab(entry: Entry) -> nn.Module:
    """From a configuration that the library ships, every batch norm of it of the entry's kind."""
    stand_ins.install()
    import importlib

    from mmengine.config import Config

    package = importlib.import_module(entry.library)
    config = Config.fromfile(str(Path(package.__file__).parent / ".mim" / "configs" / entry.target))
    config.merge_from_dict(entry.options)
    config = Config(_with_norms(config.to_dict(), entry.conversion))
    config["default_scope"] = entry.library
    if entry.conversion == "MMSyncBN":  # MMCV's own class, which `builders` replaces
        from mmcv import ops  # noqa: F401 - registers it
        from mmengine.registry import MODELS, init_default_scope

        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        init_default_scope(entry.library)
        return MODELS.build(config.model)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "config.py")
        path.write_text(config.pretty_text)
        return builders.build("mmengine", str(path), {}, shown=entry.name).module


def _with_norms(value: Any, kind: str) -> Any:
    if isinstance(value, dict):
        changed = {key: _with_norms(item, kind) for key, item in value.items()}
        return changed | {"type": kind} if changed.get("type") in _NORMS else changed
    if isinstance(value, (list, tuple)):
        return type(value)(_with_norms(item, kind) for item in value)
    return value


def _batch_norms(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if hasattr(module, "running_mean") and hasattr(module, "momentum")]


def as_trained(model: nn.Module, x: torch.Tensor) -> None:
    """Statistics of one batch, off by up to a factor, and weights that are neither zero nor all one."""
    norms = [norm for norm in _batch_norms(model) if norm.running_mean is not None]
    for norm in norms:
        for tensor, middle in ((norm.weight, 1.0), (norm.bias, 0.0)):
            if tensor is not None:
                nn.init.normal_(tensor, middle, 0.1)
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 1.0
        with torch.no_grad():
            _train_batch_norms(model, norms, x)
    except Exception:
        for norm in norms:
            nn.init.normal_(norm.running_mean, std=0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    finally:
        for norm, momentum in zip(norms, momenta):
            norm.momentum = momentum
    model.eval()
    for norm in norms:
        deviation = norm.running_var.clamp_min(1e-4).sqrt()
        norm.running_mean += 0.1 * deviation * torch.randn_like(deviation)
        norm.running_var.copy_(deviation.square() * torch.empty_like(deviation).uniform_(0.7, 1.4))


def _train_batch_norms(model: nn.Module, norms: list[nn.Module], x: torch.Tensor) -> None:
    """One forward in eval mode in which the batch norms alone train: each replaced by its batch's statistics."""

    def hook(norm: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        value = inputs[0]
        axes = [axis for axis in range(value.dim()) if axis != 1]
        norm.running_mean.copy_(value.mean(axes))
        norm.running_var.copy_(value.var(axes, unbiased=False))

    handles = [norm.register_forward_pre_hook(hook) for norm in norms]
    try:
        model(x)
    finally:
        for handle in handles:
            handle.remove()
