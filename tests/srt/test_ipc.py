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
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srt import ipc
from srt.cache_messages import CallReply
from srt.ipc import Inbox, Outbox
from srt.messages import Abort, FrontInbox, SchedulerInbox, Shutdown, pack_ids, unpack_ids
from tests import frames

PATIENCE_SECONDS = 30.0


@pytest.fixture
def path(run_base: Path) -> str:
    return f"{run_base}/inbox.sock"


@pytest.fixture
def inbox(path: str) -> Iterator[Inbox[SchedulerInbox]]:
    made: Inbox[SchedulerInbox] = Inbox(path, SchedulerInbox)
    yield made
    made.close()


@pytest.fixture
def outbox(path: str) -> Iterator[Outbox]:
    made = Outbox(path)
    yield made
    made.close()


def receive(inbox: Inbox[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        assert inbox.wait(10.0), f"only {len(messages)} of {count} came"
        messages += inbox.drain()
    return messages


def receive_while_flushing(inbox: Inbox[Any], outbox: Outbox, count: int) -> list[Any]:
    """As `receive`, where the sender has more to write than the system keeps."""
    messages: list[Any] = []
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(messages) < count:
        assert time.monotonic() < deadline, f"only {len(messages)} of {count} came"
        outbox.flush()
        messages += inbox.drain()
    return messages


def test_messages_arrive_in_order_also_when_the_reader_comes_later(path: str, outbox: Outbox) -> None:
    for index in range(500):
        outbox.send(Abort(str(index)))
    assert not outbox.flush()
    inbox: Inbox[SchedulerInbox] = Inbox(path, SchedulerInbox)
    assert outbox.flush()
    assert receive(inbox, 500) == [Abort(str(index)) for index in range(500)]
    inbox.close()


def test_what_is_no_message_is_counted_and_dropped(path: str, inbox: Inbox[Any]) -> None:
    broken = [b"", b"\xc1", os.urandom(50), msgspec.msgpack.encode({"type": "nothing"}), b"\x81"]
    broken += [msgspec.msgpack.encode(CallReply("a reply is not for this inbox", True))]
    broken += [msgspec.msgpack.encode({"type": "abort", "rid": 5})]
    frames.write(path, b"".join(map(frames.framed, [*broken, msgspec.msgpack.encode(Shutdown())])))
    assert receive(inbox, 1) == [Shutdown()]
    assert inbox.malformed == 7


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200))
def test_no_frame_stops_an_inbox(path: str, frame: bytes) -> None:
    inbox: Inbox[FrontInbox] = Inbox(path, FrontInbox)
    frames.write(path, frames.framed(frame) + frames.framed(msgspec.msgpack.encode(CallReply("end", True))))
    messages: list[Any] = []
    while CallReply("end", True) not in messages:
        messages += receive(inbox, 1)
    inbox.close()


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200))
def test_no_stream_of_bytes_harms_other_senders(path: str, noise: bytes) -> None:
    inbox: Inbox[FrontInbox] = Inbox(path, FrontInbox)
    outbox = Outbox(path)
    outbox.send(CallReply("before", True))
    frames.write(path, noise)
    outbox.send(CallReply("behind", True))
    messages: list[Any] = []
    while len(messages) < 2:
        messages += [message for message in receive(inbox, 1) if message.call_id in ("before", "behind")]
    assert [message.call_id for message in messages] == ["before", "behind"]
    inbox.close()
    outbox.close()


def test_a_sender_that_announces_more_than_a_frame_holds_is_cut_off(
    path: str, inbox: Inbox[Any], outbox: Outbox
) -> None:
    frames.write(path, (ipc.MAX_FRAME_BYTES + 1).to_bytes(4, "little") + frames.framed(b"never looked at"))
    outbox.send(Shutdown())
    assert receive(inbox, 1) == [Shutdown()]
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not inbox.malformed:
        assert time.monotonic() < deadline
        assert not list(inbox.drain())
    assert inbox.malformed == 1


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
    outbox.send(Abort("before"))
    outbox.send(large)
    outbox.send(Abort("behind"))
    assert not outbox.flush()
    messages = receive_while_flushing(inbox, outbox, 3)
    assert messages == [Abort("before"), large, Abort("behind")]
    assert outbox.flush()


