"""What the model said after which prompts: found again by the text that a new prompt begins with, in bounded memory.

A reply is kept under its prompt, and the prompt under a digest of its text up to a block border, with the rest as it
is.  One pass over a new prompt gives its digest at every border; whatever is kept under one of them is compared as
text.  So a look-up costs one hash of the prompt, however much is remembered:

    new prompt   |--------|--------|--------|--------|--------|---
    digests      0        1        2        3        4        5
    kept at 2:                     |lead|reply...........|
"""

from __future__ import annotations

import sys
from array import array
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b
from typing import NamedTuple

import msgspec

BLOCK_CHARACTERS = 256
DIGEST_BYTES = 16
# Different replies to one prompt; more of them are rather a benchmark than conversations.
MAX_REPLIES_OF_A_PROMPT = 256
# What a reply costs beside its text and ids.
OVERHEAD_BYTES = 500


class Mark(msgspec.Struct, frozen=True, array_like=True):
    """A prompt as it is known again: its length, the digest of its text up to the last block border, the text from
    there on, and the digest of its token ids."""

    characters: int
    block: bytes
    lead: str
    ids_digest: bytes


class Reply:
    """A remembered reply: characters [start, start + len(text)) of a history are these ids.

    `ids_digest` is that of all ids before it: where they differ, so does what the model saw, and the reply is another.
    `before` has those ids themselves where they are kept, so that a long history need not be tokenized again.
    """

    __slots__ = ("before", "block", "cost", "ids", "ids_digest", "lead", "start", "text")

    def __init__(self, mark: Mark, text: str, ids: list[int]) -> None:
        self.block = mark.block
        self.lead = mark.lead
        self.start = mark.characters
        self.ids_digest = mark.ids_digest
        self.text = text
        self.ids = array("i", ids)
        self.before: array[int] | None = None
        self.cost = OVERHEAD_BYTES + sys.getsizeof(self.lead) + sys.getsizeof(text) + 4 * len(ids)


class Hit(NamedTuple):
    """A reply that stands in a text, or its first `kept` characters."""

    reply: Reply
    kept: int

    @property
    def end(self) -> int:
        """Where it ends in the text."""
        return self.reply.start + self.kept


def common_characters(run: str, text: str, place: int) -> int:
    """For how many characters `run` and `text[place:]` agree."""
    if text.startswith(run, place):
        return len(run)
    low, high = 0, min(len(run), max(0, len(text) - place))
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(run[:middle], place):
            low = middle
        else:
            high = middle - 1
    return low


def digest_of_ids(ids: list[int]) -> bytes:
    """A digest of token ids."""
    return blake2b(array("i", ids).tobytes(), digest_size=DIGEST_BYTES).digest()


def block_digests(scope: str, text: str) -> list[bytes]:
    """The digest of the text up to each block border, the empty beginning included.  Scopes share none."""
    state = blake2b(digest_size=DIGEST_BYTES, key=blake2b(scope.encode("utf-8", "surrogatepass")).digest())
    digests = [state.digest()]
    for end in range(BLOCK_CHARACTERS, len(text) + 1, BLOCK_CHARACTERS):
        state.update(text[end - BLOCK_CHARACTERS : end].encode("utf-8", "surrogatepass"))
        digests.append(state.digest())
    return digests


def mark_of(digests: list[bytes], text: str, ids: list[int]) -> Mark:
    """The mark of a prompt with this text, the digests of which are given, and these ids."""
    return Mark(len(text), digests[-1], text[(len(digests) - 1) * BLOCK_CHARACTERS :], digest_of_ids(ids))


class History:
    """Replies in `max_bytes` of memory; those not asked for longest go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._replies: OrderedDict[int, Reply] = OrderedDict()
        self._by_block: dict[bytes, list[Reply]] = {}
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._replies)

    def add(self, reply: Reply) -> None:
        """Remember a reply; of those with the same text after the same prompt only the last."""
        siblings = self._by_block.setdefault(reply.block, [])
        what = (reply.start, reply.text, reply.lead)
        same = [old for old in siblings if (old.start, old.text, old.lead) == what]
        for old in same or siblings[: max(0, len(siblings) - MAX_REPLIES_OF_A_PROMPT + 1)]:
            self._forget(old)
        self._by_block.setdefault(reply.block, []).append(reply)
        self._replies[id(reply)] = reply
        self.bytes += reply.cost
        self._shed()

    def find(self, digests: list[bytes], text: str, may_end: Callable[[int], bool]) -> list[Hit]:
        """The replies that stand in this text after the prompts that they followed, by their start, longest first.

        Where the text has only a beginning of a reply (it was cut off, or its last white space was stripped) that
        counts if `may_end` says so of the character behind it.
        """
        if not self._replies:
            return []
        hits = []
        for border, digest in enumerate(digests):
            for reply in self._by_block.get(digest, ()):
                if not text.startswith(reply.lead, border * BLOCK_CHARACTERS):
                    continue
                kept = common_characters(reply.text, text, reply.start)
                if kept and (kept == len(reply.text) or may_end(reply.start + kept)):
                    hits.append(Hit(reply, kept))
        return sorted(hits, key=lambda hit: (hit.reply.start, -hit.kept))

    def keep_before(self, reply: Reply, ids: list[int] | None) -> None:
        """Keep the ids before a reply, or (None) no longer."""
        was = 0 if reply.before is None else 4 * len(reply.before)
        reply.before = None if ids is None else array("i", ids)
        more = (0 if ids is None else 4 * len(ids)) - was
        reply.cost += more
        self.bytes += more
        self._shed()

    def touch(self, reply: Reply) -> None:
        """The reply was of use now."""
        self._replies.move_to_end(id(reply))

    def _shed(self) -> None:
        while self.bytes > self._max_bytes:
            self._forget(next(iter(self._replies.values())))

    def _forget(self, reply: Reply) -> None:
        del self._replies[id(reply)]
        siblings = self._by_block[reply.block]
        siblings.remove(reply)
        if not siblings:
            del self._by_block[reply.block]
        self.bytes -= reply.cost
