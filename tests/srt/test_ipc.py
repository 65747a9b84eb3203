"""Sockets that never block and cannot be stopped by a malformed frame."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srt import ipc
from srt.cache_messages import CallReply
from srt.ipc import Inbox, Outbox
from srt.messages import Abort, FrontInbox, SchedulerInbox, Shutdown, pack_ids, unpack_ids
from tests import noise

PATIENCE_SECONDS = 30.0


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def endpoint(run_base: Path) -> str:
    return f"ipc://{run_base}/inbox.sock"


@pytest.fixture
def inbox(context: zmq.Context[Any], endpoint: str) -> Iterator[Inbox[SchedulerInbox]]:
    made: Inbox[SchedulerInbox] = Inbox(context, endpoint, SchedulerInbox)
    yield made
    made.close()


@pytest.fixture
def outbox(context: zmq.Context[Any], endpoint: str) -> Iterator[Outbox]:
    made = Outbox(context, endpoint)
    yield made
    made.close()


def receive(inbox: Inbox[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        assert inbox.wait(PATIENCE_SECONDS), f"only {len(messages)} of {count} came"
        messages += inbox.drain()
    return messages


def receive_while_flushing(inbox: Inbox[Any], outbox: Outbox, count: int) -> list[Any]:
    """As `receive`, where the sender has more than ZeroMQ takes at once."""
    messages: list[Any] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(messages) < count:
        assert time.monotonic() < deadline, f"only {len(messages)} of {count} came"
        outbox.flush()
        if inbox.wait(0.01):
            messages += inbox.drain()
    return messages


def aborts(ids: range) -> list[Abort]:
    return [Abort(str(index)) for index in ids]


def test_messages_arrive_in_order_also_when_the_reader_comes_later(
    context: zmq.Context[Any], endpoint: str, outbox: Outbox
) -> None:
    for message in aborts(range(500)):
        outbox.send(message)
    inbox: Inbox[SchedulerInbox] = Inbox(context, endpoint, SchedulerInbox)
    assert receive(inbox, 500) == aborts(range(500))
    inbox.close()


def test_what_is_no_message_is_counted_and_dropped(inbox: Inbox[Any], outbox: Outbox) -> None:
    for frame in (b"", b"\xc1", os.urandom(50), msgspec.msgpack.encode({"type": "nothing"}), b"\x81"):
        outbox.socket.send(frame)
    outbox.send(CallReply("a reply is not for this inbox", True))
    outbox.socket.send(msgspec.msgpack.encode({"type": "abort", "rid": 5}))
    outbox.send(Shutdown())
    assert receive(inbox, 1) == [Shutdown()]
    assert inbox.malformed == 7


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200))
def test_no_frame_stops_an_inbox(context: zmq.Context[Any], endpoint: str, frame: bytes) -> None:
    inbox: Inbox[FrontInbox] = Inbox(context, endpoint, FrontInbox)
    outbox = Outbox(context, endpoint)
    outbox.socket.send(frame)
    outbox.send(CallReply("end", True))
    messages: list[Any] = []
    while CallReply("end", True) not in messages:
        messages += receive(inbox, 1)
    inbox.close()
    outbox.close()


# The last ones say, in the protocol's first version and in its third, that a frame follows.
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.binary(max_size=200)
    | st.binary(max_size=100).map(lambda data: b"\x01\x00" + data)
    | st.binary(max_size=100).map(lambda data: b"\xff" + bytes(8) + b"\x7f\x03" + data)
)
def test_no_stream_of_bytes_harms_other_senders(context: zmq.Context[Any], endpoint: str, data: bytes) -> None:
    inbox: Inbox[FrontInbox] = Inbox(context, endpoint, FrontInbox)
    outbox = Outbox(context, endpoint)
    outbox.send(CallReply("before", True))
    noise.write(endpoint, data)
    outbox.send(CallReply("behind", True))
    messages: list[Any] = []
    while len(messages) < 2:
        messages += [message for message in receive(inbox, 1) if message.call_id in ("before", "behind")]
    assert [message.call_id for message in messages] == ["before", "behind"]
    inbox.close()
    outbox.close()


def test_a_sender_of_more_than_a_frame_holds_is_cut_off(
    context: zmq.Context[Any], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 1000)
    inbox: Inbox[SchedulerInbox] = Inbox(context, endpoint, SchedulerInbox)
    foreign = context.socket(zmq.PUSH)
    monitor = foreign.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    foreign.connect(endpoint)
    foreign.send(msgspec.msgpack.encode(Abort("x" * 1001)))
    assert monitor.poll(PATIENCE_SECONDS * 1000)
    foreign.disable_monitor()
    outbox = Outbox(context, endpoint)
    outbox.send(Shutdown())
    assert receive(inbox, 1) == [Shutdown()]
    for socket in (foreign, inbox, outbox):
        socket.close()


def test_a_message_longer_than_any_may_be_is_not_sent(
    inbox: Inbox[Any], outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "MAX_FRAME_BYTES", 1000)
    outbox.send(Abort("x" * 1001))
    outbox.send(Abort("short"))
    assert outbox.dropped == 1
    assert receive(inbox, 1) == [Abort("short")]


def test_a_message_larger_than_what_the_system_keeps_arrives_whole(inbox: Inbox[Any], outbox: Outbox) -> None:
    large = Abort("".join(map(str, range(4_000_000))))
    for message in (Abort("before"), large, Abort("behind")):
        outbox.send(message)
    assert receive(inbox, 3) == [Abort("before"), large, Abort("behind")]


def test_sending_to_nobody_does_not_block_and_drops_the_oldest(
    context: zmq.Context[Any], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "HIGH_WATER_FRAMES", 100)
    outbox = Outbox(context, endpoint, max_waiting=10)
    for message in aborts(range(200)):
        outbox.send(message)
    assert not outbox.flush()
    # What ZeroMQ has taken is not taken back; of what waits behind it the newest are left.
    assert outbox.dropped == 90
    inbox: Inbox[SchedulerInbox] = Inbox(context, endpoint, SchedulerInbox)
    assert receive_while_flushing(inbox, outbox, 110) == aborts(range(100)) + aborts(range(190, 200))
    assert outbox.flush()
    inbox.close()
    outbox.close()


def test_a_reader_that_takes_nothing_holds_a_bounded_number_of_frames(
    context: zmq.Context[Any], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "HIGH_WATER_FRAMES", 100)
    inbox: Inbox[SchedulerInbox] = Inbox(context, endpoint, SchedulerInbox)
    outbox = Outbox(context, endpoint)
    # More than the system keeps for a socket.
    sent = [Abort(str(index) * 20_000) for index in range(1000)]
    for message in sent:
        outbox.send(message)
    assert not outbox.flush()
    assert receive_while_flushing(inbox, outbox, len(sent)) == sent
    inbox.close()
    outbox.close()


def test_what_is_sent_once_the_reader_is_gone_goes_to_the_next(endpoint: str, outbox: Outbox) -> None:
    place: zmq.Context[Any] = zmq.Context()
    first: Inbox[Any] = Inbox(place, endpoint, SchedulerInbox)
    outbox.send(Abort("taken"))
    assert receive(first, 1) == [Abort("taken")]
    monitor = outbox.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    place.destroy(linger=0)
    assert monitor.poll(PATIENCE_SECONDS * 1000)
    outbox.socket.disable_monitor()
    for message in aborts(range(500)):
        outbox.send(message)
    place = zmq.Context()
    second: Inbox[Any] = Inbox(place, endpoint, SchedulerInbox)
    assert receive(second, 500) == aborts(range(500))
    place.destroy(linger=0)


def test_a_change_of_readers_while_much_is_sent_repeats_nothing_and_keeps_the_order(
    endpoint: str, outbox: Outbox
) -> None:
    ids: list[int] = []
    number = 0
    for _ in range(5):
        place: zmq.Context[Any] = zmq.Context()
        inbox: Inbox[Any] = Inbox(place, endpoint, SchedulerInbox)
        begin = number
        # What was under way to the last reader is lost, what is sent now comes.
        while not ids or ids[-1] < begin:
            for message in aborts(range(number, number + 50)):
                outbox.send(message)
            number += 50
            assert inbox.wait(PATIENCE_SECONDS)
            ids += [int(message.rid) for message in inbox.drain()]
        place.destroy(linger=0)
    assert ids == sorted(set(ids))


def test_an_end_of_the_reading_leaves_the_rest_for_the_next(inbox: Inbox[Any], outbox: Outbox) -> None:
    for message in aborts(range(5)):
        outbox.send(message)
    assert inbox.wait(PATIENCE_SECONDS)
    assert next(inbox.drain()) == Abort("0")
    assert receive(inbox, 4) == aborts(range(1, 5))


def test_who_drains_whenever_the_descriptor_tells_misses_nothing(inbox: Inbox[Any], outbox: Outbox) -> None:
    descriptor = inbox.fileno()

    def send() -> None:
        for message in aborts(range(20_000)):
            outbox.send(message)

    sender = threading.Thread(target=send)
    sender.start()
    found: list[Any] = []
    while len(found) < 20_000:
        assert select.select([descriptor], [], [], PATIENCE_SECONDS)[0], f"not told of more than {len(found)}"
        found += inbox.drain()
    sender.join(PATIENCE_SECONDS)
    assert found == aborts(range(20_000))
    assert not select.select([descriptor], [], [], 0.0)[0]


def test_a_lingering_outbox_waits_for_its_reader(
    context: zmq.Context[Any], endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ipc, "HIGH_WATER_FRAMES", 10)
    place: zmq.Context[Any] = zmq.Context()
    outbox = Outbox(place, endpoint)
    for message in [*aborts(range(50)), Shutdown()]:
        outbox.send(message)
    assert not outbox.flush()
    found: list[Any] = []

    def read() -> None:
        inbox: Inbox[SchedulerInbox] = Inbox(context, endpoint, SchedulerInbox)
        found.extend(receive(inbox, 51))
        inbox.close()

    reader = threading.Thread(target=read)
    reader.start()
    outbox.close(linger_seconds=PATIENCE_SECONDS)
    place.term()
    reader.join(PATIENCE_SECONDS)
    assert found == [*aborts(range(50)), Shutdown()]


def test_an_outbox_that_does_not_linger_keeps_nobody_from_leaving(endpoint: str) -> None:
    place: zmq.Context[Any] = zmq.Context()
    outbox = Outbox(place, endpoint)
    outbox.send(Shutdown())
    outbox.close()
    place.term()
    assert place.closed


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


def test_a_wait_ends_when_another_descriptor_becomes_readable(inbox: Inbox[Any]) -> None:
    readable, writable = os.pipe()
    assert not inbox.wait(0.0, readable)
    os.write(writable, b"x")
    assert inbox.wait(PATIENCE_SECONDS, readable)
    assert not inbox.wait(0.0)
    for descriptor in (readable, writable):
        os.close(descriptor)
