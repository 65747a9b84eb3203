"""How fast the radix tree is: requests and tokens per second on three traces, and how the cost grows with the tree.

    python -m benchmarks.radix_tree                traces at page sizes 1, 16 and 64, and growth to 10^6 nodes
    python -m benchmarks.radix_tree --sglang       the same traces through SGLang's radix cache too, with ratios

One request is: match (all but the last prompt token), lock, take pages (evicting if there are too few), insert prompt
and output, release duplicates, unlock; 16 requests are in flight.  "request" is that with the tree alone, as other
caches do it; "+ owners" counts each request as an owner of the matched pages too, as the scheduler does.  Times are
CPU seconds of the thread, best of the repeats, without garbage collection; ids are packed beforehand.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from benchmarks.radix_traces import Trace, chats, chats_under_pressure, shared_heads
from radix import PagePool, RadixTree, policy_by_name

IN_FLIGHT = 16
# The growth table.
GROWTH_PAGE_SIZE, HEAD_PAGES, OWN_PAGES = 16, 4, 2
PROBES, PROBES_PER_HEAD = 3000, 30


class Cycle(Protocol):
    """One request's way through a prefix cache."""

    def prepare(self, ids: array[int], prompt: int) -> Any:
        """What the cache wants to be given, made outside the clock."""
        ...

    def match(self, request: Any) -> int:
        """Look only; tokens found."""
        ...

    def start(self, request: Any) -> tuple[int, Any]:
        """Admission; tokens found, and what `finish` needs."""
        ...

    def finish(self, state: Any) -> None:
        """The end of the request."""
        ...


