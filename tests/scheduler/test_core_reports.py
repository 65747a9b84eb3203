"""What the scheduler's core tells of each request's use of the cache."""

from __future__ import annotations

from srt.cache_messages import CacheReport
from srt.messages import pack_ids, unpack_ids
from tests.scheduler.bench import Bench, prompt_of


def report_of(bench: Bench, rid: str) -> CacheReport:
    opened = bench.streams[rid].deltas[0].open
    assert opened is not None
    assert opened.cache_report is not None
    return opened.cache_report


def test_every_first_output_says_why_reuse_stopped() -> None:
    bench = Bench(pages=32, page_size=4, rows=1, context=300)
    a = prompt_of(40, 1000)

    def ask(rid: str, prompt: list[int], **changes: object) -> CacheReport:
        bench.send(rid, prompt, 1, **changes)
        bench.run()
        report = report_of(bench, rid)
        assert report.cached_tokens == bench.streams[rid].cached_tokens
        assert report.cached_tokens + report.computed_tokens == len(prompt)
        return report

    assert ask("first", a).reason == "first_seen"
    assert ask("again", a).reason == "all_cached"
    assert ask("longer", [*a, 1, 2, 3, 4]).reason == "extended"
    diverged = ask("other", [*a[:21], 5, 6, 7])
    assert (diverged.reason, diverged.position) == ("diverged", 21)
    assert unpack_ids(diverged.cached_next) == a[21:29]
    assert unpack_ids(diverged.prompt_next) == [5, 6, 7]
    assert unpack_ids(diverged.before) == a[13:21]
    assert ask("logprobs", a, prompt_logprobs_from=11).reason == "logprobs"
    assert ask("bypass", a, use_cache=False).reason == "bypassed"
    assert ask("salted", a, namespace="me\x1fsalt").reason == "first_seen"
    assert ask("salted otherwise", a, namespace="me\x1fpepper").reason == "other_namespace"
    ask("big", prompt_of(120, 5000))
    evicted = ask("evicted", a)
    assert evicted.reason == "evicted"
    assert "request" in evicted.detail
    assert evicted.evicted_seconds_ago is not None
    assert evicted.evicted_seconds_ago >= 0


def test_reports_name_the_message_in_which_reuse_stopped() -> None:
    bench = Bench(pages=64, page_size=4, rows=1, context=300)
    prompt = prompt_of(40, 1000)
    bench.send("first", prompt, 1)
    bench.run()
    starts = pack_ids([0, 10, 25, 36])
    for rid, kept, where in (
        ("a", 0, ("messages[0]", 0)),
        ("b", 9, ("messages[0]", 9)),
        ("c", 10, ("messages[1]", 0)),
        ("d", 35, ("messages[2]", 10)),
        ("e", 36, ("generation_prompt", 0)),
    ):
        bench.send(rid, [*prompt[:kept], *prompt_of(10, 7 + kept)], 1, message_starts=starts)
        bench.run()
        report = report_of(bench, rid)
        assert report.position == kept
        assert (report.message, report.message_offset) == where
    bench.send("no chat", prompt_of(10, 3000), 1)
    bench.run()
    assert report_of(bench, "no chat").message == ""


def test_reports_tell_no_tenant_of_another() -> None:
    bench = Bench(pages=64)
    bench.send("a", prompt_of(40), 1, namespace="alice")
    bench.run()
    bench.send("b", prompt_of(40), 1, namespace="bob")
    bench.run()
    assert report_of(bench, "b").reason == "first_seen"
    assert report_of(bench, "b").cached_next == b""
