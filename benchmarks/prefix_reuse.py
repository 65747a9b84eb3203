"""What the prefix cache is worth: few-shot and multi-turn with the radix cache on and off, in one run, as ratios.

    python -m benchmarks.prefix_reuse --model smollm2

Both servers get the same prompts; runs alternate, each with text of its own, and medians are printed.  Few-shot also
checks the cached tokens of every request: all but the first to be computed must have reused the whole head.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks.runs import Run, run_once
from benchmarks.servers import sapwood
from benchmarks.workloads import WORKLOADS, Words
from sapwood.pull import resolve_model

HEAD_TOKENS = 1000


def check_cached_tokens(run: Run) -> str:
    """Few-shot: exactly one request computes the head, every other reuses it whole.

    Two tails may begin alike by chance, which adds a token or two to a hit; fewer than the head is a fault.
    """
    cached = sorted(reply.cached_tokens for reply in run.replies)
    cold = sum(tokens < HEAD_TOKENS for tokens in cached)
    verdict = "as expected" if cold == 1 and cached[0] == 0 and cached[-1] <= HEAD_TOKENS + 3 else "NOT AS EXPECTED"
    hits = f"{len(cached) - cold} with {cached[1]}..{cached[-1]}"
    return f"cached tokens: {cold} request with {cached[0]}, {hits}: {verdict}"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", default=["fewshot", "multiturn"], choices=sorted(WORKLOADS))
    parser.add_argument("flags", nargs="*", help="more flags for both servers, after --")
    parser.add_argument("--ttft-target-ms", type=float, default=2000.0, help="for goodput")
    parser.add_argument("--tpot-target-ms", type=float, default=100.0, help="for goodput")
    arguments = parser.parse_args()
    # Lines come as they are made, also into a file.
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    folder = resolve_model(arguments.model)
    on = sapwood(arguments.model, *arguments.flags)
    off = sapwood(arguments.model, "--disable-radix-cache", *arguments.flags)
    with on as cached, off as uncached:
        print("with:   ", " ".join(cached.command[1:]))
        print("without:", " ".join(uncached.command[1:]))
        for workload in arguments.workloads:
            pairs = []
            for index in range(arguments.runs + 1):
                # The first pair only warms both servers up.
                pair = [run_once(server, workload, Words(folder, 1000 + index)) for server in (cached, uncached)]
                if index:
                    pairs.append(pair)
                    ratio = pair[0].requests_per_second / pair[1].requests_per_second
                    print(
                        f"{workload} run {index}: {pair[0].wall:.2f} s with, {pair[1].wall:.2f} s without, {ratio:.2f}x"
                    )
                    if workload == "fewshot":
                        print("  " + check_cached_tokens(pair[0]))
            ratio = statistics.median(a.requests_per_second / b.requests_per_second for a, b in pairs)
            for name, runs in (("with", [a for a, _ in pairs]), ("without", [b for _, b in pairs])):
                print(
                    f"{workload:10} {name:8} {statistics.median(r.requests_per_second for r in runs):6.2f} requests/s, "
                    f"hit rate {statistics.median(r.hit_rate for r in runs):.3f}, first token "
                    f"p50 {statistics.median(r.first_token(0.5) for r in runs):.3f} s, "
                    f"p95 {statistics.median(r.first_token(0.95) for r in runs):.3f} s"
                )
                last = runs[-1]
                targets = (arguments.ttft_target_ms / 1000, arguments.tpot_target_ms / 1000)
                print("  last run: " + "\n            ".join(last.latencies(*targets).lines(last.wall)))
            print(f"{workload:10} throughput with / without the radix cache, median of {arguments.runs}: {ratio:.2f}x")


if __name__ == "__main__":
    main()
