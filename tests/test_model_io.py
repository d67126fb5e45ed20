"""The door for model files: what is refused, what is kept, and that writing is all or nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx_ir as ir
import pytest

from bnexport import model_io
from bnexport.errors import BnexportError, MalformedModelError, UnsafeModelError, UnsupportedModelError, UsageError
from bnexport.model_io import Limits, as_model, load, save, to_proto
from tests.folding.helpers import model

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


def edit(path: Path, change: Callable[[onnx.ModelProto], None]) -> None:
    proto = onnx.load(path, load_external_data=False)
    change(proto)
    path.write_bytes(proto.SerializeToString())


def set_entry(path: Path, key: str, value: str) -> None:
    def change(proto: onnx.ModelProto) -> None:
        tensor = proto.graph.initializer[0]
        for entry in tensor.external_data:
            if entry.key == key:
                entry.value = value
                return
        tensor.external_data.add(key=key, value=value)

    edit(path, change)


def one_line(error: BaseException) -> str:
    text = str(error)
    assert text
    assert "\n" not in text
    return text


class TestUnreadable:
    @pytest.mark.parametrize(
        ("content", "words"),
        [
            (None, "does not exist"),
            (b"", "is empty"),
            (b"this is not a model", "not an ONNX file"),
            (b"\x08\x08", "not an ONNX file"),
            (bytes(range(256)), "not an ONNX file"),
        ],
        ids=["missing", "empty", "text", "no-graph", "bytes"],
    )
    def test_one_clear_line(self, tmp_path: Path, content: bytes | None, words: str) -> None:
        path = tmp_path / "model.onnx"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(MalformedModelError, match=words) as caught:
            load(path)
        assert "model.onnx" in one_line(caught.value)

    def test_directory(self, tmp_path: Path) -> None:
        with pytest.raises(MalformedModelError, match="directory"):
            load(tmp_path)

    def test_pipe_does_not_hang(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "model.onnx")
        with pytest.raises(UnsafeModelError, match="regular file"):
            load(tmp_path / "model.onnx")

    def test_cut_anywhere(self, tmp_path: Path) -> None:
        """Any prefix of a model is refused in one line, or still a whole model."""
        data = example().SerializeToString()
        path = tmp_path / "model.onnx"
        refused = 0
        for length in range(1, len(data), 97):
            path.write_bytes(data[:length])
            with pytest.raises(BnexportError) as caught:
                load(path)
            one_line(caught.value)
            refused += 1
        assert refused > 50

    def test_too_large(self, tmp_path: Path) -> None:
        onnx.save(example(), tmp_path / "model.onnx")
        with pytest.raises(UnsafeModelError, match="limit"):
            load(tmp_path / "model.onnx", limits=Limits(model_bytes=100))

    def test_wrong_kind_of_source(self) -> None:
        with pytest.raises(UsageError, match="int"):
            as_model(3)  # type: ignore[arg-type]


def initializer(proto: onnx.ModelProto) -> onnx.TensorProto:
    return proto.graph.initializer[0]


STRUCTURE: dict[str, tuple[Callable[[onnx.ModelProto], object], type[BnexportError]]] = {
    "too-little-data": (lambda proto: setattr(initializer(proto), "raw_data", b"1234"), MalformedModelError),
    "no-data": (lambda proto: initializer(proto).ClearField("raw_data"), MalformedModelError),
    "huge-shape": (lambda proto: initializer(proto).dims.extend([2**40, 2**40]), UnsafeModelError),
    "negative-shape": (lambda proto: initializer(proto).dims.append(-1), MalformedModelError),
    "unknown-type": (lambda proto: setattr(initializer(proto), "data_type", 99), MalformedModelError),
    "undefined-type": (lambda proto: setattr(initializer(proto), "data_type", 0), MalformedModelError),
    "undefined-input": (lambda proto: proto.graph.node[0].input.append("nothing"), MalformedModelError),
    "undefined-output": (lambda proto: setattr(proto.graph.output[0], "name", "nothing"), MalformedModelError),
    "same-name-twice": (lambda proto: proto.graph.node.append(proto.graph.node[0]), MalformedModelError),
    "initializer-twice": (lambda proto: proto.graph.initializer.append(initializer(proto)), MalformedModelError),
    "cycle": (
        lambda proto: proto.graph.node.extend(
            [onnx.helper.make_node("Add", ["b", "x"], ["a"]), onnx.helper.make_node("Relu", ["a"], ["b"])]
        ),
        MalformedModelError,
    ),
    "no-opset": (lambda proto: proto.ClearField("opset_import"), MalformedModelError),
    "attribute-twice": (
        lambda proto: proto.graph.node[0].attribute.extend([onnx.helper.make_attribute("alpha", 1.0)] * 2),
        MalformedModelError,
    ),
    "sparse-initializer": (lambda proto: proto.graph.sparse_initializer.add(), UnsupportedModelError),
    "training-info": (lambda proto: proto.training_info.add(), UnsupportedModelError),
}


@pytest.mark.parametrize("case", STRUCTURE)
def test_structure(case: str, tmp_path: Path) -> None:
    change, error = STRUCTURE[case]
    proto = example()
    change(proto)
    (tmp_path / "model.onnx").write_bytes(proto.SerializeToString())
    for source in (tmp_path / "model.onnx", proto):
        with pytest.raises(error) as caught:
            as_model(source)
        one_line(caught.value)


def test_nested_too_deep() -> None:
    proto = example()
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Identity", ["x"], ["o"])],
        "leaf",
        [],
        [onnx.helper.make_tensor_value_info("o", 1, None)],
    )
    for level in range(5):
        node = onnx.helper.make_node("If", ["x"], ["o"], then_branch=graph, else_branch=graph)
        graph = onnx.helper.make_graph([node], f"level{level}", [], [onnx.helper.make_tensor_value_info("o", 1, None)])
    proto.graph.node.append(onnx.helper.make_node("If", ["x"], ["o"], then_branch=graph, else_branch=graph))
    as_model(proto)
    with pytest.raises(UnsafeModelError, match="nested"):
        as_model(proto, limits=Limits(graph_depth=4))


def test_functions_that_call_each_other() -> None:
    proto = example()
    for name, callee in (("a", "b"), ("b", "a")):
        function = proto.functions.add(name=name, domain="local")
        function.input.append("i")
        function.output.append("o")
        function.opset_import.add(domain="local", version=1)
        function.node.add(op_type=callee, domain="local", input=["i"], output=["o"])
    with pytest.raises(UnsafeModelError, match="calls itself"):
        as_model(proto)


class TestExternalData:
    def test_lazy_and_right(self, external: Path) -> None:
        loaded = load(external)
        np.testing.assert_array_equal(weight(loaded), WEIGHT)
        assert isinstance(loaded.graph.initializers["w"].const_value, model_io.ContainedTensor)

    def test_bare_name(self, external: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A relative name without a folder is as safe as any other."""
        secret = external.parent.parent / "secret"
        secret.write_bytes(WEIGHT.tobytes())
        monkeypatch.chdir(external.parent)
        np.testing.assert_array_equal(weight(load("model.onnx")), WEIGHT)
        set_entry(external, "location", "../secret")
        with pytest.raises(UnsafeModelError, match="leaves the folder"):
            load("model.onnx")

    @pytest.mark.parametrize(
        "location",
        [
            "../secret",
            "a/../../secret",
            "/etc/passwd",
            "",
            ".",
            "C:\\secret",
            "a\\..\\b",
            "*/_ORT_MEM_ADDR_/*",
            "x\0y",
            "model.onnx.data/..",
        ],
    )
    def test_location(self, external: Path, location: str) -> None:
        set_entry(external, "location", location)
        with pytest.raises(UnsafeModelError) as caught:
            load(external)
        one_line(caught.value)

    def test_symbolic_link(self, external: Path) -> None:
        data = external.parent / "model.onnx.data"
        data.rename(external.parent.parent / "outside")
        data.symlink_to(external.parent.parent / "outside")
        with pytest.raises(UnsafeModelError, match="symbolic link"):
            load(external)
        with pytest.raises(UnsafeModelError, match="leaves"):
            load(external, limits=Limits(allow_links=True))

    def test_linked_folder(self, external: Path) -> None:
        outside = external.parent.parent / "outside"
        outside.mkdir()
        (external.parent / "model.onnx.data").rename(outside / "data")
        (external.parent / "sub").symlink_to(outside)
        set_entry(external, "location", "sub/data")
        with pytest.raises(UnsafeModelError, match="symbolic link"):
            load(external)

    def test_link_inside_by_request(self, external: Path) -> None:
        data = external.parent / "model.onnx.data"
        data.rename(external.parent / "blob")
        data.symlink_to("blob")
        with pytest.raises(UnsafeModelError):
            load(external)
        np.testing.assert_array_equal(weight(load(external, limits=Limits(allow_links=True))), WEIGHT)

    def test_hard_link(self, external: Path) -> None:
        os.link(external.parent / "model.onnx.data", external.parent.parent / "other")
        with pytest.raises(UnsafeModelError, match="hard links"):
            load(external)

    def test_pipe(self, external: Path) -> None:
        (external.parent / "model.onnx.data").unlink()
        os.mkfifo(external.parent / "model.onnx.data")
        with pytest.raises(UnsafeModelError, match="regular file"):
            load(external)

    def test_missing(self, external: Path) -> None:
        (external.parent / "model.onnx.data").unlink()
        with pytest.raises(MalformedModelError, match="missing"):
            load(external)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("offset", "-1"),
            ("offset", "4"),
            ("offset", "99999999999999999999"),
            ("offset", "0x10"),
            ("length", "4"),
            ("length", str(WEIGHT.nbytes + 1)),
            ("length", "1e3"),
            ("base_dir", "/"),
            ("__class__", "x"),
        ],
    )
    def test_entries(self, external: Path, key: str, value: str) -> None:
        set_entry(external, key, value)
        with pytest.raises(UnsafeModelError) as caught:
            load(external)
        one_line(caught.value)

    def test_truncated(self, external: Path) -> None:
        os.truncate(external.parent / "model.onnx.data", 100)
        with pytest.raises(UnsafeModelError, match="ends at byte"):
            load(external)

    def test_changed_between_check_and_use(self, external: Path) -> None:
        loaded = load(external)
        data = external.parent / "model.onnx.data"
        data.rename(external.parent / "old")
        data.write_bytes(bytes(WEIGHT.nbytes))
        with pytest.raises(UnsafeModelError, match="changed"):
            weight(loaded)

    def test_replaced_by_a_link_between_check_and_use(self, external: Path) -> None:
        loaded = load(external)
        data = external.parent / "model.onnx.data"
        data.rename(external.parent / "old")
        data.symlink_to("old")
        with pytest.raises(UnsafeModelError, match="symbolic link"):
            weight(loaded)

    def test_in_memory_model_has_no_folder(self, external: Path) -> None:
        with pytest.raises(UnsafeModelError, match="no folder"):
            as_model(onnx.load(external, load_external_data=False))

    def test_attribute_tensor(self, external: Path) -> None:
        """A Constant node's tensor goes through the same gate."""

        def change(proto: onnx.ModelProto) -> None:
            tensor = onnx.TensorProto()
            tensor.CopyFrom(initializer(proto))
            tensor.external_data[0].value = "../secret"
            proto.graph.node.append(onnx.helper.make_node("Constant", [], ["k"], value=tensor))

        (external.parent.parent / "secret").write_bytes(WEIGHT.tobytes())
        edit(external, change)
        with pytest.raises(UnsafeModelError, match="leaves the folder"):
            load(external)

    def test_four_bit_weights(self, tmp_path: Path) -> None:
        tensor = onnx.helper.make_tensor("w", onnx.TensorProto.INT4, [64, 64], np.arange(4096) % 15 - 7)
        graph = onnx.helper.make_graph(
            [onnx.helper.make_node("Identity", ["w"], ["y"])],
            "g",
            [],
            [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.INT4, [64, 64])],
            [tensor],
        )
        proto = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)
        save(as_model(proto), tmp_path / "model.onnx", external_data=True)
        loaded = load(tmp_path / "model.onnx")
        assert (weight(loaded).astype(np.int32).reshape(-1) == np.arange(4096) % 15 - 7).all()


