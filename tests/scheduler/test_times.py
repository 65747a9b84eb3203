"""Where a request's time goes, and how much is computed for it."""

from __future__ import annotations

import pytest

from scheduler.times import Times
from srt.messages import RequestTimes
from tests.scheduler.bench import Bench


def test_each_second_is_of_one_part() -> None:
    times = Times(10.0)
    times.admitted(12.0)
    times.retracted(15.0)
    times.admitted(20.0)
    times.first_token(21.0)
    times.first_token(22.0)
    times.retracted(30.0)
    times.admitted(37.0)
    assert times.report(2, 5) == RequestTimes(queue=2.0, prefill=4.0, preempted=12.0, retractions=2, scheduled_tokens=5)


def told(bench: Bench, rid: str) -> list[RequestTimes]:
    """The accounts that came with a request's outputs."""
    return [delta.times for delta in bench.streams[rid].deltas if delta.times is not None]


def run(bench: Bench) -> None:
    """A step a second; a hundredth of it passes before the step is planned."""
    while not bench.core.idle:
        bench.step()
        bench.now += 0.99
        assert bench.now < 1000.0


def test_an_account_comes_with_the_first_output_and_with_the_last() -> None:
    bench = Bench(step_tokens=8, overlap=False)
    bench.send("a", list(range(100, 120)), 6)
    bench.now = 3.0
    run(bench)
    first, last = told(bench, "a")
    # Chunks of 8, 8 and 4 tokens; each is committed in the moment in which it was planned.  The token sampled last is
    # never computed.
    for times, scheduled in ((first, 20), (last, 25)):
        assert (times.queue, times.prefill) == pytest.approx((3.01, 2.0))
        assert (times.preempted, times.retractions, times.scheduled_tokens) == (0.0, 0, scheduled)
    bench.send("b", list(range(100, 120)), 2)
    run(bench)
    assert bench.streams["b"].cached_tokens == 19
    assert [times.scheduled_tokens for times in told(bench, "b")] == [1, 2]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_retraction_shows_in_the_accounts_that_follow_it(overlap: bool) -> None:
    bench = Bench(pages=14, page_size=4, context=60, use_cache=False, overlap=overlap)
    bench.core.growth.mean_tokens = 1.0
    for index in range(4):
        bench.send(f"r{index}", [index + 3] * 9, 20)
    run(bench)
    lasts = [told(bench, f"r{index}")[-1] for index in range(4)]
    assert sum(times.retractions for times in lasts) == bench.core.totals.retractions > 0
    for times in lasts:
        assert (times.preempted > 0.0) == (times.retractions > 0)
        # Without a cache everything is computed again.
        assert (times.scheduled_tokens > 9 + 20 - 1) == (times.retractions > 0)
    # A row that a step computed for a request that had ended in the step before is nobody's.
    assert sum(times.scheduled_tokens for times in lasts) == bench.core.totals.computed_tokens
    hit = next(index for index, times in enumerate(lasts) if times.retractions)
    assert len(told(bench, f"r{hit}")) == 2 + lasts[hit].retractions
