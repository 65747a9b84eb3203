"""Whether a cached prefix gives the very ids that computing it gives, in every state that the cache can be in.

    python -m benchmarks.hit_equals_miss --model FOLDER --data FOLDER       200 histories, float32, greedy

Each history is answered without a cache first; then in each of these states, and the output ids must be the same:

    branches         turn by turn into an empty cache, beside other histories that begin alike
    warm             everything is cached
    copy on write    what is cached ends inside a page; the histories take each offset in a page in turn
    partly evicted   a pool that holds a quarter of the histories, gone through twice
    disk             a new process that finds what another one left on disk

Exit code 1 when an id differs.  Histories are cut to --tokens tokens; the data are chats, agents and tree searches.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tokenizers import Tokenizer

from benchmarks.histories import History, read_histories
from sapwood import Engine

PAGE_SIZE = 16


@dataclass(frozen=True)
class Reply:
    """What one history was answered: ids, and how much of it was in the cache, and on disk."""

    ids: list[int]
    cached: int
    disk: int


@dataclass(frozen=True)
class State:
    """What came of one state.  `different`: places of the histories whose ids are not those of the cold run."""

    name: str
    replies: list[Reply]
    different: list[int]
    seconds: float


class Trial:
    """The histories, their cold ids, and a way to answer them with an engine in some state.

    `settings` go to every engine; `start` makes one.
    """

    def __init__(self, model: Path, histories: Sequence[History], new_tokens: int, **settings: Any) -> None:
        self.histories = list(histories)
        self._model = str(model)
        self._settings = {"dtype": "float32", "page_size": PAGE_SIZE, "max_running_requests": 16, **settings}
        self._new_tokens = new_tokens
        tokens = sum(len(history.whole) + new_tokens + PAGE_SIZE for history in histories)
        # Room for everything, the cut beginnings of `copy_on_write` included.
        self._pool_tokens = 3 * tokens
        self._cold: list[Reply] = []

    def start(self, **settings: Any) -> Engine:
        """An engine with these settings on top of the common ones."""
        return Engine(model=self._model, **{"max_total_tokens": self._pool_tokens, **self._settings, **settings})

    def run(self, told: Callable[[State], None]) -> list[State]:
        """Go through all states; `told` is called after each."""
        states: list[State] = []

        def note(name: str, answer: Callable[[], list[Reply]]) -> None:
            begin = time.perf_counter()
            replies = answer()
            different = differences(self._cold or replies, replies)
            states.append(State(name, replies, different, time.perf_counter() - begin))
            told(states[-1])

        with self.start(disable_radix_cache=True) as engine:
            note("cold", lambda: self._answer(engine))
        self._cold = states[0].replies
        with tempfile.TemporaryDirectory() as folder:
            with self.start(disk_cache_dir=folder) as engine:
                note("branches", lambda: self._turn_by_turn(engine))
                note("warm", lambda: self._answer(engine))
                note("copy on write", lambda: asyncio.run(self._copy_on_write(engine)))
            with self.start(disk_cache_dir=folder) as engine:
                note("disk", lambda: self._answer(engine))
        longest = max(len(history.whole) for history in self.histories) + self._new_tokens + PAGE_SIZE
        quarter = sum(len(history.whole) for history in self.histories) // 4
        with self.start(max_total_tokens=max(2 * longest, quarter)) as engine:
            note("partly evicted", lambda: self._twice(engine))
        return states

    def _sampling(self, new_tokens: int | None = None) -> dict[str, Any]:
        count = self._new_tokens if new_tokens is None else new_tokens
        return {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}

    def _answer(self, engine: Engine, order: Sequence[int] | None = None) -> list[Reply]:
        """All histories at once, in this order of arrival; the replies are in the histories' own."""
        order = range(len(self.histories)) if order is None else order
        prompts = [self.histories[place].whole for place in order]
        replies = engine.generate(input_ids=prompts, sampling_params=self._sampling())
        found = {place: _reply(reply) for place, reply in zip(order, replies, strict=True)}
        return [found[place] for place in range(len(self.histories))]

    def _turn_by_turn(self, engine: Engine) -> list[Reply]:
        """Every history is asked about after each of its turns, all of them side by side."""
        turns = max(len(history.prompts) for history in self.histories)
        for turn in range(turns - 1):
            prompts = [history.prompts[turn] for history in self.histories if turn < len(history.prompts) - 1]
            if prompts:
                engine.generate(input_ids=prompts, sampling_params=self._sampling(1))
        return self._answer(engine)

    async def _copy_on_write(self, engine: Engine) -> list[Reply]:
        """Each history in a namespace of its own, where what is cached ends at the next offset inside a page."""
        return await asyncio.gather(*(self._from_offset(engine, place) for place in range(len(self.histories))))

    async def _from_offset(self, engine: Engine, place: int) -> Reply:
        whole = self.histories[place].whole
        cut = cut_of(place, whole)
        other = [*whole[:cut], whole[cut] ^ 1]
        for ids, sampling in ((other, self._sampling(0)), (whole, self._sampling())):
            reply = await engine.generate_async(input_ids=ids, sampling_params=sampling, cache_salt=f"history {place}")
        return _reply(reply)

    def _twice(self, engine: Engine) -> list[Reply]:
        """In an order that leaves the cache with parts of everything."""
        order = list(range(len(self.histories)))
        Random(7).shuffle(order)
        self._answer(engine, order)
        Random(8).shuffle(order)
        return self._answer(engine, order)


def differences(cold: Sequence[Reply], replies: Sequence[Reply]) -> list[int]:
    """The places of the histories whose ids are not those of the cold run."""
    pairs = enumerate(zip(cold, replies, strict=True))
    return [place for place, (one, other) in pairs if one.ids != other.ids]


def cut_of(place: int, whole: Sequence[int]) -> int:
    """Where the cached part of a history ends: in the middle of it, at the offset in a page that is its turn."""
    return len(whole) // 2 // PAGE_SIZE * PAGE_SIZE + place % PAGE_SIZE


def _reply(reply: dict[str, Any]) -> Reply:
    meta = reply["meta_info"]
    report = meta["cache_report"]
    return Reply(reply["output_ids"], meta["cached_tokens"], report["cached_tokens_by_tier"]["disk"])


def show(state: State) -> None:
    """One line of the table."""
    cached = sum(reply.cached for reply in state.replies)
    disk = sum(reply.disk for reply in state.replies)
    same = len(state.replies) - len(state.different)
    numbers = f"{same:>4} of {len(state.replies)} {cached:>9} {disk:>9} {state.seconds:>8.1f}"
    print(f"{state.name:<16}{numbers}", flush=True)


def main() -> int:
    """Run all states and print a line for each; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a model's folder")
    parser.add_argument("--data", type=Path, required=True, help="folder with chat, agents and tot, or a JSONL file")
    parser.add_argument("--histories", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=320, help="longest history")
    parser.add_argument("--new-tokens", type=int, default=16, help="ids to compare")
    parser.add_argument("--threads", type=int, default=None)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    histories = read_histories(arguments.data, tokenizer, arguments.histories, arguments.tokens)
    tokens = sum(len(history.whole) for history in histories)
    print(f"{len(histories)} histories, {tokens} tokens, {arguments.new_tokens} ids each, float32, greedy")
    print(f"{'state':<16}{'same ids':>11} {'cached':>9} {'from disk':>9} {'seconds':>8}")
    states = Trial(arguments.model, histories, arguments.new_tokens, threads=arguments.threads).run(show)
    return int(any(state.different for state in states))


if __name__ == "__main__":
    sys.exit(main())
