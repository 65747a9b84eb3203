"""A number of tokens that a text has at least, found without tokenizing it: hopelessly long texts are refused unread.

The bound is `characters / longest token`.  That is only true when no part of the tokenizer can drop or merge
characters without limit, so every part is looked at; a part that is not known to be safe means that there is no bound.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

from srt.tokenizer_file import TokenizerFile, byte_level_alphabet, parts_of

# Composing makes one character of at most four: no character's canonical decomposition is longer (Unicode Standard
# Annex 15), and what composing with compatibility leaves has no other.  Decomposing forms only add characters.
SHRINK_OF_NORMALIZER = {"NFD": 1, "NFKD": 1, "NFC": 4, "NFKC": 4, "Prepend": 1}

LOSSLESS_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "Split", "Punctuation"})

CONTINUATION_BYTES = range(0x80, 0xC0)


@dataclass(frozen=True, slots=True)
class TokenBound:
    """One token covers at most `max_characters` characters of a text, not counting those in `ignored`.

    `ignored` are characters that the vocabulary has no token for, which byte-level BPE drops without a word.
    """

    max_characters: int
    ignored: str = ""

    def min_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least."""
        counted = len(text) - sum(text.count(character) for character in self.ignored)
        return -(-counted // self.max_characters)


def token_bound(file: TokenizerFile) -> TokenBound | None:
    """The bound for a tokenizer, or None where there is none that is certain."""
    shrinks = [_shrink(step) for step in parts_of(file.normalizer)]
    splits = parts_of(file.pre_tokenizer)
    lossless = all(step.get("type") in LOSSLESS_PRE_TOKENIZERS and step.get("behavior") != "Removed" for step in splits)
    # Tokens that swallow the white space around them cover any number of characters.
    greedy = any(token.lstrip or token.rstrip for token in file.added_tokens)
    ignored = _ignored_characters(file)
    if None in shrinks or not lossless or greedy or ignored is None:
        return None
    # A byte-level token is spelled with one character for each byte, and a character has at least one byte.
    longest = max((len(token) for token in file.token_ids()), default=1)
    longest_added = max((len(token.content) for token in file.added_tokens), default=1)
    return TokenBound(max(longest, longest_added) * prod(shrink for shrink in shrinks if shrink is not None), ignored)


def _shrink(normalizer: dict[str, Any]) -> int | None:
    """Characters of the text that one character of the normalized text may stand for; None: no limit."""
    if normalizer.get("type") == "Replace":
        pattern = (normalizer.get("pattern") or {}).get("String")
        return 1 if pattern is not None and len(normalizer.get("content") or "") >= len(pattern) else None
    return SHRINK_OF_NORMALIZER.get(str(normalizer.get("type")))


def _ignored_characters(file: TokenizerFile) -> str | None:
    """The characters that may give no token at all; None when they cannot be told, or share one unknown token."""
    vocabulary = file.token_ids()
    if file.model.byte_fallback:
        return "" if all(f"<0x{byte:02X}>" in vocabulary for byte in range(256)) else None
    if file.model.type != "BPE" or not any(step.get("type") == "ByteLevel" for step in parts_of(file.pre_tokenizer)):
        return None
    alphabet = byte_level_alphabet()
    # Where a token exists for each continuation byte, no character beyond ASCII can vanish whole.
    if not all(alphabet[byte] in vocabulary for byte in CONTINUATION_BYTES):
        return None
    return "".join(chr(byte) for byte in range(0x80) if alphabet[byte] not in vocabulary)
