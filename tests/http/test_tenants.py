"""Keys of several tenants: each is told of its own requests alone, and the operator's routes are the operator's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tests.http.running import Running

OPERATOR, ALICE, BOB = "operators-key", "alices-key", "bobs-key"


@pytest.fixture
def running(start: Callable[..., Running], tmp_path: Path) -> Running:
    path = tmp_path / "keys"
    path.write_text(f"{ALICE} alice\n{BOB} bob\n")
    path.chmod(0o600)
    return start(api_key=OPERATOR, api_keys_file=str(path))


@pytest.fixture
def clients(running: Running) -> Iterator[dict[str, httpx.Client]]:
    """A client for each holder of a key."""
    made = {
        name: httpx.Client(base_url=running.url, headers={"authorization": f"Bearer {key}"}, timeout=30)
        for name, key in (("operator", OPERATOR), ("alice", ALICE), ("bob", BOB))
    }
    yield made
    for client in made.values():
        client.close()


def test_asks_carry_the_tenant_of_their_key_on_every_generating_route(
    running: Running, clients: dict[str, httpx.Client]
) -> None:
    bodies = {
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1},
        "/v1/completions": {"prompt": "hi", "max_tokens": 1},
        "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 1}},
    }
    for path, body in bodies.items():
        for salt in ({}, {"cache_salt": "s"}):
            for client in clients.values():
                assert client.post(path, json={**body, **salt}).status_code == 200
    told = [(ask.tenant, ask.namespace) for ask in running.front.asks]
    plain = [("", ""), ("alice", "alice"), ("bob", "bob")]
    salted = [(tenant, f"{tenant}\x1fsalt:s") for tenant, _ in plain]
    assert told == [*plain, *salted] * 3


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/metrics"), ("GET", "/server_info"), ("POST", "/flush_cache"), ("GET", "/cache/check")],
)
def test_what_concerns_the_whole_server_takes_the_operators_key(
    clients: dict[str, httpx.Client], method: str, path: str
) -> None:
    refused = clients["alice"].request(method, path)
    assert refused.status_code == 403
    error = refused.json()["error"]
    assert (error["type"], error["param"], error["code"]) == ("permission_error", "Authorization", "operator_only")
    assert clients["operator"].request(method, path).status_code == 200


def test_a_key_that_is_nobodys_is_refused(running: Running) -> None:
    for key in (f"{ALICE}x", "alice", "x"):
        response = httpx.get(running.url + "/v1/models", headers={"authorization": f"Bearer {key}"})
        assert response.status_code == 401


def test_no_key_is_told_anywhere(clients: dict[str, httpx.Client]) -> None:
    told = clients["operator"].get("/server_info").text + clients["operator"].get("/metrics").text
    assert not any(key in told for key in (OPERATOR, ALICE, BOB))


def test_a_request_of_another_tenant_is_one_that_does_not_exist(clients: dict[str, httpx.Client]) -> None:
    reply = clients["alice"].post("/v1/completions", json={"prompt": "a secret", "max_tokens": 1}).json()
    path = f"/cache/explain/{reply['id']}"
    assert clients["alice"].get(path).status_code == 200
    unknown = clients["bob"].get(path)
    assert unknown.status_code == 404
    assert unknown.text.replace(reply["id"], "x") == clients["bob"].get("/cache/explain/x").text
    assert clients["operator"].get(path).status_code == 404


def test_tenants_may_use_the_same_id_and_end_only_their_own(clients: dict[str, httpx.Client]) -> None:
    body = {"text": "hang after the fifth", "rid": "mine", "stream": True}
    with clients["alice"].stream("POST", "/generate", json=body) as running:
        lines = running.iter_lines()
        next(lines)
        assert clients["bob"].post("/abort_request", json={"rid": "mine"}).json()["aborted"] == 0
        other = {"text": "hi", "rid": "mine", "sampling_params": {"max_new_tokens": 1}}
        assert clients["bob"].post("/generate", json=other).status_code == 200
        # It is Alice's own that the id is still in use for.
        assert clients["alice"].post("/generate", json=other).status_code == 400
        assert clients["bob"].get("/cache/explain/mine").json()["prompts"][0]["prompt_tokens"] == 2
        assert clients["alice"].get("/cache/explain/mine").json()["prompts"][0]["prompt_tokens"] > 2
        assert clients["alice"].post("/abort_request", json={"rid": "mine"}).json()["aborted"] == 1
        assert any('"abort"' in line for line in lines)
