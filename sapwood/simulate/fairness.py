"""How evenly tenants were served while they all had requests waiting.

Who asks for little is served little, which is not unfair; so tenants are compared only over slices of time in which
each of them had a request waiting from beginning to end ("backlogged").
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations

from sapwood.simulate.clients import SLICE_SECONDS, Call, Clients

# Jain's index is taken over so many spans of the run: shorter ones would show single requests.
SPANS = 8


@dataclass(frozen=True)
class Fairness:
    """Service is computed prompt tokens, and twice the output tokens.

    jain        mean over spans of (sum of service)^2 / (tenants * sum of squares), over the tenants backlogged all the
                time: 1 when served alike, 1/n when one of n had all (Jain, Chiu, Hawe 1984); None when no two were
    difference  the most by which the service of two tenants differed over any stretch in which both were backlogged
                (the measure of Sheng et al. 2024); None when no two were
    """

    jain: float | None
    difference: float | None


def fairness(clients: Clients) -> Fairness:
    """Of a finished run."""
    slices = int(clients.clock.now / SLICE_SECONDS) + 1
    calls: dict[str, list[Call]] = defaultdict(list)
    for call in clients.calls:
        calls[call.tenant].append(call)
    if len(calls) < 2:
        return Fairness(None, None)
    backlogged = {tenant: _backlogged(of_tenant, slices) for tenant, of_tenant in sorted(calls.items())}
    return Fairness(_jain(clients, backlogged, slices), _difference(clients, backlogged, slices))


def _backlogged(calls: Iterable[Call], slices: int) -> list[bool]:
    """For each slice whether one of these waited at every moment of it."""
    changes: list[tuple[float, int]] = []
    for call in calls:
        changes += [(call.sent, 1), (call.sent + call.waited, -1)]
    # A request that comes in the moment in which another is admitted counts as waiting without a gap.
    changes.sort(key=lambda change: (change[0], -change[1]))
    result = [False] * slices
    waiting, since = 0, 0.0
    for moment, change in changes:
        waiting += change
        if change == 1 and waiting == 1:
            since = moment
        elif waiting == 0:
            first, end = -int(-since // SLICE_SECONDS), int(moment // SLICE_SECONDS)
            for place in range(first, min(end, slices)):
                result[place] = True
    return result


def _jain(clients: Clients, backlogged: dict[str, list[bool]], slices: int) -> float | None:
    values = []
    length = max(1, slices // SPANS)
    for begin in range(0, slices - length + 1, length):
        span = range(begin, begin + length)
        tenants = [tenant for tenant, waits in backlogged.items() if all(waits[begin : begin + length])]
        if len(tenants) < 2:
            continue
        served = [sum(clients.service[place][tenant] for place in span) for tenant in tenants]
        squares = sum(value * value for value in served)
        if squares:
            values.append(sum(served) ** 2 / (len(served) * squares))
    return sum(values) / len(values) if values else None


def _difference(clients: Clients, backlogged: dict[str, list[bool]], slices: int) -> float | None:
    most: float | None = None
    for a, b in combinations(backlogged, 2):
        running = low = high = 0.0
        for place in range(slices):
            if not (backlogged[a][place] and backlogged[b][place]):
                running = low = high = 0.0
                continue
            running += clients.service[place][a] - clients.service[place][b]
            low, high = min(low, running), max(high, running)
            most = max(most or 0.0, high - low)
    return most
