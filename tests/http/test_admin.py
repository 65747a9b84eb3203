"""The endpoints that do not generate, and the key that guards all but one of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import httpx

from tests.http.running import Running

KEY = "sk-secret"


def test_a_reply_can_be_ended_by_the_id_that_its_stream_tells(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        body = {"prompt": ["hang after five", "hang after six"], "stream": True, "max_tokens": 50}
        with client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.iter_lines()
            name = json.loads(next(lines).removeprefix("data: "))["id"]
            assert client.post("/abort_request", json={"rid": name[:-1]}).json()["aborted"] == 0
            assert client.post("/abort_request", json={"rid": name}).json()["aborted"] == 2
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"finish_reason":"abort"' in line for line in rest) == 2
        assert client.post("/abort_request", json={"rid": name}).json()["aborted"] == 0


def test_health_follows_the_front(server: Running) -> None:
    response = httpx.get(server.url + "/health")
    assert response.status_code == 200
    assert response.json() == {"status": "ok", "workers": {"scheduler": "up"}}
    server.front.state = "restarting"
    response = httpx.get(server.url + "/health")
    assert response.status_code == 503
    assert response.json()["status"] == "restarting"


def test_the_model_is_listed_and_found_by_its_name(start: Callable[..., Running]) -> None:
    server = start(served_model_name="org/my model")
    listed = httpx.get(server.url + "/v1/models").json()
    assert listed["object"] == "list"
    assert [model["id"] for model in listed["data"]] == ["org/my model"]
    assert listed["data"][0]["max_model_len"] == 2048
    assert httpx.get(server.url + "/v1/models/org/my%20model").json() == listed["data"][0]
    missing = httpx.get(server.url + "/v1/models/other")
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
    body = {"prompt": "x", "model": "org/my model"}
    assert httpx.post(server.url + "/v1/completions", json=body).json()["model"] == "org/my model"


def test_server_info_tells_everything_but_the_key(start: Callable[..., Running]) -> None:
    server = start(api_key=KEY)
    response = httpx.get(server.url + "/server_info", headers={"authorization": f"Bearer {KEY}"})
    info = response.json()
    assert KEY not in response.text
    assert info["config"]["api_key"] == "set"
    assert info["config"]["page_size"] == 16
    assert info["model"]["context_length"] == 2048
    assert info["status"]["state"] == "ok"
    assert info["workers"] == {"scheduler": {"threads": 1, "pid": 4711}}
    pages = info["scheduler"]
    assert pages["pages_free"] + pages["pages_cached"] + pages["pages_in_use"] == pages["pages_total"]


def test_the_cache_is_flushed_unless_it_is_in_use(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:

        def cached() -> int:
            usage = client.post("/v1/completions", json={"prompt": "again", "max_tokens": 1}).json()["usage"]
            tokens: int = usage["prompt_tokens_details"]["cached_tokens"]
            return tokens

        assert [cached(), cached()] == [0, 4]
        assert client.post("/flush_cache").json()["success"]
        assert cached() == 0
        server.front.busy = True
        refused = client.post("/flush_cache")
        assert refused.status_code == 409
        assert refused.json()["error"]["code"] == "cache_in_use"


def test_the_pages_can_be_recounted(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert client.get("/cache/check").json() == {"consistent": True, "fault": None}
        server.front.busy = True
        assert client.get("/cache/check").json() == {
            "consistent": False,
            "fault": "page 3 has 2 owners and a count of 1",
        }


def test_a_text_and_a_conversation_are_tokenized(client: httpx.Client) -> None:
    assert client.post("/tokenize", json={"prompt": "hé"}).json() == {
        "tokens": [104, 195, 169],
        "count": 3,
        "max_model_len": 2048,
    }
    messages = [{"role": "user", "content": "ab"}]
    assert client.post("/tokenize", json={"model": "fake", "messages": messages}).json()["count"] == 2
    for body in ({}, {"prompt": "x", "messages": messages}, {"prompt": 5}, {"prompt": None}):
        response = client.post("/tokenize", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "prompt"
    assert client.post("/tokenize", json={"messages": [{"role": "x"}]}).json()["error"]["param"] == "messages[0].role"


def every_route(running: Running) -> Iterator[tuple[str, str]]:
    """(method, path) of each route that the server says it has, and of the list of them itself."""
    headers = {"authorization": f"Bearer {KEY}"}
    paths = httpx.get(running.url + "/openapi.json", headers=headers).json()["paths"]
    for path, methods in paths.items():
        for method in methods:
            yield method.upper(), path.replace("{model}", "fake")
    yield "GET", "/openapi.json"
    yield "GET", "/nowhere"


def test_a_key_guards_every_route_but_health(start: Callable[..., Running]) -> None:
    server = start(api_key=KEY)
    routes = list(every_route(server))
    assert len(routes) >= 12
    wrong = [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": f"Bearer {KEY}x"},
        {"authorization": f"Bearer {KEY[:-1]}"},
        {"authorization": KEY},
        {"authorization": f"Basic {KEY}"},
        {"authorization": "Bearer"},
        {"authorization": f"bearer {KEY.upper()}"},
        {"authorization": b"Bearer \xff\xfe"},
        {"x-api-key": KEY},
    ]
    with httpx.Client(base_url=server.url) as client:
        for method, path in routes:
            for headers in wrong:
                status = client.request(method, path, headers=headers).status_code  # type: ignore[arg-type]
                assert status == (200 if path == "/health" else 401), (method, path, headers)
    refused = httpx.post(server.url + "/generate", json={"text": "x"})
    assert refused.json()["error"]["code"] == "invalid_api_key"
    assert refused.headers["www-authenticate"] == "Bearer"
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} {KEY}"}
        assert httpx.post(server.url + "/generate", json={"text": "x"}, headers=headers).status_code == 200


def test_a_body_is_not_read_before_the_key_is(start: Callable[..., Running]) -> None:
    server = start(api_key=KEY)
    response = httpx.post(server.url + "/generate", content=b"x" * 3_000_000)
    assert response.status_code == 401
