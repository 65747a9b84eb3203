"""POST /v1/chat/completions.

Messages are handed on as they came, but for what would be lost without a word: the tokenizer process knows the
template and what it can say.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srt.http.auth import tenant_of
from srt.http.connection import DONE, EventOfText, event, json_reply
from srt.http.errors import bad_request, quoted
from srt.http.generation import Batch, Prompted, streamed, whole
from srt.http.openai_fields import MAX_LOGPROBS, ask_of, check_common, check_response_format, field_name, sampling_of
from srt.http.openai_shapes import Header, chat_logprobs, finish_fields, report_of, usage_of
from srt.http.schema import ChatMessage, ChatRequest, refuse_unsupported
from srt.http.service import Service
from srt.messages import ChatPrompt, TextDelta

# A role of newer clients -> what templates know it as.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

_decoder = msgspec.json.Decoder(ChatRequest)


async def chat_completions(service: Service, request: Request) -> Response:
    """Answer one conversation, whole or as a stream.  Raises ApiError."""
    fields = await service.read(request, _decoder)
    service.check_model(fields.model)
    _check(fields)
    max_tokens_name, max_tokens = _max_tokens(fields)
    name_of = partial(field_name, max_tokens_name)
    sampling = sampling_of(fields, max_tokens, name_of)
    logprobs = (fields.top_logprobs or 0) if fields.logprobs else None
    kind = "chat.completion.chunk" if fields.stream else "chat.completion"
    header = Header.new("chatcmpl", kind, service.model_name, service.fingerprint())
    prompt = chat_prompt(fields.messages, fields.chat_template_kwargs)
    ask = ask_of(tenant_of(request), fields, prompt, sampling, logprobs, messages=fields.messages)
    # What was pinned is told without being asked for.
    cache_report = bool(fields.cache_report or ask.pins)
    batch = Batch(service.front, service.live, [Prompted(ask, "messages", header.id)], name_of)
    if fields.stream:
        include_usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
        chunks = _Chunks(header, logprobs is not None, include_usage, cache_report)
        return await streamed(request, batch, chunks.events(batch), chunks.preamble(sampling.n))
    samples = (await whole(request, batch))[0]
    return json_reply(
        {
            **header.fields(),
            "choices": [_choice(index, sample, logprobs is not None) for index, sample in enumerate(samples)],
            "usage": usage_of(batch),
            **report_of(batch, cache_report),
        }
    )


def chat_prompt(messages: Sequence[ChatMessage], template_kwargs: dict[str, Any] | None) -> ChatPrompt:
    """The prompt of a conversation.  Raises ApiError for messages that cannot be said in full."""
    if not messages:
        raise bad_request("messages", "messages must have at least one message, and it is [].")
    plain = [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]
    return ChatPrompt(_json(plain, "messages"), _json(template_kwargs or {}, "chat_template_kwargs"))


def _json(value: Any, name: str) -> bytes:
    try:
        return msgspec.json.encode(value)
    except RecursionError:
        # How deep is too deep depends on how deep the caller is: what could be read need not be writable.
        raise bad_request(name, f"{name} is nested too deeply.") from None


def _plain(message: ChatMessage, where: str) -> dict[str, Any]:
    role = ROLES.get(message.role)
    if role is None:
        raise bad_request(
            f"{where}.role", f"{where}.role must be one of {', '.join(ROLES)}, not {quoted(message.role)}."
        )
    refuse_unsupported(message, f"{where}.")
    if message.content is None or message.content == []:
        raise bad_request(
            f"{where}.content",
            f"{where}.content must be a string or a list of at least one part, not {quoted(message.content)}.",
        )
    plain: dict[str, Any] = {"role": role, "content": message.content}
    if message.name is not None:
        plain["name"] = message.name
    if message.reasoning_content is not None:
        plain["reasoning_content"] = message.reasoning_content
    return plain


def _check(fields: ChatRequest) -> None:
    check_common(fields)
    check_response_format(fields.response_format)
    if fields.modalities is not None and fields.modalities != ["text"]:
        raise bad_request("modalities", f'modalities must be ["text"], not {quoted(fields.modalities)}.')
    # "auto" and "none" say nothing where there are no tools.
    for name in ("tool_choice", "function_call"):
        value = getattr(fields, name)
        if value not in (None, "none", "auto"):
            raise bad_request(name, f"{name} is not supported by this server; leave it out (found {quoted(value)}).")
    if fields.top_logprobs is not None:
        if not 0 <= fields.top_logprobs <= MAX_LOGPROBS:
            raise bad_request(
                "top_logprobs", f"top_logprobs must be between 0 and {MAX_LOGPROBS}, not {fields.top_logprobs}."
            )
        if not fields.logprobs:
            raise bad_request("top_logprobs", "top_logprobs goes with logprobs true, and logprobs is not true.")


def _max_tokens(fields: ChatRequest) -> tuple[str, int | None]:
    """The limit on new tokens and the name it was given by; `max_tokens` is the older name."""
    old, new = fields.max_tokens, fields.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise bad_request(
            "max_completion_tokens",
            f"max_completion_tokens is {new} and max_tokens is {old}; they mean the same, so give one.",
        )
    name, value = ("max_tokens", old) if new is None else ("max_completion_tokens", new)
    if value == 0:
        raise bad_request(name, f"{name} must be at least 1, not 0.")
    return name, value


def _choice(index: int, sample: TextDelta, with_logprobs: bool) -> dict[str, Any]:
    return {
        "index": index,
        "message": {"role": "assistant", "content": sample.text, "refusal": None},
        "logprobs": chat_logprobs(sample.logprobs) if with_logprobs else None,
        **finish_fields(sample.finish),
    }


class _Chunks:
    """The chunks of one stream."""

    def __init__(self, header: Header, with_logprobs: bool, include_usage: bool, cache_report: bool) -> None:
        self._header = header.fields()
        self._with_logprobs = with_logprobs
        # Where usage was asked for, every chunk has the field: null in all but the last.
        self._no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
        self._include_usage = include_usage
        self._cache_report = cache_report
        # By the index of the choice.
        self._text_events: dict[int, EventOfText] = {}

    def preamble(self, n: int) -> bytes:
        """The chunks that open each choice with its role."""
        role = {"role": "assistant", "content": "", "refusal": None}
        return b"".join(event(self._content(index, role)) for index in range(n))

    async def events(self, batch: Batch) -> AsyncGenerator[bytes, None]:
        """Everything after the preamble, to the [DONE]."""
        running = sum(len(answer.rids) for answer in batch.answers)
        async for _, index, delta in batch.read():
            if delta.text and delta.finish is None and not self._with_logprobs:
                yield self._text(index, delta.text)
                continue
            data = b""
            if delta.text or (self._with_logprobs and delta.logprobs):
                logprobs = chat_logprobs(delta.logprobs) if self._with_logprobs else None
                data = event(self._content(index, {"content": delta.text}, logprobs))
            if delta.finish is not None:
                running -= 1
                # The report goes with the usage, or, where none was asked for, with the last choice that ends.
                report = report_of(batch, self._cache_report and not running and not self._include_usage)
                data += event(self._content(index, {}, None, finish_fields(delta.finish), report))
            if data:
                yield data
        data = b""
        if self._include_usage:
            report = report_of(batch, self._cache_report)
            data = event({**self._header, "choices": [], "usage": usage_of(batch), **report})
        yield data + DONE

    def _text(self, index: int, text: str) -> bytes:
        """The chunk of a choice that has text and nothing else to say."""
        of_text = self._text_events.get(index)
        if of_text is None:
            of_text = EventOfText(lambda mark: self._content(index, {"content": mark}))
            self._text_events[index] = of_text
        return of_text(text)

    def _content(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish: dict[str, Any] | None = None,
        more: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, **(finish or finish_fields(None))}
        return {**self._header, "choices": [choice], **self._no_usage, **(more or {})}
