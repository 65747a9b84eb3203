"""The lower tier's decisions: what is written, what is worth loading, who waits.  No files, no threads, no clock.

    publish  -> save    every whole block that the tree takes is written soon after (write-through), so that nothing is
                        lost when the process is killed; its pages have one more owner until that is done
    admit    -> holds   a request whose prefix goes on in the lower tier waits while it is loaded, others pass it by
    loaded   -> insert  the pages go into the tree, and the request is matched and admitted like any other

A load owns freshly allocated pages, which no step in flight knows, and a lock on the prefix that it goes on from.
Whatever does not come in time, or at all, is computed: a request never waits longer than computing would take.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import TYPE_CHECKING

from radix import Lock
from radix.disk import Block, BlockChain
from scheduler.request import Request
from scheduler.tier_protocol import BlockLoaded, BlockSaved, Concerns, FilesChanged, FilesForgotten, TierIO

if TYPE_CHECKING:
    from scheduler.holdings import Holdings

# Fewer tokens than this are computed rather than loaded.
MIN_LOAD_TOKENS = 32
# A load that takes longer than this has lost; in between, longer than computing would take.
MIN_PATIENCE_SECONDS, MAX_PATIENCE_SECONDS = 0.25, 10.0
# The same where nothing has been computed yet, so that nobody knows.
FIRST_PATIENCE_SECONDS = 5.0
# Loads that one request waits for, one after the other: what another load has brought may have gone again.
MAX_ROUNDS = 4
# Share of the pool that blocks being written may hold.  What is beyond it waits in the tree, as long as it stays there.
SAVING_SHARE = 8
# Runs that wait so; the oldest are forgotten.
MAX_BACKLOG = 256
# A block that has been of use is marked so in its file at most so often.
TOUCH_SECONDS = 60.0
# How long a running request that finds no page waits for those that files are being read into or written from.
DRY_SECONDS = 5.0
# Steps with fewer prefill tokens say little about the speed of prefill.
TELLING_PREFILL_TOKENS = 16


@dataclass(slots=True)
class TierCounters:
    """Totals since the start.

    `hits`: requests that got tokens from the tier; `tokens`: how many, as their replies say; `dropped`: blocks that
    were not written since the writer was behind or failing; `errors`: reads and writes that failed; `late`: loads that
    were not waited for to the end.
    """

    hits: int = 0
    tokens: int = 0
    read_bytes: int = 0
    writes: int = 0
    written_bytes: int = 0
    dropped: int = 0
    errors: int = 0
    late: int = 0


@dataclass(slots=True, eq=False)
class Load:
    """Blocks on their way into pages.  `prefix`: the tree's pages before them; `start`: the first token loaded."""

    load_id: int
    namespace: str
    tokens: bytes
    start: int
    prefix: array[int]
    pages: array[int]
    keys: list[bytes]
    lock: Lock
    deadline: float
    results: list[bool | None]
    waiters: set[str] = field(default_factory=set)
    inserted: int = 0
    late: bool = False
    ended: bool = False


@dataclass(slots=True)
class Seat:
    """A waiting request's part: what it waits for, how often it has, and what came of it, as token ranges."""

    load: Load | None = None
    rounds: int = 0
    matched: int = 0
    reach: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)