class TestSave:
    def test_round_trip(self, tmp_path: Path) -> None:
        proto = example()
        save(as_model(proto), tmp_path / "model.onnx")
        np.testing.assert_array_equal(weight(load(tmp_path / "model.onnx")), WEIGHT)
        assert os.listdir(tmp_path) == ["model.onnx"]
        assert to_proto(load(tmp_path / "model.onnx")) == to_proto(as_model(proto))

    def test_external_data_stays_external(self, external: Path, tmp_path: Path) -> None:
        save(load(external), tmp_path / "copy.onnx")
        assert (tmp_path / "copy.onnx.data").stat().st_size == WEIGHT.nbytes
        np.testing.assert_array_equal(weight(load(tmp_path / "copy.onnx")), WEIGHT)

    def test_the_model_is_unchanged(self, external: Path, tmp_path: Path) -> None:
        loaded = load(external)
        save(loaded, tmp_path / "copy.onnx", external_data=False)
        assert isinstance(loaded.graph.initializers["w"].const_value, model_io.ContainedTensor)
        np.testing.assert_array_equal(weight(loaded), WEIGHT)

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

    def test_failure_leaves_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        save(as_model(example()), tmp_path / "model.onnx")
        before = (tmp_path / "model.onnx").read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(UsageError, match="No space left"):
            save(as_model(example()), tmp_path / "model.onnx", external_data=True)
        assert os.listdir(tmp_path) == ["model.onnx"]
        assert (tmp_path / "model.onnx").read_bytes() == before

    def test_leftovers_of_a_dead_process_go(self, tmp_path: Path) -> None:
        dead = tmp_path / ".model.onnx.999999999-0123abcd.bnexport"
        dead.mkdir()
        (dead / "model.onnx").write_bytes(b"half")
        alive = tmp_path / f".model.onnx.{os.getppid()}-0123abcd.bnexport"
        alive.mkdir()
        save(as_model(example()), tmp_path / "model.onnx")
        assert sorted(os.listdir(tmp_path)) == [alive.name, "model.onnx"]

    @pytest.mark.parametrize("target", ["", "missing/model.onnx", "folder"])
    def test_bad_targets(self, tmp_path: Path, target: str) -> None:
        (tmp_path / "folder").mkdir()
        with pytest.raises(UsageError):
            save(as_model(example()), f"{tmp_path}/{target}")
        assert os.listdir(tmp_path) == ["folder"]

    def test_stage_commits_at_once(self, tmp_path: Path) -> None:
        staged = model_io.stage(as_model(example()), tmp_path / "model.onnx", external_data=True)
        assert not (tmp_path / "model.onnx").exists()
        np.testing.assert_array_equal(weight(load(staged.path)), WEIGHT)
        staged.commit()
        assert sorted(os.listdir(tmp_path)) == ["model.onnx", "model.onnx.data"]
        np.testing.assert_array_equal(weight(load(tmp_path / "model.onnx")), WEIGHT)


def test_sources_are_copied() -> None:
    proto = example()
    before = proto.SerializeToString()
    for source in (proto, ir.from_proto(proto)):
        own = as_model(source)
        own.graph.initializers["w"].const_value = ir.Tensor(np.zeros((64, 32), np.float32), name="w")
        own.graph.node(0).name = "changed"
        assert to_proto(source if isinstance(source, ir.Model) else as_model(source)) == to_proto(as_model(proto))
    assert proto.SerializeToString() == before
