"""The terminal client against a real HTTP server over a fake front."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from sapwood.chat import HELP, ChatClient, ChatFailed, ChatSettings, Turn, chat
from tests.http.running import Running


@pytest.fixture
def server() -> Iterator[Running]:
    running = Running()
    yield running
    running.close()


def talk(monkeypatch: pytest.MonkeyPatch, settings: ChatSettings, *lines: str) -> int:
    """Run the client on lines of input; the end of them is the end of input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(line + "\n" for line in lines)))
    return chat(settings)


def test_a_conversation_grows_and_every_turn_shows_what_was_cached(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ChatSettings(url=server.url, max_tokens=3, system="Be short.", seed=4)
    assert talk(monkeypatch, settings, "abc", "", "abc again", "/exit", "never sent") == 0
    output = capsys.readouterr().out
    assert "fake at " in output
    assert output.count(" from the cache; answer 3 tokens (cut off) in ") == 2
    first, second = (ask.prompt.messages_json for ask in server.front.asks)  # type: ignore[union-attr]
    assert first == b'[{"role":"system","content":"Be short."},{"role":"user","content":"abc"}]'
    assert second.startswith(first[:-1])
    assert b'"role":"assistant"' in second
    assert [ask.seed for ask in server.front.asks] == [4, 4]


def test_reset_forgets_and_an_unknown_command_gives_help(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, ChatSettings(url=server.url, max_tokens=1), "one", "/reset", "/what", "two") == 0
    assert [ask.prompt.messages_json for ask in server.front.asks] == [  # type: ignore[union-attr]
        b'[{"role":"user","content":"one"}]',
        b'[{"role":"user","content":"two"}]',
    ]
    assert f"> {HELP}" in capsys.readouterr().out.splitlines()


def test_a_failed_turn_is_told_and_taken_back(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, ChatSettings(url=server.url, max_tokens=9), "fail", "full", "break", "good") == 0
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3
    assert all(line.startswith("sapwood chat: ") for line in errors)
    assert server.front.asks[-1].prompt.messages_json == b'[{"role":"user","content":"good"}]'  # type: ignore[union-attr]


def test_an_answer_left_early_is_aborted_and_stays_in_the_conversation(server: Running) -> None:
    with ChatClient(ChatSettings(url=server.url)) as client:
        turn = Turn()
        pieces = client.say("slow", client.model_name(), turn)
        next(pieces)
        pieces.close()  # type: ignore[attr-defined]
        server.eventually(lambda: server.front.running == 0)
        assert [message["role"] for message in client.messages] == ["user", "assistant"]
        assert client.messages[1]["content"] == turn.text != ""


def test_a_key_is_sent_and_a_missing_one_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    running = Running(api_key="secret")
    try:
        with pytest.raises(ChatFailed, match="HTTP 401"):
            chat(ChatSettings(url=running.url))
        assert talk(monkeypatch, ChatSettings(url=running.url, api_key="secret", max_tokens=1), "hi") == 0
    finally:
        running.close()


class Broken(BaseHTTPRequestHandler):
    """Answers in ways that no server of ours does."""

    def do_GET(self) -> None:
        self.send_response(502)
        self.end_headers()
        self.wfile.write(b"<html>bad gateway</html>")

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def test_what_is_no_server_of_ours_is_told_in_one_line() -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Broken)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        with pytest.raises(ChatFailed, match=r"^the server answers with HTTP 502$"):
            chat(ChatSettings(url=f"http://127.0.0.1:{server.server_address[1]}"))
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://127.0.0.1:9", "no server answers"),
        ("http://[", "--url"),
        ("ftp://127.0.0.1", "ftp"),
        ("nowhere", "nowhere"),
    ],
)
def test_a_url_without_a_server_is_told_in_one_line(url: str, said: str) -> None:
    with pytest.raises(ChatFailed, match=said) as caught:
        chat(ChatSettings(url=url))
    assert "\n" not in str(caught.value)


def test_interrupting_an_answer_goes_back_to_the_prompt(
    server: Running, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real: Callable[..., Any] = ChatClient.say

    def interrupted(self: ChatClient, text: str, model: str, turn: Turn) -> Iterator[str]:
        pieces = real(self, text, model, turn)
        try:
            yield next(pieces)
            raise KeyboardInterrupt
        finally:
            pieces.close()

    monkeypatch.setattr(ChatClient, "say", interrupted)
    assert talk(monkeypatch, ChatSettings(url=server.url), "slow", "/exit") == 0
    assert "[stopped after " in capsys.readouterr().out
    server.eventually(lambda: server.front.running == 0)
