"""Pins and `no_store` in the scheduler: what requests leave behind, and who gives way to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from srt.cache_messages import CacheReport, PinReport, PinWish
from tests.scheduler.bench import Bench
from tests.scheduler.oracle import generate

PAGE = 4


def report(bench: Bench, rid: str) -> CacheReport:
    opened = bench.streams[rid].deltas[0].open
    assert opened is not None
    assert opened.cache_report is not None
    return opened.cache_report


def ask(bench: Bench, rid: str, prompt: list[int], max_new: int = 3, **fields: Any) -> list[int]:
    """Run a request to its end; its output, which is checked."""
    bench.send(rid, prompt, max_new, **fields)
    bench.run()
    assert bench.streams[rid].ids == generate(prompt, max_new)
    return bench.streams[rid].ids


def flood(bench: Bench, count: int = 6, tokens: int = 12 * PAGE) -> None:
    """Other requests, one after the other, that need most of the pool."""
    for number in range(count):
        ask(bench, f"flood{bench.now}", [40 + number] * tokens)


def test_a_pinned_prefix_is_still_there_after_a_flood() -> None:
    bench = Bench(pages=16, page_size=PAGE)
    prompt = list(range(10))
    ask(bench, "a", prompt, pins=(PinWish(60.0, 8), PinWish(30.0, 10)))
    assert report(bench, "a").pins == (PinReport(8, 8, 60.0), PinReport(10, 8, 30.0, "page_border"))
    flood(bench)
    ask(bench, "b", [*prompt, 11])
    assert report(bench, "b").cached_tokens == 8
    stats = bench.core.stats(bench.now)
    assert (stats.pins, stats.pages_pinned, stats.pins_yielded) == (1, 2, 0)
    assert stats.pages_in_use == 0
    assert stats.pages_free + stats.pages_cached == stats.pages_total
    bench.now += 100
    bench.step()
    assert bench.core.stats(bench.now).pages_pinned == 0
    flood(bench)
    ask(bench, "c", [*prompt, 11])
    assert report(bench, "c").reason == "evicted"
    bench.assert_whole()


def test_a_use_renews_a_pin() -> None:
    bench = Bench(pages=16, page_size=PAGE)
    prompt = list(range(8))
    ask(bench, "a", prompt, pins=(PinWish(10.0, 8),))
    for number in range(4):
        bench.now += 8
        ask(bench, f"b{number}", [*prompt, number])
    flood(bench)
    ask(bench, "c", prompt)
    assert report(bench, "c").cached_tokens == 7
    (pin,) = bench.core.holdings.pins
    assert pin.hits == 5


def test_a_wholly_cached_prompt_can_be_pinned_without_an_output() -> None:
    bench = Bench(pages=16, page_size=PAGE)
    prompt = list(range(8))
    ask(bench, "a", prompt)
    ask(bench, "b", prompt, 0, pins=(PinWish(10.0, 8),))
    assert report(bench, "b").pins == (PinReport(8, 8, 10.0),)
    assert report(bench, "b").cached_tokens == 7


def test_a_place_that_cannot_be_told_and_a_cache_that_is_off_are_told() -> None:
    bench = Bench(use_cache=False)
    ask(bench, "a", list(range(8)), pins=(PinWish(10.0, 8), PinWish(10.0, None, 1)))
    assert report(bench, "a").pins == (
        PinReport(8, 0, 10.0, "bypassed"),
        PinReport(0, 0, 10.0, "unknown_place", 1),
    )


def test_pins_give_way_before_anybody_is_retracted() -> None:
    bench = Bench(pages=16, page_size=PAGE, max_pinned_share=0.75, rows=2)
    for number, ttl in ((1, 50.0), (2, 20.0), (3, 90.0)):
        ask(bench, f"pin{number}", [number] * 4 * PAGE, 1, pins=(PinWish(ttl, 4 * PAGE),))
    bench.core.growth.mean_tokens = 1.0
    ask(bench, "long", [9] * 3 * PAGE, 5 * PAGE)
    assert bench.core.totals.retractions == 0
    assert bench.core.holdings.pins.yielded == 1
    # The one that would have expired first went.
    assert [pin.ttl for pin in bench.core.holdings.pins] == [50.0, 90.0]
    bench.assert_whole()


@pytest.mark.parametrize("policy", ["lpm", "fcfs", "fair"])
def test_what_fits_an_empty_pool_runs_however_much_is_pinned(policy: str) -> None:
    bench = Bench(pages=8, page_size=PAGE, max_pinned_share=1.0, policy=policy)
    for number in range(4):
        ask(bench, f"pin{number}", [number] * 2 * PAGE, 0, pins=(PinWish(1e6, 2 * PAGE),))
    assert bench.core.stats(bench.now).pages_pinned == 8
    ask(bench, "whole pool", [9] * 7 * PAGE, PAGE)
    assert bench.core.holdings.pins.yielded == 4
    bench.assert_whole()


def test_waiting_for_others_to_end_costs_no_pin() -> None:
    bench = Bench(pages=16, page_size=PAGE, max_pinned_share=0.5, step_tokens=100)
    ask(bench, "pin", [1] * 4 * PAGE, 1, pins=(PinWish(1e6, 4 * PAGE),))
    bench.send("first", [2] * 8 * PAGE, 4)
    bench.step()
    ask(bench, "second", [3] * 8 * PAGE, 4)
    assert bench.streams["first"].ids == generate([2] * 8 * PAGE, 4)
    assert bench.core.holdings.pins.yielded == 0


def test_who_is_not_admitted_has_used_nothing() -> None:
    bench = Bench(pages=16, page_size=PAGE, rows=4, step_tokens=100)
    ask(bench, "old", [1] * 2 * PAGE, 0)
    ask(bench, "younger", [2] * 2 * PAGE, 0)
    bench.send("running", [3] * 6 * PAGE, 4 * PAGE)
    bench.step()
    node = next(node for node in bench.tree._forest.nodes() if node.key[0] == 1)
    before = (node.hits, node.uses, node.tick, bench.tree.version)
    bench.send("too large for now", [1] * 2 * PAGE + [4] * 8 * PAGE)
    for _ in range(3):
        bench.step()
    assert bench.core.num_waiting == 1
    assert (node.hits, node.uses, node.tick) == before[:3]
    bench.run()
    assert node.hits == before[0] + 1


def test_flush_lets_pins_go_but_not_while_a_request_runs() -> None:
    bench = Bench(pages=16, page_size=PAGE)
    ask(bench, "a", [1] * 8, pins=(PinWish(60.0, 8),))
    bench.send("b", [2] * 8, 8)
    bench.step()
    assert not bench.core.flush()
    assert len(bench.core.holdings.pins) == 1
    bench.run()
    assert bench.core.flush()
    assert len(bench.core.holdings.pins) == bench.tree.num_pages == 0


def test_forgetting_while_requests_wait_keeps_their_matches_right() -> None:
    bench = Bench(pages=16, page_size=PAGE, rows=1)
    ask(bench, "a", [1] * 12)
    bench.send("b", [2] * 12, 8)
    bench.step()
    bench.send("c", [1] * 12)
    assert bench.core.holdings.forget("", b"").pages >= 3
    bench.core.check()
    bench.run()
    assert bench.streams["c"].ids == generate([1] * 12, 5)


# ---- no_store ------------------------------------------------------------------------------------------------


def test_a_request_without_store_reads_and_leaves_nothing() -> None:
    bench = Bench(pages=32, page_size=PAGE)
    head = list(range(10))
    ask(bench, "a", head)
    before = {page for pages in bench.tree.owned() for page in pages}
    ask(bench, "b", [*head, 30, 31, 32, 33, 34], 9, no_store=True)
    assert report(bench, "b").cached_tokens == 10
    assert {page for pages in bench.tree.owned() for page in pages} == before
    ask(bench, "c", [*head, 30, 31, 32, 33, 34])
    assert report(bench, "c").cached_tokens == 10
    bench.assert_whole()


def test_without_store_nothing_comes_to_disk(tmp_path: Path) -> None:
    bench = Bench(disk=tmp_path, page_size=PAGE)
    ask(bench, "a", list(range(20)), no_store=True)
    bench.finish_disk()
    assert not list(tmp_path.rglob("*.kv"))
    ask(bench, "b", list(range(20)))
    bench.finish_disk()
    assert list(tmp_path.rglob("*.kv"))


def test_nobody_waits_for_what_will_not_be_stored() -> None:
    bench = Bench(pages=200, page_size=PAGE, step_tokens=128)
    prompt = [1] * 100
    bench.send("a", prompt, 3, no_store=True)
    bench.step()
    bench.send("b", [*prompt, 2], 3)
    bench.send("c", [*prompt, 3], 3)
    bench.step()
    # b begins at once; c waits for b, which stores.
    assert (bench.core.num_running, bench.core.num_waiting) == (2, 1)
    bench.run()
    assert report(bench, "b").cached_tokens == 0
    assert report(bench, "c").cached_tokens == 100
    bench.assert_whole()


@pytest.mark.parametrize("swap_pages", [0, 100])
def test_without_store_a_request_may_fill_the_whole_pool_from_a_page_it_shares_in_part(swap_pages: int) -> None:
    bench = Bench(pages=8, page_size=PAGE, swap_pages=swap_pages, rows=1)
    ask(bench, "a", [1, 2, 3, 4, 5, 6])
    prompt = [1, 2, 3, 4, 5, 7]
    ask(bench, "b", prompt, 8 * PAGE - len(prompt) + 1, no_store=True)
    bench.assert_whole()


def test_what_is_not_stored_is_not_pinned() -> None:
    bench = Bench()
    ask(bench, "a", list(range(8)), no_store=True, pins=(PinWish(5.0, 8),))
    assert report(bench, "a").pins == (PinReport(8, 0, 5.0, "bypassed"),)
    assert bench.tree.num_pages == 0
