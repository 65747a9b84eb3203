"""Cache reports in replies, explanations afterwards, and the tree."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from srt.answer import Answer, Ask
from srt.http.explanations import Explanations
from srt.messages import TextPrompt
from tests.http.running import Running, events

CHAT = "/v1/chat/completions"


def chat(client: httpx.Client, *lines: str, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": line} for line in lines]
    response = client.post(CHAT, json={"messages": messages, "max_tokens": 3, **fields})
    assert response.status_code == 200, response.text
    return response


def test_a_chat_reply_says_in_which_message_reuse_stopped(client: httpx.Client) -> None:
    chat(client, "a chat with", "several lines", "of words")
    reply = chat(client, "a chat with", "several roads", "of words", cache_report=True).json()
    report = reply["cache_report"]
    assert report["cached_tokens"] == len("a chat with several ")
    assert report["cached_tokens"] == reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert report["cached_tokens"] + report["computed_tokens"] == reply["usage"]["prompt_tokens"]
    assert (report["reason"], report["position"]) == ("diverged", 20)
    assert (report["message"], report["message_offset"]) == ("messages[1]", len("several "))
    assert report["before_text"] == "several "
    assert report["prompt_text"] == "roads\nof"
    assert report["prompt_next"] == list(b"roads\nof")
    assert sum(report["cached_tokens_by_tier"].values()) == report["cached_tokens"]
    assert report["explanation"].startswith("20 of 34 prompt tokens were reused. At token 20 (token 8 of messages[1])")
    assert "'roads\\nof'" in report["explanation"]


def test_nobody_who_did_not_ask_gets_a_report(client: httpx.Client) -> None:
    assert "cache_report" not in chat(client, "no report").json()
    assert "cache_report" not in chat(client, "no report", cache_report=False).json()
    assert all("cache_report" not in chunk for chunk in events(chat(client, "no report", stream=True))[:-1])
    assert "cache_report" not in client.post("/v1/completions", json={"prompt": "none"}).json()


@pytest.mark.parametrize("n", [1, 3])
def test_a_stream_has_it_once_with_the_last_that_ends_or_with_the_usage(client: httpx.Client, n: int) -> None:
    whole = chat(client, "streams and reports", cache_report=True, n=n).json()["cache_report"]
    assert whole is not None
    *chunks, done = events(chat(client, "streams and reports", cache_report=True, n=n, stream=True))
    assert done == "[DONE]"
    assert [("cache_report" in chunk) for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["cache_report"]["reason"] == "all_cached"
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, _ = events(chat(client, "streams and reports", cache_report=True, n=n, **options))
    assert [("cache_report" in chunk) for chunk in chunks] == [*[False] * (len(chunks) - 1), True]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["cache_report"]["cached_tokens"] == chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"]


def test_several_prompts_have_a_report_each(client: httpx.Client) -> None:
    body = {"prompt": ["first of two", "first of many"], "max_tokens": 2, "n": 2, "cache_report": True}
    reply = client.post("/v1/completions", json=body).json()
    reports = reply["cache_report"]
    assert [report["cached_tokens"] for report in reports] == [0, len("first of ")]
    assert sum(r["cached_tokens"] for r in reports) == reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert all(report["message"] is None for report in reports)
    *chunks, _ = events(client.post("/v1/completions", json={**body, "stream": True}))
    assert [len(chunk.get("cache_report", ())) for chunk in chunks] == [*[0] * (len(chunks) - 1), 2]
    single = client.post("/v1/completions", json={**body, "prompt": "first of all"}).json()["cache_report"]
    assert single["cached_tokens"] == len("first of ")


def test_the_native_endpoint_always_has_it(client: httpx.Client) -> None:
    client.post("/generate", json={"text": "native words", "sampling_params": {"max_new_tokens": 2}})
    body = {"text": "native tongues", "sampling_params": {"max_new_tokens": 3}}
    meta = client.post("/generate", json=body).json()["meta_info"]
    assert meta["cache_report"]["cached_tokens"] == meta["cached_tokens"] == len("native ")
    *replies, _ = events(client.post("/generate", json={**body, "stream": True}))
    assert all(reply["meta_info"]["cache_report"]["reason"] == "all_cached" for reply in replies)


def test_it_is_explained_later_under_the_id_that_the_client_has(client: httpx.Client) -> None:
    reply = chat(client, "explain this later", cache_report=True, n=2).json()
    told = client.get(f"/cache/explain/{reply['id']}").json()
    assert told["id"] == reply["id"]
    assert told["prompts"] == [
        {"place": "messages", "prompt_tokens": reply["usage"]["prompt_tokens"], "cache_report": reply["cache_report"]}
    ]
    client.post("/generate", json={"text": ["one", "two"], "rid": ["my/own id?", "another"]})
    (mine,) = client.get("/cache/explain/my%2Fown%20id%3F").json()["prompts"]
    assert (mine["place"], mine["prompt_tokens"]) == ("text[0]", 3)
    stream = events(chat(client, "and this", stream=True))
    (streamed,) = client.get(f"/cache/explain/{stream[0]['id']}").json()["prompts"]
    assert streamed["prompt_tokens"] == len("and this")
    assert streamed["cache_report"]["cached_tokens"] + streamed["cache_report"]["computed_tokens"] == len("and this")


def test_a_request_that_nobody_knows_is_404(client: httpx.Client) -> None:
    response = client.get("/cache/explain/chatcmpl-0000")
    assert response.status_code == 404
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("request_id", "request_not_found")


def test_a_request_that_runs_is_explained_too_and_one_that_failed_has_no_report(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        body = {"text": "hang after some", "rid": "runs", "stream": True}
        with client.stream("POST", "/generate", json=body) as response:
            next(response.iter_lines())
            (told,) = client.get("/cache/explain/runs").json()["prompts"]
            assert told["cache_report"]["computed_tokens"] == len("hang after some")
        assert client.post("/generate", json={"text": "full", "rid": "failed"}).status_code == 429
        assert client.get("/cache/explain/failed").json()["prompts"][0]["cache_report"] is None


def answer(tenant: str = "") -> Answer:
    async def make() -> Answer:
        return Answer(Ask(TextPrompt("x"), tenant=tenant), ("r",), lambda: 0.0)

    return asyncio.run(make())


def test_explanations_are_bounded_by_prompts_and_forget_the_oldest() -> None:
    explanations = Explanations(max_prompts=10)
    for number in range(30):
        explanations.open("", f"r{number}", [("prompt[0]", answer()), ("prompt[1]", answer())])
        explanations.close("", f"r{number}")
    assert [n for n in range(30) if explanations.find("", f"r{n}") is not None] == [25, 26, 27, 28, 29]
    explanations.open("", "big", [("p", answer())] * 11)
    assert explanations.find("", "big") is None
    explanations.close("", "big")
    explanations.open("", "small", [("p", answer())])
    assert explanations.find("", "small") is not None


def test_an_id_that_is_used_again_counts_once_and_the_answers_are_let_go_of() -> None:
    explanations = Explanations(max_prompts=3)
    explanations.open("", "other", [("p", answer())])
    for _ in range(20):
        explanations.open("", "again", [("p", answer())])
        explanations.close("", "again")
    assert explanations.find("", "other") is not None
    ((_, told),) = explanations.find("", "again") or ()
    assert not isinstance(told, Answer)


def test_a_tenant_is_told_of_its_own_requests_only() -> None:
    explanations = Explanations()
    explanations.open("alice", "r", [("p", answer("alice"))])
    assert explanations.find("bob", "r") is None
    assert explanations.find("", "r") is None
    explanations.open("bob", "r", [("p", answer("bob"))])
    assert explanations.find("alice", "r") is not None


def test_the_tree_is_runs_within_runs(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        assert client.get("/cache/tree").json()["runs"] == []
        chat(client, "zebra")
        chat(client, "apples", cache_salt="mine")
        found = client.get("/cache/tree").json()
        assert (found["nodes"], found["left_out"], found["bytes_per_page"]) == (3, 0, 1024)
        zebra, apples = found["runs"]
        assert (zebra["text"], zebra["tokens"], zebra["bytes"], zebra["hits"]) == ("zebr", 5, 5 * 1024, 2)
        assert (zebra["namespace"], apples["namespace"]) == ("", "salt:mine")
        assert (zebra["num_children"], zebra["children"][0]["text"]) == (1, "belo")
        assert apples["children"] == []
        shallow = client.get("/cache/tree?depth=1&limit=1").json()
        assert (shallow["nodes"], shallow["left_out"], shallow["runs"][0]["children"]) == (1, 2, [])


@pytest.mark.parametrize("query", ["depth=0", "depth=65", "depth=x", "depth=", "depth=-1", "limit=10001", "limit=1.5"])
def test_a_bound_that_is_out_of_range_is_refused_by_name(client: httpx.Client, query: str) -> None:
    response = client.get(f"/cache/tree?{query}")
    assert response.status_code == 400
    assert response.json()["error"]["param"] == query.partition("=")[0]


def test_without_a_scheduler_there_is_no_tree(server: Running) -> None:
    server.front.state = "restarting"
    response = httpx.get(f"{server.url}/cache/tree")
    assert response.status_code == 503
    assert response.json()["error"]["code"] == "worker_died"


def test_a_key_is_asked_for(start: Any) -> None:
    running = start(api_key="secret")
    assert httpx.get(f"{running.url}/cache/tree").status_code == 401
    assert httpx.get(f"{running.url}/cache/explain/x").status_code == 401
    headers = {"Authorization": "Bearer secret"}
    assert httpx.get(f"{running.url}/cache/tree", headers=headers).status_code == 200
