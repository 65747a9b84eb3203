"""A measuring client for OpenAI-compatible servers: one streamed request, and what it took."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx


@dataclass
class Reply:
    """One request as its client saw it.  Times in seconds from sending."""

    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    first_token: float = 0.0
    end: float = 0.0
    gaps: list[float] = field(default_factory=list)
    # Also when fewer or more tokens came than were asked for.
    error: str | None = None

    @property
    def per_token(self) -> float:
        """Mean seconds for each output token after the first."""
        return (self.end - self.first_token) / max(1, self.completion_tokens - 1)


class Client:
    """Sends requests to one server; greedy, without end-of-sequence, so that output lengths are as asked for."""

    def __init__(self, base_url: str, model: str, timeout: float = 600.0, fresh_connections: bool = False) -> None:
        # Some servers close kept-alive connections after each stream.
        limits = httpx.Limits(max_connections=512, max_keepalive_connections=0 if fresh_connections else 512)
        self._http = httpx.AsyncClient(base_url=base_url, timeout=timeout, limits=limits)
        self._model = model

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def complete(
        self, prompt: str | list[int], max_tokens: int, on_token: Callable[[float], None] | None = None
    ) -> Reply:
        """One call of /v1/completions; `on_token` is told the time (time.perf_counter) of every piece of text."""
        return await self._stream("/v1/completions", {"prompt": prompt, "max_tokens": max_tokens}, on_token)

    async def chat(self, messages: list[dict[str, str]], max_tokens: int) -> Reply:
        """One call of /v1/chat/completions."""
        return await self._stream("/v1/chat/completions", {"messages": messages, "max_tokens": max_tokens})

    async def _stream(self, path: str, body: dict[str, Any], on_token: Callable[[float], None] | None = None) -> Reply:
        body |= {
            "model": self._model,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        reply = Reply()
        begin = last = time.perf_counter()
        try:
            async with self._http.stream("POST", path, json=body) as response:
                if response.status_code != 200:
                    reply.error = f"{response.status_code}: {(await response.aread())[:300]!r}"
                    return reply
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    now = self._take(reply, json.loads(line[6:]), begin, last)
                    if on_token is not None and now != last:
                        on_token(now)
                    last = now
        except httpx.HTTPError as error:
            reply.error = f"{type(error).__name__}: {error}"
        reply.end = time.perf_counter() - begin
        if reply.error is None and reply.completion_tokens != body["max_tokens"]:
            # A server that gives up early looks fast.
            reply.error = f"{reply.completion_tokens} of {body['max_tokens']} tokens came"
        return reply

    @staticmethod
    def _take(reply: Reply, chunk: dict[str, Any], begin: float, last: float) -> float:
        if "error" in chunk:
            reply.error = str(chunk["error"])
        for choice in chunk.get("choices", []):
            piece = choice.get("text") or choice.get("delta", {}).get("content") or ""
            if piece:
                now = time.perf_counter()
                if reply.first_token:
                    reply.gaps.append(now - last)
                else:
                    reply.first_token = now - begin
                last = now
                reply.text += piece
        usage = chunk.get("usage")
        if usage:
            reply.prompt_tokens = usage["prompt_tokens"]
            reply.completion_tokens = usage["completion_tokens"]
            reply.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return last
