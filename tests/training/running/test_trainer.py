"""The trainer: schedules, folders of images, the best checkpoint, steps that fail, and resuming from any step."""

import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
import PIL.Image
import PIL.ImageOps
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import bnexport
from bnexport import model_io
from bnexport.cli import main
from bnexport.errors import DivergedError, MissingPackageError, UsageError
from bnexport.training.running.data import load_rows
from bnexport.training.running.images import Images
from bnexport.training.running.settings import Settings
from bnexport.training.running.trainer import Trainer

RATE, EPOCHS, PER_EPOCH = 0.2, 6, 4
SIZES = [(9, 12), (6, 8), (20, 7)]  # of images, height and width; the step takes 6 x 8


def rates(**options):
    settings = Settings(epochs=EPOCHS, batch_size=1, learning_rate=RATE, **options)
    settings.check()
    return [settings.learning_rate_at(step, PER_EPOCH) for step in range(EPOCHS * PER_EPOCH)]


def torchs(schedule, by_epoch=False):
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=RATE)
    schedule = schedule(optimizer)
    made = []
    for step in range(EPOCHS * PER_EPOCH):
        made.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if not by_epoch or step % PER_EPOCH == PER_EPOCH - 1:
            schedule.step()
    return made


def test_schedules_are_torchs():
    steps = EPOCHS * PER_EPOCH
    cosine = torchs(lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps))
    np.testing.assert_allclose(rates(schedule="cosine"), cosine, rtol=1e-12)
    falls = torchs(lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.3), by_epoch=True)
    np.testing.assert_allclose(rates(schedule="step", milestones=(2, 5), gamma=0.3), falls, rtol=1e-12)
    warm = torchs(lambda optimizer: lr_scheduler.LinearLR(optimizer, start_factor=1 / 5, total_iters=4))
    np.testing.assert_allclose(rates(warm_up=5), warm, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"schedule": "step"}, "milestones: got none with the schedule 'step'"),
        ({"milestones": (2,)}, "milestones: got 2 with the schedule 'constant'"),
        ({"schedule": "step", "milestones": (4, 2)}, "milestones: got 4, 2, expected rising"),
        ({"schedule": "step", "milestones": (2, 6)}, "got 6, where a training of 6 epochs has ended"),
        ({"schedule": "step", "milestones": (2,), "gamma": float("nan")}, "gamma: got nan"),
        ({"schedule": "linear"}, "schedule: got 'linear', expected one of constant, cosine, step"),
    ],
)
def test_wrong_schedules_are_named(options, match):
    with pytest.raises(UsageError, match=match):
        rates(**options)


