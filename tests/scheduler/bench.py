"""A core, its oracle and a clock in one, to be stepped by tests."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from radix import PagePool, Pins, PublicHeads, RadixTree
from scheduler.core import Scheduler
from scheduler.events import Tokens
from scheduler.limits import Limits
from scheduler.page_folder import PageFolder
from scheduler.policy import POLICIES
from scheduler.swap import SwapSpace
from scheduler.tier import DiskTier
from scheduler.tier_io import TierFiles
from srt.messages import Abort, Rejected, StopFound, TokenDelta, pack_ids
from srt.namespaces import PUBLIC
from srt.plan import Plan, StepHandle
from tests.scheduler.oracle import Oracle, Stream, message

IDENTITY = b"an oracle"


def prompt_of(length: int, first: int = 100) -> list[int]:
    """Distinct tokens."""
    return list(range(first, first + length))


class Bench:
    """Drives a scheduler as its loop does.  `overlap` keeps one step in flight while the next is planned.

    `disk`: a folder to keep pages in, in blocks of `block_pages`; its threads' work is done in `step`, one piece of
    each kind, or, without `disk_works`, when the test says so.  `heads`: beginnings that all namespaces share.
    """

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        step_tokens: int = 32,
        rows: int = 4,
        context: int = 200,
        policy: str = "lpm",
        overlap: bool = True,
        use_cache: bool = True,
        eos: frozenset[int] = frozenset(),
        max_queued: int | None = None,
        disk: Path | None = None,
        block_pages: int = 1,
        disk_bytes: int = 10**9,
        identity: bytes = IDENTITY,
        swap_pages: int = 0,
        preemption: Literal["auto", "recompute", "swap"] = "auto",
        stream_interval: int = 1,
        heads: Sequence[Sequence[int]] = (),
        max_pinned_share: float = 0.25,
        **limits: Any,
    ) -> None:
        self.now = 0.0
        # By so much the disk's clock goes on whenever somebody looks at it: a read of a block takes so long.
        self.disk_tick = 0.0
        self._disk_ticks = 0.0
        self.pool = PagePool(pages, page_size)
        declared = PublicHeads(PUBLIC, [pack_ids(head) for head in heads], page_size)
        self.tree = RadixTree(self.pool, heads=declared)
        bounds = Limits(context, step_tokens, rows, max_queued, eos_token_ids=eos, **limits)
        self.oracle = Oracle(pages, page_size, step_tokens, rows)
        self.files: TierFiles | None = None
        self.tier: DiskTier | None = None
        self.disk_works = True
        if disk is not None:
            folder = PageFolder(disk, identity, disk_bytes)
            self.files = TierFiles(folder, self.oracle, block_pages, 1, clock=self._disk_clock)
            self.tier = DiskTier(self.files, identity, block_pages, self.oracle.page_bytes, min_tokens=1)
        self.swap = SwapSpace(self.oracle, swap_pages * self.oracle.page_bytes) if swap_pages else None
        self.core = Scheduler(
            bounds,
            self.pool,
            self.tree,
            POLICIES[policy](),
            use_cache,
            stream_interval,
            tier=self.tier,
            swap=self.swap,
            preemption=preemption,
            pins=Pins(self.tree, pages, page_size, max_pinned_share),
        )
        self.overlap = overlap
        self.streams: dict[str, Stream] = defaultdict(Stream)
        self.rejected: dict[str, Rejected] = {}
        self._flight: deque[tuple[Plan, StepHandle]] = deque()

    def _disk_clock(self) -> float:
        self._disk_ticks += self.disk_tick
        return self.now + self._disk_ticks

    def send(self, rid: str, prompt: Sequence[int], max_new: int | None = 5, **changes: object) -> None:
        """A request arrives."""
        self.core.accept(message(rid, prompt, max_new, **changes), self.now)
        self._collect()

    def abort(self, rid: str) -> None:
        """A client goes away."""
        self.core.accept(Abort(rid), self.now)
        self._collect()

    def stop_found(self, rid: str, output_tokens: int) -> None:
        """The detokenizer found a stop string."""
        self.core.accept(StopFound(rid, output_tokens), self.now)
        self._collect()

    def step(self) -> bool:
        """One turn of the loop.  False when neither a plan nor a commit came of it."""
        self.now += 0.01
        if self.files is not None and self.disk_works:
            self.files.write_one()
            self.files.read_one()
        plan = self.core.plan(self.now)
        launched = [] if plan is None else [(plan, self.oracle.launch(plan))]
        busy = bool(launched or self._flight)
        if self._flight:
            self.commit_oldest()
        self._flight.extend(launched)
        self.oracle.in_flight = [plan for plan, _ in self._flight]
        if self._flight and not self.overlap:
            self.commit_oldest()
        self._collect()
        return busy

    def commit_oldest(self) -> None:
        """Commit the oldest step in flight."""
        _, handle = self._flight.popleft()
        self.core.commit(handle.wait(), self.now)
        self.oracle.in_flight = [plan for plan, _ in self._flight]
        self._collect()

    def run(self, max_steps: int = 3000) -> None:
        """Step until everything has ended, checking every invariant after each step."""
        for _ in range(max_steps):
            self.step()
            self.core.check()
            if self.core.idle and not self._flight:
                return
        raise AssertionError(
            f"not idle after {max_steps} steps: {self.core.num_running} run, {self.core.num_waiting} wait"
        )

    def check_flight(self) -> None:
        """No step in flight knows a free page: whoever takes one may fill it at once."""
        for plan in self.oracle.in_flight:
            for page in {*plan.kv_indices.tolist(), *plan.copies[:, :2].ravel().tolist()}:
                assert self.pool.refcount(page), f"page {page} of step {plan.step} in flight is free"

    def finish_disk(self) -> None:
        """Do all that the disk's threads have to do."""
        if self.files is not None:
            while self.files.write_one() or self.files.read_one():
                self.core.holdings.tier.poll(self.now)

    def _collect(self) -> None:
        for event in self.core.take_events():
            if isinstance(event, Rejected):
                self.rejected[event.rids[0]] = event
            elif isinstance(event, Tokens):
                for rid, token in zip(event.rids, event.ids, strict=True):
                    self._hear(TokenDelta(rid, pack_ids([token])))
            else:
                self._hear(event)

    def _hear(self, delta: TokenDelta) -> None:
        stream = self.streams[delta.rid]
        assert stream.ends == 0, "nothing comes after the end"
        stream.deltas.append(delta)
        assert (delta.open is not None) == (len(stream.deltas) == 1), "the first output opens the stream"

    def assert_whole(self) -> None:
        """Nothing runs, nothing but pins locks, and everything but the cache is free."""
        assert self.core.idle
        self.finish_disk()
        self.core.check()
        assert self.tree.receipts == 0
        assert self.tree.locked_pages == self.core.holdings.pins.pages
        assert self.pool.num_free + self.tree.evictable_pages + self.tree.locked_pages == self.pool.num_pages
        assert self.core.flush()
        assert self.pool.num_free == self.pool.num_pages
