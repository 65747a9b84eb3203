"""What passes between a lower tier's decisions (tier.py) and the files and threads behind them (tier_io.py).

Decisions go down as calls that return at once; what became of them comes back as events.  A page that is named in a
call belongs to the tier until the event that answers the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from radix.disk import Block


class BlockLoaded(NamedTuple):
    """Block `place` of a load has come to its end: `ok` when its pages are filled with what was asked for.

    `seconds`: what reading took, `num_bytes`: what was read; both 0 for a block that was not tried, since its load was
    cancelled.  `missing`: not `ok` and not for want of trying: there is no usable file, or it could not be read;
    `error`: the latter.
    """

    load_id: int
    place: int
    ok: bool
    missing: bool = False
    error: bool = False
    num_bytes: int = 0
    seconds: float = 0.0


class BlockSaved(NamedTuple):
    """A block was written (`num_bytes`), was there already (0), failed, or was not tried after an earlier failure."""

    save_id: int
    ok: bool
    num_bytes: int = 0
    error: bool = False


class FilesChanged(NamedTuple):
    """Files of our identity that appeared and that went, and the size of all files of the folder in bytes."""

    added: Sequence[bytes]
    gone: Sequence[bytes]
    used_bytes: int


class FilesForgotten(NamedTuple):
    """What was to be forgotten is gone, as far as it could be removed."""


# Whether a namespace is concerned.
Concerns = Callable[[str], bool]

TierEvent = BlockLoaded | BlockSaved | FilesChanged | FilesForgotten


class TierIO(Protocol):
    """Files and threads.  No call blocks."""

    @property
    def readers(self) -> int:
        """Blocks that are read at the same time."""
        ...

    def poll(self) -> list[TierEvent]:
        """What has happened since the last call."""
        ...

    def load(self, load_id: int, blocks: Sequence[Block], pages: Sequence[Sequence[int]]) -> None:
        """Fill `pages` (those of each block) from the blocks' files, in order; one BlockLoaded for each block."""
        ...

    def cancel(self, load_id: int) -> None:
        """Do not begin with the rest of a load's blocks; their events come all the same."""
        ...

    def save(self, save_id: int, block: Block, pages: Sequence[int]) -> None:
        """Write a block; one BlockSaved."""
        ...

    def drop_saves(self) -> list[int]:
        """Forget the saves that have not been begun; there are no events for them."""
        ...

    def touch(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """These blocks (key, depth) were of use."""
        ...

    def forget(self, concerns: Concerns | None = None, tokens: bytes = b"") -> None:
        """Remove the files of our identity that hold what begins with `tokens` in such namespaces (None: every file).

        One FilesForgotten, behind the FilesChanged that tells which.
        """
        ...
