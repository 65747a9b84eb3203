"""Beginnings of prompts that were tokenized before: a head that many prompts share is tokenized once.

A text is cut where its tokens are certain to part, between two words, and the ids of each piece are kept under the
digest of all text up to a block border, the last cut before which ends the piece:

    text      |the cat sat on th|e mat and looked |at nothing
    borders   0                 1                 2
    pieces    |the cat sat on   | the mat and     |

A prompt takes the pieces of its borders as far as they are known, and tokenizes the rest.
"""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from tokenizer_proc.encode import Encoder
from tokenizer_proc.history import BLOCK_CHARACTERS

# What all pieces may take, and what one takes beside its ids.
MAX_BYTES = 16 * 1024 * 1024
OVERHEAD_BYTES = 350

# Up to the last place where a letter is followed by a single space and a letter.
_TO_LAST_CUT = re.compile(r".*[A-Za-z](?= [A-Za-z])", re.DOTALL)


class _Piece(NamedTuple):
    """The ids of a text from the last cut to character `cut`, which are none where there was no new cut."""

    ids: array[int]
    cut: int


class KnownHeads:
    """The pieces of what was tokenized, in `max_bytes`; those not asked for longest go first."""

    def __init__(self, encoder: Encoder, max_bytes: int = MAX_BYTES) -> None:
        """`encoder` must part its tokens between words (`Encoder.parts_between_words`)."""
        self._encoder = encoder
        self._max_bytes = max_bytes
        self._pieces: OrderedDict[bytes, _Piece] = OrderedDict()
        self.bytes = 0

    def encode(self, digests: list[bytes], text: str, encode: Callable[[str], list[int]], keep: bool) -> list[int]:
        """What `encode` says of a text with these digests; with `keep` its pieces are kept."""
        borders = digests[1:]
        ids, cut, known = array("i"), 0, 0
        for digest in borders:
            piece = self._pieces.get(digest)
            if piece is None:
                break
            ids += piece.ids
            cut = piece.cut
            known += 1
        # Nobody can use a piece without those before it, so these go last.
        for digest in reversed(borders[:known]):
            self._pieces.move_to_end(digest)
        rest = encode(text[cut:])
        if keep and known < len(borders):
            self._keep(borders, known, cut, text, rest)
        return ids.tolist() + rest

    def _keep(self, borders: list[bytes], known: int, begin: int, text: str, rest: list[int]) -> None:
        """Keep the pieces from border `known` on.  `rest`: the ids of the text from `begin` on."""
        cuts, last = [], begin
        for border in range(known, len(borders)):
            found = _TO_LAST_CUT.match(text, border * BLOCK_CHARACTERS, (border + 1) * BLOCK_CHARACTERS)
            last = last if found is None else max(last, found.end())
            cuts.append(last)
        fresh = text[begin:]
        # Of a text that is another when it has been normalized, it cannot be said where its tokens are.
        normal = unicodedata.is_normalized("NFC", fresh)
        counts = self._encoder.tokens_at(fresh, rest, [cut - begin for cut in cuts]) if normal else None
        if counts is None:
            return
        for digest, cut, first, end in reversed(
            list(zip(borders[known:], cuts, [0, *counts[:-1]], counts, strict=True))
        ):
            self._forget(digest)
            self._pieces[digest] = _Piece(array("i", rest[first:end]), cut)
            self.bytes += OVERHEAD_BYTES + 4 * (end - first)
        while self.bytes > self._max_bytes:
            self._forget(next(iter(self._pieces)))

    def _forget(self, digest: bytes) -> None:
        piece = self._pieces.pop(digest, None)
        if piece is not None:
            self.bytes -= OVERHEAD_BYTES + 4 * len(piece.ids)
