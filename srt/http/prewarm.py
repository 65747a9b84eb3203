"""Prewarming: a prefix is computed as a prompt of which nothing is wanted but that it is cached."""

from __future__ import annotations

from typing import Any

import msgspec

from srt.answer import Answer, Ask, Prompt
from srt.cache_report import report_fields
from srt.http.errors import bad_request, quoted
from srt.http.generation import cache_namespace
from srt.http.openai_chat import chat_prompt
from srt.http.pins import wishes_of
from srt.http.prompts import read_prompts
from srt.http.schema import PrefixFields, PrewarmRequest
from srt.messages import SamplingParams


def prewarm_ask(fields: PrewarmRequest, tenant: str, vocab_size: int) -> tuple[Ask, str]:
    """What the runtime is asked, and the name of the field that has the prefix.  Raises ApiError."""
    prompt, place = prefix_prompt(fields, vocab_size)
    ask = Ask(
        prompt=prompt,
        sampling=SamplingParams(max_new_tokens=0),
        namespace=cache_namespace(tenant, fields.cache_salt),
        tenant=tenant,
        priority=fields.priority or 0,
        pins=wishes_of(fields.pin, fields.messages or ()),
    )
    return ask, place


def prewarmed(answer: Answer) -> dict[str, Any]:
    """What came of it, when the answer has ended."""
    report = report_fields(answer.cache_report)
    return {
        "prompt_tokens": answer.prompt_tokens,
        "cached_tokens": answer.cached_tokens,
        "computed_tokens": answer.prompt_tokens - answer.cached_tokens,
        "pins": [] if report is None else report["pins"],
        "cache_report": report,
    }


def prefix_place(fields: PrefixFields) -> str | None:
    """The name of the field that has the prefix; None where there is none.  Raises ApiError when there are several."""
    given = [name for name in ("text", "input_ids", "messages") if getattr(fields, name) is not None]
    if len(given) > 1:
        raise bad_request(given[1], f"{given[0]} and {given[1]} are both given; give one of text, input_ids, messages.")
    if fields.chat_template_kwargs is not None and given != ["messages"]:
        raise bad_request("chat_template_kwargs", "chat_template_kwargs goes with messages, and there are none.")
    return given[0] if given else None


def prefix_prompt(fields: PrefixFields, vocab_size: int) -> tuple[Prompt, str]:
    """The prefix and the name of its field.  A chat goes on with another message: it has no generation prompt.

    Raises ApiError.
    """
    place = prefix_place(fields)
    if place is None:
        raise bad_request("text", "One of text, input_ids and messages must be given.")
    if fields.messages is not None:
        prompt = chat_prompt(fields.messages, fields.chat_template_kwargs)
        return msgspec.structs.replace(prompt, add_generation_prompt=False), place
    given: str | list[Any] = fields.input_ids or [] if fields.text is None else fields.text
    if not isinstance(given, str) and given and not isinstance(given[0], int):
        raise bad_request("input_ids", f"input_ids must be one list of token ids, not {quoted(given)}.")
    ((_, one),) = read_prompts(given, place, vocab_size)
    return one, place
