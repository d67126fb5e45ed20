"""Networks of parallel branches of the real timm, and the classes of its batch norms; the zoo exports its models."""

import copy
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from torch import nn

import bnexport
from models.branches import randomise_statistics
from tests.frameworks import stand_ins
from tests.sync_bn import lookalikes


def parallel_branches(name: str, folder: Path) -> None:
    """As few batch norms and convolutions as timm's own re-parameterisation leaves."""
    stand_ins.torchvision()
    import timm
    from timm.utils.model import reparameterize_model

    torch.manual_seed(0)
    net = timm.create_model(name, num_classes=10).eval()
    randomise_statistics(net)
    side = net.default_cfg["input_size"][1] if net.default_cfg.get("fixed_input_size") else 128
    x = torch.randn(2, 3, side, side)
    with torch.no_grad():
        expected = net(x).numpy()
    own = reparameterize_model(copy.deepcopy(net)).eval()
    counts, differences = {}, {}
    raw = folder / "raw.onnx"
    bnexport.export(net, x, raw, exporter="torchscript", fold=False, verify=False)
    merged, plain = folder / "merged.onnx", folder / "plain.onnx"
    result = bnexport.fold(raw, merged)
    bnexport.fold(raw, plain, skip=["parallel"], verify=False)
    theirs = folder / "theirs.onnx"
    bnexport.export(own, x, theirs, exporter="torchscript", simplify=False, verify=False)  # as `raw`
    for path in (raw, plain, merged, theirs):
        operators = [node.op_type for node in onnx.load(path).graph.node]
        counts[path.stem] = {kind: operators.count(kind) for kind in ("BatchNormalization", "Conv", "Gemm", "MatMul")}
        counts[path.stem]["nodes"] = len(operators)
        session = onnxruntime.InferenceSession(str(path))
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        differences[path.stem] = float(np.abs(got - expected).max() / np.abs(expected).max())
    merged, own_counts = counts["merged"], counts["theirs"]
    assert result.report.verification.passed
    assert merged["BatchNormalization"] == own_counts["BatchNormalization"] == 0, counts
    for operator in ("Conv", "Gemm", "MatMul", "nodes"):
        assert merged[operator] <= own_counts[operator], counts
    assert counts["plain"]["BatchNormalization"] > 0 or name == "poolformer_s12", counts
    assert max(differences.values()) < 1e-4, differences


def the_stand_ins_have_the_attributes_of_the_classes(folder: Path) -> None:
    stand_ins.torchvision()
    from timm.layers import BatchNormAct2d, convert_sync_batchnorm

    plain, sync = BatchNormAct2d(4, act_layer=nn.SiLU), BatchNormAct2d(4, act_layer=nn.SiLU)
    ours = lookalikes.BatchNormAct2d(4, act=nn.SiLU()), lookalikes.timm_sync_batch_norm_act(4, nn.SiLU())
    for stand_in, real in zip(ours, (plain, convert_sync_batchnorm(sync))):
        assert type(stand_in).__name__ == type(real).__name__ and described(stand_in) == described(real)


def described(module: nn.Module) -> dict[str, object]:
    cls = type(module)
    return {
        "package": cls.__module__.partition(".")[0],
        "base": cls.__mro__[1].__name__,
        "attributes": sorted(name for name in vars(module) if not name.startswith("_")),
        "state": sorted(module.state_dict()),
        "modules": {name: type(child).__name__ for name, child in sorted(module.named_children())},
        "overrides": sorted(name for name, value in vars(cls).items() if callable(value)),
    }
