"""Where the time of one request went, from its arrival on, as far as the scheduler sees it.

    arrival     admission      first token                            end
    |--- queue ---|-- prefill --|------- decode -------|- preempted -|-- decode --|

A retraction interrupts whichever part it comes in, until the request is admitted again.
"""

from __future__ import annotations

from srt.messages import RequestTimes


class Times:
    """Seconds, by a clock that the caller reads.  The end is for the client to see, so `decode` is not kept here."""

    __slots__ = ("_decoding", "_first_admission", "_since", "arrival", "preempted", "prefill", "queue")

    def __init__(self, arrival: float) -> None:
        self.arrival = arrival
        self.queue = 0.0
        self.prefill = 0.0
        self.preempted = 0.0
        self._since = arrival
        self._first_admission = True
        self._decoding = False

    def admitted(self, now: float) -> None:
        """For the first time, or again."""
        if self._first_admission:
            self.queue = now - self._since
            self._first_admission = False
        else:
            self.preempted += now - self._since
        self._since = now

    def first_token(self, now: float) -> None:
        """There is a token; only the first call counts."""
        if not self._decoding:
            self._decoding = True
            self.prefill += now - self._since

    def retracted(self, now: float) -> None:
        """It runs no more for now."""
        if not self._decoding:
            self.prefill += now - self._since
        self._since = now

    def report(self, retractions: int, scheduled_tokens: int) -> RequestTimes:
        """As a message part."""
        return RequestTimes(self.queue, self.prefill, self.preempted, retractions, scheduled_tokens)
