"""A file written by MMCV's own symbolic function: python -m tests.frameworks.mmcv_symbolic FOLDER.

The function fails on today's torch: a process group cannot be an attribute, and stats_mode lacks its type. Users patch
both; the patch here passes the number 0 for the group and completes the attribute's name, and leaves the rest to MMCV.
Prints one JSON object. Runs in the environment of `environment`.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
import torch.distributed as dist
from torch import nn

import bnexport
from tests.frameworks import stand_ins

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


def main(folder: Path) -> None:
    stand_ins.install()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from mmcv.ops import sync_bn

    patch(sync_bn.SyncBatchNormFunction)
    results = {}
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
        results[mode] = {
            "domain": node.domain,
            "attributes": {each.name: onnx.AttributeProto.AttributeType.Name(each.type) for each in node.attribute},
            "operators": sorted(each.op_type for each in onnx.load(folded).graph.node),
            "meaning_changed": done.report.meaning_changed,
            "folded": float(np.abs(plain - in_inference).max() / np.abs(in_inference).max()),
            "run": float(np.abs(trained - in_training).max() / np.abs(in_training).max()),
        }
    print(json.dumps(results))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
