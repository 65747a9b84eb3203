"""What clients are told of requests: the parts of messages that the core sends, and when they go.

In most steps most requests get one token and there is nothing else to say of them.  Those go as two columns, of all
such requests together; a message part for each would cost more than planning and committing its row.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from scheduler.request import Request
from srt.messages import Rejected, TokenDelta, TokenLogprob
from srt.plan import RowLogprobs


@dataclass(frozen=True, slots=True)
class Tokens:
    """One more token for each of these requests, in order; a request may be there twice."""

    rids: list[str]
    ids: array[int]


Event = Tokens | TokenDelta | Rejected


class Outgoing:
    """What has not been sent yet.  `interval`: output tokens of a request that go together; the first goes at once."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._rids: list[str] = []
        self._ids = array("i")
        self._events: list[Event] = []
        # Requests with unsent tokens, in the order in which they got the first of them.
        self._holding: dict[str, Request] = {}

    def token(self, request: Request, token: int) -> None:
        """A request that has not ended got a token."""
        if self._interval == 1 and not (request.times_due or request.unsent or request.unsent_logprobs):
            self._rids.append(request.message.rid)
            self._ids.append(token)
        else:
            request.unsent.append(token)
            self._holding[request.message.rid] = request

    def ended(self, request: Request) -> None:
        """The last that there is to say of a request."""
        self._holding.pop(request.rid, None)
        self._events.append(token_delta(request))

    def forget(self, request: Request) -> None:
        """The client knows of the end already."""
        self._holding.pop(request.rid, None)

    def rejected(self, rejected: Rejected) -> None:
        """A request ends before it began."""
        self._events.append(rejected)

    def take(self) -> list[Event]:
        """Everything that is due, in order.  A request that was retracted keeps what it has until it runs again."""
        events: list[Event] = []
        if self._rids:
            events.append(Tokens(self._rids, self._ids))
            self._rids, self._ids = [], array("i")
        events += self._events
        self._events = []
        for request in list(self._holding.values()):
            if request.slot is not None and len(request.unsent) >= (self._interval if request.opened else 1):
                del self._holding[request.rid]
                events.append(token_delta(request))
        return events


def token_delta(request: Request) -> TokenDelta:
    """Everything of the request that has not been sent; it counts as sent from here on."""
    finish = request.finish
    times_due = request.times_due or finish is not None
    delta = TokenDelta(
        rid=request.rid,
        ids=request.unsent.tobytes(),
        open=None if request.opened else request.stream_open(),
        finish=finish,
        trailing_stop=finish is not None and finish.reason == "stop",
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.first_cached or 0,
        logprobs=tuple(request.unsent_logprobs),
        prompt_logprobs=() if request.opened else tuple(request.prompt_logprobs),
        times=request.report_times() if times_due else None,
    )
    request.opened = True
    request.times_due = False
    del request.unsent[:]
    request.unsent_logprobs.clear()
    return delta


def token_logprob(token: int, logprobs: RowLogprobs, index: int) -> TokenLogprob:
    """Entry `index` of a row's logprobs as a message part about `token`."""
    return TokenLogprob(
        token,
        float(logprobs.logprobs[index]),
        tuple(logprobs.top_ids[index].tolist()),
        tuple(logprobs.top_logprobs[index].tolist()),
    )


def add_prompt_logprobs(request: Request, row_start: int, logprobs: RowLogprobs) -> None:
    """Keep the prompt logprobs that a row starting at position `row_start` brought, for the first output.

    What is computed again after a retraction is there already.
    """
    start = request.message.prompt_logprobs_from
    assert start is not None
    if not request.prompt_logprobs and start == 0:
        # Nothing predicts the first token.
        request.prompt_logprobs.append(TokenLogprob(request.tokens[0], None))
    first = max(max(start - 1, 0), row_start) + 1
    have = start + len(request.prompt_logprobs)
    for offset in range(max(0, have - first), len(logprobs.logprobs)):
        request.prompt_logprobs.append(token_logprob(request.tokens[first + offset], logprobs, offset))
