"""How the scheduler's core divides a step between running streams and new prompts."""

from __future__ import annotations

from srt.plan import Plan
from tests.scheduler.bench import Bench, prompt_of
from tests.scheduler.oracle import generate


def test_decode_rows_come_first_and_a_long_prompt_is_cut_into_chunks() -> None:
    bench = Bench(pages=200, step_tokens=16, context=400)
    bench.send("chat", prompt_of(8), 40)
    for _ in range(4):
        bench.step()
    bench.send("long", prompt_of(150, 1000), 2)
    before = len(bench.oracle.plans)
    bench.run()
    chunked = [plan for plan in bench.oracle.plans[before:] if plan.num_tokens > 2]
    assert len(chunked) >= 150 // 15
    for plan in chunked[:-1]:
        assert plan.qo_indptr[1] == 1, "the stream's row is there, and first"
    assert bench.streams["long"].ids == generate(prompt_of(150, 1000), 2)


def test_prefill_leaves_room_for_the_pace_of_running_streams() -> None:
    bench = Bench(pages=400, page_size=4, step_tokens=128, context=900)
    bench.core.pace.target_seconds = 0.010

    def seconds(plan: Plan) -> float:
        return 0.004 + 0.0001 * plan.num_tokens

    bench.oracle.seconds = seconds
    bench.send("stream", prompt_of(8), 300)
    bench.send("warm-up", prompt_of(100, 500), 20)
    for _ in range(20):
        bench.step()
    before = len(bench.oracle.plans)
    bench.send("long", prompt_of(600, 2000), 2)
    bench.run()
    mixed = [plan for plan in bench.oracle.plans[before:] if plan.num_tokens > plan.num_rows]
    assert max(seconds(plan) for plan in mixed) < 0.0115
    assert 10 <= len(mixed) <= 20, "the target is used up, not undercut"


def test_without_a_stream_to_protect_prefill_takes_the_whole_step() -> None:
    bench = Bench(pages=400, page_size=4, step_tokens=128, context=900)
    bench.core.pace.target_seconds = 0.001
    bench.send("warm-up", prompt_of(10, 500), 20)
    bench.run()
    bench.send("long", prompt_of(600, 2000), 2)
    before = len(bench.oracle.plans)
    bench.run()
    assert [plan.num_tokens for plan in bench.oracle.plans[before:]][:4] == [128] * 4


def test_a_pace_that_cannot_be_held_still_lets_prompts_advance() -> None:
    bench = Bench(pages=400, page_size=4, step_tokens=128, context=900)
    bench.core.pace.target_seconds = 0.0001
    bench.send("stream", prompt_of(8), 200)
    for _ in range(12):
        bench.step()
    bench.send("long", prompt_of(300, 2000), 2)
    bench.run()
    assert bench.streams["long"].reason == "length"
