"""Pages of --html: complete, self-contained, and deaf to whatever a model file calls its nodes."""

from __future__ import annotations

import html.parser
import re
from pathlib import Path

import onnx
import pytest

from bnexport.cli import main
from bnexport.cli.output import write_page
from bnexport.pages import table
from tests.cli.conftest import HALF
from tests.support.onnx_text import model

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
