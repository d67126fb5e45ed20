"""bnexport export LIBRARY:NAME with the real libraries."""

import os
import subprocess
import sys
from pathlib import Path

from tests.frameworks.environment import ROOT

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

MODELS = (
    ("timm:test_resnet", "note: input x:1,3,160,160, as timm states"),
    ("torchvision:shufflenet_v2_x0_5", "note: input x:1,3,224,224, as torchvision states"),
    ("mmengine:config.py", "note: input inputs:1,3,64,96, as mmengine states"),
)


def export(folder: Path, *arguments: str) -> tuple[int, str]:
    """The exit code and what stderr got."""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    command = [sys.executable, "-m", "tests.frameworks.stand_ins", "export", *arguments]
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    return done.returncode, done.stderr


def a_model_of_each_library(folder: Path) -> None:
    (folder / "config.py").write_text(CONFIG)
    for name, note in MODELS:
        code, said = export(folder, name, "out.onnx", "--overwrite")
        assert code == 0 and note in said and "batch norms folded" in said and "verification passed" in said, said
    assert "note: the data preprocessor (mean, std, padding, channel order) is left out" in said


def mmcvs_own_class_needs_no_group(folder: Path) -> None:
    (folder / "own.py").write_text(CONFIG.replace('type="SyncBN"', 'type="MMSyncBN", stats_mode="N"'))
    code, said = export(folder, "mmengine:own.py", "own.onnx")
    assert code == 0 and "note: MMSyncBN is built as SyncBN" in said and "verification passed" in said, said
