"""A soak: chats, forks, aborts, pins and flushes on a small pool for a long time; nothing may leak, no id may differ.

    python -m benchmarks.soak --model smollm2 --minutes 20 --prompts tests/data/chat_prompts.jsonl

First a server without a prefix cache answers a catalogue of conversations with branches: the reference, in float32,
greedy.  Then a server with a pool of 2,000 tokens is driven with the same prompts at random while every page is
recounted each second (GET /cache/check).  Clients go on with a conversation, fork one, leave in the middle, pin, use
the cache without storing, and flush.  Exit code 1 when an id differs, a page is lost or a request fails.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.load import resident_mb
from benchmarks.servers import Server, sapwood

SYSTEMS = (
    "You are a helpful assistant who answers in short, clear sentences.",
    "You are a careful teacher. Explain each step, name what is given, and say what is asked before you calculate.",
)
NEW_TOKENS = 32
LONGEST_PROMPT_TOKENS = 500
CLIENTS = 12
# Every request that stays within the pool must be answered in this time.
PATIENCE_SECONDS = 120.0


@dataclass
class Catalogue:
    """Prompts with what a server without a cache makes of them; the turns of a conversation follow each other."""

    conversations: list[list[tuple[list[int], list[int]]]] = field(default_factory=list)
    # Prompts that share all but their last message.
    forks: list[list[tuple[list[int], list[int]]]] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Number of prompts."""
        return sum(map(len, self.conversations)) + sum(map(len, self.forks))