@pytest.mark.parametrize("schedule", ["constant", "cosine"])
def test_a_schedule_has_an_end(schedule):
    settings = Settings(epochs=EPOCHS, batch_size=1, learning_rate=RATE, schedule=schedule)
    with pytest.raises(UsageError, match="step: got 24, expected one of the schedule's 24 steps, from 0 on"):
        settings.learning_rate_at(EPOCHS * PER_EPOCH, PER_EPOCH)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.Dropout(0.3)
        self.out = nn.Linear(24, 3)

    def forward(self, image):
        return self.out(self.drop(torch.relu(self.norm(self.conv(image)))).flatten(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """step.onnx; images/ with three classes of different colours and sizes; images.npz with the same numbers."""
    folder = tmp_path_factory.mktemp("trainer")
    generator = np.random.default_rng(0)
    for split in ("images", "valid"):
        for number, name in enumerate(["cat", "dog", "eel"]):
            (folder / split / name).mkdir(parents=True)
            for index in range(7):
                pixels = generator.integers(0, 120, (*SIZES[index % 3], 3), np.uint8)
                pixels[:, :, number] += 120
                PIL.Image.fromarray(pixels).save(folder / split / name / f"{index}.png")
    torch.manual_seed(0)
    bnexport.export_training_step(
        Net().train(),
        nn.functional.cross_entropy,
        (torch.randn(4, 3, 6, 8), torch.randint(0, 3, (4,))),
        folder / "step.onnx",
        optimizer_options={"lr": 0.05, "momentum": 0.9, "decay_norms_and_biases": False, "weight_decay": 1e-3},
        verify=False,
    )
    return folder


def rows(folder, split="images", **options):
    shapes = {"image": ("batch", 3, 6, 8)}
    return load_rows(str(folder / split), ("image", "target"), shapes=shapes, **options)


def test_images_are_as_pillow_and_torchvision_read_them(folder):
    """ImageFolder's classes, ToTensor's range, Normalize's scale; an image of the step's size is taken as it is."""
    data = rows(folder, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    assert (len(data), data.classes) == (21, ("cat", "dog", "eel"))
    images, target = data.read(np.array([8, 1]), np.array([False, True]))
    assert images.dtype == np.float32 and images.flags.c_contiguous and target.tolist() == [1, 0]
    for got, name, flipped in zip(images, ("dog/1.png", "cat/1.png"), (False, True)):
        pixels = np.asarray(PIL.Image.open(folder / "images" / name)) / 255.0
        expected = ((pixels - [0.4, 0.5, 0.6]) / [0.2, 0.3, 0.4]).transpose(2, 0, 1)
        np.testing.assert_allclose(got, expected[:, :, ::-1] if flipped else expected, rtol=1e-5, atol=1e-6)
    fitted, _ = rows(folder).read(np.array([0]))
    image = PIL.Image.open(folder / "images/cat/0.png").resize((8, 6), PIL.Image.Resampling.BILINEAR)
    np.testing.assert_allclose(fitted[0], np.asarray(image).transpose(2, 0, 1) / 255.0, atol=1e-6)
    gray = load_rows(str(folder / "images"), ("image", "target"), shapes={"image": (None, 1, 6, 8)})
    assert gray.read(np.array([3]))[0].shape == (1, 1, 6, 8)


def test_images_beside_arrays(folder, tmp_path):
    np.save(tmp_path / "y.npy", np.arange(21) % 3)
    source = f"{folder / 'images'},{tmp_path / 'y.npy'}"
    data = load_rows(source, ("image", "target"), shapes={"image": ("batch", 3, 6, 8)})
    assert data.classes == () and data.read(np.array([4, 20]))[1].tolist() == [1, 2]


def trainer(folder, path, **options):
    settings = {"epochs": 3, "batch_size": 4, "learning_rate": 0.05, "seed": 3, "flip": True, "ema_decay": 0.9}
    settings |= {"schedule": "step", "milestones": (1, 2), "gamma": 0.5, "warm_up": 4, **options.pop("settings", {})}
    session = bnexport.TrainingSession(folder / "step.onnx", ema_decay=settings["ema_decay"])
    options = {"validation": rows(folder, "valid"), "best": path / "best", **options}
    return Trainer(session, rows(folder), Settings(**settings), checkpoint=path / "run", **options)


class Stopped(Exception):
    pass


@pytest.mark.parametrize("schedule", ["step", "cosine"])
def test_resumed_after_any_step_it_ends_with_the_same_bytes(schedule, folder, tmp_path):
    """Momentum, averages, dropout, mirrored images, the rate, the order of rows and the best epoch go on."""
    options = {"settings": {} if schedule == "step" else {"schedule": "cosine", "milestones": ()}, "save_every": 1}
    (tmp_path / "whole").mkdir()
    whole = trainer(folder, tmp_path / "whole", **options)
    history = whole.run()
    assert whole.steps == 18 and whole.progress.best
    by_loss = [record["validation_loss"] for record in history]
    assert whole.progress.best == 1 + int(np.argmin(by_loss))
    for stop in (1, 6, 16):
        path = tmp_path / str(stop)
        path.mkdir()

        def at(done, stop=stop):
            if done == stop:
                raise Stopped

        with pytest.raises(Stopped):
            trainer(folder, path, **options).run(at)
        resumed = trainer(folder, path, **options)
        if (path / "run").exists():
            resumed.resume(path / "run")
        assert resumed.run() == history
        for name in ("run", "best"):
            assert (path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (stop, name)


def test_the_steps_are_those_of_a_session(folder, tmp_path):
    """Rates, the order of rows, mirrored images and the scale of the images, written out."""
    trainer(folder, tmp_path, settings={"epochs": 2, "milestones": (1,)}).run()
    session = bnexport.TrainingSession(folder / "step.onnx", ema_decay=0.9)
    session.seed = 3
    files = sorted((folder / "images").rglob("*.png"))
    step, flips = 0, 0
    for epoch in range(2):
        drawn = np.random.default_rng([3, epoch])
        order, flipped = drawn.permutation(21), drawn.random(21) < 0.5
        for start in range(0, 21, 4):
            batch = order[start : start + 4]
            made = []
            for row in batch:
                image = PIL.ImageOps.fit(PIL.Image.open(files[row]), (8, 6), PIL.Image.Resampling.BILINEAR)
                pixels = np.asarray(image, np.float32).transpose(2, 0, 1) / np.float32(255)
                made.append(pixels[:, :, ::-1] if flipped[row] else pixels)
                flips += int(flipped[row])
            step += 1
            session.learning_rate = 0.05 * 0.5**epoch * min(1.0, step / 4)
            session.step((np.stack(made), batch // 7))
    session.save_checkpoint(tmp_path / "expected")
    got, expected = (model_io.load_tensors(tmp_path / name)[0] for name in ("run", "expected"))
    assert got.keys() == expected.keys() and 0 < flips < 42
    assert all(np.array_equal(got[name], value) for name, value in expected.items())


def test_the_best_epoch_is_kept(folder, tmp_path):
    """By each metric; the model for inference is that of the best epoch, with averaged weights."""
    code = main(
        [
            *("train", f"{folder}/step.onnx", "--data", f"{folder}/images", "--validation", f"{folder}/valid", "-q"),
            *("--epochs", "5", "--batch-size", "6", "--learning-rate", "0.2", "--ema-decay", "0.5", "--flip"),
            *("--save-best", f"{tmp_path}/best", "--best-by", "accuracy", "--inference", f"{tmp_path}/model.onnx"),
            *("--mean", "0.5", "--std", "0.25,0.25,0.25", "--json", f"{tmp_path}/result.json"),
        ]
    )
    assert code == 0
    result = json.loads((tmp_path / "result.json").read_text())
    accuracies = [record["accuracy"] for record in result["epochs"]]
    assert result["best_epoch"] == 1 + int(np.argmax(accuracies)) and max(accuracies) > 0.6
    data = rows(folder, "valid", mean=(0.5,), std=(0.25,))
    images, target = data.read(np.arange(21))
    scores = onnxruntime.InferenceSession(tmp_path / "model.onnx").run(None, {"image": images})[0]
    assert (scores.argmax(1) == target).mean() == max(accuracies)
    session = bnexport.TrainingSession(folder / "step.onnx", ema_decay=0.5)
    session.load_checkpoint(tmp_path / "best")
    np.testing.assert_allclose(session.evaluate((images, target), averaged=True).outputs["output"], scores, atol=1e-5)


class Infinite(Images):
    def read(self, indices, flipped=None):
        return np.full((len(indices), *self.shape[1:]), np.inf, np.float32)


def spoilt(data, failure, folder):
    """The rows with something in them that no step can be made of, and what its error says."""
    images, target = data.arrays["image"], data.arrays["target"]
    if failure == "nan":
        return {"image": Infinite(**vars(images)), "target": target}, (DivergedError, "NaN; first in")
    if failure == "label":
        return {"image": images, "target": target + 7}, (UsageError, "target: .* is out of bounds")
    for name in images.files:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes((Path(images.root) / name).read_bytes()[:60])
    broken = dataclasses.replace(images, root=str(folder))
    return {"image": broken, "target": target}, (UsageError, f"{folder}/.*png: cannot be read as an image")


@pytest.mark.parametrize("failure", ["nan", "image", "label"])
def test_a_step_that_fails_loses_nothing(failure, folder, tmp_path):
    """The checkpoint has the state before it, and the error its place."""
    (tmp_path / "whole").mkdir()
    whole = trainer(folder, tmp_path / "whole")
    states = []
    whole.run(lambda done: states.append(whole.session.state_dict()))

    made = trainer(folder, tmp_path)
    arrays, (expected, match) = spoilt(made.data, failure, tmp_path / "broken")

    def at(done):
        if done == 8:
            made.data = dataclasses.replace(made.data, arrays=arrays)

    with pytest.raises(expected, match=rf"^epoch 2, step 3 of 6: .*{match}.*{tmp_path}/run has the state before it$"):
        made.run(at)
    resumed = trainer(folder, tmp_path)
    resumed.resume(tmp_path / "run")
    assert resumed.steps_done == 8
    assert all(np.array_equal(array, states[7][name]) for name, array in resumed.session.state_dict().items())
    resumed.run()
    assert (tmp_path / "whole/run").read_bytes() == (tmp_path / "run").read_bytes()


def test_a_validation_that_fails_loses_nothing(folder, tmp_path):
    made = trainer(folder, tmp_path)
    good = made.validation
    made.validation = dataclasses.replace(good, arrays=spoilt(good, "image", tmp_path / "broken")[0])
    with pytest.raises(UsageError, match=r"^epoch 1, validation: .*cannot be read as an image"):
        made.run()
    resumed = trainer(folder, tmp_path)
    resumed.resume(tmp_path / "run")
    (tmp_path / "whole").mkdir()
    assert resumed.run() == trainer(folder, tmp_path / "whole").run()


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--data", "empty"], "--data: empty: got no image in it, expected .jpg"),
        (["--data", "loose"], "loose: got the image 'a.png' in no subfolder"),
        (["--data", "holes"], "holes: class 'b' has no image"),
        (
            ["--data", "images", "--validation", "other"],
            "validation: got the classes eel, fox, gnu, expected those of the",
        ),
        (["--data", "images", "--std", "1,0,1"], "std: got 1.0, 0.0, 1.0, expected 3 numbers, or one for all"),
        (["--data", "images", "--mean", "1,x"], "--mean: got '1,x', expected numbers"),
        (["--data", "images.npz", "--flip"], "flip: got no folder of images"),
        (["--data", "images", "--warm-up-steps", "9"], "warm_up: got 9 steps, and the training has 1"),
        (["--data", "images", "--schedule", "step"], "milestones: got none with the schedule 'step'"),
        (["--data", "images", "--milestones", "a"], "--milestones: got 'a', expected numbers"),
        (["--data", "images", "--ema-decay", "1"], "ema_decay: got 1.0, expected a number within [0, 1)"),
        (["--data", "images", "--save-best", "b"], "best_by: got 'validation_loss' without validation rows"),
        (["--data", "images", "--save-best", "b", "--best-by", "f1"], "best_by: got 'f1', expected one of"),
        (["--data", "images", "--save-best", "run"], "--save-best: 'run' exists; go on with --resume, or remove it"),
        (["--data", "one"], "target: 3 is out of bounds in row 3"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(arguments, match, folder, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "loose", "holes/a", "holes/b"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "images").symlink_to(folder / "images")
    picture = folder / "images/cat/0.png"
    for name in ("loose/a.png", "holes/a/a.png", "run", *(f"other/{each}/0.png" for each in ("eel", "fox", "gnu"))):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(picture.read_bytes())
    for number in range(4):
        (tmp_path / "one" / str(number)).mkdir(parents=True)
        (tmp_path / "one" / str(number) / "0.png").write_bytes(picture.read_bytes())
    np.savez("images.npz", image=np.zeros((4, 3, 6, 8), np.float32), target=np.zeros(4, np.int64))
    assert main(["train", f"{folder}/step.onnx", *arguments]) == 2
    err = capfd.readouterr().err
    assert match in err and err.startswith("error: ") and err.count("\n") == 1, err


def test_inputs_that_are_no_images(folder):
    with pytest.raises(UsageError, match=r"image: takes an array of shape \(batch, 3\), and images are \(N, C, H, W\)"):
        load_rows(str(folder / "images"), ("image", "target"), shapes={"image": ("batch", 3)})


def test_images_need_pillow(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(
        MissingPackageError, match=r"pillow is not installed, .*pip install pillow \(extra \[images\]\)"
    ):
        rows(folder)


def test_the_best_checkpoint_must_be_there_to_go_on(folder, tmp_path):
    trainer(folder, tmp_path, settings={"epochs": 2, "milestones": (1,)}).run()
    (tmp_path / "best").unlink()
    with pytest.raises(UsageError, match="best: does not exist, expected the checkpoint of epoch"):
        trainer(folder, tmp_path, settings={"epochs": 3, "milestones": (1,)}).resume(tmp_path / "run")
