"""What a step and a request may not exceed, who is refused for it and with what words, and whose time is up."""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from scheduler.request import Request
from srt.messages import Generate, Rejected


@dataclass(frozen=True, slots=True)
class Limits:
    """What a step and a request may not exceed.  Tokens unless named otherwise.

    `max_step_tokens`: all rows of a step; `max_running_requests`: rows of a step and request slots;
    `context_length`: prompt and output of a request; `max_queued_requests`: waiting, all and of one tenant, None for
    no limit; `queue_timeout`: seconds that a request may wait for its first admission.
    """

    context_length: int
    max_step_tokens: int
    max_running_requests: int
    max_queued_requests: int | None = None
    max_queued_per_tenant: int | None = None
    queue_timeout: float | None = None
    eos_token_ids: frozenset[int] = frozenset()


def does_not_fit(rid: str, prompt_tokens: int, room: int, limits: Limits) -> Rejected | None:
    """Why a prompt can never run.  `room`: tokens of prompt and output that context and pool have room for."""
    if prompt_tokens == 0:
        return Rejected((rid,), 400, "the prompt has no tokens; at least one is needed", "prompt", "empty_prompt")
    if prompt_tokens + 1 <= room:
        return None
    what = "context" if limits.context_length == room else "KV pool"
    text = f"the prompt has {prompt_tokens} tokens; the {what} has room for {room - 1} and one more to generate"
    return Rejected((rid,), 400, text, "prompt", "context_length_exceeded")


def tenant_is_over(message: Generate, waiting: int, limits: Limits) -> Rejected | None:
    """Whether the tenant has its share of the queue already.  `waiting`: its waiting requests."""
    most = limits.max_queued_per_tenant
    if most is None or waiting < most:
        return None
    text = f"{waiting} requests of this tenant are waiting and {most} may; try later"
    return Rejected((message.rid,), 429, text, None, "queue_full")


def queue_is_full(message: Generate, waiting: int, least: Request | None, limits: Limits) -> Rejected | None:
    """Who is refused when the queue is full: `least`, the least urgent that waits, or the new request itself."""
    most = limits.max_queued_requests
    if most is None or waiting < most:
        return None
    text = f"{waiting} requests are waiting and the queue holds {most}; try later"
    if least is None or least.message.priority >= message.priority:
        return Rejected((message.rid,), 429, text, None, "queue_full")
    return Rejected((least.rid,), 429, f"gave way to a more urgent request: {text}", None, "shed")


class Deadlines:
    """Requests by the moment when their time is up."""

    def __init__(self) -> None:
        # (moment, rank of arrival, request), the next to pass first.
        self._entries: list[tuple[float, int, Request]] = []
        self._compact_at = 64

    def add(self, moment: float, request: Request) -> None:
        """O(log n); now and then those that have ended long before their time are forgotten."""
        heappush(self._entries, (moment, request.order, request))
        if len(self._entries) > self._compact_at:
            self._entries = [entry for entry in self._entries if not entry[2].is_terminal]
            heapify(self._entries)
            self._compact_at = 2 * len(self._entries) + 64

    def passed(self, now: float) -> list[Request]:
        """Those that have not ended and whose time is up; each is named once."""
        requests = []
        while self._entries and self._entries[0][0] <= now:
            request = heappop(self._entries)[2]
            if not request.is_terminal:
                requests.append(request)
        return requests
