"""What only CUDA operators do: device groups. test_cuda_adapter.py runs this file over its stand-in library."""

from __future__ import annotations

import ctypes
import datetime
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from bnexport import tolerances
from bnexport.errors import GroupError
from bnexport.native import capi, nccl
from bnexport.native.library import get_library_path
from bnexport.runtime import communicator, device_groups
from bnexport.sync_bn import distributed
from tests.support import kernel_oracle as oracle
from tests.support.node_models import forward_feeds, forward_model, grad_model, session

# int all_gather(context, send, receive, count, stream, error, capacity)
DEVICE_ALL_GATHER = ctypes.CFUNCTYPE(
    ctypes.c_int, *(ctypes.c_void_p,) * 3, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t
)
HEADER = 12


class Peer:
    """A device group of two whose other member's rows are known: this process is rank 0."""

    def __init__(self, name: str, rows: list[np.ndarray], header_of_peer=lambda mine: mine, fails: str = "") -> None:
        self.counts: list[int] = []
        self.rows = list(rows)

        def all_gather(_, send, receive, count, stream, error, capacity) -> int:
            self.counts.append(count)
            if fails:
                ctypes.memmove(error, fails.encode() + b"\0", len(fails) + 1)
                return 1
            mine = np.ctypeslib.as_array((ctypes.c_double * count).from_address(send))
            theirs = header_of_peer(mine.copy()) if count == HEADER else self.rows.pop(0)
            np.ctypeslib.as_array((ctypes.c_double * (2 * count)).from_address(receive))[:] = np.concatenate(
                [mine, theirs]
            )
            return 0

        self.callback = DEVICE_ALL_GATHER(all_gather)
        error = ctypes.create_string_buffer(512)
        register = capi.library().bnexport_register_device_group
        text = (ctypes.c_char_p, ctypes.c_size_t)
        register.argtypes = (ctypes.c_char_p, ctypes.c_int64, ctypes.c_int64, DEVICE_ALL_GATHER, ctypes.c_void_p, *text)
        assert register(name.encode(), 2, 0, self.callback, None, error, 512) == 0, error.value


def bytes_to_host() -> int:
    library = ctypes.CDLL(get_library_path().replace("bnexport_ops", "bnexport_ops_cuda"))
    library.fake_cuda_bytes_to_host.restype = ctypes.c_size_t
    return library.fake_cuda_bytes_to_host()


def forward_row(x: np.ndarray) -> np.ndarray:
    x = np.moveaxis(x.astype(np.float64), 1, 0).reshape(x.shape[1], -1)
    mean = x.mean(1)
    return np.concatenate([[x.shape[1]], mean, ((x - mean[:, None]) ** 2).sum(1)])


def test_a_device_group_is_used_and_agrees_once() -> None:
    rng = np.random.default_rng(0)
    feeds, other = forward_feeds(rng, (3, 5, 4, 4)), rng.normal(size=(2, 5, 6, 6)) + 1
    peer = Peer("pair", [forward_row(other)] * 3)
    model = session(forward_model(group="pair", group_size=2))
    before = bytes_to_host()
    for run in range(3):
        outputs = dict(zip([output.name for output in model.get_outputs()], model.run(None, feeds), strict=True))
        want = oracle.forward(
            [feeds["input"], other], feeds["weight"], feeds["bias"], feeds["running_mean"], feeds["running_var"]
        )[0]
        bound = tolerances.forward(
            "float32", condition=oracle.condition_of(feeds["input"], want.mean, want.invstd), weight=4.0
        )
        oracle.assert_within(outputs["output"], want.y, bound, "output")
        oracle.assert_within(outputs["saved_mean"], want.mean, tolerances.statistic("float32", scale=4.0), "saved_mean")
        # After the first run nothing waits for the device.
        assert bytes_to_host() - before == 8 * 2 * HEADER, run
    assert peer.counts == [HEADER, 11, 11, 11]


def test_threads_share_a_session() -> None:
    model = session(forward_model())

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(25):
            feeds = forward_feeds(rng, (3, 5, 4, 4))
            outputs = dict(zip([output.name for output in model.get_outputs()], model.run(None, feeds), strict=True))
            want = oracle.forward(
                [feeds["input"]], feeds["weight"], feeds["bias"], feeds["running_mean"], feeds["running_var"]
            )[0]
            bound = tolerances.statistic("float32", scale=4.0)
            oracle.assert_within(outputs["saved_mean"], want.mean, bound, "saved_mean")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_the_gradient_agrees_on_its_own() -> None:
    rng = np.random.default_rng(1)
    x = rng.normal(size=(2, 4, 3, 3)).astype(np.float32)
    feeds = {
        "grad_output": rng.normal(size=x.shape).astype(np.float32),
        "input": x,
        "weight": rng.normal(size=4).astype(np.float32),
        "saved_mean": x.mean((0, 2, 3)),
        "saved_invstd": np.ones(4, np.float32),
    }
    peer = Peer("pair", [np.concatenate([[18.0], np.zeros(8)])])
    outputs = session(grad_model(group="pair", group_size=2)).run(None, feeds)
    assert peer.counts == [HEADER, 9]
    # The other process has as many values and no gradient: the sums count for twice as many.
    dy, centred = feeds["grad_output"].astype(np.float64), x - feeds["saved_mean"][:, None, None].astype(np.float64)
    axes, n = (0, 2, 3), 36
    want = feeds["weight"][:, None, None] * (
        dy - dy.sum(axes)[:, None, None] / n - centred * (dy * centred).sum(axes)[:, None, None] / n
    )
    np.testing.assert_allclose(outputs[0], want, atol=1e-5)


