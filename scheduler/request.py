"""A request inside the scheduler: its tokens, what of them is computed, what it owns, and its life cycle.

    0            cached          computed          planned            known    known + promised
    |--------------|----------------|-----------------|-----------------|-----------|
     the tree's      pages of its     being computed    tokens that wait   sampled by a step in
     pages, shared   own (or the      by steps that     to be computed     flight: the id is known
     and locked      tree's, after    are in flight                        to the executor only
                     publishing)

Every step moves `planned` towards `known + promised`; when it arrives there the step samples one more token.
Prefill, chunk, prefix hit and coming back after a retraction are all this one rule.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import Enum

import numpy as np

from radix import Lock
from radix.disk import BlockChain
from scheduler.times import Times
from srt.cache_messages import CacheReport
from srt.messages import Finish, Generate, RequestTimes, StreamOpen, TokenLogprob
from srt.plan import Int32Array, SlotOpen

# Prompt ids that travel with a stream as context for tokenizers that decode differently after other tokens.
PROMPT_TAIL_TOKENS = 8


class Status(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"


TERMINAL = frozenset({Status.FINISHED, Status.CANCELLED, Status.FAILED})

# Admission is WAITING -> PREFILLING, retraction the way back: both are instants, not states.
LEGAL_EDGES: dict[Status, frozenset[Status]] = {
    Status.WAITING: frozenset({Status.PREFILLING, Status.FINISHED, Status.CANCELLED, Status.FAILED}),
    Status.PREFILLING: frozenset({Status.DECODING, Status.WAITING, *TERMINAL}),
    Status.DECODING: frozenset({Status.WAITING, *TERMINAL}),
    Status.FINISHED: frozenset(),
    Status.CANCELLED: frozenset(),
    Status.FAILED: frozenset(),
}


class IllegalTransition(Exception):
    """A request was asked to take an edge that its life cycle does not have; its state is unchanged."""


class PageTable:
    """A request's ordered page ids in one growing int32 array, so that a plan takes them without a copy per page."""

    __slots__ = ("buffer", "num_pages")

    def __init__(self) -> None:
        # The first `num_pages` entries count.  A plan cuts what it needs right out of it.
        self.buffer: Int32Array = np.empty(16, dtype=np.int32)
        self.num_pages = 0

    @property
    def pages(self) -> Int32Array:
        """int32 [num_pages], a view: valid until the table grows."""
        return self.buffer[: self.num_pages]

    def extend(self, pages: Sequence[int]) -> None:
        """Append page ids."""
        end = self.num_pages + len(pages)
        if end > len(self.buffer):
            grown = np.empty(max(end, 2 * len(self.buffer)), dtype=np.int32)
            grown[: self.num_pages] = self.pages
            self.buffer = grown
        self.buffer[self.num_pages : end] = pages
        self.num_pages = end

    def repoint(self, index: int, page: int) -> int:
        """Put another page at `index` and return the one that was there."""
        old = int(self.buffer[index])
        self.buffer[index] = page
        return old

    def take_all(self) -> list[int]:
        """Empty the table and return what was in it."""
        pages: list[int] = self.pages.tolist()
        self.num_pages = 0
        return pages


