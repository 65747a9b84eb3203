"""`--record`: accepted requests, one line each, and never a key."""

from __future__ import annotations

import json
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from srt.child import StartError
from srt.http.record import Recorder
from tests.http.running import Running

KEY = "a-very-secret-key"


def lines(path: Path) -> list[dict[str, Any]]:
    text = path.read_text()
    assert text == "" or text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_accepted_requests_are_written_one_line_each(start: Callable[..., Running], tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    running = start(record=str(path), api_key=KEY)
    chat = {"messages": [{"role": "user", "content": "Say:\n“hello” \\ 🐙"}], "max_tokens": 2}
    with httpx.Client(base_url=running.url, headers={"Authorization": f"Bearer {KEY}"}) as client:
        pretty = json.dumps(chat, indent=4, ensure_ascii=False).encode()
        headers = {"Content-Type": "application/json"}
        assert client.post("/v1/chat/completions", content=pretty, headers=headers).status_code == 200
        assert client.post("/v1/chat/completions", json={**chat, "stream": True}).status_code == 200
        assert client.post("/v1/completions", json={"prompt": "x", "temperature": 3000}).status_code == 400
        assert client.post("/v1/completions", json={"prompt": "x", "unknown": 1}).status_code == 400
        assert client.post("/v1/completions", json={"prompt": ["x", "y"], "max_tokens": 1}).status_code == 200
        assert client.post("/generate", json={"text": "x"}).status_code == 200
        assert client.post("/tokenize", json={"prompt": "x"}).status_code == 200
    found = lines(path)
    assert [line["path"] for line in found] == [
        "/v1/chat/completions",
        "/v1/chat/completions",
        "/v1/completions",
        "/generate",
    ]
    assert [line["body"] for line in found] == [
        chat,
        {**chat, "stream": True},
        {"prompt": ["x", "y"], "max_tokens": 1},
        {"text": "x"},
    ]
    assert all(line["time"] > 1.7e9 for line in found)
    assert KEY not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_recorded_unless_asked_for(client: httpx.Client, tmp_path: Path) -> None:
    assert client.post("/v1/completions", json={"prompt": "x", "max_tokens": 1}).status_code == 200
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_there_is_appended_to_line_by_line(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    recorders = [Recorder(str(path), lambda: 5.0) for _ in range(3)]

    def write(recorder: Recorder) -> None:
        for number in range(200):
            recorder.write("/v1/completions", json.dumps({"prompt": "word " * number}).encode())

    threads = [threading.Thread(target=write, args=(recorder,)) for recorder in recorders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for recorder in recorders:
        recorder.close()
    found = lines(path)
    assert len(found) == 600
    assert {len(line["body"]["prompt"]) for line in found} == {5 * number for number in range(200)}


def test_a_disk_that_is_full_is_told_once_and_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder("/dev/full")
    for _ in range(5):
        recorder.write("/v1/completions", b"{}")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    recorder.close()


def test_a_place_that_cannot_be_written_is_one_line_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"--record .*: Is a directory"):
        Recorder(str(tmp_path))
