"""An executor for tests whose "KV" of a token is the token itself, so that every wrong page shows in the output.

It keeps one number for every token slot of the pool.  A step writes its tokens, then reads each row's whole past
through the row's page table, checks it, and "samples" a function of what it read.  So the output of a request is
right if and only if each of its steps saw exactly its own tokens in the pages it was given.
"""

from __future__ import annotations

import zlib
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from srt.messages import Generate, SamplingParams, TokenDelta, pack_ids, unpack_ids
from srt.plan import Plan, RowLogprobs, SlotOpen, StepHandle, StepResult

VOCAB = 50


def next_token(tokens: Sequence[int], seed: int = 0) -> int:
    """What the oracle samples after `tokens`."""
    return zlib.crc32(array("i", tokens).tobytes(), seed) % VOCAB


def generate(prompt: Sequence[int], max_new: int, stop_ids: frozenset[int] = frozenset(), seed: int = 0) -> list[int]:
    """The reference: the whole output, computed alone."""
    tokens = list(prompt)
    for _ in range(max_new):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(prompt) :]


@dataclass
class Done:
    """A step that has run already; the scheduler learns of it when it asks."""

    result: StepResult

    def wait(self) -> StepResult:
        """The result."""
        return self.result


@dataclass
class Oracle:
    """See the head of the file.  `max_tokens` and `max_rows` are the budgets that no plan may exceed."""

    num_pages: int
    page_size: int
    max_tokens: int
    max_rows: int
    plans: list[Plan] = field(default_factory=list)
    fail_rows: Callable[[Plan], dict[int, str]] = lambda plan: {}
    seconds: Callable[[Plan], float] = lambda plan: 0.001
    # The plans that have been launched but not committed.
    in_flight: list[Plan] = field(default_factory=list)
    layout: str = "oracle"

    def __post_init__(self) -> None:
        self.memory = np.full(self.num_pages * self.page_size, -1, dtype=np.int64)
        self.slots: dict[int, SlotOpen] = {}
        self.last: dict[int, int] = {}
        self.sampled: dict[int, list[int]] = {}

    def launch(self, plan: Plan) -> StepHandle:
        """Run the step now, check everything that can be checked."""
        self.plans.append(plan)
        assert plan.num_tokens <= self.max_tokens, "token budget"
        assert plan.num_rows <= self.max_rows, "row budget"
        assert len(set(plan.slots.tolist())) == plan.num_rows, "a request is at most once in a plan"
        for slot in plan.closed:
            del self.slots[slot]
        for opened in plan.opened:
            assert opened.slot not in self.slots, "a slot is opened once"
            self.slots[opened.slot] = opened
            self.sampled[opened.slot] = list(opened.output_ids)
        for source, destination, rows in plan.copies.tolist():
            assert source != destination, "no page is copied onto itself"
            a, b = source * self.page_size, destination * self.page_size
            self.memory[b : b + rows] = self.memory[a : a + rows].copy()
        ids = plan.token_ids.astype(np.int64)
        for index in np.nonzero(ids < 0)[0]:
            ids[index] = self.last[-int(ids[index]) - 1]
        assert len(set(plan.out_slots.tolist())) == plan.num_tokens, "no slot is written twice in a step"
        tables, written = Counter(plan.kv_indices.tolist()), set((plan.out_slots // self.page_size).tolist())
        assert all(tables[page] == 1 for page in written), "a page that is written is in one row's table, once"
        self.memory[plan.out_slots] = ids
        sampled = np.full(plan.num_rows, -1, dtype=np.int32)
        logprobs: dict[int, RowLogprobs] = {}
        prompt_logprobs: dict[int, RowLogprobs] = {}
        for row in range(plan.num_rows):
            past = self._past(plan, row)
            slot = int(plan.slots[row])
            opened = self.slots[slot]
            expected = [*opened.prompt_ids.tolist(), *self.sampled[slot]]
            assert past == expected[: len(past)], "a row reads its own tokens from its pages"
            if plan.samples[row]:
                assert len(past) == len(expected), "only the last token samples"
                token = next_token(past, opened.seed)
                sampled[row] = self.last[slot] = token
                self.sampled[slot].append(token)
                if opened.logprobs is not None:
                    logprobs[row] = self._logprobs([token], opened.logprobs)
            if plan.prompt_logprobs[row] >= 0:
                prompt_logprobs[row] = self._prompt_logprobs(plan, row, past)
        errors = self.fail_rows(plan)
        return Done(StepResult(plan.step, sampled, logprobs, prompt_logprobs, errors, self.seconds(plan)))

    def _past(self, plan: Plan, row: int) -> list[int]:
        pages = plan.kv_indices[plan.kv_indptr[row] : plan.kv_indptr[row + 1]]
        length = (len(pages) - 1) * self.page_size + int(plan.kv_last_page_len[row])
        first, end = plan.qo_indptr[row], plan.qo_indptr[row + 1]
        positions = plan.positions[first:end]
        assert positions.tolist() == list(range(length - len(positions), length)), "the row's tokens are its last"
        slots = pages[np.arange(length) // self.page_size] * self.page_size + np.arange(length) % self.page_size
        assert slots[positions].tolist() == plan.out_slots[first:end].tolist(), "new KV goes where it is read"
        past: list[int] = self.memory[slots].tolist()
        return past

    def _prompt_logprobs(self, plan: Plan, row: int, past: list[int]) -> RowLogprobs:
        first = int(plan.positions[plan.qo_indptr[row]])
        start = max(int(plan.prompt_logprobs[row]), first)
        following = past[start + 1 :]
        if plan.prompt_next[row] >= 0:
            following.append(int(plan.prompt_next[row]))
        return self._logprobs(following, 0)

    def _logprobs(self, tokens: list[int], top: int) -> RowLogprobs:
        # The "logprob" of a token is minus its id: a wrong alignment shows.
        ids = np.tile(np.arange(top, dtype=np.int32), (len(tokens), 1))
        return RowLogprobs(-np.array(tokens, dtype=np.float32), ids, -ids.astype(np.float32))

    @property
    def page_bytes(self) -> int:
        """Eight bytes for each token."""
        return 8 * self.page_size

    def read_page(self, page: int) -> bytes:
        """See PageMemory.  What is read was filled from its first row on."""
        row = self.memory[page * self.page_size : (page + 1) * self.page_size]
        assert row[0] >= 0, "a page is read that was never filled"
        return row.tobytes()

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """See PageMemory.  No step in flight knows the page."""
        for plan in self.in_flight:
            assert page not in plan.kv_indices, "a page of a step in flight is written"
            assert page not in plan.copies[:, :2], "a page that a step in flight copies is written"
        self.memory[page * self.page_size : (page + 1) * self.page_size] = np.frombuffer(data, np.int64)

    def close(self) -> None:
        """Nothing to give back."""


def message(rid: str, prompt: Sequence[int], max_new: int | None, **changes: object) -> Generate:
    """A request for tests; `changes` are fields of Generate, and `stop_ids` its stop token ids."""
    stop_ids = changes.pop("stop_ids", ())
    sampling = SamplingParams(max_new_tokens=max_new, stop_token_ids=tuple(stop_ids), temperature=0.0)  # type: ignore[arg-type]
    fields: dict[str, object] = {"group": rid, "seed": 0, **changes}
    return Generate(rid=rid, prompt_ids=pack_ids(prompt), sampling=sampling, **fields)  # type: ignore[arg-type]


@dataclass
class Stream:
    """What a client has been told of one request."""

    deltas: list[TokenDelta] = field(default_factory=list)

    @property
    def ids(self) -> list[int]:
        """All output ids."""
        return [token for delta in self.deltas for token in unpack_ids(delta.ids)]

    @property
    def ends(self) -> int:
        """How many final messages came."""
        return sum(delta.finish is not None for delta in self.deltas)

    @property
    def reason(self) -> str | None:
        """The finish reason."""
        finish = self.deltas[-1].finish if self.deltas else None
        return None if finish is None else finish.reason

    @property
    def cached_tokens(self) -> int:
        """As reported with the first output."""
        return self.deltas[0].cached_tokens
