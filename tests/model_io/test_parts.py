"""What the door for model files does piece by piece: tensors in files and lists, copies, leftovers, safetensors."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import onnx.parser
import onnx_ir as ir
import onnxruntime
import pytest
from google.protobuf.message import DecodeError

from bnexport.errors import (
    MalformedModelError,
    MissingDependencyError,
    MissingFileError,
    StorageError,
    UnsafeModelError,
    UnsupportedModelError,
    UsageError,
)
from bnexport.model_io import (
    DEFAULT_LIMITS,
    external,
    limits,
    load,
    load_tensors,
    read,
    save,
    save_tensors,
    stage,
    staging,
    to_proto,
    walk,
    write,
)
from bnexport.model_io import write as parts_of
from bnexport.model_io.external import ContainedTensor
from bnexport.model_io.read import from_proto, innermost
from bnexport.model_io.write import to_parts
from bnexport.runtime import engine
from tests.support.onnx_text import model

BIG = np.random.default_rng(0).standard_normal((300, 256)).astype(np.float32)  # more than a cut's smallest
BODY = "g (float[N,300] x) => (float[N,256] y) { y = MatMul (x, w) }"


def source(text: str = "g (float[N] x) => (float[N] y) { y = Relu (x) }", **values: np.ndarray) -> ir.Model:
    return from_proto(model(text, values=values))


def raises(error: BaseException) -> Callable[..., Any]:
    def function(*_: object) -> None:
        raise error

    return function


def fails(number: int) -> Callable[..., Any]:
    return raises(OSError(number, os.strerror(number)))


class TestSafetensors:
    def test_there_and_back(self, tmp_path: Path) -> None:
        tensors = {"b": np.arange(6, dtype=np.float32).reshape(2, 3).T, "a": np.array(3, np.int64)}
        save_tensors(tensors, {"key": "value"}, tmp_path / "t.safetensors")
        got, metadata = load_tensors(tmp_path / "t.safetensors")
        assert metadata == {"key": "value"}
        assert sorted(got) == ["a", "b"]
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(got[name], tensor)
            assert got[name].dtype == tensor.dtype
        first = (tmp_path / "t.safetensors").read_bytes()
        save_tensors(tensors, {"key": "value"}, tmp_path / "t.safetensors")
        assert (tmp_path / "t.safetensors").read_bytes() == first
        assert os.listdir(tmp_path) == ["t.safetensors"]

    def test_a_link_is_written_through(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to(tmp_path / "real/t")
        save_tensors({"a": np.ones(2)}, {}, tmp_path / "link")
        assert (tmp_path / "link").is_symlink() and list(load_tensors(tmp_path / "real/t")[0]) == ["a"]

    def test_targets_that_cannot_be(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for target in (tmp_path, tmp_path / "missing/t"):
            with pytest.raises(UsageError, match="it is a folder, or its folder does not exist"):
                save_tensors({}, {}, target)
        monkeypatch.setattr("safetensors.numpy.save_file", fails(errno.ENOSPC))
        with pytest.raises(StorageError, match="nothing was changed"):
            save_tensors({}, {}, tmp_path / "t")

    def test_files_that_are_none(self, tmp_path: Path) -> None:
        with pytest.raises(MissingFileError, match="got no such file"):
            load_tensors(tmp_path / "t")
        save_tensors({"a": np.ones(20)}, {}, tmp_path / "t")
        (tmp_path / "t").write_bytes((tmp_path / "t").read_bytes()[:-1])
        with pytest.raises(MalformedModelError, match="not a whole safetensors file"):
            load_tensors(tmp_path / "t")

    def test_without_safetensors(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
        with pytest.raises(MissingDependencyError, match="pip install safetensors"):
            save_tensors({}, {}, tmp_path / "t")


def with_lists() -> onnx.ModelProto:
    """An initializer, and attributes that hold one tensor, two tensors, and a body with one."""
    proto = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 17, "d": 1]>
        main (float[1] x) => (float[1] y) { a = d.One (x) b = d.Two (a)
            y = d.Bodies <body = body () => (float[1] o) <float[1] inner = {1}> { o = Identity (inner) }> (b) }""")
    one, two, bodies = proto.graph.node
    bodies.attribute[0].g.node[0].ClearField("domain")  # which the parser writes out
    one.attribute.append(onnx.helper.make_attribute("value", onnx.numpy_helper.from_array(BIG, "one")))
    pair = [onnx.numpy_helper.from_array(np.full(2, value, np.float32), f"l{value}") for value in (1, 2)]
    two.attribute.append(onnx.helper.make_attribute("values", pair, "said of the list"))
    initializer = onnx.numpy_helper.from_array(BIG, "w")
    initializer.doc_string = "said of w"
    initializer.metadata_props.add(key="k", value="v")
    proto.graph.initializer.append(initializer)
    return proto


