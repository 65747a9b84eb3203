"""Stop strings are found as in searching the whole text, however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detokenizer_proc.stops import StopMatch, StopMatcher


def search_whole(text: str, stops: list[str]) -> StopMatch | None:
    """The match that begins first, and of those the shortest."""
    found = [(text.find(stop), len(stop), stop) for stop in stops if stop in text]
    if not found:
        return None
    start, size, stop = min(found)
    return StopMatch(start, start + size, stop)


def run(pieces: list[str], stops: list[str]) -> tuple[StopMatch | None, list[int]]:
    """Feed the pieces; the match, and how much was safe to show after each piece."""
    matcher, safe = StopMatcher(tuple(stops)), []
    for piece in pieces:
        match = matcher.feed(piece)
        if match is not None:
            return match, safe
        safe.append(matcher.safe)
    return matcher.finish(), safe


small_text = st.text(alphabet="abc", max_size=24)
small_stops = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> list[str]:
    text = draw(small_text)
    borders = sorted(draw(st.sets(st.integers(0, len(text)), max_size=6)))
    return [text[begin:end] for begin, end in zip([0, *borders], [*borders, len(text)], strict=True)]


@given(cut_texts(), small_stops)
def test_the_match_is_that_of_searching_the_whole_text(pieces: list[str], stops: list[str]) -> None:
    match, _ = run(pieces, stops)
    assert match == search_whole("".join(pieces), stops)


@given(cut_texts(), small_stops)
def test_nothing_of_a_match_is_ever_safe_to_show(pieces: list[str], stops: list[str]) -> None:
    match, safe = run(pieces, stops)
    assert safe == sorted(safe)
    if match is not None:
        assert all(offset <= match.start for offset in safe)


@given(cut_texts(), small_stops)
def test_only_the_beginning_of_a_stop_string_is_held_back(pieces: list[str], stops: list[str]) -> None:
    _, safe = run(pieces, stops)
    for count, offset in enumerate(safe, start=1):
        text = "".join(pieces[:count])
        held = text[offset:]
        beginnings = (stop[:size] for stop in stops for size in range(1, len(stop)))
        matched_inside = search_whole(text, stops) is not None
        assert held == "" or matched_inside or held in beginnings
        # And nothing longer needed to be held: every earlier place has failed already.
        assert not any(stop.startswith(text[start:]) for stop in stops for start in range(offset))


@given(small_text, small_stops)
def test_the_match_is_known_with_the_character_that_decides_it(text: str, stops: list[str]) -> None:
    match, _ = run(list(text), stops)
    if match is None:
        return
    matcher = StopMatcher(tuple(stops))
    decided = next((place for place, character in enumerate(text) if matcher.feed(character)), len(text))
    # Any later than its end only because a longer stop string that began before it was still possible.
    for end in range(match.end, min(decided, len(text))):
        open_ends = (text[start:end] for start in range(match.start))
        assert any(stop.startswith(tail) and len(tail) < len(stop) for tail in open_ends for stop in stops)


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("green tea.Milk", ["a.M"], StopMatch(8, 11, "a.M")),
        ("green tea", ["green"], StopMatch(0, 5, "green")),
        ("xabcx", ["abc", "ab"], StopMatch(1, 3, "ab")),
        ("xabcx", ["ab", "abc"], StopMatch(1, 3, "ab")),
        ("xabcdx", ["bc", "abcd"], StopMatch(1, 5, "abcd")),
        ("xabcex", ["bc", "abcd"], StopMatch(2, 4, "bc")),
        ("later first", ["first", "later"], StopMatch(0, 5, "later")),
        ("aaab", ["aab"], StopMatch(1, 4, "aab")),
        ("a\nb\n\nc", ["\n\n###"], None),
        ("anything", [], None),
        ("anything", [""], None),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_known_cases(text: str, stops: list[str], expected: StopMatch | None, size: int) -> None:
    pieces = [text[place : place + size] for place in range(0, len(text), size)]
    assert run(pieces, stops)[0] == expected


def test_a_long_stop_string_against_a_text_that_nearly_matches_everywhere() -> None:
    stop = "a" * 2000 + "b"
    matcher = StopMatcher((stop,))
    assert matcher.feed("a" * 50_000) is None
    assert matcher.safe == 48_000
    assert matcher.feed("b") == StopMatch(48_000, 50_001, stop)
