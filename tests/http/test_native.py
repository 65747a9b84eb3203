"""POST /generate: the native endpoint, in SGLang's shape."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import httpx
import pytest

from tests.http.running import Running, events

ROUTE = "/generate"


def ask(client: httpx.Client, **fields: Any) -> Any:
    response = client.post(ROUTE, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


def error(client: httpx.Client, **fields: Any) -> dict[str, Any]:
    response = client.post(ROUTE, json=fields)
    assert response.status_code == 400, response.text
    found: dict[str, Any] = response.json()["error"]
    return found


def test_one_prompt_is_answered_by_one_object(client: httpx.Client) -> None:
    reply = ask(client, text="xyz", sampling_params={"max_new_tokens": 4}, rid="mine")
    assert reply["text"] == "xyzx"
    assert reply["output_ids"] == [120, 121, 122, 120]
    meta = reply["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (3, 4, 0)
    assert meta["e2e_latency"] >= 0
    assert "output_token_logprobs" not in meta


def test_ids_are_answered_like_their_text(client: httpx.Client) -> None:
    assert ask(client, input_ids=[120, 121], sampling_params={"max_new_tokens": 3})["text"] == "xyx"


def test_lists_are_answered_by_lists_each_with_its_own_settings(client: httpx.Client) -> None:
    replies = ask(
        client,
        text=["ab", "cd", "ef"],
        sampling_params=[{"max_new_tokens": 1}, {"max_new_tokens": 4, "stop": "d"}, {"max_new_tokens": 3}],
        rid=["r1", "r2", "r3"],
        return_logprob=[False, True, False],
        top_logprobs_num=[0, 2, 0],
    )
    assert [reply["text"] for reply in replies] == ["a", "c", "efe"]
    assert [reply["meta_info"]["id"] for reply in replies] == ["r1", "r2", "r3"]
    assert replies[1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": "d"}
    assert [len(entry) for entry in replies[1]["meta_info"]["output_top_logprobs"]] == [2, 2]
    assert "output_token_logprobs" not in replies[0]["meta_info"]
    assert len(ask(client, text=["only"], sampling_params={"max_new_tokens": 1})) == 1
    assert [
        reply["text"] for reply in ask(client, input_ids=[[97], [98, 99]], sampling_params={"max_new_tokens": 2})
    ] == [
        "aa",
        "bc",
    ]


def test_samples_of_one_prompt_are_a_list(client: httpx.Client) -> None:
    replies = ask(client, text="ab", sampling_params={"max_new_tokens": 2, "n": 3})
    assert [reply["text"] for reply in replies] == ["ab"] * 3


def test_a_stream_sends_everything_so_far_in_each_event(client: httpx.Client) -> None:
    response = client.post(ROUTE, json={"text": "grün", "sampling_params": {"max_new_tokens": 5}, "stream": True})
    *parts, done = events(response)
    assert done == "[DONE]"
    assert parts[-1]["text"] == "grün"
    assert parts[-1]["output_ids"] == list("grün".encode())
    assert parts[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 5}
    assert all(part["meta_info"]["finish_reason"] is None for part in parts[:-1])
    for before, after in itertools.pairwise(parts):
        assert after["text"].startswith(before["text"])
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
    assert all("index" not in part for part in parts)


def test_a_stream_of_many_says_which_is_which(client: httpx.Client) -> None:
    body = {"text": ["ab", "cd"], "sampling_params": {"max_new_tokens": 3, "n": 2}, "stream": True}
    *parts, _ = events(client.post(ROUTE, json=body))
    last = {part["index"]: part["text"] for part in parts if part["meta_info"]["finish_reason"]}
    assert last == {0: "aba", 1: "aba", 2: "cdc", 3: "cdc"}


def test_logprobs_of_prompt_and_output(client: httpx.Client) -> None:
    meta = ask(
        client,
        text="abc",
        sampling_params={"max_new_tokens": 2},
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=1,
        return_text_in_logprobs=True,
    )["meta_info"]
    assert meta["input_token_logprobs"] == [[None, 97, "a"], [-0.5, 98, "b"], [-0.5, 99, "c"]]
    assert meta["output_token_logprobs"] == [[-0.5, 97, "a"], [-0.5, 98, "b"]]
    assert meta["input_top_logprobs"] == [None, [[-0.5, 98, "b"]], [[-0.5, 99, "c"]]]
    assert meta["output_top_logprobs"] == [[[-0.5, 97, "a"]], [[-0.5, 98, "b"]]]
    default = ask(client, text="abc", sampling_params={"max_new_tokens": 1}, return_logprob=True)["meta_info"]
    assert default["input_token_logprobs"] == []
    assert default["output_token_logprobs"] == [[-0.5, 97, None]]


def test_a_prompt_can_be_put_into_the_cache_without_generating(client: httpx.Client) -> None:
    reply = ask(client, text="warm this", sampling_params={"max_new_tokens": 0})
    assert reply["text"] == ""
    assert reply["output_ids"] == []
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}


def test_128_tokens_are_the_default(server: Running) -> None:
    assert httpx.post(server.url + ROUTE, json={"text": "abc"}).json()["meta_info"]["completion_tokens"] == 128


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "text"),
        ({"text": "a", "input_ids": [1]}, "text"),
        ({"text": ""}, "text"),
        ({"text": []}, "text"),
        ({"text": ["a", ""]}, "text[1]"),
        ({"text": ["a", 1]}, "text[1]"),
        ({"text": 5}, "text"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": ["a"]}, "input_ids[0]"),
        ({"input_ids": [-1]}, "input_ids[0]"),
        ({"input_ids": [[1], [2, 999]]}, "input_ids[1][1]"),
        ({"text": "a", "sampling_params": 5}, "sampling_params"),
        ({"text": "a", "sampling_params": [5]}, "sampling_params[0]"),
        ({"text": "a", "sampling_params": {"temprature": 1}}, "sampling_params.temprature"),
        ({"text": "a", "sampling_params": {"temperature": "x"}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"text": "a", "sampling_params": {"max_new_tokens": 2**70}}, "sampling_params.max_new_tokens"),
        ({"text": "a", "sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"text": "a", "sampling_params": {"stop": [""]}}, "sampling_params.stop"),
        ({"text": ["a", "b"], "sampling_params": [{}]}, "sampling_params"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"top_k": "x"}]}, "sampling_params[1].top_k"),
        ({"text": ["a", "b"], "rid": "one"}, "rid"),
        ({"text": ["a", "b"], "rid": ["same", "same"]}, "rid"),
        ({"text": "a", "rid": ""}, "rid"),
        ({"text": "a", "rid": "x" * 300}, "rid"),
        ({"text": "a", "return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": 1000}, "top_logprobs_num"),
        ({"text": "a", "return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ({"text": "a", "lora_path": "x"}, "lora_path"),
        ({"text": "a", "image_data": ["x"]}, "image_data"),
        ({"text": "a", "cache_salt": ""}, "cache_salt"),
        ({"text": "a", "foo": 1}, "foo"),
        ({"text": "x" * 3000}, "text"),
        ({"text": ["a", "x" * 3000]}, "text[1]"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_wrong_is_named(client: httpx.Client, fields: dict[str, Any], param: str) -> None:
    found = error(client, **fields)
    assert found["param"] == param
    assert param.split("[")[0] in found["message"]


def test_fields_of_other_servers_are_taken_when_they_say_nothing(client: httpx.Client) -> None:
    nothing = {"lora_path": None, "image_data": None, "session_params": {}, "return_hidden_states": False}
    ask(client, text="a", sampling_params={"max_new_tokens": 1}, log_metrics=True, **nothing)


def test_a_request_is_aborted_by_exactly_its_id(server: Running) -> None:
    replies: dict[str, Any] = {}

    def run(rid: str) -> None:
        body = {"text": "hang after five", "sampling_params": {"max_new_tokens": 50}, "rid": rid}
        replies[rid] = httpx.post(server.url + ROUTE, json=body, timeout=30).json()

    threads = [threading.Thread(target=run, args=(rid,)) for rid in ("1", "10")]
    for thread in threads:
        thread.start()
    server.eventually(lambda: server.front.running == 2)
    again = httpx.post(server.url + ROUTE, json={"text": "a", "rid": "10"})
    assert again.status_code == 400
    assert again.json()["error"]["param"] == "rid"

    def abort(rid: str) -> int:
        response = httpx.post(server.url + "/abort_request", json={"rid": rid})
        assert response.status_code == 200
        aborted: int = response.json()["aborted"]
        return aborted

    assert abort("1") == 1
    threads[0].join()
    assert replies["1"]["meta_info"]["finish_reason"]["type"] == "abort"
    assert replies["1"]["text"] == "hang "
    assert server.front.running == 1
    assert abort("1") == 0
    assert abort("") == 0
    assert abort("10") == 1
    threads[1].join()
    # The id is free again.
    assert httpx.post(server.url + ROUTE, json={"text": "a", "rid": "10"}).status_code == 200
