"""Checkpoints as the frameworks write them, and hostile ones."""

import collections
import pickle
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from bnexport.errors import UsageError
from bnexport.exporting.checkpoint import load_checkpoint, read_state_dict


def make(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))


def prefixed(state, prefix):
    return collections.OrderedDict((prefix + name, value) for name, value in state.items())


def history():
    """An object of a class that exists only while the file is written, as mmengine's is here."""
    module = types.ModuleType("framework_that_is_not_here")
    cls = type("HistoryBuffer", (), {"__module__": module.__name__})
    module.HistoryBuffer = cls
    sys.modules[module.__name__] = module
    buffer = cls()
    buffer.values = np.arange(3.0)
    return buffer


LAYOUTS = {
    "torch": lambda state: state,
    "DDP": lambda state: {"epoch": 3, "state_dict": prefixed(state, "module.")},
    "mmcv": lambda state: {
        "meta": {"mmcv_version": "1.7", "CLASSES": ("a", "b")},
        "state_dict": state,
        "optimizer": {"state": {}},
    },
    "mmengine": lambda state: {"meta": {}, "state_dict": state, "message_hub": {"log": history()}},
    "lightning": lambda state: {
        "state_dict": prefixed(state, "model."),
        "pytorch-lightning_version": "2.4",
        "loops": {},
    },
    "compiled lightning": lambda state: {"state_dict": prefixed(state, "model._orig_mod.")},
    "timm": lambda state: {"arch": "resnet", "state_dict": state, "state_dict_ema": prefixed(state, "")},
    "detectron2": lambda state: {"model": {name: value.numpy() for name, value in state.items()}, "__author__": "x"},
    "model_state_dict": lambda state: {"model_state_dict": state, "loss": torch.tensor(0.5)},
    "old, without counters": lambda state: {n: v for n, v in state.items() if "num_batches" not in n},
}


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_come_out_of_every_layout(tmp_path, layout, legacy):
    trained, fresh = make(1), make(2)
    path = tmp_path / "checkpoint.pth"
    torch.save(LAYOUTS[layout](trained.state_dict()), path, _use_new_zipfile_serialization=not legacy)
    sys.modules.pop("framework_that_is_not_here", None)
    loaded = load_checkpoint(fresh, path)
    for name, value in trained.state_dict().items():
        if "num_batches" not in name:
            assert torch.equal(fresh.state_dict()[name], value), name
    assert ("framework_that_is_not_here.HistoryBuffer" in loaded.ignored_objects) == (layout == "mmengine")
    assert "framework_that_is_not_here" not in sys.modules


def test_a_named_key(tmp_path):
    trained, ema, fresh = make(1), make(2), make(3)
    torch.save({"state_dict": trained.state_dict(), "ema": {"module": ema.state_dict()}}, tmp_path / "c.pt")
    load_checkpoint(fresh, tmp_path / "c.pt", key="ema.module")
    assert torch.equal(fresh[0].weight, ema[0].weight)
    with pytest.raises(UsageError, match="has no key 'state_dict_ema', expected one of state_dict, ema"):
        load_checkpoint(fresh, tmp_path / "c.pt", key="state_dict_ema")


def test_safetensors(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    trained, fresh = make(1), make(2)
    save_file(prefixed(trained.state_dict(), "module."), tmp_path / "c.safetensors")
    assert load_checkpoint(fresh, tmp_path / "c.safetensors").prefix == "module."
    assert torch.equal(fresh[0].weight, trained[0].weight)


def test_what_does_not_fit_is_listed_and_nothing_is_loaded(tmp_path):
    state = make(1).state_dict()
    del state["1.running_var"]
    state["0.weight"] = torch.zeros(5, 3, 3, 3)
    state["auxiliary.weight"] = torch.zeros(2)
    torch.save(state, tmp_path / "c.pt")
    fresh = make(2)
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(UsageError) as caught:
        load_checkpoint(fresh, tmp_path / "c.pt")
    parts = (
        "1 missing: 1.running_var",
        "1 unexpected (allow_unexpected=True or --allow-unexpected ignores them): auxiliary.weight",
        "0.weight: got (5, 3, 3, 3), expected (4, 3, 3, 3)",
    )
    for part in parts:
        assert part in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def test_unexpected_names_may_be_allowed(tmp_path):
    trained, fresh = make(1), make(2)
    torch.save(
        {"state_dict": {**prefixed(trained.state_dict(), "model."), "loss.weight": torch.ones(2)}}, tmp_path / "c.ckpt"
    )
    with pytest.raises(UsageError, match=r"loss\.weight"):
        load_checkpoint(fresh, tmp_path / "c.ckpt")
    loaded = load_checkpoint(fresh, tmp_path / "c.ckpt", allow_unexpected=True)
    assert loaded.prefix == "model."
    assert loaded.unexpected == ("loss.weight",)
    assert torch.equal(fresh[0].weight, trained[0].weight)


class Attack:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def touch(path):
    open(path, "w").close()


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_nothing_that_a_checkpoint_names_is_run(tmp_path, legacy):
    import os

    victim = tmp_path / "victim"
    attacks = [Attack(os.mkdir, str(victim)), Attack(eval, f"open({str(victim)!r}, 'w')"), Attack(touch, str(victim))]
    torch.save(
        {"state_dict": make(1).state_dict(), "x": attacks}, tmp_path / "c.pt", _use_new_zipfile_serialization=not legacy
    )
    fresh = make(2)
    loaded = load_checkpoint(fresh, tmp_path / "c.pt")
    assert not victim.exists()
    assert any("eval" in name for name in loaded.ignored_objects)
    assert torch.equal(fresh[0].weight, make(1)[0].weight)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a checkpoint"),
        (b"not a pickle", "cannot be read as a checkpoint"),
        (pickle.dumps([1, 2]), "cannot be read as a checkpoint"),
    ],
    ids=["empty", "text", "plain pickle"],
)
def test_files_that_are_no_checkpoint(tmp_path, content, message):
    (tmp_path / "c.pt").write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_state_dict(tmp_path / "c.pt")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([torch.zeros(1)], "got a list, expected a dict of tensors"),
        ({"epoch": 3, "args": "x"}, "found no tensors under .* its keys are epoch, args"),
        (torch.nn.Linear(1, 1), r"an object of torch\.nn\.modules\.linear\.Linear, .* save model\.state_dict"),
    ],
    ids=["list", "no tensors", "module"],
)
def test_checkpoints_without_weights(tmp_path, value, message):
    torch.save(value, tmp_path / "c.pt")
    with pytest.raises(UsageError, match=message):
        read_state_dict(tmp_path / "c.pt")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UsageError, match=r"nowhere\.pt: no such file"):
        read_state_dict(tmp_path / "nowhere.pt")
