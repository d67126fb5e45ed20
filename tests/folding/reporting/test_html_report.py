"""The HTML report: complete, self-contained, and deaf to whatever a model file calls its nodes."""

import dataclasses
import html.parser
import json
import re

import onnx
import pytest
import torch
from torch import nn

import bnexport
from bnexport.cli import main
from bnexport.folding.report import Counts, FoldReport, Refusal, SiteReport, render_html
from bnexport.verification.verdict import Verification
from tests.folding.module.nets import trained

TAGS = {
    *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "b", "span", "small", "code", "br"),
    *("table", "thead", "tbody", "tr", "th", "td", "svg", "rect", "line", "text"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "role", "aria-label", "aria-hidden"),
    *("width", "height", "x", "y", "rx", "x1", "x2", "y1", "y2", "text-anchor"),
}
CLASSES = {
    *("file", "tiles", "tile", "scroll", "name", "number", "chart", "reason", "grid", "mark", "limit", "badge"),
    *("folded", "proved", "compared", "merged", "converted", "kept", "passed", "failed", "verify"),
}
ATTACKS = {
    "script": "<script>alert(1)</script>",
    "attribute": '"><img src=x onerror=alert(1)>',
    "single quotes": "' onmouseover='alert(1)",
    "svg": "</svg><svg onload=alert(1)>",
    "style": "</style><style>*{display:none}",
    "entity": "&lt;script&gt;",
    "comment": "<!--",
    "template": "{{7*7}}${7*7}",
    "title": "</title><script>alert(1)</script>",
}


class Page(html.parser.HTMLParser):
    """What a browser would see: tags, attributes and text."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.tags, self.attributes, self.text, self.rects = [], [], "", []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag == "rect":
            self.rects.append(dict(attrs))

    def handle_data(self, data):
        self.text += data


def report(name="conv1.bn", **changes):
    refusal = Refusal("backward", name, "not-linear", f"its input comes from {name}")
    folded = SiteReport(
        (name, "other"), "BatchNormalization", name, "folded", ("conv",), (name,), (), False, 8, 0.5, 20.0
    )
    kept = SiteReport((f"{name}!",), name, "main graph", "kept", (), (), (refusal,), False, 4, 0.0, 1.0)
    made = FoldReport((folded, kept), Counts(9, 2, 0, 4096), Counts(8, 1, 0, 4000), False, None, name, name)
    return dataclasses.replace(made, **changes).to_dict()


def result(name="out", **changes):
    output = {
        "name": name,
        "dtype": "float32",
        "elements": 4,
        "max_abs_diff": 1e-6,
        "max_rel_diff": 1e-6,
        "atol": 1e-4,
        "rtol": 0.0,
        "passed": True,
        "reason": None,
    }
    made = Verification("passed", engine="onnxruntime", samples=2).to_dict()
    return made | {"outputs": [output | changes]}


def check(page):
    """Nothing but the page's own tags, attributes and classes, and nothing that loads anything."""
    parsed = Page(page)
    assert set(parsed.tags) <= TAGS, set(parsed.tags) - TAGS
    assert {name for name, _ in parsed.attributes} <= ATTRIBUTES
    assert {word for name, value in parsed.attributes if name == "class" for word in value.split()} <= CLASSES
    assert not re.search(r"url\(|@import|https?:", page)
    assert parsed.tags.count("style") == parsed.tags.count("html") == 1
    return parsed


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_names_are_text_whatever_they_say(attack):
    data = report(attack)
    data["verification"] = result(attack, dtype=attack, reason=attack) | {"reason": attack, "engine": attack}
    parsed = check(render_html(data))
    clean = check(render_html(report("x") | {"verification": result("x", reason="x") | {"reason": "x", "engine": "x"}}))
    assert parsed.tags == clean.tags
    assert parsed.text.count(attack) >= 12


@pytest.mark.parametrize("key", ["outcome", "op_type", "graph", "scale_min", "scale_max", "channels"])
def test_every_field_of_a_site_may_lie(key):
    """The JSON may have been edited: text in the place of a number or of a known word."""
    data = report()
    data["sites"][0][key] = ATTACKS["attribute"]
    check(render_html(data))


