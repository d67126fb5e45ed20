"""Checkpoints as the frameworks write them, and hostile ones."""

import collections
import os
import pickle
import sys
import types

import numpy as np
import pytest
import torch
from torch import nn

from bnexport.errors import UsageError
from bnexport.exporting import checkpoint
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


LEGACY = pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
LAYOUTS = {
    "torch": lambda state: state,
    "DDP": lambda state: {"epoch": 3, "state_dict": prefixed(state, "module.")},
    "mmcv": lambda state: {"meta": {"mmcv_version": "1.7", "CLASSES": ("a", "b")}, "state_dict": state,
        "optimizer": {"state": {}}},
    "mmengine": lambda state: {"meta": {}, "state_dict": state, "message_hub": {"log": history()}},
    "lightning": lambda state: {"state_dict": prefixed(state, "model."), "pytorch-lightning_version": "2.4",
        "loops": {}},
    "compiled lightning": lambda state: {"state_dict": prefixed(state, "model._orig_mod.")},
    "timm": lambda state: {"arch": "resnet", "state_dict": state, "state_dict_ema": prefixed(state, "")},
    "detectron2": lambda state: {"model": {name: value.numpy() for name, value in state.items()}, "__author__": "x"},
    "model_state_dict": lambda state: {"model_state_dict": state, "loss": torch.tensor(0.5)},
    # Its counter is no weight.
    "averaged": lambda state: {"n_averaged": torch.tensor(3), **prefixed(state, "module.")},
    "old, without counters": lambda state: {n: v for n, v in state.items() if "num_batches" not in n},
}  # fmt: skip


@LEGACY
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
    assert loaded.unexpected == ()
    assert ("framework_that_is_not_here.HistoryBuffer" in loaded.ignored_objects) == (layout == "mmengine")
    assert "framework_that_is_not_here" not in sys.modules


def test_a_key_may_be_a_place_around_the_weights(tmp_path):
    trained, ema, fresh = make(1), make(2), make(3)
    content = {"epoch": 3, "model": trained.state_dict(), "ema": {"state_dict": ema.state_dict(), "updates": 7}}
    torch.save(content, tmp_path / "c.pt")
    for key in ("ema", "ema.state_dict"):
        loaded = load_checkpoint(fresh, tmp_path / "c.pt", key=key)
        assert loaded.container == "ema.state_dict" and loaded.others == ("model",)
        assert torch.equal(fresh[0].weight, ema[0].weight)
    for key, message in {
        "ema.updates": "no tensors under 'ema.updates', expected one of model, ema.state_dict with key= or --key",
        "ema.module": "'ema' has no key 'module', expected one of state_dict",
        "model.x": "'model' has no key 'x', expected none: it is a set of weights itself",
        "emma": "has no key 'emma', expected one of model, ema",
    }.items():
        with pytest.raises(UsageError, match=message):
            load_checkpoint(fresh, tmp_path / "c.pt", key=key)


SEVERAL = {
    "ema": lambda state, ema: {"model": state, "ema": {"state_dict": prefixed(ema, "module.")}},
    "ema_state_dict": lambda state, ema: {"state_dict": prefixed(state, "module."), "ema_state_dict": ema},
    "model_ema": lambda state, ema: {"model_ema": ema, "model": state, "again": state,
        "optimizer": {"exp_avg": ema["0.weight"]}},
}  # fmt: skip


@pytest.mark.parametrize("layout", SEVERAL)
def test_other_weights_that_would_fit_are_named(tmp_path, layout):
    trained, ema, fresh = make(1), make(2), make(3)
    torch.save(SEVERAL[layout](trained.state_dict(), ema.state_dict()), tmp_path / "c.pt")
    loaded = load_checkpoint(fresh, tmp_path / "c.pt")
    assert len(loaded.others) == 1 and loaded.others[0].startswith(layout)
    assert torch.equal(fresh[0].weight, trained[0].weight)
    assert load_checkpoint(fresh, tmp_path / "c.pt", key=loaded.others[0]).others == (loaded.container,)
    assert torch.equal(fresh[0].weight, ema[0].weight)


