"""The four forms of a prompt: a text, a list of texts, a list of token ids, a list of those."""

from __future__ import annotations

from typing import Any

from srt.http.errors import bad_request, quoted
from srt.messages import IdsPrompt, TextPrompt, pack_ids


def read_prompts(given: str | list[Any], field: str, vocab_size: int) -> list[tuple[str, TextPrompt | IdsPrompt]]:
    """Each prompt with the name of its place: `field` itself when there is one, `field[i]` in a list of prompts.

    Raises ApiError for empty prompts, mixed lists, and what is no token id of a vocabulary of this size.
    """
    if isinstance(given, str):
        return [(field, _text(given, field))]
    if not given:
        raise bad_request(field, f"{field} must not be empty, and it is [].", "empty_prompt")
    if isinstance(given[0], int):
        return [(field, _ids(given, field, vocab_size))]
    return [
        (f"{field}[{index}]", _one(item, f"{field}[{index}]", isinstance(given[0], str), vocab_size))
        for index, item in enumerate(given)
    ]


def _one(item: Any, place: str, among_texts: bool, vocab_size: int) -> TextPrompt | IdsPrompt:
    if among_texts and isinstance(item, str):
        return _text(item, place)
    if not among_texts and isinstance(item, list):
        return _ids(item, place, vocab_size)
    right = "a string, like the first of the list" if among_texts else "a list of token ids"
    raise bad_request(place, f"{place} must be {right}, not {quoted(item)}.")


def _text(text: str, place: str) -> TextPrompt:
    if not text:
        raise bad_request(place, f'{place} must not be empty, and it is "".', "empty_prompt")
    return TextPrompt(text)


def _ids(ids: list[Any], place: str, vocab_size: int) -> IdsPrompt:
    if not ids:
        raise bad_request(place, f"{place} must not be empty, and it is [].", "empty_prompt")
    # Whole-list checks first: a list may have a million entries, and the event loop waits meanwhile.
    if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocab_size:
        index, found = next(
            (index, item) for index, item in enumerate(ids) if type(item) is not int or not 0 <= item < vocab_size
        )
        where = f"{place}[{index}]"
        message = f"{where} must be a token id from 0 to {vocab_size - 1}, not {quoted(found)}."
        raise bad_request(where, message, "invalid_token_id")
    return IdsPrompt(pack_ids(ids))
