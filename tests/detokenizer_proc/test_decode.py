"""Streamed text, joined, is the decoding of all tokens at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from detokenizer_proc.decode import MAX_HELD_TOKENS, ByteLevelDecoder, StreamDecoder, WindowDecoder
from detokenizer_proc.vocabulary import Vocabulary, vocabulary_of
from srt.tokenizer_file import parse_tokenizer_file
from tests.small_tokenizers import FAMILIES, byte_fallback, byte_level, byte_level_in_sequence
from tests.text_samples import all_lines, sample_lines


class Family:
    """A tokenizer with its stream decoder."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.vocabulary: Vocabulary = vocabulary_of(parse_tokenizer_file(tokenizer.to_str().encode()))

    def decoder(self, skip: bool = True, prompt: Sequence[int] = ()) -> StreamDecoder:
        if self.vocabulary.byte_level:
            return ByteLevelDecoder(self.vocabulary, skip)
        return WindowDecoder(
            lambda ids: self.tokenizer.decode(ids, skip_special_tokens=False), self.vocabulary, skip, prompt
        )

    def stream(self, ids: Sequence[int], skip: bool = True, prompt: Sequence[int] = ()) -> list[str]:
        decoder = self.decoder(skip, prompt)
        return [*(decoder.feed(token_id) for token_id in ids), decoder.finish()]

    def whole(self, ids: Sequence[int], skip: bool = True) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip)


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> Family:
    return Family(FAMILIES[request.param]())


@pytest.fixture(scope="module")
def real_family(any_real_model: Path) -> Family:
    return Family(Tokenizer.from_file(str(any_real_model / "tokenizer.json")))


def test_every_line_streamed_a_token_at_a_time_gives_the_whole(family: Family, shared_data: Path | None) -> None:
    for line in all_lines(shared_data):
        ids = family.tokenizer.encode(line).ids
        for skip in (True, False):
            assert "".join(family.stream(ids, skip)) == family.whole(ids, skip), line


@pytest.mark.real
def test_every_line_with_the_real_tokenizer(real_family: Family, shared_data: Path | None) -> None:
    for line in all_lines(shared_data):
        ids = real_family.tokenizer.encode(line).ids
        assert "".join(real_family.stream(ids)) == real_family.whole(ids)
        if "\ufffd" not in line and not set(line) & set("\x04\x06\x13\x14\x16\x1d"):
            assert "\ufffd" not in "".join(real_family.stream(ids))


def test_no_piece_of_whole_text_holds_a_replacement_character(family: Family) -> None:
    for line in sample_lines():
        ids = family.tokenizer.encode(line).ids
        if "\ufffd" not in family.whole(ids):
            assert not any("\ufffd" in piece for piece in family.stream(ids)), line


@settings(max_examples=300)
@given(data=st.data())
def test_any_ids_at_all_give_what_decoding_them_at_once_gives(family: Family, data: st.DataObject) -> None:
    """Broken characters, special tokens, ids that no token has: all as in the whole."""
    size = family.tokenizer.get_vocab_size()
    byte_ids = [token_id for token_id in range(size) if len(family.vocabulary.token_bytes(token_id)) == 1]
    some_id = st.one_of(st.integers(0, size + 3), st.sampled_from(byte_ids or [0]))
    ids = data.draw(st.lists(some_id, max_size=MAX_HELD_TOKENS - 1))
    skip = data.draw(st.booleans())
    assert "".join(family.stream(ids, skip)) == family.whole(ids, skip)


@given(data=st.data())
def test_with_a_prompt_before_it_the_text_is_what_the_output_adds(family: Family, data: st.DataObject) -> None:
    texts = st.text(alphabet="ab é你🌳.,", min_size=1, max_size=12)
    prompt = family.tokenizer.encode(data.draw(texts) + "a").ids
    output = family.tokenizer.encode(data.draw(texts), add_special_tokens=False).ids
    # A tail of hidden tokens alone cannot tell whether words stand before it.
    assume(family.whole(prompt[-6:]))
    if family.vocabulary.byte_level:
        expected = family.whole(output)
    else:
        expected = family.whole([*prompt, *output])[len(family.whole(prompt)) :]
    assert "".join(family.stream(output, prompt=prompt[-6:])) == expected


