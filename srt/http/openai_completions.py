"""POST /v1/completions: the older endpoint, for plain text and token ids, one prompt or many."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from srt.answer import Prompt
from srt.http.auth import tenant_of
from srt.http.connection import DONE, EventOfText, event, json_reply
from srt.http.errors import bad_request, quoted
from srt.http.generation import Batch, Prompted, streamed, whole
from srt.http.openai_fields import MAX_LOGPROBS, ask_of, check_common, check_response_format, field_name, sampling_of
from srt.http.openai_shapes import Header, LegacyLogprobs, finish_fields, report_of, usage_of
from srt.http.prompts import read_prompts
from srt.http.schema import CompletionRequest
from srt.http.service import Service
from srt.messages import TextDelta, TextPrompt

# OpenAI's default for this endpoint.
DEFAULT_MAX_TOKENS = 16

_decoder = msgspec.json.Decoder(CompletionRequest)


async def completions(service: Service, request: Request) -> Response:
    """Continue each prompt, whole or as a stream.  Raises ApiError."""
    fields = await service.read(request, _decoder)
    service.check_model(fields.model)
    logprobs = _check(fields)
    name_of = partial(field_name, "max_tokens")
    max_tokens = DEFAULT_MAX_TOKENS if fields.max_tokens is None else fields.max_tokens
    sampling = sampling_of(fields, max_tokens, name_of)
    header = Header.new("cmpl", "text_completion", service.model_name, service.fingerprint())
    prompts = read_prompts(fields.prompt, "prompt", service.front.facts.vocab_size)
    prompted = []
    for place, prompt in prompts:
        # Only the model's side knows the text of ids, and it tells it along with their logprobs.
        spell_out = fields.echo and (logprobs is not None or not isinstance(prompt, TextPrompt))
        told = logprobs if not spell_out else logprobs or 0
        ask = ask_of(tenant_of(request), fields, prompt, sampling, told, 0 if spell_out else None)
        prompted.append(Prompted(ask, place, header.id))
    choices = [
        _Choice(prompt, bool(fields.echo), logprobs is not None) for _, prompt in prompts for _ in range(sampling.n)
    ]
    batch = Batch(service.front, service.live, prompted, name_of)
    # What was pinned is told without being asked for.
    cache_report = bool(fields.cache_report or fields.pin is not None)
    if fields.stream:
        include_usage = fields.stream_options is not None and bool(fields.stream_options.include_usage)
        events = _events(header, batch, choices, sampling.n, include_usage, cache_report)
        return await streamed(request, batch, events)
    samples = [sample for samples in await whole(request, batch) for sample in samples]
    return json_reply(
        {
            **header.fields(),
            "choices": [
                {**choice.take(sample), "index": index}
                for index, (choice, sample) in enumerate(zip(choices, samples, strict=True))
            ],
            "usage": usage_of(batch),
            **report_of(batch, cache_report),
        }
    )


def _check(fields: CompletionRequest) -> int | None:
    """Refuse what is not supported; the number of logprobs asked for.  Raises ApiError."""
    check_common(fields)
    check_response_format(fields.response_format)
    if fields.suffix:
        raise bad_request("suffix", f"suffix is not supported; leave it out (found {quoted(fields.suffix)}).")
    n = 1 if fields.n is None else fields.n
    if fields.best_of is not None and fields.best_of != n:
        raise bad_request("best_of", f"best_of must be equal to n, which is {n}, not {fields.best_of}.")
    # true and false are what some evaluation programs send.
    if fields.logprobs is None or fields.logprobs is False:
        return None
    logprobs = int(fields.logprobs)
    if not 0 <= logprobs <= MAX_LOGPROBS:
        raise bad_request("logprobs", f"logprobs must be between 0 and {MAX_LOGPROBS}, not {logprobs}.")
    return logprobs


class _Choice:
    """One choice of the reply, made of the deltas of one sample."""

    def __init__(self, prompt: Prompt, echo: bool, with_logprobs: bool) -> None:
        self._prompt = prompt
        self._echo_due = echo
        self._logprobs = LegacyLogprobs() if with_logprobs else None

    def has_only_text(self, delta: TextDelta) -> bool:
        """Whether there is nothing but text to say of a delta, and some of it."""
        return bool(delta.text) and delta.finish is None and self._logprobs is None and not self._echo_due

    def take(self, delta: TextDelta) -> dict[str, Any]:
        """The choice object for a delta; the first one brings the echo of the prompt along."""
        text, entries = delta.text, delta.logprobs
        if self._echo_due:
            self._echo_due = False
            text, entries = self._echo(delta) + text, delta.prompt_logprobs + entries
        logprobs = None if self._logprobs is None else self._logprobs.take(entries)
        return {"text": text, "index": 0, "logprobs": logprobs, **finish_fields(delta.finish)}

    def _echo(self, delta: TextDelta) -> str:
        spelled = b"".join(entry.token for entry in delta.prompt_logprobs).decode("utf-8", "replace")
        if not isinstance(self._prompt, TextPrompt):
            return spelled
        if self._logprobs is not None:
            # Tokens spell out what the text has not: a BOS token, a leading space.
            self._logprobs.skip(len(self._prompt.text) - len(spelled))
        return self._prompt.text


async def _events(
    header: Header, batch: Batch, choices: list[_Choice], n: int, include_usage: bool, cache_report: bool
) -> AsyncGenerator[bytes, None]:
    fields = header.fields()
    no_usage: dict[str, Any] = {"usage": None} if include_usage else {}
    running = len(choices)
    text_events: dict[int, EventOfText] = {}

    def of_text(index: int) -> EventOfText:
        def content(text: str) -> dict[str, Any]:
            choice = choices[index].take(TextDelta("", text))
            return {**fields, "choices": [{**choice, "index": index}], **no_usage}

        return EventOfText(content)

    async for prompt, sample, delta in batch.read():
        index = prompt * n + sample
        if choices[index].has_only_text(delta):
            if index not in text_events:
                text_events[index] = of_text(index)
            yield text_events[index](delta.text)
            continue
        choice = choices[index].take(delta)
        if choice["text"] or choice["finish_reason"] or (choice["logprobs"] or {}).get("tokens"):
            running -= choice["finish_reason"] is not None
            # The report goes with the usage, or, where none was asked for, with the last choice that ends.
            report = report_of(batch, cache_report and not running and not include_usage)
            yield event({**fields, "choices": [{**choice, "index": index}], **no_usage, **report})
    data = b""
    if include_usage:
        report = report_of(batch, cache_report)
        data = event({**fields, "choices": [], "usage": usage_of(batch), **report})
    yield data + DONE