class DiskTier:
    """Decides; see the head of the file.  `identity`: what all pages of this process depend on beside their tokens."""

    def __init__(
        self, io: TierIO, identity: bytes, block_pages: int, page_bytes: int, min_tokens: int = MIN_LOAD_TOKENS
    ) -> None:
        self._io = io
        self._identity = identity
        self._block_pages = block_pages
        self._block_bytes = block_pages * page_bytes
        self._min_tokens = min_tokens
        self.counters = TierCounters()
        self._now = 0.0
        # Blocks that have a file, and when they were of use last.
        self._index: dict[bytes, float] = {}
        self._used_bytes = 0
        self._seats: dict[str, Seat] = {}
        self._loads: dict[int, Load] = {}
        self._loading: dict[bytes, Load] = {}
        self._saves: dict[int, tuple[bytes, Sequence[int]]] = {}
        self._saving: set[bytes] = set()
        # Runs of which not all could be written yet.
        self._backlog: OrderedDict[BlockChain, bytes] = OrderedDict()
        self._next_id = 0
        # Bytes a second of one reader, and seconds of a prefill token; None before the first.
        self._read_rate: float | None = None
        self._token_seconds: float | None = None
        self._dry_since: float | None = None
        # Calls to forget that are not done yet: until then nothing is loaded, since it might be what is to go.
        self._forgetting = 0

    def attach(self, holdings: Holdings) -> None:
        """Where pages come from and go to.  Called once, before anything else."""
        self._holdings = holdings
        self._block_tokens = self._block_pages * holdings.page_size
        self._max_saves = max(1, holdings.pool.num_pages // SAVING_SHARE // self._block_pages)

    # ---- what has happened ----------------------------------------------------------------------------------

    def poll(self, now: float) -> None:
        """Take in what the files and threads have brought, and let go who has waited long enough."""
        self._now = now
        for event in self._io.poll():
            self._dry_since = None
            if isinstance(event, BlockLoaded):
                self._block_loaded(event)
            elif isinstance(event, BlockSaved):
                self._block_saved(event)
            elif isinstance(event, FilesForgotten):
                self._forgetting -= 1
            else:
                self._files_changed(event)
        for load in list(self._loads.values()):
            if now >= load.deadline and not load.late:
                load.late = True
                self.counters.late += 1
                self._insert(load)
                self._io.cancel(load.load_id)
        self._catch_up()

    def _files_changed(self, event: FilesChanged) -> None:
        self._used_bytes = event.used_bytes
        for key in event.gone:
            self._index.pop(key, None)
        for key in event.added:
            self._index.setdefault(key, self._now)

    def _block_saved(self, event: BlockSaved) -> None:
        key, pages = self._saves.pop(event.save_id)
        self._saving.remove(key)
        self._holdings.pool.release(pages)
        self.counters.errors += event.error
        if event.ok:
            self._index[key] = self._now
            self.counters.writes += bool(event.num_bytes)
            self.counters.written_bytes += event.num_bytes
            self._used_bytes += event.num_bytes
        elif not event.error:
            self.counters.dropped += 1

    def _block_loaded(self, event: BlockLoaded) -> None:
        load = self._loads[event.load_id]
        load.results[event.place] = event.ok
        self.counters.errors += event.error
        self.counters.read_bytes += event.num_bytes
        if event.missing:
            self._index.pop(load.keys[event.place], None)
        if event.ok and event.seconds > 0:
            rate = event.num_bytes / event.seconds
            self._read_rate = rate if self._read_rate is None else 0.9 * self._read_rate + 0.1 * rate
        if None not in load.results:
            self._end(load)

    def _end(self, load: Load) -> None:
        self._insert(load)
        load.ended = True
        self._holdings.tree.unlock(load.lock)
        self._holdings.pool.release(load.pages)
        del self._loads[load.load_id]
        for key in load.keys:
            del self._loading[key]

    def _insert(self, load: Load) -> None:
        """Give the tree what has come without a gap.  The pages keep the load as an owner until it has ended."""
        blocks = sum(1 for _ in takewhile(bool, load.results))
        if blocks > load.inserted:
            load.inserted = blocks
            tokens = load.tokens[: 4 * (load.start + blocks * self._block_tokens)]
            pages = load.prefix + load.pages[: blocks * self._block_pages]
            load.lock = self._holdings.insert_loaded(load.namespace, tokens, pages, load.lock)

    # ---- loading --------------------------------------------------------------------------------------------

    def holds(self, request: Request, reserve_pages: int) -> bool:
        """Whether a waiting request had better wait for what is being loaded; begins to load what is worth it.

        `reserve_pages`: those that the load has to leave to others.
        """
        if not self._holdings.caches(request):
            return False
        seat = self._seats.setdefault(request.rid, Seat())
        if seat.load is not None:
            if not (seat.load.ended or seat.load.late):
                return True
            self._stand_up(seat, seat.load)
        if seat.rounds >= MAX_ROUNDS or not self._index or self._forgetting:
            return False
        seat.load = self._load_for(request, seat, reserve_pages)
        if seat.load is None:
            return False
        seat.rounds += 1
        seat.load.waiters.add(request.rid)
        return True

    def _stand_up(self, seat: Seat, load: Load) -> None:
        end = min(load.start + load.inserted * self._block_tokens, seat.reach)
        if end > max(load.start, seat.matched):
            seat.spans.append((max(load.start, seat.matched), end))
        if load.late:
            seat.rounds = MAX_ROUNDS
        seat.load = None

    def _load_for(self, request: Request, seat: Seat, reserve_pages: int) -> Load | None:
        """The load that brings what comes next of the request's prefix: one under way, or a new one if it pays."""
        size, limit = self._block_tokens, request.match_limit
        seat.matched = self._holdings.match_length(request)
        first = end = seat.matched // size
        chain, key = self._chain(request), request.key
        last = min(len(key) // 4 // size, -(-limit // size))
        under_way: Load | None = None
        while end < last and chain.key(key, end) in self._index:
            load = self._loading.get(chain.key(key, end))
            if load is not under_way and end > first:
                break
            under_way = load
            end += 1
        seat.reach = min(end * size, limit)
        if under_way is not None:
            return under_way
        if not self._pays(seat.reach - seat.matched, end - first):
            seat.rounds = MAX_ROUNDS
            return None
        return self._begin(request, [chain.block(key, depth) for depth in range(first, end)], reserve_pages)

    def _pays(self, tokens: int, blocks: int) -> bool:
        """Whether loading so many tokens is worth it."""
        if tokens < self._min_tokens:
            return False
        if self._read_rate is None or self._token_seconds is None:
            return True
        num_bytes = blocks * self._block_bytes
        if num_bytes / (self._read_rate * self._io.readers) < tokens * self._token_seconds:
            return True
        # What has been measured gets old, and only loading measures it anew.
        self._read_rate *= 1.05
        return False

    def _patience(self, tokens: int) -> float:
        if self._token_seconds is None:
            return FIRST_PATIENCE_SECONDS
        return min(max(tokens * self._token_seconds, MIN_PATIENCE_SECONDS), MAX_PATIENCE_SECONDS)

    def _begin(self, request: Request, blocks: list[Block], reserve_pages: int) -> Load | None:
        """Take a lock and pages and begin to load, if the request could have all its pages beside those reserved."""
        holdings = self._holdings
        start = blocks[0].depth * self._block_tokens
        namespace = request.message.namespace
        match = holdings.tree.match(namespace, request.key, start, touch=False)
        lock = holdings.tree.lock(match)
        pages = None
        if holdings.pages_for(request.known) - len(match.pages) + reserve_pages <= holdings.available:
            pages = holdings.take_pages(len(blocks) * self._block_pages)
        if pages is None:
            holdings.tree.unlock(lock)
            return None
        end = start + len(blocks) * self._block_tokens
        self._next_id += 1
        load = Load(
            load_id=self._next_id,
            namespace=namespace,
            tokens=request.key[: 4 * end],
            start=start,
            prefix=match.pages,
            pages=pages,
            keys=[block.key for block in blocks],
            lock=lock,
            deadline=self._now + self._patience(end - start),
            results=[None] * len(blocks),
        )
        self._loads[load.load_id] = load
        self._loading.update((key, load) for key in load.keys)
        size = self._block_pages
        self._io.load(load.load_id, blocks, [pages[i * size : (i + 1) * size] for i in range(len(blocks))])
        return load

    def _chain(self, request: Request) -> BlockChain:
        if request.chain is None:
            request.chain = BlockChain(self._identity, request.message.namespace, self._block_tokens)
        return request.chain

    def admitted(self, request: Request) -> None:
        """A request has its match: count what of it came from here, and mark what is in use."""
        seat = self._seats.get(request.rid)
        if seat is not None and seat.load is not None:
            self._stand_up(seat, seat.load)
        if seat is not None and request.first_cached is None:
            request.disk_tokens = _covered(seat.spans, request.computed)
            self.counters.hits += bool(request.disk_tokens)
            self.counters.tokens += request.disk_tokens
        if not self._holdings.caches(request):
            return
        used = []
        for depth in range(request.computed // self._block_tokens):
            key = self._chain(request).key(request.key, depth)
            touched = self._index.get(key)
            if touched is not None and touched < self._now - TOUCH_SECONDS:
                self._index[key] = self._now
                used.append((key, depth))
        if used:
            self._io.touch(used)

    def leave(self, request: Request) -> None:
        """A request does not wait any more.  A load that nobody waits for ends as soon as it can."""
        seat = self._seats.pop(request.rid, None)
        if seat is not None and seat.load is not None:
            load = seat.load
            load.waiters.discard(request.rid)
            if not load.waiters and not load.ended:
                self._io.cancel(load.load_id)

    # ---- saving ---------------------------------------------------------------------------------------------

    def save(self, request: Request, tokens: bytes, pages: Sequence[int]) -> None:
        """The tree has a run of the request's in these whole pages: write the blocks of it that have no file yet."""
        chain = self._chain(request)
        if self._save_run(chain, tokens, pages):
            self._backlog.pop(chain, None)
            return
        self._backlog[chain] = tokens
        if len(self._backlog) > MAX_BACKLOG:
            forgotten, run = self._backlog.popitem(last=False)
            self.counters.dropped += len(run) // 4 // self._block_tokens - forgotten.saved

    def _save_run(self, chain: BlockChain, tokens: bytes, pages: Sequence[int]) -> bool:
        """Write what is not written yet of a run.  False when there was not room for all of it."""
        size = self._block_pages
        for depth in range(chain.saved, len(pages) // size):
            key = chain.key(tokens, depth)
            if key not in self._index and key not in self._saving:
                if len(self._saves) >= self._max_saves:
                    return False
                self._begin_save(chain.block(tokens, depth), pages[depth * size : (depth + 1) * size])
            chain.saved = depth + 1
        return True

    def _catch_up(self) -> None:
        """Go on with the runs that wait to be written, as far as the tree still has them."""
        while self._backlog and len(self._saves) < self._max_saves:
            chain, tokens = next(iter(self._backlog.items()))
            match = self._holdings.tree.match(chain.namespace, tokens, len(tokens) // 4, touch=False)
            if not self._save_run(chain, tokens, match.pages):
                return
            self.counters.dropped += max(0, len(tokens) // 4 // self._block_tokens - chain.saved)
            del self._backlog[chain]

    def _begin_save(self, block: Block, pages: Sequence[int]) -> None:
        self._holdings.pool.share(pages)
        self._next_id += 1
        self._saves[self._next_id] = block.key, pages
        self._saving.add(block.key)
        self._io.save(self._next_id, block, pages)

    # ---- when pages are short -------------------------------------------------------------------------------

    def drop_saves(self) -> bool:
        """Let go of the pages that wait to be written.  True when there were any."""
        dropped = self._io.drop_saves()
        for save_id in dropped:
            key, pages = self._saves.pop(save_id)
            self._saving.remove(key)
            self._holdings.pool.release(pages)
        self.counters.dropped += len(dropped)
        return bool(dropped)

    def gives_back(self) -> bool:
        """End what can be ended.  True while pages will soon come back from it, which is better than to retract."""
        if not (self._loads or self._saves):
            return False
        for load in self._loads.values():
            self._io.cancel(load.load_id)
        if self._dry_since is None:
            self._dry_since = self._now
        return self._now - self._dry_since < DRY_SECONDS

    # ---- the rest -------------------------------------------------------------------------------------------

    def observe_step(self, seconds: float, prefill_tokens: int) -> None:
        """A step took so long: what a prefill token costs is what loading has to beat."""
        if prefill_tokens >= TELLING_PREFILL_TOKENS:
            cost = seconds / prefill_tokens
            self._token_seconds = cost if self._token_seconds is None else 0.8 * self._token_seconds + 0.2 * cost

    def flush(self) -> None:
        """Forget everything, on disk too."""
        self._index.clear()
        self._backlog.clear()
        self._forgetting += 1
        self._io.forget()

    def forget(self, concerns: Concerns, tokens: bytes) -> None:
        """Forget what begins with `tokens` in the namespaces that are concerned."""
        for chain, run in list(self._backlog.items()):
            if concerns(chain.namespace) and run.startswith(tokens):
                del self._backlog[chain]
        self._forgetting += 1
        self._io.forget(concerns, tokens)

    def stats(self) -> dict[str, int]:
        """Fields of SchedulerStats."""
        counters = self.counters
        return {
            "disk_hits": counters.hits,
            "disk_tokens": counters.tokens,
            "disk_read_bytes": counters.read_bytes,
            "disk_writes": counters.writes,
            "disk_written_bytes": counters.written_bytes,
            "disk_dropped": counters.dropped,
            "disk_errors": counters.errors,
            "disk_late": counters.late,
            "disk_blocks": len(self._index),
            "disk_used_bytes": self._used_bytes,
            "disk_loading": len(self._loads),
        }

    def owned(self) -> Iterator[Sequence[int]]:
        """The pages that loads and saves hold: the tier's part of the owners that `PagePool.check` asks for."""
        yield from (load.pages for load in self._loads.values())
        yield from (pages for _, pages in self._saves.values())

    def check(self) -> None:
        """Raises AssertionError when what is kept twice differs."""
        assert self._saving == {key for key, _ in self._saves.values()}, "blocks being written"
        assert len(self._saving) == len(self._saves) <= self._max_saves, "a block is written once at a time"
        loading = {key: load for load in self._loads.values() for key in load.keys}
        assert self._loading == loading, "blocks being loaded"
        for rid, seat in self._seats.items():
            assert seat.load is None or seat.load.ended or rid in seat.load.waiters, "a load knows who waits for it"
        for load in self._loads.values():
            assert not load.ended, "a load that has ended is gone"
            assert None in load.results, "a load has ended unnoticed"


def _covered(spans: list[tuple[int, int]], limit: int) -> int:
    """Tokens below `limit` that lie in one of the ranges."""
    total = at = 0
    for start, end in sorted(spans):
        total += max(0, min(end, limit) - max(start, at))
        at = max(at, end)
    return total
