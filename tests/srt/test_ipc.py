"""Sockets that never block and cannot be stopped by a malformed frame."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srt.cache_messages import CallReply
from srt.ipc import Inbox, Outbox
from srt.messages import Abort, FrontInbox, SchedulerInbox, Shutdown, pack_ids, unpack_ids


@pytest.fixture
def context() -> Iterator[zmq.Context[Any]]:
    made: zmq.Context[Any] = zmq.Context()
    yield made
    made.destroy(linger=0)


@pytest.fixture
def endpoint(run_base: Path) -> str:
    return f"ipc://{run_base}/inbox.sock"


def receive(inbox: Inbox[Any], count: int) -> list[Any]:
    messages: list[Any] = []
    while len(messages) < count:
        assert inbox.wait(10.0), f"only {len(messages)} of {count} came"
        messages += inbox.drain()
    return messages


def test_messages_arrive_in_order_also_when_the_reader_comes_later(context: zmq.Context[Any], endpoint: str) -> None:
    outbox = Outbox(context, endpoint)
    for index in range(500):
        outbox.send(Abort(str(index)))
    inbox: Inbox[SchedulerInbox] = Inbox(context, endpoint, SchedulerInbox)
    assert receive(inbox, 500) == [Abort(str(index)) for index in range(500)]
    inbox.close()
    outbox.close()


def test_what_is_no_message_is_counted_and_dropped(context: zmq.Context[Any], endpoint: str) -> None:
    inbox: Inbox[SchedulerInbox] = Inbox(context, endpoint, SchedulerInbox)
    outbox = Outbox(context, endpoint)
    for frame in (b"", b"\xc1", os.urandom(50), msgspec.msgpack.encode({"type": "nothing"}), b"\x81"):
        outbox.socket.send(frame)
    outbox.send(CallReply("a reply is not for this inbox", True))
    outbox.socket.send(msgspec.msgpack.encode({"type": "abort", "rid": 5}))
    outbox.send(Shutdown())
    assert receive(inbox, 1) == [Shutdown()]
    assert inbox.malformed == 7
    inbox.close()
    outbox.close()


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


def test_sending_to_nobody_does_not_block_and_drops_the_oldest(context: zmq.Context[Any], endpoint: str) -> None:
    outbox = Outbox(context, endpoint, max_waiting=10)
    outbox.socket.setsockopt(zmq.SNDHWM, 10_000)
    for index in range(10_200):
        outbox.send(Abort(str(index)))
    assert not outbox.flush()
    assert outbox.dropped > 0
    inbox: Inbox[SchedulerInbox] = Inbox(context, endpoint, SchedulerInbox)
    messages = receive(inbox, 10_000)
    while not outbox.flush():
        messages += receive(inbox, 1)
    while len(messages) < 10_200 - outbox.dropped:
        messages += receive(inbox, 1)
    ids = [int(message.rid) for message in messages]
    assert ids == sorted(ids)
    assert ids[-1] == 10_199
    inbox.close()
    outbox.close()


@given(st.lists(st.integers(-(2**31), 2**31 - 1)))
def test_packed_ids_come_back(ids: list[int]) -> None:
    assert unpack_ids(pack_ids(ids)) == ids
    assert len(pack_ids(ids)) == 4 * len(ids)


def test_a_wait_ends_when_another_descriptor_becomes_readable(context: zmq.Context[Any], endpoint: str) -> None:
    inbox: Inbox[Any] = Inbox(context, endpoint, SchedulerInbox)
    readable, writable = os.pipe()
    assert not inbox.wait(0.0, readable)
    os.write(writable, b"x")
    assert inbox.wait(10.0, readable)
    assert not inbox.wait(0.0)
    for descriptor in (readable, writable):
        os.close(descriptor)
    inbox.close()
