"""/metrics: always well formed, never falling, and the sum of what clients were told."""

from __future__ import annotations

import math
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srt.http.prometheus import Counter, Gauge, Histogram, render
from tests.http.running import Running, events
from tests.http.strict_metrics import Scrape, parse


def scrape(client: httpx.Client) -> Scrape:
    response = client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    return parse(response.text)


def test_the_first_scrape_parses_and_has_every_metric(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        found = scrape(client)
    stems = """num_requests_total num_aborted_requests_total num_failed_requests_total prompt_tokens_total
        cached_tokens_total generation_tokens_total computed_tokens_total evicted_tokens_total num_retractions_total
        time_to_first_token_seconds inter_token_latency_seconds e2e_request_latency_seconds queue_time_seconds
        prefill_time_seconds decode_time_seconds preempted_time_seconds time_per_output_token_seconds
        scheduled_tokens_histogram num_served_requests_total step_rows step_tokens step_scheduling_seconds
        step_seconds num_running_reqs num_queue_reqs token_usage cache_hit_rate gen_throughput num_used_tokens
        max_total_num_tokens pages_total pages_free pages_cached pages_in_use"""
    assert {f"sapwood_{stem}" for stem in stems.split()} <= found.kinds.keys()
    assert all(name.startswith("sapwood_") for name in found.kinds)
    assert found.value("sapwood_pages_free") + found.value("sapwood_pages_cached") == found.value("sapwood_pages_total")
    assert found.value("sapwood_step_seconds_count") == 3
    assert found.value("sapwood_step_seconds_sum") == 0.06
    assert (found.value("sapwood_step_rows_count"), found.value("sapwood_step_rows_sum")) == (3, 3)
    assert (found.value("sapwood_step_tokens_count"), found.value("sapwood_step_tokens_sum")) == (3, 21)
    assert found.value("sapwood_step_scheduling_seconds_sum") == 0.003
    assert found.value("sapwood_prompt_tokens_total") == 0


def usages(client: httpx.Client) -> list[dict[str, Any]]:
    """One request on each path, twice: what the replies say of their tokens."""
    chat = {"messages": [{"role": "user", "content": "the same words"}], "max_tokens": 5, "cache_report": True}
    replies: list[dict[str, Any]] = []
    for _ in range(2):
        replies.append(client.post("/v1/chat/completions", json={**chat, "n": 3}).json())
        bodies = ({"prompt": "other words"}, {"prompt": ["a list", "of prompts"], "n": 2}, {"prompt": [1, 3, 5]})
        replies.extend(client.post("/v1/completions", json={**body, "cache_report": True}).json() for body in bodies)
        streamed = {**chat, "stream": True, "stream_options": {"include_usage": True}}
        replies.append(events(client.post("/v1/chat/completions", json=streamed))[-2])
        meta = client.post("/generate", json={"text": "native words"}).json()["meta_info"]
        replies.append({"usage": {**meta, "prompt_tokens_details": meta}, "cache_report": meta["cache_report"]})
    return [{**reply["usage"], "reports": reports_in(reply)} for reply in replies]


def reports_in(reply: dict[str, Any]) -> list[dict[str, Any]]:
    """The cache reports of a reply, one for each of its prompts."""
    report = reply["cache_report"]
    return report if isinstance(report, list) else [report]


def test_counters_are_the_sum_of_the_replies(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        told = usages(client)
        found = scrape(client)
    assert found.value("sapwood_prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in told)
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in told)
    assert cached > 0
    assert found.value("sapwood_cached_tokens_total") == cached
    reports = [report for usage in told for report in usage["reports"]]
    assert sum(report["cached_tokens"] for report in reports) == cached
    assert sum(report["cached_tokens"] + report["computed_tokens"] for report in reports) == found.value(
        "sapwood_prompt_tokens_total"
    )
    assert len({report["reason"] for report in reports}) > 1
    for reason in {report["reason"] for report in reports}:
        count = sum(report["reason"] == reason for report in reports)
        assert found.value("sapwood_cache_lookups_total", reason=reason) == count
    assert found.value("sapwood_cache_lookups_total") == len(reports)
    output = sum(usage["completion_tokens"] for usage in told)
    assert found.value("sapwood_generation_tokens_total") == output
    prompts = 2 * (1 + 1 + 2 + 1 + 1 + 1)
    samples = 2 * (3 + 1 + 4 + 1 + 1 + 1)
    assert found.value("sapwood_num_requests_total") == samples
    assert found.value("sapwood_num_requests_total", finish_reason="length") == samples
    assert found.value("sapwood_time_to_first_token_seconds_count") == prompts
    assert found.value("sapwood_e2e_request_latency_seconds_count") == prompts
    assert found.value("sapwood_inter_token_latency_seconds_count") == output - samples
    for name in ("prefill_time_seconds", "decode_time_seconds", "time_per_output_token_seconds"):
        assert found.value(f"sapwood_{name}_count") == samples
    assert found.value("sapwood_scheduled_tokens_histogram_count") == samples
    assert found.value("sapwood_preempted_time_seconds_count") == 0
    # Nobody has set a target.
    assert found.value("sapwood_num_served_requests_total", met="both") == prompts
    assert found.value("sapwood_cache_hit_rate") == pytest.approx(
        cached / sum(usage["prompt_tokens"] for usage in told)
    )


def test_aborts_and_failures_are_counted_beside_the_others(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        for _ in range(3):
            with client.stream("POST", "/generate", json={"text": "hang after", "stream": True}) as response:
                next(response.iter_lines())
        server.eventually(lambda: server.front.running == 0)
        for text, status in (("x" * 3000, 400), ("full", 429), ("break it", 500)):
            assert client.post("/generate", json={"text": text}).status_code == status
        client.post("/generate", json={"text": "end"})
        client.post("/generate", json={"text": "x"})
        found = scrape(client)
    by_reason = {
        reason: found.value("sapwood_num_requests_total", finish_reason=reason)
        for reason in ("abort", "error", "refused", "stop", "length")
    }
    assert by_reason == {"abort": 3, "error": 1, "refused": 2, "stop": 1, "length": 1}
    assert found.value("sapwood_num_aborted_requests_total") == 3
    assert found.value("sapwood_num_failed_requests_total") == 3
    assert found.value("sapwood_num_failed_requests_total", status="429") == 1
    ends = server.front.ends
    assert found.value("sapwood_generation_tokens_total") == sum(end.completion_tokens for end in ends)
    assert found.value("sapwood_prompt_tokens_total") == sum(end.prompt_tokens for end in ends)


def test_goodput_counts_the_requests_that_met_their_targets(server: Running) -> None:
    asked: list[tuple[dict[str, Any], str]] = [
        ({}, "both"),
        ({"ttft_target": 100, "tpot_target": 100}, "both"),
        ({"ttft_target": 1e-9}, "tpot"),
        ({"tpot_target": 1e-9}, "ttft"),
        ({"ttft_target": 1e-9, "tpot_target": 1e-9, "timeout": 100}, "none"),
    ]
    with httpx.Client(base_url=server.url) as client:
        for number, (targets, _) in enumerate(asked):
            path, prompt = ("/v1/completions", "prompt") if number % 2 else ("/generate", "text")
            reply = client.post(path, json={prompt: "some words", **targets})
            assert reply.status_code == 200, reply.text
        refused = client.post("/v1/completions", json={"prompt": "x", "tpot_target": 0})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "tpot_target"
        # What fails meets nothing.
        assert client.post("/generate", json={"text": "break it"}).status_code == 500
        found = scrape(client)
    for met in ("both", "ttft", "tpot", "none"):
        expected = sum(wanted == met for _, wanted in asked)
        assert found.value("sapwood_num_served_requests_total", met=met) == expected
    assert found.value("sapwood_num_served_requests_total") == len(asked)


def test_no_counter_falls_from_scrape_to_scrape(server: Running) -> None:
    last: dict[Any, float] = {}
    with httpx.Client(base_url=server.url) as client:
        for text in ("x", "fail", "end", "full", "x" * 3000, "break") * 3:
            client.post("/generate", json={"text": text, "sampling_params": {"max_new_tokens": 3}})
            now = scrape(client).counters()
            assert last.keys() <= now.keys()
            assert all(now[key] >= value for key, value in last.items())
            last = now


def test_a_counter_refuses_to_fall() -> None:
    counter = Counter("c_total", "c")
    counter.add(0)
    for amount in (-1, -0.001, math.nan):
        with pytest.raises(ValueError, match="c_total"):
            counter.add(amount)
    assert counter.value() == 0


def test_a_histogram_takes_counts_that_fit_and_no_others() -> None:
    histogram = Histogram("h", "h", (1, 2))
    histogram.add_counts((1, 0, 2), 7.5)
    histogram.observe(-1)
    found = parse(render([histogram], {}).decode())
    assert found.value("h_bucket", le="1") == 2
    assert found.value("h_bucket", le="+Inf") == 4
    assert found.value("h_sum") == 7.5
    for counts, total in (((1, 2), 1.0), ((1, 2, -1), 1.0), ((1, 2, 3), -1.0), ((1, 2, 3), math.nan)):
        with pytest.raises(ValueError, match="h cannot"):
            histogram.add_counts(counts, total)
    with pytest.raises(ValueError, match="do not rise"):
        Histogram("h", "h", (2, 1))


@given(
    label=st.text(max_size=20),
    amounts=st.lists(st.floats(0, 1e15), max_size=5),
    values=st.lists(st.floats(-1e3, 1e12), max_size=20),
)
def test_any_label_and_any_number_is_written_as_scrapers_read_it(
    label: str, amounts: list[float], values: list[float]
) -> None:
    counter, gauge, histogram = Counter("c_total", "c\nd\\e"), Gauge("g", "g"), Histogram("h", "h", (0.5, 1, 1000))
    for amount in amounts:
        counter.add(amount, label=label)
    for value in values:
        gauge.set(value)
        histogram.observe(value)
    found = parse(render([counter, gauge, histogram], {"model_name": label}).decode())
    assert found.value("c_total") == sum(amounts)
    assert found.value("g") == (values[-1] if values else 0)
    assert found.value("h_count") == len(values)
    escaped = label.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
    assert all(("model_name", escaped) in labels for _, labels in found.samples)
