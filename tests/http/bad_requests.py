"""Some four hundred requests that are wrong, each with what must be wrong about it.

    python -m tests.http.bad_requests http://127.0.0.1:30000 [model]

sends them all to a running server and says what it did with them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
JSON = {"content-type": "application/json"}
MEGABYTE = 1024 * 1024


@dataclass(frozen=True)
class BadRequest:
    """A request, the statuses that fit, and the field that the error must name ("" where there is none to name)."""

    route: str
    content: bytes
    field: str
    statuses: tuple[int, ...] = (400,)
    content_type: str = "application/json"
    method: str = "POST"

    @property
    def label(self) -> str:
        """A short name for reports."""
        return f"{self.method} {self.route} {self.content[:60]!r}"


def body(route: str, **fields: Any) -> dict[str, Any]:
    """A good request with some fields set otherwise."""
    base: dict[str, Any] = {
        CHAT: {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
        COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
        GENERATE: {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    }[route]
    return {**base, **fields}


def bad(route: str, field: str, value: object, statuses: tuple[int, ...] = (400,)) -> BadRequest:
    """A good request but for one top-level field."""
    # ensure_ascii spells lone surrogates as escapes; NaN and the infinities are written as Python does.
    return BadRequest(route, json.dumps(body(route, **{field: value})).encode(), field, statuses)


WRONG_TYPES: dict[str, list[object]] = {
    "temperature": ["hot", [], {}, True],
    "top_p": ["x", [1], {}, False],
    "top_k": ["x", 1.5, [], True],
    "min_p": ["x", {}],
    "n": ["3", 1.5, [], True, {}],
    "seed": ["x", 1.5, [1]],
    "stop": [5, {}, True],
    "frequency_penalty": ["x", []],
    "presence_penalty": ["x", {}],
    "repetition_penalty": ["x", []],
    "logit_bias": ["x", [], 5],
    "min_tokens": ["x", 1.5],
    "stop_token_ids": ["x", 5, {}],
    "ignore_eos": ["yes", 1, []],
    "skip_special_tokens": [0, "no"],
    "cache_salt": [5, [], {}],
    "priority": ["high", 1.5],
    "stream": ["yes", 1, []],
    "stream_options": ["x", [], 5],
    "user": [5, [], {}],
    "model": [5, [], {}],
}

WRONG_VALUES: dict[str, list[object]] = {
    "temperature": [-0.5, 1e6, float("nan"), float("inf"), -float("inf")],
    "top_p": [0, -1, 1.5, float("nan"), float("inf")],
    "top_k": [-2, -(2**63), 2**64, 10**40],
    "min_p": [-0.1, 1.1, float("nan")],
    "n": [0, -1, 129, 2**63 - 1, 2**64, 10**40, float("nan")],
    "seed": [2**63, -(2**63) - 1, 10**60, float("inf")],
    "stop": ["", ["a", ""], ["x"] * 17, "\ud800", ["ok", "\udfff"], "x" * 5000],
    "frequency_penalty": [2.1, -2.1, float("nan"), 1e308],
    "presence_penalty": [2.1, -2.1, float("-inf")],
    "repetition_penalty": [0, -1, 1000, float("nan")],
    "logit_bias": [{"x": 1}, {"-1": 1}, {"999999999": 1}, {"5": 101}, {"5": "x"}, {"5": None}, {"5.5": 1}, {"": 1}],
    "min_tokens": [-1, 3, 2**64],
    "stop_token_ids": [[-1], [999999999], [1.5], ["a"], [None], [1] * 2000],
    "cache_salt": ["", "x" * 1000, "\ud800"],
    "priority": [2**40, -(2**40), 2**70],
    "user": ["\ud800"],
    "model": ["\udc00"],
}

CHAT_ONLY: dict[str, list[object]] = {
    "messages": [None, [], {}, "hi", 5, True],
    "max_completion_tokens": [0, -1, "x", 1.5, 2**64, True],
    "logprobs": [1, "yes", []],
    "top_logprobs": [3, 21, -1, "x", 1.5],
    "tools": [[{"type": "function"}], {"a": 1}, "x"],
    "tool_choice": ["required", {"type": "function"}, 5],
    "functions": [[{}]],
    "function_call": [{"name": "f"}, 5],
    "response_format": [{"type": "json_object"}, {"type": "json_schema"}, {}, "json", {"type": "text", "x": 1}],
    "modalities": [["audio"], [], "text"],
    "audio": [{"voice": "x"}],
    "prediction": [{"type": "content"}],
    "reasoning_effort": ["high"],
    "chat_template_kwargs": ["x", [], 5],
    "prompt": ["x"],
    "suffix": ["x"],
    "foo": [None, 1, "x"],
    "max_token": [5],
    "Temperature": [1],
}

MESSAGES: list[tuple[object, str]] = [
    (None, "messages[0]"),
    ("hi", "messages[0]"),
    ([], "messages[0]"),
    (5, "messages[0]"),
    ({}, "messages[0].role"),
    ({"role": "user"}, "messages[0].content"),
    ({"role": "user", "content": None}, "messages[0].content"),
    ({"role": "assistant", "content": None}, "messages[0].content"),
    ({"role": "user", "content": 5}, "messages[0].content"),
    ({"role": "user", "content": {}}, "messages[0].content"),
    ({"role": "user", "content": []}, "messages[0].content"),
    ({"role": "user", "content": [None]}, "messages[0].content[0]"),
    ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{}]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0]"),
    ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url"}]}, "messages[0].content[1]"),
    ({"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}, "messages[0].content[0]"),
    ({"role": "user", "content": "\ud800"}, "messages[0].content"),
    ({"role": "user", "content": [{"type": "text", "text": "\udc00"}]}, "messages[0].content[0]"),
    ({"role": "", "content": "x"}, "messages[0].role"),
    ({"role": "wizard", "content": "x"}, "messages[0].role"),
    ({"role": 5, "content": "x"}, "messages[0].role"),
    ({"role": ["user"], "content": "x"}, "messages[0].role"),
    ({"role": "tool", "content": "x", "tool_call_id": "1"}, "messages[0].role"),
    ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
    ({"role": "user", "content": "x", "mood": "good"}, "messages[0].mood"),
    ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ({"role": "assistant", "content": "x", "function_call": {"name": "f"}}, "messages[0].function_call"),
]

COMPLETIONS_ONLY: dict[str, list[object]] = {
    "prompt": [
        None,
        "",
        [],
        [""],
        [[]],
        ["ok", ""],
        [[1], []],
        5,
        {},
        True,
        [True],
        [None],
        [{}],
        ["a", 1],
        [1, "a"],
        [1.5],
        [-1],
        [1, -(2**31)],
        [999999999],
        [2**80],
        [[1], [-1]],
        [[1], "a"],
        [[[1]]],
        "\ud800",
        ["ok", "\udfff"],
    ],
    "max_tokens": [-1, "x", 1.5, 2**64, 10**50, True, float("nan")],
    "logprobs": [-1, 21, "x", 1.5, 2**64],
    "echo": ["yes", 1],
    "suffix": ["x", 5],
    "best_of": [2, 0, -1, "x", 2**70],
    "response_format": [{"type": "json_object"}],
    "messages": [[{"role": "user", "content": "x"}]],
    "foo": [1],
}

GENERATE_ONLY: dict[str, list[object]] = {
    "text": [5, {}, [], [""], "", ["a", 5], [None], True, "\ud800"],
    "input_ids": [[1]],
    "sampling_params": [
        5,
        "x",
        [5],
        [],
        [{}, {}],
        {"max_new_tokens": -1},
        {"max_new_tokens": 2**64},
        {"max_new_tokens": "x"},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": "x"},
        {"top_p": 0},
        {"top_k": -2},
        {"min_p": 2},
        {"n": 0},
        {"n": 2**63},
        {"stop": [5]},
        {"stop": ""},
        {"stop": "\ud800"},
        {"stop_token_ids": [-1]},
        {"stop_token_ids": "x"},
        {"logit_bias": {"x": 1}},
        {"logit_bias": {"5": float("nan")}},
        {"ignore_eos": "x"},
        {"frequency_penalty": 3},
        {"repetition_penalty": 0},
        {"regex": "("},
        {"temprature": 1},
    ],
    "stream": ["x", 1],
    "rid": [5, "", [], ["a", "b"], "x" * 1000, "\ud800"],
    "return_logprob": ["x", 1, [True, False]],
    "logprob_start_len": ["x", 1.5, -2, [0, 0]],
    "top_logprobs_num": ["x", 1.5, [1, 2], 2**70],
    "image_data": [["x"], "x"],
    "lora_path": ["x"],
    "session_params": [{"id": "x"}],
    "input_embeds": [[[0.5]]],
    "cache_salt": ["", 5],
    "foo": [1],
}

BODIES = [
    b"",
    b" ",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b"true",
    b"{",
    b'{"a"',
    b'{"a":}',
    b'{"a":1,,}',
    b"{'a':1}",
    b'{"a":1}{"b":2}',
    b"\xff\xfe",
    b'{"a":"\xff"}',
    b'{"a":"\x01"}',
    b'{"a":"\\x"}',
    b'{"a":"\\ud8"}',
    b"[" * 200_000,
    b'{"a":' * 100_000,
    b"NaN",
    b"--x\r\nContent-Disposition: form-data\r\n\r\n1\r\n--x--",
]


def one_field(context_length: int) -> Iterator[BadRequest]:
    """Good requests but for one field."""
    for route in (CHAT, COMPLETIONS):
        for table in (WRONG_TYPES, WRONG_VALUES, CHAT_ONLY if route == CHAT else COMPLETIONS_ONLY):
            for field, values in table.items():
                for value in values:
                    if not (field == "foo" and value is None and route == COMPLETIONS):
                        yield bad(route, field, value)
        yield bad(route, "model", "another", (404,))
    for field, values in GENERATE_ONLY.items():
        for value in values:
            # Two prompts at once are named by the first of their fields.
            yield BadRequest(
                GENERATE,
                json.dumps(body(GENERATE, **{field: value})).encode(),
                "text" if field == "input_ids" else field,
            )
    for message, place in MESSAGES:
        yield BadRequest(CHAT, json.dumps(body(CHAT, messages=[message])).encode(), place)
    too_long = "word " * (2 * context_length)
    yield bad(COMPLETIONS, "prompt", too_long)
    yield bad(COMPLETIONS, "prompt", [1] * (context_length + 1))
    yield bad(GENERATE, "text", too_long)
    yield bad(COMPLETIONS, "prompt", ["ok", too_long])
    yield bad(CHAT, "messages", [{"role": "user", "content": too_long}])
    for stream in (True, False):
        text = json.dumps({"prompt": too_long, "stream": stream})
        yield BadRequest(COMPLETIONS, text.encode(), "prompt")


def whole_bodies() -> Iterator[BadRequest]:
    """What is no JSON object, not declared as JSON, too large, or sent to the wrong place."""
    for route in (CHAT, COMPLETIONS, GENERATE):
        for content in BODIES:
            yield BadRequest(route, content, "body")
        yield BadRequest(route, b"{}", {CHAT: "messages", COMPLETIONS: "prompt", GENERATE: "text"}[route])
        for content_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
            yield BadRequest(route, b"{}", "Content-Type", content_type=content_type)
        large = json.dumps({"prompt": "x" * (10 * MEGABYTE)}).encode()
        yield BadRequest(route, large, "", (413,))
        yield BadRequest(route, b"", "", (405,), method="GET")
        yield BadRequest(route, b"{}", "", (405,), method="PUT")
    for path in ("/", "/v1", "/v1/embeddings", "/v1/chat", "/v1/chat/completions/x", "/generate/", "/%00", "/..%2f.."):
        yield BadRequest(path, b"{}", "", (404,))
    for path in ("/tokenize", "/abort_request"):
        for content in (b"", b"[]", b'{"foo":1}', b'{"rid":5,"prompt":5}'):
            yield BadRequest(path, content, "body" if content in (b"", b"[]") else "")


def bad_requests(context_length: int) -> list[BadRequest]:
    """All of them."""
    return [*one_field(context_length), *whole_bodies()]


def complaint(request: BadRequest, response: httpx.Response) -> str | None:
    """What is wrong with the answer to a bad request; None when it is as it must be."""
    if response.status_code not in request.statuses:
        return f"status {response.status_code}, not {request.statuses}: {response.text[:200]}"
    try:
        error = response.json()["error"]
        message, param = error["message"], error["param"]
        shape = set(error)
    except (ValueError, KeyError, TypeError) as broken:
        return f"not an error in OpenAI's shape ({broken!r}): {response.text[:200]}"
    if shape != {"message", "type", "param", "code"} or not isinstance(message, str) or len(message) > 1000:
        return f"not an error in OpenAI's shape: {response.text[:200]}"
    if "Traceback" in message or "Error(" in message:
        return f"shows its insides: {message}"
    if request.field and not str(param).startswith(request.field):
        return f"names {param!r}, not {request.field!r}: {message}"
    # A prompt that is too long is called the prompt on every route.
    if request.field and request.field.split("[")[0] not in message and error["code"] != "context_length_exceeded":
        return f"does not say {request.field!r}: {message}"
    return None


def send(client: httpx.Client, request: BadRequest) -> httpx.Response:
    """Send one."""
    headers = {"content-type": request.content_type} if request.content_type else {}
    return client.request(request.method, request.route, content=request.content, headers=headers)


def main(url: str, model: str | None = None) -> int:
    """Send all to a running server; print what is not as it must be; 1 when there was any."""
    with httpx.Client(base_url=url, timeout=60) as client:
        context_length = client.get("/v1/models").json()["data"][0]["max_model_len"]
        requests = bad_requests(context_length)
        found = [
            f"{request.label}: {wrong}" for request in requests if (wrong := complaint(request, send(client, request)))
        ]
        alive = client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 5})
    print("\n".join(found))
    print(f"{len(requests)} bad requests, {len(found)} of them answered wrongly; then a good one: {alive.status_code}")
    return int(bool(found) or alive.status_code != 200)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
