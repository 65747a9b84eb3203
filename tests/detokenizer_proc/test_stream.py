"""What a client is shown: text, stop strings, counts and logprobs, from the first token to the finish."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from detokenizer_proc.core import DetokenizerCore
from srt.messages import Finish
from tests.detokenizer_proc.streams import Shown, make_core, stream
from tests.small_tokenizers import FAMILIES, byte_fallback, byte_level
from tests.text_samples import sample_lines


class Model:
    """A tokenizer and a core for it."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.core: DetokenizerCore = make_core(tokenizer)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def id(self, token: str) -> int:
        return self.tokenizer.token_to_id(token)


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(byte_level())


@pytest.fixture(scope="module")
def real(real_model: Path) -> Model:
    return Model(Tokenizer.from_file(str(real_model / "tokenizer.json")))


def check_sums(shown: Shown, logprobs: bool) -> None:
    """Ids, count and logprobs of all deltas agree, at every time."""
    count = 0
    for delta in shown.deltas:
        count += len(delta.ids) // 4
        assert delta.completion_tokens == count
        if logprobs:
            assert len(delta.logprobs) * 4 == len(delta.ids)
    assert [delta.finish for delta in shown.deltas[:-1]] == [None] * (len(shown.deltas) - 1)
    if logprobs:
        assert [entry.id for entry in shown.logprobs] == shown.ids


@pytest.mark.parametrize("family", list(FAMILIES))
@pytest.mark.parametrize("at_once", [1, 3, 1000])
def test_all_text_comes_through_a_stop_string_that_never_completes(family: str, at_once: int) -> None:
    model = Model(FAMILIES[family]())
    for line in sample_lines():
        ids = model.ids(line)
        if not ids:
            continue
        shown = stream(model.core, ids, stop=("\ue000", line + "\ue000", line[-3:] + "x"), at_once=at_once)
        assert shown.text == model.tokenizer.decode(ids)
        assert shown.ids == ids
        check_sums(shown, logprobs=False)
    assert model.core.num_streams == 0


def naive_cut(text: str, stop: str) -> str:
    return text[: text.find(stop)] if stop in text else text


def check_every_cut(model: Model, line: str) -> None:
    """Every stop string of up to four characters that the text has, from every place in it."""
    ids = model.ids(line)
    text = model.tokenizer.decode(ids)
    for start in range(len(text)):
        for size in (1, 2, 4):
            stop = text[start : start + size]
            shown = stream(model.core, ids, stop=(stop,))
            assert shown.text == naive_cut(text, stop), stop
            assert shown.finish == Finish("stop", stop)
            end = text.find(stop) + len(stop)
            tokens = next(k for k in range(1, len(ids) + 1) if len(whole_characters(model, ids[:k])) >= end)
            assert shown.completion_tokens == tokens
            assert [found.output_tokens for found in shown.stops] == [tokens]
            check_sums(shown, logprobs=False)


def whole_characters(model: Model, ids: list[int]) -> str:
    """The text of some tokens without a character that is not finished."""
    return model.tokenizer.decode(ids).rstrip("\ufffd")


@pytest.mark.parametrize(
    "line", ["green tea.Milk, 12 trees🌳", "the other one, otherwise the others", "你好\n\n\nworld"]
)
def test_stop_strings_at_every_place_of_a_text(model: Model, line: str) -> None:
    check_every_cut(model, line)


@pytest.mark.real
@pytest.mark.parametrize(
    "line", ["green tea.Milk, 12 trees🌳 of one two three", "naïve façade 你好 👩‍👩‍👧‍👦!\n\n###\nend"]
)
def test_stop_strings_at_every_place_with_the_real_tokenizer(real: Model, line: str) -> None:
    check_every_cut(real, line)


@settings(max_examples=200)
@given(
    text=st.text(alphabet="ab c🌳é", max_size=20),
    stops=st.lists(st.text(alphabet="ab c🌳é", min_size=1, max_size=4), max_size=3),
    at_once=st.integers(1, 4),
    untrimmed=st.booleans(),
)
def test_the_text_is_that_of_searching_the_whole(
    model: Model, text: str, stops: list[str], at_once: int, untrimmed: bool
) -> None:
    ids = model.ids(text)
    shown = stream(model.core, ids, stop=tuple(stops), at_once=at_once, no_stop_trim=untrimmed, logprobs=True)
    found = [(text.find(stop), len(stop)) for stop in stops if stop in text]
    if found:
        start, size = min(found)
        assert shown.text == text[: start + size if untrimmed else start]
        assert shown.finish == Finish("stop", text[start : start + size])
    else:
        assert shown.text == text
        assert shown.finish == Finish("length")
    check_sums(shown, logprobs=True)
    assert model.core.num_streams == model.core.num_remembered_ends == 0


def test_a_client_never_sees_a_part_of_a_stop_string(model: Model) -> None:
    shown = stream(model.core, model.ids("one two three four five six"), stop=(" three four five",))
    assert shown.text == "one two"
    assert "".join(shown.pieces[:-1]) == "one two"
    assert shown.finish == Finish("stop", " three four five")
    everything = stream(model.core, model.ids("one two three four five six"), stop=(" three four 5",))
    assert everything.text == "one two three four five six"


def test_text_held_for_a_stop_string_that_fails_is_shown_at_once_when_it_fails(model: Model) -> None:
    shown = stream(model.core, model.ids("a\nb\n\nc"), stop=("\n\n###",))
    assert shown.text == "a\nb\n\nc"
    streamed = stream(model.core, model.ids("x\ny"), stop=("\n\n",))
    assert streamed.pieces == ["x", "", "\ny"]


