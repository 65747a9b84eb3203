"""Histories to ask a model about: conversations turn by turn, agents that start alike and part, branches of a search.

Each is a list of growing prompts, as token ids, the last of which is the whole of it.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

# The roles' marks of a plain template: what is compared is one and the same prompt, so that any will do.
TURN = "<|im_start|>{}\n{}<|im_end|>\n"
TAU_SYSTEM_CHARACTERS = 240


@dataclass(frozen=True)
class History:
    """The prompts of one history, each the beginning of the next; `source`: what it was made of."""

    source: str
    prompts: list[list[int]]

    @property
    def whole(self) -> list[int]:
        """The longest prompt."""
        return self.prompts[-1]


def read_histories(data: Path, tokenizer: Tokenizer, count: int, most_tokens: int) -> list[History]:
    """`count` histories of at most `most_tokens` tokens: chats, agents and tree searches in turn.

    `data`: a folder with `chat`, `agents` and `tot`, or a file of lines {"source": ..., "turns": [...]}.
    Raises ValueError when there are not so many.
    """
    texts = _from_file(data) if data.is_file() else _from_folder(data)
    histories = []
    seen: set[tuple[int, ...]] = set()
    for source, turns in texts:
        history = _cut(source, turns, tokenizer, most_tokens)
        if history is not None and tuple(history.whole) not in seen:
            seen.add(tuple(history.whole))
            histories.append(history)
        if len(histories) == count:
            return histories
    raise ValueError(f"{data}: has {len(histories)} histories, and {count} are asked for")


def _cut(source: str, turns: list[str], tokenizer: Tokenizer, most_tokens: int) -> History | None:
    """The prompt after each turn, to the one that reaches the limit; None for one that is too short to be reused."""
    prompts: list[list[int]] = []
    ids: list[int] = []
    for turn in turns:
        ids = (ids + tokenizer.encode(turn, add_special_tokens=False).ids)[:most_tokens]
        if prompts and len(ids) == len(prompts[-1]):
            break
        prompts.append(list(ids))
    return History(source, prompts) if len(ids) >= 48 else None


def _from_file(path: Path) -> Iterator[tuple[str, list[str]]]:
    for line in path.read_text().splitlines():
        row = json.loads(line)
        yield row["source"], row["turns"]


def _from_folder(data: Path) -> Iterator[tuple[str, list[str]]]:
    """One of each kind in turn, as long as there are any."""
    for several in zip_longest(_chats(data / "chat"), _agents(data / "agents"), _searches(data / "tot")):
        yield from (one for one in several if one is not None)


def _chats(folder: Path) -> Iterator[tuple[str, list[str]]]:
    for row in _rows(folder / "mt_bench_101.jsonl"):
        pairs = [(("user", pair["user"]), ("assistant", pair["bot"])) for pair in row["history"]]
        turns = [TURN.format(role, text) for pair in pairs for role, text in pair]
        yield "mt_bench_101", turns


def _agents(folder: Path) -> Iterator[tuple[str, list[str]]]:
    system = TURN.format("system", (folder / "tau_airline_system.txt").read_text()[:TAU_SYSTEM_CHARACTERS])
    for row in _rows(folder / "tau_airline.jsonl.gz"):
        messages = [(message["role"], _said(message)) for message in row["messages"]]
        yield "tau_airline", [system, *(TURN.format(role, text) for role, text in messages)]


def _said(message: dict[str, Any]) -> str:
    return str(message.get("content") or json.dumps(message.get("tool_calls")))


def _searches(folder: Path) -> Iterator[tuple[str, list[str]]]:
    head = "Use numbers and basic arithmetic operations (+ - * /) to obtain 24. Each step, choose two numbers.\n"
    for row in _rows(folder / "game24_search_logs.jsonl.gz"):
        for state in islice(row["steps"][-2]["new_ys"], 0, None, 4):
            yield "game24", [head, f"Input: {row['puzzle']}\nSteps:\n", *state.splitlines(keepends=True)]


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    for line in raw.splitlines():
        yield json.loads(line)
