"""Garbage collections come in pauses."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

from scheduler import garbage
from scheduler.process import Loop
from srt.messages import Shutdown
from tests.scheduler.bench import Bench


class Cycle:
    """Only a collection frees it."""

    def __init__(self) -> None:
        self.me = self


class Quiet:
    """Sockets on which nothing comes; a pause ends the loop, once garbage was there to be collected."""

    def __init__(self) -> None:
        self.waits: list[float | None] = []

    def drain(self) -> list[Any]:
        return [Shutdown()] if None in self.waits else []

    def wait(self, timeout: float | None) -> bool:
        self.waits.append(timeout)
        return timeout is None

    def send(self, message: Any) -> None:
        """Nobody listens."""

    def flush(self) -> bool:
        return True


def test_a_pause_is_used_to_collect_and_a_busy_moment_is_not() -> None:
    thresholds = gc.get_threshold()
    with garbage.few_collections():
        assert gc.get_threshold()[2] > 100
        kept = Cycle()
        gc.collect(1)
        old = weakref.ref(kept)
        del kept
        # It was there at a collection before, so only a full one looks at it.
        gc.collect(1)
        assert old() is not None
        assert garbage.due()
        bench = Bench()
        sockets: Any = Quiet()
        loop = Loop(bench.core, bench.oracle, sockets, sockets, sockets, True)
        thread = threading.Thread(target=loop.run)
        thread.start()
        thread.join(10.0)
        assert not thread.is_alive()
        assert sockets.waits == [0.5, None]
        assert old() is None
        assert not garbage.due()
    assert gc.get_threshold() == thresholds
