"""Tables: what was not folded and why, no wall of rows, no line wider than the terminal or 120 columns in a pipe."""

import json
import re

import onnx
import pytest

import bnexport
from bnexport.cli import main
from tests.support import warm
from tests.support.onnx_text import batch_norm, model

KEPT = """g (float[N,4,H,W] x) => (float[N,6,A,B] y, float[N,4,H,W] z) {
    a = Conv (x, w)
    y = BatchNormalization (a, p_s, p_b, p_m, p_v)
    r = Relu (x)
    z = BatchNormalization (r, q_s, q_b, q_m, q_v) }"""


@pytest.fixture
def half(tmp_path):
    """One batch norm that folds, one that stays."""
    made = model(KEPT, {"w": (6, 4, 3, 3), **batch_norm("p", 6), **batch_norm("q", 4)})
    for name, node in zip(("conv", "first", "relu", "second"), made.graph.node):
        node.name = name
    onnx.save(made, tmp_path / "half.onnx")
    return tmp_path / "half.onnx"


def call(*arguments, capfd):
    assert main([str(argument) for argument in arguments]) == 0
    return capfd.readouterr()


def test_a_fold_shows_what_stayed_and_why(half, tmp_path, capfd):
    out, err = call("fold", half, tmp_path / "f.onnx", capfd=capfd)
    assert "Not folded" in out and "second" in out and "Relu" in out
    assert "first" not in out
    assert "1 of 2 batch norms folded into convolutions" in err
    out, _ = call("fold", half, tmp_path / "f.onnx", "--overwrite", "-v", capfd=capfd)
    assert "first" in out and "second" in out


def test_where_all_is_folded_there_is_no_table_of_rows(small_files, tmp_path, capfd):
    out, err = call("fold", small_files / "kept.onnx", tmp_path / "f.onnx", capfd=capfd)
    assert out.count("\n") == 10 and "reason" not in out
    assert re.search(r"mmcv:MMCVSyncBatchNorm\W+3\W+0\W", out) and "Relu" not in out
    assert "3 of 3 batch norms folded into convolutions" in err
    out, err = call("fold", tmp_path / "f.onnx", tmp_path / "again.onnx", capfd=capfd)
    assert out.count("\n") == 9 and "nothing to fold" in err
    out, _ = call("fold", small_files / "kept.onnx", tmp_path / "f.onnx", "--overwrite", "-v", capfd=capfd)
    assert re.search(r"Relu\W+3\W+3\W", out)


def test_several_models_are_put_side_by_side(half, tmp_path, capfd):
    call("fold", half, tmp_path / "f.onnx", capfd=capfd)
    call("inspect", half, tmp_path / "f.onnx", "--json", tmp_path / "both.json", capfd=capfd)
    out, _ = call("inspect", half, tmp_path / "f.onnx", capfd=capfd)
    words = " ".join(re.sub("[│┃]", " ", out).split())
    assert (
        "BatchNormalization 2 1" in words and "nodes 4 3" in words and "Relu" not in words and "-v shows all" in words
    )
    out, _ = call("inspect", half, tmp_path / "f.onnx", "-v", capfd=capfd)
    assert "Relu 1 1" in " ".join(re.sub("[│┃]", " ", out).split())
    reports = json.loads((tmp_path / "both.json").read_text())["models"]
    assert [report["op_counts"].get("BatchNormalization") for report in reports] == [2, 1]


def test_reports_show_themselves_in_a_notebook(half, tmp_path):
    result = bnexport.fold(half, tmp_path / "f.onnx")
    page = result._repr_html_()
    assert page == result.report._repr_html_() and "1 of 2 batch norms folded" in page and "verification passed" in page
    assert "<td>BatchNormalization</td><td class=number>2</td><td class=number>1</td>" in page
    page = bnexport.verify(half, tmp_path / "f.onnx")._repr_html_()
    assert "<p>verification passed: " in page and "<td>ok</td>" in page
    page = bnexport.inspect(half)._repr_html_()
    assert "2 batch norms" in page and "<script" not in page and "<td>second</td>" in page


def test_operators_add_up(tmp_path, capfd):
    kinds = ["Relu", "Neg", "Abs", "Exp", "Sin", "Cos", "Tan", "Erf", "Sqrt", "Ceil"]
    text = "\n".join(f"v{index + 1} = {kind} (v{index})" for index, kind in enumerate(kinds))
    onnx.save(model(f"g (float[2] v0) => (float[2] v{len(kinds)}) {{\n{text} }}"), tmp_path / "m.onnx")
    out, _ = call("inspect", tmp_path / "m.onnx", capfd=capfd)
    assert "and 2 of 2 more kinds" in " ".join(out.split())
    out, _ = call("inspect", tmp_path / "m.onnx", "-v", capfd=capfd)
    words = " ".join(re.sub("[│┃]", " ", out).split())  # a cell may break anywhere
    assert all(f"1 {kind}" in words for kind in kinds), out


def test_export_counts_the_modules_of_the_caller(tmp_path, capfd):
    arguments = ["export", "tests.cli.conftest:synced", tmp_path / "m.onnx", "-i", "x:2,1,8,8", "--no-verify"]
    out, err = call(*arguments, capfd=capfd)
    assert re.search(r"sync batch norm\W+3\W+0\W", out), out
    assert re.search(r"│ batch norm\W+0\W+0\W", out), out
    assert "3 of 3 batch norms folded into convolutions" in err


@pytest.mark.parametrize("arguments", [["doctor"], ["inspect", "{0}/kept.onnx"], ["inspect", "{0}/kept.onnx", "-v"]])
def test_no_line_in_a_pipe_is_wider_than_120(arguments, small_files):
    done = warm.run("-m", "bnexport", *(each.format(small_files) for each in arguments), env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_the_doctor_says_nothing_twice(capfd):
    out, _ = call("doctor", capfd=capfd)
    values = re.findall(r"not asked: .*?(?= *│)", out)
    assert len(values) == len(set(values))


def test_verification_says_what_it_ran(small_files, tmp_path, capfd):
    """One format: difference, bound, engine with its version, sizes; `run` chooses the first of them."""
    form = r"differs by [\d.e-]+, allowed [\d.e-]+, in onnxruntime \d+\.\d+\.\d+, at 6 sizes: 2x1x32x32, 1x1x32x32, 3x1x17x21"
    kept, folded = small_files / "kept.onnx", tmp_path / "f.onnx"
    for arguments in (["fold", kept, folded], ["verify", kept, folded]):
        _, err = call(*arguments, capfd=capfd)
        assert re.search("verification passed: output 'output': " + form, err), err
    _, err = call("run", kept, capfd=capfd)
    assert re.match(r"inputs: x 2x1x32x32, seed 0; in onnxruntime \d+\.\d+\.\d+\n", err), err


def test_verify_with_a_provider(small_files, capfd):
    arguments = ["verify", small_files / "kept.onnx", small_files / "kept.onnx", "--provider"]
    _, err = call(*arguments, "cpu", capfd=capfd)
    assert re.search(r"in onnxruntime [\d.]+ \(CPUExecutionProvider\), at 6 sizes: 2x1x32x32", err), err
    assert main([*map(str, arguments), "warp"]) == 2
    assert "provider: got 'warp', expected one of" in capfd.readouterr().err