def test_overlapping_stops_and_a_stop_at_the_very_start(model: Model) -> None:
    assert stream(model.core, model.ids("green tea"), stop=("green",)).text == ""
    assert stream(model.core, model.ids("xabcd"), stop=("abc", "ab")).finish == Finish("stop", "ab")


@pytest.mark.parametrize("finish", [Finish("stop", matched=2), Finish("length")])
def test_a_stop_string_comes_before_eos_and_length_in_the_same_step(model: Model, finish: Finish) -> None:
    ids = [*model.ids("all is said."), 2]
    shown = stream(model.core, ids, stop=("said.",), finish=finish, trailing_stop=finish.reason == "stop", at_once=100)
    assert shown.text == "all is "
    assert shown.finish == Finish("stop", "said.")
    assert shown.completion_tokens == len(ids) - 1
    assert model.core.num_remembered_ends == 0


def test_the_token_that_ended_the_output_is_counted_but_not_shown(model: Model) -> None:
    newline = model.ids("\n")
    ids = [*model.ids("a"), *newline]
    shown = stream(model.core, ids, finish=Finish("stop", newline[0]), trailing_stop=True, logprobs=True)
    assert shown.text == "a"
    assert shown.ids == ids
    assert shown.completion_tokens == 2
    check_sums(shown, logprobs=True)
    untrimmed = stream(model.core, ids, finish=Finish("stop", newline[0]), trailing_stop=True, no_stop_trim=True)
    assert untrimmed.text == "a\n"


def test_eos_is_shown_only_to_those_who_want_special_tokens_and_the_stop(model: Model) -> None:
    ids = [*model.ids("a"), 2]
    for skip in (True, False):
        for untrimmed in (True, False):
            shown = stream(
                model.core,
                ids,
                finish=Finish("stop", 2),
                trailing_stop=True,
                skip_special_tokens=skip,
                no_stop_trim=untrimmed,
            )
            assert shown.text == ("a<|im_end|>" if untrimmed and not skip else "a")


def test_special_tokens_in_the_output_are_skipped_or_shown_once(model: Model) -> None:
    ids = [1, *model.ids("a"), 2]
    assert stream(model.core, ids, prompt_tail=model.ids("before")).text == "a"
    assert stream(model.core, ids, skip_special_tokens=False).text == "<|im_start|>a<|im_end|>"


def test_a_broken_character_at_the_finish_shows_as_the_whole_decode_shows_it(model: Model) -> None:
    ids = model.ids("a🌳")[:-1]
    shown = stream(model.core, ids, logprobs=True)
    assert shown.text == model.tokenizer.decode(ids) == "a\ufffd"
    check_sums(shown, logprobs=True)
    with_eos = stream(model.core, [*ids, 2], finish=Finish("stop", 2), trailing_stop=True)
    assert with_eos.text == "a\ufffd"


def test_logprobs_wait_for_the_text_of_their_tokens(model: Model) -> None:
    shown = stream(model.core, model.ids("x🌳y zz"), stop=(" zzz",), logprobs=True)
    check_sums(shown, logprobs=True)
    joined = b"".join(entry.token for entry in shown.logprobs)
    assert joined.decode() == shown.text == "x🌳y zz"
    for delta in shown.deltas:
        assert b"".join(entry.token for entry in delta.logprobs).decode() == delta.text


def test_logprobs_bear_the_bytes_of_tokens_and_of_their_alternatives(model: Model) -> None:
    entry = stream(model.core, model.ids("🌳"), logprobs=True).logprobs[0]
    assert (entry.token, entry.top_tokens) == (b"\xf0", (b"\xf0", b"!"))
    assert model.id("!") == 3
    fallback = Model(byte_fallback())
    entries = stream(fallback.core, [1, *fallback.ids("the 🌳")], logprobs=True).logprobs
    assert b"".join(entry.token for entry in entries) == "<s> the 🌳".encode()


def test_logprobs_and_ids_end_with_the_stop_string(model: Model) -> None:
    """A longer stop that began earlier was still possible, so later tokens had come in before the stop was certain."""
    ids = model.ids("x") + [model.id(character) for character in "abcz"]
    shown = stream(model.core, ids, stop=("bc", "abcd"), logprobs=True)
    assert shown.text == "xa"
    assert shown.finish == Finish("stop", "bc")
    assert shown.completion_tokens == 4
    assert shown.stops[0].output_tokens == 4
    check_sums(shown, logprobs=True)


@pytest.mark.parametrize("at_once", [1, 100])
def test_a_stop_string_that_waited_for_a_longer_one_ends_the_output_at_the_finish(model: Model, at_once: int) -> None:
    ids = [*(model.id(character) for character in "xabc"), 2]
    shown = stream(
        model.core,
        ids,
        stop=("bc", "abcd"),
        finish=Finish("stop", 2),
        trailing_stop=True,
        at_once=at_once,
        logprobs=True,
    )
    assert (shown.text, shown.finish, shown.completion_tokens) == ("xa", Finish("stop", "bc"), 4)
    check_sums(shown, logprobs=True)


def test_a_delta_without_tokens_ends_a_request(model: Model) -> None:
    shown = stream(model.core, [], finish=Finish("abort", message="cancelled"))
    assert (shown.text, shown.completion_tokens, shown.finish) == ("", 0, Finish("abort", message="cancelled"))


def test_numbers_of_the_first_delta_are_passed_on(model: Model) -> None:
    assert stream(model.core, model.ids("a b")).deltas[0].prompt_tokens == 7