@pytest.mark.parametrize(("field", "what"), [(2, "number of channels"), (5, "stats_mode"), (9, "node name")])
def test_another_node_on_the_other_device_is_an_error(field: int, what: str) -> None:
    def changed(header: np.ndarray) -> np.ndarray:
        header[field] += 1
        return header

    feeds = forward_feeds(np.random.default_rng(0), (3, 5, 4, 4))
    peer = Peer("pair", [], changed)
    with pytest.raises(Exception, match=f"not running the same node: {what}.* of rank 1"):
        session(forward_model(group="pair", group_size=2)).run(None, feeds)
    assert peer.counts == [HEADER]


def test_what_the_collective_reports_is_passed_on() -> None:
    feeds = forward_feeds(np.random.default_rng(0), (3, 5, 4, 4))
    peer = Peer("pair", [], fails="NCCL: remote process exited")
    with pytest.raises(
        Exception, match="group 'pair', rank 0 of 2: the collective failed: NCCL: remote process exited"
    ):
        session(forward_model(group="pair", group_size=2)).run(None, feeds)
    assert peer.counts == [HEADER]


def test_the_size_of_a_device_group_is_checked() -> None:
    feeds = forward_feeds(np.random.default_rng(0), (3, 5, 4, 4))
    Peer("pair", [])
    with pytest.raises(Exception, match="attribute 'group_size': got 3, expected 2"):
        session(forward_model(group="pair", group_size=3)).run(None, feeds)


@pytest.fixture
def fake_nccl(monkeypatch: pytest.MonkeyPatch):
    """libnccl whose ranks are threads, and a store for them; no GPU."""
    store = dist.HashStore()
    store.set_timeout(datetime.timedelta(seconds=2))
    path = Path(get_library_path()).with_name("libfake_nccl.so")
    monkeypatch.setattr(nccl, "_nccl", lambda: str(path).encode())
    monkeypatch.setattr(device_groups, "_joined", {})
    monkeypatch.setattr(distributed, "store_of", lambda name: store)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return store


def test_members_join_and_gather(fake_nccl) -> None:
    assert nccl.version() == "2.27.3"

    def member(rank: int) -> list[float]:
        joined = device_groups.join("pair", 2, rank)
        gather = DEVICE_ALL_GATHER(joined.all_gather)
        send, receive = (ctypes.c_double * 2)(rank, 10.0), (ctypes.c_double * 4)()
        error = ctypes.create_string_buffer(256)
        assert (
            gather(
                joined.context, ctypes.addressof(send), ctypes.addressof(receive), 2, None, ctypes.addressof(error), 256
            )
            == 0
        )
        deadline = time.monotonic() + 10
        while receive[2] != 1.0 and time.monotonic() < deadline:
            time.sleep(0.001)
        joined.leave()
        joined.leave()
        return list(receive)

    for _ in range(2):  # a group may be registered again
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(member, range(2))) == [[0.0, 10.0, 1.0, 10.0]] * 2


def test_a_gather_that_was_aborted_can_be_asked_about(fake_nccl) -> None:
    """A training session asks before it updates its state."""

    def member(rank: int) -> str:
        joined = device_groups.join("pair", 2, rank)
        joined.check()
        if rank == 1:
            time.sleep(3.5)  # elsewhere, past the timeout
            joined.leave()
            return ""
        gather = DEVICE_ALL_GATHER(joined.all_gather)
        send, receive, error = (ctypes.c_double * 1)(1.0), (ctypes.c_double * 2)(), ctypes.create_string_buffer(256)
        addresses = (ctypes.addressof(send), ctypes.addressof(receive))
        assert gather(joined.context, *addresses, 1, None, ctypes.addressof(error), 256) == 0
        communicator._communicators["pair"] = joined
        try:
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    communicator.check_group("pair")
                except GroupError as failure:
                    assert all(np.isnan(receive))
                    return str(failure)
                time.sleep(0.05)
            return "no error"
        finally:
            del communicator._communicators["pair"]
            joined.leave()

    with ThreadPoolExecutor(2) as pool:
        message = next(iter(pool.map(member, range(2))))
    assert "group 'pair': the collective failed: NCCL: an all-gather did not end within 2" in message
    communicator.check_group("pair")  # nothing to ask


def test_a_member_that_does_not_join_is_an_error(fake_nccl) -> None:
    with pytest.raises(GroupError, match="joining the group did not end within 2"):
        device_groups.join("pair", 2, 0)
    fake_nccl.delete_key("bnexport/nccl/1")
    with pytest.raises(GroupError, match="rank 0 did not join within the group's timeout"):
        device_groups.join("other", 2, 1)


def test_a_group_over_nccl_is_registered_for_both_kinds_of_node(fake_nccl, monkeypatch, tmp_path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    registered = []
    monkeypatch.setattr(distributed, "backend_of", lambda name, device: "nccl" if device == "cuda" else "gloo")
    monkeypatch.setattr(capi, "register_device_group", lambda *arguments: registered.append(arguments))
    try:
        communicator.register_group("world")
        (name, size, rank, all_gather, context) = registered[0]
        assert (name, size, rank) == ("world", 1, 0)
        assert all_gather and context
        communicator.register_group("world")
        assert len(registered) == 2
        communicator.unregister_group("world")
    finally:
        dist.destroy_process_group()


def test_without_nccl_the_message_says_what_to_install(monkeypatch) -> None:
    monkeypatch.setattr(nccl, "_nccl", lambda: b"/nowhere/libnccl.so.2")
    with pytest.raises(GroupError, match=r"libnccl\.so\.2: cannot be opened.*install nvidia-nccl"):
        nccl.version()
