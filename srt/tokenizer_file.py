"""What the text processes read out of a tokenizer.json themselves: its vocabulary and the kinds of its parts.

Only the fields below are decoded; the merges, which are most of such a file, are skipped without making objects.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from srt.child import StartError


class AddedToken(msgspec.Struct, frozen=True):
    """A token that is found in the text before the model sees it.  `special` ones are left out of shown text."""

    id: int
    content: str
    special: bool = False
    lstrip: bool = False
    rstrip: bool = False


class VocabularyModel(msgspec.Struct, frozen=True):
    """The model part.  `vocab`: token -> id, or (token, score) in the order of ids."""

    vocab: dict[str, int] | list[tuple[str, float]] = {}
    type: str = ""
    byte_fallback: bool = False


class TokenizerFile(msgspec.Struct, frozen=True):
    """A tokenizer.json, as far as it is needed outside the `tokenizers` library."""

    model: VocabularyModel
    added_tokens: list[AddedToken] = []
    normalizer: dict[str, Any] | None = None
    pre_tokenizer: dict[str, Any] | None = None
    decoder: dict[str, Any] | None = None

    def token_ids(self) -> dict[str, int]:
        """Token -> id of the model's vocabulary, without the added tokens."""
        vocabulary = self.model.vocab
        if isinstance(vocabulary, dict):
            return vocabulary
        return {token: place for place, (token, _) in enumerate(vocabulary)}


def parse_tokenizer_file(content: bytes) -> TokenizerFile:
    """The parts of a tokenizer.json.  Raises StartError when it has another form."""
    try:
        return msgspec.json.decode(content, type=TokenizerFile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise StartError(f"tokenizer.json cannot be read: {error}") from error


def read_tokenizer_file(model_path: Path) -> bytes:
    """The bytes of a model folder's tokenizer.json.  Raises StartError when there is none."""
    path = model_path / "tokenizer.json"
    try:
        return path.read_bytes()
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}") from error


def parts_of(part: dict[str, Any] | None) -> list[dict[str, Any]]:
    """A normalizer, pre-tokenizer or decoder as the flat list of its steps, with every `Sequence` unfolded."""
    if part is None:
        return []
    if part.get("type") != "Sequence":
        return [part]
    names = ("normalizers", "pretokenizers", "decoders")
    return [flat for name in names for step in part.get(name) or [] for flat in parts_of(step)]


def byte_level_alphabet() -> dict[int, str]:
    """The printable character that byte-level BPE writes for each byte (the scheme of GPT-2's vocabulary).

    Visible Latin-1 characters stand for themselves, the other bytes for the characters from U+0100 on, in order.
    """
    visible = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: chr(byte) for byte in visible} | {byte: chr(0x100 + place) for place, byte in enumerate(hidden)}
