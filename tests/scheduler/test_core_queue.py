"""Who the scheduler's core refuses to let wait, or to let wait any longer."""

from __future__ import annotations

from tests.scheduler.bench import Bench, prompt_of


def test_a_full_queue_refuses_with_429() -> None:
    bench = Bench(rows=1, max_queued=2)
    for index in range(5):
        bench.send(f"r{index}", prompt_of(5), 2)
    bench.run()
    assert len(bench.rejected) == 3
    assert {rejection.status for rejection in bench.rejected.values()} == {429}
    assert len(bench.streams) == 2


def test_a_full_queue_lets_the_least_urgent_and_newest_give_way() -> None:
    bench = Bench(rows=1, max_queued=2)
    bench.send("running", prompt_of(5), 3)
    bench.step()
    bench.send("old", prompt_of(5, 200), 2)
    bench.send("new", prompt_of(5, 300), 2)
    bench.send("urgent", prompt_of(5, 400), 2, priority=1)
    assert bench.rejected["new"].code == "shed"
    bench.send("as old", prompt_of(5, 500), 2)
    assert bench.rejected["as old"].code == "queue_full"
    bench.run()
    assert list(bench.streams) == ["running", "urgent", "old"]
    bench.assert_whole()


def test_a_tenant_may_fill_only_its_share_of_the_queue() -> None:
    bench = Bench(rows=1, max_queued_per_tenant=2)
    for index in range(4):
        bench.send(f"a{index}", prompt_of(5), 2, tenant="a")
    bench.send("b", prompt_of(5), 2, tenant="b")
    bench.run()
    assert sorted(bench.rejected) == ["a2", "a3"]
    assert "2 may" in bench.rejected["a2"].message
    bench.send("a4", prompt_of(5), 2, tenant="a")
    bench.run()
    assert bench.streams["a4"].reason == "length"


def test_who_waits_beyond_the_queue_timeout_is_refused_but_not_who_was_admitted_once() -> None:
    bench = Bench(rows=1, queue_timeout=5.0)
    bench.send("running", prompt_of(5), 50)
    bench.step()
    bench.send("waits", prompt_of(5, 200), 2)
    bench.step()
    bench.now += 4
    bench.send("later", prompt_of(5, 300), 2)
    bench.now += 2
    bench.step()
    assert bench.rejected["waits"].status == 503
    assert "queue timeout is 5 s" in bench.rejected["waits"].message
    bench.run()
    assert bench.streams["later"].reason == "length"
    bench.assert_whole()
