"""2,000 requests from 200 clients: every one ends, nothing leaks, memory stays flat.

    python -m benchmarks.load --model FOLDER

Clients send one request after another; some leave in the middle of their stream.  Meant for a small model: the point is
the runtime around it.  Printed for each round: percentiles of what the requests took as their replies say, goodput by
the targets, and processor time of the scheduler for a step.  Exit code 1 when a request is lost, a page leaks or a
process grows.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from benchmarks.latencies import Latencies, quantile
from benchmarks.servers import sapwood
from srt.stats import SCHEDULING_SECONDS_BUCKETS

GROWTH_LIMIT_MB = 30.0


def resident_mb(pids: dict[str, int]) -> dict[str, float]:
    """Resident memory of each process, by role."""
    sizes = {}
    for role, pid in pids.items():
        status = Path(f"/proc/{pid}/status").read_text()
        sizes[role] = int(status.split("VmRSS:")[1].split()[0]) / 1024
    return sizes


async def client_loop(
    http: httpx.AsyncClient, jobs: asyncio.Queue[int], ends: Counter[str], latencies: Latencies
) -> None:
    """Take jobs until there are none."""
    while not jobs.empty():
        job = jobs.get_nowait()
        rng = random.Random(job)
        head = [7 + job % 5] * rng.randrange(1, 120)
        body: dict[str, Any] = {
            "input_ids": head + [rng.randrange(3, 500) for _ in range(rng.randrange(1, 200))],
            "sampling_params": {"max_new_tokens": rng.randrange(1, 40), "temperature": rng.choice([0, 1])},
            "stream": job % 3 == 0,
        }
        if job % 10 == 0:
            ends[await leave_early(http, body)] += 1
        else:
            response = await http.post("/generate", json=body)
            ends[str(response.status_code)] += 1
            if response.status_code == 200:
                meta = last_reply(response.text, body["stream"])["meta_info"]
                latencies.add(meta["ttft"], meta["tpot"], meta["e2e_latency"])


def last_reply(text: str, streamed: bool) -> dict[str, Any]:
    """The whole reply; a stream has it in the last event before its end mark."""
    if streamed:
        text = [line for line in text.splitlines() if line.startswith("data: {")][-1].removeprefix("data: ")
    reply: dict[str, Any] = json.loads(text)
    return reply


async def leave_early(http: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Open a stream and go away after its first event."""
    async with http.stream("POST", "/generate", json={**body, "stream": True}) as response:
        async for _ in response.aiter_lines():
            return "left"
    return "ended before it could be left"


async def drive(base_url: str, clients: int, requests: int, latencies: Latencies) -> tuple[Counter[str], float]:
    """Send everything; the outcomes and the seconds that it took.  `latencies` takes in those that were served."""
    jobs: asyncio.Queue[int] = asyncio.Queue()
    for job in range(requests):
        jobs.put_nowait(job)
    ends: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=clients)
    begin = time.perf_counter()
    async with httpx.AsyncClient(base_url=base_url, timeout=300.0, limits=limits) as http:
        await asyncio.gather(*(client_loop(http, jobs, ends, latencies) for _ in range(clients)))
    return ends, time.perf_counter() - begin


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="a folder; a tiny model will do")
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3, help="the first warms up, the others must not grow")
    parser.add_argument("--ttft-target-ms", type=float, default=1000.0)
    parser.add_argument("--tpot-target-ms", type=float, default=50.0)
    arguments = parser.parse_args()
    problems = []
    counts_before = [0] * (len(SCHEDULING_SECONDS_BUCKETS) + 1)
    with sapwood(arguments.model, "--max-total-tokens=20000", "--max-running-requests=64") as server:
        sizes = []
        for number in range(arguments.rounds):
            latencies = Latencies(arguments.ttft_target_ms / 1000, arguments.tpot_target_ms / 1000)
            ends, seconds = asyncio.run(drive(server.base_url, arguments.clients, arguments.requests, latencies))
            time.sleep(1.0)
            info = httpx.get(server.base_url + "/server_info").json()
            stats = info["scheduler"]
            pids = {role: worker["pid"] for role, worker in info["workers"].items() if "pid" in worker}
            sizes.append(resident_mb(pids))
            print(
                f"round {number}: {dict(ends)} in {seconds:.1f} s; running {stats['running']}, waiting "
                f"{stats['waiting']}, pages {stats['pages_free']} free + {stats['pages_cached']} cached of "
                f"{stats['pages_total']}; planning "
                f"{1e3 * stats['plan_seconds'] / max(1, stats['steps']):.3f} ms a step on average; resident MB "
                + ", ".join(f"{role} {size:.0f}" for role, size in sizes[-1].items()),
                flush=True,
            )
            print("\n".join(latencies.lines(seconds)))
            counts = stats["scheduling_histogram"]
            in_round = [now - before for now, before in zip(counts, counts_before, strict=True)]
            counts_before = counts
            shares = ((share, quantile(SCHEDULING_SECONDS_BUCKETS, in_round, share)) for share in (0.5, 0.95, 0.99))
            figures = ", ".join(f"p{100 * share:.0f} {1e3 * value:.2f}" for share, value in shares)
            print(f"scheduling, processor ms of a step: {figures}", flush=True)
            if sum(ends.values()) != arguments.requests:
                problems.append("requests were lost")
            if stats["pages_free"] + stats["pages_cached"] != stats["pages_total"]:
                problems.append("pages leak")
        grown = {role: size - sizes[1][role] for role, size in sizes[-1].items()} if len(sizes) > 2 else {}
        problems += [f"{role} grew by {mb:.0f} MB" for role, mb in grown.items() if mb > GROWTH_LIMIT_MB]
    print("OK" if not problems else "; ".join(problems))
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
