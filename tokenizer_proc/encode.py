"""Text to token ids, with the tokenizer.json of a model folder and nothing but the `tokenizers` library."""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path

from tokenizers import Tokenizer

from srt.child import StartError
from srt.tokenizer_file import TokenizerFile, byte_level_alphabet, parse_tokenizer_file, parts_of, read_tokenizer_file
from tokenizer_proc.bound import token_bound
from tokenizer_proc.errors import PromptError

# The library's own offsets of longer texts would cost more memory than they are worth.
MAX_TOKENS_WITH_OFFSETS = 20_000

LETTER_AND_SPACE = re.compile("[A-Za-z] ")
# The patterns of Qwen and Llama 3, which differ in how they part numbers: a run of letters is one match, with at most
# one character before it.
SPLITS_BETWEEN_WORDS = frozenset(
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}", r"\p{N}{1,3}")
)


class Encoder:
    """A tokenizer, and what is known of it.

    bound         tells texts that are far too long; None where there is none
    special_head  the special tokens that the post-processor puts in front of a text
    parts_between_words  whether a text cut before a single space between two ASCII letters is tokenized as its two
                  parts are, one after the other
    """

    def __init__(self, tokenizer_json: bytes) -> None:
        """From the content of a tokenizer.json.  Raises StartError when it is not one."""
        file = parse_tokenizer_file(tokenizer_json)
        self.bound = token_bound(file)
        self._apart = _apart_pattern(file)
        self._byte_lengths = _byte_lengths(file)
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:
            raise StartError(f"tokenizer.json cannot be read: {error}") from error
        # A file may carry the cutting and padding that its makers trained with; a prompt must get neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.special_head = self._special_head()
        adds_nothing = self._encode("a", add_special_tokens=True) == self._encode("a", add_special_tokens=False)
        self.parts_between_words = adds_nothing and _parts_between_words(file)

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer's post-processor adds.

        Text that begins with those special tokens already (a chat rendered elsewhere) does not get them twice.
        """
        ids = self._encode(text, add_special_tokens=True)
        size = len(self.special_head)
        return ids[size:] if size and ids[size : 2 * size] == self.special_head else ids

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of a rendered chat, where the template has written every special token itself."""
        return self._encode(rendered, add_special_tokens=False)

    def decode(self, ids: list[int]) -> str:
        """The text that ids spell, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def begins_apart(self, text: str, place: int) -> bool:
        """Whether a token begins at this place whatever stands before it, so that the text from there on is tokenized
        by itself as it is in the whole.  False: that is not certain."""
        return self._apart is not None and self._apart.match(text, place) is not None

    def tokens_at(self, text: str, ids: list[int], places: Sequence[int]) -> list[int] | None:
        """For each of these characters of a text (in rising order) the token that it is in; the number of tokens for
        the end of the text.  None where that cannot be told.  `ids` spell the text, without a head."""
        if self._byte_lengths is not None:
            lengths = self._byte_lengths
            ends = list(accumulate(lengths.get(token_id, 0) for token_id in ids))
            borders = [0, *places, len(text)]
            in_bytes = list(accumulate(len(text[begin:end].encode()) for begin, end in pairwise(borders)))
            if ends and ends[-1] == in_bytes[-1]:
                return [bisect_right(ends, place) for place in in_bytes[:-1]]
            # Ids that were generated may hold pieces of characters, for which the text has replacement characters.
            ends = self._character_ends(ids)
            return [bisect_right(ends, place) for place in places] if ends and ends[-1] == len(text) else None
        if len(ids) > MAX_TOKENS_WITH_OFFSETS:
            return None
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        if encoding.ids != ids:
            return None
        ends = [end for _, end in encoding.offsets]
        return [bisect_right(ends, place) for place in places]

    def character_ends(self, ids: list[int]) -> list[int] | None:
        """How many whole characters there are of the text behind each of its tokens; None for tokenizers that are not
        byte-level."""
        return None if self._byte_lengths is None else self._character_ends(ids)

    def _character_ends(self, ids: list[int]) -> list[int]:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        byte_of = {character: byte for byte, character in byte_level_alphabet().items()}
        added = self._tokenizer.get_added_tokens_decoder()
        ends, size = [], 0
        for token_id in ids:
            if token_id in added:
                spelled = added[token_id].content.encode()
            else:
                spelled = bytes(byte_of[character] for character in self._tokenizer.id_to_token(token_id) or "")
            size += len(decoder.decode(spelled))
            ends.append(size)
        if ends:
            ends[-1] += len(decoder.decode(b"", final=True))
        return ends

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        # The fast form leaves out character offsets, which would cost several times the memory of the ids.
        ids: list[int] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _special_head(self) -> list[int]:
        """The special tokens that the post-processor puts in front of a text, found by trying."""
        bare = self._encode("a", add_special_tokens=False)
        full = self._encode("a", add_special_tokens=True)
        for start in range(len(full) - len(bare) + 1):
            if full[start : start + len(bare)] == bare:
                return full[:start]
        return []

    def min_tokens(self, text: str) -> int:
        """A number of tokens that the text has at least, found without tokenizing it (0 when nothing is known)."""
        return 0 if self.bound is None else self.bound.min_tokens(text)


def _apart_pattern(file: TokenizerFile) -> re.Pattern[str] | None:
    """Matches the special tokens that are cut out of a text before anything else is done to it."""
    if any(token.lstrip or token.rstrip for token in file.added_tokens):
        return None
    special = sorted((token.content for token in file.added_tokens if token.special and token.content), key=len)
    return re.compile("|".join(map(re.escape, reversed(special)))) if special else None


def _parts_between_words(file: TokenizerFile) -> bool:
    """Whether the tokenizer is known to begin a token at each single space that stands between two ASCII letters."""
    if file.model.type != "BPE" or _byte_lengths(file) is None:
        return False
    # A space is joined with nothing before it.
    if any(step.get("type") != "NFC" for step in parts_of(file.normalizer)):
        return False
    # What is cut out of a text before anything else is done to it must not reach over such a place.
    if any(token.lstrip or token.rstrip or LETTER_AND_SPACE.search(token.content) for token in file.added_tokens):
        return False
    splits = False
    for step in parts_of(file.pre_tokenizer):
        match step:
            case {"type": "Digits"}:
                pass
            case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": use_regex}:
                splits = splits or bool(use_regex)
            case {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}:
                if pattern not in SPLITS_BETWEEN_WORDS:
                    return False
                splits = True
            case _:
                return False
    return splits


def _byte_lengths(file: TokenizerFile) -> dict[int, int] | None:
    """The number of bytes that each token stands for; None for tokenizers that are not byte-level."""
    if [step.get("type") for step in parts_of(file.decoder)] != ["ByteLevel"]:
        return None
    # The byte alphabet has one character for each byte.
    lengths = {token_id: len(token) for token, token_id in file.token_ids().items()}
    return lengths | {token.id: len(token.content.encode()) for token in file.added_tokens}


def load_encoder(model_path: Path) -> Encoder:
    """The encoder of a model folder.  Raises StartError when there is no readable tokenizer.json."""
    return Encoder(read_tokenizer_file(model_path))


def check_length(tokens: int, at_least: bool, max_prompt_tokens: int, context_length: int, param: str) -> None:
    """Raises PromptError, with both numbers, when a prompt is longer than what is served."""
    if tokens <= max_prompt_tokens:
        return
    count = f"at least {tokens}" if at_least else str(tokens)
    raise PromptError(
        f"the prompt is too long: it has {count} tokens, and at most {max_prompt_tokens} fit"
        f" (the maximum context length is {context_length} tokens, answer included)",
        param=param,
        code="context_length_exceeded",
    )


def check_ids(ids: list[int], vocab_size: int, param: str) -> None:
    """Raises PromptError when an id is not one of the model's tokens."""
    if not ids or (min(ids) >= 0 and max(ids) < vocab_size):
        return
    place, value = next((place, value) for place, value in enumerate(ids) if not 0 <= value < vocab_size)
    raise PromptError(
        f"token id {value} at position {place} is not in the vocabulary: ids go from 0 to {vocab_size - 1}"
        f" (vocabulary size {vocab_size})",
        param=param,
        code="invalid_token_id",
    )
