"""The door for model files: what is kept, what a caller may ask for, and that writing is all or nothing.

What is refused is in tests/malicious.
"""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir
import pytest

from bnexport import model_io
from bnexport.errors import MalformedModelError, UnsafeModelError, UnsupportedModelError, UsageError
from bnexport.model_io import Limits, as_model, load, save, to_proto
from bnexport.model_io.read import paused_collection
from bnexport.model_io.wire import field
from tests.support.onnx_text import model

WEIGHT = np.random.default_rng(0).standard_normal((64, 32)).astype(np.float32)


def example() -> onnx.ModelProto:
    return model("g (float[N,64] x) => (float[N,32] y) { y = Gemm (x, w) }", values={"w": WEIGHT})


@pytest.fixture
def external(tmp_path: Path) -> Path:
    """A model whose weight lies in model.onnx.data beside it."""
    folder = tmp_path / "model"
    folder.mkdir()
    save(ir.from_proto(example()), folder / "model.onnx", external_data=True)
    return folder / "model.onnx"


def weight(loaded: ir.Model) -> np.ndarray:
    tensor = loaded.graph.initializers["w"].const_value
    assert tensor is not None
    return tensor.numpy()


def set_entry(path: Path, key: str, value: str) -> None:
    """Change an entry of the weight's external data, or add it."""
    proto = onnx.load(path, load_external_data=False)
    tensor = proto.graph.initializer[0]
    kept = [entry for entry in tensor.external_data if entry.key != key]
    del tensor.external_data[:]
    tensor.external_data.extend([*kept, onnx.StringStringEntryProto(key=key, value=value)])
    path.write_bytes(proto.SerializeToString())


def test_large_tensors_are_no_structure(tmp_path: Path) -> None:
    onnx.save(model("g (float[N,64] x) => (float[N,64] y) { y = MatMul (x, w:64.64) }"), tmp_path / "model.onnx")
    loaded = load(tmp_path / "model.onnx", limits=Limits(structure_bytes=2000))
    assert weight(loaded).nbytes == 64 * 64 * 4


def test_wrong_kind_of_source() -> None:
    with pytest.raises(UsageError, match="int"):
        as_model(3)  # type: ignore[arg-type]


