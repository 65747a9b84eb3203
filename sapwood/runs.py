"""Runs the items of one call on a front: all of them, or none.

When one item fails, what still runs of the others is aborted and the failure says which item it was.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from sapwood.items import Item
from srt.answer import RequestFailed
from srt.front import Front
from srt.native_reply import NativeReply

# Items of one call that are on their way at once; a call may have any number of them.
MAX_AT_ONCE = 2048


async def cancel_all(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel what has not ended, and wait until it has."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def collect(front: Front, items: Sequence[Item]) -> list[list[dict[str, Any]]]:
    """For each item the native reply for each of its samples.  Raises RequestFailed."""
    turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def one(item: Item) -> list[dict[str, Any]]:
        async with turns:
            try:
                answer = front.ask(item.ask)
                deltas = await answer.collect()
            except RequestFailed as failure:
                raise item.named(failure) from None
        names = sample_names(answer.id, item.ask.n)
        return [
            NativeReply(name, answer, index, item.logprobs).take(delta)
            for index, (name, delta) in enumerate(zip(names, deltas, strict=True))
        ]

    tasks = [asyncio.ensure_future(one(item)) for item in items]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_all(tasks)


def sample_names(name: str, n: int) -> list[str]:
    """What the samples of one request are called."""
    return [name] if n == 1 else [f"{name}-{index}" for index in range(n)]


async def stream(front: Front, items: Sequence[Item]) -> AsyncGenerator[tuple[int, dict[str, Any]], None]:
    """(place, reply so far) as text comes; places number the samples in prompt-major order.  Raises RequestFailed.

    The queue has one place: what the reader is too slow for waits, merged, in the answers.
    """
    queue: asyncio.Queue[tuple[int, dict[str, Any]] | RequestFailed | None] = asyncio.Queue(1)
    turns = asyncio.Semaphore(MAX_AT_ONCE)

    async def pump(item: Item, first_place: int) -> None:
        try:
            async with turns:
                answer = front.ask(item.ask)
                names = sample_names(answer.id, item.ask.n)
                replies = [NativeReply(name, answer, index, item.logprobs) for index, name in enumerate(names)]
                async for index, delta in answer:
                    await queue.put((first_place + index, replies[index].take(delta)))
            await queue.put(None)
        except RequestFailed as failure:
            await queue.put(item.named(failure))

    tasks, place = [], 0
    for item in items:
        tasks.append(asyncio.ensure_future(pump(item, place)))
        place += item.ask.n
    try:
        running = len(tasks)
        while running:
            entry = await queue.get()
            if entry is None:
                running -= 1
            elif isinstance(entry, RequestFailed):
                raise entry
            else:
                yield entry
    finally:
        await cancel_all(tasks)


async def next_of(replies: AsyncGenerator[tuple[int, dict[str, Any]], None]) -> tuple[int, dict[str, Any]] | None:
    """The next entry of a stream, None at its end."""
    return await anext(replies, None)


async def close(replies: AsyncGenerator[Any, None]) -> None:
    """End a stream and what runs for it."""
    async with aclosing(replies):
        pass
