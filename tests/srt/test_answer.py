"""The handle on an answer: merging, ending, failing, leaving early."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from srt.answer import Answer, Ask, RequestFailed, merge_deltas
from srt.messages import Finish, RequestTimes, TextDelta, TextPrompt, TokenLogprob, pack_ids

Run = Callable[[Any], Any]


def make_answer(n: int = 1) -> Answer:
    return Answer(Ask(TextPrompt("p"), n=n), tuple(f"r{i}" for i in range(n)), clock=lambda: 0.0)


def delta(rid: str, text: str, count: int, finish: Finish | None = None, **more: Any) -> TextDelta:
    return TextDelta(rid=rid, text=text, ids=pack_ids(range(count)), completion_tokens=count, finish=finish, **more)


async def read_all(answer: Answer) -> list[tuple[int, TextDelta]]:
    return [item async for item in answer]


@given(st.lists(st.tuples(st.text(), st.lists(st.integers(0, 100), max_size=4)), min_size=1, max_size=8))
def test_a_merged_delta_says_what_its_parts_say(parts: list[tuple[str, list[int]]]) -> None:
    deltas, total = [], 0
    for index, (text, ids) in enumerate(parts):
        total += len(ids)
        finish = Finish("stop") if index == len(parts) - 1 else None
        logprobs = tuple(TokenLogprob(i, -1.0) for i in ids)
        deltas.append(TextDelta("r", text, pack_ids(ids), finish, 7, 3, total, logprobs))
    merged = merge_deltas(deltas)
    assert merged.text == "".join(text for text, _ in parts)
    assert merged.ids == pack_ids(i for _, ids in parts for i in ids)
    assert [item.id for item in merged.logprobs] == [i for _, ids in parts for i in ids]
    assert (merged.finish, merged.prompt_tokens, merged.cached_tokens) == (Finish("stop"), 7, 3)
    assert merged.completion_tokens == total


def test_a_slow_reader_finds_everything_merged_into_one_delta_per_sample(run: Run) -> None:
    async def scenario() -> None:
        answer = make_answer(n=2)
        for count in range(1, 1001):
            for index in (0, 1):
                finish = Finish("length") if count == 1000 else None
                answer.deliver(index, TextDelta(f"r{index}", "ab", pack_ids([count]), finish, 1, 0, count))
        items = await read_all(answer)
        assert [(index, item.text, item.completion_tokens) for index, item in items] == [
            (0, "ab" * 1000, 1000),
            (1, "ab" * 1000, 1000),
        ]

    run(scenario())


def test_samples_take_turns_when_the_reader_is_slower_than_one_of_them(run: Run) -> None:
    async def scenario() -> None:
        answer = make_answer(n=2)
        answer.deliver(0, delta("r0", "a", 1))
        answer.deliver(1, delta("r1", "x", 1))
        reader = answer.__aiter__()
        assert (await anext(reader))[0] == 0
        answer.deliver(0, delta("r0", "b", 2))
        assert (await anext(reader))[0] == 1
        answer.abort()

    run(scenario())


def test_a_failure_comes_after_the_text_that_came_before_it(run: Run) -> None:
    async def scenario() -> None:
        answer = make_answer()
        answer.deliver(0, delta("r0", "so far", 1))
        answer.fail(RequestFailed(503, "gone"))
        reader = answer.__aiter__()
        assert (await anext(reader))[1].text == "so far"
        with pytest.raises(RequestFailed, match="gone"):
            await anext(reader)

    run(scenario())


def test_an_error_of_one_sample_fails_the_answer_and_ends_the_other_sample(run: Run) -> None:
    async def scenario() -> None:
        answer = make_answer(n=2)
        ended: list[tuple[str, ...]] = []
        answer.on_end = lambda _, running: ended.append(running)
        answer.deliver(1, delta("r1", "x", 1, Finish("error", message="not finite")))
        assert ended == [("r0",)]
        with pytest.raises(RequestFailed) as caught:
            await read_all(answer)
        assert (caught.value.status, caught.value.message) == (500, "not finite")
        assert answer.summary().finish_reasons == ("error", "error")

    run(scenario())


def test_abort_ends_what_runs_with_finish_reason_abort_and_leaves_what_has_ended_alone(run: Run) -> None:
    async def scenario() -> None:
        answer = make_answer(n=2)
        ended: list[tuple[str, ...]] = []
        answer.on_end = lambda _, running: ended.append(running)
        answer.deliver(0, delta("r0", "done", 4, Finish("stop")))
        answer.deliver(1, delta("r1", "half", 2))
        answer.abort()
        answer.abort()
        answer.deliver(1, delta("r1", "late", 3, Finish("length")))
        assert ended == [("r1",)]
        items = await read_all(answer)
        assert [(item.text, item.finish and item.finish.reason) for _, item in items] == [
            ("done", "stop"),
            ("half", "abort"),
        ]
        assert answer.summary().finish_reasons == ("stop", "abort")

    run(scenario())


def test_abort_after_the_end_changes_nothing(run: Run) -> None:
    async def scenario() -> None:
        answer = make_answer()
        answer.deliver(0, delta("r0", "all", 3, Finish("stop")))
        answer.abort()
        assert answer.summary().finish_reasons == ("stop",)
        assert (await answer.collect())[0].text == "all"

    run(scenario())


@pytest.mark.parametrize("way", ["break", "cancel", "aclose"])
def test_leaving_the_iteration_early_aborts(run: Run, way: str) -> None:
    async def scenario() -> None:
        answer = make_answer()
        ended: list[tuple[str, ...]] = []
        answer.on_end = lambda _, running: ended.append(running)
        answer.deliver(0, delta("r0", "a", 1))
        if way == "break":
            async for _ in answer:
                break
        elif way == "cancel":
            task = asyncio.create_task(read_all(answer))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            reader = answer.__aiter__()
            await anext(reader)
            await reader.aclose()  # type: ignore[attr-defined]
        for _ in range(10):
            await asyncio.sleep(0)
        assert ended == [("r0",)]

    run(scenario())


def test_cached_tokens_of_a_call_are_the_smallest_over_its_samples() -> None:
    answer = make_answer(n=3)
    for index, cached in enumerate((0, 96, 96)):
        answer.deliver(index, delta(f"r{index}", "x", 1, Finish("length"), prompt_tokens=100, cached_tokens=cached))
    end = answer.summary()
    assert (end.prompt_tokens, end.cached_tokens, end.completion_tokens) == (100, 0, 3)


def test_times_of_a_request_are_told_from_its_first_token_and_the_gaps_after_it() -> None:
    times = iter([10.0, 11.0, 11.5, 12.5, 12.5])
    answer = Answer(Ask(TextPrompt("p")), ("r0",), clock=lambda: next(times))
    answer.deliver(0, delta("r0", "a", 1, times=RequestTimes(queue=0.4)))
    answer.deliver(0, delta("r0", "", 1))
    answer.deliver(0, delta("r0", "bcd", 4, Finish("stop")))
    end = answer.summary()
    assert (end.ttft, end.queue_seconds, end.e2e_seconds) == (1.0, 0.4, 2.5)
    assert end.gaps == ((1.5, 3),)
