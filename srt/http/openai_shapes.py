"""The pieces that OpenAI's replies are made of: ids, usage, log probabilities."""

from __future__ import annotations

import codecs
import secrets
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from srt.http.generation import Batch
from srt.messages import Finish, TokenLogprob

# What stands for log probabilities below any that JSON or a reader can make sense of (zero probability is -inf).
LOWEST_LOGPROB = -9999.0


@dataclass(frozen=True)
class Header:
    """What every reply and every chunk of one request has in common."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str

    @classmethod
    def new(cls, prefix: str, kind: str, model: str, fingerprint: str) -> Header:
        """A header with a new id, created now."""
        return cls(f"{prefix}-{secrets.token_hex(12)}", kind, int(time.time()), model, fingerprint)

    def fields(self) -> dict[str, Any]:
        """The fields in the order in which OpenAI sends them."""
        return {
            "id": self.id,
            "object": self.object,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


def usage(prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """The usage object; `cached_tokens` is there even when it is 0, so that clients can tell "none" from "unknown"."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


def usage_of(batch: Batch) -> dict[str, Any]:
    """The usage object of a whole request."""
    return usage(batch.prompt_tokens, batch.cached_tokens, batch.completion_tokens)


def report_of(batch: Batch, wanted: bool | None) -> dict[str, Any]:
    """The field with the cache report, where it was asked for."""
    return {"cache_report": batch.cache_report()} if wanted else {}


def finish_fields(finish: Finish | None) -> dict[str, Any]:
    """`finish_reason` of a choice, and `matched_stop`: the stop string or token id that ended it (SGLang's field)."""
    if finish is None:
        return {"finish_reason": None}
    return {"finish_reason": finish.reason, "matched_stop": finish.matched}


def token_text(token: bytes) -> str:
    r"""A token's bytes as text; bytes that are no whole character are written `\xf0`, as OpenAI does."""
    return token.decode("utf-8", "backslashreplace")


def finite(logprob: float) -> float:
    """A log probability that JSON can say."""
    return logprob if logprob >= LOWEST_LOGPROB else LOWEST_LOGPROB


def chat_logprobs(entries: Iterable[TokenLogprob]) -> dict[str, Any]:
    """The `logprobs` object of a chat choice: one entry for each token, with the most likely ones beside it."""
    return {
        "content": [
            {
                **_chat_entry(entry.token, entry.logprob or 0.0),
                "top_logprobs": [
                    _chat_entry(token, logprob)
                    for token, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True)
                ],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _chat_entry(token: bytes, logprob: float) -> dict[str, Any]:
    return {"token": token_text(token), "logprob": finite(logprob), "bytes": list(token)}


class LegacyLogprobs:
    """The `logprobs` object of the completions endpoint, for one choice, a delta at a time.

    `text_offset` of a token is the number of characters of the choice's text before it: its first character, or, for
    a token that goes on with a character, the place of that character.  `top_logprobs` has the chosen token too, also
    when it is not among the most likely.  Tokens that are no whole characters are written `bytes:\\xf0\\x9f`, so that
    different tokens keep different names.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def skip(self, characters: int) -> None:
        """Move all later offsets: the text holds this many characters more (or fewer) than its tokens do."""
        self._offset += characters

    def take(self, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The object for the next tokens of the choice."""
        return {
            "tokens": [legacy_token(entry.token) for entry in entries],
            "token_logprobs": [None if entry.logprob is None else finite(entry.logprob) for entry in entries],
            "top_logprobs": [self._top(entry) for entry in entries],
            "text_offset": [self._advance(entry.token) for entry in entries],
        }

    def _advance(self, token: bytes) -> int:
        here = self._offset
        self._offset += len(self._decoder.decode(token))
        return max(0, here)

    def _top(self, entry: TokenLogprob) -> dict[str, float] | None:
        if entry.logprob is None:
            return None
        top = {
            legacy_token(token): finite(logprob)
            for token, logprob in zip(entry.top_tokens, entry.top_logprobs, strict=True)
        }
        top.setdefault(legacy_token(entry.token), finite(entry.logprob))
        return top


def legacy_token(token: bytes) -> str:
    """The name of a token in the completions endpoint."""
    try:
        return token.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token)
