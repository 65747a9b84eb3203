"""Running streams while a long prompt arrives: gaps between tokens with chunked prefill, and without.

    python -m benchmarks.stall_free --model smollm2

Eight streams decode; then a prompt of 4,000 tokens comes.  Printed for each setting: the 99th percentile of the gaps
between tokens of the eight before it comes and while it is computed, their ratio, and the long prompt's time to first
token.  Without chunking the whole prompt is one step, for contrast.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from dataclasses import dataclass

from benchmarks.client import Client, Reply
from benchmarks.servers import sapwood
from benchmarks.workloads import Words
from sapwood.pull import resolve_model

STREAMS = 8
SETTLE_SECONDS = 1.0
QUIET_SECONDS = 6.0
LONG_TOKENS = 4000


@dataclass(frozen=True)
class Outcome:
    """One run, in seconds."""

    quiet_p99: float
    busy_p99: float
    long_first_token: float

    @property
    def ratio(self) -> float:
        """How much longer the worst gaps get."""
        return self.busy_p99 / self.quiet_p99


def p99(gaps: list[float]) -> float:
    """The 99th percentile."""
    ordered = sorted(gaps)
    return ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]


async def run(base_url: str, model: str, words: Words) -> Outcome:
    """Start the streams, let them settle, send the long prompt, and sort the gaps by when they fell."""
    client = Client(base_url, model)
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    prompt = words.text(LONG_TOKENS)
    streams = [asyncio.create_task(client.complete(words.text(40), 2000, arrivals[i].append)) for i in range(STREAMS)]
    await asyncio.sleep(SETTLE_SECONDS + QUIET_SECONDS)
    sent = time.perf_counter()
    long: Reply = await client.complete(prompt, 1)
    if long.error:
        raise RuntimeError(long.error)
    answered = sent + long.first_token
    for stream in streams:
        stream.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    await client.close()
    quiet, busy = [], []
    for times in arrivals:
        for before, after in itertools.pairwise(times):
            if before > times[0] + SETTLE_SECONDS and after < sent:
                quiet.append(after - before)
            elif after > sent and before < answered:
                busy.append(after - before)
    return Outcome(p99(quiet), p99(busy), long.first_token)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--chunks", type=int, nargs="+", default=[32, 64, 512, -1], help="-1: chunking off")
    parser.add_argument("--tpot-target-ms", type=float, help="one more setting: the prefill share follows this target")
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model)
    settings = [[f"--chunked-prefill-size={chunk}"] for chunk in arguments.chunks]
    if arguments.tpot_target_ms is not None:
        settings.append([f"--tpot-target-ms={arguments.tpot_target_ms}"])
    for flags in settings:
        with sapwood(arguments.model, *flags) as server:
            outcomes = [
                asyncio.run(run(server.base_url, server.model, Words(folder, seed))) for seed in range(arguments.runs)
            ]
        print(
            f"{' '.join(flags):32} gap p99 {statistics.median(o.quiet_p99 for o in outcomes) * 1e3:7.1f} ms alone, "
            f"{statistics.median(o.busy_p99 for o in outcomes) * 1e3:7.1f} ms beside the long prompt, "
            f"{statistics.median(o.ratio for o in outcomes):5.2f}x; its first token after "
            f"{statistics.median(o.long_first_token for o in outcomes):.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
