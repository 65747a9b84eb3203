"""The cheap bound on the number of tokens is never above the truth."""

from __future__ import annotations

import functools
import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from srt.tokenizer_file import parse_tokenizer_file
from tests.small_tokenizers import byte_fallback, byte_level, metaspace, word_piece
from tests.text_samples import all_lines
from tokenizer_proc.bound import TokenBound, token_bound
from tokenizer_proc.encode import Encoder, load_encoder


def bound_of(tokenizer: Tokenizer) -> TokenBound | None:
    return token_bound(parse_tokenizer_file(tokenizer.to_str().encode()))


def without_tokens(tokenizer: Tokenizer, missing: str) -> Tokenizer:
    """The tokenizer without some characters of its vocabulary, and without the merges that need them."""
    spec: dict[str, Any] = json.loads(tokenizer.to_str())
    model = spec["model"]
    model["vocab"] = {token: i for token, i in model["vocab"].items() if not set(token) & set(missing)}
    model["merges"] = [pair for pair in model["merges"] if not set("".join(pair)) & set(missing)]
    return Tokenizer.from_str(json.dumps(spec))


def normalized(tokenizer: Tokenizer, *steps: Any) -> Tokenizer:
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


def one_token_for_four_characters(form: Any) -> Tokenizer:
    """No token is spelled with more than three characters, and one of them is a letter with three accents."""
    spec: dict[str, Any] = json.loads(byte_level().to_str())
    vocabulary = [token for token in spec["model"]["vocab"] if len(token) == 1] + ["á¾", "á¾Ĥ"]
    spec["model"]["vocab"] = {token: place for place, token in enumerate(vocabulary)}
    spec["model"]["merges"] = [["á", "¾"], ["á¾", "Ĥ"]]
    spec["added_tokens"] = []
    return normalized(Tokenizer.from_str(json.dumps(spec)), form)


BOUNDED = {
    "byte level": byte_level,
    "byte fallback": byte_fallback,
    "without control characters": lambda: without_tokens(byte_level(), "ĀāĂ"),
    "composing": lambda: normalized(byte_level(), normalizers.NFC()),
    "composing compatible": lambda: normalized(byte_level(), normalizers.NFKC()),
    "composing to one token": lambda: one_token_for_four_characters(normalizers.NFC()),
    "composing compatible to one token": lambda: one_token_for_four_characters(normalizers.NFKC()),
    "decomposing": lambda: normalized(byte_level(), normalizers.NFD(), normalizers.NFKD()),
}


@functools.cache
def bounded(name: str) -> tuple[Tokenizer, TokenBound]:
    tokenizer = BOUNDED[name]()
    bound = bound_of(tokenizer)
    assert bound is not None
    return tokenizer, bound


@pytest.mark.parametrize("name", list(BOUNDED))
@settings(max_examples=150)
@given(
    text=st.one_of(
        st.text(max_size=60),
        st.text(alphabet="ab \n\x00\x01\u0301\u0345\u1f82\ufdfa\u1100\u1161\u11a8🌳<", max_size=60),
        st.sampled_from([" ", "the ", "\x00", "<|im_start|>", "\u1f82", "\ufdfa"]).map(lambda piece: piece * 40),
    )
)
def test_a_text_has_at_least_as_many_tokens_as_the_bound_says(name: str, text: str) -> None:
    tokenizer, bound = bounded(name)
    for form in (text, unicodedata.normalize("NFD", text)):
        assert len(tokenizer.encode(form, add_special_tokens=False).ids) >= bound.min_tokens(form)


def test_it_is_tight_for_the_longest_token() -> None:
    tokenizer = byte_level()
    bound = bound_of(tokenizer)
    assert bound is not None
    longest = max(tokenizer.get_vocab(), key=len)
    assert bound.max_characters == len(longest)
    assert bound.min_tokens("a" * 10 * len(longest)) == 10


@pytest.mark.real
def test_the_real_tokenizer_has_a_bound_and_keeps_it(real_model: Path, shared_data: Path | None) -> None:
    encoder = load_encoder(real_model)
    assert encoder.bound is not None
    assert encoder.bound.max_characters == 81
    for text in [*all_lines(shared_data), " " * 1000, "=" * 1000, "\x04" * 1000, "\U00040000" * 100]:
        assert len(encoder.encode_text(text)) >= encoder.min_tokens(text)


def greedy_token() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def dropping_split() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


@pytest.mark.parametrize(
    "make",
    [
        metaspace,
        word_piece,
        greedy_token,
        dropping_split,
        lambda: normalized(byte_level(), normalizers.Strip()),
        lambda: normalized(byte_level(), normalizers.Replace("aa", "a")),
        lambda: without_tokens(byte_level(), "Ģ"),
    ],
)
def test_there_is_no_bound_where_characters_can_vanish_without_limit(make: Any) -> None:
    tokenizer = make()
    assert bound_of(tokenizer) is None
    assert Encoder(tokenizer.to_str().encode()).min_tokens("a" * 1000) == 0
