"""Unix stream sockets that carry the messages of srt/messages.py from process to process.

An inbox is bound by the process that reads it; everybody else connects an outbox to it:

    outbox --[length|message][length|message]--> inbox         length: four bytes, little-endian

A malformed frame is logged, counted and dropped: it can never stop a process.  Sending never blocks: frames that the
peer is too slow (or too dead) to take wait in order in the outbox, up to a bound, beyond which the oldest are dropped
and counted; whoever watches over the processes ends the requests that are concerned.

Whoever has a message writes it into the socket, and that wakes whoever reads it.  No thread and no queue stands between
them, since all cores compute: what a token costs on its way out is taken from the next one.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import select
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import msgspec

log = logging.getLogger("sapwood.ipc")
_encoder = msgspec.msgpack.Encoder()

MessageT = TypeVar("MessageT")

LENGTH_BYTES = 4
# A frame carries at most one step's output or one prompt; this bounds what a broken peer can make us allocate.
MAX_FRAME_BYTES = 256 * 1024 * 1024
READ_BYTES = 64 * 1024
# After so many full reads of one connection the others get their turn.
READS_IN_A_ROW = 16
BACKLOG = 128
# What the system may keep of what a peer has not read yet; it gives as much as its own limit allows.
SEND_BUFFER_BYTES = 4 * 1024 * 1024
LINGER_POLL_SECONDS = 0.005


class Decoder(Generic[MessageT]):
    """Turns frames into messages of one inbox's union; counts and logs what is malformed."""

    def __init__(self, message_types: Any, owner: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[MessageT] = msgspec.msgpack.Decoder(message_types)
        self._owner = owner
        self.malformed = 0

    def __call__(self, frame: bytes | bytearray) -> MessageT | None:
        """The message in a frame, or None when there is none."""
        try:
            return self._decoder.decode(frame)
        except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
            self.refuse(f"a malformed frame of {len(frame)} bytes", error)
            return None

    def refuse(self, what: str, error: Exception) -> None:
        """Count and log what is dropped."""
        self.malformed += 1
        log.warning("%s: dropped %s: %s", self._owner, what, error)


class _Connection:
    """What one sender writes, cut into frames."""

    def __init__(self, connected: socket.socket) -> None:
        self.socket = connected
        self._unfinished = bytearray()

    def read(self, frames: deque[bytes | bytearray]) -> bool:
        """Append the frames that are there whole; False when the sender is gone.

        Raises ValueError where a frame would be longer than any is: what follows cannot be told from noise.
        """
        for _ in range(READS_IN_A_ROW):
            try:
                data = self.socket.recv(READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            if not self._unfinished and len(data) - LENGTH_BYTES == int.from_bytes(data[:LENGTH_BYTES], "little"):
                # One whole frame: so it is nearly always.
                frames.append(data[LENGTH_BYTES:])
                return True
            self._unfinished += data
            self._cut(frames)
            if len(data) < READ_BYTES:
                return True
        return True

    def _cut(self, frames: deque[bytes | bytearray]) -> None:
        buffer, begin = self._unfinished, 0
        while len(buffer) - begin >= LENGTH_BYTES:
            size = int.from_bytes(buffer[begin : begin + LENGTH_BYTES], "little")
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes, and {MAX_FRAME_BYTES} is most")
            end = begin + LENGTH_BYTES + size
            if end > len(buffer):
                break
            frames.append(buffer[begin + LENGTH_BYTES : end])
            begin = end
        del buffer[:begin]


class Watch(Protocol):
    """Who looks after descriptors that may become readable: `select.poll`, or an event loop."""

    def register(self, fd: int, eventmask: int, /) -> object:
        """Tell of this descriptor from now on."""
        ...

    def unregister(self, fd: int, /) -> object:
        """Tell of it no more."""
        ...


class Inbox(Generic[MessageT]):
    """The socket that a process reads.  `message_types` is the union of what may arrive.

    With a `watch` somebody else waits: `take_in` is to be called for each descriptor that has become readable, and the
    messages are those of `arrived`.
    """

    def __init__(self, path: str, message_types: Any, watch: Watch | None = None) -> None:
        """Takes the place of an earlier process's socket at `path`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._connections: dict[int, _Connection] = {}
        # Arrived and not read yet.
        self._frames: deque[bytes | bytearray] = deque()
        self._decode: Decoder[MessageT] = Decoder(message_types, os.path.basename(path))
        self._poll = select.poll()
        self._watch: Watch = self._poll if watch is None else watch
        self._watch.register(self._listener.fileno(), select.POLLIN)

    @property
    def malformed(self) -> int:
        """Frames dropped so far."""
        return self._decode.malformed

    def wait(self, timeout_seconds: float | None, other: int | None = None) -> bool:
        """True as soon as something is there to read; False when `timeout_seconds` have passed (None: no limit).

        `other`: a file descriptor that may become readable instead.
        """
        if other is None:
            return self._wait(timeout_seconds, None)
        self._poll.register(other, select.POLLIN)
        try:
            return self._wait(timeout_seconds, other)
        finally:
            self._poll.unregister(other)

    def _wait(self, timeout: float | None, other: int | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._frames:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            events = self._poll.poll(None if left is None else math.ceil(left * 1000))
            for fd, _ in events:
                if fd == other:
                    return True
                self.take_in(fd)
            # A connection that came or went is nothing to read.
            if left == 0.0:
                break
        return bool(self._frames)

    def drain(self) -> Iterator[MessageT]:
        """Everything that has arrived, without blocking."""
        if not self._frames:
            for fd, _ in self._poll.poll(0):
                self.take_in(fd)
        return self.arrived() if self._frames else iter(())

    def arrived(self) -> Iterator[MessageT]:
        """What has been taken in and not been read."""
        while self._frames:
            message = self._decode(self._frames.popleft())
            if message is not None:
                yield message

    def take_in(self, fd: int) -> None:
        """Read what there is at one of our descriptors."""
        connection = self._connections.get(fd)
        if connection is None:
            connection = self._accept()
            if connection is None:
                return
        try:
            goes_on = connection.read(self._frames)
        except ValueError as error:
            self._decode.refuse("a connection", error)
            goes_on = False
        if not goes_on:
            self._forget(connection)

    def _accept(self) -> _Connection | None:
        try:
            connected, _ = self._listener.accept()
        except OSError:
            # It went again before we came.
            return None
        connected.setblocking(False)
        connection = self._connections[connected.fileno()] = _Connection(connected)
        self._watch.register(connected.fileno(), select.POLLIN)
        return connection

    def _forget(self, connection: _Connection) -> None:
        fd = connection.socket.fileno()
        self._watch.unregister(fd)
        del self._connections[fd]
        connection.socket.close()

    def close(self) -> None:
        """Close the sockets; what has not been read is lost."""
        for connection in list(self._connections.values()):
            self._forget(connection)
        self._watch.unregister(self._listener.fileno())
        self._listener.close()


class Outbox:
    """The way to another process's inbox, which may come, go and come again."""

    def __init__(self, path: str, max_waiting: int = 100_000) -> None:
        self._path = path
        self._socket: socket.socket | None = None
        self._waiting: deque[bytes] = deque()
        # Bytes of the first that waits which have been written already.
        self._written = 0
        self._max_waiting = max_waiting
        self.dropped = 0

    def send(self, message: msgspec.Struct) -> None:
        """Send, or keep for the next `send` or `flush` when the peer cannot take it now."""
        data = _encoder.encode(message)
        if len(data) > MAX_FRAME_BYTES:
            self._drop(f"a message of {len(data)} bytes")
            return
        self._waiting.append(len(data).to_bytes(LENGTH_BYTES, "little") + data)
        self.flush()
        if len(self._waiting) > self._max_waiting:
            # What is half written must be finished, or nobody could read on.
            del self._waiting[1 if self._written else 0]
            self._drop("the oldest messages: it takes nothing any more")

    def _drop(self, what: str) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.error("to %s: dropping %s", os.path.basename(self._path), what)

    def flush(self) -> bool:
        """Send what waits, as far as the peer takes it.  True when nothing waits any more."""
        while self._waiting:
            connected = self._socket or self._connect()
            if connected is None:
                return False
            frame = self._waiting[0]
            try:
                self._written += connected.send(memoryview(frame)[self._written :] if self._written else frame)
            except BlockingIOError:
                return False
            except OSError:
                # The peer is gone; whoever takes its place gets the frame from the beginning.
                self._disconnect()
                continue
            if self._written == len(frame):
                self._waiting.popleft()
                self._written = 0
        return True

    def _connect(self) -> socket.socket | None:
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        made.setblocking(False)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        try:
            made.connect(self._path)
        except OSError:
            made.close()
            return None
        self._socket = made
        return made

    def _disconnect(self) -> None:
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self._written = 0

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close the socket, giving the peer up to `linger_seconds` to take what was sent."""
        deadline = time.monotonic() + linger_seconds
        while not self.flush() and time.monotonic() < deadline:
            time.sleep(LINGER_POLL_SECONDS)
        self._disconnect()
