"""The workloads that benchmarks drive at a server: each an async function that returns its replies.

Prompts are made of words that are one token each in the model's tokenizer, so their lengths in tokens are exact.
Every run has a seed of its own: its text is new to any prefix cache.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from benchmarks.client import Client, Reply


class Words:
    """Random text of exact length in tokens."""

    def __init__(self, model_folder: Path, seed: int) -> None:
        tokenizer = Tokenizer.from_file(str(model_folder / "tokenizer.json"))
        vocabulary = tokenizer.get_vocab()
        self._words = sorted(
            " " + token[1:]
            for token in vocabulary
            if len(token) > 3
            and token[0] == "Ġ"
            and token[1:].isascii()
            and token[1:].isalpha()
            and token[1:].islower()
        )
        self._random = random.Random(seed)

    def text(self, num_tokens: int) -> str:
        """Words of `num_tokens` tokens together."""
        return "".join(self._random.choices(self._words, k=num_tokens))


async def gather(jobs: list[Callable[[], Awaitable[Reply]]], at_a_time: int) -> list[Reply]:
    """Run jobs in order, so many at a time."""
    gate = asyncio.Semaphore(at_a_time)

    async def one(job: Callable[[], Awaitable[Reply]]) -> Reply:
        async with gate:
            return await job()

    return await asyncio.gather(*(one(job) for job in jobs))


async def few_shot(
    client: Client,
    words: Words,
    requests: int = 64,
    head: int = 1000,
    own: int = 60,
    out: int = 16,
    at_a_time: int = 16,
) -> list[Reply]:
    """Requests that share a head and differ in a short tail."""
    shared = words.text(head)
    prompts = [shared + words.text(own) for _ in range(requests)]
    return await gather([lambda p=prompt: client.complete(p, out) for prompt in prompts], at_a_time)  # type: ignore[misc]


async def multi_turn(
    client: Client,
    words: Words,
    conversations: int = 8,
    turns: int = 5,
    system: int = 400,
    user: int = 100,
    out: int = 48,
) -> list[Reply]:
    """Conversations under one system text, all at once, each growing by a question and an answer a turn."""
    shared = words.text(system)
    questions = [[words.text(user) for _ in range(turns)] for _ in range(conversations)]

    async def talk(mine: list[str]) -> list[Reply]:
        messages = [{"role": "system", "content": shared}]
        replies = []
        for question in mine:
            messages.append({"role": "user", "content": question})
            replies.append(await client.chat(messages, out))
            messages.append({"role": "assistant", "content": replies[-1].text})
        return replies

    return [reply for replies in await asyncio.gather(*map(talk, questions)) for reply in replies]


async def agent_trees(
    client: Client, words: Words, trees: int = 4, head: int = 600, forks: int = 4, steps: int = 3, out: int = 24
) -> list[Reply]:
    """Trees: a shared head, branches that take steps with observations between, then a call that joins them."""
    shared = words.text(head)

    async def tree() -> list[Reply]:
        root = shared + words.text(80)
        replies: list[Reply] = []

        async def branch() -> str:
            text = root + words.text(10)
            for _ in range(steps):
                replies.append(await client.complete(text, out))
                text += replies[-1].text + words.text(40)
            return text[len(root) :]

        branches = await asyncio.gather(*(branch() for _ in range(forks)))
        replies.append(await client.complete(root + "".join(branches), out))
        return replies

    return [reply for replies in await asyncio.gather(*(tree() for _ in range(trees))) for reply in replies]


async def thrash(
    client: Client, words: Words, heads: int = 8, each: int = 8, head: int = 700, own: int = 60, out: int = 16
) -> list[Reply]:
    """Requests over several heads, interleaved and sent all at once: more heads than the pool can hold."""
    shared = [words.text(head) for _ in range(heads)]
    prompts = [shared[index % heads] + words.text(own) for index in range(heads * each)]
    return await gather([lambda p=prompt: client.complete(p, out) for prompt in prompts], len(prompts))  # type: ignore[misc]


async def unique(
    client: Client, words: Words, requests: int = 32, prompt: int = 400, out: int = 32, at_a_time: int = 8
) -> list[Reply]:
    """Nothing to reuse."""
    prompts = [words.text(prompt) for _ in range(requests)]
    return await gather([lambda p=text: client.complete(p, out) for text in prompts], at_a_time)  # type: ignore[misc]


async def single(client: Client, words: Words, requests: int = 4, prompt: int = 64, out: int = 128) -> list[Reply]:
    """One request at a time: the speed of a lone stream."""
    prompts = [words.text(prompt) for _ in range(requests)]
    return await gather([lambda p=text: client.complete(p, out) for text in prompts], 1)  # type: ignore[misc]


@dataclass(frozen=True)
class LeastWork:
    """What no server can avoid in a workload of the sizes above, whatever it has cached.

    fresh   prompt tokens that have not been computed before, each counted once
    out     output tokens
    rows    requests that can decode together
    """

    fresh: int
    out: int
    rows: int


# Chat messages bring some tokens of the template with them; what a branch has said is known when branches are joined.
LEAST_WORK: dict[str, LeastWork] = {
    "fewshot": LeastWork(1000 + 64 * 60, 64 * 16, 16),
    "multiturn": LeastWork(400 + 8 * 5 * 110, 8 * 5 * 48, 8),
    "agent": LeastWork(600 + 4 * (80 + 4 * (10 + 2 * 40) + 40 + 3 * (10 + 3 * 64)), 4 * 13 * 24, 16),
    "thrash64": LeastWork(8 * 700 + 64 * 60, 64 * 16, 16),
    "unique": LeastWork(32 * 400, 32 * 32, 8),
    "single": LeastWork(4 * 64, 4 * 128, 1),
}

WORKLOADS: dict[str, Callable[[Client, Words], Awaitable[list[Reply]]]] = {
    "fewshot": few_shot,
    "multiturn": multi_turn,
    "agent": agent_trees,
    "thrash64": thrash,
    "unique": unique,
    "single": single,
}
