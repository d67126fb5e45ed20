"""TrainingSession: state, checkpoints, evaluation, inference models, bad input, NaN."""

import contextlib
import os
import subprocess
import sys

import numpy as np
import onnxruntime
import pytest
import torch
from torch import nn

import bnexport
from bnexport import model_io
from bnexport.errors import DivergedError, MalformedModelError, MissingFileError, UsageError
from bnexport.training import state as training_state
from tests.support.modules import compose

IMAGE = (2, 6, 6)


class Small(nn.Module):
    """Batch norm, dropout, a tied weight, a buffer that the forward reassigns, one that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, bias=False)
        self.norm = bnexport.SyncBatchNorm(6)
        self.drop = nn.Dropout(0.3)
        self.inner = nn.Linear(6, 6)
        self.tied = nn.Linear(6, 6)
        self.tied.weight = self.inner.weight
        self.out = nn.Linear(6, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)

    def forward(self, image):
        if self.training:
            self.seen = self.seen + image.shape[0]
        x = torch.relu(self.norm(self.conv(image))).mean((2, 3)) * self.scale
        return self.out(torch.tanh(self.tied(self.drop(torch.tanh(self.inner(x))))))


def batch(size, seed=0):
    generator = np.random.default_rng(seed)
    return generator.standard_normal((size, *IMAGE)).astype(np.float32), generator.integers(0, 3, size)


def tensors(size, seed=0):
    return tuple(torch.from_numpy(array) for array in batch(size, seed))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Small().train()


@pytest.fixture(scope="module")
def path(model, tmp_path_factory):
    path = tmp_path_factory.mktemp("step") / "step.onnx"
    options = {"optimizer": "adamw", "optimizer_options": {"lr": 0.01}, "outputs": ["output"]}
    result = bnexport.export_training_step(model, nn.functional.cross_entropy, tensors(4), path, **options)
    assert result.verification.passed, result.verification.summary()
    return path


@pytest.fixture
def session(path):
    return bnexport.TrainingSession(path)


def assert_equal(one, two):
    assert one.keys() == two.keys() and all(np.array_equal(array, two[name]) for name, array in one.items())


@contextlib.contextmanager
def unchanged(session):
    before = session.state_dict()
    yield
    assert_equal(session.state_dict(), before)


def same_state(session):
    fresh = Small()
    fresh.load_state_dict({name: torch.from_numpy(array) for name, array in session.state_dict().items()})
    return fresh


def test_the_graph_names_its_state(path, model):
    options = onnxruntime.SessionOptions()
    bnexport.register(options, training=True)
    names = [value.name for value in onnxruntime.InferenceSession(path, options).get_outputs()]
    assert names[:2] == ["loss", "output"]
    assert {"conv.weight.new", "norm.running_mean.new", "norm.num_batches_tracked.new", "seen.new"} <= set(names)
    assert {"optimizer.conv.weight.exp_avg.new", "optimizer.step.new", "seed.new"} <= set(names)
    assert not {"tied.weight.new", "scale.new"} & set(names)
    assert sorted(os.listdir(path.parent)) == ["step.eval.onnx", "step.onnx", "step.safetensors"]


def test_state_dict_is_torchs(session, model):
    expected, got = model.state_dict(), session.state_dict()
    assert set(got) == set(expected)
    assert list(got) == [*(name for name in expected if name != "tied.weight"), "tied.weight"]
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.numpy().dtype and np.array_equal(got[name], tensor.numpy()), name
    session.step(batch(5))
    fresh = same_state(session)
    assert fresh.seen == 5 and fresh.norm.num_batches_tracked == 1
    other = bnexport.TrainingSession(session._paths.step)
    other.load_state_dict(fresh.state_dict())
    assert_equal(session.state_dict(), other.state_dict())


def test_evaluate_is_torchs_eval_mode(session):
    for size in (4, 1, 7):
        session.step(batch(max(size, 2), size))
        with torch.no_grad():
            expected = same_state(session).eval()(tensors(size)[0])
            loss = nn.functional.cross_entropy(expected, tensors(size)[1])
        with unchanged(session):
            got = session.evaluate(batch(size))
        np.testing.assert_allclose(got.outputs["output"], expected.numpy(), rtol=1e-4, atol=1e-5)
        assert got.loss == pytest.approx(loss.item(), rel=1e-5)


def test_a_checkpoint_resumes_to_the_same_bits(session, path, tmp_path):
    session.seed = 123
    for seed in range(3):
        session.step(batch(4 + seed, seed))
    session.save_checkpoint(tmp_path / "c.safetensors")
    assert os.listdir(tmp_path) == ["c.safetensors"]
    with pytest.raises(UsageError, match="its folder does not exist"):
        session.save_checkpoint(tmp_path / "absent" / "c.safetensors")
    going_on = [session.step(batch(4, 10 + seed)) for seed in range(3)]
    resumed = bnexport.TrainingSession(path)
    resumed.load_checkpoint(tmp_path / "c.safetensors")
    assert resumed.seed == 126
    assert [resumed.step(batch(4, 10 + seed)) for seed in range(3)] == going_on
    assert_equal(session.state_dict(), resumed.state_dict())


def test_export_inference_is_folded_and_verified(session, tmp_path):
    for seed in range(5):
        session.step(batch(6, seed))
    result = session.export_inference(tmp_path / "inference.onnx")
    assert result.report.verification.status == "passed"
    assert (result.report.after.batch_norm, result.report.after.sync_batch_norm) == (0, 0)
    plain = onnxruntime.InferenceSession(tmp_path / "inference.onnx")
    assert [value.name for value in plain.get_inputs()] == ["image"]
    for size in (1, 8):
        got = plain.run(["output"], {"image": batch(size)[0]})[0]
        np.testing.assert_allclose(got, session.evaluate(batch(size)).outputs["output"], rtol=1e-4, atol=1e-5)


def test_a_failing_step_leaves_the_state(session, monkeypatch):
    monkeypatch.setattr(training_state, "check_indices", lambda *_: None)
    session.step(batch(4))
    images, labels = batch(4)
    with unchanged(session), pytest.raises(Exception, match=r"GatherElements|indices|out of"):
        session.step((images, labels + 100))
    assert np.isfinite(session.step(batch(4)))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, y: (x,), "batch: got 1 arrays, expected 2: image, target"),
        (lambda x, y: (x.astype(np.float64), y), r"image: got an array of float64, expected float32; .*astype"),
        (lambda x, y: (x[:, :, :5], y), r"image: got shape \(4, 2, 5, 6\), expected \(batch, 2, 6, 6\)"),
        (lambda x, y: (x[0], y), r"image: got shape \(2, 6, 6\)"),
        (lambda x, y: (x[:0], y[:0]), "image: got an empty batch"),
    ],
)
def test_wrong_batches_are_named(session, change, match):
    with pytest.raises(UsageError, match=match):
        session.step(change(*batch(4)))


@pytest.mark.parametrize("label", [-1, 3, 2**40])
@pytest.mark.parametrize("call", ["step", "evaluate"])
def test_a_label_beyond_the_classes_is_refused_as_torch_does(session, call, label):
    """ONNX reads -1 as the last class. A label that is ignored is not refused."""
    image, target = batch(5)
    target[3] = label
    with pytest.raises(IndexError, match=f"Target {label} is out of bounds"):
        nn.functional.cross_entropy(torch.zeros(5, 3), torch.from_numpy(target))
    words = rf"target: {label} is out of bounds in row 3: expected whole numbers from 0 to 2, or -100, which is ignored"
    with unchanged(session), pytest.raises(UsageError, match=words):
        getattr(session, call)((image, target))
    target[3] = -100
    assert np.isfinite(session.step((image, target)))


def test_another_models_state_is_listed(session, tmp_path):
    state = session.state_dict()
    wrong = {name: value for name, value in state.items() if name != "conv.weight"}
    wrong |= {"extra": np.zeros(1), "out.bias": np.zeros(4), "seen": np.zeros((), complex)}
    with pytest.raises(UsageError) as caught:
        session.load_state_dict(wrong)
    text = str(caught.value)
    assert "missing: conv.weight" in text and "unexpected: extra" in text
    assert "out.bias (got (4,), expected (3,))" in text and "seen (got complex128, expected float32)" in text
    session.load_state_dict({"out.bias": np.full(3, 7.0)}, strict=False)
    assert np.array_equal(session.state_dict()["out.bias"], np.full(3, 7.0, np.float32))

    model_io.save_tensors({"conv.weight": np.zeros(3, np.float32)}, {}, tmp_path / "other.safetensors")
    words = r"other\.safetensors: belongs to another model; missing: .*other shapes: conv"
    with pytest.raises(UsageError, match=words):
        session.load_checkpoint(tmp_path / "other.safetensors")


def test_damaged_files_are_named(session, path, tmp_path):
    session.save_checkpoint(tmp_path / "c.safetensors")
    data = (tmp_path / "c.safetensors").read_bytes()
    for cut in (0, 4, 100, len(data) - 1):
        (tmp_path / "cut.safetensors").write_bytes(data[:cut])
        with pytest.raises(MalformedModelError, match=r"cut\.safetensors: not a whole safetensors file"):
            session.load_checkpoint(tmp_path / "cut.safetensors")
    with pytest.raises(MissingFileError, match="no such file"):
        session.load_checkpoint(tmp_path / "absent.safetensors")
    with pytest.raises(MissingFileError, match="no such file"):
        bnexport.TrainingSession(tmp_path / "absent.onnx")
    (tmp_path / "text.onnx").write_bytes(b"no model")
    with pytest.raises(MalformedModelError, match=r"text\.onnx' is truncated or not an ONNX file"):
        bnexport.TrainingSession(tmp_path / "text.onnx")
    session.export_inference(tmp_path / "inference.onnx")
    with pytest.raises(MalformedModelError, match="expected a training graph"):
        bnexport.TrainingSession(tmp_path / "inference.onnx")


def test_no_torch_at_run_time(path, tmp_path):
    program = """
