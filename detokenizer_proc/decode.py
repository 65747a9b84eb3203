"""Token ids to text, one token at a time: what has been given out, joined, is the decoding of all tokens at once.

Both decoders give out whole characters only.  `held_tokens` counts the newest tokens whose text is not all out yet.

- `ByteLevelDecoder`: byte-level BPE (GPT-2, Llama 3, Qwen, SmolLM).  Text is the UTF-8 decoding of the tokens' bytes;
  a token costs one table look-up.
- `WindowDecoder`: every other tokenizer.  Text depends on neighbours (a first token loses its space, bytes of a run
  make one character), so a short window of tokens is decoded with and without the new ones, and the difference is
  given out.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

from detokenizer_proc.vocabulary import Vocabulary

REPLACEMENT = "\ufffd"

# A run of byte tokens that is not valid UTF-8 decodes to replacement characters throughout, so its text is only
# certain at its end.  Nobody waits longer than this many tokens for that: characters of a longer run are given out
# as they become whole, and only if such a run turns out broken does the text differ from decoding it at once.
MAX_HELD_TOKENS = 64

# How many tokens before the new ones a window begins with.
CONTEXT_TOKENS = 4


class StreamDecoder(Protocol):
    """One output being decoded."""

    @property
    def held_tokens(self) -> int:
        """How many of the newest tokens have text that is not given out yet."""
        ...

    def feed(self, token_id: int) -> str:
        """Take one more token and give out the text that is certain now."""
        ...

    def finish(self) -> str:
        """The text still held; incomplete characters become U+FFFD, as in decoding everything at once."""
        ...


class ByteLevelDecoder:
    """Streaming for tokenizers whose text is the decoding of the tokens' bytes."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._held_tokens = 0

    @property
    def held_tokens(self) -> int:
        return self._held_tokens

    def feed(self, token_id: int) -> str:
        if not self._vocabulary.is_shown(token_id, self._skip):
            self._held_tokens += self._held_tokens > 0
            return ""
        token = self._vocabulary.token_bytes(token_id)
        text = self._utf8.decode(token)
        held_bytes = len(self._utf8.getstate()[0])
        if held_bytes <= len(token):
            self._held_tokens = min(1, held_bytes)
        else:
            self._held_tokens += 1
        return text

    def finish(self) -> str:
        self._held_tokens = 0
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """Streaming for any tokenizer, given `decode`: the text of a list of ids, none of them left out.

    `prompt_tail` are the last ids of the prompt: the text is what the output adds to theirs.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        vocabulary: Vocabulary,
        skip_special_tokens: bool,
        prompt_tail: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens
        shown = [token_id for token_id in prompt_tail if vocabulary.is_shown(token_id, skip_special_tokens)]
        self._context = shown[-CONTEXT_TOKENS:]
        self._held: list[int] = []
        # Tokens that are not shown, among the held ones, count as held too: they come in order.
        self._held_tokens = 0
        self._in_long_run = False

    @property
    def held_tokens(self) -> int:
        return self._held_tokens

    def feed(self, token_id: int) -> str:
        self._held_tokens += 1
        if self._vocabulary.is_shown(token_id, self._skip):
            self._held.append(token_id)
        if not self._held:
            self._held_tokens = 0
            return ""
        in_run = self._held[-1] in self._vocabulary.byte_tokens
        self._in_long_run = self._in_long_run and in_run
        if len(self._held) >= MAX_HELD_TOKENS:
            self._in_long_run = in_run
            return self._give_out_complete()
        if in_run and not self._in_long_run:
            return ""
        text = self._text_of_held(len(self._held))
        if text.endswith(REPLACEMENT):
            return ""
        self._move(len(self._held))
        return text

    def finish(self) -> str:
        text = self._text_of_held(len(self._held))
        self._move(len(self._held))
        self._held_tokens = 0
        return text

    def _give_out_complete(self) -> str:
        """Give out as many held tokens as end in a whole character; all of them where none do."""
        for size in range(len(self._held), 0, -1):
            text = self._text_of_held(size)
            if not text.endswith(REPLACEMENT):
                break
        else:
            size = len(self._held)
            text = self._text_of_held(size)
        self._move(size)
        return text

    def _text_of_held(self, size: int) -> str:
        """What the first `size` held tokens add to the text of the context."""
        if size == 0:
            return ""
        held, context = self._held[:size], self._context
        if held[0] in self._vocabulary.byte_tokens:
            # The rest of a long run must not be joined with bytes that are out already: those may be cut anywhere.
            while context and context[-1] in self._vocabulary.byte_tokens:
                context = context[:-1]
        before = self._decode(context) if context else ""
        after = self._decode([*context, *held])
        # A context that ends inside a character (a prompt may) is not completed: what it showed is shown.
        return after[len(before) :] if after.startswith(before) else self._decode(held)

    def _move(self, size: int) -> None:
        """Make the first `size` held tokens context."""
        self._context = [*self._context, *self._held[:size]][-CONTEXT_TOKENS:]
        del self._held[:size]
        self._held_tokens = len(self._held)
