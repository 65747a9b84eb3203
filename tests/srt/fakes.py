"""A front over fake workers, and how to wait for what it does."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from srt.config import ModelFacts, Role, ServerConfig
from srt.front import Front
from srt.resolve import Resolved

FAKE_WORKERS = Path(__file__).parent / "fake_workers.py"


def fake_command(role: Role, settings: Path, watch_fd: int) -> Sequence[str]:
    """The command line of a fake worker."""
    return [sys.executable, str(FAKE_WORKERS), role, str(settings), str(watch_fd)]


def fake_resolved(**settings: Any) -> Resolved:
    """A configuration whose model is in no folder: a token is a character."""
    facts = ModelFacts(
        path="nowhere", name="fake", model_type="llama", vocab_size=0x110000, context_length=4096, eos_token_ids=(0,)
    )
    return Resolved(
        config=ServerConfig(model="fake", **settings),
        facts=facts,
        dtype="float32",
        kv_dtype="float32",
        threads=1,
        num_pages=64,
        max_step_tokens=64,
        kv_bytes=0,
    )


@asynccontextmanager
async def fake_front(**settings: Any) -> AsyncIterator[Front]:
    """A started front over fake workers, stopped at the end."""
    front = Front(fake_resolved(**settings), fake_command)
    await front.start()
    try:
        yield front
    finally:
        await front.stop()


async def until(condition: Callable[[], bool | Awaitable[bool]], seconds: float = 20.0) -> None:
    """Wait for something to become true; a generous limit only keeps a broken test from hanging."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value if isinstance(value, bool) else await value:
            return
        assert time.monotonic() < deadline, "it did not happen"
        await asyncio.sleep(0.005)
