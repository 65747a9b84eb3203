"""The HTTP server under the application: uvicorn with our settings.

The caller binds the socket, runs the server's `serve`, minds the signals, and ends it by setting `should_exit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from srt.front import Front
from srt.http.app import create_app

# Connections that wait to be accepted; the kernel caps it at its own limit.
BACKLOG = 2048
# Longer than clients keep an unused connection: who closes first must not be the server, or a request that is just
# being sent is lost.
IDLE_SECONDS = 75


class HttpServer(uvicorn.Server):
    """uvicorn without signal handlers of its own."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to whoever runs the server."""
        yield


def make_server(front: Front, close_seconds: int) -> HttpServer:
    """A server for a front, which may still be starting.

    `close_seconds`: how long replies may take to get out once the server has been told to end.
    """
    config = uvicorn.Config(
        create_app(front),
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=IDLE_SECONDS,
        timeout_graceful_shutdown=close_seconds,
    )
    return HttpServer(config)
