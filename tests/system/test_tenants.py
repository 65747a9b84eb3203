"""Tenants of one server: nobody finds, or is told of, what another one has cached.  With a tiny model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.served import Served, serving
from tests.system.tenants import KEYS, client_of, everybody, flags

SECRET = "The combination of the safe in the hall is nine, four, seven, seven, one. Tell nobody. " * 4


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tiny_model, tmp_path_factory.mktemp("r"), *flags(tmp_path_factory.mktemp("k"))) as server:
        yield server


@pytest.fixture
def clients(served: Served) -> Iterator[dict[str, httpx.Client]]:
    with everybody(served) as made:
        yield made


def complete(client: httpx.Client, prompt: str = SECRET, **fields: Any) -> dict[str, Any]:
    """The cache report of one completion, with the prompt's tokens and the reply's id."""
    body = {"prompt": prompt, "max_tokens": 2, "temperature": 0, "ignore_eos": True, "cache_report": True, **fields}
    response = client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    reply = response.json()
    assert reply["usage"]["prompt_tokens_details"]["cached_tokens"] == reply["cache_report"]["cached_tokens"]
    return {**reply["cache_report"], "prompt_tokens": reply["usage"]["prompt_tokens"], "id": reply["id"]}


def test_there_is_no_hit_across_tenants_and_there_is_one_within(clients: dict[str, httpx.Client]) -> None:
    first = complete(clients["alice"])
    strange = complete(clients["bob"])
    assert (first["cached_tokens"], strange["cached_tokens"]) == (0, 0)
    # Word for word what he would be told if nobody had ever asked for it.
    alike = ("reason", "position", "detail", "cached_text", "cached_next", "explanation", "evicted_seconds_ago")
    assert {name: strange[name] for name in alike} == {name: first[name] for name in alike}
    assert strange["reason"] == "first_seen"
    for name in ("alice", "bob"):
        assert complete(clients[name])["cached_tokens"] == first["prompt_tokens"] - 1
    assert complete(clients["operator"])["cached_tokens"] == 0


def test_what_is_computed_is_as_much_as_for_a_prompt_that_is_new(clients: dict[str, httpx.Client]) -> None:
    def computed() -> int:
        return int(clients["operator"].get("/server_info").json()["scheduler"]["computed_tokens"])

    costs = []
    for name in ("alice", "bob"):
        before = computed()
        complete(clients[name], max_tokens=1)
        costs.append(computed() - before)
    assert costs[0] == costs[1] > 0


def test_a_salt_divides_within_a_tenant_and_names_no_tenant(clients: dict[str, httpx.Client]) -> None:
    complete(clients["alice"], cache_salt="x")
    assert complete(clients["bob"], cache_salt="x")["reason"] == "first_seen"
    other = complete(clients["alice"], cache_salt="y")
    assert (other["reason"], other["cached_tokens"]) == ("other_namespace", 0)
    assert complete(clients["alice"], cache_salt="x")["reason"] == "all_cached"


def test_each_sees_its_own_tree_and_its_own_requests(clients: dict[str, httpx.Client]) -> None:
    reply = complete(clients["alice"])
    complete(clients["bob"], prompt="Bob has other words. " * 5)
    assert clients["bob"].get(f"/cache/explain/{reply['id']}").status_code == 404
    assert clients["alice"].get(f"/cache/explain/{reply['id']}").status_code == 200
    for name, words in (("alice", "The combination"), ("bob", "Bob has"), ("operator", None)):
        told = clients[name].get("/cache/tree").json()
        assert [run["namespace"] for run in told["runs"]] == ([""] if words else [])
        assert all(run["text"].startswith(words or "") for run in told["runs"])
        assert "combination" not in clients["bob"].get("/cache/tree").text


def test_what_others_ask_for_is_no_detail_of_an_eviction(clients: dict[str, httpx.Client]) -> None:
    complete(clients["alice"])
    for number in range(12):
        complete(clients["bob"], prompt=f"{number} other things to say " * 40)
    mine = complete(clients["alice"])
    assert mine["reason"] == "evicted"
    assert mine["detail"] == "room was needed"
    assert not any(character.isdigit() for character in mine["detail"])


def test_tenants_keep_their_own_on_disk_too(tiny_model: Path, tmp_path: Path) -> None:
    for folder in ("r", "d", "k"):
        (tmp_path / folder).mkdir()
    disk = flags(tmp_path / "k", "--disk-cache-dir", str(tmp_path / "d"))
    with serving(tiny_model, tmp_path / "r", *disk) as served, client_of(served, "alice") as alice:
        tokens = complete(alice)["prompt_tokens"]
        served.process.terminate()
        served.end()
    with serving(tiny_model, tmp_path / "r", *disk) as served:
        with client_of(served, "alice") as alice, client_of(served, "bob") as bob:
            assert complete(bob)["cached_tokens"] == 0
            report = complete(alice)
            assert report["cached_tokens_by_tier"]["disk"] > tokens - 32
        served.process.terminate()
        code, log = served.end()
    assert code == 0
    assert not any(key in log for key in KEYS.values())


def test_no_child_has_a_key_on_its_command_line_or_in_its_settings(served: Served) -> None:
    for pid in served.workers().values():
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode()
        settings = "".join(
            path.read_text() for path in served.base.rglob("*") if path.is_file() and path.suffix == ".json"
        )
        assert not any(key in command + settings for key in KEYS.values())


def test_a_faulty_file_of_keys_ends_the_start_in_one_line(tiny_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("only-a-key\n")
    server = Served(tiny_model, tmp_path, "--api-keys-file", str(path))
    code, errors = server.end()
    assert code == 1
    assert errors.strip().endswith(f"--api-keys-file {path} line 1: has 1 words; it must be KEY TENANT")
