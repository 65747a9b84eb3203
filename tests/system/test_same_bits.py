"""200 real prompts over HTTP: the same ids and the same log probabilities, to the last bit, however they are computed.

Alone or 16 at a time, cold or warm, in chunks that neighbours cut: the numbers in the JSON of the replies are equal,
not close.  That is the native kernels' promise (their sums run in an order that depends on the position alone), so
this asks for a compiler.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.system.served import GENEROUS_SECONDS, Served, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

SYSTEM = "You are a patient teacher. Read the question twice, say what is asked, and then answer it in short steps."
NEW_TOKENS = 6


def test_neither_neighbours_nor_the_cache_change_a_bit(real_model: Path, test_data: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in (test_data / "questions.jsonl").read_text().splitlines()]
    questions = [row["question"] for row in rows]
    assert len(questions) == 200
    small_chunks = ("--chunked-prefill-size", "96", "--threads", "2", "--max-total-tokens", "65536")
    with serving(real_model, tmp_path, "--attention-backend", "native", *small_chunks) as served:
        cold_alone, cached = ask_all(served, questions, at_a_time=1)
        assert cached < 200 * 60, "only the system prompt was there"
        warm_together, cached = ask_all(served, questions, at_a_time=16)
        assert cached > 200 * 60, "everything was there"
        flush(served)
        cold_together, _ = ask_all(served, questions, at_a_time=16)
        warm_alone, _ = ask_all(served, questions, at_a_time=1)
    for name, others in (("warm 16", warm_together), ("cold 16", cold_together), ("warm 1", warm_alone)):
        wrong = [question for question, a, b in zip(questions, cold_alone, others, strict=True) if a != b]
        assert not wrong, f"{name}: {len(wrong)} of 200 differ from cold alone, the first: {wrong[0]}"


def flush(served: Served) -> None:
    assert httpx.post(f"{served.url}/flush_cache", timeout=GENEROUS_SECONDS).status_code == 200


def ask_all(served: Served, questions: list[str], at_a_time: int) -> tuple[list[Any], int]:
    """What each reply says of its tokens, and how many prompt tokens were cached."""

    async def run() -> list[dict[str, Any]]:
        gate = asyncio.Semaphore(at_a_time)
        async with httpx.AsyncClient(base_url=served.url, timeout=600.0) as client:

            async def one(question: str) -> dict[str, Any]:
                messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
                body = {"messages": messages, "max_tokens": NEW_TOKENS, "temperature": 0, "ignore_eos": True}
                async with gate:
                    response = await client.post(
                        "/v1/chat/completions", json=body | {"logprobs": True, "top_logprobs": 3}
                    )
                assert response.status_code == 200, response.text
                reply: dict[str, Any] = response.json()
                return reply

            return await asyncio.gather(*map(one, questions))

    replies = asyncio.run(run())
    tokens = [reply["choices"][0]["logprobs"]["content"] for reply in replies]
    assert all(len(of) == NEW_TOKENS for of in tokens)
    return tokens, sum(reply["usage"]["prompt_tokens_details"]["cached_tokens"] for reply in replies)
