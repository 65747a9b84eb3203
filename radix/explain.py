"""What stands where a match stopped, and what has been evicted: the reasons of a miss."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

from radix.node import TOKEN_BYTES, Node
from radix.walk import walk


def following(root: Node, tokens: bytes, page_size: int, count: int) -> tuple[int, bytes]:
    """How many leading tokens of `tokens` are known, and up to `count` tokens that the cache has after them.

    Where several runs go on from there, the one used last is taken.
    """
    node, inside, whole, rows, pages = walk(root, tokens, page_size)
    matched = len(pages) * page_size + rows
    if inside is not None:
        known = inside.key[(whole * page_size + rows) * TOKEN_BYTES :]
        node = inside
    else:
        known = b""
    while len(known) < count * TOKEN_BYTES and node.children:
        node = max(node.children.values(), key=lambda child: child.tick)
        known += node.key
    return matched, known[: count * TOKEN_BYTES]


@dataclass(frozen=True, slots=True)
class Eviction:
    """When a page left, by the clock of whoever keeps the log, and why."""

    at: float
    reason: str


class EvictionLog:
    """The last evicted runs, each under a digest of all tokens up to the end of its first page.

    A request that stops short at a page border asks for the digest up to the end of the page that it would need
    next.  128-bit digests: a wrong answer, which would be a wrong explanation and nothing more, is out of reach.
    """

    def __init__(self, page_size: int, capacity: int = 16384) -> None:
        self._page_bytes = page_size * TOKEN_BYTES
        self._capacity = capacity
        self._entries: OrderedDict[bytes, Eviction] = OrderedDict()

    def add(self, namespace: str, tokens: bytes, start: int, eviction: Eviction) -> None:
        """Tokens `[start, end)` of a run have left; `start` is on a page border."""
        self._entries[self._digest(namespace, tokens, start)] = eviction
        while len(self._entries) > self._capacity:
            self._entries.popitem(last=False)

    def find(self, namespace: str, tokens: bytes, matched: int) -> Eviction | None:
        """The eviction, if one is remembered, of the page behind the full pages among `matched` tokens."""
        return self._entries.get(self._digest(namespace, tokens, matched))

    def _digest(self, namespace: str, tokens: bytes, start: int) -> bytes:
        end = start * TOKEN_BYTES // self._page_bytes * self._page_bytes + self._page_bytes
        return blake2b(tokens[:end], digest_size=16, key=blake2b(namespace.encode()).digest()).digest()
