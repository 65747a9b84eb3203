"""POST /v1/chat/completions: shapes, streams, and what of OpenAI's fields does what."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from tests.http.running import Running, events

ROUTE = "/v1/chat/completions"


def chat(text: str = "Hello", **fields: Any) -> dict[str, Any]:
    return {"model": "fake", "messages": [{"role": "user", "content": text}], "max_tokens": 8, **fields}


def ask(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(ROUTE, json=chat(**fields))
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def stream(client: httpx.Client, **fields: Any) -> list[Any]:
    response = client.post(ROUTE, json=chat(stream=True, **fields))
    assert response.status_code == 200, response.text
    return events(response)


def test_a_whole_reply_has_openais_shape(client: httpx.Client) -> None:
    reply = ask(client, text="Hello you")
    assert reply["id"].startswith("chatcmpl-")
    assert reply["object"] == "chat.completion"
    assert reply["model"] == "fake"
    assert reply["system_fingerprint"].startswith("fp_")
    assert reply["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello yo", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
            "matched_stop": None,
        }
    ]
    assert reply["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 8,
        "total_tokens": 17,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def test_the_model_may_be_left_out_and_another_is_not_found(client: httpx.Client) -> None:
    body = chat()
    del body["model"]
    assert client.post(ROUTE, json=body).status_code == 200
    response = client.post(ROUTE, json=chat(model="gpt-4o"))
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert response.json()["error"]["param"] == "model"


def test_a_stream_opens_with_the_role_and_ends_with_finish_and_done(client: httpx.Client) -> None:
    first, *middle, last, done = stream(client, text="Hello you")
    assert done == "[DONE]"
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in middle) == "Hello yo"
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in (first, *middle))
    assert last["choices"][0] == {
        "index": 0,
        "delta": {},
        "logprobs": None,
        "finish_reason": "length",
        "matched_stop": None,
    }
    assert len({chunk["id"] for chunk in (first, *middle, last)}) == 1
    assert all("usage" not in chunk for chunk in (first, *middle, last))


def test_the_usage_chunk_alone_carries_usage_and_comes_last_without_choices(client: httpx.Client) -> None:
    *chunks, usage, done = stream(client, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 8
    assert "cached_tokens" in usage["usage"]["prompt_tokens_details"]
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_cached_tokens_are_0_at_first_and_the_whole_prefix_then(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        cold, warm = ask(client, text="a prompt nobody has sent"), ask(client, text="a prompt nobody has sent")
        streamed = stream(client, text="a prompt nobody has sent", stream_options={"include_usage": True})[-2]
    cached = [reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in (cold, warm, streamed)]
    assert cached == [0, 23, 23]


def test_samples_of_one_prompt_count_the_prompt_once(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        reply = ask(client, text="brand new", n=4, max_tokens=3)
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert reply["usage"]["prompt_tokens"] == 9
    assert reply["usage"]["completion_tokens"] == 12
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_a_stream_of_samples_has_each_index_open_and_end_once(client: httpx.Client) -> None:
    *chunks, done = stream(client, n=3)
    assert done == "[DONE]"
    for index in range(3):
        choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
        assert choices[0]["delta"]["role"] == "assistant"
        assert "".join(choice["delta"].get("content", "") for choice in choices) == "HelloHel"
        assert [choice["finish_reason"] for choice in choices].count("length") == 1
        assert choices[-1]["finish_reason"] == "length"


def test_content_parts_and_roles_reach_the_template_as_they_came(server: Running) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}], "name": "Ann"},
        {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    ]
    response = httpx.post(
        server.url + ROUTE, json={"messages": messages, "chat_template_kwargs": {"a": [1]}, "max_tokens": 1}
    )
    assert response.status_code == 200, response.text
    prompt = server.front.asks[-1].prompt
    assert msgspec.json.decode(prompt.messages_json) == [  # type: ignore[union-attr]
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": messages[1]["content"], "name": "Ann"},
        {"role": "assistant", "content": "Hi", "reasoning_content": "hm"},
        {"role": "user", "content": ""},
    ]
    assert msgspec.json.decode(prompt.template_kwargs_json) == {"a": [1]}  # type: ignore[union-attr]


def test_every_sampling_field_reaches_the_model(server: Running) -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.1,
        "frequency_penalty": 0.25,
        "presence_penalty": -0.25,
        "repetition_penalty": 1.5,
        "logit_bias": {"65": 3, "66": -100},
        "stop": ["\n\n", "END"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "no_stop_trim": True,
        "min_tokens": 2,
        "max_completion_tokens": 9,
        "max_tokens": None,
        "seed": 42,
        "n": 2,
        "priority": -5,
        "cache_salt": "mine",
    }
    assert httpx.post(server.url + ROUTE, json=chat(**given)).status_code == 200
    asked = server.front.asks[-1]
    sampling = asked.sampling
    for name in ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"):
        assert getattr(sampling, name) == given[name]
    assert sampling.repetition_penalty == 1.5
    assert sampling.logit_bias == {65: 3.0, 66: -100.0}
    assert sampling.stop == ("\n\n", "END")
    assert sampling.stop_token_ids == (7,)
    assert sampling.ignore_eos
    assert not sampling.skip_special_tokens
    assert sampling.no_stop_trim
    assert (sampling.min_new_tokens, sampling.max_new_tokens) == (2, 9)
    assert (asked.seed, asked.n, asked.priority, asked.namespace) == (42, 2, -5, "\x1fsalt:mine")


def test_without_a_limit_the_reply_goes_to_the_end_of_the_context(server: Running) -> None:
    reply = httpx.post(server.url + ROUTE, json=chat(max_tokens=None)).json()
    assert server.front.asks[-1].sampling.max_new_tokens is None
    assert reply["usage"]["total_tokens"] == 2048


def test_a_limit_beyond_the_context_is_only_a_limit(server: Running) -> None:
    reply = httpx.post(server.url + ROUTE, json=chat(max_tokens=None, max_completion_tokens=100_000)).json()
    assert reply["usage"]["total_tokens"] == 2048


def test_a_null_field_is_a_field_left_out(client: httpx.Client) -> None:
    names = ("temperature", "top_p", "n", "stop", "seed", "logit_bias", "stream", "stream_options", "logprobs", "tools")
    assert client.post(ROUTE, json=chat(**dict.fromkeys(names))).status_code == 200


@pytest.mark.parametrize(
    "harmless",
    [
        {"user": "ann"},
        {"metadata": {"run": "7"}},
        {"store": False},
        {"service_tier": "auto"},
        {"safety_identifier": "x"},
        {"prompt_cache_key": "k"},
        {"parallel_tool_calls": True},
        {"tools": []},
        {"tool_choice": "none"},
        {"tool_choice": "auto"},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"stop": []},
        {"stream_options": None},
    ],
    ids=str,
)
def test_fields_that_change_nothing_are_taken(client: httpx.Client, harmless: dict[str, Any]) -> None:
    assert client.post(ROUTE, json=chat(**harmless)).status_code == 200


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("tool_choice", "required"),
        ("functions", [{"name": "f"}]),
        ("function_call", {"name": "f"}),
        ("response_format", {"type": "json_object"}),
        ("audio", {"voice": "alloy"}),
        ("modalities", ["text", "audio"]),
        ("prediction", {"type": "content", "content": "x"}),
        ("reasoning_effort", "high"),
        ("verbosity", "low"),
        ("web_search_options", {"search_context_size": "low"}),
        ("foo", 1),
        ("best_of", 2),
        ("echo", True),
    ],
)
def test_fields_that_would_change_the_meaning_are_refused_by_name(
    client: httpx.Client, field: str, value: object
) -> None:
    response = client.post(ROUTE, json=chat(**{field: value}))
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field
    assert field in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("message", "place"),
    [
        ({"role": "user", "content": None}, "messages[1].content"),
        ({"role": "assistant"}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "wizard", "content": "x"}, "messages[1].role"),
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"role": None, "content": "x"}, "messages[1].role"),
        ({"content": "x"}, "messages[1].role"),
        ({"role": "user", "content": "x", "mood": "good"}, "messages[1].mood"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[1].tool_calls"),
        ({"role": "assistant", "content": "x", "audio": {"id": "1"}}, "messages[1].audio"),
        ("x", "messages[1]"),
        (None, "messages[1]"),
    ],
)
def test_what_is_wrong_with_a_message_is_told_with_its_place(client: httpx.Client, message: object, place: str) -> None:
    body = chat()
    body["messages"].append(message)
    response = client.post(ROUTE, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == place
    assert place in response.json()["error"]["message"]


def test_messages_must_be_there_and_not_be_empty(client: httpx.Client) -> None:
    for body in ({}, {"messages": []}, {"messages": None}, {"messages": "hi"}, {"messages": {}}):
        response = client.post(ROUTE, json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "messages"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": None, "max_completion_tokens": -1}, "max_completion_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"n": 0}, "n"),
        ({"n": -1}, "n"),
        ({"n": 2**63 - 1}, "n"),
        ({"n": 2**70}, "n"),
        ({"n": "3"}, "n"),
        ({"n": 1.5}, "n"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.01}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"min_tokens": 9}, "min_tokens"),
        ({"stop": ""}, "stop"),
        ({"stop": [1]}, "stop[0]"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"foo": 1}}, "stream_options.foo"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"logit_bias": {"70000": 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": "NaN"}}, "logit_bias"),
        ({"logit_bias": {"5": 1000}}, "logit_bias"),
        (
            {"logit_bias": {str(i % 256): 1 for i in range(5000)} | {f"{9**9 + i}": 1 for i in range(5000)}},
            "logit_bias",
        ),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "x" * 600}, "cache_salt"),
        ({"priority": 2**40}, "priority"),
        ({"seed": 2**64}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"stop_token_ids": [300]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids[0]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_a_value_out_of_range_or_of_another_type_is_named(
    client: httpx.Client, fields: dict[str, Any], param: str
) -> None:
    response = client.post(ROUTE, json=chat(**fields))
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert param.split("[")[0] in error["message"]
    assert error["type"] == "invalid_request_error"


def test_logprobs_alone_give_entries_without_alternatives(client: httpx.Client) -> None:
    content = ask(client, text="Hi", logprobs=True, max_tokens=2)["choices"][0]["logprobs"]["content"]
    assert content == [
        {"token": "H", "logprob": -0.5, "bytes": [72], "top_logprobs": []},
        {"token": "i", "logprob": -0.5, "bytes": [105], "top_logprobs": []},
    ]


@pytest.mark.parametrize("top", [0, 5, 20])
def test_top_logprobs_gives_that_many_alternatives(client: httpx.Client, top: int) -> None:
    content = ask(client, logprobs=True, top_logprobs=top)["choices"][0]["logprobs"]["content"]
    assert all(len(entry["top_logprobs"]) == top for entry in content)


def test_half_characters_have_their_bytes_and_the_stream_joins_to_whole_ones(client: httpx.Client) -> None:
    text = "grün 🐙 "
    length = len(text.encode())
    *chunks, _ = stream(client, text=text, logprobs=True, max_tokens=length)
    shown = "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])
    entries = [
        entry
        for chunk in chunks
        for choice in chunk["choices"]
        if choice["logprobs"]
        for entry in choice["logprobs"]["content"]
    ]
    assert shown == text
    assert "�" not in shown
    assert len(entries) == length
    assert b"".join(bytes(entry["bytes"]) for entry in entries).decode() == text
    assert entries[2]["token"] == "\\xc3"


def test_a_stop_string_ends_the_reply_and_is_told(client: httpx.Client) -> None:
    choice = ask(client, text="one two three four", stop=[" three"], max_tokens=18)["choices"][0]
    assert choice["message"]["content"] == "one two"
    assert choice["finish_reason"] == "stop"
    assert choice["matched_stop"] == " three"
    *chunks, _ = stream(client, text="one two three four", stop=" three", max_tokens=18)
    assert "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == "one two"


def test_a_reply_can_be_sent_back_as_history(client: httpx.Client) -> None:
    first = ask(client, text="Hello")
    messages = [{"role": "user", "content": "Hello"}, first["choices"][0]["message"], {"role": "user", "content": "x"}]
    assert client.post(ROUTE, json={"messages": messages, "max_tokens": 1}).status_code == 200
