"""Sessions over HTTP: a conversation that is said to be done makes room first, and each tenant sees its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.served import Served, serving
from tests.system.tenants import everybody, flags

GENERATE = {"max_new_tokens": 2, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    own = flags(tmp_path_factory.mktemp("k"), "--max-total-tokens", "1024")
    with serving(tiny_model, tmp_path_factory.mktemp("r"), *own) as server:
        yield server


@pytest.fixture
def clients(served: Served) -> Iterator[dict[str, httpx.Client]]:
    with everybody(served) as made:
        yield made


def generate(client: httpx.Client, ids: list[int], **fields: Any) -> int:
    """Cached tokens of one native request."""
    response = client.post("/generate", json={"input_ids": ids, "sampling_params": GENERATE, **fields})
    assert response.status_code == 200, response.text
    return int(response.json()["meta_info"]["cached_tokens"])


def test_every_generating_route_takes_part_in_a_session(clients: dict[str, httpx.Client]) -> None:
    alice = clients["alice"]
    talk = [{"role": "user", "content": "Which tree is this?"}]
    short = {"max_tokens": 2, "temperature": 0}
    reply = alice.post("/v1/chat/completions", json={"messages": talk, **short, "session": "chat"}).json()
    alice.post("/v1/completions", json={"prompt": "Each year", **short, "session": {"id": "text", "state": "done"}})
    assert generate(alice, list(range(20, 60)), session={"id": "native"}) == 0
    told = alice.get("/cache/sessions").json()
    assert told["total"] == 3
    assert [one["id"] for one in told["sessions"]] == ["native", "text", "chat"]
    native, text, chat = told["sessions"]
    assert (native["state"], text["state"], chat["state"]) == ("open", "done", "open")
    assert native["tokens"] == native["cached_tokens"] == 41
    assert native["runs"] == [{"namespace": "", "tokens": 41, "cached_tokens": 41}]
    assert chat["tokens"] == reply["usage"]["total_tokens"] - 1
    assert native["running"] == 0
    assert 0 <= native["age_seconds"] < 60
    assert len(alice.get("/cache/sessions?limit=1").json()["sessions"]) == 1
    assert alice.get("/cache/sessions/native").json()["id"] == "native"


def test_a_session_that_is_done_makes_room_first(clients: dict[str, httpx.Client]) -> None:
    alice = clients["alice"]
    runs = {name: [number] * 300 for number, name in enumerate(("old", "kept", "closed"), start=50)}
    for name, ids in runs.items():
        generate(alice, ids, session=name)
    assert alice.post("/cache/sessions/closed", json={"state": "done"}).json()["state"] == "done"
    generate(alice, [90] * 300)
    left = {name: alice.get(f"/cache/sessions/{name}").json()["cached_tokens"] for name in runs}
    # The one used last went, since nobody needs it any more; the oldest stayed.
    assert left["closed"] < 301
    assert left["old"] == left["kept"] == 301


def test_a_session_can_be_forgotten_without_what_others_share(clients: dict[str, httpx.Client]) -> None:
    alice = clients["alice"]
    head = list(range(100, 164))
    generate(alice, [*head, *[1] * 40], session="one")
    generate(alice, [*head, *[2] * 40], session="other")
    assert clients["bob"].post("/cache/sessions/one/flush").status_code == 404
    told = alice.post("/cache/sessions/one/flush").json()
    assert told["flushed_pages"] == 3
    assert told["kept_pages"] == 0
    assert alice.get("/cache/sessions/one").status_code == 404
    assert alice.get("/cache/sessions/other").json()["cached_tokens"] == 105
    assert alice.post("/cache/sessions/one/flush").json()["error"]["code"] == "session_not_found"
    # The head is there for everybody who goes on from it.
    assert generate(alice, [*head, *[1] * 40]) == 64


def test_a_session_is_known_to_its_tenant_alone(clients: dict[str, httpx.Client]) -> None:
    generate(clients["alice"], [60] * 20, session="secret")
    for name in ("bob", "operator"):
        assert "secret" not in clients[name].get("/cache/sessions").text
        for response in (
            clients[name].get("/cache/sessions/secret"),
            clients[name].post("/cache/sessions/secret", json={"state": "done"}),
        ):
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "session_not_found"
    assert clients["alice"].get("/cache/sessions/secret").json()["state"] == "open"


@pytest.mark.parametrize(
    ("session", "param"),
    [
        ("", "session"),
        ("a/b", "session"),
        ("x" * 257, "session"),
        ({"id": "\n"}, "session.id"),
        ({"id": "a", "state": "asleep"}, "session.state"),
        ({"state": "done"}, "session.id"),
        ({"id": "a", "more": 1}, "session.more"),
        (7, "session"),
    ],
)
def test_a_session_that_is_none_is_refused_by_name(clients: dict[str, httpx.Client], session: Any, param: str) -> None:
    for path, body in (("/generate", {"text": "x"}), ("/v1/completions", {"prompt": "x"})):
        response = clients["alice"].post(path, json={**body, "session": session})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("body", "param"), [({}, "state"), ({"state": "gone"}, "state"), ({"state": 1}, "state"), ([], "body")]
)
def test_a_state_that_is_none_is_refused_by_name(clients: dict[str, httpx.Client], body: Any, param: str) -> None:
    response = clients["alice"].post("/cache/sessions/any", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
    assert clients["alice"].get("/cache/sessions?limit=0").json()["error"]["param"] == "limit"
