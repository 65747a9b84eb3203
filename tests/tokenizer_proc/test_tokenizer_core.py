"""What comes of each message: ids for the scheduler and a word to the front, or a refusal that names the fault."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from srt.messages import (
    ChatPrompt,
    IdsPrompt,
    Rejected,
    SamplingParams,
    Submit,
    TextPrompt,
    TokenizeCall,
    Tokenized,
    pack_ids,
    unpack_ids,
)
from tests.small_tokenizers import byte_level, byte_level_with_start
from tests.tiny_model import CHAT_TEMPLATE
from tests.worker_harness import model_facts
from tokenizer_proc.core import Outcome, TokenizerCore
from tokenizer_proc.encode import Encoder
from tokenizer_proc.template import ChatTemplate

MAX_PROMPT_TOKENS = 100
TOKENIZER = byte_level()
FACTS = model_facts(None, context_length=2048, vocab_size=512)  # type: ignore[arg-type]


def make_core(template: str = CHAT_TEMPLATE, encoder: Encoder | None = None) -> TokenizerCore:
    encoder = encoder or Encoder(TOKENIZER.to_str().encode())
    return TokenizerCore(encoder, ChatTemplate({"default": template}, {}), FACTS, MAX_PROMPT_TOKENS)


CORE = make_core()


def submit(prompt: TextPrompt | IdsPrompt | ChatPrompt, core: TokenizerCore = CORE) -> Outcome:
    return core.handle(Submit(("r",), prompt, SamplingParams(), (7,)))


def chat(*contents: Any) -> ChatPrompt:
    return ChatPrompt(json.dumps([{"role": "user", "content": content} for content in contents]).encode())


def refused(prompt: TextPrompt | IdsPrompt | ChatPrompt, core: TokenizerCore = CORE) -> Rejected:
    outcome = submit(prompt, core)
    assert outcome.generate == ()
    assert isinstance(outcome.answer, Rejected)
    assert outcome.answer.rids == ("r",)
    return outcome.answer


def test_every_sample_becomes_a_request_with_its_own_seed_and_everything_that_was_asked() -> None:
    sampling = SamplingParams(max_new_tokens=5, stop=("x",), logit_bias={3: 1.0})
    asked = Submit(
        ("a", "b", "c"), TextPrompt("the tree"), sampling, (1, 2, 3), "space", "tenant", 4, 2, 0, use_cache=False
    )
    outcome = CORE.handle(asked)
    ids = TOKENIZER.encode("the tree").ids
    assert outcome.answer == Tokenized(("a", "b", "c"), len(ids))
    assert [(request.rid, request.seed) for request in outcome.generate] == [("a", 1), ("b", 2), ("c", 3)]
    for request in outcome.generate:
        assert unpack_ids(request.prompt_ids) == ids
        assert (request.group, request.sampling) == ("a", sampling)
        assert (request.namespace, request.tenant, request.priority) == ("space", "tenant", 4)
        assert (request.logprobs, request.prompt_logprobs_from, request.use_cache) == (2, 0, False)


def test_ids_are_passed_on_as_they_are() -> None:
    outcome = submit(IdsPrompt(pack_ids([5, 511, 0])))
    assert unpack_ids(outcome.generate[0].prompt_ids) == [5, 511, 0]
    assert outcome.answer == Tokenized(("r",), 3)


def test_a_chat_in_parts_shares_every_token_with_the_chat_in_one_string() -> None:
    parts = [{"type": "text", "text": "one "}, {"type": "text", "text": "two"}]
    assert submit(chat(parts)).generate == submit(chat("one two")).generate


def test_the_generation_prompt_can_be_left_out() -> None:
    messages = b'[{"role": "user", "content": "hi"}]'
    with_it = unpack_ids(submit(ChatPrompt(messages)).generate[0].prompt_ids)
    without = unpack_ids(submit(ChatPrompt(messages, add_generation_prompt=False)).generate[0].prompt_ids)
    assert with_it[: len(without)] == without
    assert len(with_it) > len(without)


def test_only_tokenizing_answers_with_the_ids() -> None:
    outcome = CORE.handle(TokenizeCall("t", TextPrompt("the tree")))
    ids = TOKENIZER.encode("the tree").ids
    assert outcome == Outcome(Tokenized(("t",), len(ids), pack_ids(ids)))
    longer = "tree " * (MAX_PROMPT_TOKENS + 1)
    answer = CORE.handle(TokenizeCall("t", TextPrompt(longer))).answer
    assert isinstance(answer, Tokenized)
    assert answer.prompt_tokens > MAX_PROMPT_TOKENS


@pytest.mark.parametrize("prompt", [TextPrompt(""), IdsPrompt(b"")])
def test_an_empty_prompt_is_refused(prompt: TextPrompt | IdsPrompt) -> None:
    answer = refused(prompt)
    assert (answer.status, answer.param, answer.code) == (400, "prompt", "empty_prompt")


def test_a_chat_that_renders_to_nothing_is_refused() -> None:
    answer = refused(chat("hi"), make_core(template="{# nothing #}"))
    assert (answer.status, answer.param, answer.code) == (400, "messages", "empty_prompt")


def test_an_empty_text_is_a_prompt_where_the_tokenizer_begins_every_text_with_a_token() -> None:
    core = make_core(encoder=Encoder(byte_level_with_start().to_str().encode()))
    assert unpack_ids(submit(TextPrompt(""), core).generate[0].prompt_ids) == [0]


@pytest.mark.parametrize("bad", [-1, 512, 2**31 - 1, -(2**31)])
def test_ids_outside_the_vocabulary_are_refused_by_value(bad: int) -> None:
    answer = refused(IdsPrompt(pack_ids([1, 2, bad, 3])))
    assert (answer.status, answer.param, answer.code) == (400, "prompt", "invalid_token_id")
    assert str(bad) in answer.message
    assert "512" in answer.message
    assert "position 2" in answer.message


@pytest.mark.parametrize("kind", ["text", "ids", "chat"])
def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(kind: str) -> None:
    prompts = {
        "text": TextPrompt("!" * (MAX_PROMPT_TOKENS + 1)),
        "ids": IdsPrompt(pack_ids([3] * (MAX_PROMPT_TOKENS + 1))),
        "chat": chat("!" * MAX_PROMPT_TOKENS),
    }
    answer = refused(prompts[kind])
    assert (answer.status, answer.code) == (400, "context_length_exceeded")
    assert answer.param == ("messages" if kind == "chat" else "prompt")
    assert f"{MAX_PROMPT_TOKENS} fit" in answer.message
    assert "maximum context length is 2048 tokens" in answer.message
    if kind != "chat":
        assert f"{MAX_PROMPT_TOKENS + 1} tokens" in answer.message


def test_the_longest_prompt_that_fits_is_taken() -> None:
    outcome = submit(TextPrompt("!" * MAX_PROMPT_TOKENS))
    assert outcome.answer == Tokenized(("r",), MAX_PROMPT_TOKENS)


class UnreadEncoder(Encoder):
    """An encoder that must not be asked."""

    def encode_text(self, text: str) -> list[int]:
        raise AssertionError("tokenized")

    encode_chat = encode_text


@pytest.mark.parametrize("wrap", [TextPrompt, chat])
def test_a_hopelessly_long_text_is_refused_unread(wrap: Any) -> None:
    core = make_core(encoder=UnreadEncoder(TOKENIZER.to_str().encode()))
    begin = time.monotonic()
    answer = refused(wrap("tree " * 2_000_000), core)
    assert answer.code == "context_length_exceeded"
    assert "at least" in answer.message
    call = core.handle(TokenizeCall("r", TextPrompt("tree " * 2_000_000))).answer
    assert isinstance(call, Rejected)
    assert time.monotonic() - begin < 60


def test_refusals_of_messages_and_templates_name_their_field() -> None:
    image = refused(chat("a", [{"type": "image_url", "image_url": {"url": "x"}}]))
    assert (image.status, image.param) == (400, "messages[1].content[0].type")
    told = refused(chat("a"), make_core(template="{{ raise_exception('no such role') }}"))
    assert (told.status, told.param) == (400, "messages")
    assert "no such role" in told.message


class BrokenEncoder(Encoder):
    """An encoder with a fault in it."""

    def encode_text(self, text: str) -> list[int]:
        raise RuntimeError("secret detail")


def test_a_fault_of_our_own_is_answered_and_does_not_end_the_process() -> None:
    answer = refused(TextPrompt("a"), make_core(encoder=BrokenEncoder(TOKENIZER.to_str().encode())))
    assert answer.status == 500
    assert "secret" not in answer.message


def test_ids_that_are_not_whole_numbers_of_bytes_are_a_fault_that_is_answered() -> None:
    assert refused(IdsPrompt(b"abc")).status == 500


def test_ids_that_the_model_does_not_have_are_refused_though_the_tokenizer_gives_them() -> None:
    facts = model_facts(None, vocab_size=100)  # type: ignore[arg-type]
    core = TokenizerCore(Encoder(TOKENIZER.to_str().encode()), ChatTemplate({}, {}), facts, MAX_PROMPT_TOKENS)
    assert refused(TextPrompt("the tree"), core).code == "invalid_token_id"
