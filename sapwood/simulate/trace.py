"""What a trace is: requests, when they come, and their tokens as pieces of made-up text.

No trace of the public ones has text.  What they have is structure: equal block ids mean equal tokens.  So a prompt is
a sequence of pieces, and a piece is a stretch of an endless text that its keys name; equal keys give equal tokens,
different keys give different ones.  Tokens are made when a request arrives, not before: a trace is small however long
its prompts are.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Keys = npt.NDArray[np.uint64]
Ids = npt.NDArray[np.int32]

# Token ids that are made up: [0, VOCABULARY).  EOS is none of them.
VOCABULARY = 65_536
EOS = VOCABULARY


class TraceError(Exception):
    """A trace cannot be read or makes no sense; the message is one line that says where."""


class Space(IntEnum):
    """Keys of different spaces never meet."""

    SHARED = 1
    OUTPUT = 2
    PRIVATE = 3


def key(space: Space, number: int) -> int:
    """The key of text `number` in a space."""
    return int(space) << 48 | number


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Tokens [start, start + length) of the blocks that `keys` name, each `block` tokens long (the last: any length).

    `keys`: uint64 [blocks]; pieces may share the memory.
    """

    keys: Keys
    block: int
    start: int
    length: int


def plain(space: Space, number: int, length: int, start: int = 0) -> Piece:
    """A stretch of one endless text."""
    return Piece(np.array([key(space, number)], dtype=np.uint64), 2**40, start, length)


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request.

    arrival   seconds from the start of the trace at which it is sent; with `after`, seconds from the end of request
              number `after` of the trace, which comes before this one
    output    what the model answers; a later prompt may contain it
    max_new_tokens  the limit that the client names; None where the trace does not say: then the answer ends by itself,
              and the scheduler cannot know when
    """

    arrival: float
    prompt: tuple[Piece, ...]
    output: tuple[Piece, ...]
    max_new_tokens: int | None = None
    after: int | None = None
    tenant: str = ""
    priority: int = 0

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return sum(piece.length for piece in self.prompt)

    @property
    def output_tokens(self) -> int:
        """Length of the answer."""
        return sum(piece.length for piece in self.output)


@dataclass(frozen=True)
class Trace:
    """Requests in the order in which they are numbered.  `dropped`: how many were left out for their length."""

    name: str
    requests: list[TraceRequest] = field(default_factory=list)
    dropped: int = 0


def token_ids(pieces: tuple[Piece, ...]) -> Ids:
    """The made-up tokens of some pieces, one after another: int32 [sum of lengths]."""
    parts = [_piece_ids(piece) for piece in pieces]
    return parts[0] if len(parts) == 1 else np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)


def _piece_ids(piece: Piece) -> Ids:
    places = np.arange(piece.start, piece.start + piece.length, dtype=np.uint64)
    keys = piece.keys * np.uint64(0xD1342543DE82EF95)
    block = np.uint64(piece.block)
    mixed = keys[places // block] + places % block * np.uint64(0x9E3779B97F4A7C15)
    # The finalizer of SplitMix64 (Steele, Lea, Flood 2014): neighbouring inputs give unrelated outputs.
    mixed ^= mixed >> np.uint64(30)
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(27)
    mixed *= np.uint64(0x94D049BB133111EB)
    ids: Ids = (mixed >> np.uint64(48)).astype(np.int32)
    return ids


def prepare(
    trace: Trace, *, rate: float = 1.0, max_requests: int | None = None, context: int | None = None, tenants: int = 0
) -> Trace:
    """The trace as it is to be run.

    rate          arrivals come so many times as fast; pauses between the turns of a session stay as they are
    max_requests  only the first so many
    context       requests whose prompt and answer are longer are left out; who waited for one of them waits for
                  whom that one waited for
    tenants       deal the sessions (or single requests) out to so many tenants, the second half as many as the
                  first, the third a third, and so on; 0: as in the trace
    """
    taken = trace.requests if max_requests is None else trace.requests[:max_requests]
    kept: list[TraceRequest] = []
    # Old number -> new number, or that of whom it waited for.
    place: dict[int, int | None] = {}
    pause: dict[int, float] = {}
    deal = _Deal(tenants)
    dealt: list[str] = []
    for number, request in enumerate(taken):
        after, arrival = request.after, request.arrival
        tenant = request.tenant
        if tenants:
            tenant = deal.next() if after is None else dealt[after]
            dealt.append(tenant)
        if after is None:
            arrival /= rate
        else:
            arrival += pause.get(after, 0.0)
            after = place[after]
        if context is not None and request.prompt_tokens + request.output_tokens > context:
            place[number] = after
            pause[number] = arrival
            continue
        place[number] = len(kept)
        kept.append(replace(request, arrival=arrival, after=after, tenant=tenant))
    return Trace(trace.name, kept, len(taken) - len(kept))


class _Deal:
    """Deals one after another, so that at any time tenant k has had a share of about 1 / (k + 1)."""

    def __init__(self, tenants: int) -> None:
        self._had = [0] * tenants

    def next(self) -> str:
        tenant = min(range(len(self._had)), key=lambda k: (self._had[k] + 1) * (k + 1))
        self._had[tenant] += 1
        return f"tenant-{tenant}"
