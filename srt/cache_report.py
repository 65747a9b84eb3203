"""A cache report as clients get it: fields, and one sentence that says the same to a person."""

from __future__ import annotations

from typing import Any

from srt.cache_messages import CacheReport, PinReport
from srt.messages import unpack_ids

# Of the words on both sides so many characters are quoted in the sentence; the fields have all of them.
QUOTED_CHARACTERS = 40


def report_fields(report: CacheReport | None) -> dict[str, Any] | None:
    """The JSON object of a report; None for a request that was never admitted, and so never looked at the cache."""
    if report is None:
        return None
    return {
        "cached_tokens": report.cached_tokens,
        "computed_tokens": report.computed_tokens,
        "cached_tokens_by_tier": {
            "device": report.cached_tokens - report.disk_tokens,
            "disk": report.disk_tokens,
        },
        "reason": report.reason,
        "position": report.position,
        "message": report.message or None,
        "message_offset": report.message_offset if report.message else None,
        "before_text": report.before_text,
        "cached_text": report.cached_text,
        "prompt_text": report.prompt_text,
        "cached_next": unpack_ids(report.cached_next),
        "prompt_next": unpack_ids(report.prompt_next),
        "evicted_seconds_ago": report.evicted_seconds_ago,
        "detail": report.detail or None,
        "explanation": explanation(report),
        "pins": [_pin_fields(pin) for pin in report.pins],
    }


_SHORTFALLS = {
    "": "all of it is pinned",
    "page_border": "the other tokens do not fill a page",
    "not_cached": "the other tokens are not in the cache",
    "namespace_share": "the pins of this namespace may not keep more of the pool (--max-pinned-share)",
    "total_share": "all pins together may not keep more of the pool",
    "bypassed": "the cache was not used",
    "unknown_place": "the chat template does not let it be told where this message ends",
}


def _pin_fields(pin: PinReport) -> dict[str, Any]:
    return {
        "asked_tokens": pin.asked,
        "pinned_tokens": pin.pinned,
        "ttl_seconds": pin.ttl,
        "message": None if pin.message is None else f"messages[{pin.message}]",
        "shortfall": pin.shortfall or None,
        "explanation": f"{pin.pinned} of {pin.asked} tokens are pinned: {_SHORTFALLS[pin.shortfall]}.",
    }


def explanation(report: CacheReport) -> str:
    """Where reuse stopped and why, in one or two sentences."""
    total = report.cached_tokens + report.computed_tokens
    return f"{report.cached_tokens} of {total} prompt tokens were reused. {_why(report)}"


def _why(report: CacheReport) -> str:
    where = _place(report)
    match report.reason:
        case "all_cached":
            return "Everything was in the cache; the last token is always computed, since the output begins there."
        case "first_seen":
            return "No cached prompt begins like this one."
        case "diverged":
            return (
                f"At {where}, after {_quoted(report.before_text, last=True)}, the prompt goes on with "
                f"{_quoted(report.prompt_text)} and the cache with {_quoted(report.cached_text)}."
            )
        case "extended":
            return f"What is cached ends at {where}; what follows there, {_quoted(report.prompt_text)}, is new."
        case "evicted":
            ago = "" if report.evicted_seconds_ago is None else f" {report.evicted_seconds_ago:.1f} s before"
            return f"What follows at {where} was cached and had been evicted{ago} to make room: {report.detail}."
        case "other_namespace":
            return f"What follows at {where} is cached under another cache_salt, which is not shared."
        case "bypassed":
            return f"The cache was not used: {report.detail}."
        case "logprobs":
            return f"From {where} on log probabilities of the prompt were asked for, which have to be computed."


def _place(report: CacheReport) -> str:
    if not report.message:
        return f"token {report.position}"
    if report.message == "generation_prompt":
        return f"token {report.position} (behind the last message)"
    return f"token {report.position} (token {report.message_offset} of {report.message})"


def _quoted(text: str, last: bool = False) -> str:
    """The first (or last) characters of a text, on one line and in quotes."""
    if not text:
        return "nothing" if not last else "the beginning"
    part = text[-QUOTED_CHARACTERS:] if last else text[:QUOTED_CHARACTERS]
    cut = "..." if len(part) < len(text) else ""
    return f"{cut}{part!r}" if last else f"{part!r}{cut}"
