"""Tables and pages: what was not folded and why, no line too wide, and names of a file as text."""

from __future__ import annotations

import html.parser
import json
import re
from pathlib import Path

import onnx
import pytest

import bnexport
from bnexport.cli import main
from bnexport.cli.output import write_page
from bnexport.pages import table
from tests.cli.conftest import HALF
from tests.support import warm
from tests.support.onnx_text import model


@pytest.fixture
def half(tmp_path):
    onnx.save(model(HALF), tmp_path / "half.onnx")
    return tmp_path / "half.onnx"


def words(text):
    """The words of a table, whose cells may break anywhere."""
    return " ".join(re.sub("[│┃]", " ", text).split())


def test_a_fold_shows_what_stayed_and_why(half, tmp_path, call):
    _, out, err = call("fold", half, tmp_path / "f.onnx", code=0)
    assert "Not folded" in out and "second" in out and "Relu" in out
    assert "first" not in out
    assert "1 of 2 batch norms folded into convolutions" in err
    _, out, _ = call("fold", half, tmp_path / "f.onnx", "--overwrite", "-v", code=0)
    assert "first" in out and "second" in out


def test_where_all_is_folded_there_is_no_table_of_rows(small_files, tmp_path, call):
    _, out, err = call("fold", small_files / "kept.onnx", tmp_path / "f.onnx", code=0)
    assert out.count("\n") == 10 and "reason" not in out
    assert re.search(r"mmcv:MMCVSyncBatchNorm\W+3\W+0\W", out) and "Relu" not in out
    assert "3 of 3 batch norms folded into convolutions" in err
    _, out, err = call("fold", tmp_path / "f.onnx", tmp_path / "again.onnx", code=0)
    assert out.count("\n") == 9 and "nothing to fold" in err
    _, out, _ = call("fold", small_files / "kept.onnx", tmp_path / "f.onnx", "--overwrite", "-v", code=0)
    assert re.search(r"Relu\W+3\W+3\W", out)


def test_several_models_are_put_side_by_side(half, tmp_path, call):
    call("fold", half, tmp_path / "f.onnx", code=0)
    call("inspect", half, tmp_path / "f.onnx", "--json", tmp_path / "both.json", code=0)
    _, out, _ = call("inspect", half, tmp_path / "f.onnx", code=0)
    shown, told = words(out), ("BatchNormalization 2 1", "nodes 4 3", "-v shows all")
    assert all(text in shown for text in told) and "Relu" not in shown
    assert "Relu 1 1" in words(call("inspect", half, tmp_path / "f.onnx", "-v", code=0)[1])
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


def test_operators_add_up(tmp_path, call):
    kinds = ["Relu", "Neg", "Abs", "Exp", "Sin", "Cos", "Tan", "Erf", "Sqrt", "Ceil"]
    text = " ".join(f"v{index + 1} = {kind} (v{index})" for index, kind in enumerate(kinds))
    onnx.save(model(f"g (float[2] v0) => (float[2] v{len(kinds)}) {{ {text} }}"), tmp_path / "m.onnx")
    assert "and 2 of 2 more kinds" in words(call("inspect", tmp_path / "m.onnx", code=0)[1])
    shown = words(call("inspect", tmp_path / "m.onnx", "-v", code=0)[1])
    assert all(f"1 {kind}" in shown for kind in kinds), shown


def test_export_counts_the_modules_of_the_caller(tmp_path, call):
    arguments = ["export", "tests.cli.conftest:synced", tmp_path / "m.onnx", "-i", "x:2,1,8,8", "--no-verify"]
    _, out, err = call(*arguments, code=0)
    assert re.search(r"sync batch norm\W+3\W+0\W", out), out
    assert re.search(r"│ batch norm\W+0\W+0\W", out), out
    assert "3 of 3 batch norms folded into convolutions" in err


@pytest.mark.parametrize("arguments", [["doctor"], ["inspect", "{0}/kept.onnx"], ["inspect", "{0}/kept.onnx", "-v"]])
def test_no_line_in_a_pipe_is_wider_than_120(arguments, small_files):
    done = warm.run("-m", "bnexport", *(each.format(small_files) for each in arguments), env={"PATH": "/usr/bin:/bin"})
    assert done.returncode == 0, done.stderr
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_the_doctor_says_nothing_twice(call):
    _, out, _ = call("doctor", code=0)
    values = re.findall(r"not asked: .*?(?= *│)", out)
    assert len(values) == len(set(values))


