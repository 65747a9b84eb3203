"""Aborts that overtook their requests: they come by ways of different length."""

from __future__ import annotations

from collections import OrderedDict

REMEMBERED = 4096


class EarlyAborts:
    """Ids that were aborted before they were known, the last so many of them."""

    def __init__(self) -> None:
        self._rids: OrderedDict[str, None] = OrderedDict()

    def note(self, rid: str) -> None:
        """An unknown request was aborted; it may be over, or still to come."""
        self._rids[rid] = None
        if len(self._rids) > REMEMBERED:
            self._rids.popitem(last=False)

    def take(self, rid: str) -> bool:
        """Whether the request that comes now was aborted; told once."""
        found = rid in self._rids
        self._rids.pop(rid, None)
        return found
