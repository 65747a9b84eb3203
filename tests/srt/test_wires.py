"""The front's sockets on an event loop: nothing that arrives is left lying."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from srt import wires
from srt.cache_messages import CallReply
from srt.config import inbox_path
from srt.ipc import Outbox
from srt.wires import Wires

PATIENCE_SECONDS = 30.0
COUNT = 3 * wires.MESSAGES_IN_A_ROW + 1

Run = Callable[[Any], Any]


class Reader:
    """Keeps what the front gets, until that is all."""

    def __init__(self, fails: bool = False) -> None:
        self.ids: list[str] = []
        self.all_came = asyncio.Event()
        self._fails = fails

    def __call__(self, message: Any) -> None:
        """Keep it; where it `fails`, raise behind that."""
        self.ids.append(message.call_id)
        if len(self.ids) == COUNT:
            self.all_came.set()
        if self._fails:
            raise ValueError(f"cannot read {message.call_id}")


async def arrive(run_dir: Path, read: Reader) -> None:
    """All messages are there before the loop gets to read the first."""
    context: zmq.Context[Any] = zmq.Context()
    front = Wires(str(run_dir), read)
    outbox = Outbox(context, inbox_path(str(run_dir), "front"))
    try:
        for index in range(COUNT):
            outbox.send(CallReply(str(index), True))
        outbox.close(linger_seconds=PATIENCE_SECONDS)
        context.term()
        await asyncio.wait_for(read.all_came.wait(), PATIENCE_SECONDS)
    finally:
        front.close()
        context.destroy(linger=0)
    assert read.ids == [str(index) for index in range(COUNT)]


def test_more_messages_than_are_read_in_a_row_are_all_read(run: Run, run_base: Path) -> None:
    async def scenario() -> None:
        await arrive(run_base, Reader())

    run(scenario())


def test_a_message_that_cannot_be_taken_does_not_keep_those_behind_it(run: Run, run_base: Path) -> None:
    async def scenario() -> None:
        told: list[Exception] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: told.append(context["exception"]))
        await arrive(run_base, Reader(fails=True))
        assert len(told) >= COUNT - 1

    run(scenario())


def test_nothing_is_read_once_it_is_closed(run: Run, run_base: Path) -> None:
    async def scenario() -> None:
        context: zmq.Context[Any] = zmq.Context()
        read: list[Any] = []
        ended = asyncio.Event()

        def end(message: Any) -> None:
            read.append(message)
            front.close()
            ended.set()

        front = Wires(str(run_base), end)
        outbox = Outbox(context, inbox_path(str(run_base), "front"))
        for index in range(10):
            outbox.send(CallReply(str(index), True))
        await asyncio.wait_for(ended.wait(), PATIENCE_SECONDS)
        await asyncio.sleep(0)
        assert read == [CallReply("0", True)]
        front.close()
        context.destroy(linger=0)

    run(scenario())
