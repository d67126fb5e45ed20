"""Runs an exported file with torch alone: python -c SOURCE KIND FILE INPUTS OUTPUTS, all paths.

It is handed to a new interpreter as text, and imports nothing of the package that it lies in. For each set of inputs
it returns the output tensors, or what was raised.
"""

import sys
import warnings

import torch
from torch.utils import _pytree

sys.modules["bnexport"] = None  # type: ignore[assignment]  # an import fails from here on
warnings.simplefilter("ignore")
kind, file, inputs, outputs = sys.argv[1:]
model = torch.jit.load(file) if kind == "torchscript" else torch.export.load(file).module()
results: list[list[torch.Tensor] | str] = []
with torch.no_grad():
    for feed in torch.load(inputs, weights_only=True):
        try:
            leaves = _pytree.tree_leaves(model(*feed))
            results.append([value for value in leaves if isinstance(value, torch.Tensor)])
        except Exception as error:  # guards and operators raise many kinds
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            results.append(f"{type(error).__name__}: {lines[-1] if lines else ''}")
torch.save(results, outputs)
