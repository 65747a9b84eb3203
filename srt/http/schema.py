"""The bodies that the endpoints take, as strict structs: what is not declared here is refused by name.

Types are checked by msgspec (an integer is never taken for a string, nor true for 1); ranges by
srt/sampling_rules.py; what a field means together with others, by the module of the endpoint.

OpenAI has fields that change nothing here and are taken (`user`, `metadata`, ...), and fields that would change the
meaning of a reply and are not supported: those are declared as `Unsupported` and refused unless their value is
"nothing" (null, false, an empty list or object).
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from srt.http.body import parse_raw
from srt.http.errors import bad_request, quoted

# Integers that fit a signed 64-bit field; without the bound JSON integers have any length.
Integer = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Unsupported = msgspec.Raw
NOTHING = msgspec.Raw(b"null")


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """How a stream is to be sent."""

    include_usage: bool | None = None
    # Padding against the guessing of token lengths from packet sizes: none is sent here.
    include_obfuscation: Unsupported = NOTHING


class PinField(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The prompt, or its first tokens, are to stay in the cache until not used for so many seconds."""

    tokens: Integer | None = None
    ttl_seconds: float | None = None


class SessionField(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The session that a request is part of, and how it goes on after the reply."""

    id: str
    state: str | None = None


class OpenAIFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """What chat completions and completions have in common: sampling, streaming, and what is taken and ignored."""

    model: str | None = None
    max_tokens: Integer | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: Integer | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    seed: Integer | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    # Not in OpenAI's list; the names are SGLang's.
    top_k: Integer | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Integer | None = None
    stop_token_ids: list[Integer] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    cache_salt: str | None = None
    priority: Integer | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None
    timeout: float | None = None
    session: str | SessionField | None = None
    # Whether the reply says what was found in the prefix cache, and why not more.
    cache_report: bool | None = None
    # What of the prompt is to stay in the cache; whether the request leaves nothing there.
    pin: PinField | None = None
    no_store: bool | None = None
    # These change nothing here.
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class ChatMessage(msgspec.Struct, forbid_unknown_fields=True, frozen=True, omit_defaults=True):
    """One message of a conversation.  Content given in parts is a list of objects."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    # The prompt up to the end of this message is to stay in the cache.
    cache_control: dict[str, Any] | None = None
    # A reply of this server can be sent back as it came.
    refusal: Unsupported = NOTHING
    annotations: Unsupported = NOTHING
    audio: Unsupported = NOTHING
    function_call: Unsupported = NOTHING
    tool_calls: Unsupported = NOTHING
    tool_call_id: Unsupported = NOTHING


class ChatRequest(OpenAIFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage]
    max_completion_tokens: Integer | None = None
    logprobs: bool | None = None
    top_logprobs: Integer | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    response_format: dict[str, Any] | None = None
    modalities: list[str] | None = None
    tool_choice: str | dict[str, Any] | None = None
    function_call: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    tools: Unsupported = NOTHING
    functions: Unsupported = NOTHING
    audio: Unsupported = NOTHING
    prediction: Unsupported = NOTHING
    reasoning_effort: Unsupported = NOTHING
    verbosity: Unsupported = NOTHING
    web_search_options: Unsupported = NOTHING


class CompletionRequest(OpenAIFields, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Integer | bool | None = None
    best_of: Integer | None = None
    suffix: str | None = None
    response_format: dict[str, Any] | None = None


class GenerateRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /generate, in SGLang's names."""

    text: str | list[str] | None = None
    input_ids: list[Any] | None = None
    sampling_params: dict[str, Any] | list[dict[str, Any]] | None = None
    rid: str | list[str] | None = None
    stream: bool | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: Integer | list[Integer] | None = None
    top_logprobs_num: Integer | list[Integer] | None = None
    return_text_in_logprobs: bool | None = None
    cache_salt: str | None = None
    priority: Integer | None = None
    ttft_target: float | None = None
    tpot_target: float | None = None
    timeout: float | None = None
    pin: PinField | None = None
    no_store: bool | None = None
    session: str | SessionField | None = None
    # Changes nothing here.
    log_metrics: bool | None = None
    image_data: Unsupported = NOTHING
    video_data: Unsupported = NOTHING
    audio_data: Unsupported = NOTHING
    modalities: Unsupported = NOTHING
    input_embeds: Unsupported = NOTHING
    lora_path: Unsupported = NOTHING
    session_params: Unsupported = NOTHING
    custom_logit_processor: Unsupported = NOTHING
    token_ids_logprob: Unsupported = NOTHING
    return_hidden_states: Unsupported = NOTHING
    stream_options: Unsupported = NOTHING


class PrefixFields(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """The beginning of prompts, in one of three forms, and the cache that it is in."""

    text: str | None = None
    input_ids: list[Any] | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None


class UnpinRequest(PrefixFields, frozen=True, kw_only=True):
    """POST /cache/unpin."""

    id: Integer | None = None


class FlushRequest(PrefixFields, frozen=True, kw_only=True):
    """POST /cache/flush."""

    session: str | None = None


class PrewarmRequest(PrefixFields, frozen=True, kw_only=True):
    """POST /cache/prewarm."""

    pin: PinField | None = None
    priority: Integer | None = None


class PrewarmLine(PrewarmRequest, frozen=True, kw_only=True):
    """A line of the file of --prewarm, which may say whose prefix it is."""

    tenant: str = ""


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /tokenize: a text, or messages to go through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class SessionStateRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /cache/sessions/{id}."""

    state: str


class AbortRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """POST /abort_request."""

    rid: str


def refuse_unsupported(fields: msgspec.Struct, where: str = "") -> None:
    """Raise an ApiError for the first unsupported field that says something.  `where` goes before its name."""
    for name in fields.__struct_fields__:
        raw = getattr(fields, name)
        if type(raw) is msgspec.Raw and raw is not NOTHING:
            value = parse_raw(raw)
            if value not in (None, False, [], {}, ""):
                raise bad_request(
                    f"{where}{name}",
                    f"{where}{name} is not supported by this server; leave it out (found {quoted(value)}).",
                    "unsupported_field",
                )