@pytest.mark.parametrize("key", ["max_abs_diff", "atol", "rtol", "name", "dtype"])
def test_every_field_of_an_output_may_lie(key):
    check(render_html(report() | {"verification": result(**{key: ATTACKS["attribute"]}) | {"status": 'x" y="'}}))


def test_hidden_and_reordering_characters_are_shown():
    text = check(render_html(report("a\u202eb\x00c\u200bd\x1b[31m"))).text
    assert "a\ufffdb\ufffdc\ufffdd\ufffd[31m" in text
    assert not {character for character in text if not character.isprintable()} - {"\n"}


def test_endless_names_end():
    assert len(render_html(report("n" * 100_000))) < 40_000


def test_it_says_what_happened():
    data = report() | {"verification": result(), "meaning_changed": True}
    text = check(render_html(data)).text
    for part in (
        *("1 of 2", "2 → 1", "9 → 8", "4 KiB → 3.906 KiB", "passed", "The graph trained."),
        *("conv1.bn + other", "by conv", "its input comes from conv1.bn", "kept", "0.0001", "1e-06"),
        "Compared with the original on 2 inputs in onnxruntime.",
    ):
        assert part in text, part


def test_charts_are_to_scale():
    """A common axis from 0.1 to 100: 0.5 to 20 lies between 23 % and 77 % of it."""
    data = report()
    data["sites"] = [
        data["sites"][0] | {"scale_min": low, "scale_max": high} for low, high in ((0.1, 100.0), (0.5, 20.0))
    ]
    whole, part = (({key: float(rect[key]) for key in ("x", "width")}) for rect in check(render_html(data)).rects)
    assert (part["x"] - whole["x"]) / whole["width"] == pytest.approx(0.233, abs=0.002)
    assert part["width"] / whole["width"] == pytest.approx(0.534, abs=0.002)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), 5e-324, 1.7e308, 10**400, -1.0, None])
def test_values_off_the_scale(value):
    data = report() | {"verification": result(max_abs_diff=value, atol=value)}
    data["sites"][0].update(scale_min=value, scale_max=value)
    for rect in check(render_html(data)).rects:
        assert 0 <= float(rect["x"]) <= 168
        assert 0 <= float(rect["width"]) <= 168


@pytest.mark.parametrize("status", ["failed", "not_verified"])
def test_what_failed_or_was_not_checked(status):
    verification = Verification(status, "no engine runs it").to_dict()
    text = check(render_html(report() | {"verification": verification})).text
    assert status.replace("_", " ") in text
    assert "no engine runs it" in text


def test_a_model_without_batch_norms():
    counts = Counts(3, 0, 0, 12)
    text = check(render_html(FoldReport((), counts, counts, False).to_dict())).text
    assert "0 of 0" in text
    assert "It was not run." in text


def test_command_line(tmp_path, capsys):
    net = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)))
    bnexport.export(net, torch.randn(2, 3, 6, 6), tmp_path / "m.onnx", fold=False)
    model = onnx.load(tmp_path / "m.onnx")
    for node in model.graph.node:
        node.name = f"{node.name}<script>"
    onnx.save(model, tmp_path / "m.onnx")
    page = tmp_path / "report.html"
    assert main(["fold", str(tmp_path / "m.onnx"), str(tmp_path / "f.onnx"), "--html", str(page), "--json", "-"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert page.read_text(encoding="utf-8") == render_html(data)
    parsed = check(page.read_text(encoding="utf-8"))
    assert "1 of 2" in parsed.text
    assert "<script>" in parsed.text
    assert not list(tmp_path.glob("*.part"))


def test_the_report_of_a_module():
    net = trained(nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)))
    parsed = check(render_html(bnexport.fold_module(net, torch.randn(2, 3, 6, 6)).fold_report.to_dict()))
    assert "1 of 1" in parsed.text
