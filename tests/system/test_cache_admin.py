"""Listing pins, letting them go, flushing prefixes and prewarming over HTTP, with a tiny model and two tenants."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.served import Served, serving

PAGE = 16
HEAD = "The oldest tree of this country stands near a lake. " * 3
SYSTEM = {"role": "system", "content": "You know every tree of this country, and its age. " * 2}


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("keys")
    keys = folder / "keys"
    keys.write_text("key-of-ann ann\nkey-of-bob bob\n")
    keys.chmod(0o600)
    flags = ("--dtype", "float32", "--max-total-tokens", "4096", "--api-keys-file", str(keys), "--api-key", "operator")
    with serving(tiny_model, tmp_path_factory.mktemp("r"), *flags) as server:
        yield server


def client(served: Served, key: str) -> httpx.Client:
    return httpx.Client(base_url=served.url, timeout=120, headers={"authorization": f"Bearer {key}"})


@pytest.fixture
def operator(served: Served) -> Iterator[httpx.Client]:
    with client(served, "operator") as operator:
        assert operator.post("/flush_cache").status_code == 200
        yield operator
        assert operator.get("/cache/check").status_code == 200


@pytest.fixture
def ann(served: Served, operator: httpx.Client) -> Iterator[httpx.Client]:
    with client(served, "key-of-ann") as ann:
        yield ann


@pytest.fixture
def bob(served: Served, operator: httpx.Client) -> Iterator[httpx.Client]:
    with client(served, "key-of-bob") as bob:
        yield bob


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, Any]:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def cached(client: httpx.Client, text: str, **fields: Any) -> int:
    """Tokens of a prompt that are in the cache, without leaving anything there."""
    body = {"text": text, "sampling_params": {"max_new_tokens": 1}, "no_store": True, **fields}
    tokens: int = post(client, "/generate", body)["meta_info"]["cached_tokens"]
    return tokens


def pins(client: httpx.Client) -> list[dict[str, Any]]:
    response = client.get("/cache/pins")
    assert response.status_code == 200
    found: list[dict[str, Any]] = response.json()["pins"]
    return found


def tokens_of(client: httpx.Client, text: str) -> int:
    return len(post(client, "/tokenize", {"prompt": text})["tokens"])


def test_prewarming_computes_a_prefix_once_and_pins_it(ann: httpx.Client) -> None:
    first = post(ann, "/cache/prewarm", {"text": HEAD, "pin": {"ttl_seconds": 60}})
    tokens = tokens_of(ann, HEAD)
    assert (first["prompt_tokens"], first["cached_tokens"], first["computed_tokens"]) == (tokens, 0, tokens)
    assert first["pins"][0]["pinned_tokens"] == tokens // PAGE * PAGE
    again = post(ann, "/cache/prewarm", {"text": HEAD})
    assert (again["cached_tokens"], again["computed_tokens"], again["pins"]) == (tokens - 1, 1, [])
    assert cached(ann, f"{HEAD}And how old is it?") >= tokens - 1


def test_a_prewarmed_chat_is_the_beginning_of_every_chat_that_goes_on_from_it(ann: httpx.Client) -> None:
    marked = {**SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    reply = post(ann, "/cache/prewarm", {"messages": [marked]})
    assert reply["pins"][0]["asked_tokens"] == reply["prompt_tokens"]
    body = {"messages": [SYSTEM, {"role": "user", "content": "Which is the oldest?"}], "max_tokens": 1}
    usage = post(ann, "/v1/chat/completions", body)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == reply["prompt_tokens"]


def test_pins_are_listed_to_their_tenant_alone(ann: httpx.Client, bob: httpx.Client) -> None:
    post(ann, "/cache/prewarm", {"text": HEAD, "pin": {"ttl_seconds": 60}, "cache_salt": "s"})
    (pin,) = pins(ann)
    assert pin["namespace"] == "salt:s"
    assert pin["tokens"] == pin["asked_tokens"] // PAGE * PAGE == tokens_of(ann, HEAD) // PAGE * PAGE
    assert 0 < pin["expires_in_seconds"] <= pin["ttl_seconds"] == 60
    assert HEAD.startswith(pin["text"])
    assert pin["end_text"] in HEAD
    assert (pin["hits"], len(pin["token_ids"])) == (0, PAGE)
    cached(ann, HEAD + "And how old is it?", cache_salt="s")
    assert pins(ann)[0]["hits"] == 1
    assert pins(bob) == []
    assert bob.delete(f"/cache/pins/{pin['id']}").status_code == 404
    assert bob.post("/cache/unpin", json={"id": pin["id"]}).status_code == 404
    assert post(bob, "/cache/unpin", {}) == {"unpinned": 0}
    assert len(pins(ann)) == 1


def test_pins_are_let_go_by_id_by_prefix_or_all_at_once(ann: httpx.Client) -> None:
    def pin(**fields: Any) -> int:
        post(ann, "/cache/prewarm", {"pin": {}, **fields})
        return int(pins(ann)[-1]["id"])

    assert ann.delete(f"/cache/pins/{pin(text=HEAD)}").json() == {"unpinned": 1}
    assert post(ann, "/cache/unpin", {"id": pin(text=HEAD)}) == {"unpinned": 1}
    pin(text=HEAD)
    pin(messages=[SYSTEM])
    pin(messages=[SYSTEM], cache_salt="s")
    assert post(ann, "/cache/unpin", {"messages": [SYSTEM]}) == {"unpinned": 1}
    assert post(ann, "/cache/unpin", {"messages": [SYSTEM]}) == {"unpinned": 0}
    assert post(ann, "/cache/unpin", {"cache_salt": "s"}) == {"unpinned": 1}
    ids = post(ann, "/tokenize", {"prompt": HEAD})["tokens"]
    assert post(ann, "/cache/unpin", {"input_ids": ids}) == {"unpinned": 1}
    pin(text=HEAD)
    pin(text=HEAD, cache_salt="s")
    assert post(ann, "/cache/unpin", {}) == {"unpinned": 2}
    # Letting go is not forgetting.
    assert cached(ann, HEAD) == len(ids) - 1
    missing = ann.delete("/cache/pins/12345")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "pin_not_found")


def test_a_prefix_is_flushed_with_its_pins_and_nothing_else(ann: httpx.Client, bob: httpx.Client) -> None:
    other = "Something else altogether, which has nothing to do with trees. " * 2
    for tenant in (ann, bob):
        for text in (HEAD, f"{HEAD}And how old is it? Tell me in years.", other):
            post(tenant, "/cache/prewarm", {"text": text, "pin": {}})
    post(ann, "/cache/prewarm", {"text": HEAD, "cache_salt": "s"})
    reply = post(ann, "/cache/flush", {"text": HEAD})
    assert reply["flushed_pages"] >= tokens_of(ann, HEAD) // PAGE
    assert (reply["kept_pages"], reply["unpinned"], reply["message"]) == (0, 2, None)
    assert cached(ann, HEAD) == 0
    assert cached(ann, other) == tokens_of(ann, other) - 1
    assert cached(ann, HEAD, cache_salt="s") == cached(bob, HEAD) == tokens_of(ann, HEAD) - 1
    # A namespace, and then all that is left of the tenant's.
    assert post(ann, "/cache/flush", {"cache_salt": "s"})["flushed_pages"] > 0
    assert cached(ann, HEAD, cache_salt="s") == 0
    assert post(ann, "/cache/flush", {})["unpinned"] == 1
    assert ann.get("/cache/tree").json()["runs"] == []
    assert cached(bob, HEAD) > 0


def test_a_flush_while_a_request_runs_says_what_stayed(ann: httpx.Client) -> None:
    post(ann, "/cache/prewarm", {"text": HEAD})
    post(ann, "/cache/prewarm", {"text": "What nobody holds may go at any time. " * 3})
    body = {"text": HEAD, "sampling_params": {"max_new_tokens": 3000, "ignore_eos": True}, "stream": True, "rid": "r"}
    begun, ended = threading.Event(), threading.Event()

    def read() -> None:
        with ann.stream("POST", "/generate", json=body) as reply:
            for _line in reply.iter_lines():
                begun.set()
        ended.set()

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    reply = post(ann, "/cache/flush", {})
    still_running = not ended.is_set()
    post(ann, "/abort_request", {"rid": "r"})
    reader.join()
    assert still_running
    assert reply["flushed_pages"] > 0
    assert reply["kept_pages"] >= tokens_of(ann, HEAD) // PAGE
    assert reply["message"]
    assert post(ann, "/cache/flush", {})["kept_pages"] == 0
    assert cached(ann, HEAD) == 0


def test_a_session_is_flushed_with_all_of_its_branches(ann: httpx.Client, bob: httpx.Client) -> None:
    short = {"max_new_tokens": 1}
    for client in (ann, bob):
        for text, session in ((HEAD, "a"), (f"{HEAD}And how old is it?", "a"), ("Another one. " * 9, "b")):
            post(client, "/generate", {"text": text, "sampling_params": short, "session": session})
    reply = post(ann, "/cache/flush", {"session": "a"})
    assert reply["flushed_pages"] >= tokens_of(ann, HEAD) // PAGE
    assert reply["kept_pages"] == 0
    assert cached(ann, HEAD) == 0
    assert cached(ann, "Another one. " * 9) > 0
    assert cached(bob, HEAD) > 0
    again = ann.post("/cache/flush", json={"session": "a"})
    assert (again.status_code, again.json()["error"]["code"]) == (404, "session_not_found")


def test_a_session_remembers_nothing_of_what_is_not_stored(ann: httpx.Client) -> None:
    body = {"text": HEAD, "sampling_params": {"max_new_tokens": 1}, "session": "once", "no_store": True}
    post(ann, "/generate", body)
    assert [one["id"] for one in ann.get("/cache/sessions").json()["sessions"] if one["id"] == "once"] == []


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/cache/flush", {"session": "a", "text": "b"}, "session"),
        ("/cache/prewarm", {}, "text"),
        ("/cache/prewarm", {"text": ""}, "text"),
        ("/cache/prewarm", {"text": "a", "messages": [SYSTEM]}, "messages"),
        ("/cache/prewarm", {"input_ids": [[1]]}, "input_ids"),
        ("/cache/prewarm", {"input_ids": []}, "input_ids"),
        ("/cache/prewarm", {"input_ids": [10**6]}, "input_ids[0]"),
        ("/cache/prewarm", {"text": "a", "pin": {"tokens": 99}}, "pin.tokens"),
        ("/cache/prewarm", {"text": "a", "max_tokens": 1}, "max_tokens"),
        ("/cache/prewarm", {"messages": [{"role": "king", "content": "a"}]}, "messages[0].role"),
        ("/cache/flush", {"text": "a", "cache_salt": ""}, "cache_salt"),
        ("/cache/flush", {"chat_template_kwargs": {}}, "chat_template_kwargs"),
        ("/cache/flush", {"id": 1}, "id"),
        ("/cache/unpin", {"id": 1, "text": "a"}, "id"),
        ("/cache/unpin", {"id": "1"}, "id"),
    ],
)
def test_what_means_nothing_is_refused_by_name(ann: httpx.Client, path: str, body: dict[str, Any], param: str) -> None:
    reply = ann.post(path, json=body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_the_number_of_a_pin_is_a_number(ann: httpx.Client) -> None:
    assert ann.delete("/cache/pins/first").status_code == 400
