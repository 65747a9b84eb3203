"""Fixtures of this room's tests: the HTTP face over a fake front, on a real port."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import pytest
import uvloop

from srt.front import Front
from srt.http.server import HttpServer, bind
from tests.http.fake_front import FakeFront


class Running:
    """A server on a free port, its front, and the loop that both live on (in a thread of their own)."""

    def __init__(self, **config: Any) -> None:
        self.front = FakeFront(**config)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._server = self.on_loop(self._start())
        host, port = self._server.address
        self.address = (host, port)
        self.url = f"http://{host}:{port}"

    async def _start(self) -> HttpServer:
        server = HttpServer(cast(Front, self.front), bind("127.0.0.1", 0))
        await server.start()
        return server

    def on_loop(self, coroutine: Any) -> Any:
        """The result of a coroutine run where the server runs."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def eventually(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until the condition holds; fail when it does not within `seconds`."""

        async def wait() -> bool:
            for _ in range(int(seconds / 0.01)):
                if condition():
                    return True
                await asyncio.sleep(0.01)
            return False

        assert self.on_loop(wait())

    def close(self) -> None:
        """Stop the server and its thread."""
        self.on_loop(self._server.stop(1.0))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


@pytest.fixture(scope="module")
def shared_server() -> Iterator[Running]:
    """One server for all tests of a module that leave nothing behind."""
    running = Running()
    yield running
    running.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Running]]:
    """Starts servers with settings of their own; all are stopped after the test."""
    started: list[Running] = []

    def start_one(**config: Any) -> Running:
        started.append(Running(**config))
        return started[-1]

    yield start_one
    for running in started:
        running.close()


@pytest.fixture
def server(start: Callable[..., Running]) -> Running:
    """A server of the test's own."""
    return start()


@pytest.fixture
def client(shared_server: Running) -> Iterator[httpx.Client]:
    """A client of the module's server."""
    with httpx.Client(base_url=shared_server.url, timeout=30) as client:
        yield client
