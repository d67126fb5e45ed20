"""Names that a user types for a batch norm, and the line that a fold or an export with --bench ends with."""

from __future__ import annotations

import json
import re
import types
from collections.abc import Callable

import numpy as np
import onnx
import pytest

from bnexport.cli import latency
from bnexport.folding import fold
from tests.cli.conftest import HALF
from tests.support.onnx_text import model

NAMES = [
    "layer1.0.conv1/Conv",
    "layer1.0.bn1/BatchNormalization",
    "layer1.1.relu/Relu",
    "layer1.1.bn/BatchNormalization",
]


@pytest.fixture
def net(tmp_path):
    made = model(HALF)
    for name, node in zip(NAMES, made.graph.node):
        node.name = name
    onnx.save(made, tmp_path / "m.onnx")
    return tmp_path / "m.onnx"


FOLDED = "layer1.0.bn1: folded into layer1.0.conv1/Conv"
KEPT = "layer1.1.bn: kept: "


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("layer1.0.bn1", [FOLDED]),
        ("layer1.0.bn1/BatchNormalization", [FOLDED]),
        ("layer1.0", [FOLDED]),
        ("layer1/0/bn1", [FOLDED]),
        ("layer1.0.conv1", [FOLDED]),
        ("layer1", [FOLDED, KEPT]),
        ("layer1.1.relu", ["layer1.1.relu: no part of a batch norm"]),
    ],
)
def test_a_name_as_a_user_types_it(net, name, lines, call):
    code, out, err = call("fold", net, "--explain", name)
    assert (code, out) == (0, "")
    assert len(err.splitlines()) == len(lines)
    for line, begins in zip(err.splitlines(), lines):
        assert line.startswith(begins)
    assert [path.name for path in net.parent.iterdir()] == ["m.onnx"]


def test_find_in_a_report(net):
    report = fold(net).report
    assert [site.name for site in report.find("layer1")] == ["layer1.0.bn1", "layer1.1.bn"]
    assert report.find("layer1.0.conv1") == report.find("layer1.0.bn1") == (report.explain("layer1.0.bn1"),)
    assert report.find("nothing") == ()


LATENCIES = {
    "decided": ((1.0, 1.5) * 30, "0.62 times the latency of the unfolded model (0.62 to 0.62)"),
    "noisy": ((1.0,) * 40 + (4.0,) * 20, "latency too noisy to compare: 0.50, 0.50 to 2.00"),
}


@pytest.mark.parametrize("noise", LATENCIES)
def test_the_last_line_of_a_fold(net, tmp_path, noise, call, monkeypatch):
    after, said = LATENCIES[noise]
    monkeypatch.setattr(latency, "measure", lambda _: np.array([(2.0,) * 60, after]).reshape(2, 6, 10))
    code, out, err = call("fold", net, tmp_path / "f.onnx", "--bench", "--json", "-")
    assert code == 0
    last = err.splitlines()[-1]
    assert re.fullmatch(
        r"result: 1 fold proved, 0 compared only, .*; 1 batch norm left: layer1\.1\.bn \(.*Relu.*\); "
        + re.escape(said),
        last,
    ), last
    data = json.loads(out)
    assert data["latency_ratio"] == pytest.approx(np.median(after) / 2)
    assert data["latency_ratio_range"][0] <= data["latency_ratio"] <= data["latency_ratio_range"][1]


def test_the_last_line_where_nothing_was_folded(net, tmp_path, call):
    call("fold", net, tmp_path / "f.onnx")
    code, out, err = call("fold", tmp_path / "f.onnx", tmp_path / "g.onnx", "--bench", "--json", "-")
    last = err.splitlines()[-1]
    assert code == 0, last
    assert last.startswith("result: nothing folded; 1 batch norm left: layer1.1.bn (")
    assert last.endswith("; no latency to compare: it is the same model")
    assert json.loads(out)["latency_ratio"] is None


