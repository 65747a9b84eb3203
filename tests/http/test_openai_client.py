"""The unmodified `openai` client, as its users call it, and the exception classes they expect."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import openai
import pytest

from tests.http.running import Running


@pytest.fixture
def ai(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def user(text: str) -> list[Any]:
    return [{"role": "user", "content": text}]


def test_chat(ai: openai.OpenAI) -> None:
    reply = ai.chat.completions.create(model="fake", messages=user("Hello"), max_tokens=3)
    assert reply.choices[0].message.content == "Hel"
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.total_tokens == 8
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_chat_history_with_the_clients_own_objects(ai: openai.OpenAI) -> None:
    first = ai.chat.completions.create(model="fake", messages=user("Hello"), max_tokens=3)
    messages = [*user("Hello"), first.choices[0].message, *user("x")]
    assert ai.chat.completions.create(model="fake", messages=messages, max_tokens=1).choices[0].message.content


def test_chat_stream_with_usage(ai: openai.OpenAI) -> None:
    stream = ai.chat.completions.create(
        model="fake",
        messages=user("Hello"),
        max_completion_tokens=7,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "HelloHe"
    assert [chunk.usage is not None for chunk in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].choices == []


def test_the_streaming_helper(ai: openai.OpenAI) -> None:
    with ai.chat.completions.stream(model="fake", messages=user("end of it"), max_tokens=9) as stream:
        for _ in stream:
            pass
        final = stream.get_final_completion()
    assert final.choices[0].message.content == "end o"


def test_logprobs_and_samples(ai: openai.OpenAI) -> None:
    reply = ai.chat.completions.create(
        model="fake", messages=user("é"), max_tokens=2, n=2, logprobs=True, top_logprobs=2, seed=1
    )
    assert [choice.index for choice in reply.choices] == [0, 1]
    logprobs = reply.choices[1].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [entry.bytes for entry in logprobs.content] == [[0xC3], [0xA9]]
    assert [len(entry.top_logprobs) for entry in logprobs.content] == [2, 2]


def test_completions_in_all_forms(ai: openai.OpenAI) -> None:
    prompts: list[Any] = ["ab", ["ab", "c"], [97, 98], [[97, 98], [99]]]
    texts = [
        [choice.text for choice in ai.completions.create(model="fake", prompt=prompt, max_tokens=2).choices]
        for prompt in prompts
    ]
    assert texts == [["ab"], ["ab", "cc"], ["ab"], ["ab", "cc"]]
    echoed = ai.completions.create(model="fake", prompt="ab", max_tokens=0, echo=True, logprobs=1).choices[0]
    assert echoed.text == "ab"
    assert echoed.logprobs is not None
    assert echoed.logprobs.token_logprobs == [None, -0.5]
    streamed = ai.completions.create(model="fake", prompt="ab", max_tokens=3, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == "aba"


def test_models(ai: openai.OpenAI) -> None:
    assert [model.id for model in ai.models.list()] == ["fake"]
    assert ai.models.retrieve("fake").owned_by == "sapwood"
    with pytest.raises(openai.NotFoundError):
        ai.models.retrieve("other")


def test_fields_of_our_own_go_in_the_extra_body(ai: openai.OpenAI, server: Running) -> None:
    extra = {"top_k": 5, "min_p": 0.1, "ignore_eos": True, "cache_salt": "s", "chat_template_kwargs": {"a": 1}}
    ai.chat.completions.create(model="fake", messages=user("Hello"), max_tokens=1, extra_body=extra)
    assert server.front.asks[-1].sampling.top_k == 5


Call = Callable[[openai.OpenAI], object]


def chat(text: str = "x", **fields: Any) -> Call:
    return lambda ai: ai.chat.completions.create(**{"model": "fake", "messages": user(text), **fields})


@pytest.mark.parametrize(
    ("call", "kind", "code"),
    [
        (chat(temperature=-1), openai.BadRequestError, "invalid_value"),
        (chat("x" * 3000), openai.BadRequestError, "context_length_exceeded"),
        (chat("x" * 3000, stream=True), openai.BadRequestError, "context_length_exceeded"),
        (chat(tools=[{"type": "function", "function": {"name": "f"}}]), openai.BadRequestError, "unsupported_field"),
        (chat(extra_body={"foo": 1}), openai.BadRequestError, "unknown_field"),
        (chat(model="other"), openai.NotFoundError, "model_not_found"),
        (chat("full"), openai.RateLimitError, "queue_full"),
        (chat("fail"), openai.InternalServerError, "model_failed"),
        (chat("x" * 9_000_000), openai.APIStatusError, "request_too_large"),
        (lambda ai: ai.embeddings.create(model="fake", input="x"), openai.NotFoundError, "route_not_found"),
    ],
)
def test_each_kind_of_error_is_the_exception_that_users_expect(
    ai: openai.OpenAI, call: Call, kind: type[openai.APIStatusError], code: str
) -> None:
    with pytest.raises(kind) as caught:
        call(ai)
    assert caught.value.code == code
    assert isinstance(caught.value.body, dict)
    assert caught.value.body["message"]
    if kind is openai.APIStatusError:
        assert caught.value.status_code == 413


def test_a_server_that_shuts_down_is_an_internal_server_error(ai: openai.OpenAI, server: Running) -> None:
    server.front.state = "draining"
    with pytest.raises(openai.InternalServerError) as caught:
        chat()(ai)
    assert caught.value.status_code == 503


def test_a_failure_within_a_stream_is_an_api_error(ai: openai.OpenAI) -> None:
    stream = ai.chat.completions.create(model="fake", messages=user("break it"), stream=True)
    with pytest.raises(openai.APIError, match="the logits were not finite"):
        for _ in stream:
            pass


def test_a_missing_key_is_an_authentication_error(start: Callable[..., Running]) -> None:
    server = start(api_key="sk-right")
    with openai.OpenAI(base_url=server.url + "/v1", api_key="sk-wrong", max_retries=0) as ai:
        with pytest.raises(openai.AuthenticationError):
            ai.models.list()
        assert ai.with_options(api_key="sk-right").models.list().data


def test_a_stream_that_is_closed_early_ends_its_request(ai: openai.OpenAI, server: Running) -> None:
    for n in (1, 4):
        stream = ai.chat.completions.create(model="fake", messages=user("slow"), max_tokens=1000, stream=True, n=n)
        next(iter(stream))
        stream.close()
        server.eventually(lambda: server.front.running == 0)
        assert server.front.ends[-1].finish_reasons == ("abort",) * n
