"""Every wrong request gets an answer that says what is wrong with it, and leaves nothing behind."""

from __future__ import annotations

import json
import re
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.http.bad_requests import CHAT, COMPLETIONS, GENERATE, JSON, bad_requests, complaint, send
from tests.http.fake_front import CONTEXT_LENGTH
from tests.http.running import Running


def test_there_are_four_hundred_and_no_two_alike() -> None:
    requests = bad_requests(CONTEXT_LENGTH)
    assert len(requests) >= 400
    assert len(set(requests)) == len(requests)


def test_each_bad_request_is_answered_with_the_field_at_fault(server: Running) -> None:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        found = []
        for request in bad_requests(CONTEXT_LENGTH):
            wrong = complaint(request, send(client, request))
            if wrong:
                found.append(f"{request.label}: {wrong}")
        assert not found, "\n".join(found)
        assert client.post(COMPLETIONS, json={"prompt": "Hello", "max_tokens": 5}).status_code == 200
    assert server.front.running == 0


scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.sampled_from(["\ud800", "", "hang on", "x" * 100]),
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SHARED = ["model", "n", "stop", "stream", "stream_options", "seed", "logit_bias", "temperature", "min_tokens"]
FIELDS = {
    CHAT: [
        *SHARED,
        *("messages", "max_tokens", "max_completion_tokens", "top_p", "frequency_penalty", "presence_penalty"),
        *("top_k", "min_p", "repetition_penalty", "stop_token_ids", "ignore_eos", "skip_special_tokens", "cache_salt"),
        *("priority", "user", "metadata", "logprobs", "top_logprobs", "tools", "tool_choice", "response_format"),
        *("modalities", "chat_template_kwargs", "reasoning_effort"),
    ],
    COMPLETIONS: [*SHARED, "prompt", "max_tokens", "echo", "logprobs", "best_of", "suffix", "cache_salt"],
    GENERATE: [
        *("text", "input_ids", "sampling_params", "rid", "stream", "return_logprob", "logprob_start_len"),
        *("top_logprobs_num", "return_text_in_logprobs", "cache_salt", "priority", "image_data"),
    ],
}
GOOD: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "end"}]},
    COMPLETIONS: {"prompt": "end"},
    GENERATE: {"text": "end"},
}


@st.composite
def fuzzed(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """A route, and a good request of it with one to three fields set to anything."""
    route = draw(st.sampled_from(sorted(FIELDS)))
    names = st.one_of(st.sampled_from(FIELDS[route]), st.text(max_size=6))
    return route, GOOD[route] | draw(st.dictionaries(names, values, min_size=1, max_size=3))


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(case=fuzzed())
@example(case=(GENERATE, {"text": "end", ".": {"": "\ud800"}}))
def test_whatever_stands_in_a_field_the_answer_is_a_reply_or_an_error_about_it(
    client: httpx.Client, case: tuple[str, dict[str, Any]]
) -> None:
    route, body = case
    try:
        response = client.post(route, content=json.dumps(body).encode(), headers=JSON)
    except httpx.ReadTimeout:
        pytest.fail("no answer")
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code == 200:
        return
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] is not None
    # The field at fault is one that was sent, or one that is missing, or the whole body for a key that is no text.
    sent = [name.encode("utf-8", "backslashreplace").decode() or '""' for name in body]
    names = [*sent, *FIELDS[route], "body"]
    assert any(re.fullmatch(re.escape(name) + r"([.\[].*)?", error["param"], re.DOTALL) for name in names), error


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(content=st.binary(max_size=60) | st.text(max_size=40).map(lambda text: text.encode("utf-8", "replace")))
def test_any_bytes_for_a_body_are_answered_with_an_error(client: httpx.Client, content: bytes) -> None:
    response = client.post(CHAT, content=content, headers=JSON)
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
