"""Many requests side by side: each ends once, and nothing of it is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srt.messages import Finish, StepOutput, StreamOpen, TokenDelta, TokenLogprob, pack_ids
from tests.detokenizer_proc.streams import make_core, stream
from tests.small_tokenizers import byte_level

TOKENIZER = byte_level()


def ids(text: str) -> bytes:
    return pack_ids(TOKENIZER.encode(text).ids)


def test_requests_in_one_step_do_not_touch_each_other() -> None:
    core = make_core(TOKENIZER)
    texts = {"one": "the tree 🌳", "two": "你好 world", "three": "a"}
    tokens = {rid: TOKENIZER.encode(text).ids for rid, text in texts.items()}
    got = dict.fromkeys(texts, "")
    for step in range(max(map(len, tokens.values()))):
        deltas = tuple(
            TokenDelta(
                rid,
                pack_ids(all_ids[step : step + 1]),
                StreamOpen(b"") if step == 0 else None,
                Finish("length") if step == len(all_ids) - 1 else None,
            )
            for rid, all_ids in tokens.items()
            if step < len(all_ids)
        )
        output, _ = core.step(StepOutput(deltas))
        assert [delta.rid for delta in output.deltas] == [delta.rid for delta in deltas]
        for delta in output.deltas:
            got[delta.rid] += delta.text
    assert got == texts
    assert core.num_streams == 0


def test_what_follows_a_stop_string_is_dropped_until_the_scheduler_has_ended_the_request() -> None:
    core = make_core(TOKENIZER)
    opening = TokenDelta("r", ids("a STOP b"), StreamOpen(b"", stop=("STOP",)))
    output, stops = core.step(StepOutput((opening,)))
    assert output.deltas[0].text == "a "
    assert len(stops) == 1
    assert (core.num_streams, core.num_remembered_ends) == (0, 1)
    for _ in range(3):
        later, stops = core.step(StepOutput((TokenDelta("r", ids("more")),)))
        assert (later.deltas, stops) == ((), [])
    last, stops = core.step(StepOutput((TokenDelta("r", finish=Finish("stop", "STOP")),)))
    assert (last.deltas, stops, core.num_remembered_ends, core.dropped) == ((), [], 0, 0)


def test_requests_that_nobody_opened_are_dropped_and_counted() -> None:
    core = make_core(TOKENIZER)
    output, stops = core.step(StepOutput((TokenDelta("gone", ids("a")), TokenDelta("gone", finish=Finish("length")))))
    assert (output.deltas, stops, core.dropped, core.num_streams) == ((), [], 2, 0)


def test_remembered_ends_are_bounded() -> None:
    core = make_core(TOKENIZER, max_remembered_ends=10)
    for number in range(100):
        core.step(StepOutput((TokenDelta(f"r{number}", ids("a."), StreamOpen(b"", stop=(".",))),)))
    assert (core.num_streams, core.num_remembered_ends) == (0, 10)


def test_too_many_open_requests_cost_the_one_that_is_silent_longest_with_a_last_word() -> None:
    core = make_core(TOKENIZER, max_streams=2)
    for rid in ("old", "busy"):
        core.step(StepOutput((TokenDelta(rid, ids("a"), StreamOpen(b"")),)))
    core.step(StepOutput((TokenDelta("old", ids("b")),)))
    output, _ = core.step(StepOutput((TokenDelta("new", ids("c"), StreamOpen(b"")),)))
    lost = [delta for delta in output.deltas if delta.finish is not None]
    assert [(delta.rid, delta.finish.reason) for delta in lost if delta.finish] == [("busy", "error")]
    assert core.num_streams == 2


@pytest.mark.parametrize("broken", [{"ids": b"abc"}, {"ids": pack_ids([5, 6]), "logprobs": (TokenLogprob(5, -1.0),)}])
def test_a_broken_delta_ends_its_own_request_alone(broken: dict[str, object]) -> None:
    core = make_core(TOKENIZER)
    core.step(StepOutput((TokenDelta("bad", ids("a"), StreamOpen(b"")), TokenDelta("good", ids("a"), StreamOpen(b"")))))
    bad = TokenDelta("bad", **broken)  # type: ignore[arg-type]
    output, stops = core.step(StepOutput((bad, TokenDelta("good", ids("b")))))
    assert [(delta.rid, delta.finish and delta.finish.reason) for delta in output.deltas] == [
        ("bad", "error"),
        ("good", None),
    ]
    assert [stop.rid for stop in stops] == ["bad"]
    assert core.num_streams == 1


@given(st.lists(st.tuples(st.sampled_from(["a.b", "tree", "x.", "🌳.🌳"]), st.integers(1, 3)), max_size=8))
def test_every_request_ends_once_and_leaves_nothing(requests: list[tuple[str, int]]) -> None:
    core = make_core(TOKENIZER)
    for number, (text, at_once) in enumerate(requests):
        shown = stream(core, TOKENIZER.encode(text).ids, rid=f"r{number}", stop=(".",), at_once=at_once)
        assert sum(delta.finish is not None for delta in shown.deltas) == 1
    assert (core.num_streams, core.num_remembered_ends, core.dropped) == (0, 0, 0)


def test_tokens_that_come_in_columns_are_those_of_deltas() -> None:
    core = make_core(TOKENIZER)
    core.step(StepOutput(tuple(TokenDelta(rid, ids("a"), StreamOpen(b"")) for rid in ("x", "y"))))
    last = TokenDelta("x", ids("d"), finish=Finish("length"))
    output, _ = core.step(StepOutput((last,), ("x", "y", "x"), ids("b") + ids("e") + ids("c")))
    assert [(delta.rid, delta.text) for delta in output.deltas] == [("x", "b"), ("y", "e"), ("x", "c"), ("x", "d")]
    assert [delta.completion_tokens for delta in output.deltas] == [2, 2, 3, 4]
    assert core.num_streams == 1


@given(
    st.lists(st.integers(-1, TOKENIZER.get_vocab_size() + 1), max_size=30),
    st.sampled_from([(), ("e",), ("tree",)]),
    st.booleans(),
)
def test_a_column_says_what_deltas_say_whatever_the_tokens_are(
    tokens: list[int], stop: tuple[str, ...], skip_special_tokens: bool
) -> None:
    by_column, by_deltas = make_core(TOKENIZER), make_core(TOKENIZER)
    opening = TokenDelta("r", ids("a"), StreamOpen(b"", stop, skip_special_tokens))
    assert by_column.step(StepOutput((opening,))) == by_deltas.step(StepOutput((opening,)))
    for token in tokens:
        packed = pack_ids([token])
        assert by_column.step(StepOutput((), ("r",), packed)) == by_deltas.step(StepOutput((TokenDelta("r", packed),)))
    last = StepOutput((TokenDelta("r", ids("b"), finish=Finish("length")),))
    assert by_column.step(last) == by_deltas.step(last)
