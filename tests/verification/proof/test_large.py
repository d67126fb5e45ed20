"""Ten gigabytes of external data are checked in little memory, in a few times what `cmp` takes."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest

from bnexport.verification.certificate import KEY, Certificate, CertifiedSite

CHANNELS = 1024
SIZE = CHANNELS * CHANNELS * 9 * 4
MOST_BYTES = 200 * 10**6
# Times `cmp` of two files like these, which reads them as fast as they can be read.


def vectors(index: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(index)
    return {
        "s": generator.uniform(0.5, 2.0, CHANNELS).astype(np.float32),
        "b": generator.standard_normal(CHANNELS).astype(np.float32),
        "m": generator.standard_normal(CHANNELS).astype(np.float32),
        "v": generator.uniform(0.5, 2.0, CHANNELS).astype(np.float32),
    }


def write(folder: Path, name: str, pairs: int, *, folded: bool, off: int = -1) -> Path:
    """A chain of Conv and BatchNormalization whose weights lie in a sparse file: one row of each is not zero.

    off: the pair whose weight is wrong by 4 units in the last place.
    """
    nodes, tensors = [], []
    with open(folder / f"{name}.data", "wb") as file:
        file.truncate(pairs * SIZE)
        for index in range(pairs):
            row = np.random.default_rng(1000 + index).standard_normal(CHANNELS * 9).astype(np.float32)
            given = vectors(index)
            factor = given["s"].astype(np.float64) / np.sqrt(given["v"].astype(np.float64) + np.float32(1e-5))
            at = index % CHANNELS
            if folded:
                row = (row * factor[at]).astype(np.float32)
                row[0] += 4 * np.spacing(np.abs(row).max()) if index == off else 0
            file.seek(index * SIZE + at * CHANNELS * 36)
            file.write(row.tobytes())
            weight = onnx.TensorProto(
                name=f"w{index}", data_type=1, dims=[CHANNELS, CHANNELS, 3, 3], data_location=onnx.TensorProto.EXTERNAL
            )
            for key, value in (("location", f"{name}.data"), ("offset", index * SIZE), ("length", SIZE)):
                weight.external_data.add(key=key, value=str(value))
            tensors.append(weight)
            names = [f"x{index}", f"w{index}"]
            if folded:
                shift = (given["b"] - given["m"].astype(np.float64) * factor).astype(np.float32)
                tensors.append(onnx.numpy_helper.from_array(shift, f"shift{index}"))
                nodes.append(
                    onnx.helper.make_node("Conv", [*names, f"shift{index}"], [f"x{index + 1}"], f"conv{index}")
                )
            else:
                tensors += [onnx.numpy_helper.from_array(array, f"{key}{index}") for key, array in given.items()]
                nodes.append(onnx.helper.make_node("Conv", names, [f"c{index}"], f"conv{index}"))
                parameters = [f"{key}{index}" for key in given]
                nodes.append(
                    onnx.helper.make_node(
                        "BatchNormalization", [f"c{index}", *parameters], [f"x{index + 1}"], f"norm{index}"
                    )
                )
    ends = [onnx.helper.make_tensor_value_info(each, 1, ["N", CHANNELS, "H", "W"]) for each in ("x0", f"x{pairs}")]
    graph = onnx.helper.make_graph(nodes, "g", ends[:1], ends[1:], tensors)
    made = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    if folded:
        sites = tuple(CertifiedSite((f"norm{index}",), (f"conv{index}",)) for index in range(pairs))
        made.metadata_props.add(key=KEY, value=Certificate(sites).encode())
    path = folder / f"{name}.onnx"
    onnx.save(made, path)
    return path


def measured(*command: object) -> tuple[float, int]:
    """Seconds and the most anonymous memory of a process."""
    start, most = time.perf_counter(), 0
    with subprocess.Popen([str(each) for each in command], stderr=subprocess.DEVNULL) as process:
        status = Path(f"/proc/{process.pid}/status")
        while process.poll() is None:
            lines = [line for line in status.read_text().splitlines() if line.startswith("RssAnon")]
            most = max(most, *(int(line.split()[1]) * 1024 for line in lines), 0)
            time.sleep(0.02)
    return time.perf_counter() - start, most


def verify(folder: Path, changed: str) -> tuple[float, int, dict[str, object]]:
    code = "import sys; from bnexport.cli import main; sys.exit(main())"
    files = (folder / "a.onnx", folder / f"{changed}.onnx")
    target = folder / "verdict.json"
    seconds, most = measured(
        sys.executable, "-c", code, "verify", *files, "--method", "local", "--json", target, "--quiet"
    )
    return seconds, most, json.loads(target.read_text())


def test_a_small_file(tmp_path: Path) -> None:
    """The same with 75 MB, so that the long test keeps working."""
    for name, folded, off in (("a", False, -1), ("b", True, -1), ("c", True, 1)):
        write(tmp_path, name, 2, folded=folded, off=off)
    _, most, verdict = verify(tmp_path, "b")
    assert verdict["status"] == "passed", verdict
    assert most < MOST_BYTES
    assert verify(tmp_path, "c")[2]["status"] != "passed"


@pytest.mark.slow
def test_ten_gigabytes(tmp_path: Path) -> None:
    pairs = 10 * 10**9 // SIZE + 1
    for name, folded, off in (("a", False, -1), ("b", True, -1), ("c", True, pairs // 2)):
        write(tmp_path, name, pairs, folded=folded, off=off)
    write(tmp_path, "same", pairs, folded=False)
    compare, _ = measured("cmp", tmp_path / "a.data", tmp_path / "same.data")
    seconds, most, verdict = verify(tmp_path, "b")
    print(f"{pairs * SIZE / 1e9:.1f} GB: {seconds:.1f} s, {most / 1e6:.0f} MB of anonymous memory; cmp {compare:.1f} s")
    assert verdict["status"] == "passed", verdict
    assert {site["method"] for site in verdict["sites"]} == {"proved"}  # type: ignore[attr-defined]
    assert most < MOST_BYTES
    assert verify(tmp_path, "c")[2]["status"] != "passed"
