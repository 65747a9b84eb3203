"""What the tokenizer process does with each message, without sockets: text in, messages to send out."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from srt.config import ModelFacts
from srt.messages import (
    ChatPrompt,
    Generate,
    IdsPrompt,
    Rejected,
    Remember,
    Submit,
    TextPrompt,
    TokenizeCall,
    Tokenized,
    pack_ids,
    unpack_ids,
)
from tokenizer_proc.chat import read_messages, read_template_variables
from tokenizer_proc.encode import Encoder, check_ids, check_length
from tokenizer_proc.errors import PromptError
from tokenizer_proc.exact import ExactHistory, scope_of
from tokenizer_proc.pins import resolve_pin
from tokenizer_proc.places import message_starts
from tokenizer_proc.template import ChatTemplate

log = logging.getLogger("sapwood.tokenizer")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to send: `generate` to the scheduler, in order, and then `answer` to the front."""

    answer: Tokenized | Rejected
    generate: tuple[Generate, ...] = ()


@dataclass(frozen=True, slots=True)
class _Read:
    """A prompt's ids, the name of the field it came from, and what `Tokenized` says of it besides."""

    ids: list[int]
    param: str
    starts: bytes = b""
    mark: bytes = b""


class TokenizerCore:
    """Turns prompts into token ids, or into a refusal that says what is wrong.

    `exact` puts in the ids that were generated where a prompt has earlier replies; None: that is switched off.
    """

    def __init__(
        self,
        encoder: Encoder,
        template: ChatTemplate,
        model: ModelFacts,
        max_prompt_tokens: int,
        exact: ExactHistory | None = None,
    ) -> None:
        self._exact = exact
        self._encoder = encoder
        self._template = template
        self._model = model
        self._max_prompt_tokens = max_prompt_tokens

    def handle(self, message: Submit | TokenizeCall) -> Outcome:
        """The outcome of one message.  Never raises: a fault of our own is logged and answered with status 500."""
        rids = message.rids if isinstance(message, Submit) else (message.rid,)
        try:
            return self._submit(message) if isinstance(message, Submit) else self._tokenize(message)
        except PromptError as error:
            return Outcome(Rejected(rids, 400, error.message, error.param, error.code))
        except (KeyboardInterrupt, SystemExit):
            raise
        # The tokenizers library turns a panic of its own into an exception that is not an Exception.
        except BaseException:
            log.exception("tokenizing a prompt failed")
            return Outcome(Rejected(rids, 500, "the prompt could not be tokenized", code="internal_error"))

    def remember(self, message: Remember) -> None:
        """Take in what was said after a prompt.  Never raises."""
        try:
            if self._exact is not None:
                self._exact.remember(message)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException:
            log.exception("a reply could not be remembered")

    def _submit(self, submit: Submit) -> Outcome:
        scope = scope_of(submit.tenant, submit.namespace) if submit.use_cache else None
        read = self._read(submit.prompt, scope, keep=not submit.no_store)
        check_length(len(read.ids), False, self._max_prompt_tokens, self._model.context_length, read.param)
        packed = pack_ids(read.ids)
        pins = tuple(resolve_pin(wish, len(read.ids), read.starts) for wish in submit.pins)
        generate = tuple(
            Generate(
                rid=rid,
                group=submit.rids[0],
                prompt_ids=packed,
                sampling=submit.sampling,
                seed=seed,
                namespace=submit.namespace,
                tenant=submit.tenant,
                priority=submit.priority,
                logprobs=submit.logprobs,
                prompt_logprobs_from=submit.prompt_logprobs_from,
                use_cache=submit.use_cache,
                session=submit.session,
                ttft_target=submit.ttft_target,
                timeout=submit.timeout,
                message_starts=read.starts,
                pins=pins,
                no_store=submit.no_store,
            )
            for rid, seed in zip(submit.rids, submit.seeds, strict=True)
        )
        # Of a request that is to leave nothing behind the reply is not remembered either.
        mark = b"" if submit.no_store else read.mark
        answer = Tokenized(submit.rids, len(read.ids), message_starts=read.starts, mark=mark)
        return Outcome(answer, generate)

    def _tokenize(self, call: TokenizeCall) -> Outcome:
        """Only a count or the ids are wanted: texts longer than a prompt may be are fine, as far as they are cheap."""
        read = self._read(call.prompt, None)
        return Outcome(Tokenized((call.rid,), len(read.ids), pack_ids(read.ids), read.starts))

    def _read(self, prompt: TextPrompt | IdsPrompt | ChatPrompt, scope: str | None, keep: bool = False) -> _Read:
        """A prompt as tokens; with a `scope`, what is remembered in it is put in.  `keep`: it may be remembered."""
        starts, mark = b"", b""
        if isinstance(prompt, IdsPrompt):
            param = "prompt"
            # Length first: looking at every id of an endless list is what the limit is there to save.
            check_length(len(prompt.ids) // 4, False, self._max_prompt_tokens, self._model.context_length, param)
            ids = unpack_ids(prompt.ids)
        elif isinstance(prompt, TextPrompt):
            param = "prompt"
            self._check_characters(prompt.text, param)
            if self._exact is None or scope is None:
                ids = self._encoder.encode_text(prompt.text)
            else:
                ids, mark = self._exact.encode(scope, prompt.text, self._encoder.encode_text, keep)
        else:
            param = "messages"
            messages = read_messages(prompt.messages_json)
            variables = read_template_variables(prompt.template_kwargs_json)
            text = self._template.render(messages, prompt.add_generation_prompt, variables)
            self._check_characters(text, param)
            if self._exact is None or scope is None:
                ids = self._encoder.encode_chat(text)
            else:
                ids, mark = self._exact.encode(scope, text, self._encoder.encode_chat, keep)
            starts = self._message_starts(messages, text, ids, variables)
        if not ids:
            raise PromptError("the prompt is empty: it has no tokens", param=param, code="empty_prompt")
        check_ids(ids, self._model.vocab_size, param)
        return _Read(ids, param, starts, mark)

    def _message_starts(
        self, messages: list[dict[str, Any]], text: str, ids: list[int], variables: Mapping[str, Any]
    ) -> bytes:
        """The token at which each message begins, packed; nothing where that cannot be told."""
        try:
            places = message_starts(messages, text, lambda marked: self._template.render(marked, False, variables))
        except PromptError:
            # A template that takes messages only as they are.
            return b""
        tokens = None if places is None else self._encoder.tokens_at(text, ids, places)
        return b"" if tokens is None else pack_ids(tokens)

    def _check_characters(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit, however it is tokenized, before it costs anything."""
        least = self._encoder.min_tokens(text)
        check_length(least, True, self._max_prompt_tokens, self._model.context_length, param)
