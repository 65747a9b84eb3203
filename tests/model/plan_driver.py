"""Makes plans for requests of the test's choosing, with tokens known or only promised."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from srt.messages import SamplingParams
from srt.plan import Plan, SlotOpen


@dataclass
class Request:
    """A request in a slot.  `ids`: prompt and the outputs known so far; `promised`: one more is on its way."""

    slot: int
    prompt: list[int]
    sampling: SamplingParams = field(default_factory=lambda: SamplingParams(temperature=0.0))
    seed: int = 0
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    stop_ids: tuple[int, ...] = ()
    ids: list[int] = field(default_factory=list)
    computed: int = 0
    promised: bool = False
    pages: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ids = self.ids or list(self.prompt)

    @property
    def total(self) -> int:
        """Tokens there are, the promised one included."""
        return len(self.ids) + self.promised


class PlanDriver:
    """Hands out pages in ascending order and builds one plan after another."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._next_page = 0
        self._step = 0
        self._open: set[int] = set()

    def plan(
        self,
        work: list[tuple[Request, int]],
        closed: tuple[int, ...] = (),
        copies: list[tuple[int, int, int]] | None = None,
    ) -> Plan:
        """A step that computes the next `count` tokens of each request and samples where it reaches the end."""
        size = self._page_size
        columns: dict[str, list[Any]] = {name: [] for name in ("ids", "positions", "slots", "pages", "last", "samples")}
        qo, kv = [0], [0]
        logprob_from, logprob_next = [], []
        self._open -= set(closed)
        opened = [self._opening(request) for request, _ in work if request.slot not in self._open]
        for request, count in work:
            begin, end = request.computed, request.computed + count
            assert end <= request.total
            while len(request.pages) * size < end:
                request.pages.append(self._next_page)
                self._next_page += 1
            promise = [-(request.slot + 1)] if end > len(request.ids) else []
            columns["ids"] += request.ids[begin:end] + promise
            columns["positions"] += range(begin, end)
            columns["slots"] += [request.pages[p // size] * size + p % size for p in range(begin, end)]
            columns["pages"] += request.pages[: -(-end // size)]
            columns["last"].append((end - 1) % size + 1)
            columns["samples"].append(end == request.total)
            qo.append(qo[-1] + count)
            kv.append(kv[-1] + -(-end // size))
            wants = request.prompt_logprobs_from is not None and begin < len(request.prompt) - 1
            logprob_from.append(max((request.prompt_logprobs_from or 0) - 1, 0) if wants else -1)
            logprob_next.append(request.ids[end] if wants and end < len(request.prompt) else -1)
            request.computed = end
            request.promised = end == request.total
        self._step += 1

        def int32(values: list[Any]) -> np.ndarray[Any, np.dtype[np.int32]]:
            return np.array(values, dtype=np.int32)

        return Plan(
            step=self._step,
            page_size=size,
            slots=int32([request.slot for request, _ in work]),
            token_ids=int32(columns["ids"]),
            positions=int32(columns["positions"]),
            out_slots=int32(columns["slots"]),
            qo_indptr=int32(qo),
            kv_indptr=int32(kv),
            kv_indices=int32(columns["pages"]),
            kv_last_page_len=int32(columns["last"]),
            samples=np.array(columns["samples"], dtype=np.bool_),
            copies=int32(copies or []).reshape(-1, 3),
            prompt_logprobs=int32(logprob_from),
            prompt_next=int32(logprob_next),
            opened=tuple(opened),
            closed=closed,
        )

    def _opening(self, request: Request) -> SlotOpen:
        self._open.add(request.slot)
        return SlotOpen(
            slot=request.slot,
            sampling=request.sampling,
            seed=request.seed,
            prompt_ids=np.array(request.prompt, dtype=np.int32),
            output_ids=np.array(request.ids[len(request.prompt) :], dtype=np.int32),
            logprobs=request.logprobs,
            stop_ids=request.stop_ids,
        )


def commit(request: Request, token: int) -> None:
    """The promised token has come."""
    request.ids.append(token)
    request.promised = False
