"""When the garbage collector runs: not between two steps.

A full collection walks everything that lives, waiting requests and the whole tree, which takes longer than planning a
step, and it would come whenever the allocations of the steps had added up.  Reference counts free nearly everything
here at once, so the rest can wait until nobody else does.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Full collections that do not wait for a pause: one after so many of the middle generation.
BUSY_THRESHOLD = 1000


@contextmanager
def few_collections() -> Iterator[None]:
    """What lives now is not walked any more, and what comes seldom, until the end of the block."""
    thresholds = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], BUSY_THRESHOLD)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()


def due() -> bool:
    """Whether there is anything for `collect` to look at."""
    return gc.isenabled() and gc.get_count()[2] > 0


def collect() -> None:
    """A full collection, now."""
    gc.collect()
