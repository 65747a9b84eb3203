"""The native reply (SGLang's shape), as POST /generate and the in-process Engine give it.

{"text": ..., "output_ids": [...], "meta_info": {"id", "finish_reason", "prompt_tokens", "completion_tokens",
 "cached_tokens", "cache_report", "queue_time", "prefill_time", "decode_time", "preempted_time", "retractions",
 "scheduled_tokens", "ttft", "tpot", "e2e_latency", and with log probabilities "input_token_logprobs",
 "output_token_logprobs", "input_top_logprobs", "output_top_logprobs"}}
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from srt.answer import Answer, merge_deltas
from srt.cache_report import report_fields
from srt.messages import Finish, TextDelta, TokenLogprob, unpack_ids

# JSON has no infinity; a token that cannot be is given this.
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True)
class NativeLogprobs:
    """What a reply says of log probabilities: of how many of the most likely tokens, and whether with their text."""

    top: int = 0
    with_text: bool = False


class NativeReply:
    """The reply for one sample of an answer, growing with its deltas."""

    def __init__(self, name: str, answer: Answer, index: int, logprobs: NativeLogprobs | None) -> None:
        """`index`: the sample's place in the answer."""
        self._name = name
        self._index = index
        self._answer = answer
        self._logprobs = logprobs
        self._parts: list[TextDelta] = []

    def take(self, delta: TextDelta) -> dict[str, Any]:
        """The whole reply as it stands with one more delta."""
        self._parts.append(delta)
        so_far = merge_deltas(self._parts)
        self._parts = [so_far]
        times = self._answer.sample_times(self._index)
        meta: dict[str, Any] = {
            "id": self._name,
            "finish_reason": native_finish(so_far.finish, so_far.completion_tokens),
            "prompt_tokens": so_far.prompt_tokens or self._answer.prompt_tokens,
            "completion_tokens": so_far.completion_tokens,
            "cached_tokens": so_far.cached_tokens,
            "cache_report": report_fields(so_far.cache_report),
            "queue_time": times.queue,
            "prefill_time": times.prefill,
            "decode_time": times.decode,
            "preempted_time": times.preempted,
            "retractions": times.retractions,
            "scheduled_tokens": times.scheduled_tokens,
            "ttft": times.ttft,
            "tpot": times.tpot,
            "e2e_latency": self._answer.e2e_seconds,
        }
        if self._logprobs is not None:
            with_text = self._logprobs.with_text
            meta["input_token_logprobs"] = _chosen(so_far.prompt_logprobs, with_text)
            meta["output_token_logprobs"] = _chosen(so_far.logprobs, with_text)
            if self._logprobs.top:
                meta["input_top_logprobs"] = _tops(so_far.prompt_logprobs, with_text)
                meta["output_top_logprobs"] = _tops(so_far.logprobs, with_text)
        return {"text": so_far.text, "output_ids": unpack_ids(so_far.ids), "meta_info": meta}


def native_finish(finish: Finish | None, completion_tokens: int) -> dict[str, Any] | None:
    """Why a sample ended; None while it has not.  `matched` is the stop string or stop token."""
    match finish:
        case None:
            return None
        case Finish(reason="stop"):
            return {"type": "stop", "matched": finish.matched}
        case Finish(reason="length"):
            return {"type": "length", "length": completion_tokens}
        case _:
            return {"type": finish.reason, "message": finish.message or "the request was aborted"}


def _entry(logprob: float, token_id: int, token: bytes, with_text: bool) -> tuple[float, int, str | None]:
    text = token.decode("utf-8", "backslashreplace") if with_text else None
    return max(logprob, LOWEST_LOGPROB), token_id, text


def _chosen(entries: Iterable[TokenLogprob], with_text: bool) -> list[tuple[float | None, int, str | None]]:
    """(logprob, token id, text or None) of each token; the first token of a prompt has no logprob."""
    chosen: list[tuple[float | None, int, str | None]] = []
    for item in entries:
        _, token_id, text = _entry(item.logprob or 0.0, item.id, item.token, with_text)
        chosen.append((None if item.logprob is None else max(item.logprob, LOWEST_LOGPROB), token_id, text))
    return chosen


def _tops(entries: Iterable[TokenLogprob], with_text: bool) -> list[list[tuple[float, int, str | None]] | None]:
    """The same of the most likely tokens at each place, best first; None where nothing is predicted."""
    return [
        None
        if item.logprob is None
        else [
            _entry(logprob, token_id, token, with_text)
            for logprob, token_id, token in zip(item.top_logprobs, item.top_ids, item.top_tokens, strict=True)
        ]
        for item in entries
    ]
