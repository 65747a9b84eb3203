"""Why did I miss?  Asked of the whole runtime, with a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.http.running import events
from tests.system.served import Served, empty_cache, serving
from tests.tiny_model import CHAT_TEMPLATE, make_tokenizer

TOKENIZER = make_tokenizer()
# Small enough that a few prompts push the others out.
POOL_TOKENS = 1024


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "4")
    with serving(tiny_model, tmp_path_factory.mktemp("r"), *flags) as server:
        yield server


@pytest.fixture
def http(served: Served) -> Iterator[httpx.Client]:
    with empty_cache(served) as client:
        yield client


def chat(client: httpx.Client, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "cache_report": True, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()
    report = reply["cache_report"]
    assert report["cached_tokens"] == reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert report["cached_tokens"] + report["computed_tokens"] == reply["usage"]["prompt_tokens"]
    return reply


def conversation(*contents: str) -> list[dict[str, Any]]:
    roles = ("system", "user", "assistant", "user", "assistant", "user")
    return [{"role": role, "content": content} for role, content in zip(roles, contents, strict=False)]


def test_a_changed_message_is_named_with_the_words_on_both_sides(http: httpx.Client) -> None:
    first = ("You answer questions about trees.", "Which tree is this?", "It is an oak.", "How old is it?")
    assert chat(http, conversation(*first))["cache_report"]["reason"] == "first_seen"
    changed = (*first[:2], "It is a beech.", first[3])
    reply = chat(http, conversation(*changed))
    report = reply["cache_report"]
    ids = [
        http.post("/tokenize", json={"messages": conversation(*chats)}).json()["tokens"] for chats in (first, changed)
    ]
    position = next(place for place, (a, b) in enumerate(zip(*ids, strict=False)) if a != b)
    assert (report["reason"], report["position"]) == ("diverged", position)
    assert report["message"] == "messages[2]"
    header = TOKENIZER.encode("<|im_start|>assistant\n").ids
    inside = position - report["message_offset"]
    assert ids[1][inside : inside + len(header)] == header
    assert report["prompt_next"] == ids[1][position : position + 8]
    assert report["cached_next"] == ids[0][position : position + 8]
    assert report["prompt_text"] == TOKENIZER.decode(report["prompt_next"], skip_special_tokens=False)
    assert report["before_text"].endswith("It is a")
    assert report["cached_text"].startswith("n oak")
    later = http.get(f"/cache/explain/{reply['id']}").json()["prompts"][0]["cache_report"]
    assert later == report


def test_a_next_turn_extends_what_is_cached(http: httpx.Client) -> None:
    talk = conversation("Be brief.", "Which tree is this?")
    reply = chat(http, talk, max_tokens=12, ignore_eos=True)
    talk += [{"role": "assistant", "content": reply["choices"][0]["message"]["content"]}]
    talk += [{"role": "user", "content": "And that one?"}]
    report = chat(http, talk)["cache_report"]
    assert report["reason"] == "extended"
    assert report["message"] == "messages[2]"
    assert report["cached_tokens"] == reply["usage"]["total_tokens"] - 1


def test_what_was_evicted_says_when_and_for_whom(http: httpx.Client) -> None:
    prompt = "A tree that nobody needs for a while " * 12
    body = {"prompt": prompt, "max_tokens": 1, "cache_report": True}
    http.post("/v1/completions", json=body)
    assert http.post("/v1/completions", json=body).json()["cache_report"]["reason"] == "all_cached"
    for number in range(8):
        http.post("/v1/completions", json={"prompt": f"{number} other things " * 40, "max_tokens": 1})
    report = http.post("/v1/completions", json=body).json()["cache_report"]
    assert report["reason"] == "evicted"
    assert report["evicted_seconds_ago"] >= 0
    assert "was admitted" in report["detail"]
    assert report["detail"] in report["explanation"]


def test_another_salt_is_another_namespace_of_the_same_tenant(http: httpx.Client) -> None:
    talk = conversation("Be brief.", "A question with a salt")
    assert chat(http, talk, cache_salt="a")["cache_report"]["reason"] == "first_seen"
    report = chat(http, talk, cache_salt="b")["cache_report"]
    assert (report["reason"], report["cached_tokens"]) == ("other_namespace", 0)
    assert chat(http, talk, cache_salt="a")["cache_report"]["reason"] == "all_cached"


def test_prompt_logprobs_are_a_reason(http: httpx.Client) -> None:
    body = {"text": "Seven apples and five pears", "sampling_params": {"max_new_tokens": 1}}
    http.post("/generate", json=body)
    asked = {**body, "return_logprob": True, "logprob_start_len": 2}
    meta = http.post("/generate", json=asked).json()["meta_info"]
    assert meta["cache_report"]["reason"] == "logprobs"
    assert meta["cache_report"]["position"] == 1


def test_a_stream_tells_the_same(http: httpx.Client) -> None:
    talk = conversation("Be brief.", "A question for a stream")
    whole = chat(http, talk)
    http.post("/flush_cache")
    body = {"messages": talk, "max_tokens": 4, "temperature": 0, "cache_report": True, "stream": True}
    chunks = events(http.post("/v1/chat/completions", json=body))
    (report,) = (chunk["cache_report"] for chunk in chunks[:-1] if "cache_report" in chunk)
    assert report["reason"] == "first_seen"
    assert report["computed_tokens"] == whole["usage"]["prompt_tokens"]


def count(runs: list[dict[str, Any]]) -> int:
    return sum(1 + count(run["children"]) for run in runs)


def test_the_tree_shows_what_is_cached(http: httpx.Client) -> None:
    assert http.get("/cache/tree").json()["runs"] == []
    shared = "Words that share a beginning share a path: "
    for end in ("other", "under", "other"):
        http.post("/v1/completions", json={"prompt": shared * 3 + end * 20, "max_tokens": 1})
    http.post("/v1/completions", json={"prompt": shared, "max_tokens": 1, "cache_salt": "s"})
    found = http.get("/cache/tree").json()
    plain = [run for run in found["runs"] if run["namespace"] == ""]
    (root,) = plain
    assert root["text"].startswith("Words that share")
    assert root["text"] == TOKENIZER.decode(root["token_ids"])
    assert root["num_children"] == len(root["children"]) == 2
    assert root["tokens"] % found["page_size"] == 0
    assert root["bytes"] == root["pages"] * found["bytes_per_page"] > 0
    assert (root["users"], root["tier"], root["hits"]) == (0, "device", 1)
    assert 0 <= root["age_seconds"] < 60
    assert [run["namespace"] for run in found["runs"] if run not in plain] == ["salt:s"]
    assert found["nodes"] == count(found["runs"]) >= 4
    assert http.get("/cache/check").json() == {"consistent": True, "fault": None}
    shallow = http.get("/cache/tree?depth=1").json()
    assert (shallow["nodes"], shallow["left_out"]) == (2, sum(run["num_children"] for run in found["runs"]))


def test_a_generation_prompt_that_the_history_lacks_is_where_turns_part(tiny_model: Path, tmp_path: Path) -> None:
    thinking = CHAT_TEMPLATE.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
    with serving(tiny_model, tmp_path, "--dtype", "float32", "--page-size", "1", "--chat-template", thinking) as server:
        with httpx.Client(base_url=server.url, timeout=120) as client:
            talk = conversation("Be brief.", "Which tree is this, and how old?")
            reply = chat(client, talk, max_tokens=8, ignore_eos=True)
            talk += [{"role": "assistant", "content": reply["choices"][0]["message"]["content"]}]
            talk += [{"role": "user", "content": "And that one?"}]
            report = chat(client, talk)["cache_report"]
        server.process.terminate()
        _, log = server.end()
    assert report["reason"] == "diverged"
    assert report["message"] == "messages[2]"
    header = len(TOKENIZER.encode("<|im_start|>assistant\n").ids)
    extra = len(TOKENIZER.encode("<|im_start|>assistant\n<think>\n").ids) - header
    # The hit ends where the history leaves the generation prompt, to the token.
    assert report["position"] == report["cached_tokens"] == reply["usage"]["prompt_tokens"] - extra
    assert report["message_offset"] == header
    assert report["cached_text"].startswith("<think>\n")
    assert not report["prompt_text"].startswith("<think>")
    assert "a turn is not a prefix of the next" in log
    assert "<think>" in log
