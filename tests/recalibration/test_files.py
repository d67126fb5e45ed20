"""Statistics of ONNX files that are re-estimated on data, in Python and on the command line, and the page of what changed."""

import html
import json
import re
import threading
import warnings
from concurrent import futures
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import bnexport
from bnexport import schema
from bnexport.cli import main
from bnexport.errors import UsageError
from bnexport.recalibration import files, moments
from bnexport.recalibration.files import open_rows
from tests.recalibration.test_modules import Net, rows, split
from tests.support.onnx_text import exact, in_double, model

BODY = """a = Conv (x, w1:4.3.1.1) b = Norm (a, n1:4) c = Relu (b)
    d = Conv (c, w2:4.4.1.1) e = Norm (d, n2:4) f = Add (c, e) y = Norm (f, n3:4)"""
ONE = "a = Conv (x, w1:4.3.1.1) y = Norm (a, n1:4)"


def data(count: int = 12, seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).normal(1, 2, (count, 3, 5, 5)).astype(np.float32)


def net(body: str = BODY, **options: Any) -> onnx.ModelProto:
    return model(f"net (float[N, 3, H, W] x) => (float[N, C, H2, W2] y) {{ {body} }}", **options)


def stored(proto: onnx.ModelProto) -> dict[str, np.ndarray[Any, Any]]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}


def assert_near(got: Any, expected: Any, bound: float = 3e-6) -> None:
    for name, vector in expected.items():
        np.testing.assert_allclose(got[name], vector, rtol=bound, atol=bound, err_msg=name)


def joint(proto: onnx.ModelProto, x: np.ndarray[Any, Any]) -> dict[str, np.ndarray[Any, Any]]:
    """The statistics of all rows at once, in float64, layer after layer."""
    proto = in_double(proto)
    found: dict[str, np.ndarray[Any, Any]] = {}
    norms = [node for node in proto.graph.node if node.op_type == "BatchNormalization"]
    for node in norms:
        cut = onnx.ModelProto()
        cut.CopyFrom(proto)
        del cut.graph.output[:]
        cut.graph.output.append(onnx.helper.make_tensor_value_info(node.input[0], onnx.TensorProto.DOUBLE, None))
        (values,) = exact(cut, {"x": x.astype(np.float64)})
        axes = (0, *range(2, values.ndim))
        new = {node.input[3]: values.mean(axes), node.input[4]: values.var(axes, ddof=1)}
        found.update(new)
        for tensor in proto.graph.initializer:
            if tensor.name in new:
                tensor.CopyFrom(onnx.numpy_helper.from_array(new[tensor.name], tensor.name))
    return found


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(0, 12), max_size=4))
def test_one_by_one_is_one_pass_over_all_rows(cuts: list[int]) -> None:
    proto, x = net(), data()
    batches = [(each, "a label") for each in split(torch.from_numpy(x), cuts)]  # as a loader gives them
    result = bnexport.recalibrate_file(proto, None, batches)
    expected, got = joint(proto, x), stored(result.model)
    assert len(expected) == 6
    assert_near(got, expected)
    assert (result.report.passes, result.report.rows) == (3, 12)
    others = {name: array for name, array in stored(proto).items() if name not in expected}
    assert all(np.array_equal(got[name], array) for name, array in others.items())


