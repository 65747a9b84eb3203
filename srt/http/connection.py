"""Replies that notice when the client goes away, and event streams that stay alive while nothing happens.

An ASGI server tells of a closed connection only to those who ask: `receive` returns `http.disconnect`.  So while a
request is worked on, somebody always asks, and the work is cancelled as soon as the answer comes; what the work had
started is ended by its own `finally`.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import msgspec
import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from srt.http.errors import ApiError

T = TypeVar("T")

log = logging.getLogger("sapwood.http")

INTERNAL_ERROR = ApiError(500, "The server failed on this request; its log says more.", code="internal_error")

# A comment line goes out after this much silence: many proxies and clients close what is silent for 15 to 60 s.
KEEP_ALIVE_SECONDS = 10.0
KEEP_ALIVE = b": keep-alive\n\n"
DONE = b"data: [DONE]\n\n"

# After a refusal for size the rest of the body is read and dropped, within these bounds, since a client that is
# still sending would otherwise lose the reply to a connection reset.
DRAIN_BYTES = 256 * 1024 * 1024
DRAIN_SECONDS = 10.0


class ClientGone(Exception):
    """The client closed the connection before its reply was ready; nobody will read one."""


def to_json(content: Any) -> bytes:
    """JSON of what replies are made of: plain data, and structs within."""
    return orjson.dumps(content, default=msgspec.to_builtins)


def json_reply(content: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A JSON reply."""
    return Response(to_json(content), status, headers, "application/json")


def error_reply(error: ApiError) -> Response:
    """The reply that tells of an error."""
    return json_reply(error.body(), error.status, error.all_headers())


def event(content: Any) -> bytes:
    """One server-sent event with JSON data."""
    return b"data: %b\n\n" % to_json(content)


class EventOfText:
    """Server-sent events that differ in one text: what stands around it is encoded once."""

    def __init__(self, content: Callable[[str], Any]) -> None:
        """`content`: what an event says with a given text, which stands in it once."""
        mark = secrets.token_hex(16)
        self._before, self._behind = event(content(mark)).split(to_json(mark))

    def __call__(self, text: str) -> bytes:
        """The event with this text."""
        return b"%b%b%b" % (self._before, orjson.dumps(text), self._behind)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`.  When the client goes away first, `work` is cancelled and ClientGone raised."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        await cancel(working, gone)


async def cancel(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until they have cleaned up."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A stream of server-sent events: `preamble` with the head, then `events` until their end or the client's leaving.

    An ApiError out of `events` becomes a last event with the error.  `on_end` is called at the end, whichever way it
    comes.  Events are written as fast as the client reads them; what it has not read stays where `events` has it.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        preamble: bytes = b"",
        on_end: Callable[[], None] = lambda: None,
        keep_alive_seconds: float = KEEP_ALIVE_SECONDS,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._events = events
        self._preamble = preamble
        self._on_end = on_end
        self._keep_alive_seconds = keep_alive_seconds
        self._wrote = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream."""
        tasks: list[asyncio.Future[None]] = []
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            writing = asyncio.ensure_future(self._write(send))
            tasks = [asyncio.ensure_future(self._tick(send)), asyncio.ensure_future(_until_gone(receive)), writing]
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finished = writing.done()
        finally:
            await cancel(*tasks)
            self._on_end()
        if finished:
            writing.result()
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, send: Send) -> None:
        async with aclosing(self._events):
            if self._preamble:
                await _send_part(send, self._preamble)
            try:
                async for data in self._events:
                    self._wrote = True
                    await _send_part(send, data)
            except ApiError as error:
                await _send_part(send, event(error.body()))
            except Exception:
                log.exception("a stream failed")
                await _send_part(send, event(INTERNAL_ERROR.body()))

    async def _tick(self, send: Send) -> None:
        """Send a comment whenever nothing else was sent for a while."""
        while True:
            self._wrote = False
            await asyncio.sleep(self._keep_alive_seconds)
            if not self._wrote:
                await _send_part(send, KEEP_ALIVE)


async def _send_part(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": data, "more_body": True})


class LingeringReply(Response):
    """An error sent while the client is still sending its body: the whole reply first, then the rest of the body.

    The connection is closed at the end, or when the rest is longer or slower than it is worth.
    """

    def __init__(self, error: ApiError) -> None:
        super().__init__(to_json(error.body()), error.status, {"connection": "close"}, media_type="application/json")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the reply, then read what is left of the body."""
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _send_part(send, bytes(self.body))
        try:
            await asyncio.wait_for(self._drain(receive), DRAIN_SECONDS)
        except TimeoutError:
            pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _drain(self, receive: Receive) -> None:
        dropped = 0
        while dropped <= DRAIN_BYTES:
            message = await receive()
            dropped += len(message.get("body", b""))
            if message["type"] == "http.disconnect" or not message.get("more_body", False):
                return
