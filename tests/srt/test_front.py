"""The front over fake workers: asking, streaming, refusing, aborting, draining."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from srt.front import Ask, Front, RequestEnd, RequestFailed
from srt.messages import ChatPrompt, IdsPrompt, SamplingParams, TextPrompt
from tests.srt.fakes import fake_command, fake_front, fake_resolved, until

Run = Callable[[Any], Any]

pytestmark = pytest.mark.usefixtures("run_base")


def ask(text: str, tokens: int | None = 10, n: int = 1, seed: int | None = None) -> Ask:
    return Ask(TextPrompt(text), SamplingParams(max_new_tokens=tokens), n=n, seed=seed)


async def texts_of(front: Front, asked: Ask) -> list[str]:
    return [sample.text for sample in await front.ask(asked).collect()]


def test_text_streams_in_order_until_every_sample_has_ended(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            texts, finished = ["", ""], []
            answer = front.ask(ask("hello ", 200, n=2))
            async for index, delta in answer:
                texts[index] += delta.text
                if delta.finish is not None:
                    finished.append((index, delta.finish.reason, delta.completion_tokens))
            assert texts == [("hello " * 40)[:200]] * 2
            assert sorted(finished) == [(0, "length", 200), (1, "length", 200)]
            assert (answer.prompt_tokens, answer.cached_tokens, answer.completion_tokens) == (6, 2, 400)
            assert front.status().requests == 0

    run(scenario())


def test_many_asks_at_once_get_each_its_own_text(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front(tokenizer_workers=3) as front:
            words = [f"word{i} " for i in range(60)]
            texts = await asyncio.gather(*(texts_of(front, ask(word, len(word))) for word in words))
            assert [text for (text,) in texts] == words

    run(scenario())


def test_a_reader_that_does_not_read_holds_nobody_up(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            unread = front.ask(ask("unread", None))
            assert await texts_of(front, ask("other", 5)) == ["other"]
            await until(lambda: unread.completion_tokens > 300)
            reader = unread.__aiter__()
            _, delta = await anext(reader)
            assert delta.completion_tokens > 300
            assert delta.text.startswith("unreadunread")
            unread.abort()

    run(scenario())


def test_a_refused_prompt_raises_what_the_tokenizer_said_and_leaves_nothing(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            with pytest.raises(RequestFailed) as caught:
                await front.ask(ask("refuse this", n=3)).collect()
            failure = caught.value
            assert (failure.status, failure.param, failure.code) == (400, "prompt", "refused")
            assert (failure.message, failure.retry_after) == ("'refuse this' is refused", None)
            assert front.status().requests == 0
            assert (await front.fresh_stats()).aborts == 0

    run(scenario())


def test_a_full_queue_is_told_with_the_time_to_wait(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            with pytest.raises(RequestFailed) as caught:
                await front.ask(ask("busy")).collect()
            assert (caught.value.status, caught.value.code) == (503, "queue_full")
            assert caught.value.retry_after is not None

    run(scenario())


def test_an_error_in_the_model_ends_that_request_alone(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            neighbour = asyncio.create_task(texts_of(front, ask("neighbour", 9)))
            with pytest.raises(RequestFailed, match="not finite") as caught:
                await front.ask(ask("model fails")).collect()
            assert caught.value.status == 500
            assert await neighbour == ["neighbour"]

    run(scenario())


def test_aborting_ends_every_sample_in_the_scheduler(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            answer = front.ask(ask("for ever", None, n=4))
            async for _ in answer:
                break
            await until(lambda: answer.ended)

            async def nothing_runs() -> bool:
                stats = await front.fresh_stats()
                return stats.running == 0 and stats.aborts == 4

            await until(nothing_runs)

    run(scenario())


def test_an_abort_that_comes_before_the_request_reaches_the_scheduler_still_ends_it(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            answer = front.ask(ask("for ever", None))
            answer.abort()
            (delta,) = await answer.collect()
            assert delta.finish is not None
            assert delta.finish.reason == "abort"

            async def nothing_runs() -> bool:
                stats = await front.fresh_stats()
                return stats.running == 0 and stats.aborts == 1

            await until(nothing_runs)

    run(scenario())


def test_abort_of_a_finished_request_is_not_sent(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            answer = front.ask(ask("short", 3))
            await answer.collect()
            for _ in range(50):
                answer.abort()
            assert (await front.fresh_stats()).aborts == 0
            assert answer.summary().finish_reasons == ("length",)

    run(scenario())


def test_samples_have_consecutive_seeds_and_a_seed_repeats(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            assert await texts_of(front, ask("seed", 2, n=3, seed=41)) == ["41", "42", "43"]
            assert await texts_of(front, ask("seed", 1, n=2, seed=2**63 - 1)) == ["9", "0"]
            assert await texts_of(front, ask("seed", 19, seed=-1)) == [str(2**63 - 1)]

    run(scenario())


def test_without_a_seed_every_ask_draws_one_and_a_random_seed_repeats_the_row(run: Run) -> None:
    async def row(**settings: Any) -> list[str]:
        async with fake_front(**settings) as front:
            return [text for _ in range(4) for text in await texts_of(front, ask("seed", 8))]

    first, second = run(row()), run(row())
    assert len(set(first + second)) == 8
    assert run(row(random_seed=5)) == run(row(random_seed=5))
    assert run(row(random_seed=5)) != run(row(random_seed=6))


def test_tokenize_gives_ids_and_refuses_as_ask_does(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            assert await front.tokenize(TextPrompt("ab")) == [97, 98]
            with pytest.raises(RequestFailed, match="is refused"):
                await front.tokenize(TextPrompt("refuse"))

    run(scenario())


def test_flush_is_answered_with_why_not_while_requests_run(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            assert (await front.flush_cache()).ok
            answer = front.ask(ask("for ever", None))
            await anext(answer.__aiter__())
            reply = await front.flush_cache()
            assert (reply.ok, reply.message) == (False, "requests are running")
            answer.abort()

    run(scenario())


def test_observers_are_told_once_of_every_end(run: Run) -> None:
    async def scenario() -> None:
        ends: list[RequestEnd] = []
        async with fake_front() as front:
            front.observers.append(ends.append)
            await front.ask(ask("four", 4)).collect()
            aborted = front.ask(ask("for ever", None))
            await anext(aborted.__aiter__())
            aborted.abort()
            with pytest.raises(RequestFailed):
                await front.ask(ask("refuse")).collect()
        assert [end.finish_reasons for end in ends] == [("length",), ("abort",), ("error",)]
        assert (ends[0].prompt_tokens, ends[0].cached_tokens, ends[0].completion_tokens) == (4, 2, 4)
        assert ends[0].ttft is not None
        assert ends[0].ttft <= ends[0].e2e_seconds
        assert sum(tokens for _, tokens in ends[0].gaps) == 3
        assert ends[2].failure is not None
        assert ends[2].failure.status == 400

    run(scenario())


def test_an_observer_that_raises_harms_nobody(run: Run, caplog: pytest.LogCaptureFixture) -> None:
    def broken(end: RequestEnd) -> None:
        raise ValueError("broken observer")

    async def scenario() -> None:
        ends: list[RequestEnd] = []
        async with fake_front() as front:
            front.observers += [broken, ends.append]
            assert await texts_of(front, ask("abc", 3)) == ["abc"]
            assert len(ends) == 1

    with caplog.at_level(logging.ERROR):
        run(scenario())
    assert "an observer failed" in caplog.text


BROKEN_ASKS = [
    (Ask(TextPrompt("\ud800 hi")), 400, "prompt"),
    (Ask(IdsPrompt(b"123")), 400, "input_ids"),
    (Ask(ChatPrompt(b" " * (65 * 2**20))), 413, "prompt"),
    (Ask(TextPrompt("x"), n=0), 400, "n"),
    (Ask(TextPrompt("x"), n=2**63), 400, "n"),
    (Ask(TextPrompt("x"), SamplingParams(temperature=float("nan"))), 400, "temperature"),
    (Ask(TextPrompt("x"), SamplingParams(stop=("\udfff",))), 400, "stop"),
    (Ask(TextPrompt("x"), namespace="\ud800"), 400, "namespace"),
    (Ask(TextPrompt("x"), tenant="t" * 1000), 400, "tenant"),
    (Ask(TextPrompt("x"), priority=2**80), 400, "priority"),
    (Ask(TextPrompt("x"), logprobs=-1), 400, "top_logprobs"),
    (Ask(TextPrompt("x"), prompt_logprobs_from=2**90), 400, "logprob_start_len"),
]


def test_what_can_cross_no_border_is_refused_at_once() -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            for broken, status, param in BROKEN_ASKS:
                with pytest.raises(RequestFailed) as caught:
                    front.ask(broken)
                assert (caught.value.status, caught.value.param) == (status, param)
            assert front.status().requests == 0
            assert await texts_of(front, ask("whole", 5)) == ["whole"]

    asyncio.run(scenario())


def test_draining_refuses_new_asks_and_lets_those_that_run_finish(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            running = asyncio.create_task(texts_of(front, ask("running ", 400)))
            await until(lambda: front.status().requests == 1)
            drained = asyncio.create_task(front.drain(60.0))
            await until(lambda: front.status().state == "draining")
            with pytest.raises(RequestFailed) as caught:
                front.ask(ask("too late"))
            assert (caught.value.status, caught.value.code) == (503, "shutting_down")
            assert await running == ["running " * 50]
            assert await drained
            assert not front.healthy

    run(scenario())


def test_draining_gives_up_when_its_time_is_over(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            answer = front.ask(ask("for ever", None))
            assert not await front.drain(0.05)
            assert not answer.ended
            front.end_all("out of time")
            with pytest.raises(RequestFailed, match="out of time"):
                await answer.collect()
            assert await front.drain(0.0)

    run(scenario())


def test_stopping_ends_streams_with_an_error_and_waits_for_replies_too(run: Run) -> None:
    async def scenario() -> None:
        front = Front(fake_resolved(), fake_command)
        await front.start()
        stream = asyncio.create_task(texts_of(front, ask("for ever", None)))
        call = asyncio.create_task(front.tokenize(TextPrompt("tokenizer sleeps")))
        await until(lambda: front.status().requests == 1)
        await front.stop()
        await front.stop()
        for task in (stream, call):
            with pytest.raises(RequestFailed) as caught:
                await task
            assert (caught.value.status, caught.value.code) == (503, "shutting_down")
        assert front.status().state == "stopped"
        with pytest.raises(RequestFailed):
            front.ask(ask("after the end"))

    run(scenario())


def test_status_can_be_told_as_json_in_every_state(run: Run) -> None:
    async def scenario() -> None:
        front = Front(fake_resolved(tokenizer_workers=2), fake_command)
        assert msgspec.json.encode(front.status()) == b'{"state":"starting","workers":{},"requests":0}'
        await front.start()
        assert front.healthy
        assert front.status().workers == dict.fromkeys(("scheduler", "tokenizer-0", "tokenizer-1", "detokenizer"), "up")
        await front.stop()
        assert front.status().state == "stopped"

    run(scenario())


def test_what_was_said_after_a_prompt_is_told_to_every_tokenizer(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front(tokenizer_workers=3) as front:
            asked = Ask(TextPrompt("abc"), SamplingParams(max_new_tokens=4), n=2, namespace="mine")
            await front.ask(asked).collect()
            await front.ask(ask("forget this", 3)).collect()
            unread = front.ask(ask("stop me", None))
            await until(lambda: unread.completion_tokens > 20)
            unread.abort()
            said = unread.outputs()[0][0]
            for _ in range(6):
                found = "".join(map(chr, await front.tokenize(TextPrompt("recall"))))
                assert found == f"abc:mine:abca:abca abc:mine:abca:abca stop me::{said}:{said}"
            with pytest.raises(RequestFailed):
                await front.ask(ask("model fails ", 10)).collect()
            assert "model" not in "".join(map(chr, await front.tokenize(TextPrompt("recall"))))

    run(scenario())


def test_the_tree_is_asked_of_the_scheduler_and_comes_by_way_of_the_detokenizer(run: Run) -> None:
    async def scenario() -> None:
        async with fake_front() as front:
            trees = await asyncio.gather(*(front.cache_tree("me", depth, 7) for depth in range(5)))
            assert [tree.nodes[0].tokens for tree in trees] == list(range(5))
            assert {(tree.nodes[0].namespace, tree.nodes[0].pages) for tree in trees} == {("me", 7)}
            with pytest.raises(RequestFailed) as caught:
                await front.cache_tree("detokenizer dies", 1, 1)
            assert (caught.value.status, caught.value.code) == (503, "worker_died")

    run(scenario())
