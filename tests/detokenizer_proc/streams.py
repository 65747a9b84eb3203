"""Driving the detokenizer's core in tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from detokenizer_proc.core import DetokenizerCore
from detokenizer_proc.vocabulary import vocabulary_of
from srt.messages import (
    Finish,
    StepOutput,
    StopFound,
    StreamOpen,
    TextDelta,
    TokenDelta,
    TokenLogprob,
    pack_ids,
    unpack_ids,
)
from srt.tokenizer_file import parse_tokenizer_file


def make_core(tokenizer: Tokenizer, max_streams: int = 100, max_remembered_ends: int = 100) -> DetokenizerCore:
    """A core for a tokenizer that is not in a folder."""
    vocabulary = vocabulary_of(parse_tokenizer_file(tokenizer.to_str().encode()))
    decode = None if vocabulary.byte_level else lambda ids: tokenizer.decode(ids, skip_special_tokens=False)
    return DetokenizerCore(vocabulary, decode, max_streams, max_remembered_ends)


@dataclass
class Shown:
    """All that a client got of one request."""

    deltas: list[TextDelta] = field(default_factory=list)
    stops: list[StopFound] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def pieces(self) -> list[str]:
        return [delta.text for delta in self.deltas]

    @property
    def ids(self) -> list[int]:
        return [token_id for delta in self.deltas for token_id in unpack_ids(delta.ids)]

    @property
    def logprobs(self) -> list[TokenLogprob]:
        return [entry for delta in self.deltas for entry in delta.logprobs]

    @property
    def finish(self) -> Finish | None:
        return self.deltas[-1].finish

    @property
    def completion_tokens(self) -> int:
        return self.deltas[-1].completion_tokens


def chunks(ids: Sequence[int], size: int) -> list[list[int]]:
    """The ids, `size` at a time; at least one chunk."""
    return [list(ids[place : place + size]) for place in range(0, max(len(ids), 1), size)]


def stream(
    core: DetokenizerCore,
    ids: Sequence[int],
    *,
    rid: str = "r",
    stop: tuple[str, ...] = (),
    finish: Finish | None = None,
    trailing_stop: bool = False,
    at_once: int = 1,
    logprobs: bool = False,
    skip_special_tokens: bool = True,
    no_stop_trim: bool = False,
    prompt_tail: Sequence[int] = (),
) -> Shown:
    """Give a core the ids of one request, `at_once` in each step, and go on (as a scheduler a step late) to the end."""
    shown = Shown()
    parts = chunks(ids, at_once)
    for place, part in enumerate(parts):
        opening = StreamOpen(pack_ids(prompt_tail), stop, skip_special_tokens, no_stop_trim) if place == 0 else None
        last = place == len(parts) - 1
        delta = TokenDelta(
            rid,
            pack_ids(part),
            opening,
            (finish or Finish("length")) if last else None,
            trailing_stop=trailing_stop and last,
            prompt_tokens=7 if place == 0 else 0,
            logprobs=tuple(TokenLogprob(i, -1.0, (i, 3), (-1.0, -2.0)) for i in part) if logprobs else (),
        )
        output, stops = core.step(StepOutput((delta,)))
        shown.deltas += output.deltas
        shown.stops += stops
    return shown
