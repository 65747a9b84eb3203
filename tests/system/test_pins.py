"""Pins and `no_store` over HTTP, with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.served import Served, empty_cache, serving, wait_until

# Small enough that a few prompts push the others out.
POOL_TOKENS = 1024
PAGE = 16


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "4")
    with serving(tiny_model, tmp_path_factory.mktemp("r"), *flags) as server:
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with empty_cache(served) as client:
        yield client


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def generate(client: httpx.Client, text: str, **fields: Any) -> dict[str, Any]:
    body = {"text": text, "sampling_params": {"max_new_tokens": 2, "temperature": 0}, **fields}
    meta: dict[str, Any] = post(client, "/generate", body)["meta_info"]
    return meta


def flood(client: httpx.Client) -> None:
    """Other prompts that take the whole pool."""
    for number in range(8):
        post(client, "/v1/completions", {"prompt": f"{number} other things " * 40, "max_tokens": 1})


def metric(client: httpx.Client, name: str) -> float:
    (line,) = (line for line in client.get("/metrics").text.splitlines() if line.startswith(f"{name}{{"))
    return float(line.rsplit(" ", 1)[1])


def test_a_marked_message_stays_through_a_flood(http: httpx.Client) -> None:
    marked = {"type": "ephemeral", "ttl": "1h"}
    system = {"role": "system", "content": [{"type": "text", "text": "You know trees. " * 8, "cache_control": marked}]}
    talk = [system, {"role": "user", "content": "Which tree is this?"}]
    reply = post(http, "/v1/chat/completions", {"messages": talk, "max_tokens": 2})
    (pin,) = reply["cache_report"]["pins"]
    # The place is the end of the message: what every chat with this system message begins with.
    unmarked = {"role": "system", "content": "You know trees. " * 8}
    other = [unmarked, {"role": "user", "content": "How old is it?"}]
    ids = [http.post("/tokenize", json={"messages": chat}).json()["tokens"] for chat in (talk, other)]
    shared = next(place for place, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    assert shared - PAGE < pin["asked_tokens"] <= shared
    assert pin["pinned_tokens"] == pin["asked_tokens"] // PAGE * PAGE
    assert (pin["message"], pin["ttl_seconds"]) == ("messages[0]", 3600)
    assert pin["shortfall"] == (None if pin["pinned_tokens"] == pin["asked_tokens"] else "page_border")
    flood(http)
    body = {"messages": other, "max_tokens": 2, "cache_report": True}
    report = post(http, "/v1/chat/completions", body)["cache_report"]
    assert report["cached_tokens"] >= pin["pinned_tokens"]
    assert report["pins"] == []
    (run,) = (run for run in http.get("/cache/tree").json()["runs"] if run["pins"])
    assert (run["pins"], run["users"], run["tokens"]) == (1, 0, pin["pinned_tokens"])
    assert metric(http, "sapwood_pages_pinned") * PAGE == pin["pinned_tokens"]
    assert metric(http, "sapwood_pins") == 1


def test_the_native_field_pins_the_prompt_or_its_first_tokens(http: httpx.Client) -> None:
    prompt = "A tree that somebody needs for a while " * 3
    tokens = len(http.post("/tokenize", json={"prompt": prompt}).json()["tokens"])
    (pin,) = generate(http, prompt, pin={})["cache_report"]["pins"]
    assert (pin["asked_tokens"], pin["pinned_tokens"]) == (tokens, tokens // PAGE * PAGE)
    assert pin["ttl_seconds"] == 300
    (pin,) = generate(http, prompt, pin={"tokens": PAGE, "ttl_seconds": 9.5})["cache_report"]["pins"]
    assert pin == {
        "asked_tokens": PAGE,
        "pinned_tokens": PAGE,
        "ttl_seconds": 9.5,
        "message": None,
        "shortfall": None,
        "explanation": f"{PAGE} of {PAGE} tokens are pinned: all of it is pinned.",
    }
    body = {"prompt": prompt, "max_tokens": 1, "pin": {"tokens": PAGE}}
    assert post(http, "/v1/completions", body)["cache_report"]["pins"][0]["pinned_tokens"] == PAGE


def test_what_does_not_fit_the_share_is_told(http: httpx.Client) -> None:
    prompt = "What is too long to be pinned as a whole " * 40
    (pin,) = generate(http, prompt, pin={"ttl_seconds": 60})["cache_report"]["pins"]
    assert pin["asked_tokens"] > pin["pinned_tokens"] == POOL_TOKENS // 4
    assert pin["shortfall"] == "namespace_share"
    assert "--max-pinned-share" in pin["explanation"]


def test_a_pin_ends_by_itself(http: httpx.Client) -> None:
    generate(http, "A tree for a moment, and for no longer than that moment is", pin={"ttl_seconds": 0.2})
    wait_until(lambda: metric(http, "sapwood_pins") == 0)


def test_a_request_without_store_leaves_nothing(http: httpx.Client) -> None:
    prompt = "A question that is asked once and never again " * 3
    assert generate(http, prompt, no_store=True)["cached_tokens"] == 0
    assert http.get("/cache/tree").json()["runs"] == []
    assert generate(http, prompt)["cached_tokens"] == 0
    assert generate(http, prompt, no_store=True)["cached_tokens"] > 40
    talk = [{"role": "user", "content": "Once and never again."}]
    body = {"messages": talk, "max_tokens": 2, "no_store": True, "cache_salt": "once"}
    post(http, "/v1/chat/completions", body)
    assert all(run["namespace"] == "" for run in http.get("/cache/tree").json()["runs"])


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/generate", {"text": "a", "pin": {"tokens": 0}}, "pin.tokens"),
        ("/generate", {"text": "a", "pin": {"tokens": 500}}, "pin.tokens"),
        ("/generate", {"text": "a", "pin": {"ttl_seconds": 0}}, "pin.ttl_seconds"),
        ("/generate", {"text": "a", "pin": {"ttl_seconds": 1e9}}, "pin.ttl_seconds"),
        ("/generate", {"text": "a", "pin": {"seconds": 1}}, "pin.seconds"),
        ("/generate", {"text": "a", "pin": {}, "no_store": True}, "no_store"),
        ("/v1/completions", {"prompt": "a", "pin": True}, "pin"),
        ("/v1/completions", {"prompt": "a", "no_store": 1}, "no_store"),
    ],
)
def test_what_cannot_be_pinned_is_refused_by_name(
    http: httpx.Client, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = http.post(path, json=fields)
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("mark", "field"),
    [
        ({"type": "forever"}, ".type"),
        ({}, ".type"),
        ({"type": "ephemeral", "ttl": "2h"}, ".ttl"),
        ({"type": "ephemeral", "ttl": 300}, ".ttl"),
        ({"type": "ephemeral", "for": "me"}, ".for"),
    ],
)
def test_a_mark_that_means_nothing_is_refused(http: httpx.Client, mark: dict[str, Any], field: str) -> None:
    part = {"type": "text", "text": "Hello", "cache_control": mark}
    for message, place in (
        ({"role": "user", "content": [part]}, "messages[0].content[0].cache_control"),
        ({"role": "user", "content": "Hello", "cache_control": mark}, "messages[0].cache_control"),
    ):
        reply = http.post("/v1/chat/completions", json={"messages": [message]})
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == place + field


def test_five_marks_are_too_many(http: httpx.Client) -> None:
    message = {"role": "user", "content": "Hello", "cache_control": {"type": "ephemeral"}}
    reply = http.post("/v1/chat/completions", json={"messages": [message] * 5})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")
    assert http.post("/v1/chat/completions", json={"messages": [message] * 4, "max_tokens": 1}).status_code == 200