async def generate(http: httpx.AsyncClient, ids: list[int], **fields: Any) -> dict[str, Any]:
    """One whole greedy reply.  Raises RuntimeError unless the answer is 200."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
    response = await http.post("/generate", json={"input_ids": ids, "sampling_params": sampling, **fields})
    if response.status_code != 200:
        raise RuntimeError(f"{response.status_code}: {response.text[:300]}")
    reply: dict[str, Any] = response.json()
    return reply


async def make_catalogue(http: httpx.AsyncClient, questions: list[str], count: int, seed: int) -> Catalogue:
    """Conversations of up to three turns over real questions, and for each a fork with three last messages."""
    catalogue = Catalogue()
    gate = asyncio.Semaphore(CLIENTS)

    async def answer(messages: list[dict[str, str]]) -> tuple[list[int], list[int], str] | None:
        async with gate:
            ids = (await http.post("/tokenize", json={"messages": messages})).json()["tokens"]
            if len(ids) > LONGEST_PROMPT_TOKENS:
                return None
            reply = await generate(http, ids)
            return ids, reply["output_ids"], reply["text"]

    async def converse(rng: random.Random) -> None:
        messages = [{"role": "system", "content": rng.choice(SYSTEMS)}]
        turns: list[tuple[list[int], list[int]]] = []
        forks: list[tuple[list[int], list[int]]] = []
        for _ in range(3):
            if turns:
                others = [[*messages, {"role": "user", "content": rng.choice(questions)}] for _ in range(3)]
                forks = [found[:2] for other in others if (found := await answer(other)) is not None] or forks
            messages.append({"role": "user", "content": rng.choice(questions)})
            turn = await answer(messages)
            if turn is None:
                break
            turns.append(turn[:2])
            messages.append({"role": "assistant", "content": turn[2]})
        if turns:
            catalogue.conversations.append(turns)
        if forks:
            catalogue.forks.append(forks)

    await asyncio.gather(*(converse(random.Random(seed + index)) for index in range(count)))
    return catalogue


@dataclass
class Soak:
    """What clients do, and what came of it."""

    http: httpx.AsyncClient
    catalogue: Catalogue
    until: float
    done: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    async def client(self, rng: random.Random) -> None:
        """One action after the other until the time is over."""
        actions = (self.chat, self.fork, self.leave, self.pin, self.no_store, self.other_salt, self.flush)
        weights = (40, 15, 15, 10, 8, 8, 4)
        while time.monotonic() < self.until:
            (action,) = rng.choices(actions, weights)
            try:
                await asyncio.wait_for(action(rng), PATIENCE_SECONDS)
            except TimeoutError:
                self.faults.append(f"{action.__name__}: no answer within {PATIENCE_SECONDS:.0f} s")
            except (RuntimeError, httpx.HTTPError, KeyError) as error:
                self.faults.append(f"{action.__name__}: {type(error).__name__}: {error}")
            self.done[action.__name__] += 1

    async def ask(self, turn: tuple[list[int], list[int]], **fields: Any) -> dict[str, Any]:
        """A request whose ids must be those of the reference."""
        reply = await generate(self.http, turn[0], **fields)
        if reply["output_ids"] != turn[1]:
            self.faults.append(f"prompt of {len(turn[0])} ids: {reply['output_ids']} instead of {turn[1]}")
        meta: dict[str, Any] = reply["meta_info"]
        self.done["prompt tokens"] += meta["prompt_tokens"]
        self.done["cached tokens"] += meta["cached_tokens"]
        return meta

    async def chat(self, rng: random.Random) -> None:
        """The turns of a conversation, one after the other, some of them under a session that says how it goes on."""
        session = rng.choice([None, f"s{rng.randrange(50)}"])
        for turn in rng.choice(self.catalogue.conversations):
            state = rng.choice(["open", "waiting", "done"])
            await self.ask(turn, **({} if session is None else {"session": {"id": session, "state": state}}))

    async def fork(self, rng: random.Random) -> None:
        """Prompts that share all but the last message, at the same time."""
        await asyncio.gather(*(self.ask(turn) for turn in rng.choice(self.catalogue.forks)))

    async def leave(self, rng: random.Random) -> None:
        """Go away in the middle of a stream; what has come by then must be right."""
        ids, expected = rng.choice(rng.choice(self.catalogue.conversations))
        events = rng.randrange(4)
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
        async with self.http.stream("POST", "/generate", json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    got = json.loads(line[6:])["output_ids"]
                    if got != expected[: len(got)]:
                        self.faults.append(f"stream of a prompt of {len(ids)} ids: {got} instead of {expected}")
                    events -= 1
                if events < 0:
                    break

    async def pin(self, rng: random.Random) -> None:
        """Keep a prefix for some seconds."""
        turn = rng.choice(self.catalogue.conversations)[0]
        tokens = rng.choice([None, rng.randint(1, len(turn[0]))])
        await self.ask(turn, pin={"tokens": tokens, "ttl_seconds": rng.randint(1, 20)})

    async def no_store(self, rng: random.Random) -> None:
        """Leave nothing behind."""
        await self.ask(rng.choice(rng.choice(self.catalogue.conversations)), no_store=True)

    async def other_salt(self, rng: random.Random) -> None:
        """The same prompt in a namespace of its own."""
        await self.ask(rng.choice(self.catalogue.conversations)[0], cache_salt=rng.choice("ab"))

    async def flush(self, rng: random.Random) -> None:
        """Forget a prefix, a namespace, or everything that no request holds."""
        ids = rng.choice(self.catalogue.conversations)[0][0]
        body = rng.choice([{}, {"cache_salt": "a"}, {"input_ids": ids[: rng.randint(1, len(ids))]}])
        response = await self.http.post("/cache/flush", json=body)
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {response.text[:300]}")
        flushed = response.json()
        self.done["pages flushed"] += flushed["flushed_pages"]
        self.done["pages kept"] += flushed["kept_pages"]

    async def recount(self) -> None:
        """Let the server recount its pages every second."""
        while time.monotonic() < self.until:
            await self.recount_once()
            await asyncio.sleep(1.0)

    async def recount_once(self) -> None:
        """One recount."""
        response = await self.http.get("/cache/check")
        if response.status_code != 200 or not response.json()["consistent"]:
            self.faults.append(f"check: {response.status_code} {response.text[:300]}")
        self.done["checks"] += 1


async def refer(server: Server, questions: list[str], arguments: argparse.Namespace) -> Catalogue:
    """The catalogue, from a server without a cache."""
    async with httpx.AsyncClient(base_url=server.base_url, timeout=600.0) as http:
        return await make_catalogue(http, questions, arguments.conversations, arguments.seed)


async def soak(server: Server, catalogue: Catalogue, arguments: argparse.Namespace) -> Soak:
    """Drive the server until the time is over, then look once more at an idle server."""
    async with httpx.AsyncClient(base_url=server.base_url, timeout=600.0) as http:
        running = Soak(http, catalogue, time.monotonic() + 60 * arguments.minutes)
        clients = [running.client(random.Random(1000 * arguments.seed + index)) for index in range(CLIENTS)]
        await asyncio.gather(running.recount(), report(running), *clients)
        await asyncio.sleep(1.0)
        await running.recount_once()
        stats = (await http.get("/server_info")).json()["scheduler"]
        if stats["pages_in_use"] or stats["running"] or stats["waiting"]:
            running.faults.append(f"not idle at the end: {stats}")
        return running


async def report(running: Soak) -> None:
    """A line each minute."""
    while time.monotonic() < running.until:
        await asyncio.sleep(max(0.0, min(60.0, running.until - time.monotonic())))
        info = (await running.http.get("/server_info")).json()
        stats = info["scheduler"]
        sizes = resident_mb({role: worker["pid"] for role, worker in info["workers"].items() if "pid" in worker})
        print(
            f"{dict(running.done)}, retractions {stats['retractions']}, evicted tokens {stats['evicted_tokens']}, "
            f"faults {len(running.faults)}, resident MB {', '.join(f'{role} {mb:.0f}' for role, mb in sizes.items())}"
        )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--pool", type=int, default=2000, help="tokens of KV")
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--prompts", type=Path, default=Path("tests/data/chat_prompts.jsonl"))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("flags", nargs="*", help="more flags for the server under test, after --")
    arguments = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    rows = [json.loads(line) for line in arguments.prompts.read_text().splitlines()]
    questions = [row["messages"][-1]["content"] for row in rows]
    with sapwood(arguments.model, "--dtype", "float32", "--disable-radix-cache") as server:
        catalogue = asyncio.run(refer(server, questions, arguments))
    print(f"reference: {catalogue.size} prompts in {len(catalogue.conversations)} conversations")
    small = ("--dtype", "float32", "--max-total-tokens", str(arguments.pool), *arguments.flags)
    with sapwood(arguments.model, *small) as server:
        print("under test:", " ".join(server.command[1:]))
        ended = asyncio.run(soak(server, catalogue, arguments))
    for fault in ended.faults[:20]:
        print("FAULT", fault)
    print(f"{arguments.minutes:g} minutes: {dict(ended.done)}; {len(ended.faults)} faults")
    sys.exit(1 if ended.faults else 0)


if __name__ == "__main__":
    main()
