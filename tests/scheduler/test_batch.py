"""Plans of steps that go on like the step before are those that would be made from nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from scheduler import batch
from scheduler.batch import Batch, build_plan
from srt.plan import Plan
from tests.scheduler.bench import Bench
from tests.scheduler.oracle import generate


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_plan_like_the_last_one_is_the_plan(page_size: int, overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(pages=400 // page_size, page_size=page_size, overlap=overlap)
    alike = 0

    def checked(step: int, last: Plan, decoding: list[Any]) -> Plan:
        nonlocal alike
        alike += 1
        expected = build_plan(step, page_size, Batch(decoding, []), [], [], [])
        plan = next_plan(step, last, decoding)
        for name in Plan.__dataclass_fields__:
            np.testing.assert_array_equal(getattr(plan, name), getattr(expected, name), name)
            if isinstance(getattr(plan, name), np.ndarray):
                assert getattr(plan, name).dtype == getattr(expected, name).dtype
        return plan

    next_plan = batch.next_plan
    monkeypatch.setattr(batch, "next_plan", checked)
    lengths = {"a": 40, "b": 23, "c": 31}
    for rid, length in lengths.items():
        bench.send(rid, [ord(rid)] * (5 + ord(rid) % 7), length)
    for _ in range(12):
        bench.step()
        bench.core.check()
    # Who comes in a calm is served as well.
    bench.send("d", [9] * 6, 7)
    bench.run()
    assert alike > 15
    for rid, length in lengths.items():
        assert bench.streams[rid].ids == generate([ord(rid)] * (5 + ord(rid) % 7), length)
    assert bench.streams["d"].ids == generate([9] * 6, 7)
    bench.assert_whole()


def test_a_calm_ends_when_the_pool_is_dry_and_somebody_has_to_make_room() -> None:
    bench = Bench(pages=16, page_size=4, rows=3, context=64, use_cache=False)
    bench.core.growth.mean_tokens = 1.0
    for rid in "abc":
        bench.send(rid, [ord(rid)] * 6, 30)
    bench.run()
    assert bench.core.totals.retractions > 0
    for rid in "abc":
        assert bench.streams[rid].ids == generate([ord(rid)] * 6, 30)
    bench.assert_whole()
