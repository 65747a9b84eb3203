"""Scheduling policies on traces, in the simulator: hit rate, time to first token, worst wait, fairness.

    python -m benchmarks.policies                                       the whole table
    python -m benchmarks.policies --workload agents --policy lpm        one row of it
    python -m benchmarks.policies --order                               cache-aware order: see below

Every row is the real scheduler on one trace, on a machine that is computed from data sheets (an H100 with a Llama of 8
billion parameters); arrivals are sped up until it is short of time, since without a queue there is nothing to order.
Requests are dealt out to four tenants of which the first sends most; "difference" is the most by which the service of
two that both had requests waiting differed, in tokens.  Rows are the same on every machine.

`--order`: few-shot over 8 heads that come interleaved, all at once, with a pool that holds fewer than 3 heads.  The
best possible order is depth first: each head computed once.  Then a stream of the same with one request in twenty that
shares nothing: how long those wait, and how much later than somebody a request came that was admitted before him,
beside what the policy allows (the head of scheduler/policy.py states the bounds; a request that waits for a prefix that
another is computing lets others pass for that moment, which comes on top).
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from sapwood.simulate.clients import Call
from sapwood.simulate.cost import Fitted
from sapwood.simulate.hardware import profile_by_name
from sapwood.simulate.readers import read_trace
from sapwood.simulate.report import Report, report
from sapwood.simulate.runner import Knob, Simulation, scheduler_config, simulate
from sapwood.simulate.trace import Space, Trace, TraceRequest, plain, prepare
from scheduler.policy import (
    DEPTH_FIRST_PATIENCE_SECONDS,
    LPM_TOKENS_PER_SECOND,
    POLICIES,
    PREFILL_TOKENS_PER_SECOND,
    SLACK_SECONDS,
)

TRACES = Path(__file__).resolve().parent.parent.parent / "shared" / "data" / "traces"
TENANTS = 4


@dataclass(frozen=True)
class Workload:
    """A trace: its file, how many requests of it, how many times as fast, and the tokens of the pool (None: all)."""

    file: str
    requests: int
    rate: float
    pool_tokens: int | None = None


WORKLOADS = {
    "conversations": Workload("mooncake_conversation.jsonl.gz", 1000, 0.6, 5_000_000),
    "tools": Workload("mooncake_synthetic.jsonl.gz", 1500, 0.9, 5_000_000),
    "agents": Workload("agentic_coding.jsonl.gz", 600, 12.0),
    "chat": Workload("azure_2023_conv.csv.gz", 2000, 8.0),
    "code": Workload("azure_2023_code.csv.gz", 2000, 8.0),
}


def run_workload(traces: Path, workload: Workload, policy: str) -> Report:
    """One row."""
    profile = profile_by_name("h100-llama-8b")
    config = scheduler_config(
        profile,
        {"schedule_policy": policy, "page_size": 64, "max_step_tokens": 2048, "max_running_requests": 128},
        pool_tokens=workload.pool_tokens,
    )
    trace = prepare(
        read_trace(traces / workload.file),
        rate=workload.rate,
        max_requests=workload.requests,
        context=min(profile.context_length, config.num_pages * config.page_size),
        tenants=TENANTS,
    )
    return report(simulate(trace, profile, config))


def table(traces: Path, workloads: list[str], policies: list[str]) -> None:
    """The rows, as they are done."""
    print("| workload | policy | hit rate | TTFT mean s | p99 s | worst wait s | requests/s | Jain | difference |")
    print("|---|---|---|---|---|---|---|---|---|")
    for workload in workloads:
        for policy in policies:
            r = run_workload(traces, WORKLOADS[workload], policy)
            jain = "-" if r.jain is None else f"{r.jain:.3f}"
            difference = "-" if r.service_difference is None else f"{r.service_difference:,.0f}"
            print(
                f"| {workload} | {policy} | {r.hit_rate:.3f} | {r.ttft.mean:.2f} | {r.ttft.p99:.2f} | "
                f"{r.worst_wait:.1f} | {r.request_rate:.2f} | {jain} | {difference} |",
                flush=True,
            )


# ---- cache-aware order -------------------------------------------------------------------------------------------

HEADS = 8
HEAD_TOKENS = 2048
OWN_TOKENS = 128
OUTPUT_TOKENS = 16
EACH = 40
# Requests a second of the stream: about what `lpm` can serve.
RATE = 13.0
POOL_TOKENS = int(2.9 * HEAD_TOKENS)
# Ten thousand prompt tokens a second, and twenty milliseconds for a step that decodes.
MACHINE = Fitted(tokens=[(1, 0.02), (100, 0.02), (1100, 0.12)], pool_tokens=POOL_TOKENS, context_length=4096)


def few_shot(number: int, head: int | None, arrival: float) -> TraceRequest:
    """A request under a head, or one of the same length that shares nothing."""
    own = plain(Space.PRIVATE, number, OWN_TOKENS if head is not None else HEAD_TOKENS + OWN_TOKENS)
    prompt = (own,) if head is None else (plain(Space.SHARED, head, HEAD_TOKENS), own)
    return TraceRequest(arrival, prompt, (plain(Space.OUTPUT, number, OUTPUT_TOKENS),))


def run_order(requests: list[TraceRequest], policy: str) -> Simulation:
    """On the machine with the small pool."""
    knobs: dict[str, Knob] = {"schedule_policy": policy, "page_size": 16, "max_running_requests": 16}
    return simulate(Trace("order", requests), MACHINE, scheduler_config(MACHINE, knobs))


def bound_seconds(policy: str) -> float | None:
    """How much later than a request another may come and yet be admitted before it; None: there is no such bound."""
    context = HEAD_TOKENS + OWN_TOKENS
    return {
        "fcfs": 0.0,
        "priority": 0.0,
        "lpm": context / LPM_TOKENS_PER_SECOND,
        "deadline": context / PREFILL_TOKENS_PER_SECOND + SLACK_SECONDS,
        "dfs-weight": DEPTH_FIRST_PATIENCE_SECONDS,
    }.get(policy)


def overtaking(calls: list[Call]) -> float:
    """The most seconds by which a request came later than one that was admitted after it."""
    most = latest = 0.0
    for call in sorted(calls, key=lambda call: (call.sent + call.waited, call.sent)):
        most = max(most, latest - call.sent)
        latest = max(latest, call.sent)
    return most


def order(policies: list[str]) -> None:
    """Both experiments."""
    interleaved = [few_shot(number, number % HEADS, 0.0) for number in range(HEADS * EACH)]
    prompt_tokens = len(interleaved) * (HEAD_TOKENS + OWN_TOKENS)
    best = (len(interleaved) - HEADS) * HEAD_TOKENS
    print(f"few-shot, {HEADS} heads of {HEAD_TOKENS} tokens interleaved; the pool holds {POOL_TOKENS}")
    print(f"depth first, each head computed once, hits {best} tokens")
    print("| policy | hit tokens | of the best | hit rate | seconds |")
    print("|---|---|---|---|---|")
    for policy in policies:
        run = run_order(interleaved, policy)
        hits = sum(call.cached_tokens for call in run.clients.calls)
        print(
            f"| {policy} | {hits} | {100 * hits / best:.2f} % | {hits / prompt_tokens:.3f} | {run.seconds:.1f} |",
            flush=True,
        )
    rng = random.Random(7)
    stream = []
    moment = 0.0
    for number in range(1500):
        moment += rng.expovariate(RATE)
        stream.append(few_shot(number, None if number % 20 == 19 else rng.randrange(HEADS), moment))
    cold = [number for number in range(len(stream)) if number % 20 == 19]
    print("\na stream of the same, one in twenty shares nothing")
    print("| policy | hit rate | TTFT mean s | worst wait s | of a cold one s | overtaken by one s later | bound s |")
    print("|---|---|---|---|---|---|---|")
    for policy in policies:
        run = run_order(stream, policy)
        figures = report(run)
        worst = max(run.clients.calls[number].waited for number in cold)
        bound = bound_seconds(policy)
        print(
            f"| {policy} | {figures.hit_rate:.3f} | {figures.ttft.mean:.2f} | {figures.worst_wait:.2f} | {worst:.2f} | "
            f"{overtaking(run.clients.calls):.2f} | {'-' if bound is None else f'{bound:.2f}'} |",
            flush=True,
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--policy", nargs="+", default=list(POLICIES), choices=list(POLICIES))
    parser.add_argument("--traces", type=Path, default=TRACES, help="folder with the traces (default: %(default)s)")
    parser.add_argument("--order", action="store_true", help="cache-aware order instead of the table")
    arguments = parser.parse_args()
    if arguments.order:
        order(arguments.policy)
    else:
        table(arguments.traces, arguments.workload, arguments.policy)


if __name__ == "__main__":
    main()
