"""Conversations with the real model, whose samples are often other tokens than the tokenizer would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sapwood import Engine

# Hot enough that hardly a reply is what the tokenizer would make of its text.
SAMPLED: dict[str, Any] = {"max_new_tokens": 40, "temperature": 1.5}
QUESTIONS = ("Tell me about a strange machine.", "Give it an odd name, with an emoji.", "Write some Python about it.")


def talk(engine: Engine, seed: int) -> tuple[list[tuple[int, int]], int]:
    """(cached, tokens of the turn before) for each turn but the first, and how many replies tokenize otherwise."""
    messages: list[dict[str, str]] = []
    turns: list[tuple[int, int]] = []
    before = others = 0
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        reply = engine.chat(messages, {**SAMPLED, "seed": 10 * seed + number})
        meta, ids = reply["meta_info"], reply["output_ids"]
        if before:
            turns.append((meta["cached_tokens"], before))
        before = meta["prompt_tokens"] + meta["completion_tokens"]
        plain = engine.tokenize(reply["text"])
        others += plain not in (ids, ids[:-1])
        messages.append({"role": "assistant", "content": reply["text"]})
    return turns, others


@pytest.mark.real
def test_sampled_conversations_sent_back_as_text_are_reused_to_the_last_token(real_model: Path) -> None:
    with Engine(real_model, max_total_tokens=8192) as engine:
        results = [talk(engine, seed) for seed in range(4)]
    assert sum(others for _, others in results) >= 4
    assert all(cached == before - 1 for turns, _ in results for cached, before in turns)


@pytest.mark.real
def test_without_exact_history_they_are_not_and_the_report_says_where(real_model: Path) -> None:
    with Engine(real_model, max_total_tokens=8192, disable_exact_history=True) as engine:
        results = [talk(engine, seed) for seed in range(4)]
    assert any(cached < before - 1 for turns, _ in results for cached, before in turns)
