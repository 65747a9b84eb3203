"""Recorded request traces as runs of content blocks, one after the other in time, with what the sessions would tell.

The traces are not in the repository.  They lie in a folder (`--traces`) with these files, gzip of JSON lines:

mooncake_conversation, mooncake_synthetic   from kvcache-ai/Mooncake, FAST25-release: `hash_ids` name the blocks of
    512 tokens of each input; equal leading ids mean an equal prefix
agentic_coding   from callanjfox/kv-cache-tester: one coding session each, blocks of 64 tokens; block ids hold within
    a session, but for the head of tools and system prompt, which all sessions share (block for block, as far as both
    heads reach)

Only the inputs are blocks: an output comes back as part of the next input.
"""

from __future__ import annotations

import gzip
import json
import random
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

NAMES = ("agentic_coding", "mooncake_conversation", "mooncake_synthetic")
SEED = 20260
# Coding sessions begin at random, one in so many seconds: about 17 of them are under way at a time.
SECONDS_BETWEEN_SESSIONS = 100.0


@dataclass(frozen=True)
class BlockRequest:
    """One request.

    blocks   the ids of its blocks, in order
    tokens   of its input; the last block may be partly filled
    reply    tokens of its output
    session  whose it is; None where the trace does not say
    after    what the session tells when the reply is there: "waiting" for a tool, "closed", or None
    at       seconds from the start
    """

    blocks: array[int]
    tokens: int
    reply: int
    session: str | None
    after: str | None
    at: float


@dataclass(frozen=True)
class BlockTrace:
    """Requests in the order of time."""

    name: str
    block_size: int
    requests: list[BlockRequest]

    @property
    def tokens(self) -> int:
        """Tokens of all inputs."""
        return sum(request.tokens for request in self.requests)

    @property
    def unique_blocks(self) -> int:
        """Different blocks: what an infinite cache holds at the end."""
        seen: set[int] = set()
        for request in self.requests:
            seen.update(request.blocks)
        return len(seen)


def load(folder: Path, name: str, seed: int = SEED) -> BlockTrace:
    """Read one of `NAMES`.  Raises OSError when its file is not there.  `seed`: of the starts of coding sessions."""
    rows = _rows(folder / f"{name}.jsonl.gz")
    if name == "agentic_coding":
        return BlockTrace(name, 64, _coding_sessions(rows, seed))
    requests = [
        BlockRequest(
            array("i", row["hash_ids"]), row["input_length"], row["output_length"], None, None, row["timestamp"] / 1000
        )
        for row in rows
    ]
    return BlockTrace(name, 512, requests)


def _rows(path: Path) -> Iterator[Any]:
    with gzip.open(path, "rt", encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)


def _coding_sessions(rows: Iterator[Any], seed: int) -> list[BlockRequest]:
    rng = random.Random(seed)
    start = 0.0
    made: list[BlockRequest] = []
    # Shared ids come first; each session's own follow those of the session before.
    free = max_head = 1 << 16
    for row in rows:
        head = (row["tool_tokens"] + row["system_tokens"]) // row["block_size"]
        assert head < max_head, "a head of millions of tokens"
        requests = row["requests"]
        base = free
        for number, request in enumerate(requests):
            ids = array("i")
            for first, count in request["hash_runs"]:
                ids.extend(block if block <= head else base + block for block in range(first, first + count))
            free = max(free, max(ids) + 1)
            after = "waiting" if request["stop"] == "tool_use" else None
            if number == len(requests) - 1:
                after = "closed"
            at = start + request["t"]
            made.append(BlockRequest(ids, request["in"], request["out"], row["session"], after, at))
        start += rng.expovariate(1 / SECONDS_BETWEEN_SESSIONS)
    return sorted(made, key=lambda request: request.at)
