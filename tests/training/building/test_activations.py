"""Saved activations: their names, and their bytes against a run that returns them."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
from bnexport import model_io
from bnexport.training.session import TrainingSession
from bnexport.training.state import saved_activations


@pytest.fixture(scope="module")
def step(tmp_path_factory):
    layers = [nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(16, 3)).train()
    batch = (torch.randn(5, 2, 6, 6), torch.randint(0, 3, (5,)))
    path = tmp_path_factory.mktemp("saved") / "step.onnx"
    names = ["image", "target"]
    return bnexport.export_training_step(
        model, nn.functional.cross_entropy, batch, path, optimizer="adam", input_names=names, verify=False
    )


def test_what_the_gradients_read_is_listed(step):
    operators = [saved.operator for saved in step.saved_activations]
    assert operators.count("Conv") == 1, "the input of the batch norm"
    assert operators.count("MMCVSyncBatchNorm") in {2, 3}, (
        "its statistics, and its output where the mask is computed late"
    )
    by_name = {saved.name: saved for saved in step.saved_activations}
    assert by_name["image"].bytes == 5 * 2 * 36 * 4
    assert not {name for name in by_name if name.startswith(("optimizer.", "0.weight"))}
    sizes = [saved.bytes for saved in step.saved_activations]
    assert sizes == sorted(sizes, reverse=True)


def test_bytes_are_those_of_a_run(step):
    saved = {each.name: each for each in step.saved_activations}
    model = model_io.load(step.path)
    values = {str(value.name): value for node in model.graph for value in node.outputs} | {
        str(value.name): value for value in model.graph.inputs
    }
    known = [str(value.name) for value in model.graph.outputs]
    wanted = [name for name in saved if name not in known and values[name].producer() is not None]
    for name in wanted:
        if values[name].type is None:
            values[name].type = ir.TensorType(ir.DataType.INT64)
        model.graph.outputs.append(values[name])
    options = onnxruntime.SessionOptions()
    bnexport.register(options, training=True)
    session = onnxruntime.InferenceSession(model_io.to_bytes(model), options)
    state = TrainingSession(step.path)._state
    feeds = {value.name: state.get(value.name) for value in session.get_inputs() if value.name in state.names()}
    feeds |= {"image": np.ones((5, 2, 6, 6), np.float32), "target": np.zeros(5, np.int64), "lr": np.array(0.1)}
    for name, array in zip(wanted, session.run(wanted, feeds)):
        assert saved[name].bytes == array.nbytes and saved[name].dtype == array.dtype.name, name


def test_bytes_grow_with_the_batch(step):
    description = TrainingSession(step.path)._description
    small, large = (sum(saved.bytes for saved in saved_activations(step.model, description, rows)) for rows in (1, 3))
    per_row = (large - small) // 2
    assert per_row > 0 and small - per_row >= 2 * 4 * 4, "statistics do not depend on the batch"
