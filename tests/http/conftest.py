"""Fixtures of this room's tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.http.running import Running


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