class TestExternalData:
    def test_bare_name(self, external: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A relative name without a folder is as safe as any other."""
        secret = external.parent.parent / "secret"
        secret.write_bytes(WEIGHT.tobytes())
        monkeypatch.chdir(external.parent)
        np.testing.assert_array_equal(weight(load("model.onnx")), WEIGHT)
        set_entry(external, "location", "../secret")
        with pytest.raises(UnsafeModelError, match="leaves the folder"):
            load("model.onnx")

    def test_four_bit_weights(self, tmp_path: Path) -> None:
        proto = model("g (int4[64,64] x) => (int4[64,64] y) { y = Identity (w) }", opset=21, ir_version=10)
        numbers = np.arange(4096) % 15 - 7
        proto.graph.initializer.append(onnx.helper.make_tensor("w", onnx.TensorProto.INT4, [64, 64], numbers))
        save(as_model(proto), tmp_path / "model.onnx", external_data=True)
        assert (weight(load(tmp_path / "model.onnx")).astype(np.int32).reshape(-1) == numbers).all()


class TestSave:
    @pytest.mark.parametrize("external_data", [None, False, True])
    def test_round_trip(self, external: Path, tmp_path: Path, external_data: bool | None) -> None:
        """What is loaded lazily stays as it is; external data stays external, unless something else is asked for."""
        loaded = load(external)
        staged = model_io.stage(loaded, tmp_path / "copy.onnx", external_data=external_data)
        assert not (tmp_path / "copy.onnx").exists()
        np.testing.assert_array_equal(weight(load(staged.path)), WEIGHT)
        staged.commit()
        data = ["copy.onnx.data"] if external_data is not False else []
        assert sorted(os.listdir(tmp_path)) == ["copy.onnx", *data, "model"]
        assert all((tmp_path / name).stat().st_size == WEIGHT.nbytes for name in data)
        assert isinstance(loaded.graph.initializers["w"].const_value, model_io.ContainedTensor)
        assert to_proto(load(tmp_path / "copy.onnx")) == to_proto(loaded) == to_proto(as_model(example()))

    def test_small_tensors_stay_in_the_model_file(self, tmp_path: Path) -> None:
        """Large ones begin at multiples of 64."""
        proto = model(
            "g (float[1] x) => (float[N] y, float[N] z, float[N] t) { y = Add (x, a:255) z = Add (x, b:257) t = Add (x, c:256) }"
        )
        save(as_model(proto), tmp_path / "model.onnx", external_data=True)
        saved = onnx.load(tmp_path / "model.onnx", load_external_data=False).graph.initializer
        entries = {tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in saved}
        assert [(name, entry["offset"]) for name, entry in entries.items() if entry] == [("b", "0"), ("c", "1088")]

    def test_over_an_input_only_by_request(self, external: Path) -> None:
        loaded = load(external)
        data = external.parent / "model.onnx.data"
        for target in (external, data):
            with pytest.raises(UsageError, match="input"):
                save(loaded, target, inputs=[external])
        np.testing.assert_array_equal(weight(load(external)), WEIGHT)
        save(loaded, external, inputs=[external], overwrite_input=True)
        np.testing.assert_array_equal(weight(load(external)), WEIGHT)
        assert len(os.listdir(external.parent)) == 2

    def test_too_large_for_one_message(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Weights go outside by themselves, unless the caller wants them inside. One that just fits is none."""
        monkeypatch.setattr("bnexport.model_io.write.PROTOBUF_LIMIT", to_proto(as_model(example())).ByteSize())
        assert model_io.stage(as_model(to_proto(as_model(example()))), tmp_path / "fits.onnx").data_name is None
        monkeypatch.setattr("bnexport.model_io.write.PROTOBUF_LIMIT", 4000)
        staged = model_io.stage(as_model(example()), tmp_path / "model.onnx")
        assert (staged.too_large, staged.data_name) == (True, "model.onnx.data")
        staged.commit()
        np.testing.assert_array_equal(weight(load(tmp_path / "model.onnx")), WEIGHT)
        with pytest.raises(UnsupportedModelError, match="external data"):
            save(as_model(example()), tmp_path / "other.onnx", external_data=False)
        with pytest.raises(UnsupportedModelError, match="2 GiB"):
            to_proto(as_model(example()))

    def test_many_tensors_by_several_threads(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """40 MB in tensors of 1 byte to 25 MB: parts of a file of 16 MB and more are written at a time."""
        sizes = [1, 100_000, 3, 6_200_000, 2, *range(50_000, 80_000, 3000)]
        values = {f"w{i}": np.arange(i, i + size, dtype=np.float32)[None] for i, size in enumerate(sizes)}
        body = "\n".join(f"y{i} = MatMul (x, w{i})" for i in range(len(sizes)))
        outputs = ", ".join(f"float[N,{size}] y{i}" for i, size in enumerate(sizes))
        proto = model(f"g (float[N,1] x) => ({outputs}) {{ {body} }}", values=values)
        for external_data in (False, True):
            said: list[Any] = []
            monkeypatch.setattr("bnexport.interface.report", lambda *each, said=said: said.append(each[1:]))
            save(as_model(proto), tmp_path / "model.onnx", external_data=external_data)
            assert to_proto(load(tmp_path / "model.onnx")) == to_proto(as_model(proto))
            assert (4 * sum(sizes), 4 * sum(sizes)) <= said[-1] == said[-1][::-1]  # all of it at the end

    def test_a_tensor_of_the_wrong_size_is_not_written(self, tmp_path: Path) -> None:
        class Short(ir.Tensor):
            def tofile(self, file: Any) -> None:
                file.write(b"1234")

        loaded = as_model(example())
        loaded.graph.initializers["w"].const_value = Short(WEIGHT, name="w")
        with pytest.raises(MalformedModelError, match="wrote 4 bytes"):
            save(loaded, tmp_path / "model.onnx")
        assert os.listdir(tmp_path) == []

    def test_quantization_annotations_are_kept(self, tmp_path: Path) -> None:
        proto = example()
        entry = proto.graph.quantization_annotation.add(tensor_name="w")
        entry.quant_parameter_tensor_names.add(key="SCALE_TENSOR", value="x")
        assert to_proto(as_model(proto)).graph.quantization_annotation == proto.graph.quantization_annotation

    @pytest.mark.parametrize("target", ["", "missing/model.onnx", "folder"])
    def test_bad_targets(self, tmp_path: Path, target: str) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(UsageError):
            save(as_model(example()), f"{tmp_path}/{target}")
        assert os.listdir(tmp_path) == ["folder"]


def test_sources_are_copied() -> None:
    proto = example()
    before = proto.SerializeToString()
    for source in (proto, ir.from_proto(proto)):
        own = as_model(source)
        own.graph.initializers["w"].const_value = ir.Tensor(np.zeros((64, 32), np.float32), name="w")
        own.graph.node(0).name = "changed"
        assert to_proto(source if isinstance(source, ir.Model) else as_model(source)) == to_proto(as_model(proto))
    assert proto.SerializeToString() == before
    unordered = ir.from_proto(model("g (float[2] x) => (float[2] y) { a = Relu (x) y = Neg (a) }"))
    first = unordered.graph.node(0)
    unordered.graph.remove(first)
    unordered.graph.append(first)
    with pytest.raises(MalformedModelError, match=r"reads a value that no node before it makes; .*graph\.sort\(\)"):
        as_model(unordered)


@pytest.mark.parametrize("frozen", [False, True])
def test_collection_is_as_it_was(frozen: bool) -> None:
    """Objects that the caller froze stay so; garbage made inside is collected later."""

    class Node:
        def __init__(self) -> None:
            self.me = self

    gc.collect()
    if frozen:
        gc.freeze()
    try:
        before = gc.get_freeze_count()
        with paused_collection():
            assert not gc.isenabled()
            with paused_collection():
                gone = weakref.ref(Node())
            assert not gc.isenabled()
        assert gc.isenabled()
        assert gc.get_freeze_count() == before
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()


STALE = {"location": "gone.bin", "offset": "many", "length": "-3"}


@pytest.mark.parametrize("entries", [{}, STALE], ids=["alone", "with entries of the file it came from"])
@pytest.mark.parametrize("first", [False, True], ids=["behind the data", "before the data"])
def test_a_data_location_that_is_the_default_one(tmp_path: Path, entries: dict[str, str], *, first: bool) -> None:
    """It is what onnx writes for a tensor that was loaded from external data and saved inline."""
    proto, path = example(), tmp_path / "model.onnx"
    pairs = [onnx.StringStringEntryProto(key=key, value=value) for key, value in entries.items()]
    place = onnx.TensorProto(data_location=onnx.TensorProto.DEFAULT, external_data=pairs).SerializeToString()
    tensor = proto.graph.initializer.pop().SerializeToString()
    tensor = place + tensor if first else tensor + place
    path.write_bytes(proto.SerializeToString() + field(7, field(5, tensor)))
    loaded = load(path)
    np.testing.assert_array_equal(weight(loaded), WEIGHT)
    save(loaded, tmp_path / "copy.onnx")
    np.testing.assert_array_equal(weight(load(tmp_path / "copy.onnx")), WEIGHT)


@pytest.mark.parametrize(
    ("key", "value"), [("length", "0"), ("prepacked_0", "MlasGemm|0;64;")], ids=["a length of 0", "a prepacked weight"]
)
def test_external_data_as_onnx_runtime_writes_and_reads_it(external: Path, key: str, value: str) -> None:
    set_entry(external, key, value)
    np.testing.assert_array_equal(weight(load(external)), WEIGHT)
