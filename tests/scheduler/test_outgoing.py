"""What clients are told, and in how many pieces."""

from __future__ import annotations

import pytest

from scheduler.events import Tokens
from scheduler.request import Status
from srt.messages import TokenDelta, unpack_ids
from tests.scheduler.bench import Bench
from tests.scheduler.oracle import generate, message


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("interval", [1, 2, 3, 100])
def test_the_first_token_goes_at_once_and_the_others_so_many_together(interval: int, overlap: bool) -> None:
    bench = Bench(stream_interval=interval, overlap=overlap)
    for index in range(3):
        bench.send(f"r{index}", [index + 5] * (3 + index), 10)
    bench.run()
    for index in range(3):
        stream = bench.streams[f"r{index}"]
        assert stream.ids == generate([index + 5] * (3 + index), 10)
        sizes = [len(unpack_ids(delta.ids)) for delta in stream.deltas]
        assert sizes[0] == 1
        assert all(size == interval for size in sizes[1:-1])
        assert 1 <= sizes[-1] <= interval


def test_tokens_of_requests_with_nothing_else_to_say_go_as_two_columns() -> None:
    bench = Bench()
    for rid in ("a", "b", "c"):
        bench.core.accept(message(rid, [ord(rid)] * 5, 5, logprobs=0 if rid == "c" else None), 0.0)
    steps = []
    while not bench.core.idle:
        plan = bench.core.plan(0.0)
        assert plan is not None
        bench.core.commit(bench.oracle.launch(plan).wait(), 0.0)
        steps.append(bench.core.take_events())
    opening, *middle, last = steps
    assert [type(event) for event in opening] == [TokenDelta] * 3
    for place, (columns, delta) in enumerate(middle, 1):
        assert isinstance(columns, Tokens)
        assert columns.rids == ["a", "b"]
        assert columns.ids.tolist() == [generate([ord(rid)] * 5, 5)[place] for rid in "ab"]
        assert isinstance(delta, TokenDelta)
        assert (delta.rid, len(delta.logprobs)) == ("c", 1)
    assert [event.finish is not None for event in last if isinstance(event, TokenDelta)] == [True] * 3


def test_a_retracted_request_tells_what_it_has_when_it_runs_again_and_loses_nothing() -> None:
    bench = Bench(pages=14, page_size=4, rows=4, stream_interval=4, context=60)
    bench.core.growth.mean_tokens = 1.0
    prompts = {f"r{index}": [index + 3] * 9 for index in range(4)}
    for rid, prompt in prompts.items():
        bench.send(rid, prompt, 20)
    bench.run()
    assert bench.core.totals.retractions > 0
    for rid, prompt in prompts.items():
        assert bench.streams[rid].ids == generate(prompt, 20)


def test_an_abort_brings_the_tokens_that_were_not_sent_yet() -> None:
    bench = Bench(stream_interval=100)
    bench.send("a", [1, 2, 3], 50)
    for _ in range(8):
        bench.step()
    (request,) = bench.core._running
    assert request.status is Status.DECODING
    outputs = request.num_outputs
    bench.abort("a")
    assert bench.streams["a"].ids == generate([1, 2, 3], 50)[:outputs]
    assert bench.streams["a"].reason == "abort"
