"""The real MMCV's SyncBatchNorm, on functions written from its kernels' formulas; its own symbolic."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torch.distributed as dist
from torch import nn

import bnexport
from bnexport import SyncBatchNorm, convert_sync_batchnorm
from tests.frameworks import stand_ins
from tests.frameworks.inplace_abn import attributes, difference, trained
from tests.support.cluster import Raised, join, run_once
from tests.sync_bn import lookalikes


def one_step(rank: int, size: int, port: int) -> Any:
    join(rank, size, port)
    stand_ins.mmcv_extension()
    from mmcv.ops.sync_bn import SyncBatchNorm as TheirSyncBatchNorm

    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), TheirSyncBatchNorm(4), nn.ReLU()).train()
    stand_in = lookalikes.MmcvSyncBatchNorm(4)
    assert attributes(stand_in) == attributes(net[1]) and stand_in.state_dict().keys() == net[1].state_dict().keys()
    converted = convert_sync_batchnorm(copy.deepcopy(net[:1]).append(_clone(net[1])).append(nn.ReLU()))
    assert type(converted[1]) is SyncBatchNorm
    torch.manual_seed(rank + 1)
    x = torch.randn(4, 3, 6, 6)
    theirs, ours = trained(net, x), trained(converted, x)
    assert theirs.keys() == ours.keys()
    differences = {name: difference(ours[name], value) for name, value in theirs.items()}
    dist.barrier()
    dist.destroy_process_group()
    return differences


def _clone(norm: nn.Module) -> nn.Module:
    """A copy that shares the group, which cannot be copied."""
    clone = type(norm)(norm.num_features)
    clone.load_state_dict(norm.state_dict())
    return clone


def one_training_step_equals_mmcv(folder: Path) -> None:
    for differences in run_once(2, one_step, timeout=600):
        assert not isinstance(differences, Raised), differences.trace
        assert len(differences) == 8 and max(differences.values()) < 1e-5, differences


MODES = ("default", "N")


def write(net: nn.Module, x: torch.Tensor, path: Path) -> None:
    """Export with torch's TorchScript exporter, which asks MMCV's symbolic for the node."""
    torch.onnx.export(
        net,
        (x,),
        path,
        dynamo=False,
        opset_version=18,
        training=torch.onnx.TrainingMode.TRAINING,
        do_constant_folding=False,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "batch", 2: "height", 3: "width"}},
        custom_opsets={"mmcv": 1},
    )


def patch(function: type) -> None:
    """What users of MMCV change in `SyncBatchNormFunction` before they export."""
    symbolic = function.symbolic

    class Graph:
        def __init__(self, graph: Any) -> None:
            self.graph = graph

        def op(self, name: str, *inputs: Any, stats_mode: str, **attributes: Any) -> Any:
            return self.graph.op(name, *inputs, stats_mode_s=stats_mode, **attributes).setType(inputs[0].type())

    def patched(graph: Any, *arguments: Any) -> Any:
        *before, _, group_size, stats_mode = arguments
        return symbolic(Graph(graph), *before, 0, group_size, stats_mode)

    function.symbolic = staticmethod(patched)


def a_file_of_its_own_symbolic(folder: Path) -> None:
    """It is folded, and trains in ONNX Runtime: a number as group names the group, and with group_size 1 none is asked for.

    MMCV's function fails on today's torch: a process group cannot be an attribute, and stats_mode lacks its type. Users patch
    both; `patch` passes the number 0 for the group and completes the attribute's name, and leaves the rest to MMCV.
    """
    stand_ins.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from mmcv.ops import sync_bn

    patch(sync_bn.SyncBatchNormFunction)
    for mode in MODES:
        torch.manual_seed(0)
        theirs = sync_bn.SyncBatchNorm(6, stats_mode=mode)
        net = nn.Sequential(nn.Conv2d(3, 6, 3), theirs, nn.ReLU(), nn.Conv2d(6, 2, 1)).train()
        nn.init.normal_(theirs.running_mean)
        nn.init.uniform_(theirs.running_var, 0.5, 2)
        x = torch.randn(4, 3, 9, 7)
        path, folded = folder / f"{mode}.onnx", folder / f"{mode}_folded.onnx"
        write(net, x, path)
        state = copy.deepcopy(net.state_dict())  # tracing trained the statistics, and the file has the new ones
        (node,) = [each for each in onnx.load(path).graph.node if each.op_type == "MMCVSyncBatchNorm"]
        done = bnexport.fold(path, folded)
        options = onnxruntime.SessionOptions()
        bnexport.register(options)
        trained = onnxruntime.InferenceSession(str(path), options).run(None, {"x": x.numpy()})[0]
        plain = onnxruntime.InferenceSession(str(folded)).run(None, {"x": x.numpy()})[0]
        with torch.no_grad():
            in_training = net(x).numpy()
            net.load_state_dict(state)
            in_inference = net.eval()(x).numpy()
        kinds = {each.name: onnx.AttributeProto.AttributeType.Name(each.type) for each in node.attribute}
        assert node.domain == "mmcv" and kinds == {
            "eps": "FLOAT", "group": "INT", "group_size": "INT", "momentum": "FLOAT", "stats_mode": "STRING",
        }  # fmt: skip
        assert sorted(each.op_type for each in onnx.load(folded).graph.node) == ["Conv", "Conv", "Relu"]
        assert done.report.meaning_changed
        assert np.abs(plain - in_inference).max() < 1e-5 * np.abs(in_inference).max()
        assert np.abs(trained - in_training).max() < 1e-5 * np.abs(in_training).max()
