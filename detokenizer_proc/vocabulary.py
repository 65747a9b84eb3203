"""The bytes behind every token id, and how a tokenizer joins tokens into text."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from srt.tokenizer_file import TokenizerFile, byte_level_alphabet, parts_of

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
WORD_START = "\u2581"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What ids stand for.

    tokens       bytes of each id as shown in logprobs, and, for byte-level tokenizers, as joined into text; None for
                 ids that no token has (decoding skips them)
    special      ids that are left out of text where special tokens are skipped
    byte_tokens  ids that stand for one byte of a character spelled in bytes (`<0xE4>`), where the decoder joins those
    byte_level   whether text is the UTF-8 decoding of the tokens' bytes, one after another, and nothing else
    """

    tokens: list[bytes | None]
    special: frozenset[int]
    byte_tokens: frozenset[int]
    byte_level: bool
    # What `whole_text` has found so far.
    _whole: dict[int, str] = field(default_factory=dict)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token; none for an id that no token has."""
        return (self.tokens[token_id] or b"") if 0 <= token_id < len(self.tokens) else b""

    def whole_text(self, token_id: int, skip_special_tokens: bool) -> str | None:
        """The text of a token that spells whole characters, where the text is that of the tokens' bytes; None for any
        other, also for one that is not shown."""
        text = self._whole.get(token_id)
        if text is None and self.is_shown(token_id, skip_special_tokens):
            try:
                text = self.token_bytes(token_id).decode()
            except UnicodeDecodeError:
                return None
            if token_id not in self.special:
                self._whole[token_id] = text
        return text

    def is_shown(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether a token takes part in the text at all."""
        if not 0 <= token_id < len(self.tokens) or self.tokens[token_id] is None:
            return False
        return not (skip_special_tokens and token_id in self.special)


def vocabulary_of(file: TokenizerFile) -> Vocabulary:
    """The vocabulary of a tokenizer.json."""
    spelled = {token_id: token for token, token_id in file.token_ids().items()}
    spelled |= {token.id: token.content for token in file.added_tokens}
    decoder_steps = [str(step.get("type")) for step in parts_of(file.decoder)]
    byte_of = {ord(character): byte for byte, character in byte_level_alphabet().items()}
    tokens: list[bytes | None] = [None] * (max(spelled, default=-1) + 1)
    byte_tokens = set()
    for token_id, token in spelled.items():
        byte = BYTE_TOKEN.fullmatch(token) if "ByteFallback" in decoder_steps else None
        if byte:
            tokens[token_id] = bytes([int(byte[1], 16)])
            byte_tokens.add(token_id)
        elif "ByteLevel" in decoder_steps:
            tokens[token_id] = _byte_level_bytes(token, byte_of)
        else:
            tokens[token_id] = token.replace(WORD_START, " ").encode()
    special = frozenset(token.id for token in file.added_tokens if token.special)
    return Vocabulary(tokens, special, frozenset(byte_tokens), byte_level=decoder_steps == ["ByteLevel"])


def _byte_level_bytes(token: str, byte_of: dict[int, int]) -> bytes:
    """A token that is not spelled in the byte alphabet throughout (an added token) stands for its own text."""
    if any(ord(character) not in byte_of for character in token):
        return token.encode()
    return token.translate(byte_of).encode("latin-1")