class Request:
    """One sample being made.  Only the scheduler changes it, and `status` only through `move_to`."""

    __slots__ = (
        "arrival",
        "awaits",
        "cache_report",
        "cached",
        "chain",
        "computed",
        "copied_from",
        "disk_tokens",
        "end_at",
        "finish",
        "first_cached",
        "hint_tokens",
        "key",
        "lock",
        "max_new_tokens",
        "message",
        "opened",
        "order",
        "pins_due",
        "planned",
        "promised",
        "prompt_logprobs",
        "prompt_tokens",
        "rank",
        "retractions",
        "scheduled_tokens",
        "slot",
        "status",
        "stop_ids",
        "table",
        "times",
        "times_due",
        "tokens",
        "unsent",
        "unsent_logprobs",
    )

    def __init__(
        self, message: Generate, arrival: float, order: int, max_new_tokens: int, stop_ids: frozenset[int]
    ) -> None:
        self.message = message
        self.arrival = arrival
        # Rank of arrival, for ties.
        self.order = order
        self.tokens = array("i", message.prompt_ids)
        self.prompt_tokens = len(self.tokens)
        # The known tokens as the tree wants them; renewed when a retracted request goes back to wait.
        self.key = message.prompt_ids
        self.max_new_tokens = max_new_tokens
        # Tokens, known and promised, at which the limit ends the output.
        self.end_at = self.prompt_tokens + max_new_tokens
        self.stop_ids = stop_ids
        self.status = Status.WAITING
        self.finish: Finish | None = None
        # Tokens: see the ruler above.
        self.cached = 0
        self.computed = 0
        self.planned = 0
        self.promised = 0
        # Possessions.
        self.table = PageTable()
        self.lock: Lock | None = None
        # The page of the tree whose first rows are copied into a page of our own, until that has been done.
        self.copied_from: int | None = None
        self.slot: int | None = None
        # While it waits: tokens that are cached, its place in the order, and who computes what it waits for.
        self.hint_tokens = 0
        self.rank: tuple[bool, float, int] = (True, 0.0, order)
        self.awaits: tuple[Request, int] | None = None
        # The names of its blocks in the lower tier, and how many tokens came from there at the first admission.
        self.chain: BlockChain | None = None
        self.disk_tokens = 0
        # Reports.
        self.times = Times(arrival)
        # Together with `computed` the tokens that were run through the model for it: those of earlier admissions, less
        # what was there at this one.
        self.scheduled_tokens = 0
        self.first_cached: int | None = None
        self.cache_report: CacheReport | None = None
        self.retractions = 0
        # Whether something is to be pinned when the prompt has been computed.
        self.pins_due = bool(message.pins)
        # What has not been told to the client yet.
        self.opened = False
        # A word on its times goes with the next output.
        self.times_due = True
        self.unsent = array("i")
        self.unsent_logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []

    @property
    def rid(self) -> str:
        """The request's id."""
        return self.message.rid

    @property
    def known(self) -> int:
        """Tokens whose ids the scheduler knows: prompt and committed outputs."""
        return len(self.tokens)

    @property
    def num_outputs(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def to_plan(self) -> int:
        """Tokens that the next step could compute; zero when the outputs on their way already reach the limit."""
        # A limit of zero asks for the prompt alone; it is computed, and nothing is sampled.
        if self.promised and self.num_outputs + self.promised >= self.max_new_tokens:
            return 0
        return self.known + self.promised - self.planned

    @property
    def remaining_outputs(self) -> int:
        """Output tokens that may still come."""
        return max(0, self.max_new_tokens - self.num_outputs)

    @property
    def is_terminal(self) -> bool:
        """True once the client has been told the end."""
        return self.status in TERMINAL

    @property
    def match_limit(self) -> int:
        """Tokens that may come from the cache.

        The last known token is always computed, since its logits are needed, and with prompt logprobs so is
        every token from the one before the first that is asked for.
        """
        limit = len(self.tokens) - 1
        start = self.message.prompt_logprobs_from
        return limit if start is None else max(0, min(limit, start - 1))

    def move_to(self, status: Status) -> None:
        """Take an edge of the life cycle.  Raises IllegalTransition, and changes nothing, where there is none."""
        if status not in LEGAL_EDGES[self.status]:
            raise IllegalTransition(f"{self.rid}: {self.status.value} -> {status.value}")
        self.status = status

    def slot_open(self) -> SlotOpen:
        """The sampling state to set up in the executor, as of the committed tokens."""
        assert self.slot is not None
        tokens = np.array(self.tokens, dtype=np.int32)
        return SlotOpen(
            slot=self.slot,
            sampling=self.message.sampling,
            seed=self.message.seed,
            prompt_ids=tokens[: self.prompt_tokens],
            output_ids=tokens[self.prompt_tokens :],
            logprobs=self.message.logprobs,
            stop_ids=tuple(sorted(self.stop_ids)),
        )

    def report_times(self) -> RequestTimes:
        """Where its time went so far."""
        return self.times.report(self.retractions, self.scheduled_tokens + self.computed)

    def stream_open(self) -> StreamOpen:
        """What the detokenizer must know."""
        sampling = self.message.sampling
        tail = self.tokens[max(0, self.prompt_tokens - PROMPT_TAIL_TOKENS) : self.prompt_tokens]
        return StreamOpen(
            prompt_tail=tail.tobytes(),
            stop=sampling.stop,
            skip_special_tokens=sampling.skip_special_tokens,
            no_stop_trim=sampling.no_stop_trim,
            cache_report=self.cache_report,
        )


def common_prefix_tokens(a: bytes, b: bytes) -> int:
    """Leading tokens that two packed sequences share."""
    end = min(len(a), len(b))
    if a[:end] == b[:end]:
        return end // 4
    differs = np.frombuffer(a, np.int32, end // 4) != np.frombuffer(b, np.int32, end // 4)
    return int(differs.argmax())
