"""Fixtures of this room's tests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

ResultT = TypeVar("ResultT")


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Coroutine[Any, Any, ResultT]], ResultT]:
    """Runs a coroutine on an event loop of either kind."""
    factory = asyncio.new_event_loop if request.param == "asyncio" else uvloop.new_event_loop

    def run_on_loop(coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(coroutine)

    return run_on_loop


@pytest.fixture
def run_base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place for run folders, private to a test; short, since the path of a socket must be."""
    base = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    return base
