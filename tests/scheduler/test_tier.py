"""The disk tier under the scheduler's core: what is written comes back, in time or not at all, and always right."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from scheduler import cache_calls
from srt.cache_messages import Call
from srt.messages import NAMESPACE_SEPARATOR, pack_ids
from tests.scheduler.bench import Bench
from tests.scheduler.oracle import generate

HEAD = list(range(40))


def warmed(disk: Path, prompt: list[int] = HEAD, **settings: object) -> None:
    """A bench that has served a prompt, and was killed when its pages had been written."""
    bench = Bench(disk=disk, **settings)  # type: ignore[arg-type]
    bench.send("first", prompt)
    bench.run()
    bench.finish_disk()


def served(bench: Bench, rid: str, prompt: list[int], **changes: object) -> int:
    """Run one request to its end, check its tokens, and return how many of them came from disk."""
    bench.send(rid, prompt, **changes)
    bench.run()
    assert bench.streams[rid].ids == generate(prompt, 5)
    report = bench.streams[rid].deltas[0].open.cache_report  # type: ignore[union-attr]
    assert report is not None
    assert report.cached_tokens == bench.streams[rid].cached_tokens
    return report.disk_tokens


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("block_pages", [1, 2])
def test_a_new_process_takes_a_known_head_from_disk(tmp_path: Path, overlap: bool, block_pages: int) -> None:
    warmed(tmp_path, block_pages=block_pages)
    bench = Bench(disk=tmp_path, overlap=overlap, block_pages=block_pages)
    assert served(bench, "again", [*HEAD, 41, 42, 43]) == 40
    assert bench.streams["again"].cached_tokens == 40
    stats = bench.core.stats(0.0)
    assert (stats.disk_hits, stats.disk_tokens, stats.cached_tokens) == (1, 40, 40)
    assert stats.disk_read_bytes > 40 * 8
    assert served(bench, "once more", [*HEAD, 44]) == 0, "now it is in memory"
    assert bench.streams["once more"].cached_tokens == 40
    bench.assert_whole()


def test_the_last_block_of_a_known_prompt_serves_to_the_last_but_one_token(tmp_path: Path) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    assert served(bench, "again", HEAD) == 39
    assert bench.streams["again"].cached_tokens == 39


def test_memory_and_disk_together_make_a_prefix(tmp_path: Path) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    assert served(bench, "short", [*HEAD[:16], 9, 9]) == 16
    assert served(bench, "long", [*HEAD, 7]) == 24
    assert bench.streams["long"].cached_tokens == 40


def test_requests_for_one_head_load_it_once(tmp_path: Path) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    for tail in range(3):
        bench.send(f"r{tail}", [*HEAD, 50 + tail])
    bench.step()
    bench.run()
    assert bench.core.stats(0.0).disk_read_bytes < 2 * 10 * 400
    for tail in range(3):
        stream = bench.streams[f"r{tail}"]
        assert stream.ids == generate([*HEAD, 50 + tail], 5)
        assert stream.cached_tokens == 40
        assert stream.deltas[0].open.cache_report.disk_tokens == 40  # type: ignore[union-attr]


def test_others_are_served_while_a_request_waits_for_its_load(tmp_path: Path) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    bench.disk_works = False
    bench.send("loading", [*HEAD, 1])
    bench.step()
    assert bench.core.num_waiting == 1
    assert bench.core.stats(0.0).disk_loading == 1
    bench.send("other", [3, 2, 1])
    for _ in range(10):
        bench.step()
        bench.core.check()
    assert bench.streams["other"].ids == generate([3, 2, 1], 5)
    assert bench.core.num_waiting == 1
    bench.disk_works = True
    bench.run()
    assert bench.streams["loading"].ids == generate([*HEAD, 1], 5)


def test_after_its_deadline_a_request_takes_what_is_there(tmp_path: Path) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    bench.disk_works = False
    bench.send("late", [*HEAD, 1])
    bench.step()
    assert bench.files is not None
    for _ in range(3):
        bench.files.read_one()
    bench.now += 100
    bench.run()
    stream = bench.streams["late"]
    assert stream.ids == generate([*HEAD, 1], 5)
    assert stream.cached_tokens == 12
    assert stream.deltas[0].open.cache_report.disk_tokens == 12  # type: ignore[union-attr]
    assert bench.core.stats(0.0).disk_late == 1
    bench.assert_whole()


@pytest.mark.parametrize("blocks_read", [0, 3])
def test_an_abort_while_loading_gives_every_page_back(tmp_path: Path, blocks_read: int) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    bench.disk_works = False
    bench.send("gone", [*HEAD, 1])
    bench.step()
    assert bench.files is not None
    for _ in range(blocks_read):
        bench.files.read_one()
    bench.abort("gone")
    bench.step()
    bench.core.check()
    assert bench.core.stats(0.0).disk_loading == 0
    assert bench.tree.num_pages == blocks_read
    bench.assert_whole()


def test_a_damaged_block_ends_what_is_loaded_and_is_written_again(tmp_path: Path) -> None:
    warmed(tmp_path)
    third = sorted(tmp_path.rglob("*.kv"), key=lambda path: -path.stat().st_mtime_ns)
    bench = Bench(disk=tmp_path)
    damaged = next(path for path in third if _tokens_of(path) == HEAD[12:16])
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x7f")
    assert served(bench, "again", [*HEAD, 1]) == 12
    assert bench.core.stats(0.0).disk_errors == 1
    bench.finish_disk()
    assert served(Bench(disk=tmp_path), "again", [*HEAD, 1]) == 40


def _tokens_of(path: Path) -> list[int]:
    import numpy as np

    data = path.read_bytes()
    page_tokens, page_bytes = 4, 32
    tokens = data[len(data) - page_bytes - 4 - 4 * page_tokens : len(data) - page_bytes - 4]
    return np.frombuffer(tokens, np.int32).tolist()  # type: ignore[no-any-return]


def test_another_identity_or_namespace_gets_nothing(tmp_path: Path) -> None:
    warmed(tmp_path)
    assert served(Bench(disk=tmp_path, identity=b"another oracle"), "again", [*HEAD, 1]) == 0
    bench = Bench(disk=tmp_path)
    assert served(bench, "salted", [*HEAD, 1], namespace="salt") == 0
    assert served(bench, "own", [*HEAD, 1]) == 40


def test_a_request_that_bypasses_the_cache_neither_takes_nor_gives(tmp_path: Path) -> None:
    bench = Bench(disk=tmp_path)
    assert served(bench, "private", HEAD, use_cache=False) == 0
    bench.finish_disk()
    assert not list(tmp_path.rglob("*.kv"))
    warmed(tmp_path)
    assert served(Bench(disk=tmp_path), "private", HEAD, use_cache=False) == 0


def test_an_evicted_prefix_comes_back_from_disk(tmp_path: Path) -> None:
    bench = Bench(disk=tmp_path, pages=20)
    assert served(bench, "first", HEAD) == 0
    bench.finish_disk()
    for index in range(4):
        served(bench, f"other{index}", [100 + index] * 60)
    assert served(bench, "again", [*HEAD, 1]) == 40
    bench.assert_whole()


def test_a_flush_forgets_the_files_too(tmp_path: Path) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    assert bench.core.flush()
    assert served(bench, "again", HEAD) == 0
    bench.finish_disk()
    assert served(Bench(disk=tmp_path), "again", HEAD) == 39, "and what came after it is kept"


def test_a_flush_is_refused_while_something_is_loaded(tmp_path: Path) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    bench.disk_works = False
    bench.send("loading", [*HEAD, 1])
    bench.step()
    assert not bench.core.flush()


def test_a_writer_that_is_behind_holds_only_its_share_of_the_pool_and_catches_up(tmp_path: Path) -> None:
    bench = Bench(disk=tmp_path, pages=32, context=120)
    bench.disk_works = False
    bench.send("long", list(range(100)))
    bench.run()
    assert bench.tier is not None
    assert sum(1 for _ in bench.tier.owned()) == 4
    bench.finish_disk()
    assert len(list(tmp_path.rglob("*.kv"))) == 26
    assert bench.core.stats(0.0).disk_dropped == 0
    bench.assert_whole()


def test_what_was_evicted_before_the_writer_came_to_it_is_counted(tmp_path: Path) -> None:
    bench = Bench(disk=tmp_path, pages=32, context=120)
    bench.disk_works = False
    bench.send("long", list(range(100)))
    bench.run()
    assert bench.core.holdings.tree.evict(20) > 0
    bench.finish_disk()
    files = len(list(tmp_path.rglob("*.kv")))
    assert files < 26
    assert bench.core.stats(0.0).disk_dropped == 26 - files


def test_saves_give_way_when_the_pool_is_dry(tmp_path: Path) -> None:
    bench = Bench(disk=tmp_path, pages=16, context=64)
    bench.disk_works = False
    bench.send("first", HEAD)
    bench.run()
    assert list(bench.tier.owned())  # type: ignore[union-attr]
    bench.send("second", [9] * 58)
    bench.run()
    assert bench.streams["second"].ids == generate([9] * 58, 5)
    assert bench.core.stats(0.0).retractions == 0


def test_a_load_gives_way_to_a_running_request_that_needs_its_pages(tmp_path: Path) -> None:
    warmed(tmp_path, pages=16, context=64)
    bench = Bench(disk=tmp_path, pages=16, context=64)
    bench.core.growth.mean_tokens = 1.0
    bench.disk_works = False
    bench.send("running", [9, 9, 9, 9], max_new=58)
    bench.step()
    bench.send("loading", [*HEAD[:36], 1])
    for _ in range(70):
        bench.step()
        bench.core.check()
    assert bench.streams["running"].ids == generate([9, 9, 9, 9], 58)
    assert bench.core.stats(0.0).retractions == 0
    bench.disk_works = True
    bench.run()
    assert bench.streams["loading"].ids == generate([*HEAD[:36], 1], 5)


def test_what_is_quicker_to_compute_is_not_loaded(tmp_path: Path) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    assert bench.tier is not None
    bench.tier._read_rate = 1.0
    bench.tier.observe_step(1e-3, 32)
    assert served(bench, "again", [*HEAD, 1]) == 0
    bench.tier._read_rate = 1e9
    assert served(bench, "other", [*HEAD, 1], namespace="other") == 0


def test_two_processes_on_one_folder_take_from_each_other(tmp_path: Path) -> None:
    one, other = Bench(disk=tmp_path), Bench(disk=tmp_path)
    served(one, "first", HEAD)
    one.finish_disk()
    other.files.refresh()  # type: ignore[union-attr]
    assert served(other, "again", [*HEAD, 1]) == 40
    served(other, "more", [*HEAD, *HEAD])
    other.finish_disk()
    one.files.refresh()  # type: ignore[union-attr]
    one.core.holdings.tree.flush()
    assert served(one, "more", [*HEAD, *HEAD, 1]) == 80


def test_a_page_that_a_step_in_flight_copies_from_is_not_free(tmp_path: Path) -> None:
    bench = Bench(disk=tmp_path)
    bench.send("first", [7] * 6, max_new=1)
    bench.run()
    bench.send("copies", [7] * 5 + [8], max_new=1)
    bench.step()
    (plan,) = bench.oracle.in_flight
    assert len(plan.copies) == 1, "rows of the half filled page are copied"
    bench.abort("copies")
    bench.tree.evict(64)
    bench.check_flight()
    bench.run()
    bench.assert_whole()


def test_a_full_disk_changes_no_reply(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    bench = Bench(disk=tmp_path, pages=24)
    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        for index in range(6):
            assert served(bench, f"r{index}", [index] * 50) == 0
        bench.finish_disk()
        assert bench.core.stats(0.0).disk_errors > 0
    assert not list(tmp_path.rglob("*.kv"))
    bench.now += 100
    served(bench, "first", HEAD)
    bench.finish_disk()
    assert served(Bench(disk=tmp_path), "again", HEAD) == 39, "it is tried again later"
    bench.assert_whole()


@pytest.mark.parametrize("share", [0.25, 0.5, 1.0])
def test_a_disk_smaller_than_the_memory_has_what_was_used_last(tmp_path: Path, share: float) -> None:
    warmed(tmp_path)
    block = next(tmp_path.rglob("*.kv")).stat().st_size
    bench = Bench(disk=tmp_path, pages=40, disk_bytes=int(40 * share * block))
    heads = [[head] * 30 for head in range(10)]
    for turn in range(60):
        # Three heads come again and again, the others push them out of memory now and then.
        head = heads[turn % 3 if turn % 4 else turn % 10]
        served(bench, f"r{turn}", [*head, turn])
        bench.now += 1.0
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 40 * share * block
    bench.finish_disk()
    stats = bench.core.stats(0.0)
    assert stats.disk_writes > 60
    assert (stats.disk_errors, stats.disk_dropped) == (0, 0)
    bench.assert_whole()
    last = heads[59 % 3]
    assert served(Bench(disk=tmp_path), "again", [*last, 70]) == 28


def test_files_that_another_process_removed_are_misses(tmp_path: Path) -> None:
    warmed(tmp_path)
    bench = Bench(disk=tmp_path)
    for path in tmp_path.rglob("*.kv"):
        path.unlink()
    assert served(bench, "again", [*HEAD, 1]) == 0
    assert bench.core.stats(0.0).disk_errors == 0


def forget(bench: Bench, tokens: list[int], namespace: str | None = "", tenant: str = "") -> None:
    call = Call("call", "forget", tenant=tenant, namespace=namespace, tokens=pack_ids(tokens))
    assert cache_calls.forget(bench.core.holdings, bench.core.sessions, call, bench.now).ok


def test_a_forgotten_prefix_is_forgotten_on_disk_too(tmp_path: Path) -> None:
    warmed(tmp_path)
    first = Bench(disk=tmp_path)
    other = [90, *HEAD]
    served(first, "other", other)
    served(first, "salted", HEAD, namespace="salt")
    first.finish_disk()
    bench = Bench(disk=tmp_path)
    forget(bench, HEAD[:10])
    # Nothing is loaded before the files are gone.
    bench.disk_works = False
    bench.send("at once", [*HEAD, 1])
    bench.step()
    assert bench.core.stats(0.0).disk_loading == 0
    bench.disk_works = True
    bench.run()
    assert bench.streams["at once"].cached_tokens == 0
    bench.finish_disk()
    again = Bench(disk=tmp_path)
    assert served(again, "other", other) == 40
    assert served(again, "salted", HEAD, namespace="salt") == 39
    assert served(again, "computed since", HEAD) == 39


def test_a_tenants_files_are_forgotten_without_anything_of_it_in_memory(tmp_path: Path) -> None:
    first = Bench(disk=tmp_path)
    names = ("ann", f"ann{NAMESPACE_SEPARATOR}salt:s", "anna")
    for name in names:
        served(first, name, HEAD, namespace=name)
    first.finish_disk()
    bench = Bench(disk=tmp_path)
    forget(bench, [], None, "ann")
    bench.finish_disk()
    again = Bench(disk=tmp_path)
    assert [served(again, name, HEAD, namespace=name) for name in names] == [0, 0, 39]
