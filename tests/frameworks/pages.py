"""The tutorials on MMSegmentation, MMDetection, timm and trainers, every block of them, with the real packages.

`python -m tests.frameworks.pages PAGE FOLDER [kernels]` runs the blocks of a page in an empty folder: Python blocks are one
session, shell blocks run in between. kernels: with the compiled operators of MMCV.
"""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import onnx

from tests.docs.pages import RESULT, ROOT, blocks
from tests.frameworks import environment, mmcv_kernels, stand_ins


def run(page: Path, folder: Path, kernels: bool) -> None:
    stand_ins.install()
    if kernels:
        mmcv_kernels.install()
    os.chdir(folder)
    programs = Path("bin")
    programs.mkdir()
    command = programs / "bnexport"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -W ignore -m tests.frameworks.stand_ins "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join((str(programs.resolve()), os.environ["PATH"]))
    session: dict[str, Any] = {"__name__": "__main__"}
    for language, code in blocks(page.read_text(), "python", "sh"):
        if language == "python":
            exec(compile(code, str(page), "exec"), session)
        else:
            variables = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
            sys.stdout.flush()
            subprocess.run(["bash", "-euc", code], env=variables, check=True, stderr=subprocess.STDOUT)


def printed_by(name: str, folder: Path, *options: str) -> str:
    command = [sys.executable, "-m", "tests.frameworks.pages", str(ROOT / f"docs/tutorials/{name}.md"), str(folder)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def mmsegmentation(folder: Path) -> None:
    printed = printed_by("mmsegmentation", folder)
    assert "'mmengine.logging.history_buffer.HistoryBuffer')" in printed
    assert "batch norms folded" in printed and "largest difference" in printed
    assert len(RESULT.findall(printed)) == 1, printed
    names = {path.name for path in folder.iterdir()}
    assert {"fast_scnn.onnx", "from_python.onnx", "kept.onnx", "folded.onnx"} <= names


def timm(folder: Path) -> None:
    printed = printed_by("timm", folder)
    assert len(RESULT.findall(printed)) == 2, printed
    assert "0 batch norms left" in printed and "62 batch norms left: features." in printed
    assert {"regnetx.onnx", "densenet.onnx"} <= {path.name for path in folder.iterdir()}


def mmdetection(folder: Path) -> None:
    printed = printed_by("mmdetection", folder, "kernels")
    assert printed.count("became standard ones: 13 MMCVModulatedDeformConv2d") == 2, printed
    assert "batch norms folded" in printed and "passed" in printed and "folds proved" in printed
    for name in ("detector.onnx", "folded.onnx"):
        model = onnx.load(folder / name)
        assert {node.domain for node in model.graph.node} == {""}
        assert "BatchNormalization" not in {node.op_type for node in model.graph.node}


def trainers(folder: Path) -> None:
    page, printed = ROOT / "docs/tutorials/trainers.md", ""
    programs = environment.python("trainers").parent
    variables = {
        **os.environ,
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "OMP_NUM_THREADS": "1",
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
    ends = re.compile(r"largest difference from one process: ([\d.e-]+)")
    for language, code in blocks(page.read_text(), "python", "sh"):
        name = code.partition("\n")[0]
        if language == "python" and name.endswith(".py"):
            (folder / name.removeprefix("# ")).write_text(code)
            continue
        command = ["bash", "-euc", code] if language == "sh" else ["python", "-c", code]
        done = subprocess.run(
            command, cwd=folder, env=variables, capture_output=True, text=True, timeout=600, check=False
        )
        assert done.returncode == 0, f"{code}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        printed += done.stdout + done.stderr
    assert len(ends.findall(printed)) >= 2 * 5
    assert {path.name for path in folder.glob("*.onnx")} == {"model.onnx", "averaged.onnx"}


if __name__ == "__main__":
    run(Path(sys.argv[1]).resolve(), Path(sys.argv[2]), "kernels" in sys.argv[3:])
