"""`sapwood serve`: the port, the front, the HTTP application, and the signals that end them.

SIGTERM or SIGINT: take no new requests, let those that run finish for up to --drain-seconds, exit 0.  A second one:
end everything at once; streams get an error event.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import uvloop

from sapwood.prewarm import prewarm, read_prewarm
from sapwood.public_heads import resolve_with_heads
from sapwood.pull import resolve_model
from srt.answer import Ask
from srt.child import StartError, configure_logging
from srt.config import ServerConfig
from srt.front import Front
from srt.resolve import Resolved

if TYPE_CHECKING:
    from srt.http.server import HttpServer

log = logging.getLogger("sapwood.serve")

# How long replies that are being written may take after every request has ended.
CLOSE_SECONDS = 3


def serve(config: ServerConfig) -> int:
    """Serve until told to stop; the exit code.  Raises StartError."""
    begin = time.perf_counter()
    configure_logging(config.log_level, "front")
    # What it tells of its own start and end we tell ourselves.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    with contextlib.closing(bind(config.host, config.port)) as listener:
        resolved = resolve_with_heads(config, resolve_model(config.model))
        log.info("%s", resolved.line())
        asks = read_prewarm(config.prewarm, resolved.facts.vocab_size)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_serve(resolved, listener, begin, asks))


def bind(host: str, port: int) -> socket.socket:
    """The socket to serve on.  It does not listen yet: until the model is loaded connections are refused.

    Raises StartError when the address is not ours or the port is taken.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartError(f"--host {host}: {error.strerror or error}") from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise StartError(f"cannot serve on {host} port {port}: {os.strerror(error.errno or 0)}") from error
    return listener


def url_of(listener: socket.socket) -> str:
    """Where a client of this machine finds the server."""
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        host = "127.0.0.1"
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class StopSignals:
    """SIGTERM and SIGINT, counted.  `first` and `second` are done when so many have come."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.first: asyncio.Future[None] = loop.create_future()
        self.second: asyncio.Future[None] = loop.create_future()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._came, number)

    def _came(self, number: int) -> None:
        for future in (self.first, self.second):
            if not future.done():
                log.info("%s", signal.Signals(number).name)
                future.set_result(None)
                return


async def _serve(resolved: Resolved, listener: socket.socket, begin: float, asks: list[tuple[str, Ask]]) -> int:
    stop = StopSignals(asyncio.get_running_loop())
    front = Front(resolved)
    try:
        server = await _start(front, stop)
        if server is None or not await _prewarm(front, stop, asks):
            return 0
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await _until_started(server, serving)
        for line in _phase_lines(front):
            log.info("%s", line)
        print(
            f"Sapwood serves {front.facts.name} at {url_of(listener)} "
            f"(ready after {time.perf_counter() - begin:.1f} s; Ctrl-C stops)",
            flush=True,
        )
        await asyncio.wait((stop.first, serving), return_when=asyncio.FIRST_COMPLETED)
        await _end(front, server, serving, stop, resolved.config.drain_seconds)
        return 0
    finally:
        await front.stop()


async def _start(front: Front, stop: StopSignals) -> HttpServer | None:
    """Start the workers, and load the HTTP packages meanwhile.  None when told to stop before all are ready."""
    starting = asyncio.create_task(front.start())
    loading = asyncio.create_task(asyncio.to_thread(_make_server, front))
    await asyncio.wait((starting, stop.first), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait((starting, loading))
        return None
    try:
        await starting
    finally:
        await asyncio.wait((loading,))
    return loading.result()


async def _prewarm(front: Front, stop: StopSignals, asks: list[tuple[str, Ask]]) -> bool:
    """Fill the cache.  False when told to stop before it is done."""
    warming = asyncio.create_task(prewarm(front, asks))
    await asyncio.wait((warming, stop.first), return_when=asyncio.FIRST_COMPLETED)
    if warming.done():
        await warming
        return True
    warming.cancel()
    await asyncio.wait((warming,))
    return False


def _make_server(front: Front) -> HttpServer:
    from srt.http.server import make_server

    return make_server(front, CLOSE_SECONDS)


async def _until_started(server: HttpServer, serving: asyncio.Task[None]) -> None:
    while not server.started:
        if serving.done():
            try:
                await serving
            except OSError as error:
                raise StartError(f"cannot listen: {error.strerror or error}") from error
            raise StartError("the HTTP server ended while starting")
        await asyncio.sleep(0.005)


async def _end(
    front: Front, server: HttpServer, serving: asyncio.Task[None], stop: StopSignals, drain_seconds: float
) -> None:
    """Drain, then close every connection.  While draining, new requests are still answered: with 503."""
    requests = front.status().requests
    log.info("stopping: %d requests run, they have up to %g s to finish", requests, drain_seconds)
    drain = asyncio.create_task(front.drain(drain_seconds))
    await asyncio.wait((drain, stop.second), return_when=asyncio.FIRST_COMPLETED)
    drain.cancel()
    if front.status().requests:
        log.warning("stopping: %d requests are cut off", front.status().requests)
        front.end_all("the server is shutting down")
    server.should_exit = True
    await asyncio.wait((serving,), timeout=CLOSE_SECONDS + 1.0)
    serving.cancel()
    await asyncio.wait((serving,))


def _phase_lines(front: Front) -> Iterator[str]:
    """One line for each process: what its start consisted of."""
    phases: dict[str, list[str]] = {}
    for name, seconds in front.start_phases:
        process, _, phase = name.rpartition(": ")
        phases.setdefault(process or "front", []).append(f"{phase} {seconds:.2f} s")
    for process, parts in phases.items():
        yield f"started {process}: {', '.join(parts)}"
