"""The memory of the last requests' cache reports, for those who ask later why a request missed."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from srt.answer import Answer
from srt.cache_messages import CacheReport

# Prompts whose reports are kept: those of the last requests, whatever they had.
MAX_EXPLAINED_PROMPTS = 4096


@dataclass(frozen=True)
class Explained:
    """What is kept of one prompt when its request has ended."""

    prompt_tokens: int
    cache_report: CacheReport | None


@dataclass(frozen=True)
class _Entry:
    # The place of each prompt in its request, and its answer as long as it is not closed.
    prompts: tuple[tuple[str, Answer | Explained], ...]


class Explanations:
    """The cache reports of the last requests, by tenant and the id that the client knows a request by."""

    def __init__(self, max_prompts: int = MAX_EXPLAINED_PROMPTS) -> None:
        self._entries: OrderedDict[tuple[str, str], _Entry] = OrderedDict()
        self._max_prompts = max_prompts
        self._num_prompts = 0

    def open(self, tenant: str, rid: str, prompts: Sequence[tuple[str, Answer]]) -> None:
        """A request has begun.  An earlier one of the same tenant and id is forgotten."""
        self._drop((tenant, rid))
        self._entries[tenant, rid] = _Entry(tuple(prompts))
        self._num_prompts += len(prompts)
        while self._num_prompts > self._max_prompts:
            self._drop(next(iter(self._entries)))

    def close(self, tenant: str, rid: str) -> None:
        """The request has ended: keep its reports and let go of its answers."""
        entry = self._entries.get((tenant, rid))
        if entry is not None:
            closed = tuple((place, Explained(told.prompt_tokens, told.cache_report)) for place, told in entry.prompts)
            self._entries[tenant, rid] = _Entry(closed)

    def find(self, tenant: str, rid: str) -> Sequence[tuple[str, Answer | Explained]] | None:
        """Each prompt with its place; None for a request that is not known, or is another tenant's."""
        entry = self._entries.get((tenant, rid))
        return None if entry is None else entry.prompts

    def _drop(self, key: tuple[str, str]) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._num_prompts -= len(entry.prompts)
