"""The front's sockets on an event loop: its inbox, and an outbox to each worker."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from srt.config import Role, inbox_path
from srt.ipc import Inbox, Outbox
from srt.messages import FrontInbox

FLUSH_SECONDS = 0.01
# After so many messages in a row the loop gets a turn for everything else.
MESSAGES_IN_A_ROW = 256

Place = tuple[Role, int]


class Wires:
    """Hands every message that arrives to `on_message`, on the loop.  Nothing here ever blocks."""

    def __init__(self, run_dir: str, on_message: Callable[[FrontInbox], None]) -> None:
        self._run_dir = run_dir
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._context: zmq.Context[Any] = zmq.Context()
        self._outboxes: dict[Place, Outbox] = {}
        self._flush_timer: asyncio.TimerHandle | None = None
        self._closed = False
        self._inbox: Inbox[FrontInbox] = Inbox(self._context, inbox_path(run_dir, "front"), FrontInbox)
        self._inbox_fd = self._inbox.fileno()
        self._loop.add_reader(self._inbox_fd, self._read)

    @property
    def malformed(self) -> int:
        """Frames that were no message."""
        return self._inbox.malformed

    def open(self, place: Place) -> None:
        """Connect to a worker.  Again: what the last process at that place had not taken is dropped."""
        old = self._outboxes.pop(place, None)
        if old is not None:
            old.close()
        role, index = place
        self._outboxes[place] = Outbox(self._context, inbox_path(self._run_dir, role, index))

    def send(self, place: Place, message: msgspec.Struct) -> None:
        """Send to a worker, now or as soon as it takes it."""
        outbox = self._outboxes[place]
        outbox.send(message)
        if self._flush_timer is None and not outbox.flush():
            self._flush_timer = self._loop.call_later(FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flush_timer = None
        behind = [outbox for outbox in self._outboxes.values() if not outbox.flush()]
        if behind:
            self._flush_timer = self._loop.call_later(FLUSH_SECONDS, self._flush)

    def _read(self) -> None:
        """Read until nothing is left, now or in another turn: of what has arrived the descriptor tells only once."""
        if self._closed:
            return
        nothing_left = False
        try:
            nothing_left = self._hand_on()
        finally:
            if not nothing_left and not self._closed:
                self._loop.call_soon(self._read)

    def _hand_on(self) -> bool:
        """Hand on what has arrived, so many messages at most.  True when nothing is left."""
        for count, message in enumerate(self._inbox.drain(), start=1):
            self._on_message(message)
            if self._closed or count == MESSAGES_IN_A_ROW:
                return False
        return True

    def close(self) -> None:
        """Close every socket; what was not read or sent is lost.  Again: nothing."""
        if self._closed:
            return
        self._closed = True
        self._loop.remove_reader(self._inbox_fd)
        if self._flush_timer is not None:
            self._flush_timer.cancel()
        self._inbox.close()
        for outbox in self._outboxes.values():
            outbox.close()
        self._context.destroy(linger=0)
