"""One pass of a workload at a server, and what is told about it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from benchmarks.client import Client, Reply
from benchmarks.latencies import Latencies
from benchmarks.servers import Server
from benchmarks.workloads import WORKLOADS, Words


def quantile(values: list[float], share: float) -> float:
    """The value below which this share of the others lies; `values` may not be empty."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


@dataclass(frozen=True)
class Run:
    """One pass of a workload; `wall` in seconds."""

    wall: float
    replies: list[Reply]

    @property
    def requests_per_second(self) -> float:
        """Request throughput."""
        return len(self.replies) / self.wall

    @property
    def hit_rate(self) -> float:
        """Cached tokens of all prompt tokens."""
        return sum(r.cached_tokens for r in self.replies) / sum(r.prompt_tokens for r in self.replies)

    def first_token(self, share: float) -> float:
        """Time to first token at a quantile, in seconds."""
        return quantile([r.first_token for r in self.replies], share)

    def per_token(self, share: float) -> float:
        """Seconds for each token after the first, at a quantile."""
        return quantile([r.per_token for r in self.replies], share)

    def latencies(self, ttft_target: float | None = None, tpot_target: float | None = None) -> Latencies:
        """Percentiles and goodput, by targets in seconds."""
        found = Latencies(ttft_target, tpot_target)
        for reply in self.replies:
            found.add(reply.first_token, reply.per_token if reply.completion_tokens > 1 else None, reply.end)
        return found


def run_once(server: Server, workload: str, words: Words) -> Run:
    """Drive one workload at a server.  Raises RuntimeError when a request fails, or its reply is short or empty."""

    async def drive() -> Run:
        client = Client(server.base_url, server.model, fresh_connections=server.fresh_connections)
        try:
            begin = time.perf_counter()
            replies = await WORKLOADS[workload](client, words)
            return Run(time.perf_counter() - begin, replies)
        finally:
            await client.close()

    run = asyncio.run(drive())
    errors = [reply.error or "no text" for reply in run.replies if reply.error or not reply.text]
    if errors:
        raise RuntimeError(
            f"{workload}: {len(errors)} of {len(run.replies)} requests failed, the first with: {errors[0]}"
        )
    return run
