"""Text to token ids, with the tokenizer.json of a model folder and nothing but the `tokenizers` library."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from srt.child import StartError
from srt.tokenizer_file import parse_tokenizer_file, read_tokenizer_file
from tokenizer_proc.bound import token_bound
from tokenizer_proc.errors import PromptError


class Encoder:
    """A tokenizer, and what is known of it: `bound` (None where there is none) tells texts that are far too long."""

    def __init__(self, tokenizer_json: bytes) -> None:
        """From the content of a tokenizer.json.  Raises StartError when it is not one."""
        self.bound = token_bound(parse_tokenizer_file(tokenizer_json))
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer_json)
        except Exception as error:
            raise StartError(f"tokenizer.json cannot be read: {error}") from error
        # A file may carry the cutting and padding that its makers trained with; a prompt must get neither.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._head = self._special_head()

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text, with the special tokens that the tokenizer's post-processor adds.

        Text that begins with those special tokens already (a chat rendered elsewhere) does not get them twice.
        """
        ids = self._encode(text, add_special_tokens=True)
        size = len(self._head)
        return ids[size:] if size and ids[size : 2 * size] == self._head else ids

    def encode_chat(self, rendered: str) -> list[int]:
        """Ids of a rendered chat, where the template has written every special token itself."""
        return self._encode(rendered, add_special_tokens=False)

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
