"""What clients are told of a request: the parts of messages that the core sends."""

from __future__ import annotations

from scheduler.request import Request
from srt.messages import Rejected, TokenDelta, TokenLogprob
from srt.plan import RowLogprobs

Event = TokenDelta | Rejected


def token_delta(request: Request) -> TokenDelta:
    """Everything of the request that has not been sent; it counts as sent from here on."""
    waited = 0.0 if request.admitted_at is None else request.admitted_at - request.arrival
    finish = request.finish
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
        queue_seconds=waited,
    )
    request.opened = True
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
