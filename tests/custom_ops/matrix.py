"""One library in many versions of ONNX Runtime: `python tests/custom_ops/matrix.py [VERSION ...]`.

Downloads each wheel into a temporary folder, never into the environment, and runs matrix_check.py against
it in a process of its own. The training build (1.19.2, the last one) is checked by matrix_training.py
in the same way. `make campaign RUN=matrix` calls this; it needs a package index.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

VERSIONS = ("1.17.3", "1.18.1", "1.19.2", "1.22.1", "1.23.2", "1.24.4", "")  # "": the newest
TRAINING = "training"
HERE = Path(__file__).resolve().parent


def install(packages: list[str], folder: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--target",
        str(folder),
        *packages,
    ]
    subprocess.run(command, check=True)


def run(script: str, folder: Path) -> tuple[bool, str]:
    # The folder first: its packages hide those of the environment (numpy 2 among them).
    path = os.pathsep.join([str(folder), str(HERE.parents[1])])
    environment = os.environ | {"PYTHONPATH": path}
    if "BNEXPORT_LIBRARY" not in environment:
        from bnexport.native.library import get_library_path

        environment["BNEXPORT_LIBRARY"] = get_library_path()
    result = subprocess.run(
        [sys.executable, str(HERE / script)], env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    # What it printed last; where it failed, the end of the traceback. The training build logs to stdout, too.
    text = result.stdout if result.returncode == 0 else result.stdout + result.stderr
    lines = [line for line in text.splitlines() if line.strip() and "[I:onnxruntime" not in line]
    return result.returncode == 0, lines[-1] if lines else f"exit code {result.returncode}"


def main(arguments: list[str]) -> int:
    failures = 0
    for version in arguments or [*VERSIONS, TRAINING]:
        with tempfile.TemporaryDirectory() as folder:
            if version == TRAINING:
                install(
                    [
                        "onnxruntime-training-cpu==1.19.2",
                        "onnx==1.16.2",
                        "numpy<2",
                        "protobuf<5",
                        "cerberus",
                        "h5py",
                        "ml_dtypes<0.5",
                    ],
                    Path(folder),
                )
                good, last = run("matrix_training.py", Path(folder))
            else:
                numpy = ["numpy<2"] if version.startswith(("1.17", "1.18")) else []
                install([f"onnxruntime=={version}" if version else "onnxruntime", *numpy], Path(folder))
                good, last = run("matrix_check.py", Path(folder))
        failures += not good
        print(f"{'ok    ' if good else 'FAILED'} {version or 'newest':10s} {last}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.path.insert(0, str(HERE.parents[1]))
    sys.exit(main(sys.argv[1:]))