@pytest.mark.parametrize(("mode", "exporter"), [("one_by_one", "torchscript"), ("together", None)])
def test_a_file_and_its_module_agree(tmp_path: Path, mode: str, exporter: Any) -> None:
    module, x = Net().eval(), rows().float()
    options = {"exporter": exporter, "fold": False, "simplify": False, "verify": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        bnexport.export(module, (x[:2],), tmp_path / "a.onnx", **options)
    batches = split(x, [6, 13])
    report = bnexport.recalibrate(module, batches, layers=mode)
    paths, arrays = (tmp_path / "a.onnx", tmp_path / "b.onnx"), [each.numpy() for each in batches]
    result = bnexport.recalibrate_file(*paths, arrays, layers=mode)
    assert len(result.report.layers) == len(report.layers) == 5
    ours = {tuple(np.round(layer.new_mean, 3)): layer for layer in result.report.layers}
    for layer in report.layers:
        twin = ours[tuple(np.round(layer.new_mean, 3))]
        np.testing.assert_allclose(twin.new_var, layer.new_var, rtol=2e-5)
        np.testing.assert_allclose(twin.new_mean, layer.new_mean, rtol=2e-5, atol=2e-6)
    kept = [array for array in stored(onnx.load(tmp_path / "b.onnx")).values() if array.ndim == 1]
    for layer in result.report.layers:
        assert any(len(array) == len(layer.new_var) and np.allclose(array, layer.new_var, rtol=1e-6) for array in kept)


def test_together_measures_in_float64_what_each_node_saw() -> None:
    proto, x = net(), data()
    result = bnexport.recalibrate_file(proto, None, iter([{"x": x[:5]}, {"x": x[5:]}]), layers="together")
    first = result.report.layers[0]
    conv = net("y = Conv (x, w1)", values={"w1": stored(proto)["w1"]})
    (values,) = exact(in_double(conv), {"x": x.astype(np.float64)})
    np.testing.assert_allclose(first.new_mean, values.mean((0, 2, 3)), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(first.new_var, values.var((0, 2, 3), ddof=1), rtol=1e-6)


@pytest.mark.parametrize("kernel", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_moments_of_an_array(monkeypatch: pytest.MonkeyPatch, kernel: bool, dtype: Any) -> None:
    if not kernel:
        monkeypatch.setattr(moments, "_kernel", lambda: None)
        monkeypatch.setattr(moments, "_PIECE", 100)
    x = data(7).astype(dtype) + dtype(100)
    count, mean, m2 = moments.parts(moments.of_array(x))
    wide = x.astype(np.float64)
    assert count == 7 * 25
    np.testing.assert_allclose(mean, wide.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(m2, ((wide - wide.mean((0, 2, 3), keepdims=True)) ** 2).sum((0, 2, 3)), rtol=1e-7)


def test_sync_batch_norms_and_training_nodes() -> None:
    body = """a = Conv (x, w1:4.3.1.1)
        b = mmcv.MMCVSyncBatchNorm <training_mode = 1> (a, n1_m:4, n1_v:4, n1_s:4, n1_b:4) y = Relu (b)"""
    proto = net(body, header=f'<ir_version: 8, opset_import: ["": 17, "{schema.DOMAIN}": {schema.VERSION}]>')
    x = data()
    result = bnexport.recalibrate_file(proto, None, [{"x": x}])
    assert_near(stored(result.model), joint(net(ONE, values=stored(proto)), x))
    assert [node.op_type for node in result.model.graph.node] == ["Conv", "MMCVSyncBatchNorm", "Relu"]


def test_a_tensor_that_two_layers_share_is_not_shared_afterwards() -> None:
    proto, x = net(f"{ONE.replace('y =', 'b =')} y = BatchNormalization (b, n2_s:4, n2_b:4, n1_m, n1_v)"), data()
    result = bnexport.recalibrate_file(proto, None, [{"x": x}])
    first, second = (node for node in result.model.graph.node if node.op_type == "BatchNormalization")
    assert first.input[3] != second.input[3]
    values, new = stored(result.model), result.report.layers
    np.testing.assert_allclose(values[first.input[3]], new[0].new_mean, rtol=1e-6)
    np.testing.assert_allclose(values[second.input[4]], new[1].new_var, rtol=1e-6)
    (note,) = result.report.notes
    assert note.startswith(f"{new[0].name}, {new[1].name} had one running mean and get one each")


def test_equal_layers_that_an_exporter_wrote_once_are_two_layers() -> None:
    """TorchScript's exporter does so with layers that were just made."""
    body = "x4 = Conv (x, w1:4.3.1.1) z4 = Neg (x4) a = Norm (x4, n1:4) b = Norm (z4, n1) y = Add (a, b)"
    report = bnexport.recalibrate_file(net(body), None, [{"x": data()}]).report
    first, second = report.layers
    assert first.name != second.name and np.abs(first.new_mean).max() > 0.1
    np.testing.assert_allclose(first.new_mean, -second.new_mean, rtol=1e-6)
    np.testing.assert_allclose(first.new_var, second.new_var, rtol=1e-6)


def test_what_does_not_fit_into_memory_runs_again(monkeypatch: pytest.MonkeyPatch) -> None:
    proto, batches = net(), [{"x": data()[:5]}, {"x": data()[5:]}]
    kept = bnexport.recalibrate_file(proto, None, batches).model
    monkeypatch.setattr(files, "KEPT", 100)
    again = bnexport.recalibrate_file(proto, None, batches).model
    assert kept.SerializeToString() == again.SerializeToString()


def test_a_branch_of_the_model_runs_as_in_the_model() -> None:
    start, end = "a = Conv (x, w1:4.3.1.1) b = Norm (a, n1:4)", "y = Norm (c, n2:4)"
    branches = """s = ReduceSum <keepdims = 0> (x) big = Greater (s, zero)
        c = If (big) <
            then_branch = t () => (float[N, 4, H, W] c1) { c1 = Relu (b) },
            else_branch = e () => (float[N, 4, H, W] c2) { c2 = Neg (b) }
        >"""
    proto = net(f"{start} {branches} {end}", values={"zero": np.float32(0)})
    for taken, x in (("Relu", np.abs(data())), ("Neg", -np.abs(data()))):
        expected = joint(net(f"{start} c = {taken} (b) {end}"), x)
        assert_near(stored(bnexport.recalibrate_file(proto, None, [{"x": x}]).model), expected)


def _member(group: Any, sizes: list[list[int]], layers: str) -> dict[str, np.ndarray[Any, Any]]:
    options = {"layers": layers, "process_group": group}
    return stored(bnexport.recalibrate_file(net(), None, _batches(group.rank(), sizes), **options).model)


def _batches(rank: int, sizes: list[list[int]]) -> list[np.ndarray[Any, Any]]:
    return np.split(data(), np.cumsum(sizes[0] + sizes[1]))[rank * len(sizes[0]) :][: len(sizes[rank])]


@pytest.mark.parametrize("layers", ["one_by_one", "together"])
@pytest.mark.parametrize("sizes", [[[4, 3], [5]], [[], [8, 4]]], ids=str)
def test_processes_have_the_statistics_of_all_rows(cluster: Any, sizes: list[list[int]], layers: str) -> None:
    batches = _batches(0, sizes) + _batches(1, sizes)
    expected = stored(bnexport.recalibrate_file(net(), None, batches, layers=layers).model)
    first, second = cluster.call(2, _member, sizes, layers)
    assert_near(first, expected, 1e-6)
    assert_near(first, second, 0)


def test_processes_of_another_library() -> None:
    """Threads here, which exchange by a list and a barrier."""
    sizes, values, meet = [[4, 3], [5]], [None, None], threading.Barrier(2, timeout=60)

    def member(rank: int) -> dict[str, np.ndarray[Any, Any]]:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            meet.wait()
            gathered = list(values)
            meet.wait()
            return gathered

        return stored(bnexport.recalibrate_file(net(), None, _batches(rank, sizes), process_group=gather).model)

    with futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(member, range(2))
    assert_near(first, stored(bnexport.recalibrate_file(net(), None, [data()[:12]]).model), 1e-6)
    assert_near(first, second, 0)


def test_what_is_left_alone_is_named() -> None:
    body = """a = Conv (x, w1:4.3.1.1) m = Neg (n1_m:4)
        b = BatchNormalization (a, n1_s:4, n1_b:4, m, n1_v:4) y = Norm (b, n2:4)"""
    report = bnexport.recalibrate_file(net(body), None, [{"x": data()}]).report
    assert len(report.layers) == 1 and "computed, not stored" in report.left[0][1]
    assert "nothing was changed" in bnexport.recalibrate_file(net("y = Relu (x)"), None, []).report.summary()
    report = bnexport.recalibrate_file(net("k = Norm (w1:4.3.1.1, n1:3) y = Conv (x, k)"), None, []).report
    assert not report.layers and report.left[0][1] == "its input is a constant"


def test_untrained_layers_whose_zeros_are_stored_once_are_not_one_module() -> None:
    body = "a = BatchNormalization (x, s, b, m, v) y = BatchNormalization (a, s, b, m, v)"
    values = {name: np.full(3, number, np.float32) for name, number in zip("sbmv", (1, 0, 0, 1), strict=True)}
    report = bnexport.recalibrate_file(net(body, values=values), None, [{"x": data()}]).report
    assert len(report.layers) == 2 and not report.notes
    np.testing.assert_allclose(report.layers[0].new_mean, data().mean((0, 2, 3)), rtol=1e-5)


def with_nan(x: np.ndarray[Any, Any], row: int) -> np.ndarray[Any, Any]:
    return np.where(np.arange(len(x))[:, None, None, None] == row, np.float32(np.nan), x)


BAD: dict[str, tuple[Any, dict[str, Any], str]] = {
    "no rows": ([], {}, "no rows"),
    "a generator": (iter([{"x": data()}]), {}, "3 passes"),
    "one value": ([{"x": data(1)[:, :, :1, :1]}], {}, "one value a channel in all"),
    "one value a batch": ([{"x": data(1)[:, :, :1, :1]}] * 2, {"layers": "together"}, "one value a channel in a batch"),
    "another name": ([{"z": data()}], {}, "lacks 'x'"),
    "one more": ([{"x": data(), "z": data()}], {}, "has 'z'"),
    "another type": ([{"x": data().astype(np.float64)}], {}, "as float64, the model takes float32"),
    "another rank": ([{"x": data()[0]}], {}, r"the shape \(3, 5, 5\), the model takes"),
    "other channels": ([{"x": data()[:, :2]}], {}, r"the shape \(12, 2, 5, 5\)"),
    "a NaN": ([{"x": data(5)}, {"x": with_nan(data(7), 4)}], {}, "batch 1, row 9 gives NaN"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str, tmp_path: Path) -> None:
    batches, options, message = BAD[name]
    with pytest.raises(UsageError, match=message):
        bnexport.recalibrate_file(net(), tmp_path / "out.onnx", batches, **options)
    assert not list(tmp_path.iterdir())


def test_a_fixed_batch_size_is_named() -> None:
    proto = net()
    for fixed in (1, 4):
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = fixed
        with pytest.raises(UsageError, match="its rows must be a multiple of that"):
            bnexport.recalibrate_file(proto, None, [{"x": data(fixed)}, {"x": data(2)}])


def test_rows_of_files_and_folders(tmp_path: Path) -> None:
    x = data(10)
    np.save(tmp_path / "x.npy", x)
    (tmp_path / "parts").mkdir()
    for place, (first, end) in enumerate([(0, 3), (3, 4), (4, 10)]):
        np.save(tmp_path / "parts" / f"{place}.npy", x[first:end])
    for path in ("x.npy", "parts"):
        found = open_rows({"x": tmp_path / path}, 4)
        assert len(found) == 10 and [len(batch["x"]) for batch in found] == [4, 4, 2]
        np.testing.assert_array_equal(np.concatenate([batch["x"] for batch in found]), x)
    np.save(tmp_path / "parts" / "9.npy", x[:, :, :2])
    np.save(tmp_path / "scalar.npy", np.float32(1))
    (tmp_path / "text.npy").write_text("no array")
    (tmp_path / "empty").mkdir()
    np.save(tmp_path / "none.npy", x[:0])
    for path, message in (
        ("parts", "expected the same in all files"),
        ("scalar.npy", "holds no rows"),
        ("text.npy", "expected a file that numpy.save wrote"),
        ("missing.npy", "no such file"),
        ("empty", "has no .npy files"),
        ("none.npy", "no rows"),
    ):
        with pytest.raises(UsageError, match=message):
            open_rows({"x": tmp_path / path}, 4)
    with pytest.raises(UsageError, match="different numbers of rows: x has 10, z has 0"):
        open_rows({"x": tmp_path / "x.npy", "z": tmp_path / "none.npy"}, 4)


def test_the_certificate_of_other_statistics_goes() -> None:
    folded = bnexport.fold(net(f"{ONE.replace('y =', 'b =')} c = Relu (b) y = Norm (c, n2:4)")).model
    assert any(entry.key == "bnexport.sites" for entry in folded.metadata_props)
    result = bnexport.recalibrate_file(folded, None, [{"x": data()}])
    assert result.report.layers and not any(entry.key == "bnexport.sites" for entry in result.model.metadata_props)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(net(), "a.onnx")
    np.save("x.npy", data(20))
    return tmp_path


def test_recalibrate(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["recalibrate", "a.onnx", "b.onnx", "-i", "x:x.npy", "--batch", "7"]
    assert main([*arguments, "--html", "r.html", "--json", "r.json"]) == 0
    said = capsys.readouterr().err
    assert "20 rows, 3 passes" in said and "b.onnx written" in said
    expected = bnexport.recalibrate_file(net(), None, [{"x": data(20)}])
    assert_near(stored(onnx.load("b.onnx")), stored(expected.model), 1e-6)
    report = json.loads(Path("r.json").read_text())
    assert (report["rows"], report["batches"], len(report["layers"])) == (20, 3, 3)
    page = Path("r.html").read_text()
    assert "3 batch norms re-estimated on 20 rows, 3 passes" in page
    for layer in report["layers"]:
        stored_values = zip(layer["old_mean"], layer["new_mean"], layer["old_var"], strict=True)
        shifts = [abs(new - old) / (var + layer["eps"]) ** 0.5 for old, new, var in stored_values]
        assert html.escape(layer["name"]) in page and f"{max(shifts):.3g}" in page


def test_names_of_a_model_are_escaped(folder: Path) -> None:
    proto = net()
    proto.graph.node[1].name = "<script>alert(1)</script>\u202e"
    onnx.save(proto, "a.onnx")
    assert main(["recalibrate", "a.onnx", "b.onnx", "-i", "x:x.npy", "--html", "r.html"]) == 0
    page = Path("r.html").read_text()
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt;" in page and "\u202e" not in page
    assert not re.search(r"(src|href)=", page)
