"""Up to which token a prompt is to be pinned."""

from __future__ import annotations

import msgspec

from srt.cache_messages import PinWish
from srt.messages import unpack_ids
from tokenizer_proc.errors import PromptError


def resolve_pin(wish: PinWish, prompt_tokens: int, message_starts: bytes) -> PinWish:
    """The wish with its number of tokens; None where the end of its message cannot be told.

    `message_starts`: as in `Tokenized`.  Raises PromptError for more tokens than the prompt has.
    """
    if wish.message is not None:
        starts = unpack_ids(message_starts)
        end = wish.message + 1
        return msgspec.structs.replace(wish, tokens=starts[end] if end < len(starts) else None)
    if wish.tokens is None:
        return msgspec.structs.replace(wish, tokens=prompt_tokens)
    if wish.tokens > prompt_tokens:
        text = f"pin.tokens must be at most {prompt_tokens}, the tokens of the prompt, not {wish.tokens}"
        raise PromptError(text, param="pin.tokens", code="invalid_value")
    return wish