class TestTensors:
    def test_every_place(self) -> None:
        slots = list(walk.tensors(from_proto(with_lists())))
        assert [slot.get().name for slot in slots] == ["w", "one", "l1", "l2", "inner"]
        assert [slot.value is None for slot in slots] == [False, True, True, True, False]

    def test_one_of_a_list_is_replaced(self) -> None:
        source = from_proto(with_lists())
        slots = list(walk.tensors(source))
        for slot, value in ((slots[1], 7.0), (slots[3], 8.0)):
            slot.set(ir.tensor(np.full(2, value, np.float32)))
        one, two = (node.attribute[0] for node in to_proto(source).graph.node[:2])
        assert onnx.numpy_helper.to_array(one.t).tolist() == [7, 7]
        assert [onnx.numpy_helper.to_array(it).tolist() for it in two.tensors] == [[1, 1], [8, 8]]
        assert two.doc_string == "said of the list"

    @pytest.mark.parametrize("external_data", [False, True])
    def test_nothing_is_lost_on_the_way_through_a_file(self, tmp_path: Path, external_data: bool) -> None:
        expected = with_lists()
        save(from_proto(expected), tmp_path / "m.onnx", external_data=external_data)
        assert (tmp_path / "m.onnx.data").exists() == external_data
        # Once more from the file, whose large tensors are not in memory.
        loaded = load(tmp_path / "m.onnx")
        save(loaded, tmp_path / "again.onnx", external_data=False)
        got = onnx.load(tmp_path / "again.onnx")
        assert [it.SerializeToString() for it in got.graph.node] == [
            it.SerializeToString() for it in expected.graph.node
        ]
        (tensor,) = got.graph.initializer
        assert tensor.SerializeToString() == expected.graph.initializer[0].SerializeToString()


