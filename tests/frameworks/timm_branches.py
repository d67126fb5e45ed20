"""Exports a timm network with parallel branches, with and without merging: python -m tests.frameworks.timm_branches NAME.

Prints one JSON object: batch norms and convolutions of the file, of the file without merging, and of a file of the
network after timm's own re-parameterisation; differences are relative to the largest value of the network's output.
Runs in the environment of `environment`.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch

import bnexport
from models.branches import randomise_statistics
from tests.frameworks import stand_ins


def main(name: str, exporter: str = "torchscript") -> None:
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
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder, "raw.onnx")
        bnexport.export(net, x, raw, exporter=exporter, fold=False, verify=False)
        merged, plain = Path(folder, "merged.onnx"), Path(folder, "plain.onnx")
        result = bnexport.fold(raw, merged)
        bnexport.fold(raw, plain, skip=["parallel"], verify=False)
        theirs = Path(folder, "theirs.onnx")
        bnexport.export(own, x, theirs, exporter=exporter, simplify=False, verify=False)  # as `raw`
        for path in (raw, plain, merged, theirs):
            operators = [node.op_type for node in onnx.load(path).graph.node]
            counts[path.stem] = {
                kind: operators.count(kind) for kind in ("BatchNormalization", "Conv", "Gemm", "MatMul")
            }
            counts[path.stem]["nodes"] = len(operators)
            session = onnxruntime.InferenceSession(str(path))
            (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            differences[path.stem] = float(np.abs(got - expected).max() / np.abs(expected).max())
    assert result.report.verification is not None
    print(
        json.dumps(
            {
                "counts": counts,
                "differences": differences,
                "passed": result.report.verification.passed,
                "summaries": sorted({site.summary for site in result.report.sites if site.summary}),
                "kept": [(site.nodes, site.reason) for site in result.report.kept][:20],
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
