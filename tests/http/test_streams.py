"""What happens to a reply while it is on its way: failures before and within it, silence, and clients that leave."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Callable
from typing import Any

import httpx
import pytest

from srt.http.connection import DONE, EventStream
from srt.http.errors import ApiError
from tests.http.running import Running, events

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
GENERATE = "/generate"


def body_of(route: str, text: str, **fields: Any) -> dict[str, Any]:
    """A request for about 2,000 tokens on any of the three routes."""
    if route == CHAT:
        return {"messages": [{"role": "user", "content": text}], "max_tokens": 1900, **fields}
    if route == COMPLETIONS:
        return {"prompt": text, "max_tokens": 1900, **fields}
    return {"text": text, "sampling_params": {"max_new_tokens": 1900}, **fields}


class RawClient:
    """A client that sends one request and can leave whenever it wants."""

    def __init__(self, server: Running, route: str, body: dict[str, Any]) -> None:
        self.socket = socket.create_connection(server.address, timeout=20)
        data = json.dumps(body).encode()
        head = (
            f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        self.socket.sendall(head.encode() + data)

    def read_until(self, mark: bytes) -> bytes:
        """Everything through `mark`."""
        data = b""
        while mark not in data:
            part = self.socket.recv(65536)
            assert part, data
            data += part
        return data

    def leave(self) -> None:
        """Close the connection."""
        self.socket.close()


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_a_failure_before_the_first_token_has_its_status_also_in_a_stream(client: httpx.Client, route: str) -> None:
    for stream in (False, True):
        failed = client.post(route, json=body_of(route, "fail now", stream=stream))
        assert failed.status_code == 500
        assert failed.json()["error"]["type"] == "server_error"
        too_long = client.post(route, json=body_of(route, "x" * 3000, stream=stream))
        assert too_long.status_code == 400
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
        full = client.post(route, json=body_of(route, "full", stream=stream))
        assert full.status_code == 429
        assert full.json()["error"]["type"] == "rate_limit_error"
        assert full.headers["retry-after"] == "1"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_a_failure_within_a_stream_is_its_last_event(client: httpx.Client, route: str) -> None:
    response = client.post(route, json=body_of(route, "break it", stream=True))
    assert response.status_code == 200
    *parts, last = events(response)
    assert parts
    assert last == {
        "error": {
            "message": "the logits were not finite",
            "type": "server_error",
            "param": None,
            "code": "model_failed",
        }
    }
    whole = client.post(route, json=body_of(route, "break it"))
    assert whole.status_code == 500


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
def test_a_server_that_shuts_down_answers_503(server: Running, route: str) -> None:
    server.front.state = "draining"
    for stream in (False, True):
        response = httpx.post(server.url + route, json=body_of(route, "x", stream=stream))
        assert response.status_code == 503
        assert response.json()["error"]["code"] == "shutting_down"
        assert response.headers["retry-after"] == "1"


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS, GENERATE])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", ["hang", "hang after five", "slow"])
def test_a_client_that_leaves_ends_its_request(server: Running, route: str, stream: bool, text: str) -> None:
    client = RawClient(server, route, body_of(route, text, stream=stream))
    server.eventually(lambda: server.front.running == 1)
    if stream and text != "hang":
        client.read_until(b"data: ")
    client.leave()
    server.eventually(lambda: server.front.running == 0)
    assert server.front.ends[-1].finish_reasons == ("abort",)
    assert httpx.post(server.url + route, json=body_of(route, "and on")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_samples_of_all_prompts(server: Running, stream: bool) -> None:
    body = {"prompt": [f"slow {i}" for i in range(6)], "n": 2, "max_tokens": 1000, "stream": stream}
    client = RawClient(server, COMPLETIONS, body)
    server.eventually(lambda: server.front.running == 6)
    client.leave()
    server.eventually(lambda: server.front.running == 0)
    assert [end.finish_reasons for end in server.front.ends] == [("abort", "abort")] * 6


def test_leaving_after_the_end_aborts_nothing(server: Running) -> None:
    for _ in range(5):
        client = RawClient(server, CHAT, body_of(CHAT, "end", stream=True))
        client.read_until(b"[DONE]")
        client.leave()
    server.eventually(lambda: len(server.front.ends) == 5)
    assert {end.finish_reasons for end in server.front.ends} == {("stop",)}


def test_a_client_that_does_not_read_holds_nobody_up(server: Running) -> None:
    lazy = RawClient(server, GENERATE, body_of(GENERATE, "x" * 20, stream=True))
    # The request runs to its end though its stream (megabytes of it) is stuck in the socket.
    server.eventually(lambda: len(server.front.ends) == 1)
    assert server.front.ends[0].finish_reasons == ("length",)
    assert httpx.get(server.url + "/health", timeout=5).status_code == 200
    assert b"[DONE]" in lazy.read_until(b"[DONE]")
    lazy.leave()


def test_many_streams_at_once_do_not_mix(server: Running) -> None:
    async def one(client: httpx.AsyncClient, number: int) -> None:
        text = f"stream {number} of many; "
        response = await client.post(COMPLETIONS, json={"prompt": text, "max_tokens": 60, "stream": True})
        *parts, done = events(response)
        assert done == "[DONE]"
        joined = "".join(choice["text"] for part in parts for choice in part["choices"])
        assert joined == (text * 60)[:60]

    async def all_of_them() -> None:
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            await asyncio.gather(*(one(client, number) for number in range(40)))

    asyncio.run(all_of_them())


def test_the_head_of_a_stream_does_not_wait_for_a_token_that_is_long_in_coming(server: Running) -> None:
    begin = time.monotonic()
    client = RawClient(server, CHAT, body_of(CHAT, "hang", stream=True))
    head = client.read_until(b'"role":"assistant"')
    assert head.startswith(b"HTTP/1.1 200")
    # Not a measure of speed: without an early head there is none at all.
    assert time.monotonic() - begin < 20
    client.leave()
    server.eventually(lambda: server.front.running == 0)


async def _play(stream: EventStream, leave: asyncio.Event) -> list[bytes]:
    """Run a stream as an ASGI server does; the parts that were sent."""
    sent: list[bytes] = []

    async def receive() -> dict[str, Any]:
        await leave.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            sent.append(message["body"])

    await stream({"type": "http"}, receive, send)  # type: ignore[arg-type]
    return sent


def _of(*steps: bytes | float | Exception) -> Callable[[], AsyncGenerator[bytes, None]]:
    """A source of events: bytes are an event, numbers a silence in seconds, exceptions are raised."""

    async def generate() -> AsyncGenerator[bytes, None]:
        for step in steps:
            if isinstance(step, bytes):
                yield step
            elif isinstance(step, float):
                await asyncio.sleep(step)
            else:
                raise step

    return generate


def test_comments_fill_a_silence() -> None:
    async def run() -> list[bytes]:
        return await _play(EventStream(_of(b"a", 0.5, b"b")(), keep_alive_seconds=0.1), asyncio.Event())

    sent = asyncio.run(run())
    assert sent[0] == b"a"
    assert sent[-2:] == [b"b", b""]
    assert set(sent[1:-2]) == {b": keep-alive\n\n"}


def test_a_fault_of_ours_within_a_stream_is_told_without_its_insides() -> None:
    ended: list[bool] = []

    async def run() -> list[bytes]:
        stream = EventStream(_of(b"a", ValueError("secret"))(), on_end=lambda: ended.append(True))
        return await _play(stream, asyncio.Event())

    sent = asyncio.run(run())
    assert b"internal_error" in sent[1]
    assert b"secret" not in b"".join(sent)
    assert ended == [True]


def test_a_stream_closes_its_source_when_the_client_leaves_or_an_error_comes() -> None:
    closed: list[str] = []

    async def source(name: str) -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.sleep(60 if name == "left" else 0)
            raise ApiError(503, "gone")
        finally:
            closed.append(name)

    async def run() -> None:
        leave = asyncio.Event()
        playing = asyncio.ensure_future(_play(EventStream(source("left")), leave))
        await asyncio.sleep(0.05)
        leave.set()
        await playing
        await _play(EventStream(source("failed")), asyncio.Event())

    asyncio.run(run())
    assert closed == ["left", "failed"]


def test_the_end_mark_is_one_event() -> None:
    assert DONE == b"data: [DONE]\n\n"
