"""One library in many versions of ONNX Runtime: python -m tests.campaign matrix [VERSION ...].

Each version's wheel goes into a temporary folder, never into the environment, and the tests of the operators run against it in a
process of its own. The training build (1.19.2, the last one) is checked by matrix_training.py in the same way.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.campaign.table import ROOT, Campaign, judged, told

SECONDS = 1200
VERSIONS = ("1.17.3", "1.18.1", "1.19.2", "1.22.1", "1.23.2", "1.24.4", "newest")
TRAINING = "training"
OF_TRAINING = (
    "onnxruntime-training-cpu==1.19.2", "onnx==1.16.2", "numpy<2", "protobuf<5", "cerberus", "h5py", "ml_dtypes<0.5",
)  # fmt: skip
# Of these files what opens a session. Old versions cannot be fed with bfloat16, and want the types of values inside.
TESTS = (
    "custom_ops/test_bad_input.py",
    "custom_ops/test_fuzz.py",
    "custom_ops/test_numbers.py",
    "native/test_library.py",
)
SELECTED = "(bad_input or fuzz or node or threads or domains or step_s or registering) and not (bfloat16 or nan_stays)"


def warm() -> None:
    """Nothing is imported that a wheel replaces."""


def packages(version: str) -> tuple[str, ...]:
    if version == TRAINING:
        return OF_TRAINING
    runtime = "onnxruntime" if version == "newest" else f"onnxruntime=={version}"
    return (runtime, "numpy<2") if version.startswith(("1.17", "1.18")) else (runtime,)


def run(version: str, place: Path, _: list[str]) -> None:
    if version == TRAINING:
        command = [sys.executable, str(Path(__file__).with_name("matrix_training.py"))]
    else:
        files = [str(ROOT / "tests" / name) for name in TESTS]
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *files, "-k", SELECTED]
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", folder]
        subprocess.run([*pip, *packages(version)], check=True)
        # The folder first: its packages hide those of the environment (numpy 2 among them).
        variables = os.environ | {"PYTHONPATH": os.pathsep.join([folder, str(ROOT)]), "BNEXPORT_COLD": "1"}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    # What it printed last; where it failed, the end of the traceback. The training build logs to stdout, too.
    text = done.stdout if done.returncode == 0 else done.stdout + done.stderr
    lines = [each for each in text.splitlines() if each.strip() and "[I:onnxruntime" not in each]
    said = lines[-1] if lines else f"exit code {done.returncode}"
    place.write_text(json.dumps({"name": version, "status": "failed" if done.returncode else "passed", "said": said}))


CAMPAIGN = Campaign(
    cases=lambda: (*VERSIONS, TRAINING),
    takes_others=True,
    trial=__name__,
    results=ROOT / "build/campaign/matrix.json",
    verdict=judged,
    line=told,
)
