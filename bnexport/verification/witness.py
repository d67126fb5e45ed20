"""What shows a verdict, in a folder: the inputs, the outputs of both models, and the values of their modules."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from bnexport.errors import BnexportError
from bnexport.model_io.staging import whole_file
from bnexport.verification.file_engine import FileEngine
from bnexport.verification.first_difference import find_layers
from bnexport.verification.verdict import Terms

INPUTS, REFERENCE, CANDIDATE, LAYERS = "inputs.npz", "reference.npz", "candidate.npz", "layers.csv"
COLUMNS = ("module", "node", "shape", "largest difference", "largest value", "match")


def save(folder: Path, reference: ir.Model, candidate: ir.Model, inputs: Mapping[str, Any], terms: Terms) -> None:
    """Write the files, each atomically; those of a model that does not run are left out."""
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / INPUTS, inputs)
    for name, model, where in ((REFERENCE, reference, ()), (CANDIDATE, candidate, terms.providers)):
        outputs = [str(value.name) for value in model.graph.outputs]
        try:
            _write(folder / name, dict(zip(outputs, FileEngine(model, where, terms.timeout).run(inputs, outputs))))
        except BnexportError:
            return
    with whole_file(folder / LAYERS) as staged, open(staged, "w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([COLUMNS, *find_layers(reference, candidate, inputs, terms)])


def _write(target: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays as numpy.savez does, which has no place for one that is called `file`."""
    with whole_file(target) as staged, zipfile.ZipFile(staged, "w") as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as file:
                np.lib.format.write_array(file, np.asarray(array), allow_pickle=False)
