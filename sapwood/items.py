"""From the arguments of `Engine.generate` to a list of asks: one for each prompt, each with its own settings."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, SupportsIndex

import msgspec

from srt.answer import Ask, Prompt, RequestFailed
from srt.cache_marks import marked_places
from srt.cache_messages import PinWish
from srt.messages import ChatPrompt, IdsPrompt, TextPrompt, pack_ids
from srt.namespaces import namespace_of
from srt.native_reply import NativeLogprobs
from srt.sampling_rules import check_ask, refuse, sampling_from_native

Settings = Mapping[str, Any] | None


@dataclass(frozen=True)
class Item:
    """One prompt of a call.  `name` says which, in errors: "" when there is only one."""

    name: str
    ask: Ask
    logprobs: NativeLogprobs | None

    def named(self, failure: RequestFailed) -> RequestFailed:
        """The failure, saying which item it is about."""
        if not self.name:
            return failure
        message = f"{self.name}: {failure.message}"
        return RequestFailed(failure.status, message, failure.param, failure.code, failure.retry_after)


class _PinOption(msgspec.Struct, forbid_unknown_fields=True):
    tokens: int | None = None
    ttl_seconds: float = 300.0


@dataclass(frozen=True)
class Options:
    """What a call says once for all of its prompts."""

    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    cache_salt: str | None = None
    priority: int = 0
    ttft_target: float | None = None
    tpot_target: float | None = None
    timeout: float | None = None
    # {"tokens": N (all of the prompt when left out), "ttl_seconds": S (300 when left out)}
    pin: Mapping[str, Any] | None = None
    no_store: bool = False

    def pins(self) -> tuple[PinWish, ...]:
        """What of the prompt is to stay in the cache.  Raises RequestFailed 400."""
        if self.pin is None:
            return ()
        try:
            pin = msgspec.convert(self.pin, _PinOption)
        except msgspec.ValidationError as error:
            raise refuse("pin", f"must have tokens and ttl_seconds, or one of them: {error}") from None
        return (PinWish(pin.ttl_seconds, pin.tokens),)

    def namespace(self) -> str:
        """The cache namespace: another salt, another cache.  The same salt over HTTP is the same one."""
        if self.cache_salt == "":
            raise refuse("cache_salt", "must not be empty; leave it out to share the common cache")
        return namespace_of("", self.cache_salt)


def prompts_of(prompt: str | Sequence[str] | None, input_ids: Sequence[Any] | None) -> tuple[list[Prompt], bool]:
    """The prompts of a call, and whether it was a single one rather than a list.  Raises RequestFailed 400."""
    if (prompt is None) == (input_ids is None):
        raise refuse("prompt", "give either prompt or input_ids")
    if isinstance(prompt, str):
        return [_text(prompt)], True
    if prompt is not None:
        return [_text(text) for text in prompt], False
    assert input_ids is not None
    if all(isinstance(token_id, SupportsIndex) for token_id in input_ids):
        return [_ids(input_ids)], True
    return [_ids(ids) for ids in input_ids], False


def chats_of(messages: Sequence[Any], template_kwargs: Mapping[str, Any]) -> tuple[list[Prompt], bool]:
    """The same for chats: a list of messages, or a list of such lists."""
    single = not messages or isinstance(messages[0], Mapping)
    return [_chat(chat, template_kwargs) for chat in ([messages] if single else messages)], single


def _text(text: Any) -> TextPrompt:
    if not isinstance(text, str):
        raise refuse("prompt", f"must be a text or a list of texts, not {type(text).__name__}")
    if not text:
        raise refuse("prompt", "must not be empty")
    return TextPrompt(text)


def _ids(ids: Any) -> IdsPrompt:
    try:
        packed = pack_ids([operator.index(token_id) for token_id in ids])
    except (TypeError, OverflowError):
        raise refuse("input_ids", "must be a list of token ids, or a list of such lists") from None
    if not packed:
        raise refuse("input_ids", "must not be empty")
    return IdsPrompt(packed)


def _chat(messages: Any, template_kwargs: Mapping[str, Any]) -> ChatPrompt:
    try:
        return ChatPrompt(msgspec.json.encode(list(messages)), msgspec.json.encode(dict(template_kwargs)))
    except (TypeError, ValueError):
        raise refuse("messages", "must be chat messages of nothing but JSON values and Unicode text") from None


def items_of(
    prompts: Sequence[Prompt], single: bool, settings: Settings | Sequence[Settings], options: Options, vocab_size: int
) -> list[Item]:
    """One checked item for each prompt.  Raises RequestFailed that names the item at fault."""
    if settings is None or isinstance(settings, Mapping):
        settings = [settings] * len(prompts)
    if len(settings) != len(prompts):
        raise refuse("sampling_params", f"{len(settings)} of them for {len(prompts)} prompts")
    namespace = options.namespace()
    items = []
    for index, (prompt, given) in enumerate(zip(prompts, settings, strict=True)):
        name = "" if single else f"prompt[{index}]"
        try:
            item = Item(name, _ask(prompt, given, options, namespace), _logprobs(options))
            check_ask(item.ask, vocab_size)
        except RequestFailed as failure:
            raise (Item(name, Ask(prompt), None).named(failure)) from None
        items.append(item)
    return items


def _ask(prompt: Prompt, settings: Settings, options: Options, namespace: str) -> Ask:
    sampling = sampling_from_native(settings)
    wants_prompt = options.return_logprob and options.logprob_start_len >= 0
    return Ask(
        prompt=prompt,
        sampling=sampling.params,
        n=sampling.n,
        seed=sampling.seed,
        namespace=namespace,
        priority=options.priority,
        ttft_target=options.ttft_target,
        tpot_target=options.tpot_target,
        timeout=options.timeout,
        pins=(*_marked(prompt), *options.pins()),
        no_store=options.no_store,
        logprobs=options.top_logprobs_num if options.return_logprob else None,
        prompt_logprobs_from=options.logprob_start_len if wants_prompt else None,
    )


def _marked(prompt: Prompt) -> tuple[PinWish, ...]:
    """What `cache_control` marks of a chat ask for."""
    if not isinstance(prompt, ChatPrompt) or b'"cache_control"' not in prompt.messages_json:
        return ()
    messages = msgspec.json.decode(prompt.messages_json)
    return marked_places([message for message in messages if isinstance(message, dict)])


def _logprobs(options: Options) -> NativeLogprobs | None:
    if not options.return_logprob:
        return None
    return NativeLogprobs(options.top_logprobs_num, options.return_text_in_logprobs)