def test_verification_says_what_it_ran(small_files, tmp_path, call):
    """One format: difference, bound, engine with its version, sizes; `run` chooses the first of them."""
    form = r"differs by [\d.e-]+, allowed [\d.e-]+, in onnxruntime \d+\.\d+\.\d+, at 6 sizes: 2x1x32x32, 1x1x32x32, 3x1x17x21"
    kept, folded = small_files / "kept.onnx", tmp_path / "f.onnx"
    for arguments in (["fold", kept, folded], ["verify", kept, folded]):
        _, _, err = call(*arguments, code=0)
        assert re.search("verification passed: output 'output': " + form, err), err
    _, _, err = call("run", kept, code=0)
    assert re.match(r"inputs: x 2x1x32x32, seed 0; in onnxruntime \d+\.\d+\.\d+\n", err), err


def test_verify_with_a_provider(small_files, call):
    command = ["verify", small_files / "kept.onnx", small_files / "kept.onnx", "--provider"]
    err = call(*command, "cpu", code=0)[2]
    assert re.search(r"in onnxruntime [\d.]+ \(CPUExecutionProvider\), at 6 sizes: 2x1x32x32", err), err


TAGS = {"html", "meta", "title", "style", "p", "table", "caption", "tr", "th", "td"}
ATTACKS = {
    "script": "<script>alert(1)</script>",
    "attribute": '"><img src=x onerror=alert(1)>',
    "style": "</style><style>*{display:none}",
    "entity": "&lt;script&gt;",
    "comment": "<!--",
    "format": "{} {0.__class__} %s",
    "title": "</title><script>alert(1)</script>",
}


class Page(html.parser.HTMLParser):
    """What a browser would see: tags, attributes and text."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"url\(|@import|https?:", text)
        self.feed(text)
        self.close()
        assert set(self.tags) <= TAGS
        assert self.attributes <= {"lang", "charset", "http-equiv", "content", "class"}
        assert self.tags.count("style") == self.tags.count("html") == 1

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_names_are_text_whatever_they_say(attack: str, tmp_path: Path) -> None:
    write_page(tmp_path / "p.html", [attack], [table(attack, ["a", attack], [[attack, 3]] * 2, right=["a"])])
    page = Page(tmp_path / "p.html")
    assert page.text.count(attack) == 5
    assert page.tags.count("td") == 4


def test_hidden_and_reordering_characters_are_shown(tmp_path: Path) -> None:
    write_page(tmp_path / "p.html", ["a\u202eb\x00c\u200bd\x1b[31m"], [])
    assert "a\ufffdb\ufffdc\ufffdd\ufffd[31m" in Page(tmp_path / "p.html").text


def test_the_pages_of_fold_and_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    proto = model(HALF)
    for node in proto.graph.node:
        node.name = f"{node.op_type}<script>"
    onnx.save(proto, "m.onnx")
    assert main(["fold", "m.onnx", "f.onnx", "--html", "f.html"]) == 0
    text = Page(tmp_path / "f.html").text
    for part in ("1 of 2 batch norms folded", "BatchNormalization<script>", "proved, within", "verification passed"):
        assert part in text, part
    for options, code, part in (
        ([], 0, "verification passed: output 'y': differs by"),
        (["--atol", "0"], 1, "verification failed"),
        (["--atol", "0.5", "--rtol", "0.25"], 0, "0.5 + 0.25 |y|"),
    ):
        assert main(["verify", "m.onnx", "f.onnx", "--html", "v.html", *options]) == code
        assert part in Page(tmp_path / "v.html").text


def test_a_page_has_every_batch_norm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    nodes = " ".join(f"x{i + 1} = Norm (r{i}, p:4) r{i + 1} = Sin (x{i + 1})" for i in range(501))
    onnx.save(model(f"g (float[N,4] r0) => (float[N,4] r501) {{ {nodes} }}"), "m.onnx")
    assert main(["fold", "m.onnx", "f.onnx", "--no-verify", "--html", "f.html"]) == 0
    assert Page(tmp_path / "f.html").text.count("BatchNormalization -> x") == 501
