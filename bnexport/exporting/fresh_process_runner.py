"""Runs an exported file with torch alone: python -c SOURCE KIND FILE FOLDER.

It is handed to a new interpreter as text, and imports nothing of the package that it lies in. For each line on stdin it
reads FOLDER/inputs.pt, writes the output tensors, or what was raised, to FOLDER/outputs.pt, and prints a line.
"""

import os
import sys
import warnings

import torch
from torch.utils import _pytree

sys.modules["bnexport"] = None  # type: ignore[assignment]  # an import fails from here on
warnings.simplefilter("ignore")
answers = os.dup(1)
os.dup2(2, 1)  # what the model prints
kind, file, folder = sys.argv[1:]
model = torch.jit.load(file) if kind == "torchscript" else torch.export.load(file).module()
result: list[torch.Tensor] | str
for _ in sys.stdin:
    with torch.no_grad():
        try:
            leaves = _pytree.tree_leaves(model(*torch.load(f"{folder}/inputs.pt", weights_only=True)))
            result = [value for value in leaves if isinstance(value, torch.Tensor)]
        except Exception as error:  # guards and operators raise many kinds
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            result = f"{type(error).__name__}: {lines[-1] if lines else ''}"
    torch.save(result, f"{folder}/outputs.pt")
    os.write(answers, b"\n")
