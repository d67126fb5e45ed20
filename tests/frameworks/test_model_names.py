"""bnexport export LIBRARY:NAME with the real libraries."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.frameworks import environment

pytestmark = pytest.mark.slow

CONFIG = """
norm_cfg = dict(type="SyncBN", requires_grad=True)
model = dict(
    type="EncoderDecoder",
    data_preprocessor=dict(type="SegDataPreProcessor", mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0], size=(64, 96)),
    backbone=dict(type="UNet", base_channels=4, num_stages=2, strides=(1, 1), enc_num_convs=(1, 1), dec_num_convs=(1,),
                  downsamples=(True,), enc_dilations=(1, 1), dec_dilations=(1,), norm_cfg=norm_cfg),
    decode_head=dict(type="FCNHead", in_channels=4, channels=4, num_convs=1, num_classes=3, norm_cfg=norm_cfg),
    init_cfg=dict(type="Pretrained", checkpoint="https://nowhere.invalid/weights.pth"),
    test_cfg=dict(mode="whole"))
default_scope = "mmseg"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.py").write_text(CONFIG)
    (tmp_path / "raises.py").write_text("raise RuntimeError('no data set on this machine')")
    (tmp_path / "empty.py").write_text("a = 1")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def export(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "PYTHONPATH": str(environment.ROOT), "PYTHONWARNINGS": "ignore"}
    command = [str(environment.python()), "-m", "tests.frameworks.command", "export", *arguments]
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=900, check=False)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("timm:test_resnet", "note: input x:1,3,160,160, as timm states"),
        ("torchvision:shufflenet_v2_x0_5", "note: input x:1,3,224,224, as torchvision states"),
        ("mmengine:config.py", "note: input inputs:1,3,64,96, as mmengine states"),
    ],
)
def test_a_model_of_each_library(name: str, note: str, folder: Path) -> None:
    done = export(folder, name, "out.onnx")
    assert done.returncode == 0, done.stderr
    assert note in done.stderr
    assert "batch norms folded" in done.stderr and "verification passed" in done.stderr, done.stderr
    assert (folder / "out.onnx").exists()
    if name.startswith("mmengine"):
        assert "note: the data preprocessor (mean, std, padding, channel order) is left out" in done.stderr


def test_mmcvs_own_class_needs_no_group(folder: Path) -> None:
    (folder / "own.py").write_text(CONFIG.replace('type="SyncBN"', 'type="MMSyncBN", stats_mode="N"'))
    done = export(folder, "mmengine:own.py", "own.onnx")
    assert done.returncode == 0, done.stderr
    assert "note: MMSyncBN is built as SyncBN" in done.stderr
    assert "verification passed" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["mmengine:raises.py"], 2, "mmengine:raises.py: the configuration raises RuntimeError: no data set on this machine"),
        (["mmengine:empty.py"], 2, "mmengine:empty.py: the configuration has no dict 'model'"),
        (["mmengine:config.py?model.backbone.type=Frob"], 2, "Frob"),
        (["torchvision:resnet19"], 2, "torchvision has no model 'resnet19'; did you mean 'resnet18'?"),
        (["torchvision:resnet18?weights=DEFAULT"], 2, "weights: got 'DEFAULT', expected --checkpoint with a file"),
        (["torchvision:raft_small"], 2, "nothing states the sizes of the inputs of torchvision:raft_small"),
        (["timm:test_resnet", "--checkpoint", "config.json"], 2, "config.json: cannot be read as a checkpoint"),
    ],
)  # fmt: skip
def test_one_line_says_what_is_wrong(arguments: list[str], code: int, words: str, folder: Path) -> None:
    name, *more = arguments
    done = export(folder, name, "out.onnx", *more)
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == code, done.stderr
    assert len(errors) == 1 and words in errors[0], done.stderr
    assert "Traceback" not in done.stderr
    assert not (folder / "out.onnx").exists()


def test_a_checkpoint_of_another_network(folder: Path) -> None:
    assert export(folder, "timm:test_resnet", "a.onnx").returncode == 0
    script = (
        "import torch, timm; torch.save(timm.create_model('test_resnet').state_dict(), 'right.pth');"
        "torch.save(timm.create_model('test_vit').state_dict(), 'other.pth')"
    )
    variables = {**os.environ, "PYTHONPATH": str(environment.ROOT)}
    program = f"from tests.frameworks import stand_ins; stand_ins.install(); {script}"
    subprocess.run([str(environment.python()), "-c", program], cwd=folder, env=variables, check=True)
    done = export(folder, "timm:test_resnet", "right.onnx", "--checkpoint", "right.pth")
    assert done.returncode == 0, done.stderr
    done = export(folder, "timm:test_resnet", "other.onnx", "--checkpoint", "other.pth")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: other.pth: its names do not fit the module: ")