class SapwoodCycle:
    """Our tree and pool.  With `owners`, a request shares the pages that it matched, as the scheduler does."""

    def __init__(self, num_tokens: int, page_size: int, owners: bool, policy: str) -> None:
        self.page_size = page_size
        self.pool = PagePool(num_tokens // page_size, page_size)
        self.tree = RadixTree(self.pool, policy_by_name(policy))
        self.owners = owners

    def prepare(self, ids: array[int], prompt: int) -> tuple[bytes, int, int]:
        """Packed ids, how many may match, pages for all."""
        return ids.tobytes(), prompt - 1, -(-len(ids) // self.page_size)

    def match(self, request: tuple[bytes, int, int]) -> int:
        """Match only."""
        return self.tree.match("bench", request[0], request[1]).num_tokens

    def start(self, request: tuple[bytes, int, int]) -> tuple[int, Any]:
        """Match, lock, take pages for the rest."""
        tokens, limit, count = request
        tree, pool = self.tree, self.pool
        match = tree.match("bench", tokens, limit)
        lock = tree.lock(match)
        pages = match.pages
        if self.owners:
            pool.share(pages)
        needed = count - len(pages)
        if needed > pool.num_free:
            tree.evict(needed - pool.num_free)
        fresh = pool.alloc(needed)
        assert fresh is not None, "the benchmark's pool is too small"
        return match.num_tokens, (tokens, pages, fresh, lock)

    def finish(self, state: Any) -> None:
        """Insert prompt and output with the partly filled page, give everything back."""
        tokens, pages, fresh, lock = state
        tree, pool = self.tree, self.pool
        table = pages + fresh
        extended = tree.insert("bench", tokens, table, lock).lock
        assert extended is not None
        tree.unlock(extended)
        pool.release(table if self.owners else fresh)


@dataclass(frozen=True)
class Figures:
    """What one cache did on one trace."""

    requests_per_second: float
    tokens_per_second: float
    matches_per_second: float
    hit_rate: float


def timed(work: Callable[[], object]) -> float:
    """CPU seconds of this thread."""
    gc.collect()
    gc.disable()
    begin = time.thread_time()
    work()
    seconds = time.thread_time() - begin
    gc.enable()
    return seconds


def replay(make: Callable[[], Cycle], trace: Trace, repeats: int) -> Figures:
    """Run a trace `repeats` times, each time from an empty cache."""
    best = best_match = float("inf")
    hits = 0
    for _ in range(repeats):
        cycle = make()
        requests = [cycle.prepare(request.ids, request.prompt) for request in trace.requests]
        hits = 0

        def serve(cycle: Cycle = cycle, requests: list[Any] = requests) -> None:
            nonlocal hits
            running: deque[Any] = deque()
            for request in requests:
                if len(running) == IN_FLIGHT:
                    cycle.finish(running.popleft())
                hit, state = cycle.start(request)
                hits += hit
                running.append(state)
            while running:
                cycle.finish(running.popleft())

        def look(cycle: Cycle = cycle, requests: list[Any] = requests) -> None:
            for request in requests:
                cycle.match(request)

        best = min(best, timed(serve))
        best_match = min(best_match, timed(look))
    count = len(trace.requests)
    prompts = sum(request.prompt for request in trace.requests)
    return Figures(count / best, trace.tokens / best, count / best_match, hits / prompts)


def print_traces(sizes: list[int], repeats: int, policy: str, sglang: bool) -> None:
    """One row for each trace and page size."""
    print(
        f"{'trace':9} {'page':>4} {'requests/s':>11} {'Mtok/s':>7} {'+ owners':>9} {'matches/s':>10} {'hit':>7}", end=""
    )
    print(f" {'sglang':>8} {'ratio':>6} {'matches/s':>10} {'ratio':>6} {'hit':>7}" if sglang else "")
    for trace in (shared_heads(), chats(), chats_under_pressure()):
        for size in sizes:
            # Room for the rounding of what is in flight, the same for everyone.
            room = trace.capacity + (IN_FLIGHT + len(trace.requests) * (trace.name != "pressure")) * size
            plain = replay(lambda: SapwoodCycle(room, size, False, policy), trace, repeats)  # noqa: B023
            owners = replay(lambda: SapwoodCycle(room, size, True, policy), trace, repeats)  # noqa: B023
            row = f"{trace.name:9} {size:4} {plain.requests_per_second:11,.0f} {plain.tokens_per_second / 1e6:7.1f}"
            row += f" {owners.requests_per_second:9,.0f} {plain.matches_per_second:10,.0f} {plain.hit_rate:7.2%}"
            if sglang:
                from benchmarks.sglang_radix import SglangCycle

                peer = replay(lambda: SglangCycle(room, size), trace, repeats)  # noqa: B023
                row += f" {peer.requests_per_second:8,.0f} {plain.requests_per_second / peer.requests_per_second:6.1f}"
                row += f" {peer.matches_per_second:10,.0f} {plain.matches_per_second / peer.matches_per_second:6.1f}"
                row += f" {peer.hit_rate:7.2%}"
            print(row, flush=True)


def print_growth(largest: int, policy: str) -> None:
    """Microseconds for each operation in trees of 10^3 nodes and more; heads with about 100 continuations each."""
    print(f"\n{'nodes':>9} {'hit':>6} {'hit, cold':>9} {'lock+unlock':>12} {'miss':>6} {'insert+evict':>13}", end="")
    print(f"   microseconds; {HEAD_PAGES + OWN_PAGES} pages of {GROWTH_PAGE_SIZE} tokens each")
    nodes = 1000
    while nodes <= largest:
        micro = growth_row(nodes, policy)
        print(
            f"{nodes:9,} {micro[0]:6.2f} {micro[1]:9.2f} {micro[2]:12.2f} {micro[3]:6.2f} {micro[4]:13.2f}", flush=True
        )
        nodes *= 10


def growth_row(nodes: int, policy: str) -> list[float]:
    """The row of one tree.

    Most probes go to the same few heads whatever the size, so that the figures show the steps of the algorithm;
    "cold" ones go anywhere, so that the memory is as slow as it is.
    """
    rng = random.Random(nodes)
    pool = PagePool(nodes * OWN_PAGES + nodes // 100 * HEAD_PAGES + 1000, GROWTH_PAGE_SIZE)
    tree = RadixTree(pool, policy_by_name(policy))
    heads = [rng.randbytes(GROWTH_PAGE_SIZE * 4 * HEAD_PAGES) for _ in range(nodes // 100)]

    def run(among: list[bytes]) -> bytes:
        return rng.choice(among) + rng.randbytes(GROWTH_PAGE_SIZE * 4 * OWN_PAGES)

    def insert(tokens: bytes) -> None:
        pages = pool.alloc(HEAD_PAGES + OWN_PAGES)
        assert pages is not None
        tree.insert("", tokens, pages)
        pool.release(pages)

    def match(probes: list[bytes]) -> list[Any]:
        return [tree.match("", tokens, len(tokens)) for tokens in probes]

    known = []
    while tree.num_nodes < nodes - 10 * PROBES_PER_HEAD:
        known.append(run(heads))
        insert(known[-1])
    hot = [run(heads[:10]) for _ in range(10 * PROBES_PER_HEAD)]
    for tokens in hot:
        insert(tokens)
    hot *= PROBES // len(hot)
    cold = [rng.choice(known) for _ in range(PROBES)]
    new = [run(heads[:10]) for _ in range(PROBES)]
    match([run(heads[:10]) for _ in range(100)])
    pool.alloc(pool.num_free)

    def lock_all() -> None:
        for found in matches:
            tree.unlock(tree.lock(found))

    def insert_all() -> None:
        for tokens in new:
            tree.evict(HEAD_PAGES + OWN_PAGES)
            insert(tokens)

    hit = timed(lambda: match(hot))
    matches = match(hot)
    cold_hit = timed(lambda: match(cold))
    lock = timed(lock_all)
    miss = timed(lambda: match(new))
    return [seconds / PROBES * 1e6 for seconds in (hit, cold_hit, lock, miss, timed(insert_all))]


def main() -> None:
    """Parse the command line and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page-sizes", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--policy", default="lru", help="eviction policy of our tree")
    parser.add_argument("--largest", type=int, default=1_000_000, help="nodes of the largest tree; 0: no growth table")
    parser.add_argument("--sglang", action="store_true", help="run SGLang's radix cache too, where it can be imported")
    arguments = parser.parse_args()
    print_traces(arguments.page_sizes, arguments.repeats, arguments.policy, arguments.sglang)
    if arguments.largest:
        print_growth(arguments.largest, arguments.policy)


if __name__ == "__main__":
    main()