class TestContained:
    @pytest.fixture
    def tensor(self, tmp_path: Path) -> ContainedTensor:
        save(source(BODY, w=BIG), tmp_path / "m.onnx", external_data=True)
        found = load(tmp_path / "m.onnx").graph.initializers["w"].const_value
        assert isinstance(found, ContainedTensor)
        return found

    def test_as_an_array(self, tensor: ContainedTensor) -> None:
        np.testing.assert_array_equal(np.asarray(tensor), BIG)
        assert np.asarray(tensor, np.float64).dtype == np.float64
        assert tensor.tobytes() == BIG.tobytes()

    def test_copies(self, tensor: ContainedTensor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Into memory, into a file, and into a file where the kernel cannot copy, or only a part."""
        memory = io.BytesIO(b"head")
        memory.seek(4)
        tensor.tofile(type("Plain", (), {"write": memory.write})())
        assert memory.getvalue() == b"head" + BIG.tobytes()

        copy = os.copy_file_range
        for replacement in (copy, lambda a, b, count, i, o: copy(a, b, min(count, 1000), i, o), fails(errno.EXDEV)):
            calls = iter([True, False, False])
            monkeypatch.setattr(
                os, "copy_file_range", lambda *a, calls=calls, it=replacement: it(*a) if next(calls, False) else 0
            )
            with open(tmp_path / "copy", "w+b") as file:
                file.write(b"head")
                tensor.tofile(file)
                assert file.tell() == 4 + BIG.nbytes
            assert (tmp_path / "copy").read_bytes() == b"head" + BIG.tobytes()
        monkeypatch.setattr(os, "copy_file_range", fails(errno.EIO))
        with open(tmp_path / "copy", "w+b") as file, pytest.raises(OSError, match="error"):
            tensor.tofile(file)

    def test_a_file_that_got_shorter(self) -> None:
        with pytest.raises(MalformedModelError, match="ends 10 bytes too early"):
            external.read_into(io.BytesIO(bytes(20)), memoryview(bytearray(30)))

    def test_what_changed_is_named(self, tensor: ContainedTensor, tmp_path: Path) -> None:
        (tmp_path / "m.onnx.data").write_bytes(b"other")
        with pytest.raises(UnsafeModelError, match=r"^external data 'm.onnx.data' changed since"):
            tensor.tobytes()
        save(source(BODY, w=BIG), tmp_path / "one.onnx")
        inside = load(tmp_path / "one.onnx").graph.initializers["w"].const_value
        (tmp_path / "one.onnx").write_bytes(b"other")
        with pytest.raises(UnsafeModelError, match=r"^the model file 'one.onnx' changed since"):
            inside.tobytes()

    def test_a_pipe_is_no_matter_of_links(self, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        before, said = (
            os.listdir("/proc/self/fd"),
            r"'pipe' is not a regular file; copy the data into a file of its own$",
        )
        with pytest.raises(UnsafeModelError, match=said):
            external._open_below(str(tmp_path), ("pipe",), allow_links=False)
        assert os.listdir("/proc/self/fd") == before

    def test_a_location_may_hold_spaces(self) -> None:
        assert external.split_location("./a b/c d", "t") == ("a b", "c d")


class TestForAnEngine:
    def test_large_weights_travel_apart(self) -> None:
        large = np.zeros((256, 64), np.float32)  # the bytes from which they do
        shapes = {"big": large, "less": large[:, :63], "asked": large, "odd": large}
        body = "g (float[256,64] x, float[256,64] asked) => (float[256,64] y) { y = Add (x, big) }"
        made = source(body, **{name: np.ascontiguousarray(it) for name, it in shapes.items()})
        made.graph.initializers["odd"].const_value = ir.Tensor(np.zeros((256, 128), ml_dtypes.bfloat16), name="odd")
        before = to_proto(made).SerializeToString()
        parts = to_parts(made)
        assert list(parts.weights) == ["big"]
        proto = onnx.ModelProto.FromString(parts.data)
        given = [it.name for it in proto.graph.initializer if it.data_location == onnx.TensorProto.EXTERNAL]
        assert given == ["big"] and len(parts.data) < 4 * large.nbytes
        assert to_proto(made).SerializeToString() == before

    def test_a_graph_past_protobuf(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(parts_of, "PROTOBUF_LIMIT", 10)
        with pytest.raises(UnsupportedModelError, match=r"the graph has \d+ bytes without its weights"):
            to_parts(source())


class TestWrite:
    def test_room_is_taken_where_the_file_system_can(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        large = {"w": np.zeros(1 << 22, np.float32)}  # room is taken for 16 MB and more
        made = source(f"g (float[{1 << 22}] x) => (float[{1 << 22}] y) {{ y = Add (x, w) }}", **large)
        for number in (errno.EOPNOTSUPP, errno.EINVAL):
            monkeypatch.setattr(os, "posix_fallocate", fails(number))
            save(made, tmp_path / "m.onnx")
        monkeypatch.setattr(os, "posix_fallocate", fails(errno.ENOSPC))
        with pytest.raises(StorageError, match="No space left on device"):
            save(made, tmp_path / "m.onnx")
        monkeypatch.setattr(os, "mkdir", fails(errno.ENOSPC))
        with pytest.raises(StorageError, match="No space left on device"):
            save(source(), tmp_path / "m.onnx")
        assert to_proto(load(tmp_path / "m.onnx")) == to_proto(made)

    def test_a_model_past_protobuf_without_its_weights(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        assert DEFAULT_LIMITS.model_bytes == write.PROTOBUF_LIMIT
        monkeypatch.setattr(write, "PROTOBUF_LIMIT", 10)
        for asked in (None, True):
            with pytest.raises(UnsupportedModelError, match=r"would have \d+ bytes without its weights"):
                save(source(), tmp_path / "m.onnx", external_data=asked)
        assert os.listdir(tmp_path) == []


class TestCommit:
    def test_data_that_loses_its_model_is_noted_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A run that ends at the rename leaves the name for the next one, which removes the file."""
        save(source(BODY, w=BIG), tmp_path / "m.onnx", external_data=True)
        staged = stage(source(BODY, w=BIG), tmp_path / "m.onnx", external_data=False)
        assert staged.data_name is None
        with monkeypatch.context() as context:
            context.setattr(os, "rename", raises(KeyboardInterrupt()))
            with pytest.raises(KeyboardInterrupt):
                staged.commit()
        assert (Path(staged.folder) / "data").read_text() == "m.onnx.data"
        staged.commit()
        assert os.listdir(tmp_path) == ["m.onnx"]

    def test_the_folder_is_flushed_before_and_after_the_model_is_in_place(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        steps: list[str] = []
        rename, flush = os.rename, limits.sync_folder
        monkeypatch.setattr(os, "rename", lambda *names: (steps.append("rename"), rename(*names)))
        monkeypatch.setattr(limits, "sync_folder", lambda folder: (steps.append("flush"), flush(folder)))
        save(source(), tmp_path / "m.onnx")
        assert steps == ["flush", "rename", "flush"]

    def test_flushing_a_folder_leaves_nothing_open(self, tmp_path: Path) -> None:
        before = len(os.listdir("/proc/self/fd"))
        limits.sync_folder(str(tmp_path))
        limits.sync_folder(str(tmp_path / "missing"))
        assert len(os.listdir("/proc/self/fd")) == before

    def test_errors_of_the_target_name_it_and_others_stay(self, tmp_path: Path) -> None:
        target = tmp_path / "t"
        for error, named in (
            (OSError(errno.ENOSPC, "full"), str(target)),
            (FileNotFoundError(errno.ENOENT, "gone", "elsewhere"), "elsewhere"),
        ):
            with pytest.raises(OSError, match=r"full|gone") as caught, staging.whole_file(target):
                raise error
            assert caught.value.filename == named
        with pytest.raises(OSError, match="cannot be written: gone") as caught, staging.whole_file(target) as staged:
            raise FileNotFoundError(errno.ENOENT, "gone", staged)
        assert caught.value.filename == str(target)

    @pytest.mark.parametrize("umask", [0, 0o022, 0o077])
    def test_a_file_has_the_mode_that_the_umask_leaves(self, tmp_path: Path, umask: int) -> None:
        before = os.umask(umask)
        try:
            with staging.whole_file(tmp_path / "t") as staged:
                os.close(os.open(staged, os.O_CREAT | os.O_WRONLY, 0o600))
        finally:
            os.umask(before)
        assert (tmp_path / "t").stat().st_mode & 0o777 == 0o666 & ~umask

    def test_processes_that_live(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert limits.is_alive(os.getpid()) is True
        monkeypatch.setattr(os, "kill", raises(PermissionError()))
        assert limits.is_alive(1) is True


def test_what_parsing_says_of_memory() -> None:
    for error in (MemoryError(), DecodeError("cannot alloc")):
        with pytest.raises(UnsafeModelError, match="'m' needs more memory than there is"):
            read._parse(raises(error), "m")
    with pytest.raises(MalformedModelError, match="'m' is truncated"):
        read._parse(raises(DecodeError("bad tag")), "m")


def test_a_refusal_while_the_graph_is_built_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir.serde, "deserialize_model", raises(UnsafeModelError("no")))
    with pytest.raises(UnsafeModelError, match=r"^no$"):
        source()


class TestLeftovers:
    def folder(self, directory: Path, pid: int, name: str = "m.onnx") -> Path:
        made = directory / f".{name}.{pid}-0123abcd.bnexport"
        made.mkdir()
        return made

    def test_of_runs_that_ended(self, tmp_path: Path) -> None:
        ended, alive, other = (
            self.folder(tmp_path, *it) for it in ((2**22 + 1,), (os.getpid(),), (2**22 + 1, "n.onnx"))
        )
        for name in ("m.onnx.data", "m.onnx.2.data", "n.onnx.data"):
            (tmp_path / name).write_bytes(b"")
        (ended / "data").write_text("m.onnx.data\nn.onnx.data\n../x")
        made = Path(staging.make_folder(str(tmp_path / "m.onnx")))
        assert not ended.exists() and alive.exists() and other.exists() and made.is_dir()
        assert sorted(path.name for path in tmp_path.glob("*.data")) == ["m.onnx.2.data", "n.onnx.data"]

    def test_names_that_are_free(self, tmp_path: Path) -> None:
        target = tmp_path / "m.onnx"
        for expected in ("m.onnx.data", "m.onnx.1.data", "m.onnx.2.data"):
            assert staging.free_data_name(str(target)) == expected
            (tmp_path / expected).symlink_to("nowhere")

    def test_without_hard_links(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "link", fails(errno.EPERM))
        for _ in range(2):
            save(source(BODY, w=BIG), tmp_path / "m.onnx", external_data=True)
        assert len(os.listdir(tmp_path)) == 2
        assert load(tmp_path / "m.onnx").graph.initializers["w"].const_value.tobytes() == BIG.tobytes()


def test_the_innermost_error() -> None:
    try:
        try:
            raise ValueError("first line\nsecond")
        except ValueError as error:
            raise RuntimeError("outer") from error
    except RuntimeError as error:
        assert innermost(error) == "first line"
    assert innermost(KeyError()) == "KeyError"


def test_a_weight_that_nothing_reads_stays_inside() -> None:
    """ONNX Runtime drops it, and fails where it is given as well."""
    made = source(BODY, w=BIG, unused=BIG)
    assert list(to_parts(made).weights) == ["w"]
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    assert engine.open(made, options=options).run({"x": np.ones((1, 300), np.float32)})[0].shape == (1, 256)


# Modules and names of POSIX. What the standard library needs of them itself is imported before they go.
HIDE = """
import multiprocessing.reduction, os, shutil, signal, socket, subprocess, sys, tempfile, threading
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for name in ("fork", "pread", "copy_file_range", "O_NOFOLLOW", "O_DIRECTORY", "O_NONBLOCK", "O_CLOEXEC", "getuid"):
    delattr(os, name)
for name in ("setitimer", "SIGALRM", "SIGKILL"):
    delattr(signal, name)
for name in ("send_fds", "recv_fds"):
    delattr(socket, name)
os.supports_dir_fd.clear()
shutil._use_fd_functions = False
tempfile._bin_openflags = tempfile._text_openflags = os.O_RDWR | os.O_CREAT | os.O_EXCL
"""
FOLD = """
import bnexport, onnx, os
from bnexport.model_io import limits as systems
from bnexport.verification import process
assert not systems.HANDS_OVER
process._START = HIDE + process._START
report = bnexport.fold("kept.onnx", "folded.onnx", external_data=True).report
assert report.verification.status == "passed", report.verification
bnexport.fold("folded.onnx", "again.onnx")
seen = bnexport.verify("kept.onnx", "folded.onnx")
assert seen.status == "passed" and seen.engine == "onnxruntime " + __import__("onnxruntime").__version__, seen
changed = onnx.load("folded.onnx")
weights = onnx.numpy_helper.to_array(changed.graph.initializer[0]).copy()
weights.flat[0] += 1
changed.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(weights, changed.graph.initializer[0].name))
onnx.save(changed, "wrong.onnx")
assert bnexport.verify("kept.onnx", "wrong.onnx").status == "failed"
assert sorted(os.listdir(".")) == ["again.onnx", "folded.onnx", "folded.onnx.data", "kept.onnx", "wrong.onnx"]
"""


def test_a_system_without_posix_folds_and_verifies(tmp_path: Path) -> None:
    from tools.check_install import MODEL

    subprocess.run([sys.executable, "-c", MODEL], cwd=tmp_path, check=True)
    source = f"HIDE = {HIDE!r}\nimport numpy, onnx\nexec(HIDE)\n{FOLD}"
    done = subprocess.run([sys.executable, "-c", source], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("walks", [True, False])
def test_links_are_refused_anywhere_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, walks: bool) -> None:
    monkeypatch.setattr(limits, "_WALKS", walks)
    (tmp_path / "a").mkdir()
    (tmp_path / "a/file").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    (tmp_path / "a/link").symlink_to(tmp_path / "a/file")
    before = os.listdir("/proc/self/fd")
    with open(limits.open_below(str(tmp_path), ("a", "file")), "rb") as file:
        assert limits.pread(file.fileno(), 5, 0) == b"x"
    for parts in (("link", "file"), ("a", "link")):
        with pytest.raises(OSError):
            limits.open_below(str(tmp_path), parts)
    assert os.listdir("/proc/self/fd") == before
