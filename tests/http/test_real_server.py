"""The HTTP face over the whole runtime, with a tiny model: what a fake front cannot show."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.http.bad_requests import bad_requests, complaint, send
from tests.http.running import events
from tests.http.strict_metrics import Scrape, parse
from tests.system.served import Served, serving, wait_until

CONTEXT_LENGTH = 2048


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tiny_model, tmp_path_factory.mktemp("r"), "--device", "cpu", "--dtype", "float32") as server:
        yield server


def scrape(served: Served) -> Scrape:
    return parse(httpx.get(f"{served.url}/metrics", timeout=30).text)


def until_idle(served: Served) -> Scrape:
    """Wait until nothing runs or waits and every page is free or cached; the metrics then."""
    names = ("num_open_requests", "num_running_reqs", "num_queue_reqs", "pages_in_use")
    wait_until(lambda: not any(scrape(served).value(f"sapwood_{name}") for name in names))
    found = scrape(served)
    free, cached = found.value("sapwood_pages_free"), found.value("sapwood_pages_cached")
    assert free + cached == found.value("sapwood_pages_total")
    return found


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=served.url, timeout=120) as client:
        yield client


@pytest.fixture
def ai(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def complete(http: httpx.Client, prompt: object, **fields: Any) -> dict[str, Any]:
    response = http.post("/v1/completions", json={"prompt": prompt, "temperature": 0, "ignore_eos": True, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def cached(reply: dict[str, Any]) -> int:
    tokens: int = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


VOCABULARY = ("tree", "water", "root", "leaf", "ring", "bark", "river", "number", "window", "harbour")


def words(seed: int, count: int) -> str:
    """Text that no other seed shares more than a beginning with."""
    chooser = random.Random(seed)
    return " ".join(chooser.choice(VOCABULARY) for _ in range(count))


def test_bad_requests_leave_the_pool_whole_and_the_server_answering(served: Served, http: httpx.Client) -> None:
    found = []
    for request in bad_requests(CONTEXT_LENGTH):
        wrong = complaint(request, send(http, request))
        if wrong:
            found.append(f"{request.label}: {wrong}")
    assert not found, "\n".join(found)
    until_idle(served)
    assert complete(http, "The sapwood", max_tokens=5)["usage"]["completion_tokens"] == 5
    assert http.post("/flush_cache").status_code == 200
    pages = until_idle(served)
    assert pages.value("sapwood_pages_free") == pages.value("sapwood_pages_total")


def test_chat_streamed_and_whole_are_the_same(ai: openai.OpenAI) -> None:
    fields: dict[str, Any] = {
        "model": ai.models.list().data[0].id,
        "messages": [{"role": "user", "content": "How many apples are left? 🐙"}],
        "max_tokens": 60,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
        "stop": ["zzzz"],
        # A special token has a logprob but no text, unless it is asked for.
        "extra_body": {"ignore_eos": True, "skip_special_tokens": False},
    }
    whole = ai.chat.completions.create(**fields)
    chunks = list(ai.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 60
    logprobs = whole.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    streamed = [
        entry
        for chunk in chunks
        for choice in chunk.choices
        if choice.logprobs is not None
        for entry in choice.logprobs.content or []
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in logprobs.content]
    assert len(streamed) == 60
    joined = b"".join(bytes(entry.bytes or []) for entry in streamed)
    assert joined.decode("utf-8", "replace") == text
    for entry in streamed:
        assert len(entry.top_logprobs) == 3
        # Greedy: the chosen token is the best.
        assert entry.token == entry.top_logprobs[0].token
        assert [top.logprob for top in entry.top_logprobs] == sorted(
            (t.logprob for t in entry.top_logprobs), reverse=True
        )


def test_cached_tokens_grow_as_prefixes_are_seen(http: httpx.Client) -> None:
    prompt = words(1, 60)
    cold, warm = complete(http, prompt, max_tokens=2), complete(http, prompt, max_tokens=2)
    assert cached(cold) == 0
    assert cached(warm) == warm["usage"]["prompt_tokens"] - 1
    assert warm["choices"] == cold["choices"]
    fresh = complete(http, words(2, 60), max_tokens=2, n=4)
    assert cached(fresh) == 0
    assert len(fresh["choices"]) == 4


def test_another_salt_never_sees_what_the_first_has_cached(http: httpx.Client) -> None:
    prompt = words(3, 60)
    counts = [cached(complete(http, prompt, max_tokens=1, cache_salt=salt)) for salt in ("a", "b", "a", "b")]
    plain = cached(complete(http, prompt, max_tokens=1))
    assert counts[:2] == [0, 0]
    assert counts[2] == counts[3] > 0
    assert plain == 0


def test_a_template_rendered_by_hand_hits_what_the_chat_has_cached(http: httpx.Client) -> None:
    messages = [{"role": "user", "content": words(4, 40)}]
    chat = http.post("/v1/chat/completions", json={"messages": messages, "max_tokens": 1}).json()
    ids = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    assert len(ids) == chat["usage"]["prompt_tokens"]
    assert cached(complete(http, ids, max_tokens=1)) == len(ids) - 1


def test_a_prompt_is_scored_without_generating(http: httpx.Client) -> None:
    prompt = words(5, 20)
    ids = http.post("/tokenize", json={"prompt": prompt}).json()["tokens"]
    for given in (prompt, ids):
        reply = complete(http, given, echo=True, logprobs=2, max_tokens=0)
        choice = reply["choices"][0]
        assert choice["text"] == prompt
        assert reply["usage"]["completion_tokens"] == 0
        logprobs = choice["logprobs"]
        assert len(logprobs["tokens"]) == len(ids)
        assert logprobs["token_logprobs"][0] is None
        assert all(value < 0 for value in logprobs["token_logprobs"][1:])
        assert all(
            prompt[at : at + len(token)] == token
            for at, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        )
    # The last token's logprob is what the model says of it after the rest.
    before = complete(http, ids[:-1], logprobs=20, max_tokens=1)["choices"][0]["logprobs"]
    best = max(before["top_logprobs"][0].values())
    assert before["token_logprobs"][0] == pytest.approx(best, abs=1e-4)
    assert logprobs["top_logprobs"][-1] == pytest.approx(
        dict(list(before["top_logprobs"][0].items())[:2]) | {logprobs["tokens"][-1]: logprobs["token_logprobs"][-1]},
        abs=1e-4,
    )


@pytest.mark.parametrize("max_tokens", [0, 1, 20])
def test_a_stream_with_echo_and_logprobs_is_the_whole_reply_in_pieces(http: httpx.Client, max_tokens: int) -> None:
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    whole = complete(http, "Words that share", **fields)["choices"][0]
    body = {"prompt": "Words that share", "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    *chunks, done = events(http.post("/v1/completions", json=body))
    assert done == "[DONE]"
    choices = [chunk["choices"][0] for chunk in chunks]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [token for choice in choices for token in choice["logprobs"]["tokens"]] == whole["logprobs"]["tokens"]


def test_seeds_repeat_and_differ(http: httpx.Client) -> None:
    def text(**fields: Any) -> list[str]:
        reply = complete(http, "Question:", temperature=1, max_tokens=30, **fields)
        return [choice["text"] for choice in reply["choices"]]

    assert text(seed=1) == text(seed=1)
    assert text(seed=1) != text(seed=2)
    assert text() != text()
    assert len(set(text(seed=7, n=3))) == 3
    assert text(seed=7, n=3) == text(seed=7, n=3)


def test_a_limit_beyond_the_context_fills_it(http: httpx.Client) -> None:
    reply = complete(http, [5] * (CONTEXT_LENGTH - 40), max_tokens=100_000)
    assert reply["choices"][0]["finish_reason"] == "length"
    assert reply["usage"]["total_tokens"] == CONTEXT_LENGTH


def test_prompts_around_the_length_of_the_context_are_served_or_refused(http: httpx.Client) -> None:
    for length in range(CONTEXT_LENGTH - 2, CONTEXT_LENGTH + 2):
        response = http.post("/v1/completions", json={"prompt": [7] * length, "max_tokens": 5, "ignore_eos": True})
        if length < CONTEXT_LENGTH:
            assert response.json()["usage"]["total_tokens"] == CONTEXT_LENGTH
        else:
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["code"] == "context_length_exceeded"
            assert str(length) in error["message"]
            assert str(CONTEXT_LENGTH) in error["message"]


def test_a_batch_with_one_bad_prompt_leaves_nothing_running(served: Served, http: httpx.Client) -> None:
    body = {"prompt": ["a", "b", [1] * 3000, "c"], "max_tokens": 1500, "ignore_eos": True}
    response = http.post("/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "prompt[2]"
    reply = complete(http, ["x", "y"], max_tokens=2)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    until_idle(served)


def test_clients_that_leave_at_any_moment_leave_nothing_running(served: Served) -> None:
    host, port = served.url.removeprefix("http://").split(":")
    chooser = random.Random(11)
    for turn in range(12):
        body = {
            "prompt": [[turn + 3, *range(3, 400)], words(turn, 30)],
            "max_tokens": 1500,
            "ignore_eos": True,
            "n": 2,
            "stream": turn % 2 == 0,
        }
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
            time.sleep(chooser.uniform(0, 0.3))
    until_idle(served)


def in_list(report: Any) -> list[Any]:
    return report if isinstance(report, list) else [report]


def test_counters_are_the_sum_of_the_replies(served: Served, http: httpx.Client) -> None:
    before = until_idle(served)
    report: dict[str, Any] = {"cache_report": True}
    replies = [
        complete(http, words(20, 30), max_tokens=7, **report),
        complete(http, words(20, 30), max_tokens=7, **report),
        complete(http, [words(21, 20), words(22, 20)], max_tokens=5, n=2, **report),
        http.post(
            "/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, **report}
        ).json(),
    ]
    meta = http.post("/generate", json={"text": words(20, 30), "sampling_params": {"max_new_tokens": 3}}).json()[
        "meta_info"
    ]
    reports = [found for reply in replies for found in in_list(reply["cache_report"])] + [meta["cache_report"]]
    usages = [reply["usage"] for reply in replies] + [{**meta, "prompt_tokens_details": meta}]
    after = until_idle(served)

    def grown(name: str) -> float:
        return after.value(f"sapwood_{name}") - before.value(f"sapwood_{name}")

    assert grown("prompt_tokens_total") == sum(usage["prompt_tokens"] for usage in usages)
    assert grown("cached_tokens_total") == sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    assert grown("cached_tokens_total") == sum(report["cached_tokens"] for report in reports)
    assert grown("prompt_tokens_total") - grown("cached_tokens_total") == sum(
        report["computed_tokens"] for report in reports
    )
    assert grown("cache_lookups_total") == len(reports) == 6
    assert grown("generation_tokens_total") == sum(usage["completion_tokens"] for usage in usages)
    assert grown("num_requests_total") == 1 + 1 + 4 + 1 + 1
    assert grown("step_seconds_count") > 0


def test_no_counter_falls_when_the_scheduler_is_killed(served: Served, http: httpx.Client) -> None:
    complete(http, words(30, 30), max_tokens=5)
    before = until_idle(served).counters()
    os.kill(served.workers()["scheduler"], signal.SIGKILL)
    for _ in range(600):
        now = scrape(served).counters()
        assert all(now[key] >= value for key, value in before.items())
        if http.post("/v1/completions", json={"prompt": words(30, 30), "max_tokens": 5}).status_code == 200:
            break
        time.sleep(0.1)
    now = until_idle(served).counters()
    assert all(now[key] >= value for key, value in before.items())
    name = "sapwood_computed_tokens_total"
    assert sum(v for k, v in now.items() if k[0] == name) > sum(v for k, v in before.items() if k[0] == name)


def test_every_client_of_a_full_queue_gets_an_answer(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = ("--max-queued-requests", "4", "--max-running-requests", "2", "--tokenizer-workers", "2")
    with serving(tiny_model, tmp_path_factory.mktemp("r"), *flags) as server, ThreadPoolExecutor(50) as pool:

        def ask(number: int) -> httpx.Response:
            body = {"prompt": words(number, 20), "max_tokens": 40, "ignore_eos": True, "stream": number % 2 == 0}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=120)

        responses = list(pool.map(ask, range(50)))
        statuses = [response.status_code for response in responses]
        assert set(statuses) <= {200, 429}
        assert statuses.count(200) >= 6
        for response in responses:
            if response.status_code == 429:
                assert response.json()["error"]["code"] == "queue_full"
                assert int(response.headers["retry-after"]) >= 1
        found = until_idle(server)
        assert found.value("sapwood_num_requests_total", finish_reason="length") == statuses.count(200)
        assert found.value("sapwood_num_requests_total", finish_reason="refused") == statuses.count(429)
        with openai.OpenAI(base_url=server.url + "/v1", api_key="none") as ai:
            assert ai.completions.create(model=ai.models.list().data[0].id, prompt="x", max_tokens=1).choices


def test_samples_of_one_prompt_differ_by_seed_and_come_in_order(ai: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": ai.models.list().data[0].id, "max_tokens": 12, "n": 2, "seed": 7}
    fields["messages"] = [{"role": "user", "content": "Tell me about rivers."}]
    replies = [ai.chat.completions.create(**fields) for _ in range(2)]
    texts = [[choice.message.content for choice in reply.choices] for reply in replies]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]
    assert [choice.index for choice in replies[0].choices] == [0, 1]
    chunks = ai.chat.completions.create(**fields, stream=True)
    streamed = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts[0]


@pytest.mark.parametrize(
    ("fields", "kind", "code"),
    [
        ({"temperature": -1}, openai.BadRequestError, "invalid_value"),
        ({"messages": []}, openai.BadRequestError, None),
        (
            {"messages": [{"role": "user", "content": "tree " * 4000}]},
            openai.BadRequestError,
            "context_length_exceeded",
        ),
        ({"model": "another"}, openai.NotFoundError, "model_not_found"),
        ({"extra_body": {"no_such_field": 1}}, openai.BadRequestError, "unknown_field"),
        ({"messages": [{"role": "user", "content": "x" * 9_000_000}]}, openai.APIStatusError, "request_too_large"),
    ],
)
def test_the_clients_exceptions_from_the_whole_runtime(
    ai: openai.OpenAI, fields: dict[str, Any], kind: type[openai.APIStatusError], code: str | None
) -> None:
    call = {"model": ai.models.list().data[0].id, "messages": [{"role": "user", "content": "x"}], "max_tokens": 3}
    for stream in (False, True):
        with pytest.raises(kind) as caught:
            ai.chat.completions.create(**{**call, **fields, "stream": stream})
        if code is not None:
            assert caught.value.code == code
    assert ai.chat.completions.create(**call).usage is not None


def test_a_timeout_ends_a_reply_with_what_it_has(http: httpx.Client) -> None:
    body = {"prompt": "The sapwood", "max_tokens": 2000, "ignore_eos": True, "timeout": 0.3, "temperature": 0}
    reply = http.post("/v1/completions", json=body).json()
    assert reply["choices"][0]["finish_reason"] == "abort"
    assert 0 < reply["usage"]["completion_tokens"] < 2000
    for name in ("timeout", "ttft_target"):
        for value in (0, -1, "soon"):
            refused = http.post("/v1/completions", json={"prompt": "x", name: value})
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == name
