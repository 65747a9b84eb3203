"""What stands in the disk tier's place when there is none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from scheduler.request import Request
from scheduler.tier_protocol import Concerns

if TYPE_CHECKING:
    from scheduler.holdings import Holdings


class NoTier:
    """There is no lower tier: the same calls, and nothing happens."""

    def attach(self, holdings: Holdings) -> None:
        """See DiskTier."""

    def poll(self, now: float) -> None:
        """See DiskTier."""

    def holds(self, request: Request, reserve_pages: int) -> bool:
        """Nobody waits."""
        return False

    def admitted(self, request: Request) -> None:
        """See DiskTier."""

    def leave(self, request: Request) -> None:
        """See DiskTier."""

    def save(self, request: Request, tokens: bytes, pages: Sequence[int]) -> None:
        """See DiskTier."""

    def drop_saves(self) -> bool:
        """Nothing was dropped."""
        return False

    def gives_back(self) -> bool:
        """No page is on its way back."""
        return False

    def observe_step(self, seconds: float, prefill_tokens: int) -> None:
        """See DiskTier."""

    def flush(self) -> None:
        """See DiskTier."""

    def forget(self, concerns: Concerns, tokens: bytes) -> None:
        """See DiskTier."""

    def stats(self) -> dict[str, int]:
        """Nothing to report."""
        return {}

    def owned(self) -> Iterator[Sequence[int]]:
        """No pages."""
        return iter(())

    def check(self) -> None:
        """Nothing to check."""
