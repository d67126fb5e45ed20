"""What a group sends: its ranks are threads of this process, each with a group of its own name."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bnexport import schema
from bnexport.native import capi
from tests.runtime.test_communicator import check_forward
from tests.support.node_models import echo, forward_feeds, forward_model, grad_model, run


class Meeting:
    """Gathers where all ranks meet. Real transports abort where ranks send different sizes."""

    def __init__(self, size: int) -> None:
        self.barrier, self.sent = threading.Barrier(size, timeout=60), [b""] * size
        self.callbacks = [capi.ALL_GATHER(lambda *given, rank=rank: self.gather(rank, *given)) for rank in range(size)]

    def gather(self, rank, _, send, receive, count, error, capacity):
        self.sent[rank] = ctypes.string_at(send, 8 * count)
        self.barrier.wait()
        if {len(row) for row in self.sent} != {8 * count}:
            return 1
        ctypes.memmove(receive, b"".join(self.sent), 8 * count * len(self.sent))
        self.barrier.wait()
        return 0


def on_every_rank(models, feeds):
    """The results of all ranks, or the texts of their errors. models: functions of the attributes of the group."""
    size, meeting = len(models), Meeting(len(models))
    for rank, callback in enumerate(meeting.callbacks):
        capi.register_group(f"rank{rank}", size, rank, callback)

    def one(rank):
        try:
            return run(models[rank](group=f"rank{rank}", group_size=size), feeds[rank])
        except Exception as error:
            return str(error)

    try:
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(one, range(size)))
    finally:
        for rank in range(size):
            capi.unregister_group(f"rank{rank}")


@pytest.mark.parametrize("channels", [1, 64, 2105, 2106, 4500])  # at the ends of messages, and past them
def test_rows_arrive_in_rank_order(channels):
    rng = np.random.default_rng(3)
    common = forward_feeds(rng, (1, channels, 1))
    xs = [rng.normal(size=(rows, channels, 2)).astype(np.float32) for rows in (2, 3, 1)]
    feeds = [common | {"input": x} for x in xs]
    check_forward(on_every_rank([lambda **group: forward_model(ranks=3, **group)] * 3, feeds), xs, common)


def of(**options):
    return lambda **group: forward_model(**{"name": "bn1", **group, **options})


FEEDS = forward_feeds(np.random.default_rng(0), (2, 4, 3, 3))
FEEDS |= {"grad_output": FEEDS["input"], "saved_mean": FEEDS["bias"], "saved_invstd": FEEDS["running_var"]}
WIDE = {name: value.astype(np.float64) for name, value in FEEDS.items()}
MANY = forward_feeds(np.random.default_rng(0), (2, 9000, 3, 3))


@pytest.mark.parametrize(
    ("other", "feeds", "message"),
    [
        (
            of(),
            forward_feeds(np.random.default_rng(0), (2, 5, 3, 3)),
            "number of channels of rank {}: got {}, expected {}",
        ),
        (of(), MANY, "number of channels"),
        (of(dtype="float64"), WIDE, "data type"),
        (of(stats_mode="N"), FEEDS, "stats_mode"),
        (of(name="bn2"), FEEDS, "not running the same node: node name"),
        (lambda **group: grad_model(name="bn1", **group), FEEDS, "direction"),
        (of(group_size=3), FEEDS, "attribute 'group_size': got 3, expected 2"),
    ],
    ids=["channels", "many channels", "dtype", "stats_mode", "node", "direction", "group_size"],
)
def test_disagreement_is_an_error_on_every_rank(other, feeds, message):
    models = [of(group_size=3) if "group_size" in message else of(), other]
    results = on_every_rank(models, [FEEDS, feeds])
    said = [message.format(1, 5, 4), message.format(0, 4, 5)]
    assert all(text in result for text, result in zip(said, results, strict=True)), results


def test_a_transport_that_fails():
    @capi.ALL_GATHER
    def fail(_, send, receive, count, error, capacity):
        ctypes.memmove(error, b"the peer is gone\0", 17)
        return 1

    capi.register_group("broken", 2, 1, fail)
    try:
        with pytest.raises(Exception, match=r"group 'broken', rank 1 of 2.*the peer is gone"):
            run(forward_model(group="broken", group_size=2), FEEDS)
    finally:
        capi.unregister_group("broken")


def test_groups_come_and_go_in_many_threads():
    def rounds(number):
        for _ in range(200):
            capi.register_group(f"group{number}", 2, 0, echo)
            capi.unregister_group(f"group{number}")

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(rounds, range(4)))


@pytest.mark.parametrize("operator", schema.OPERATORS, ids=lambda operator: operator.name)
def test_a_number_is_the_name_of_a_group(operator):
    """MMCV's own exporter writes the attribute `group` as an int."""
    make = forward_model if operator is schema.SYNC_BATCH_NORM else grad_model
    capi.register_group("12", 2, 0, echo)
    try:
        alone, pair = run(make(), FEEDS), run(make(group="12", group_size=2), FEEDS)
        cases = [(make(group=number, group_size=1), alone) for number in (0, 12, -1, 2**63 - 1)]  # not asked
        for model, expected in (*cases, (make(group=12, group_size=2), pair)):
            for name, value in run(model, FEEDS).items():
                np.testing.assert_array_equal(value, expected[name], err_msg=name)
    finally:
        capi.unregister_group("12")
    if operator is schema.SYNC_BATCH_NORM:  # twice the batch has another unbiased variance
        assert not np.array_equal(pair["running_var_out"], alone["running_var_out"])
