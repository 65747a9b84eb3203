"""The next turn finds all of the turn before in the cache, whatever ids it was sampled as."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sapwood import Engine

SMALL: dict[str, Any] = {"threads": 1, "max_total_tokens": 16384, "dtype": "float32"}
# A start token in the middle of a reply is not shown, so that no history could have it.
SAMPLED: dict[str, Any] = {"temperature": 1, "logit_bias": {"0": -100, "1": -100}}
QUESTIONS = ("Which trees grow by the river?", "And which do not? 🐙", "Why is that so?", "Thank you.")


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, tokenizer_workers=2, **SMALL) as started:
        yield started


@pytest.fixture(scope="module")
def plain_engine(tiny_model: Path) -> Iterator[Engine]:
    with Engine(tiny_model, disable_exact_history=True, **SMALL) as started:
        yield started


def talk(engine: Engine, seed: int, tokens: int = 24, **options: Any) -> list[tuple[int, int]]:
    """A conversation at temperature 1, sent back as text.  For each turn but the first: how many tokens were cached,
    and how many the turn before had, prompt and output."""
    messages: list[dict[str, str]] = []
    turns = []
    before = 0
    for number, question in enumerate(QUESTIONS):
        messages.append({"role": "user", "content": question})
        settings = {"max_new_tokens": tokens, **SAMPLED, "seed": seed * 100 + number}
        reply = engine.chat(messages, settings, **options)
        meta = reply["meta_info"]
        if before:
            turns.append((meta["cached_tokens"], before))
        before = meta["prompt_tokens"] + meta["completion_tokens"]
        messages.append({"role": "assistant", "content": reply["text"]})
    return turns


def test_every_turn_reuses_all_of_the_turn_before(engine: Engine) -> None:
    for seed in range(5):
        for cached, before in talk(engine, seed):
            assert cached == before - 1


def test_without_it_the_first_reply_that_is_tokenized_otherwise_ends_the_reuse(plain_engine: Engine) -> None:
    turns = [turn for seed in range(5) for turn in talk(plain_engine, seed)]
    assert all(cached < before - 1 for cached, before in turns)


def test_a_reply_ended_by_a_stop_token_or_a_stop_string_is_reused_too(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Count the rings of the tree"}]
    greedy = {"max_new_tokens": 30, "temperature": 0, "ignore_eos": True}
    ids = engine.chat(messages, greedy)["output_ids"]
    # The tenth token ends the reply; its text is not shown.
    reply = engine.chat(messages, {**greedy, "stop_token_ids": [ids[9]]})
    assert reply["meta_info"]["finish_reason"]["type"] == "stop"
    history = [*messages, {"role": "assistant", "content": reply["text"]}, {"role": "user", "content": "Go on"}]
    again = engine.chat(history, {"max_new_tokens": 1})
    assert again["meta_info"]["cached_tokens"] >= reply["meta_info"]["prompt_tokens"] + len(reply["output_ids"]) - 1


def test_a_text_prompt_that_goes_on_from_an_output_is_reused(engine: Engine, plain_engine: Engine) -> None:
    def reused(of: Engine) -> list[bool]:
        results = []
        for seed in range(6):
            prompt = f"Tale number {seed} of the river and the trees."
            first = of.generate(prompt, {"max_new_tokens": 20, **SAMPLED, "seed": seed, "ignore_eos": True})
            second = of.generate(prompt + first["text"], {"max_new_tokens": 1})
            whole = first["meta_info"]["prompt_tokens"] + 20
            results.append(second["meta_info"]["cached_tokens"] == whole - 1)
        return results

    assert all(reused(engine))
    assert not any(reused(plain_engine))


def test_samples_are_remembered_one_by_one(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Tell four stories of a harbour"}]
    replies = engine.chat(messages, {"max_new_tokens": 16, **SAMPLED, "n": 4, "seed": 5})
    for reply in replies:
        history = [*messages, {"role": "assistant", "content": reply["text"]}, {"role": "user", "content": "More"}]
        meta = engine.chat(history, {"max_new_tokens": 1})["meta_info"]
        assert meta["cached_tokens"] == reply["meta_info"]["prompt_tokens"] + len(reply["output_ids"]) - 1


def test_another_salt_has_another_memory(engine: Engine) -> None:
    messages = [{"role": "user", "content": "A secret between the two of us"}]
    settings = {"max_new_tokens": 24, **SAMPLED, "seed": 77}
    first = engine.chat(messages, settings, cache_salt="ours")
    history = [*messages, {"role": "assistant", "content": first["text"]}, {"role": "user", "content": "Again"}]
    whole = first["meta_info"]["prompt_tokens"] + len(first["output_ids"])

    def ask(salt: str | None) -> dict[str, Any]:
        meta: dict[str, Any] = engine.chat(history, {"max_new_tokens": 1}, cache_salt=salt)["meta_info"]
        return meta

    theirs, none, ours = ask("theirs"), ask(None), ask("ours")
    assert ours["cached_tokens"] == whole - 1
    # The others had the plain ids computed, all but the beginning that every chat without a salt shares.
    assert theirs["cached_tokens"] == 0
    assert none["cached_tokens"] < first["meta_info"]["prompt_tokens"]
    assert theirs["prompt_tokens"] == none["prompt_tokens"] != ours["prompt_tokens"]


def test_a_reply_that_was_cut_off_is_remembered_as_far_as_it_was_read(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Never stop talking"}]
    settings = {"max_new_tokens": 1500, **SAMPLED, "seed": 3, "ignore_eos": True}
    stream = engine.chat(messages, settings, stream=True)
    for reply in stream:
        if len(reply["output_ids"]) >= 20:
            break
    stream.close()
    history = [*messages, {"role": "assistant", "content": reply["text"]}, {"role": "user", "content": "Enough"}]
    meta = engine.chat(history, {"max_new_tokens": 1})["meta_info"]
    plain = engine.tokenize(reply["text"])
    assert plain != reply["output_ids"]
    assert meta["cached_tokens"] >= reply["meta_info"]["prompt_tokens"] + len(reply["output_ids"]) - 2
