"""The HTTP server: uvicorn on a socket that was bound before anything else started.

Signals, draining and the end of the front are the caller's: this serves until it is told to stop.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from srt.child import StartError
from srt.front import Front
from srt.http.app import create_app

# Connections that wait to be accepted; the kernel caps it at its own limit.
BACKLOG = 2048
KEEP_ALIVE_SECONDS = 75


def bind(host: str, port: int) -> socket.socket:
    """A listening socket.  Port 0: the system chooses.  Raises StartError with one line when there is none."""
    try:
        info = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError, OverflowError) as error:
        raise StartError(f"--host {host} is no address of this machine: {error}") from error
    sock = socket.socket(info[0], socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    return sock


class _Uvicorn(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to whoever started the server."""
        yield


class HttpServer:
    """Serves a front on a bound socket."""

    def __init__(self, front: Front, sock: socket.socket, access_log: bool = False) -> None:
        config = uvicorn.Config(
            create_app(front),
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=access_log,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
            backlog=BACKLOG,
        )
        self._server = _Uvicorn(config)
        self._socket = sock
        self._serving: asyncio.Task[None] | None = None

    @property
    def address(self) -> tuple[str, int]:
        """The host and port that are listened on."""
        host, port = self._socket.getsockname()[:2]
        return host, port

    async def start(self) -> None:
        """Begin to answer.  Raises what kept the server from starting."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        while not self._server.started:
            if self._serving.done():
                await self._serving
                raise RuntimeError("the HTTP server did not start")
            await asyncio.sleep(0.005)

    async def stop(self, grace_seconds: float) -> None:
        """Take no new connections, give replies that are being sent `grace_seconds` to get out, then close.  Again:
        nothing."""
        if self._serving is None:
            return
        self._server.config.timeout_graceful_shutdown = max(1, round(grace_seconds))
        self._server.should_exit = True
        await self._serving
        self._serving = None
