"""POST /v1/completions: the four forms of a prompt, echo, and log probabilities in their older shape."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.http.running import Running, events

ROUTE = "/v1/completions"


def ask(client: httpx.Client, prompt: object = "abc", **fields: Any) -> dict[str, Any]:
    response = client.post(ROUTE, json={"model": "fake", "prompt": prompt, "max_tokens": 4, **fields})
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    return reply


def stream(client: httpx.Client, prompt: object = "abc", **fields: Any) -> list[Any]:
    body = {"model": "fake", "prompt": prompt, "max_tokens": 4, "stream": True, **fields}
    response = client.post(ROUTE, json=body)
    assert response.status_code == 200, response.text
    return events(response)


def error(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(ROUTE, json={"model": "fake", "prompt": "abc", **fields})
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def test_a_whole_reply_has_openais_shape(client: httpx.Client) -> None:
    reply = ask(client, "xyz ")
    assert reply["id"].startswith("cmpl-")
    assert reply["object"] == "text_completion"
    assert reply["choices"] == [
        {"text": "xyz ", "index": 0, "logprobs": None, "finish_reason": "length", "matched_stop": None}
    ]
    assert reply["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_16_tokens_are_the_default(server: Running) -> None:
    httpx.post(server.url + ROUTE, json={"prompt": "abc"})
    assert server.front.asks[-1].sampling.max_new_tokens == 16


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abca"]),
        (["abc", "de"], ["abca", "dede"]),
        ([97, 98], ["abab"]),
        ([[97, 98], [99]], ["abab", "cccc"]),
    ],
    ids=str,
)
def test_a_prompt_comes_in_four_forms(client: httpx.Client, prompt: object, texts: list[str]) -> None:
    reply = ask(client, prompt)
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert [choice["index"] for choice in reply["choices"]] == list(range(len(texts)))


def test_samples_of_many_prompts_come_in_prompt_major_order_and_usage_is_their_sum(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        reply = ask(client, ["ab", "cde", "f"], n=2)
        chunks = stream(client, ["ab", "cde", "f"], n=2, stream_options={"include_usage": True})
    texts = ["abab", "abab", "cdec", "cdec", "ffff", "ffff"]
    assert [choice["text"] for choice in reply["choices"]] == texts
    assert reply["usage"] == {
        "prompt_tokens": 6,
        "completion_tokens": 24,
        "total_tokens": 30,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    joined = ["".join(_texts(chunks, index)) for index in range(6)]
    assert joined == texts
    assert chunks[-1] == "[DONE]"
    assert chunks[-2]["choices"] == []
    assert chunks[-2]["usage"]["prompt_tokens_details"]["cached_tokens"] == 1 + 2
    finishes = [choice["index"] for chunk in chunks[:-2] for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(finishes) == list(range(6))


def _texts(chunks: list[Any], index: int) -> list[str]:
    return [choice["text"] for chunk in chunks[:-1] for choice in chunk["choices"] if choice["index"] == index]


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["ok", ""], [[1], []]], ids=str)
def test_an_empty_prompt_is_refused_with_its_place(client: httpx.Client, prompt: Any) -> None:
    found = error(client, prompt=prompt)
    place = {"": "prompt", "[]": "prompt", "['']": "prompt[0]", "[[]]": "prompt[0]"}.get(str(prompt), "prompt[1]")
    assert found["param"] == place
    assert place in found["message"]
    assert found["code"] == "empty_prompt"


@pytest.mark.parametrize(
    ("prompt", "place"),
    [
        (["a", 1], "prompt[1]"),
        (["a", [1]], "prompt[1]"),
        ([[1], "a"], "prompt[1]"),
        ([[1], 2], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        ([1, 2.5], "prompt[1]"),
        ([1, -1], "prompt[1]"),
        ([1, 256], "prompt[1]"),
        ([1, 2**80], "prompt[1]"),
        ([True], "prompt[0]"),
        ([[1, None]], "prompt[0][1]"),
        ([None], "prompt[0]"),
        ([{}], "prompt[0]"),
        (5, "prompt"),
        (None, "prompt"),
        ({"text": "x"}, "prompt"),
    ],
    ids=str,
)
def test_what_is_no_prompt_is_refused_with_its_place(client: httpx.Client, prompt: Any, place: str) -> None:
    found = error(client, prompt=prompt)
    assert found["param"] == place
    assert place in found["message"]


def test_one_bad_prompt_in_a_list_refuses_the_call_and_ends_the_others(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        found = error(client, prompt=["slow one", "slow two", "x" * 3000, "slow three"], max_tokens=2000)
        assert found["param"] == "prompt[2]"
        assert found["code"] == "context_length_exceeded"
        assert "3000" in found["message"]
        assert "2047" in found["message"]
        server.eventually(lambda: server.front.running == 0)
        streamed = client.post(ROUTE, json={"prompt": ["slow one", "x" * 3000], "max_tokens": 2000, "stream": True})
        assert streamed.status_code == 400
        assert streamed.json()["error"]["param"] == "prompt[1]"
        server.eventually(lambda: server.front.running == 0)
        assert [choice["text"] for choice in ask(client, ["a", "b"])["choices"]] == ["aaaa", "bbbb"]


def test_a_sampling_parameter_out_of_range_stops_a_batch_before_it_starts(server: Running) -> None:
    with httpx.Client(base_url=server.url) as client:
        assert error(client, prompt=["a", "b"], temperature=-1)["param"] == "temperature"
    assert server.front.asks == []
    assert server.front.running == 0


def test_too_many_samples_in_one_call_are_refused(client: httpx.Client) -> None:
    found = error(client, prompt=["a"] * 100, n=100)
    assert found["param"] == "prompt"
    assert "10000" in found["message"]


def test_suffix_and_best_of_are_refused_unless_they_say_nothing(client: httpx.Client) -> None:
    assert error(client, suffix="end")["param"] == "suffix"
    assert error(client, best_of=3, n=2)["param"] == "best_of"
    assert error(client, best_of=2)["param"] == "best_of"
    assert len(ask(client, best_of=2, n=2, suffix=None)["choices"]) == 2


@pytest.mark.parametrize("logprobs", [-1, 21, 2**65, 1.5, "1"], ids=str)
def test_logprobs_out_of_range_are_refused(client: httpx.Client, logprobs: object) -> None:
    assert error(client, logprobs=logprobs)["param"] == "logprobs"


def test_logprobs_have_the_older_shape(client: httpx.Client) -> None:
    assert ask(client, "ab", logprobs=2, max_tokens=2)["choices"][0]["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}],
        "text_offset": [0, 1],
    }


def test_logprobs_true_is_1_and_0_has_the_chosen_token_alone(client: httpx.Client) -> None:
    assert ask(client, "a", logprobs=True)["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}
    assert ask(client, "a", logprobs=0)["choices"][0]["logprobs"]["top_logprobs"][0] == {"a": -0.5}
    assert ask(client, "a", logprobs=False)["choices"][0]["logprobs"] is None


def test_echo_scores_a_prompt_without_generating(client: httpx.Client) -> None:
    for prompt in ("käse", list("käse".encode())):
        reply = ask(client, prompt, echo=True, logprobs=1, max_tokens=0)
        choice = reply["choices"][0]
        assert choice["text"] == "käse"
        assert choice["logprobs"] == {
            "tokens": ["k", "bytes:\\xc3", "bytes:\\xa4", "s", "e"],
            "token_logprobs": [None, -0.5, -0.5, -0.5, -0.5],
            "top_logprobs": [
                None,
                {"bytes:\\xc3": -0.5},
                {"bytes:\\xa4": -0.5},
                {"s": -0.5},
                {"e": -0.5},
            ],
            "text_offset": [0, 1, 1, 2, 3],
        }
        assert reply["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("max_tokens", [0, 1, 20])
def test_a_stream_with_echo_and_logprobs_brings_the_prompt_first(client: httpx.Client, max_tokens: int) -> None:
    *chunks, done = stream(client, "hey", echo=True, logprobs=1, max_tokens=max_tokens)
    assert done == "[DONE]"
    whole = ask(client, "hey", echo=True, logprobs=1, max_tokens=max_tokens)["choices"][0]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [item for choice in choices for item in choice["logprobs"][name]]
        assert joined == whole["logprobs"][name]
    assert choices[0]["logprobs"]["token_logprobs"][0] is None
    assert len(whole["logprobs"]["tokens"]) == 3 + max_tokens
    offsets, tokens = whole["logprobs"]["text_offset"], whole["logprobs"]["tokens"]
    assert all(whole["text"][at : at + len(token)] == token for at, token in zip(offsets, tokens, strict=True))


@pytest.mark.parametrize("prompt", ["hey", [104, 101, 121]], ids=str)
def test_echo_without_logprobs_repeats_text_and_ids_alike(client: httpx.Client, prompt: object) -> None:
    choice = ask(client, prompt, echo=True, max_tokens=2)["choices"][0]
    assert choice["text"] == "heyhe"
    assert choice["logprobs"] is None


def test_unknown_fields_and_chat_fields_are_refused_by_name(client: httpx.Client) -> None:
    for field in ("foo", "messages", "top_logprobs", "tools", "max_completion_tokens"):
        found = error(client, **{field: 1})
        assert found["param"] == field
        assert found["code"] == "unknown_field"
