"""A declared beginning is computed once for all tenants; what follows it is each tenant's own.  With a tiny model."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.served import Served, serving, wait_until
from tests.system.tenants import everybody, flags

SYSTEM = {"role": "system", "content": "You answer questions about trees, rivers and numbers, and nothing else. " * 4}
PAGE = 16


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("k")
    (folder / "heads.jsonl").write_text(json.dumps({"messages": [SYSTEM]}))
    own = flags(folder, "--public-prefix", str(folder / "heads.jsonl"))
    with serving(tiny_model, tmp_path_factory.mktemp("r"), *own) as server:
        yield server


@pytest.fixture
def clients(served: Served) -> Iterator[dict[str, httpx.Client]]:
    with everybody(served) as made:
        yield made


def ask(client: httpx.Client, question: str, system: dict[str, str] = SYSTEM, **fields: Any) -> dict[str, Any]:
    messages = [system, {"role": "user", "content": question}]
    body = {"messages": messages, "max_tokens": 4, "temperature": 0, "cache_report": True, **fields}
    response = client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    reply = response.json()
    return {**reply["cache_report"], "text": reply["choices"][0]["message"]["content"], "id": reply["id"]}


def test_the_head_is_shared_and_the_question_is_not(clients: dict[str, httpx.Client]) -> None:
    question = "Which of the rivers is the longest one that you know of, and how long is it?"
    first = ask(clients["alice"], question)
    assert first["cached_tokens"] == 0
    strange = ask(clients["bob"], question)
    own = ask(clients["alice"], question)
    assert own["reason"] == "all_cached"
    head = strange["cached_tokens"]
    assert head % PAGE == 0
    assert head > 0
    assert strange["message"] == "messages[0]"
    # Bob is told what a stranger is told who comes with other words, and nothing of Alice's.
    other = ask(clients["bob"], "Something else altogether")
    assert (strange["reason"], strange["cached_next"], strange["cached_text"]) == ("extended", [], "")
    assert other["cached_tokens"] >= head
    assert strange["text"] == first["text"] == own["text"]


def test_a_salt_shares_the_head_too(clients: dict[str, httpx.Client]) -> None:
    head = ask(clients["alice"], "A question")["computed_tokens"]
    salted = ask(clients["alice"], "A question", cache_salt="s")
    assert 0 < salted["cached_tokens"] < head
    assert salted["cached_tokens"] % PAGE == 0


def test_a_beginning_that_is_not_declared_is_not_shared(clients: dict[str, httpx.Client]) -> None:
    own = {"role": "system", "content": "Alice has a system prompt of her own, which is long enough to be cached. " * 3}
    ask(clients["alice"], "A question", system=own)
    assert ask(clients["bob"], "A question", system=own)["cached_tokens"] < PAGE
    assert ask(clients["alice"], "A question", system=own)["reason"] == "all_cached"


def test_the_head_is_in_the_operators_tree_alone(clients: dict[str, httpx.Client]) -> None:
    for name in ("alice", "bob"):
        ask(clients[name], f"A question of {name}, with some words to make it longer than a page or two")
    trees = {name: client.get("/cache/tree").json() for name, client in clients.items()}
    (public,) = trees["operator"]["runs"]
    assert public["namespace"] == "public"
    assert public["text"].startswith("<|im_start|>system\nYou answer")
    assert public["children"] == []
    for name in ("alice", "bob"):
        assert [run["namespace"] for run in trees[name]["runs"]] == [""]
        assert "You answer questions" not in trees[name]["runs"][0]["text"]
        assert trees[name]["runs"][0]["num_children"] == 0


def test_a_public_head_survives_that_its_scheduler_is_started_again(
    served: Served, clients: dict[str, httpx.Client]
) -> None:
    old = served.workers()["scheduler"]
    os.kill(old, signal.SIGKILL)
    wait_until(lambda: served.workers().get("scheduler", old) != old)
    wait_until(lambda: clients["alice"].get("/health").status_code == 200)
    assert ask(clients["alice"], "A question")["cached_tokens"] == 0
    assert ask(clients["bob"], "A question")["cached_tokens"] > 0
