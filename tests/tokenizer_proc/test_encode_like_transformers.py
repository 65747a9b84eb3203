"""Prompts have the ids that the `transformers` library gives for the same text or chat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from srt.messages import ChatPrompt, IdsPrompt, SamplingParams, Submit, TextPrompt, unpack_ids
from tests.small_tokenizers import byte_fallback, byte_level, byte_level_with_start, save_tokenizer
from tests.text_samples import all_lines
from tests.worker_harness import model_facts
from tokenizer_proc.core import TokenizerCore
from tokenizer_proc.encode import load_encoder
from tokenizer_proc.template import load_chat_template

# Writes the start token itself, as the templates of models with one do.
STARTED_CHAT = (
    "{{ bos_token }}{% for message in messages %}[{{ message.role }}] {{ message.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
TOKENIZERS = {
    "byte level": (byte_level, {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}),
    "byte level with start": (byte_level_with_start, {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}),
    "byte fallback": (byte_fallback, {"bos_token": "<s>", "eos_token": "</s>"}),
}


class Pair:
    """Our core and the reference, over one model folder."""

    def __init__(self, folder: Path) -> None:
        self.reference: Any = AutoTokenizer.from_pretrained(folder)
        facts = model_facts(folder, context_length=1_000_000, vocab_size=len(self.reference))
        self.core = TokenizerCore(load_encoder(folder), load_chat_template(folder, None), facts, 999_999)

    def ids(self, prompt: TextPrompt | ChatPrompt | IdsPrompt) -> list[int]:
        outcome = self.core.handle(Submit(("r",), prompt, SamplingParams(), (0,)))
        assert outcome.generate, outcome.answer
        return unpack_ids(outcome.generate[0].prompt_ids)

    def check_text(self, text: str) -> None:
        assert self.ids(TextPrompt(text)) == self.reference(text)["input_ids"], text

    def check_chat(self, messages: list[dict[str, Any]], **variables: Any) -> None:
        prompt = ChatPrompt(json.dumps(messages).encode(), json.dumps(variables).encode())
        expected = self.reference.apply_chat_template(messages, add_generation_prompt=True, **variables)
        assert self.ids(prompt) == expected["input_ids"]
        # And the same chat, rendered by the client and sent as text, shares every token.
        rendered = self.reference.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, **variables)
        assert self.ids(TextPrompt(rendered)) == expected["input_ids"]


@pytest.fixture(scope="module", params=list(TOKENIZERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    make, tokens = TOKENIZERS[request.param]
    folder = tmp_path_factory.mktemp("model") / "m"
    return Pair(save_tokenizer(make(), folder, chat_template=STARTED_CHAT, **tokens))


@pytest.fixture(scope="module")
def real_pair(any_real_model: Path) -> Pair:
    return Pair(any_real_model)


def chats(test_data: Path, shared_data: Path | None) -> Iterator[list[dict[str, Any]]]:
    for line in (test_data / "chat_prompts.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)["messages"]
    if shared_data is not None:
        for line in (shared_data / "chat" / "mt_bench_question.jsonl").read_text(encoding="utf-8").splitlines():
            turns = json.loads(line)["turns"]
            yield [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": turns[0]},
                {"role": "assistant", "content": "I see."},
                {"role": "user", "content": turns[-1]},
            ]


def texts(test_data: Path, shared_data: Path | None) -> Iterator[str]:
    yield from (line for line in all_lines(shared_data) if line)
    if shared_data is not None:
        for line in (shared_data / "gsm8k" / "test.jsonl").read_text(encoding="utf-8").splitlines():
            yield json.loads(line)["question"]


def test_texts(pair: Pair, test_data: Path) -> None:
    for text in texts(test_data, None):
        pair.check_text(text)


def test_chats(pair: Pair, test_data: Path) -> None:
    for messages in chats(test_data, None):
        pair.check_chat(messages)
    pair.check_chat([{"role": "user", "content": "🌳 你好 <b>&'"}], tools=[{"type": "function"}], extra=[1, None])


@pytest.mark.real
def test_texts_with_the_real_tokenizer(real_pair: Pair, test_data: Path, shared_data: Path | None) -> None:
    for text in texts(test_data, shared_data):
        # Text of only such characters as the vocabulary has no token for is an empty prompt.
        if real_pair.reference(text)["input_ids"]:
            real_pair.check_text(text)


@pytest.mark.real
def test_chats_with_the_real_tokenizer(real_pair: Pair, test_data: Path, shared_data: Path | None) -> None:
    for messages in chats(test_data, shared_data):
        real_pair.check_chat(messages)


@pytest.mark.real
def test_digits_stand_alone_in_the_real_tokenizer(real_model: Path) -> None:
    """Its vocabulary was learned with every digit on its own, so white space before a number is not cut for it."""
    pair = Pair(real_model)
    ids = pair.ids(TextPrompt("x  2/5"))
    assert pair.reference.convert_ids_to_tokens(ids) == ["x", "ĠĠ", "2", "/", "5"]


def test_a_start_token_is_there_once(pair: Pair) -> None:
    start = pair.reference.bos_token_id
    ids = pair.ids(ChatPrompt(b'[{"role": "user", "content": "hi"}]'))
    assert ids.count(start) == 1
    text_ids = pair.ids(TextPrompt(pair.reference.bos_token + "hi"))
    assert text_ids.count(start) == 1


def test_settings_for_training_in_the_file_do_not_cut_or_pad_prompts(tmp_path: Path) -> None:
    tokenizer = byte_level()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    encoder = load_encoder(save_tokenizer(tokenizer, tmp_path / "m"))
    plain = byte_level().encode("a rather long text, longer than four").ids
    assert encoder.encode_text("a rather long text, longer than four") == plain
