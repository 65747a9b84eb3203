"""Where the time of one sample went, as its client saw it and as the scheduler told."""

from __future__ import annotations

from dataclasses import dataclass

from srt.messages import RequestTimes


@dataclass(frozen=True, slots=True)
class SampleTimes:
    """Seconds.

    ttft       from the call to the first token; None when there was none
    tpot       mean from token to token; None with fewer than two
    queue      from the scheduler's receipt to the first admission
    prefill    from there to the first token, less what it was preempted in between
    decode     from the first token to the last, less what it was preempted in between
    preempted  from each retraction to the admission after it
    retractions, scheduled_tokens   how often; tokens run through the model, those computed again included
    """

    ttft: float | None
    tpot: float | None
    queue: float
    prefill: float
    decode: float
    preempted: float
    retractions: int
    scheduled_tokens: int


class SampleClock:
    """Takes in what comes of a sample."""

    __slots__ = ("_at_first", "_first", "_last", "_times", "_tokens")

    def __init__(self) -> None:
        self._times = RequestTimes()
        # As it was when the first token had come.
        self._at_first = self._times
        self._first: float | None = None
        self._last = 0.0
        self._tokens = 0

    def told(self, times: RequestTimes) -> None:
        """The scheduler's account has come."""
        self._times = times

    def tokens(self, count: int, now: float) -> None:
        """So many tokens have come, one at least."""
        if self._first is None:
            self._first, self._at_first = now, self._times
        self._last = now
        self._tokens += count

    def report(self, asked_at: float) -> SampleTimes:
        """As of what has come so far."""
        times = self._times
        lasted = 0.0 if self._first is None else self._last - self._first
        return SampleTimes(
            ttft=None if self._first is None else self._first - asked_at,
            tpot=lasted / (self._tokens - 1) if self._tokens > 1 else None,
            queue=times.queue,
            prefill=times.prefill,
            decode=max(0.0, lasted - (times.preempted - self._at_first.preempted)),
            preempted=times.preempted,
            retractions=times.retractions,
            scheduled_tokens=times.scheduled_tokens,
        )
