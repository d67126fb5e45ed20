"""A torch module against the file of any exporter: the verdict, and the first module that is wrong."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from torch import nn

import bnexport
from bnexport.cli import main
from bnexport.errors import UsageError
from bnexport.verification.first_difference import _agree, _is_nonlinear, _Seen
from tests.support import onnx_text
from tests.support.modules import compose

X = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(3))


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)),
    )
    for norm in (model[1], model[4]):
        norm.running_var.uniform_(0.5, 2.0)
        norm.running_mean.normal_()
        norm.weight.data.uniform_(0.5, 1.5)
    return model.eval()


def written(model: nn.Module, path: Path, *, sizes: bool = True, x: torch.Tensor = X, **options: Any) -> Path:
    """Write a file by torch's older exporter, which folds batch norms itself."""
    axes = {"image": {0: "n", 2: "h", 3: "w"}} if sizes else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(model, (x,), path, dynamo=False, input_names=["image"], dynamic_axes=axes, **options)
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(network(), tmp_path_factory.mktemp("against") / "right.onnx", output_names=["logits"])


class TestThreads:
    """Questions of public threads, and the sentence that answers each."""

    def test_a_fold_that_differs_by_rounding(self, file: Path) -> None:
        """onnx/optimizer#255: the fold of a batch norm changes outputs by 3.8e-6. A defect?"""
        verdict = bnexport.verify(network(), file, inputs=X)
        assert verdict.passed and verdict.max_abs_diff > 0 and verdict.sizes[-1] == ((3, 3, 9, 11),)
        words = "from the module in float64 the file differs by", ", the module by"
        assert all(text in verdict.reason for text in words)
        assert verdict.place == "" and "allowed" in verdict.summary()

    def test_outputs_of_a_model_in_train_mode(self, tmp_path: Path) -> None:
        """microsoft/onnxruntime#4589: the file returns other numbers than the module in eval mode."""
        mode = torch.onnx.TrainingMode.TRAINING
        path = written(network().train(), tmp_path / "train.onnx", training=mode, do_constant_folding=False)
        verdict = bnexport.verify(network(), path, inputs=X)
        assert verdict.status == "failed" and verdict.place.startswith("first difference behind 1: largest")

    def test_numbers_that_float16_does_not_have(self, tmp_path: Path) -> None:
        """microsoft/onnxruntime#11384: NaN in float16, right numbers in float32. Where do they start?"""
        model = network()
        model[1].weight.data *= 3e4
        model[3].weight.data /= 3e4
        half = copy.deepcopy(model).half()
        verdict = bnexport.verify(model, written(half, tmp_path / "half.onnx", x=X.half()), inputs=X)
        assert verdict.status == "failed" and verdict.reason.endswith("by the bound of float16")
        assert "float16 ends at 65504" in verdict.place, verdict


def exchange_channels(model: Any) -> None:
    tensors = [model[3].weight, model[3].bias, *model[4].parameters(), *model[4].buffers()]
    for tensor in (each.data for each in tensors if each.dim()):
        tensor[[2, 6]] = tensor[[6, 2]]


# What is changed in the network of the file, and what is said of the place.
PLACES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    # NVIDIA/TensorRT#4443: which layer is the first with a large error? All outputs at once do not fit the memory.
    "a filter": (lambda model: model[3].weight.data[5].mul_(1.9),
        ["first difference behind 4: largest 1, in channel 5", "scale of channel 5 by 1.9"]),
    "no activation": (lambda model: model.__setitem__(5, nn.Identity()),
        ["first difference behind 5: the candidate has no value like its result"]),
    "channels in another order": (exchange_channels, ["first difference behind 4", "is in channel"]),
}  # fmt: skip


