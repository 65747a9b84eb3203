"""From the fields that OpenAI's two generating endpoints share to what the runtime is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from srt.answer import Ask, Prompt
from srt.http.errors import bad_request, quoted
from srt.http.generation import FieldName, cache_namespace, faults_named
from srt.http.pins import wishes_of
from srt.http.schema import ChatMessage, OpenAIFields, refuse_unsupported
from srt.http.sessions import session_of
from srt.sampling_rules import NativeSampling, sampling_from_native

MAX_LOGPROBS = 20

# Fields that go by the same name everywhere.
_SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "seed",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "stop_token_ids",
    "ignore_eos",
    "skip_special_tokens",
    "no_stop_trim",
)


def field_name(max_tokens_name: str, param: str | None) -> str | None:
    """OpenAI's name of a field that the runtime calls `param`."""
    names = {"max_new_tokens": max_tokens_name, "min_new_tokens": "min_tokens", "namespace": "cache_salt"}
    return param if param is None else names.get(param, param)


def check_common(fields: OpenAIFields) -> None:
    """Refuse what both endpoints refuse.  Raises ApiError."""
    refuse_unsupported(fields)
    if fields.stream_options is not None:
        if not fields.stream:
            raise bad_request("stream_options", "stream_options goes with stream true, and stream is not true.")
        refuse_unsupported(fields.stream_options, "stream_options.")


def check_response_format(given: Mapping[str, Any] | None) -> None:
    """Refuse every response format but plain text."""
    if given is not None and given != {"type": "text"}:
        found = quoted(dict(given))
        raise bad_request(
            "response_format",
            f'response_format must be {{"type": "text"}}: other formats are not supported (found {found}).',
            "unsupported_field",
        )


def sampling_of(fields: OpenAIFields, max_tokens: int | None, name_of: FieldName) -> NativeSampling:
    """The sampling parameters.  Fields that are null or left out have their defaults.  Raises ApiError."""
    native = {name: getattr(fields, name) for name in _SAME_NAME}
    with faults_named(name_of):
        return sampling_from_native({**native, "max_new_tokens": max_tokens, "min_new_tokens": fields.min_tokens})


def ask_of(
    tenant: str,
    fields: OpenAIFields,
    prompt: Prompt,
    sampling: NativeSampling,
    logprobs: int | None,
    prompt_logprobs_from: int | None = None,
    messages: Sequence[ChatMessage] = (),
) -> Ask:
    """One prompt of a tenant's request as the front takes it; `messages`: where it is a chat's.  Raises ApiError."""
    return Ask(
        prompt=prompt,
        sampling=sampling.params,
        n=sampling.n,
        seed=sampling.seed,
        namespace=cache_namespace(tenant, fields.cache_salt),
        tenant=tenant,
        priority=fields.priority or 0,
        ttft_target=fields.ttft_target,
        tpot_target=fields.tpot_target,
        timeout=fields.timeout,
        session=session_of(fields.session),
        logprobs=logprobs,
        prompt_logprobs_from=prompt_logprobs_from,
        pins=wishes_of(fields.pin, messages),
        no_store=bool(fields.no_store),
    )
