"""Bodies that are no request: broken JSON, broken text, too much of it, and what surrounds them."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest

from srt.http.body import decode
from srt.http.errors import ApiError, quoted
from tests.http.running import Running

ROUTES = ("/v1/chat/completions", "/v1/completions", "/generate", "/tokenize", "/abort_request")
JSON = {"content-type": "application/json"}


def error(response: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error of a reply, in OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    found: dict[str, Any] = body["error"]
    assert list(found) == ["message", "type", "param", "code"]
    assert isinstance(found["message"], str)
    assert found["message"]
    return found


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"   ",
        b"[]",
        b"null",
        b"5",
        b'"text"',
        b'{"model":"m",,}',
        b'{"model":"fake"',
        b'{"model":"fake"} and more',
        b"{'model': 'fake'}",
        b'{"model": "\xff"}',
        b'{"model": "\x01"}',
        b"\xef\xbb\xbf{}",
        b"{" * 100_000,
        b"[" * 100_000,
        b'{"model":' * 50_000,
        b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b"\x00",
    ],
    ids=lambda body: str(body[:20]),
)
def test_what_is_no_json_object_is_refused_as_a_body(client: httpx.Client, route: str, body: bytes) -> None:
    found = error(client.post(route, content=body, headers=JSON))
    assert found["param"] == "body"
    assert "body" in found["message"]


@pytest.mark.parametrize(
    ("text", "param"),
    [
        ('{"prompt":"x","temperature":NaN}', "temperature"),
        ('{"prompt":"x","top_p":Infinity}', "top_p"),
        ('{"prompt":"x","min_p":-Infinity}', "min_p"),
        ('{"prompt":"x","presence_penalty":1e999}', "presence_penalty"),
        ('{"prompt":"x","frequency_penalty":-1e999}', "frequency_penalty"),
        ('{"prompt":"x","logit_bias":{"5":NaN}}', "logit_bias.5"),
        ('{"prompt":[1,NaN]}', "prompt[1]"),
        ('{"prompt":"\\ud800 hi"}', "prompt"),
        ('{"prompt":["a","\\udc00"]}', "prompt[1]"),
        ('{"prompt":"x","stop":["a","\\ud800"]}', "stop[1]"),
        ('{"prompt":"x","user":"\\ud800"}', "user"),
        ('{"prompt":"x","metadata":{"a":{"b":"\\ud800"}}}', "metadata.a.b"),
        ('{"prompt":"x","n":1' + "0" * 5000 + "}", "n"),
        ('{"prompt":"x","n":1' + "0" * 200 + "}", "n"),
        ('{"prompt":"x","seed":-9' + "0" * 30 + "}", "seed"),
        ('{"prompt":"x","max_tokens":1e3}', "max_tokens"),
    ],
    ids=lambda value: value[:50],
)
def test_what_json_cannot_say_is_named_with_its_place(client: httpx.Client, text: str, param: str) -> None:
    found = error(client.post("/v1/completions", content=text, headers=JSON))
    assert found["param"] == param
    assert param in found["message"]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/generate"])
def test_numbers_without_a_value_are_refused_on_every_route(client: httpx.Client, route: str) -> None:
    body = {
        "/generate": '{"text":"x","sampling_params":{"temperature":%s}}',
        "/v1/chat/completions": '{"messages":[{"role":"user","content":"x"}],"temperature":%s}',
    }[route]
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        found = error(client.post(route, content=body % number, headers=JSON))
        assert found["param"].endswith("temperature")


def test_half_a_surrogate_pair_is_refused_before_a_stream_begins(client: httpx.Client) -> None:
    text = '{"messages":[{"role":"user","content":"\\ud800 hi"}],"stream":true}'
    found = error(client.post("/v1/chat/completions", content=text, headers=JSON))
    assert found["param"] == "messages[0].content"
    assert "Error" not in found["message"]
    whole = '{"messages":[{"role":"user","content":"\\ud83d\\ude00"}],"max_tokens":4}'
    reply = client.post("/v1/chat/completions", content=whole, headers=JSON)
    assert reply.json()["choices"][0]["message"]["content"] == "😀"


def test_a_name_given_twice_counts_the_last_time(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", content='{"prompt":"a","prompt":"b","max_tokens":1}', headers=JSON)
    assert reply.json()["choices"][0]["text"] == "b"


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "", "json"])
def test_the_content_must_be_declared_as_json(client: httpx.Client, content_type: str) -> None:
    found = error(client.post("/v1/completions", content=b'{"prompt":"x"}', headers={"content-type": content_type}))
    assert found["param"] == "Content-Type"
    assert "application/json" in found["message"]


def test_a_charset_beside_the_content_type_is_fine(client: httpx.Client) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert client.post("/v1/completions", content=b'{"prompt":"x"}', headers=headers).status_code == 200


def test_a_body_over_the_limit_is_refused_with_413(start: Callable[..., Running]) -> None:
    server = start(max_body_bytes=10_000)
    with httpx.Client(base_url=server.url) as client:
        for size, status in ((9_900, 400), (10_100, 413), (3_000_000, 413)):
            found = error(client.post("/v1/completions", json={"prompt": "x" * size}), status)
            assert (found["code"] == "request_too_large") == (status == 413)
        assert "10000" in found["message"]
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_body_of_unknown_length_is_read_to_the_limit_only(start: Callable[..., Running]) -> None:
    server = start(max_body_bytes=10_000)

    def pieces() -> Iterator[bytes]:
        yield b'{"prompt":"'
        for _ in range(300):
            yield b"x" * 10_000
        yield b'"}'

    with httpx.Client(base_url=server.url) as client:
        error(client.post("/v1/completions", content=pieces(), headers=JSON), 413)
        assert client.post("/v1/completions", json={"prompt": "x"}).status_code == 200


def test_a_client_that_waits_for_leave_to_send_too_much_is_not_given_it(start: Callable[..., Running]) -> None:
    server = start(max_body_bytes=10_000)
    with socket.create_connection(server.address, timeout=20) as sock:
        sock.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: 99999\r\nExpect: 100-continue\r\n\r\n"
        )
        assert sock.recv(4096).startswith(b"HTTP/1.1 413")


def test_a_client_that_leaves_within_its_body_leaves_nothing_behind(server: Running) -> None:
    with socket.create_connection(server.address, timeout=20) as sock:
        sock.sendall(
            b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 999\r\n\r\n{"
        )
    assert httpx.get(server.url + "/health").status_code == 200
    assert server.front.asks == []


def test_a_large_body_is_read_and_refused_like_a_small_one(client: httpx.Client) -> None:
    assert error(client.post("/v1/completions", json={"prompt": [1] * 1_000_000, "foo": 1}))["param"] == "foo"
    found = error(client.post("/v1/completions", json={"prompt": [*([1] * 1_000_000), 256]}))
    assert found["param"] == "prompt[1000000]"
    many = [{"role": "user", "content": "x"}] * 1000
    body = {"messages": many, "metadata": {"much": "y" * 1_000_000}, "max_tokens": 3}
    assert client.post("/v1/chat/completions", json=body).json()["usage"]["prompt_tokens"] == 1999


def test_an_unknown_path_and_a_wrong_method_have_the_same_shape(client: httpx.Client) -> None:
    assert error(client.get("/nowhere"), 404)["code"] == "route_not_found"
    assert error(client.post("/v1/chat/completions/"), 404)["code"] == "route_not_found"
    assert error(client.get("/v1/chat/completions"), 405)["code"] == "method_not_allowed"
    assert error(client.delete("/v1/models"), 405)["code"] == "method_not_allowed"
    response = client.options("/v1/completions", headers={"origin": "http://elsewhere"})
    error(response, 405)
    assert "access-control-allow-origin" not in response.headers


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    """A struct within a struct."""

    a: int


class Outer(msgspec.Struct, forbid_unknown_fields=True):
    """Something of each kind."""

    inner: list[Inner]
    b: float | None = None
    c: dict[str, float] | None = None


@pytest.mark.parametrize(
    ("text", "param", "message"),
    [
        ('{"inner":[{"a":1},{"a":"x"}]}', "inner[1].a", 'inner[1].a must be an integer, not "x".'),
        ('{"inner":[{"a":1,"z":2}]}', "inner[0].z", 'Unknown field "inner[0].z": it is not part of this endpoint.'),
        ('{"inner":[{}]}', "inner[0].a", 'The field "inner[0].a" is required and is missing.'),
        ('{"inner":[],"b":"1"}', "b", 'b must be a number, not "1".'),
        ('{"inner":[],"c":{"k":"1"}}', "c", 'c must be a number, not {"k": "1"}.'),
        ('{"inner":[],"` x `":1}', "` x `", 'Unknown field "` x `": it is not part of this endpoint.'),
        ('{"inner":[],"z\\n":1}', "z\n", 'Unknown field "z\\n": it is not part of this endpoint.'),
    ],
)
def test_an_error_says_where_what_was_found_and_what_would_be_right(text: str, param: str, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        decode(text.encode(), msgspec.json.Decoder(Outer))
    assert caught.value.param == param
    assert caught.value.message == message


def test_a_quoted_value_is_short_and_on_one_line() -> None:
    values: list[Any] = ["x" * 10**6, list(range(10**5)), {"a": ["b\n" * 50]}, float("nan"), "\ud800", 10**300, "é"]
    for value in values:
        text = quoted(value)
        assert len(text) <= 60
        assert "\n" not in text
        assert text.encode()
    assert quoted("é") == '"é"'
    assert json.loads(quoted(["a", 1, None])) == ["a", 1, None]


@pytest.mark.parametrize("padding", [0, 300_000])
@pytest.mark.parametrize("field", ["chat_template_kwargs", "messages", "metadata", "tools", "response_format"])
def test_no_depth_of_nesting_is_a_fault_of_the_server(client: httpx.Client, field: str, padding: int) -> None:
    template = {
        "messages": '{{"messages":[{{"role":"user","content":[{{"type":"text","text":"x","more":{}}}]}}]}}',
        "tools": '{{"messages":[{{"role":"user","content":"x"}}],"max_tokens":1,"tools":[{}]}}',
    }.get(field, '{{"messages":[{{"role":"user","content":"x"}}],"max_tokens":1,"' + field + '":{{"a":{}}}}}')
    seen = set()
    for depth in [1, 100, *range(930 if padding else 900, 1010), 5000, 50_000]:
        body = template.format("[" * depth + "]" * depth) + " " * padding
        response = client.post("/v1/chat/completions", content=body, headers=JSON)
        assert response.status_code in (200, 400), (depth, response.text)
        seen.add(response.status_code)
    assert 400 in seen
