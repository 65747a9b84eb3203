"""ZeroMQ PUSH/PULL sockets on ipc://, carrying the messages of srt/messages.py from process to process.

An inbox is bound by the process that reads it; everybody else connects an outbox to it.  Messages of one outbox keep
their order.  A malformed frame is logged, counted and dropped: it can never stop a process.  Sending never blocks:
frames that the peer is too slow (or too dead) to take wait in order in the outbox, up to a bound, beyond which the
oldest are dropped and counted; whoever watches over the processes ends the requests that are concerned.

A process has one context, whose one thread reads and writes for all its sockets.  Whoever makes the context ends it.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

import msgspec
import zmq

log = logging.getLogger("sapwood.ipc")
_encoder = msgspec.msgpack.Encoder()

MessageT = TypeVar("MessageT")

# A frame carries at most one step's output or one prompt; this bounds what a broken peer can make us allocate.
MAX_FRAME_BYTES = 256 * 1024 * 1024
# Frames under way to one peer, on either side of the connection.
HIGH_WATER_FRAMES = 10_000
# Processes start at the same time and come back one by one: who connects too early should not wait long.
RECONNECT_MILLISECONDS = 10


class Decoder(Generic[MessageT]):
    """Turns frames into messages of one inbox's union; counts and logs what is malformed."""

    def __init__(self, message_types: Any, owner: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(message_types)
        self._owner = owner
        self.malformed = 0

    def __call__(self, frame: bytes) -> MessageT | None:
        """The message in a frame, or None when there is none."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            self.malformed += 1
            log.warning("%s: dropped a malformed frame of %d bytes: %s", self._owner, len(frame), error)
            return None


class Inbox(Generic[MessageT]):
    """The bound PULL socket of one process.  `message_types` is the union of what may arrive."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, message_types: Any) -> None:
        """Takes the place of an earlier process's socket at `endpoint`."""
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PULL)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVHWM, HIGH_WATER_FRAMES)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.bind(endpoint)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        self._decode: Decoder[MessageT] = Decoder(message_types, endpoint.rsplit("/", 1)[-1])

    def fileno(self) -> int:
        """A descriptor that becomes readable when something has arrived.

        It tells of that once, not for as long as something is there: whoever is told must `drain` to the end.
        """
        return int(self.socket.getsockopt(zmq.FD))

    @property
    def malformed(self) -> int:
        """Frames dropped so far."""
        return self._decode.malformed

    def wait(self, timeout_seconds: float | None, other: int | None = None) -> bool:
        """True as soon as something is there to read; False when `timeout_seconds` have passed (None: no limit).

        `other`: a file descriptor that may become readable instead.
        """
        timeout = None if timeout_seconds is None else max(0, math.ceil(timeout_seconds * 1000))
        if other is None:
            return bool(self._poller.poll(timeout))
        self._poller.register(other, zmq.POLLIN)
        try:
            return bool(self._poller.poll(timeout))
        finally:
            self._poller.unregister(other)

    def drain(self) -> Iterator[MessageT]:
        """Everything that has arrived, without blocking."""
        while True:
            try:
                # A copy, also of a large frame: without one, more is done for each of the many small ones.
                frame = self.socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = self._decode(frame)
            if message is not None:
                yield message

    def close(self) -> None:
        """Close the socket; what has not been read is lost."""
        self.socket.close(0)


class Outbox:
    """A PUSH socket connected to another process's inbox, which may come, go and come again."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, max_waiting: int = 100_000) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, HIGH_WATER_FRAMES)
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MILLISECONDS)
        self.socket.connect(endpoint)
        self._endpoint = endpoint
        # What ZeroMQ does not take any more.
        self._waiting: deque[bytes] = deque()
        self._max_waiting = max_waiting
        self.dropped = 0

    def send(self, message: msgspec.Struct) -> None:
        """Send, or keep for the next `send` or `flush` when the peer cannot take it now."""
        data = _encoder.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            # The peer would close the connection on it.
            self._drop(f"a message of {len(data)} bytes")
            return
        self._waiting.append(data)
        self.flush()
        if len(self._waiting) > self._max_waiting:
            self._waiting.popleft()
            self._drop("the oldest messages: it takes nothing any more")

    def _drop(self, what: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.error("to %s: dropping %s", self._endpoint.rsplit("/", 1)[-1], what)

    def flush(self) -> bool:
        """Hand over what waits, as far as the peer takes it.  True when nothing waits here any more."""
        while self._waiting:
            try:
                self.socket.send(self._waiting[0], zmq.NOBLOCK)
            except zmq.Again:
                return False
            self._waiting.popleft()
        return True

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close the socket, giving the peer up to `linger_seconds` to take what was sent.

        The end of the context waits for that.
        """
        deadline = time.monotonic() + linger_seconds
        while not self.flush() and (left := deadline - time.monotonic()) > 0:
            self.socket.poll(math.ceil(left * 1000), zmq.POLLOUT)
        self.socket.close(math.ceil(max(0.0, deadline - time.monotonic()) * 1000))
