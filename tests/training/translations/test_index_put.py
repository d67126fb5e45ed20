"""Indexing with its gradient, where indices come twice: also on several threads, and in a model for inference."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import bnexport
from tests.support.checks import needs_training_step
from tests.support.modules import compose
from tests.training.translations.cases import case, check, integers

pytestmark = needs_training_step

TWICE = torch.tensor([[0, 2, 2], [-1, 0, 2]])


def test_forms():
    images = ("N", 4, 3, 5)
    check(
        [
            case("embedding", F.embedding, integers(7, "N", 6), (7, 4)),
            case("padding", lambda i, w: F.embedding(i, w, padding_idx=2), integers(7, "N", 6), (7, 4)),
            case("first", lambda x: x[TWICE], (4, 3)),
            case("second", lambda x: x[:, TWICE], images),
            case("last", lambda x: x[..., [0, 0, 4]], images),
            case("two", lambda x: x[:, TWICE, [[1, 1, 0], [2, 1, 1]]], images),
            case("apart", lambda x: x[:, TWICE, :, [[1, 1, 0], [2, 1, 1]]], images),
            case("of two shapes", lambda x: x[:, TWICE, [[1], [2]]], images),
            case("of rows", lambda x, i: x[torch.arange(x.shape[0]), i % 4], images, integers(9, "N")),
            case("rows twice", lambda x: x[[0, 1, 1]], images),
            case("from the end", lambda x: x[:, [0, -1, 1], [-1, 0, -2]], images),
            case("forward", lambda x: x.index_put((TWICE,), x[:3], accumulate=True), (4, 3)),
            case("broadcast", lambda x: x.index_put((TWICE,), x.new_ones(1), accumulate=True), (4, 3)),
            case("in place", lambda x: (2 * x).index_put_((TWICE,), x[:3], accumulate=True), (4, 3)),
            case("index_add", lambda x: x.index_add(1, torch.tensor([0, 2, 2]), x[:, 1:], alpha=3), images),
            case("replaced", lambda x: x.index_put((torch.tensor([0, 2]),), x[:2]), (4, 3)),
        ]
    )


@pytest.mark.parametrize("threads", [1, 4])
def test_no_value_is_lost_on_threads(threads, tmp_path):
    torch.manual_seed(0)
    parts = {"table": nn.Embedding(20, 64), "out": nn.Linear(64, 3)}
    model = compose(lambda self, words: self.out(self.table(words).square().mean(1)), **parts)
    batch = torch.randint(0, 20, (4, 1000)), torch.randint(0, 3, (4,))
    path, options = tmp_path / "s.onnx", onnxruntime.SessionOptions()
    bnexport.export_training_step(model, F.cross_entropy, batch, path, mode="gradients")
    options.intra_op_num_threads = threads
    session = bnexport.TrainingSession(path, session_options=options)
    F.cross_entropy(model(batch[0]), batch[1]).backward()
    expected = model.table.weight.grad.numpy()
    for _ in range(20):
        found = session.gradients([tensor.numpy() for tensor in batch])[1]["table.weight"]
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5 * np.abs(expected).max())


def test_inference(tmp_path):
    """Rows added at indices, 250 at each, in three ways."""

    def forward(self, x, index, rows):
        y = x.index_put((index,), rows, accumulate=True), (1 * x).index_put_((index,), rows, accumulate=True)
        return *y, x.index_add(0, index, rows)

    model = compose(forward).eval()
    arguments = torch.randn(20, 64), torch.randint(0, 20, (5000,)), torch.randn(5000, 64)
    bnexport.export(model, arguments, tmp_path / "m.onnx", exporter="dynamo", verify=False)
    # A race is not lost in each run.
    assert not any(node.op_type == "ScatterND" for node in onnx.load(tmp_path / "m.onnx").graph.node)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 4
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx", options)
    feeds = {value.name: array.numpy() for value, array in zip(session.get_inputs(), arguments)}
    for _ in range(20):
        for got, expected in zip(session.run(None, feeds), model(*arguments)):
            np.testing.assert_allclose(got, expected.numpy(), rtol=1e-3, atol=1e-3)
