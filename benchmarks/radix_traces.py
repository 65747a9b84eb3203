"""Made-up request traces for the radix tree: shared heads, growing chats, chats under memory pressure.

Token ids are random, so that nothing is shared but what is meant to be; everything follows from the seed.
"""

from __future__ import annotations

import random
from array import array
from dataclasses import dataclass

VOCABULARY = 32_000
SEED = 20260


@dataclass(frozen=True)
class Request:
    """One request: the first `prompt` ids of `ids` are its prompt, the rest its output."""

    ids: array[int]
    prompt: int


@dataclass(frozen=True)
class Trace:
    """Requests in order, and the tokens that the pool holds."""

    name: str
    requests: list[Request]
    capacity: int

    @property
    def tokens(self) -> int:
        """Tokens of all prompts and outputs."""
        return sum(len(request.ids) for request in self.requests)


def shared_heads(heads: int = 8, requests: int = 2000) -> Trace:
    """Few-shot batches: `heads` prefixes of 1,024 ids, each request one of them with 64-192 ids of its own; 32 out."""
    rng = random.Random(SEED)
    prefixes = [_ids(rng, 1024) for _ in range(heads)]
    made = []
    for _ in range(requests):
        prompt = rng.choice(prefixes) + _ids(rng, rng.randint(64, 192))
        made.append(Request(prompt + _ids(rng, 32), len(prompt)))
    return Trace("shared", made, sum(len(request.ids) for request in made))


def chats(conversations: int = 200, turns: int = 20) -> Trace:
    """Conversations that speak in turn: one system prompt of 256 ids, 24-72 ids asked and 32-96 answered each time."""
    rng = random.Random(SEED)
    histories = _histories(rng, conversations, turns)
    made = [history[turn] for turn in range(turns) for history in histories]
    return Trace("chat", made, sum(len(request.ids) for request in made))


def chats_under_pressure(conversations: int = 200, turns: int = 20) -> Trace:
    """The same chats; who speaks follows Zipf's law, nobody again within 16 picks; a quarter of what they need fits."""
    rng = random.Random(SEED)
    histories = _histories(rng, conversations, turns)
    working_set = sum(len(history[-1].ids) - 256 for history in histories) + 256
    weights = [1 / (rank + 1) for rank in range(conversations)]
    spoken = [0] * conversations
    recent: list[int] = []
    made: list[Request] = []
    while len(made) < conversations * turns:
        open_ones = [one for one in range(conversations) if spoken[one] < turns and one not in recent]
        if not open_ones:
            recent = recent[1:]
            continue
        one = rng.choices(open_ones, [weights[index] for index in open_ones])[0]
        made.append(histories[one][spoken[one]])
        spoken[one] += 1
        recent = [*recent, one][-16:]
    return Trace("pressure", made, working_set // 4)


def _histories(rng: random.Random, conversations: int, turns: int) -> list[list[Request]]:
    system = _ids(rng, 256)
    histories = []
    for _ in range(conversations):
        ids = system
        history = []
        for _ in range(turns):
            ids = ids + _ids(rng, rng.randint(24, 72))
            prompt = len(ids)
            ids = ids + _ids(rng, rng.randint(32, 96))
            history.append(Request(ids, prompt))
        histories.append(history)
    return histories


def _ids(rng: random.Random, count: int) -> array[int]:
    return array("i", rng.choices(range(VOCABULARY), k=count))
