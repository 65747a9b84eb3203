"""Keeping compute threads on cores of their own, where the system lets one choose (Linux)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

TASKS = Path("/proc/self/task")


def cores_for(threads: int) -> list[int]:
    """As many of the cores that this process may use.  Raises ValueError, with both numbers, when they are too few."""
    allowed = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if threads > len(allowed):
        raise ValueError(f"{threads} threads cannot have a core each of the {len(allowed)} that may be used")
    return allowed[:threads]


def pin_this_thread(core: int) -> None:
    """Let the calling thread run on this core alone."""
    os.sched_setaffinity(0, {core})


@contextmanager
def pinned(cores: Sequence[int]) -> Iterator[None]:
    """Put each thread that is started inside the block on a core of its own, in the order of their beginnings.

    No other thread may start one meanwhile.
    """
    before = _threads()
    yield
    for thread, core in zip(sorted(_threads() - before), cores, strict=True):
        os.sched_setaffinity(thread, {core})


def _threads() -> set[int]:
    return {int(task.name) for task in TASKS.iterdir()}