def test_sending_to_nobody_does_not_block_and_drops_the_oldest(path: str) -> None:
    outbox = Outbox(path, max_waiting=10)
    for index in range(200):
        outbox.send(Abort(str(index)))
    assert not outbox.flush()
    assert outbox.dropped == 190
    inbox: Inbox[SchedulerInbox] = Inbox(path, SchedulerInbox)
    assert outbox.flush()
    assert receive(inbox, 10) == [Abort(str(index)) for index in range(190, 200)]
    inbox.close()
    outbox.close()


def test_what_is_half_written_is_not_dropped_before_it_is_whole(path: str, inbox: Inbox[Any]) -> None:
    outbox = Outbox(path, max_waiting=3)
    large = Abort("x" * 30_000_000)
    outbox.send(large)
    for index in range(20):
        outbox.send(Abort(str(index)))
    assert outbox.dropped == 18
    messages = receive_while_flushing(inbox, outbox, 3)
    assert messages == [large, Abort("18"), Abort("19")]
    outbox.close()


def test_what_the_last_reader_has_not_taken_whole_goes_to_the_next(path: str, outbox: Outbox) -> None:
    first: Inbox[Any] = Inbox(path, SchedulerInbox)
    outbox.send(Abort("taken"))
    assert receive(first, 1) == [Abort("taken")]
    large = Abort("x" * 30_000_000)
    outbox.send(large)
    assert not first.wait(0.0)
    first.close()
    assert not outbox.flush()
    outbox.send(Abort("behind"))
    second: Inbox[Any] = Inbox(path, SchedulerInbox)
    messages = receive_while_flushing(second, outbox, 2)
    assert messages == [large, Abort("behind")]
    second.close()


def test_an_end_of_the_reading_leaves_the_rest_for_the_next(inbox: Inbox[Any], outbox: Outbox) -> None:
    for index in range(5):
        outbox.send(Abort(str(index)))
    assert inbox.wait(10.0)
    assert next(inbox.drain()) == Abort("0")
    assert inbox.wait(0.0)
    assert list(inbox.drain()) == [Abort(str(index)) for index in range(1, 5)]


class Watcher:
    """Knows what a descriptor is that is to be watched."""

    def __init__(self) -> None:
        self.watched: set[int] = set()

    def register(self, fd: int, eventmask: int, /) -> None:
        """See `srt.ipc.Watch`."""
        self.watched.add(fd)

    def unregister(self, fd: int, /) -> None:
        """See `srt.ipc.Watch`."""
        self.watched.remove(fd)

    def readable(self) -> list[int]:
        """Those that are readable now."""
        return select.select(self.watched, [], [], 0.0)[0]


def test_somebody_else_may_watch_the_descriptors(path: str, outbox: Outbox) -> None:
    watcher = Watcher()
    inbox: Inbox[Any] = Inbox(path, SchedulerInbox, watcher)
    assert not watcher.readable()
    for word in ("a", "b"):
        outbox.send(Abort(word))
        (fd,) = watcher.readable()
        assert not list(inbox.arrived())
        inbox.take_in(fd)
        assert list(inbox.arrived()) == [Abort(word)]
        assert not watcher.readable()
    assert len(watcher.watched) == 2
    outbox.close()
    inbox.take_in(*watcher.readable())
    assert len(watcher.watched) == 1
    inbox.close()
    assert not watcher.watched


def test_a_lingering_outbox_waits_for_its_reader(path: str) -> None:
    outbox = Outbox(path)
    outbox.send(Shutdown())
    found: list[Any] = []

    def read() -> None:
        inbox: Inbox[SchedulerInbox] = Inbox(path, SchedulerInbox)
        found.extend(receive(inbox, 1))
        inbox.close()

    reader = threading.Thread(target=read)
    reader.start()
    outbox.close(linger_seconds=PATIENCE_SECONDS)
    reader.join(PATIENCE_SECONDS)
    assert found == [Shutdown()]


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


def test_a_wait_ends_when_another_descriptor_becomes_readable(inbox: Inbox[Any]) -> None:
    readable, writable = os.pipe()
    assert not inbox.wait(0.0, readable)
    os.write(writable, b"x")
    assert inbox.wait(10.0, readable)
    assert not inbox.wait(0.0)
    for descriptor in (readable, writable):
        os.close(descriptor)
