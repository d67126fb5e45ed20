"""Runs an exported file with torch alone: python -c SOURCE KIND FILE INPUTS OUTPUTS, all paths.

It is handed to a new interpreter as text, and imports nothing of the package that it lies in.
"""

import sys
import warnings

import torch
from torch.utils import _pytree

sys.modules["bnexport"] = None  # type: ignore[assignment]  # an import fails from here on
warnings.simplefilter("ignore")
kind, file, inputs, outputs = sys.argv[1:]
model = torch.jit.load(file) if kind == "torchscript" else torch.export.load(file).module()
with torch.no_grad():
    results = [_pytree.tree_leaves(model(*feed)) for feed in torch.load(inputs, weights_only=True)]
torch.save([[value for value in leaves if isinstance(value, torch.Tensor)] for leaves in results], outputs)
