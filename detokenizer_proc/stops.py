"""Finding stop strings in text that arrives in pieces, wherever the pieces are cut.

The match that begins first wins, and among those that begin at one place the shortest, so that the result is the one
of searching the whole text.  Text is held back only while it may still be the beginning of a stop string, or of the
match.  Each stop string is followed by its own automaton (Knuth, Morris, Pratt: "Fast pattern matching in strings",
SIAM Journal on Computing 6(2), 1977), so the cost is one step for each character and stop string.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string found: characters [start, end) of the whole text."""

    start: int
    end: int
    stop: str


class StopMatcher:
    """Follows one output.  Offsets are in characters from the beginning of the output.

    `safe` is the offset up to which the text can be shown: no match begins before it.
    """

    def __init__(self, stops: tuple[str, ...]) -> None:
        """`stops` without the empty string, which would match everywhere."""
        self._automata = [_Automaton(stop) for stop in dict.fromkeys(stops) if stop]
        self._best: StopMatch | None = None
        self._length = 0

    @property
    def has_stops(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._automata)

    def skip(self, characters: int) -> None:
        """Take so many characters, where there is nothing to look for."""
        self._length += characters

    @property
    def safe(self) -> int:
        """How many characters of the text cannot belong to a stop string."""
        if self._best is not None:
            return min(self._best.start, self._earliest_partial())
        return self._earliest_partial()

    def feed(self, text: str) -> StopMatch | None:
        """Take more text.  The match, once nothing that comes can begin before it; None as long as there is none."""
        for character in text:
            self._length += 1
            for automaton in self._automata:
                if automaton.step(character):
                    self._consider(StopMatch(self._length - len(automaton.stop), self._length, automaton.stop))
            if self._best is not None and self._earliest_partial() >= self._best.start:
                return self._best
        return None

    def finish(self) -> StopMatch | None:
        """The match in the text as it ends here: what only could have begun earlier, did not."""
        return self._best

    def _consider(self, match: StopMatch) -> None:
        best = self._best
        if best is None or (match.start, match.end) < (best.start, best.end):
            self._best = match

    def _earliest_partial(self) -> int:
        """Where the longest unfinished beginning of a stop string begins; the end of the text when there is none."""
        return self._length - max((automaton.matched for automaton in self._automata), default=0)


class _Automaton:
    """One stop string; `matched` is the length of its longest beginning that the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = _borders(stop)

    def step(self, character: str) -> bool:
        """Take one character; True when the stop string ends with it."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched]
        if self.stop[self.matched] == character:
            self.matched += 1
        if self.matched < len(self.stop):
            return False
        # Begun anew: a later match of the same stop string can never be the one that begins first.
        self.matched = 0
        return True


def _borders(stop: str) -> list[int]:
    """For each length k below the whole, that of the longest proper beginning of stop[:k] that is also its end."""
    borders = [0] * len(stop)
    length = 0
    for place in range(1, len(stop) - 1):
        while length and stop[place] != stop[length]:
            length = borders[length]
        if stop[place] == stop[length]:
            length += 1
        borders[place + 1] = length
    return borders
