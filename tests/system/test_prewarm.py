"""`--prewarm FILE`: what the file names is cached and pinned when the server, or an engine, is ready."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from sapwood import Engine
from sapwood.prewarm import read_prewarm
from srt.answer import RequestFailed
from srt.child import StartError
from tests.system.served import serving

HEAD = "The oldest tree of this country stands near a lake. " * 3
SYSTEM = {"role": "system", "content": "You know every tree of this country, and its age. " * 2}


def lines(folder: Path, *bodies: dict[str, Any]) -> Path:
    path = folder / "prewarm.jsonl"
    path.write_text("\n\n".join(map(json.dumps, bodies)) + "\n")
    return path


def test_a_server_is_warm_when_it_says_that_it_serves(tiny_model: Path, tmp_path: Path) -> None:
    marked = {**SYSTEM, "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    file = lines(tmp_path, {"messages": [marked]}, {"text": HEAD, "cache_salt": "s"}, {"text": HEAD, "tenant": "ann"})
    flags = ("--dtype", "float32", "--prewarm", str(file), "--log-level", "info")
    run = tmp_path / "run"
    run.mkdir()
    with serving(tiny_model, run, *flags) as server, httpx.Client(base_url=server.url, timeout=120) as client:
        body = {"messages": [SYSTEM, {"role": "user", "content": "Which is the oldest?"}], "max_tokens": 1}
        usage = client.post("/v1/chat/completions", json=body).json()["usage"]
        (pin,) = client.get("/cache/pins").json()["pins"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= pin["asked_tokens"] > 16
        tokens = len(client.post("/tokenize", json={"prompt": HEAD}).json()["tokens"])
        for salt, cached in (("s", tokens - 1), ("t", 0)):
            body = {"prompt": HEAD, "max_tokens": 1, "cache_salt": salt, "no_store": True}
            usage = client.post("/v1/completions", json=body).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached
        server.process.terminate()
        _, log = server.end()
    assert "prewarmed 3 prefixes of" in log


def test_an_engine_is_warm_when_it_is_there(tiny_model: Path, tmp_path: Path) -> None:
    file = lines(tmp_path, {"text": HEAD, "pin": {"ttl_seconds": 60}})
    with Engine(tiny_model, dtype="float32", max_total_tokens=2048, prewarm=str(file)) as engine:
        meta = engine.generate(HEAD, {"max_new_tokens": 1})["meta_info"]
        assert meta["cached_tokens"] == meta["prompt_tokens"] - 1
        stats = engine.stats()
        assert stats is not None
        assert stats.pins == 1
        again = engine.generate(HEAD, {"max_new_tokens": 1}, pin={"tokens": 16}, cache_salt="s")["meta_info"]
        assert again["cache_report"]["pins"][0]["pinned_tokens"] == 16
        marked = {**SYSTEM, "cache_control": {"type": "ephemeral"}}
        chat = engine.chat([marked, {"role": "user", "content": "Which?"}], {"max_new_tokens": 1})["meta_info"]
        (pin,) = chat["cache_report"]["pins"]
        assert (pin["message"], pin["ttl_seconds"]) == ("messages[0]", 300)
        assert 0 < pin["pinned_tokens"] <= pin["asked_tokens"]
        with pytest.raises(RequestFailed, match="must be"):
            engine.chat([{**SYSTEM, "cache_control": {"type": "forever"}}], {"max_new_tokens": 1})
        once = engine.generate("Once and never again.", {"max_new_tokens": 1}, no_store=True, cache_salt="once")
        assert once["meta_info"]["cached_tokens"] == 0


def test_a_prefix_that_cannot_be_served_ends_the_start_with_its_line(tiny_model: Path, tmp_path: Path) -> None:
    file = lines(tmp_path, {"text": "fine"}, {"text": "too long " * 3000})
    with pytest.raises(StartError, match=r"--prewarm .*prewarm.jsonl, line 3: .*context"):
        Engine(tiny_model, dtype="float32", max_total_tokens=2048, prewarm=str(file))


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ('{"text": 1}', "line 1: text must be a string"),
        ('{"text": "a", "max_tokens": 1}', "max_tokens"),
        ("{}", "One of text, input_ids and messages must be given"),
        ("[", "line 1"),
        ('{"text": "a", "tenant": "a\\u001fb"}', "unit separator"),
        ("", "has no line"),
    ],
)
def test_a_faulty_file_is_named_with_its_line(tmp_path: Path, line: str, text: str) -> None:
    path = tmp_path / "prewarm.jsonl"
    path.write_text(line)
    with pytest.raises(StartError, match=text):
        read_prewarm(str(path), 100)


def test_a_missing_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="No such file"):
        read_prewarm(str(tmp_path / "nothing"), 100)
    assert read_prewarm(None, 100) == []
