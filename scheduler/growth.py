"""How much longer running requests will probably get: what admission sets aside for them.

Reserving every request's whole `max_new_tokens` leaves most of the pool idle, since few requests reach it;
reserving nothing ends in retractions.  The estimate is a decaying mean of the lengths that outputs really had,
stretched for a while after each retraction, which is the sign that it was too low.
"""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.request import Request

PRIOR_MEAN_TOKENS = 256.0
MEAN_WEIGHT = 1 / 32
STRETCH_PER_RETRACTION = 1.5
MAX_STRETCH = 8.0
RELAX_PER_FINISH = 0.97


class GrowthEstimate:
    """Expected output lengths, learnt from the outputs that ended."""

    def __init__(self) -> None:
        self.mean_tokens = PRIOR_MEAN_TOKENS
        self.stretch = 1.0

    def finished(self, output_tokens: int) -> None:
        """An output ended by itself or by its limit."""
        self.mean_tokens += MEAN_WEIGHT * (output_tokens - self.mean_tokens)
        self.stretch = max(1.0, self.stretch * RELAX_PER_FINISH)

    def retracted(self) -> None:
        """The pool ran dry: too little had been set aside."""
        self.stretch = min(MAX_STRETCH, self.stretch * STRETCH_PER_RETRACTION)

    def tokens(self, request: Request, page_size: int) -> int:
        """Output tokens that `request` will probably still need room for, one page at least, its limit at most."""
        expected = round(self.mean_tokens * self.stretch) - request.num_outputs
        return min(request.remaining_outputs, max(page_size, expected))

    def pages(self, requests: Iterable[Request], page_size: int) -> int:
        """Pages that running requests will probably still take.

        For each of them those of `known + promised + tokens(...)` tokens beyond its table; written out, since it is
        asked for in every step of a full server.
        """
        usual = round(self.mean_tokens * self.stretch)
        total = 0
        for request in requests:
            end = request.prompt_tokens + usual
            least = len(request.tokens) + page_size
            if end < least:
                end = least
            if end > request.end_at:
                end = request.end_at
            missing = -(-(end + request.promised) // page_size) - request.table.num_pages
            if missing > 0:
                total += missing
        return total
