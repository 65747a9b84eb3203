"""The door of the queue: who is let in, who has to give way for it, and who has waited too long."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler.limits import Deadlines, Limits, does_not_fit, queue_is_full, tenant_is_over
from scheduler.request import Request
from scheduler.waiting import WaitingQueue
from srt.messages import Finish, Generate, Rejected


class Door:
    """Decides by the limits, and changes nothing but its own memory of deadlines."""

    def __init__(self, limits: Limits, waiting: WaitingQueue) -> None:
        self._limits = limits
        self._waiting = waiting
        self._deadlines = Deadlines()

    def refusal(self, message: Generate, room: int, known: bool) -> tuple[Request | None, Rejected] | None:
        """Who is refused: the newcomer (None), or who waits and gives way to it.  None: nobody.

        `room`: tokens of prompt and output that can be had at all; `known`: whether the rid is in use.
        """
        if known:
            text = f"request id {message.rid} is already in use"
            return None, Rejected((message.rid,), 400, text, "rid", "duplicate_request_id")
        prompt_tokens = len(message.prompt_ids) // 4
        rejected = does_not_fit(message.rid, prompt_tokens, room, self._limits) or tenant_is_over(
            message, self._waiting.count(message.tenant), self._limits
        )
        if rejected is not None:
            return None, rejected
        least = self._waiting.least()
        rejected = queue_is_full(message, len(self._waiting), least, self._limits)
        if rejected is None:
            return None
        return (None if rejected.rids[0] == message.rid else least), rejected

    def entered(self, request: Request, now: float) -> None:
        """It waits from now on."""
        if request.message.timeout is not None:
            self._deadlines.add(now + request.message.timeout, request)

    def expired(self, now: float) -> Iterator[tuple[Request, Rejected | Finish]]:
        """Those whose time is up, and those that have waited too long for their first admission: how each ends.

        The caller ends each before it asks for the next.
        """
        for request in self._deadlines.passed(now):
            text = f"the timeout of {request.message.timeout:g} s has passed"
            if request.first_cached is None:
                yield request, Rejected((request.rid,), 504, f"{text}; it was still waiting", None, "timeout")
            else:
                yield request, Finish("abort", message=text)
        timeout = self._limits.queue_timeout
        if timeout is None:
            return
        for request in self._waiting.arrived_before(now - timeout):
            text = f"no room for {now - request.arrival:.1f} s, and the queue timeout is {timeout:g} s; try later"
            yield request, Rejected((request.rid,), 503, text, None, "queue_timeout")
