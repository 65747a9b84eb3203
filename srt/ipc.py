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
import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

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

    def read(self, frames: deque[bytearray]) -> bool:
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
            self._unfinished += data
            self._cut(frames)
            if len(data) < READ_BYTES:
                return True
        return True

    def _cut(self, frames: deque[bytearray]) -> None:
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


class Inbox(Generic[MessageT]):
    """The socket that a process reads.  `message_types` is the union of what may arrive."""

    def __init__(self, path: str, message_types: Any) -> None:
        """Takes the place of an earlier process's socket at `path`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(path)
        self._listener.listen(BACKLOG)
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        # Arrived and not read yet.
        self._frames: deque[bytearray] = deque()
        self._decode: Decoder[MessageT] = Decoder(message_types, os.path.basename(path))

    def fileno(self) -> int:
        """A descriptor that is readable as long as `drain` would find something new."""
        return self._selector.fileno()

    @property
    def malformed(self) -> int:
        """Frames dropped so far."""
        return self._decode.malformed

    def wait(self, timeout_seconds: float | None, other: int | None = None) -> bool:
        """True as soon as something is there to read; False when `timeout_seconds` have passed (None: no limit).

        `other`: a file descriptor that may become readable instead.
        """
        if other is None:
            return self._wait(timeout_seconds)
        self._selector.register(other, selectors.EVENT_READ)
        try:
            return self._wait(timeout_seconds)
        finally:
            self._selector.unregister(other)

    def _wait(self, timeout: float | None) -> bool:
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._frames:
            events = self._selector.select(timeout)
            if self._take_in(events):
                return True
            # A connection that came or went is nothing to read.
            if deadline is not None:
                timeout = deadline - time.monotonic()
                if timeout <= 0:
                    break
        return bool(self._frames)

    def drain(self) -> Iterator[MessageT]:
        """Everything that has arrived, without blocking."""
        if not self._frames:
            self._take_in(self._selector.select(0))
        while self._frames:
            message = self._decode(self._frames.popleft())
            if message is not None:
                yield message

    def _take_in(self, events: list[tuple[selectors.SelectorKey, int]]) -> bool:
        """Read what is ready; True when a descriptor is that is not ours."""
        foreign = False
        for key, _ in events:
            if key.data is not None:
                self._read(key.data)
            elif key.fileobj is self._listener:
                self._accept()
            else:
                foreign = True
        return foreign

    def _accept(self) -> None:
        try:
            connected, _ = self._listener.accept()
        except OSError:
            # It went again before we came.
            return
        connected.setblocking(False)
        connection = _Connection(connected)
        self._selector.register(connected, selectors.EVENT_READ, connection)
        self._read(connection)

    def _read(self, connection: _Connection) -> None:
        try:
            goes_on = connection.read(self._frames)
        except ValueError as error:
            self._decode.refuse("a connection", error)
            goes_on = False
        if not goes_on:
            self._selector.unregister(connection.socket)
            connection.socket.close()

    def close(self) -> None:
        """Close the sockets; what has not been read is lost."""
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()


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
