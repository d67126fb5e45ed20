"""`verify --manifest`: it goes on after a failure, one row a pair, resumes from its result, and exits with the worst code."""

from __future__ import annotations

import json
import shutil
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import bnexport
from bnexport.cli import main, manifest
from tests.cli.conftest import NET
from tests.support import warm
from tests.support.onnx_text import array_of, model, with_arrays


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(model(NET), "a.onnx")
    bnexport.fold("a.onnx", "b.onnx", verify=False)
    folded = onnx.load("b.onnx")
    (weight,) = (each.name for each in folded.graph.initializer if len(each.dims) == 4)
    onnx.save(with_arrays(folded, {weight: 1.01 * array_of(folded, weight)}), "wrong.onnx")
    Path("broken.onnx").write_bytes(b"no model")
    np.save("x.npy", np.ones((1, 3, 5, 5), np.float32))
    return tmp_path


def run(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    code = main(["verify", "--manifest", "pairs.txt", "--json", "r.json", *arguments])
    return code, json.loads(Path("r.json").read_text())["pairs"]


def test_every_pair_has_a_row(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Any] = []
    warmed = types.SimpleNamespace(run=lambda command, **_: ran.append(command) or warm.run(*command[1:]))
    monkeypatch.setattr(manifest, "subprocess", warmed)
    Path("pairs.txt").write_text(
        "# ours\na.onnx wrong.onnx\n\na.onnx b.onnx -i x:x.npy  # right\na.onnx broken.onnx\na.onnx c.onnx\n"
    )
    code, rows = run("--jobs", "2", "--seed", "3")
    assert code == 2
    assert [row["status"] for row in rows] == ["failed", "passed", "refused", "usage"]
    assert [row["exit_code"] for row in rows] == [1, 0, 3, 2]
    assert "scale of channel 2 by 1.01" in rows[0]["message"] and rows[0]["largest"] > 1e-3 > rows[1]["largest"]
    assert rows[1]["arguments"] == ["--seed", "3", "a.onnx", "b.onnx", "-i", "x:x.npy"]
    assert "2 of 4: " in capsys.readouterr().err

    # Other names and another order; a file that has come, inputs that have changed.
    shutil.move("wrong.onnx", "moved.onnx")
    shutil.copy("b.onnx", "c.onnx")
    np.save("x.npy", np.zeros((1, 3, 5, 5), np.float32))
    Path("pairs.txt").write_text("a.onnx c.onnx\na.onnx moved.onnx\na.onnx broken.onnx\na.onnx b.onnx -i x:x.npy\n")
    ran.clear()
    code, rows = run("--seed", "3")
    assert code == 3
    assert [row["status"] for row in rows] == ["passed", "failed", "refused", "passed"]
    assert [row["seen"] for row in rows] == [False, True, True, False]
    assert [command[7] for command in ran] == ["c.onnx", "b.onnx"] and rows[1]["b"] == "moved.onnx"
    code, rows = run("--seed", "3")
    assert len(ran) == 2 and all(row["seen"] for row in rows)
