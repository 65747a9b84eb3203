"""Sessions: which branch is superseded, what waits, and how the tree takes it."""

from __future__ import annotations

from typing import Any

from radix import PagePool, RadixTree
from scheduler.sessions import Sessions
from srt.cache_messages import Session, SessionMark, SessionState
from srt.messages import pack_ids
from tests.scheduler.bench import Bench
from tests.scheduler.oracle import generate


def mark(name: str, state: SessionState = "open") -> dict[str, Any]:
    return {"session": SessionMark(name, state)}


def shown(bench: Bench, name: str = "s", tenant: str = "") -> Session:
    (found,) = bench.core.sessions.shown(tenant, 1, bench.now, name)
    return found


def cached(bench: Bench, prompt: list[int]) -> int:
    return bench.tree.match("", pack_ids(prompt), len(prompt), touch=False).num_tokens


def turn(bench: Bench, rid: str, prompt: list[int], **fields: Any) -> list[int]:
    """Run one request to its end; the prompt and all of its output but the last token, which has no KV."""
    bench.send(rid, prompt, 5, **fields)
    bench.run()
    return prompt + bench.streams[rid].ids[:-1]


def fill(bench: Bench, pages: int) -> None:
    """Evict so many pages."""
    assert bench.tree.evict(pages) >= pages


def test_a_session_is_what_was_run_last_and_how_much_of_it_is_cached() -> None:
    bench = Bench(pages=64)
    first = turn(bench, "a", list(range(20)), **mark("s"))
    one = shown(bench)
    assert (one.state, one.running, len(one.runs)) == ("open", 0, 1)
    assert (one.runs[0].tokens, one.runs[0].cached_tokens) == (len(first), len(first))
    second = turn(bench, "b", [*first, 1, 2, 3], **mark("s", "waiting"))
    one = shown(bench)
    # That it ended by its limit, and was cut off, is no waiting.
    assert (one.state, [run.tokens for run in one.runs]) == ("open", [len(second)])
    assert not bench.core.sessions.shown("other tenant", 5, bench.now)
    bench.assert_whole()
    assert shown(bench).runs[0].cached_tokens == 0


def test_a_reply_that_ends_by_itself_waits_if_the_client_said_so() -> None:
    bench = Bench()
    prompt = list(range(12))
    stop = generate(prompt, 5)[2]
    turn(bench, "a", prompt, stop_ids=[stop], **mark("s", "waiting"))
    assert shown(bench).state == "waiting"
    turn(bench, "b", [*prompt, 1], **mark("s", "done"))
    assert shown(bench).state == "done"


def test_a_branch_that_nobody_follows_any_more_goes_first() -> None:
    bench = Bench(pages=64)
    old = turn(bench, "a", [*range(20), *[1] * 12], **mark("s"))
    other = turn(bench, "x", [9] * 12)
    new = turn(bench, "b", [*range(20), *[2] * 12], **mark("s"))
    assert [run.tokens for run in shown(bench).runs] == [len(new)]
    # "x" was used before "b", but after "a" was superseded nobody needs "a".
    assert cached(bench, [9] * 12) == 12
    fill(bench, 3)
    assert cached(bench, old) < len(old)
    assert cached(bench, other) == len(other)
    assert cached(bench, new) == len(new)


def test_without_a_session_the_oldest_goes_first() -> None:
    bench = Bench(pages=64)
    other = turn(bench, "x", [9] * 12)
    old = turn(bench, "a", [*range(20), *[1] * 12])
    turn(bench, "b", [*range(20), *[2] * 12])
    fill(bench, 3)
    assert cached(bench, other) < len(other)
    assert cached(bench, old) == len(old)


def test_requests_side_by_side_are_branches_of_one_session() -> None:
    bench = Bench(pages=64)
    root = turn(bench, "root", list(range(20)), **mark("s"))
    for name in ("left", "right"):
        bench.send(name, [*root, *([1] * 8 if name == "left" else [2] * 8)], 5, **mark("s"))
    bench.run()
    assert len(shown(bench).runs) == 2
    # The next one follows the right branch; the left one is superseded.
    right = bench.streams["right"].ids
    turn(bench, "next", [*root, *[2] * 8, *right[:-1], 3], **mark("s"))
    assert len(shown(bench).runs) == 1


def test_what_is_told_later_holds_for_what_is_there() -> None:
    bench = Bench(pages=64)
    mine = turn(bench, "a", list(range(16)), **mark("s"))
    other = turn(bench, "x", [9] * 16)
    assert bench.core.sessions.tell("", "s", "done", bench.now)
    assert not bench.core.sessions.tell("", "unknown", "done", bench.now)
    assert not bench.core.sessions.tell("other tenant", "s", "open", bench.now)
    fill(bench, 2)
    assert cached(bench, other) == len(other)
    assert cached(bench, mine) < len(mine)
    # It can be taken back.
    assert bench.core.sessions.tell("", "s", "open", bench.now)
    assert shown(bench).state == "open"


def test_a_request_that_never_ran_leaves_no_session_and_changes_none() -> None:
    bench = Bench(max_queued=1, rows=1)
    bench.send("runs", [5] * 20, 30)
    bench.step()
    bench.send("waits", [6] * 20, 5)
    bench.send("refused", [7] * 20, 5, **mark("s"))
    assert "refused" in bench.rejected
    bench.abort("waits")
    bench.send("waits too", [8] * 20, 5, **mark("s"))
    assert shown(bench).running == 1
    bench.abort("waits too")
    bench.run()
    assert bench.core.sessions.shown("", 5, bench.now) == ()


def test_an_aborted_reply_is_the_run_as_far_as_it_came() -> None:
    bench = Bench()
    bench.send("a", list(range(16)), 30, **mark("s", "waiting"))
    for _ in range(8):
        bench.step()
    bench.abort("a")
    bench.run()
    one = shown(bench)
    assert one.state == "open"
    assert one.runs[0].tokens == one.runs[0].cached_tokens > 16


def test_memory_is_bounded_and_those_used_longest_ago_go() -> None:
    bench = Bench()
    bench.core.sessions = Sessions(bench.tree, max_sessions=3, max_bytes=4 * 60)
    for number in range(6):
        turn(bench, f"r{number}", [number] * 10, **mark(f"s{number}"))
    assert [one.id for one in bench.core.sessions.shown("", 9, bench.now)] == ["s5", "s4", "s3"]
    turn(bench, "long", [7] * 50, **mark("long"))
    bench.core.sessions.check()
    assert [one.id for one in bench.core.sessions.shown("", 9, bench.now)] == ["long"]
    assert bench.core.sessions.count("") == 1


def test_tenants_may_use_the_same_name() -> None:
    bench = Bench()
    turn(bench, "a", list(range(16)), tenant="alice", namespace="alice", **mark("s"))
    turn(bench, "b", list(range(30)), tenant="bob", namespace="bob", **mark("s"))
    assert shown(bench, tenant="alice").runs[0].tokens < shown(bench, tenant="bob").runs[0].tokens
    assert bench.core.sessions.count("alice") == 1


def test_a_session_of_an_empty_tree_is_no_fault() -> None:
    sessions = Sessions(RadixTree(PagePool(4, 4)))
    assert sessions.shown("", 5, 0.0) == ()
    sessions.forget("", "s")
    sessions.check()