def test_weights_in_an_unusual_place(tmp_path):
    torch.save({"generator": make(1).state_dict()}, tmp_path / "one.pt")
    assert load_checkpoint(make(2), tmp_path / "one.pt").container == "generator"
    torch.save({"a": {"b": {"c": make(1).state_dict()}}}, tmp_path / "deep.pt")
    assert load_checkpoint(make(2), tmp_path / "deep.pt").container == "a.b.c"
    torch.save({"a": {"b": make(1).state_dict()}, "c": make(2).state_dict()}, tmp_path / "two.pt")
    with pytest.raises(UsageError, match=r"several sets of tensors, expected one of c, a\.b with key= or --key"):
        load_checkpoint(make(2), tmp_path / "two.pt")


class Attack:
    def __init__(self, function, *arguments):
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


def touch(path):
    open(path, "w").close()


class Inner(nn.Module):
    """A module as scripts write them: its class is not importable where the checkpoint is read."""

    def __init__(self):
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)
        self.register_buffer("grid", torch.zeros(2), persistent=False)
        self.stride = torch.ones(3)
        self.act = nn.SiLU()

    def forward(self, x):
        return self.act(self.bn(self.conv(x)))


def inner(seed):
    torch.manual_seed(seed)
    made = nn.Sequential(Inner(), nn.Conv2d(4, 2, 1))
    made[0].bn.running_mean += torch.rand(4)
    return made


PICKLED = {
    "whole": (lambda model, ema: model, (), ""),
    "yolo": (lambda model, ema: {"epoch": 3, "model": model.half(), "ema": ema.half(), "optimizer": None}, ("ema",), "model"),
    "ema alone": (lambda model, ema: {"epoch": 3, "model": None, "ema": model}, (), "ema"),
    "wrapped": (lambda model, ema: {"model": nn.DataParallel(model)}, (), "model"),
}  # fmt: skip


@LEGACY
@pytest.mark.parametrize("layout", PICKLED)
def test_the_weights_of_a_pickled_module(tmp_path, layout, legacy, monkeypatch):
    make_file, others, container = PICKLED[layout]
    trained, fresh = inner(1), inner(2)
    # An attack beside the weights: the code of a pickled module is not run.
    trained[0].names = Attack(touch, str(tmp_path / "victim"))
    expected = {name: value.half() if layout == "yolo" else value for name, value in trained.state_dict().items()}
    torch.save(make_file(trained, inner(3)), tmp_path / "best.pt", _use_new_zipfile_serialization=not legacy)
    with monkeypatch.context() as patched:
        patched.delattr(sys.modules[__name__], "Inner")
        loaded = load_checkpoint(fresh, tmp_path / "best.pt")
    assert (loaded.container, loaded.others, loaded.unexpected) == (container, others, ())
    assert f"{__name__}.Inner" in loaded.ignored_objects
    assert not (tmp_path / "victim").exists()
    for name, value in fresh.state_dict().items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.parametrize("kind", ["cycle", "doubling"])
def test_a_pickled_module_without_end_is_refused(tmp_path, kind, monkeypatch):
    monkeypatch.setattr(checkpoint, "_MOST_MODULES", 1000)
    first = last = nn.Module()
    for _ in range(20):
        last._modules["a"] = last._modules["b"] = following = nn.Module()
        last = following
    if kind == "cycle":
        last._modules["a"] = first
    torch.save({"model": first}, tmp_path / "c.pt")
    with pytest.raises(UsageError, match=r"c\.pt: the pickled module has more than 100 levels or 1,000 modules"):
        read_state_dict(tmp_path / "c.pt")


