"""`sapwood chat`: talk in the terminal to the model of a running server.

Each turn shows how many of its prompt tokens were in the server's cache.  /reset begins anew, /exit (or end of input)
leaves; Ctrl-C stops an answer that is being written.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import httpx

HELP = "/reset begins a new conversation, /exit leaves, Ctrl-C stops an answer"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")
CONNECT_SECONDS = 5.0


class ChatFailed(Exception):
    """The server cannot be reached or refuses; the message is one line."""


@dataclass(frozen=True)
class ChatSettings:
    """What to talk to, and how."""

    url: str = "http://127.0.0.1:30000"
    api_key: str | None = None
    model: str | None = None
    system: str | None = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


@dataclass
class Turn:
    """One answer as it comes in."""

    text: str = ""
    finish: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)


class ChatClient:
    """A conversation with a server.  Context manager."""

    def __init__(self, settings: ChatSettings) -> None:
        headers = {} if settings.api_key is None else {"Authorization": f"Bearer {settings.api_key}"}
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        try:
            # A proxy for the outside world has no business between us and this machine.
            local = urlsplit(settings.url).hostname in LOCAL_HOSTS
            self._http = httpx.Client(base_url=settings.url, headers=headers, timeout=timeout, trust_env=not local)
        except (httpx.InvalidURL, ValueError) as error:
            raise ChatFailed(f"--url {settings.url}: {error}") from error
        self._settings = settings
        self.messages: list[dict[str, str]] = []
        self.reset()

    def __enter__(self) -> ChatClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def reset(self) -> None:
        """Forget what was said."""
        system = self._settings.system
        self.messages = [] if system is None else [{"role": "system", "content": system}]

    def model_name(self) -> str:
        """The model that answers.  Raises ChatFailed."""
        with self._errors():
            reply = self._http.get("/v1/models")
        if reply.status_code != 200:
            raise ChatFailed(_refusal(reply.status_code, reply.text))
        models = [model["id"] for model in reply.json()["data"]]
        return self._settings.model or models[0]

    def say(self, text: str, model: str, turn: Turn) -> Iterator[str]:
        """Send a message and give the answer piece by piece; `turn` fills up meanwhile.

        What has been given of the answer stays in the conversation, also when the iterator is left early.  Raises
        ChatFailed; then the message is taken back.
        """
        self.messages.append({"role": "user", "content": text})
        try:
            yield from self._stream(model, turn)
        except ChatFailed:
            self.messages.pop()
            raise
        except GeneratorExit:
            self.messages.append({"role": "assistant", "content": turn.text})
            raise
        self.messages.append({"role": "assistant", "content": turn.text})

    def _stream(self, model: str, turn: Turn) -> Iterator[str]:
        settings = self._settings
        body = {
            "model": model,
            "messages": self.messages,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": settings.temperature,
            "max_tokens": settings.max_tokens,
            "seed": settings.seed,
        }
        body = {name: value for name, value in body.items() if value is not None}
        with self._errors(), self._http.stream("POST", "/v1/chat/completions", json=body) as reply:
            if reply.status_code != 200:
                reply.read()
                raise ChatFailed(_refusal(reply.status_code, reply.text))
            for line in reply.iter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    yield from _take(json.loads(line.removeprefix("data: ")), turn)

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except httpx.ConnectError:
            raise ChatFailed(f"no server answers at {self._settings.url}; start one with: sapwood serve") from None
        except httpx.HTTPError as error:
            raise ChatFailed(f"{self._settings.url}: {str(error) or type(error).__name__}") from error


def _take(chunk: dict[str, Any], turn: Turn) -> Iterator[str]:
    if "error" in chunk:
        raise ChatFailed(str(chunk["error"].get("message", chunk["error"])))
    turn.usage = chunk.get("usage") or turn.usage
    for choice in chunk.get("choices", ()):
        turn.finish = choice.get("finish_reason") or turn.finish
        piece = choice["delta"].get("content")
        if piece:
            turn.text += piece
            yield piece


def _refusal(status: int, text: str) -> str:
    try:
        return f"{json.loads(text)['error']['message']} (HTTP {status})"
    except (ValueError, KeyError, TypeError):
        return f"the server answers with HTTP {status}"


def summary(turn: Turn, seconds: float) -> str:
    """What a turn cost, in one line."""
    if not turn.usage:
        return f"[stopped after {seconds:.1f} s]"
    cached = (turn.usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    ended = " (cut off)" if turn.finish == "length" else ""
    return (
        f"[prompt {turn.usage['prompt_tokens']} tokens, {cached} from the cache; "
        f"answer {turn.usage['completion_tokens']} tokens{ended} in {seconds:.1f} s]"
    )


def chat(settings: ChatSettings) -> int:
    """Talk until /exit; the exit code.  Raises ChatFailed when there is nobody to talk to."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (its import alone gives `input` line editing)
    with ChatClient(settings) as client:
        model = client.model_name()
        print(f"{model} at {settings.url}. {HELP}.")
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                continue
            if text == "/exit":
                return 0
            if text == "/reset":
                client.reset()
                print("[a new conversation]")
            elif text.startswith("/"):
                print(HELP)
            elif text:
                _turn(client, text, model)


def _turn(client: ChatClient, text: str, model: str) -> None:
    turn, begin = Turn(), time.perf_counter()
    pieces = client.say(text, model, turn)
    try:
        for piece in pieces:
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        with contextlib.suppress(RuntimeError):
            pieces.close()  # type: ignore[attr-defined]
        turn.usage = {}
    except ChatFailed as error:
        print(f"sapwood chat: {error}", file=sys.stderr)
        return
    print()
    print(summary(turn, time.perf_counter() - begin))