class TestPlaces:
    @pytest.mark.parametrize("name", PLACES)
    def test_of_a_change(self, name: str, tmp_path: Path) -> None:
        change, words = PLACES[name]
        changed = network()
        change(changed)
        verdict = bnexport.verify(network(), written(changed, tmp_path / "changed.onnx"), inputs=X)
        assert verdict.status == "failed" and verdict.place.startswith(words[0])
        assert all(text in verdict.place for text in words), verdict.place

    @pytest.mark.parametrize(
        ("text", "divisor", "said"),
        [
            ("y = Div (x, d)", [2.0, 0.0], "in channel 0: scale of channel 0 by 0.5"),
            ("q = Div (x, d) y = Sign (q)", [1.0, -0.0], "which are NaN or infinite there"),
        ],
    )
    def test_a_channel_that_is_infinite(self, text: str, divisor: list[float], said: str) -> None:
        pair = [
            onnx_text.model(f"g (float[3, 2] x) => (y) {{ {text} }}", values={"d": np.array(each, np.float32)})
            for each in ([1.0, 0.0], divisor)
        ]
        verdict = bnexport.verify(*pair)
        assert verdict.status == "failed" and said in verdict.place and "largest nan" not in verdict.place

    def test_numbers_beyond_float32(self) -> None:
        body = "g (double[1, 3] x) => (y) {{ h = Neg (x) r = Relu (h) y = {} (r) }}"
        numbers = {"x": np.array([[1e100, -2e100, -3e100]])}
        verdict = bnexport.verify(*(onnx_text.model(body.format(kind)) for kind in ("Identity", "Neg")), inputs=numbers)
        assert verdict.place.startswith("first difference behind node 'Identity -> y': largest 6e+100")

    def test_an_infinity_that_is_not_in_the_sample(self) -> None:
        seen = [_Seen(ir.val("x"), (9999,), np.zeros(5000), finite) for finite in (True, False)]
        assert [_agree(seen[0], each, "float32") for each in seen] == [True, False]
        assert not any(map(_is_nonlinear, seen))

    def test_a_size_that_is_fixed(self, tmp_path: Path) -> None:
        fixed = compose(lambda self, x: x.reshape(1, 8, 16, 16))
        plain, changed = ([*network()[:3], layer, *network()[3:]] for layer in (nn.Identity(), fixed))
        path = written(nn.Sequential(*changed), tmp_path / "fixed.onnx")
        verdict = bnexport.verify(nn.Sequential(*plain), path, inputs=X)
        assert verdict.status == "failed" and verdict.place.startswith("it stops behind 3, at 3x3x")

    def test_the_place_costs_a_verdict_nothing(self, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("bnexport.verification.api.find_place", None)
        assert bnexport.verify(network(), file, inputs=X).passed


class TestInputs:
    def test_without_any_and_of_several_sets(self, file: Path) -> None:
        for inputs in (None, [{"image": X.numpy()}, {"image": 2 * X.numpy()}]):
            assert bnexport.verify(network(), file, inputs=inputs).passed

    def test_a_half_precision_file_of_fixed_sizes(self, tmp_path: Path) -> None:
        path = written(network().half(), tmp_path / "half.onnx", x=X.half(), sizes=False)
        assert bnexport.verify(network(), path, inputs=X[..., :8, :8]).status == "failed"
        verdict = bnexport.verify(network(), path, inputs=X)
        assert verdict.passed and "compared with the module in float16" in verdict.reason

    def test_outputs_that_a_file_lacks(self, file: Path) -> None:
        def forward(self: Any, x: torch.Tensor) -> dict[str, torch.Tensor]:
            scores = self.body(x)
            return {"scores": scores, "shares": scores.softmax(1)}

        heads = compose(forward, body=network()).eval()
        verdict = bnexport.verify(heads, file, inputs=X)
        assert verdict.status == "failed" and verdict.reason.startswith("the outputs differ: (scores: FLOAT[")
        named = bnexport.verify(heads, file, inputs=X, names={"scores": "logits"})
        assert named.passed and "not compared: shares" in named.reason
        wrong = bnexport.verify(heads, file, inputs=X, names={"shares": "logits"})
        assert wrong.status == "failed"
        with pytest.raises(UsageError, match=r"names: got 'score', expected among x, scores, shares"):
            bnexport.verify(heads, file, inputs=X, names={"score": "logits"})


@pytest.mark.parametrize("suffix", [".pt", pytest.param(".pt2", marks=pytest.mark.slow)])
def test_files_of_torch(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"right{suffix}"
    bnexport.export(network(), X, path, verify=False)
    with pytest.raises(UsageError, match="inputs: missing"):
        bnexport.verify(network(), path)
    changed = network()
    changed[8].bias.data += 0.1
    verdicts = [bnexport.verify(model, path, inputs=X).status for model in (network(), changed)]
    assert verdicts == ["passed", "failed"]


def test_a_module_that_cannot_be_exported(file: Path) -> None:
    odd = compose(lambda self, x: torch.from_numpy(np.asarray(self.body(x).tolist(), np.float32)), body=network())
    verdict = bnexport.verify(odd.eval(), file, inputs=X)
    assert verdict.passed and "by values at the example's sizes alone" in verdict.reason


def test_the_command(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(network().state_dict(), tmp_path / "right.pth")
    name = f"{__name__}:network"
    assert main(["verify", name, str(file), "--checkpoint", str(tmp_path / "right.pth"), "--map", "output=logits"]) == 0
    changed = network()
    changed[1].eps = 1e-2
    path = written(changed, tmp_path / "eps.onnx")
    assert main(["verify", name, str(path), "-i", "x:1,3,16,16"]) == 1
    message = capsys.readouterr().err
    assert "first difference behind 1: largest" in message and "scale of channel" in message


class TestWitness:
    def test_what_shows_a_failure_is_kept_and_replayed(
        self, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        changed = network()
        changed[8].weight.data[1] *= 3
        path, folder, page = written(changed, tmp_path / "wrong.onnx"), tmp_path / "shown", tmp_path / "page.html"
        kept = ["--save-inputs", str(folder), "--html", str(page), "--proof-seconds", "5", "--fixed-initializers"]
        assert main(["verify", str(file), str(path), *kept]) == 1
        with np.load(folder / "inputs.npz") as inputs, np.load(folder / "reference.npz") as one:
            assert inputs.files == ["image"] and one.files == ["logits"]
            with np.load(folder / "candidate.npz") as other:
                difference = np.abs(one["logits"] - other["logits"])
        assert difference[:, 1].max() > 0.1 and difference[:, [0, 2, 3]].max() < 1e-4
        text = page.read_text()
        assert "differences of logits" in text and "█" in text and "first difference behind 8" in text
        rows = [line.split(",") for line in (folder / "layers.csv").read_text().splitlines()]
        assert [row[0] for row in rows[1:]] == ["0", "2", "3", "5", "6", "7", "8"]
        assert [row[-1] == "equal" for row in rows[1:]] == [True] * 6 + [False]
        words = (folder / "replay.txt").read_text().split()
        assert words[:4] == ["bnexport", "verify", str(file), str(path)]
        assert sorted(words[4:]) == sorted(["-i", str(folder / "inputs.npz"), *kept[4:-2], "5.0", kept[-1]])
        capsys.readouterr()
        assert main(words[1:]) == 1 and "first difference behind 8" in capsys.readouterr().err

    def test_of_a_module_in_python(self, file: Path, tmp_path: Path) -> None:
        verdict = bnexport.verify(network(), file, inputs=X, save_inputs=tmp_path / "shown")
        assert verdict.passed and {"inputs.npz", "reference.npz", "candidate.npz", "layers.csv"} == {
            each.name for each in (tmp_path / "shown").iterdir()
        }

    def test_the_batch_that_shows_it_is_kept(self, tmp_path: Path) -> None:
        """Up to 0.2 both are equal."""
        one, other = (
            written(model, tmp_path / f"{name}.onnx", x=X, output_names=["y"])
            for name, model in (("one", nn.ReLU()), ("other", nn.Hardtanh(0.0, 0.2)))
        )
        inputs = [{"image": np.full((1, 3, 16, 16), value, np.float32)} for value in (0.1, 0.3)]
        verdict = bnexport.verify(one, other, inputs=inputs, method="whole")
        assert verdict.status == "failed" and verdict.witness is not None
        np.testing.assert_array_equal(verdict.witness["image"], inputs[1]["image"])

    def test_a_page_of_a_verdict_that_passed(self, file: Path, tmp_path: Path) -> None:
        assert main(["verify", str(file), str(file), "--html", str(tmp_path / "page.html")]) == 0
        assert "modules of A, and the nearest values of B" in (tmp_path / "page.html").read_text()
