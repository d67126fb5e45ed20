"""Ten gigabytes of external data are checked in little memory."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from bnexport.verification.certificate import KEY, Certificate, CertifiedSite
from tests.miscompilations.mistake import affine
from tests.support.onnx_text import batch_norm, parameters

CHANNELS = 1024
SIZE = CHANNELS * CHANNELS * 9 * 4
MOST_BYTES = 200 * 10**6


def write(folder: Path, name: str, pairs: int, *, folded: bool = True, off: int = -1) -> None:
    """A chain of Conv and BatchNormalization whose weights lie in a sparse file: one row of each is not zero.

    off: the pair whose weight is wrong by 4 units in the last place.
    """
    nodes, tensors = [], []
    with open(folder / f"{name}.data", "wb") as file:
        file.truncate(pairs * SIZE)
        for index in range(pairs):
            row = np.random.default_rng(1000 + index).standard_normal(CHANNELS * 9).astype(np.float32)
            given = parameters(batch_norm(f"p{index}", CHANNELS), seed=index)
            factor, shift = affine(given, f"p{index}")
            at = index % CHANNELS
            if folded:
                row = (row * factor[at]).astype(np.float32)
                row[0] += 4 * np.spacing(np.abs(row).max()) if index == off else 0
                given = {f"shift{index}": shift.astype(np.float32)}
            file.seek(index * SIZE + at * CHANNELS * 36)
            file.write(row.tobytes())
            dims = [CHANNELS, CHANNELS, 3, 3]
            weight = onnx.TensorProto(name=f"w{index}", data_type=1, dims=dims, data_location=onnx.TensorProto.EXTERNAL)
            for key, value in (("location", f"{name}.data"), ("offset", index * SIZE), ("length", SIZE)):
                weight.external_data.add(key=key, value=str(value))
            tensors += [weight, *(onnx.numpy_helper.from_array(array, key) for key, array in given.items())]
            inputs, output = [f"x{index}", f"w{index}"], f"x{index + 1}"
            if folded:
                nodes.append(onnx.helper.make_node("Conv", [*inputs, *given], [output], f"conv{index}"))
            else:
                nodes.append(onnx.helper.make_node("Conv", inputs, [f"c{index}"], f"conv{index}"))
                node = onnx.helper.make_node("BatchNormalization", [f"c{index}", *given], [output], f"norm{index}")
                nodes.append(node)
    ends = [onnx.helper.make_tensor_value_info(each, 1, ["N", CHANNELS, "H", "W"]) for each in ("x0", f"x{pairs}")]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    if folded:
        sites = tuple(CertifiedSite((f"norm{index}",), (f"conv{index}",)) for index in range(pairs))
        made.metadata_props.add(key=KEY, value=Certificate(sites).encode())
    onnx.save(made, folder / f"{name}.onnx")


def verify(folder: Path, changed: str) -> tuple[int, dict[str, Any]]:
    """Return the most anonymous memory of the command, and its verdict."""
    code, target, most = "import sys; from bnexport.cli import main; sys.exit(main())", folder / "verdict.json", 0
    files = (folder / "a.onnx", folder / f"{changed}.onnx")
    command = [sys.executable, "-c", code, "verify", *files, "--method", "local", "--json", target, "--quiet"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            lines = [line for line in status.read_text().splitlines() if line.startswith("RssAnon")]
            most = max(most, *(int(line.split()[1]) * 1024 for line in lines), 0)
            time.sleep(0.02)
    return most, json.loads(target.read_text())


@pytest.mark.parametrize("nbytes", [75 * 10**6, pytest.param(10**10, marks=pytest.mark.slow)])
def test_memory(tmp_path: Path, nbytes: int) -> None:
    pairs = nbytes // SIZE + 1
    write(tmp_path, "a", pairs, folded=False)
    write(tmp_path, "b", pairs)
    write(tmp_path, "c", pairs, off=0)
    most, verdict = verify(tmp_path, "b")
    assert (verdict["status"], {site["method"] for site in verdict["sites"]}) == ("passed", {"proved"}), verdict
    assert most < MOST_BYTES
    assert verify(tmp_path, "c")[1]["status"] != "passed"