import sys
sys.modules["torch"] = None
import numpy as np, bnexport
session = bnexport.TrainingSession(sys.argv[1])
batch = (np.zeros((4, 2, 6, 6), np.float32), np.zeros(4, np.int64))
session.step(batch)
session.evaluate(batch)
session.save_checkpoint(sys.argv[2] + "/c.safetensors")
session.load_checkpoint(sys.argv[2] + "/c.safetensors")
session.export_inference(sys.argv[2] + "/inference.onnx")
"""
    command = [sys.executable, "-c", program, str(path), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


X, Y = torch.randn(6, 2, generator=torch.Generator().manual_seed(0)), torch.linspace(0, 1, 6)[:, None]


@pytest.fixture(scope="module", params=[1, 2], ids=["each", "accumulated"])
def exported(request, tmp_path_factory):
    """A step of sqrt(|w x + b|), whose gradient is NaN where w x + b is 0, and of a batch norm for its statistics."""
    torch.manual_seed(0)
    parts = {"norm": nn.BatchNorm1d(2), "out": nn.Linear(2, 1)}
    root = compose(lambda self, x: torch.sqrt(self.out(self.norm(x)).abs()), **parts).train()
    path = tmp_path_factory.mktemp("root") / "step.onnx"
    options = {"optimizer_options": {"lr": 0.05, "momentum": 0.9}, "accumulate": request.param}
    bnexport.export_training_step(root, nn.functional.mse_loss, (X, Y), path, **options)
    return path


def everything(session, folder):
    session.save_checkpoint(folder / "state", overwrite=True)
    return (folder / "state").read_bytes()


def test_a_loss_that_is_nan_leaves_the_state(exported, tmp_path):
    session = bnexport.TrainingSession(exported)
    session.step((X.numpy(), Y.numpy()))
    before = everything(session, tmp_path)
    session.load_state_dict({"out.bias": np.array([np.inf], np.float32)}, strict=False)
    broken = everything(session, tmp_path)
    with pytest.raises(DivergedError, match=r"the loss and \d+ other results are NaN; lower the learning rate"):
        session.step((X.numpy(), np.full_like(Y.numpy(), np.inf)))
    assert everything(session, tmp_path) == broken != before


def test_a_gradient_that_is_nan_leaves_the_state(exported, tmp_path):
    """The loss is a number; the step after would have none."""
    session = bnexport.TrainingSession(exported)
    session.load_state_dict({"out.weight": np.zeros((1, 2)), "out.bias": np.zeros(1)}, strict=False)
    before = everything(session, tmp_path)
    assert np.isfinite(session.evaluate((X.numpy(), Y.numpy())).loss)
    with pytest.raises(DivergedError, match=r"the new value of .* NaN; lower the learning rate"):
        session.step((X.numpy(), Y.numpy()))
    assert everything(session, tmp_path) == before
    session.load_state_dict({"out.bias": np.ones(1)}, strict=False)
    assert np.isfinite(session.step((X.numpy(), Y.numpy())))
