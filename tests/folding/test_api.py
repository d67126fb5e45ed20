"""fold, verify, inspect and the report: files, options, failures."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import numpy as np
import onnx
import pytest

import bnexport.folding.context
from bnexport import schema, verify
from bnexport.errors import UnsupportedModelError, UsageError, VerificationError
from bnexport.folding import fold, inspect, render
from bnexport.model_io import as_model, load, save, to_proto
from tests.support.onnx_text import batch_norms, model

NODES = "z = Conv (x, w:8.6.3.3) t = Norm (z, p:8) r = Relu (t) y = Norm (r, q:8)"


def two_norms(nodes: str = NODES, **options: str) -> onnx.ModelProto:
    proto = model(f"g (float[N,6,H,W] x) => (float[N,8,A,B] y) {{ {nodes} }}", **options)
    proto.graph.node[1].name, proto.graph.node[3].name = "first", "second"
    return proto


@pytest.fixture
def source(tmp_path: Path) -> Path:
    onnx.save(two_norms(), tmp_path / "source.onnx")
    return tmp_path / "source.onnx"


def test_files(source: Path, tmp_path: Path) -> None:
    before = source.read_bytes()
    result = fold(source, tmp_path / "target.onnx")
    assert source.read_bytes() == before
    assert sorted(os.listdir(tmp_path)) == ["source.onnx", "target.onnx"]
    assert batch_norms(onnx.load(tmp_path / "target.onnx")) == 1
    assert verify(source, tmp_path / "target.onnx").passed
    assert (result.report.before.batch_norm, result.report.after.batch_norm) == (2, 1)
    assert not result.report.meaning_changed
    assert repr(result) == "FoldResult(Model, FoldReport(1 of 2 batch norms folded into convolutions, passed))"


def test_the_report_is_data_and_a_table(source: Path) -> None:
    """Of very many sites, the table has 500 that were not folded; the caption says what is missing."""
    report = fold(source).report
    data = json.loads(json.dumps(report.to_dict()))
    assert data["schema_version"] == 1
    assert (data["before"]["batch_norm"], data["after"]["batch_norm"]) == (2, 1)
    assert (data["sites"][0]["outcome"], data["sites"][0]["rules"]) == ("folded", ["conv"])
    assert data["verification"]["passed"] is True
    kept = report.explain("second")
    assert (kept.outcome, {refusal.rule for refusal in kept.refusals}) == ("kept", {"backward", "forward"})
    assert "Relu" in kept.reason
    assert report.summary() == "1 of 2 batch norms folded into convolutions"
    assert list(render(report)[0].columns[0].cells) == ["second"]
    assert len(render(report, everything=True)[0].rows) == 2
    table = render(dataclasses.replace(report, sites=report.sites * 600))[0]
    assert list(table.columns[0].cells) == ["second"] * 500
    assert table.caption == "600 of 1,200 folded; these are the first 500 of the others, --json and --html have all"
    everything = dataclasses.replace(report, sites=report.folded * 501)
    assert "Before and after" in [table.title for table in render(everything)]
    table = render(everything, everything=True)[0]
    assert list(table.columns[0].cells) == ["first"] * 500
    assert table.caption == "501 of 501 folded; these are the first 500, --json and --html have all"


def test_only_and_skip(source: Path, tmp_path: Path) -> None:
    for options in ({"only": ["second"]}, {"skip": ["first"]}):
        report = fold(source, **options).report  # type: ignore[arg-type]
        assert not report.folded
        assert [refusal.code for refusal in report.explain("first").refusals] == ["skipped"]
    for options, message in (
        ({"only": ["secnd"]}, "only: got 'secnd', expected a batch norm of the model: first, second; .* 'second'"),
        ({"only": ["Conv -> z"]}, "only: got 'Conv -> z', expected a batch norm of the model: first, second"),
        ({"skip": ["first", "typo"]}, "skip: got 'typo', expected a batch norm of the model: first, second"),
        ({"skip": "first"}, "skip: got the string 'first', expected a list of names"),
    ):
        with pytest.raises(UsageError, match=message):
            fold(source, tmp_path / "target.onnx", **options)  # type: ignore[arg-type]
        assert os.listdir(tmp_path) == ["source.onnx"]


def test_a_training_step_is_no_source(source: Path) -> None:
    proto = onnx.load(source)
    proto.metadata_props.add(key=schema.TRAINING_METADATA, value="{}")
    with pytest.raises(UnsupportedModelError, match="model: it is a training step, no inference model"):
        fold(proto)


def test_a_wrong_fold_is_not_written(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = bnexport.folding.context.scale_small
    monkeypatch.setattr(
        "bnexport.folding.context.scale_small", lambda weight, factor, *rest: real(weight, factor * 1.001, *rest)
    )
    with pytest.raises(VerificationError, match="first") as caught:
        fold(source, tmp_path / "target.onnx")
    assert "differs by" in str(caught.value)
    assert os.listdir(tmp_path) == ["source.onnx"]
    # Without the check it is written as asked.
    fold(source, tmp_path / "target.onnx", verify=False)
    assert not verify(source, tmp_path / "target.onnx").passed


def test_not_verified_is_said(tmp_path: Path) -> None:
    header = '<ir_version: 8, opset_import: ["": 17, "other": 1]>'
    source = two_norms(NODES.replace("Relu", "other.Secret"), header=header)
    verdict = fold(source, tmp_path / "target.onnx", verify="whole").report.verification
    assert (verdict.status, bool(verdict.reason), verdict.passed) == ("not_verified", True, False)
    assert (tmp_path / "target.onnx").exists()


def test_verify(source: Path) -> None:
    proto = onnx.load(source)
    weight = proto.graph.initializer[0]
    weight.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weight) * np.float32(1.01), weight.name))
    result = verify(source, proto)
    assert (result.status, result.passed) == ("failed", False)
    assert result.max_abs_diff > result.outputs[0].atol
    assert verify(source, proto, atol=2 * result.max_abs_diff).passed
    assert not verify(source, proto, atol=0.0).passed
    proto.graph.output.append(onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, None))
    assert "outputs differ" in str(verify(source, proto).reason)
    proto = onnx.load(source)
    proto.graph.node[2].op_type = "NoSuchOperator"
    assert (verify(source, proto).status, verify(proto, source).status) == ("failed", "not_verified")
    first, second = (
        model(f"g (int64[N,3] x) => (int64[N,3] y) {{ y = {node} }}") for node in ("Identity (x)", "Add (x, x)")
    )
    assert verify(first, first).passed
    assert "values differ" in str(verify(first, second).reason)
    sample = {"x": np.ones((1, 6, 5, 5), np.float32)}
    assert [verify(source, source, inputs=each).samples for each in (sample, [sample, sample])] == [1, 2]


def test_inspect(source: Path, tmp_path: Path) -> None:
    report = inspect(source)
    assert (report.op_counts, report.opsets) == ({"BatchNormalization": 2, "Conv": 1, "Relu": 1}, {"": 17})
    assert [info.channels for info in report.batch_norms] == [8, 8]
    free = model("g (float[N,C] x, float[C] p) => (float[N,C] y) { y = BatchNormalization (x, p, p, p, p) }")
    assert inspect(free).batch_norms[0].channels is None
    assert report.parameter_bytes == 4 * (8 * 6 * 3 * 3 + 2 * 4 * 8)
    assert report.inputs[0].shape == ("N", 6, "H", "W")
    json.dumps(report.to_dict())
    # Large tensors inside the model file are no external data.
    proto = model("g (float[N,64] x) => (float[N,64] y) { y = MatMul (x, w:64.64) }")
    onnx.save(proto, tmp_path / "inside.onnx")
    save(as_model(proto), tmp_path / "outside.onnx", external_data=True)
    files = [inspect(tmp_path / f"{name}.onnx").external_files for name in ("inside", "outside")]
    assert files == [(), ("outside.onnx.data",)]


def test_over_its_own_weights(tmp_path: Path) -> None:
    """Lazy weights lie in the file that is replaced: the result is read from the new one."""
    proto = model("g (float[N,64,H,W] x) => (float[N,64,A,B] y) { z = Conv (x, w:64.64.3.3) y = Norm (z, p:64) }")
    for external_data in (False, True):
        save(as_model(proto), tmp_path / "m.onnx", external_data=external_data)
        result = fold(tmp_path / "m.onnx", tmp_path / "m.onnx", overwrite=True)
        assert result.report.verification.passed
        assert to_proto(result.model) == to_proto(load(tmp_path / "m.onnx"))
        assert bool(inspect(tmp_path / "m.onnx").external_files) == external_data


def test_a_note_where_one_message_is_too_small(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bnexport.model_io.write.PROTOBUF_LIMIT", 1500)
    report = fold(source, tmp_path / "target.onnx").report
    assert "target.onnx.data" in report.notes[0]
    assert json.loads(json.dumps(report.to_dict()))["notes"] == list(report.notes)
    assert verify(source, tmp_path / "target.onnx").passed


@pytest.mark.parametrize(
    ("name", "scopes", "path"),
    [
        ("/backbone/layer1/layer1.0/bn1/BatchNormalization", "", "backbone.layer1.0.bn1"),
        ("backbone.bn1/BatchNormalization_1", "", "backbone.bn1"),
        ("node_batch_norm_3", "['', 'backbone', 'backbone.bn1', 'batch_norm_3']", "backbone.bn1"),
        ("StatefulPartitionedCall/net/bn1/FusedBatchNormV3", "", ""),
        ("node_batch_norm_3", "not a list", ""),
        ("", "", ""),
    ],
    ids=["torchscript exporter", "ours", "dynamo exporter", "another", "no scopes", "no name"],
)
def test_a_batch_norm_is_called_as_its_module(name: str, scopes: str, path: str) -> None:
    """In reports, in `explain`, `only` and `skip`; the node's own name works as well."""
    proto = two_norms()
    node = proto.graph.node[1]
    node.name = name
    if scopes:
        node.metadata_props.add(key="pkg.torch.onnx.name_scopes", value=scopes)
    site = fold(proto).report.sites[0]
    assert site.modules == ((path,) if path else ())
    assert site.name == (path or site.nodes[0])
    for chosen in {site.name, site.nodes[0]}:
        report = fold(proto, skip=[chosen]).report
        assert (report.sites[0].outcome, report.explain(chosen)) == ("kept", report.sites[0])
        assert fold(proto, only=[chosen]).report.folded
    with pytest.raises(UsageError, match=f"did you mean {path!r}" if path else "only: got"):
        fold(proto, only=[f"{path}x"])
