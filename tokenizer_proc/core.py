"""What the tokenizer process does with each message, without sockets: text in, messages to send out."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from srt.config import ModelFacts
from srt.messages import (
    ChatPrompt,
    Generate,
    IdsPrompt,
    Rejected,
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
from tokenizer_proc.template import ChatTemplate

log = logging.getLogger("sapwood.tokenizer")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What to send: `generate` to the scheduler, in order, and then `answer` to the front."""

    answer: Tokenized | Rejected
    generate: tuple[Generate, ...] = ()


class TokenizerCore:
    """Turns prompts into token ids, or into a refusal that says what is wrong."""

    def __init__(self, encoder: Encoder, template: ChatTemplate, model: ModelFacts, max_prompt_tokens: int) -> None:
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

    def _submit(self, submit: Submit) -> Outcome:
        ids, param = self._prompt_ids(submit.prompt)
        check_length(len(ids), False, self._max_prompt_tokens, self._model.context_length, param)
        packed = pack_ids(ids)
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
            )
            for rid, seed in zip(submit.rids, submit.seeds, strict=True)
        )
        return Outcome(Tokenized(submit.rids, len(ids)), generate)

    def _tokenize(self, call: TokenizeCall) -> Outcome:
        """Only a count or the ids are wanted: texts longer than a prompt may be are fine, as far as they are cheap."""
        ids, _ = self._prompt_ids(call.prompt)
        return Outcome(Tokenized((call.rid,), len(ids), pack_ids(ids)))

    def _prompt_ids(self, prompt: TextPrompt | IdsPrompt | ChatPrompt) -> tuple[list[int], str]:
        """The prompt's ids and the name of the field it came from."""
        if isinstance(prompt, IdsPrompt):
            param = "prompt"
            # Length first: looking at every id of an endless list is what the limit is there to save.
            check_length(len(prompt.ids) // 4, False, self._max_prompt_tokens, self._model.context_length, param)
            ids = unpack_ids(prompt.ids)
        elif isinstance(prompt, TextPrompt):
            param = "prompt"
            self._check_characters(prompt.text, param)
            ids = self._encoder.encode_text(prompt.text)
        else:
            param = "messages"
            text = self._render(prompt)
            self._check_characters(text, param)
            ids = self._encoder.encode_chat(text)
        if not ids:
            raise PromptError("the prompt is empty: it has no tokens", param=param, code="empty_prompt")
        check_ids(ids, self._model.vocab_size, param)
        return ids, param

    def _render(self, prompt: ChatPrompt) -> str:
        messages = read_messages(prompt.messages_json)
        variables = read_template_variables(prompt.template_kwargs_json)
        return self._template.render(messages, prompt.add_generation_prompt, variables)

    def _check_characters(self, text: str, param: str) -> None:
        """Refuse a text that cannot fit, however it is tokenized, before it costs anything."""
        least = self._encoder.min_tokens(text)
        check_length(least, True, self._max_prompt_tokens, self._model.context_length, param)