def test_an_output_after_a_word_keeps_its_leading_space() -> None:
    family = Family(byte_fallback())
    prompt = family.tokenizer.encode("The capital of France is").ids
    whole = family.tokenizer.encode("The capital of France is water").ids
    assert "".join(family.stream(whole[len(prompt) :], prompt=prompt)) == " water"


@pytest.mark.parametrize("make", [byte_level, byte_level_in_sequence, byte_fallback])
def test_a_prompt_that_ends_inside_a_character_is_never_repeated(make: object) -> None:
    family = Family(make())  # type: ignore[operator]
    ids = family.tokenizer.encode("Good day to you 🐙").ids
    head, rest = ids[:-1], ids[-1:]
    assert family.whole(head).endswith("\ufffd")
    output = [*rest, *family.tokenizer.encode("a").ids]
    assert "".join(family.stream(output, prompt=head)) == family.whole(output)
    assert family.whole(output).startswith("\ufffd")


def test_a_special_token_first_does_not_bring_the_prompt_back(family: Family) -> None:
    prompt = family.tokenizer.encode("the water of a tree").ids
    special = next(iter(sorted(family.vocabulary.special)))
    shown = family.vocabulary.token_bytes(special).decode()
    assert "".join(family.stream([special], skip=True, prompt=prompt)) == ""
    assert "".join(family.stream([special], skip=False, prompt=prompt)).strip() == shown


def test_a_broken_character_waits_for_its_end_and_then_shows() -> None:
    family = Family(byte_level())
    first, second = (family.tokenizer.token_to_id(character) for character in ("ð", "Ł"))
    decoder = family.decoder()
    assert [decoder.feed(first), decoder.feed(second)] == ["", ""]
    assert decoder.held_tokens == 2
    assert decoder.finish() == "\ufffd"
    assert decoder.held_tokens == 0


def test_held_tokens_are_those_of_the_unfinished_character() -> None:
    family = Family(byte_level())
    decoder = family.decoder()
    held = []
    for token_id in family.tokenizer.encode("a🌳b").ids:
        decoder.feed(token_id)
        held.append(decoder.held_tokens)
    assert held == [0, 1, 2, 3, 0, 0]


def test_a_hidden_token_inside_a_character_waits_with_it() -> None:
    family = Family(byte_level())
    decoder = family.decoder()
    first, second, third, last = (family.tokenizer.token_to_id(character) for character in "ðŁĮ³")
    held = []
    for token_id in (1, first, 1, second, third, last, 1):
        decoder.feed(token_id)
        held.append(decoder.held_tokens)
    assert held == [0, 1, 2, 3, 4, 0, 0]


def test_text_after_characters_that_were_given_up_is_complete() -> None:
    """Broken beginnings are given out in the end; what then follows is not cut, whatever it makes of them."""
    family = Family(byte_level_in_sequence())
    first, second, third, last = (family.tokenizer.token_to_id(character) for character in "ðŁĮ³")
    after = family.tokenizer.encode("and so on 🌳").ids
    text = "".join(family.stream([*[first] * MAX_HELD_TOKENS, second, third, last, *after]))
    assert text.lstrip("\ufffd") == "and so on 🌳"
    assert len(text) >= MAX_HELD_TOKENS


def test_a_run_of_byte_tokens_is_not_held_for_ever() -> None:
    """A text all of characters that are spelled in bytes comes out in whole characters, without an end of the run."""
    family = Family(byte_fallback())
    text = "你好世界" * 40
    ids = family.tokenizer.encode(text, add_special_tokens=False).ids[1:]  # without the mark of a word's beginning
    decoder = family.decoder()
    pieces, longest = [], 0
    for token_id in ids:
        pieces.append(decoder.feed(token_id))
        longest = max(longest, decoder.held_tokens)
    assert longest < MAX_HELD_TOKENS
    assert "".join(pieces) == text
    assert decoder.finish() == ""


def test_a_broken_run_of_byte_tokens_comes_out_as_replacement_characters() -> None:
    family = Family(byte_fallback())
    broken = family.tokenizer.token_to_id("<0xFF>")
    pieces = family.stream([broken] * 200)
    assert "".join(pieces) == "\ufffd" * 200
    assert any(pieces[:MAX_HELD_TOKENS])


def test_real_replacement_characters_are_text_like_any_other() -> None:
    family = Family(byte_level())
    ids = family.tokenizer.encode("a\ufffd\ufffdb\ufffd").ids
    assert "".join(family.stream(ids)) == "a\ufffd\ufffdb\ufffd"