def test_names_of_compiled_and_wrapped_modules(tmp_path):
    trained = make(1)
    wrapped = {
        "plain": lambda model: model,
        "parallel": nn.DataParallel,
        "compiled": torch.compile,
        "inside": lambda model: nn.Sequential(torch.compile(model[0]), model[1]),
        "both": lambda model: torch.compile(nn.DataParallel(model)),
    }
    for saved, wrap in wrapped.items():
        torch.save(wrap(trained).state_dict(), tmp_path / f"{saved}.pt")
        for into, wrap_fresh in wrapped.items():
            fresh = make(2)
            load_checkpoint(wrap_fresh(fresh), tmp_path / f"{saved}.pt")
            assert torch.equal(fresh[0].weight, trained[0].weight), (saved, into)


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
    for part in (
        "1 missing: 1.running_var",
        "1 unexpected (allow_unexpected=True or --allow-unexpected ignores them): auxiliary.weight",
        "0.weight: got (5, 3, 3, 3), expected (4, 3, 3, 3)",
        "expected the checkpoint of this very model",
    ):
        assert part in str(caught.value)
    assert all(torch.equal(value, before[name]) for name, value in fresh.state_dict().items())


def test_unexpected_names_may_be_allowed(tmp_path):
    trained, fresh = make(1), make(2)
    state = {**prefixed(trained.state_dict(), "model."), "loss.weight": torch.ones(2)}
    torch.save({"state_dict": state}, tmp_path / "c.ckpt")
    words = r"under 'state_dict' do not fit .*loss\.weight; expected no others: the module's own are all there"
    with pytest.raises(UsageError, match=words):
        load_checkpoint(fresh, tmp_path / "c.ckpt")
    loaded = load_checkpoint(fresh, tmp_path / "c.ckpt", allow_unexpected=True)
    assert loaded.prefix == "model."
    assert loaded.unexpected == ("loss.weight",)
    assert torch.equal(fresh[0].weight, trained[0].weight)


@LEGACY
def test_nothing_that_a_checkpoint_names_is_run(tmp_path, legacy):
    victim, fresh = tmp_path / "victim", make(2)
    attacks = [Attack(os.mkdir, str(victim)), Attack(eval, f"open({str(victim)!r}, 'w')"), Attack(touch, str(victim))]
    content = {"state_dict": make(1).state_dict(), "x": attacks}
    torch.save(content, tmp_path / "c.pt", _use_new_zipfile_serialization=not legacy)
    loaded = load_checkpoint(fresh, tmp_path / "c.pt")
    assert not victim.exists()
    assert any("eval" in name for name in loaded.ignored_objects)
    assert torch.equal(fresh[0].weight, make(1)[0].weight)


# What a file holds, bytes or what torch.save writes; and the message.
NO_CHECKPOINTS = {
    "absent": (None, r"c\.pt: no such file"),
    "empty": (b"", "cannot be read as a checkpoint"),
    "text": (b"not a pickle", "cannot be read as a checkpoint"),
    "plain pickle": (pickle.dumps([1, 2]), "cannot be read as a checkpoint"),
    "list": ([torch.zeros(1)], r"got a builtins\.list, expected a dict of tensors"),
    "no tensors": ({"epoch": 3, "args": "x"}, "found no tensors, expected a state_dict; its keys are epoch, args"),
    "program": (torch.export.export(nn.ReLU(), (torch.zeros(1),)),
        r"a program of torch\.export, .*: bnexport export .*c\.pt OUT\.onnx"),
    "object": (torch.optim.SGD([torch.zeros(1)], 1.0), r"got a torch\.optim\.sgd\.SGD, .* save model\.state_dict"),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_CHECKPOINTS)
def test_files_that_are_no_checkpoint(tmp_path, name):
    content, message = NO_CHECKPOINTS[name]
    if isinstance(content, bytes):
        (tmp_path / "c.pt").write_bytes(content)
    elif name == "program":
        torch.export.save(content, tmp_path / "c.pt")
    elif content is not None:
        torch.save(content, tmp_path / "c.pt")
    with pytest.raises(UsageError, match=message):
        read_state_dict(tmp_path / "c.pt")
