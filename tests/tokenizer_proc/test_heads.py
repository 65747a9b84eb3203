"""A prompt gets the tokens that it gets without any memory, whatever was tokenized before."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, normalizers, pre_tokenizers

from tests.small_tokenizers import byte_fallback, byte_level, byte_level_with_start
from tokenizer_proc.encode import SPLITS_BETWEEN_WORDS, Encoder
from tokenizer_proc.heads import KnownHeads
from tokenizer_proc.history import block_digests

REPOSITORY = Path(__file__).resolve().parents[2]


def with_pattern(numbers: str) -> Tokenizer:
    """Qwen's and Llama 3's way to part a text, without a start token."""
    (pattern,) = (known for known in SPLITS_BETWEEN_WORDS if f"|{numbers}|" in known)
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


FAMILIES = {
    "GPT-2": byte_level,
    "Qwen": lambda: with_pattern(r"\p{N}"),
    "Llama 3": lambda: with_pattern(r"\p{N}{1,3}"),
}
ENCODERS = {name: Encoder(make().to_str().encode()) for name, make in FAMILIES.items()}

WORDS = ["the tree and ", "the", " tree", "'s", "it's a ", "12 34", ". A", "a b", "_", "x" * 300]
SPACES = [" ", "  ", "\n", "\n\n ", "\t"]
OTHERS = ["é", "e\u0301", " e\u0301 a", "\u0958 e\u0301\u0301", "🌳", "你好", "<|endoftext|>", "\u00a0a", "ſ t"]
FRAGMENTS = st.sampled_from([*WORDS, *SPACES, *OTHERS])
TEXTS = st.lists(FRAGMENTS, max_size=60).map("".join)


@settings(deadline=None)
@given(st.sampled_from(sorted(ENCODERS)), TEXTS, st.lists(st.tuples(st.integers(0, 2000), TEXTS), max_size=6))
def test_prompts_that_begin_alike_get_their_own_tokens(family: str, first: str, more: list[tuple[int, str]]) -> None:
    encoder = ENCODERS[family]
    heads = KnownHeads(encoder, max_bytes=5000)
    first *= 3
    for text in (first, *(first[:kept] + rest for kept, rest in more), first):
        digests = block_digests("", text)
        assert heads.encode(digests, text, encoder.encode_text, keep=True) == encoder.encode_text(text)
        assert heads.bytes <= 5000


def counting(encoder: Encoder, seen: list[int]) -> Callable[[str], list[int]]:
    def encode(text: str) -> list[int]:
        seen.append(len(text))
        return encoder.encode_text(text)

    return encode


def test_a_head_is_tokenized_once() -> None:
    encoder = ENCODERS["GPT-2"]
    heads, seen = KnownHeads(encoder), []
    head = "the cat sat on a tree and looked at it " * 100
    for tail in ("one", "two", "three"):
        heads.encode(block_digests("", head + tail), head + tail, counting(encoder, seen), keep=True)
    assert seen[0] == len(head) + 3
    assert max(seen[1:]) < 300


def test_what_is_not_to_be_kept_is_not() -> None:
    encoder = ENCODERS["GPT-2"]
    heads, text = KnownHeads(encoder), "the cat sat " * 100
    heads.encode(block_digests("", text), text, encoder.encode_text, keep=False)
    assert heads.bytes == 0


def with_added(token: AddedToken) -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([token])
    return tokenizer


def with_prefix_space() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    return tokenizer


def with_whole_text() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return tokenizer


def lower_case() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        byte_fallback,
        byte_level_with_start,
        with_prefix_space,
        with_whole_text,
        lower_case,
        lambda: with_added(AddedToken("of the")),
        lambda: with_added(AddedToken("end ")),
        lambda: with_added(AddedToken("<x>", rstrip=True)),
    ],
)
def test_tokenizers_that_may_join_words_are_asked_for_the_whole(make: Callable[[], Tokenizer]) -> None:
    assert not Encoder(make().to_str().encode()).parts_between_words


@pytest.mark.real
def test_real_prompts_get_their_own_tokens(real_model: Path) -> None:
    encoder = Encoder((real_model / "tokenizer.json").read_bytes())
    assert encoder.parts_between_words
    heads = KnownHeads(encoder)
    texts = [
        path.read_text() for path in (REPOSITORY / "README.md", REPOSITORY / "docs" / "protocol.md", Path(__file__))
    ]
    texts += [json.dumps(text) for text in texts]
    for text in texts:
        for kept in (20_000, 15_000, 15_001, 19_000, 20_000):
            prompt = text[:kept] + text[:137]
            digests = block_digests("", prompt)
            assert heads.encode(digests, prompt, encoder.encode_text, keep=True) == encoder.encode_text(prompt)
