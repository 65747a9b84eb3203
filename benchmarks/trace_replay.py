"""Which eviction policy keeps the right pages: recorded traces through the real tree and page pool, without a model.

    python -m benchmarks.trace_replay --traces FOLDER              every trace, every policy, seven or eight sizes
    python -m benchmarks.trace_replay --traces FOLDER --name mooncake_synthetic --capacity 10000

A block of the trace (64 or 512 tokens) is one page, and its id the one token in it: the tree then does for each block
what it does in a server for each page.  The unit of the table is the share of all input tokens that were hit, where
the last block of an input counts as far as it is filled.  Requests are served one at a time, in the order of time; a
request that is larger than the cache uses what is there and leaves nothing.

optimum     what could have been hit with the future known, see `benchmarks.offline_optimum`
infinite    what a cache of any size could have hit
closed      the part of the way from lru to the optimum that a policy goes
+ hints     sessions say when they wait for a tool, when they are over, and which branch a new one takes the place of
            (the last turn of a session of which the next turn is no continuation); coding sessions only
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from benchmarks.block_traces import NAMES, SEED, BlockRequest, BlockTrace, load
from benchmarks.offline_optimum import infinite_hits, next_uses, optimal_hits
from radix import Hint, PagePool, RadixTree, policy_by_name

CAPACITIES = {
    "agentic_coding": [4000, 8000, 12000, 16000, 20000, 24000, 32000, 48000],
    "mooncake_conversation": [1000, 2000, 5000, 10000, 20000, 30000, 50000],
    "mooncake_synthetic": [1000, 2000, 5000, 10000, 15000, 20000, 30000, 40000],
}
POLICIES = ("lru", "lfu", "adaptive")


class Replay:
    """A cache of `capacity` blocks and the sessions that use it."""

    def __init__(self, capacity: int, block_size: int, policy: str, hints: bool) -> None:
        self.pool = PagePool(capacity, 1)
        self.tree = RadixTree(self.pool, policy_by_name(policy))
        self.block_size = block_size
        self.hints = hints
        self.last_turns: dict[str, bytes] = {}

    def serve(self, request: BlockRequest) -> int:
        """Tokens hit."""
        tree, pool = self.tree, self.pool
        tokens, size = request.blocks.tobytes(), len(request.blocks)
        match = tree.match("", tokens, size)
        if size <= pool.num_pages:
            lock = tree.lock(match)
            needed = size - len(match.pages)
            if needed > pool.num_free:
                tree.evict(needed - pool.num_free)
            fresh = pool.alloc(needed)
            assert fresh is not None, "everything but the request's own path can be evicted"
            inserted = tree.insert("", tokens, match.pages + fresh, lock, request.reply)
            assert inserted.lock is not None
            tree.unlock(inserted.lock)
            pool.release(fresh)
            if self.hints:
                self._tell(request, tokens)
        return min(match.num_tokens * self.block_size, request.tokens)

    def _tell(self, request: BlockRequest, tokens: bytes) -> None:
        if request.session is None:
            return
        before = self.last_turns.get(request.session)
        if before is not None and not tokens.startswith(before):
            self.tree.hint("", before, Hint.DONE)
        self.last_turns[request.session] = tokens
        if request.after == "closed":
            self.tree.hint("", tokens, Hint.DONE)
        elif request.after == "waiting":
            self.tree.hint("", tokens, Hint.WAITING)


def replay(trace: BlockTrace, capacity: int, policy: str, hints: bool = False) -> float:
    """The share of the trace's input tokens that is hit."""
    cache = Replay(capacity, trace.block_size, policy, hints)
    return sum(map(cache.serve, trace.requests)) / trace.tokens


def print_trace(trace: BlockTrace, capacities: list[int], policies: list[str]) -> None:
    """One row for each size of the cache."""
    uses = next_uses(trace)
    runs = [(policy, False) for policy in policies]
    if any(request.session is not None for request in trace.requests):
        runs += [(policy, True) for policy in policies if policy != "lfu"]
    infinite = infinite_hits(trace) / trace.tokens
    print(f"\n{trace.name}: {len(trace.requests):,} requests, {trace.tokens / 1e6:.1f}M tokens, in blocks of ", end="")
    print(f"{trace.block_size}; {trace.unique_blocks:,} different blocks; infinite {infinite:.4f}")
    print(f"{'blocks':>8} {'optimum':>8}", end="")
    for policy, hints in runs:
        compared = hints or policy != "lru"
        print(f" {policy + (' + hints' if hints else ''):>16} {'closed' if compared else '':>7}", end="")
    print(" seconds")
    for capacity in capacities:
        begin = time.perf_counter()
        best = optimal_hits(trace, uses, capacity) / trace.tokens
        base = replay(trace, capacity, "lru")
        print(f"{capacity:8,} {best:8.4f}", end="")
        for policy, hints in runs:
            compared = hints or policy != "lru"
            rate = replay(trace, capacity, policy, hints) if compared else base
            closed = f"{(rate - base) / (best - base):7.0%}" if compared and best > base else " " * 7
            print(f" {rate:16.4f} {closed}", end="", flush=True)
        print(f" {time.perf_counter() - begin:7.1f}", flush=True)


def main() -> None:
    """Parse the command line and print a table for each trace."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="the folder with the traces")
    parser.add_argument("--name", choices=NAMES, nargs="+", default=list(NAMES))
    parser.add_argument("--capacity", type=int, nargs="+", help="blocks that the cache holds")
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--seed", type=int, default=SEED, help="of the starts of the coding sessions")
    arguments = parser.parse_args()
    for name in arguments.name:
        trace = load(arguments.traces, name, arguments.seed)
        print_trace(trace, arguments.capacity or CAPACITIES[name], arguments.policy)


if __name__ == "__main__":
    main()