def test_the_last_line_without_a_verification(net, tmp_path, call):
    code, _, err = call("fold", net, tmp_path / "f.onnx", "--bench", "--no-verify")
    assert code == 0 and err.splitlines()[-1].startswith("result: not verified; 1 batch norm left: layer1.1.bn (")


@pytest.mark.parametrize("options", [(), ("--exporter", "torchscript")])
def test_an_export_says_the_same(options, tmp_path, call, monkeypatch):
    if options:  # also for the export that its latency is compared with
        monkeypatch.setattr("torch.export.export", None)
    page = tmp_path / "m.html"
    arguments = ("-i", "image:2,1,8,8", "--explain", "stem", "--bench", "--html", page, *options)
    code, _, err = call("export", "tests.cli.conftest:synced", tmp_path / "m.onnx", *arguments)
    assert code == 0, err
    assert re.search(r"^stem\S*: folded into stem", err, re.MULTILINE), err
    assert "note: input 'image' is forward's 'x'" in err
    assert re.search(r"^result: 3 folds proved, 0 compared only.*; 0 batch norms left; .*\d", err, re.MULTILINE), err
    text = page.read_text()
    assert "verification passed" in text and "tests.cli.conftest:synced" in text and "m.onnx" in text


def test_inspect_has_a_line_for_each_batch_norm(net, call):
    _, out, _ = call("inspect", net, code=0)
    assert "2 batch norms, with operator onnx:BatchNormalization" in out
    rows = [line for line in out.splitlines() if re.match(r"│ \S+/BatchNormalization +│", line)]
    assert [line.count("│") for line in rows] == [4, 4]  # three columns: no attribute differs
    assert "(N, 4, *, *)" not in out and "(N, 3, H, W)" in out
    changed = onnx.load(net)
    changed.graph.node[1].attribute.append(onnx.helper.make_attribute("epsilon", 0.5))
    onnx.save(changed, net)
    assert "epsilon=0.5" in call("inspect", net)[1]


def test_weights_in_constant_nodes_are_parameters(net, call):
    counts = [json.loads(call("inspect", net, "--json", "-")[1])["parameter_count"]]
    changed = onnx.load(net)
    (weight,) = (each for each in changed.graph.initializer if each.name == "w")
    changed.graph.initializer.remove(weight)
    changed.graph.node.insert(0, onnx.helper.make_node("Constant", [], ["w"], value=weight))
    onnx.save(changed, net)
    counts.append(json.loads(call("inspect", net, "--json", "-")[1])["parameter_count"])
    assert counts == [4 * 3 * 3 * 3 + 4 * (4 + 3)] * 2


def test_models_take_turns_and_the_slower_one_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    clock = [0.0]

    def model(name: str, seconds: float) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            clock[0] += seconds

        return run

    monkeypatch.setattr(latency, "time", types.SimpleNamespace(perf_counter=lambda: clock[0]))
    times = latency.measure([model("fast", 0.001), model("slow", 0.002)])
    turns = (["fast"] * 10 + ["slow"] * 20 + ["fast"] * 10) * 3
    assert calls == ["fast"] * 10 + ["slow"] * 10 + turns
    assert times == pytest.approx(np.broadcast_to(np.array([0.001, 0.002])[:, None, None], (2, 6, 10)))
    assert str(latency.ratio_of(times)) == "2.00, 2.00 to 2.00"


def test_a_ratio_is_decided_where_all_turns_agree() -> None:
    def ratio(*seconds: float) -> latency.Ratio:
        turns = np.repeat(np.array(seconds)[:, None], 10, axis=1)
        return latency.ratio_of(np.stack([np.full((6, 10), 2.0), turns]))

    faster = ratio(1.0, 1.0, 1.0, 1.8, 1.8, 1.8)
    assert faster.decided and str(faster) == "0.70, 0.50 to 0.90"
    noisy = ratio(1.0, 1.0, 1.0, 1.0, 1.0, 2.2)
    assert not noisy.decided and str(noisy) == "too noisy to compare: 0.50, 0.50 to 1.10"
