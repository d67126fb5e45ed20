"""What the runs say of one runtime: right, wrong, refused, not installed; and one engine on a real file."""

import json
from pathlib import Path

import onnx

from benchmarks import page
from tests.runtimes import campaign as runs
from tests.runtimes import engine, files
from tests.support.onnx_text import model

EXPECTED = {"y": {"shape": [2], "data": [1.0, -2.0]}}


def answer(*values: float) -> dict:
    return {"version": "1", "outputs": {"y": {"shape": [len(values)], "data": list(values)}}}


def judged(*answers: dict) -> dict:
    row = {"sizes": 0, "error": 0.0}
    for each in answers:
        runs.judge(row, EXPECTED, each)
    return row


def test_verdicts() -> None:
    row = judged(answer(1.0, -2.0), answer(1.0, -2.0001))
    assert row["sizes"] == 2 and abs(row["error"] - 5e-5) < 1e-8 and "wrong" not in row
    assert "differs by" in judged(answer(1.0, -1.0))["wrong"]
    assert "differs by" in judged(answer(1.0, float("nan")))["wrong"]
    assert "got shape (1,), expected (2,)" in judged(answer(1.0))["wrong"]
    refused = judged(answer(1.0, -2.0), {"reason": "Error: /tmp/some/where/m.onnx\n cannot be  read"})
    assert refused["sizes"] == 1 and refused["reason"] == "Error: cannot be read"


def test_what_fails_a_run() -> None:
    """Wrong results of any runtime, and what ONNX Runtime refuses but for files of a newer opset."""
    refused = {"reason": "no"}
    found = {"deploy": refused, files.NEWER: refused, "kept, body": {"wrong": "differs"}}
    assert runs.problems({"name": "onnxruntime", "files": found}) == ["kept, body: differs", "deploy: no"]
    assert runs.problems({"name": "tract", "files": found}) == ["kept, body: differs"]
    assert runs.verdict({"name": "tract", "files": {"deploy": refused}}) == "ran"


def test_every_engine_is_there() -> None:
    found = {runtime.engine for runtime in runs.RUNTIMES.values() if not runtime.is_javascript}
    assert found == set(engine.PACKAGES) and all(callable(getattr(engine, name)) for name in found)
    assert Path(engine.__file__).with_suffix(".mjs").is_file()


def test_an_engine_on_a_file(tmp_path, capsys) -> None:
    onnx.save(model("g (float[N] x) => (float[N] y) { y = Neg (x) }"), tmp_path / "m.onnx")
    case = {"path": str(tmp_path / "m.onnx"), "outputs": EXPECTED, "libraries": []}
    case["inputs"] = {"x": {"dtype": "float32", "shape": [2], "data": [-1.0, 2.0]}}
    (tmp_path / "case.json").write_text(json.dumps(case))
    for name in ("onnxruntime_cpu", "onnx_reference"):
        engine.main(name, str(tmp_path / "case.json"))
        result = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert result["version"] and judged(result) == {"sizes": 1, "error": 0.0}


def test_the_table_joins_versions_with_the_same_results() -> None:
    good, bad = {"sizes": 2, "error": 1e-7}, {"reason": "too new"}
    rows = {
        name: {"name": "a", "version": version, "files": {"deploy": good, "newer": newer}}
        for name, version, newer in (("1", "1.1", bad), ("2", "1.2", bad), ("3", "1.3", bad), ("4", "1.4", good))
    }
    rows["b"] = {"name": "b", "version": "", "files": {}, "reason": "no wheel"}
    text = page.runtimes({"runtimes": rows, "bound": 1e-4})
    assert "| a | 1.1 to 1.3 | yes | no (1) |\n| a | 1.4 | yes | yes |" in text
    assert "1. a: too new" in text and "- b: not run. no wheel" in text
