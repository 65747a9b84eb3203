"""Files of KV pages: under which key a block of pages is kept, and what its file looks like.   No input or output.

A block is `pages_per_block` whole pages.  Its key is a digest of the key of the block before it and of its own tokens;
the chain begins with a digest of the identity (weights, numbers, layout: all that the bytes depend on) and the
namespace.  So a key names all tokens from the first one on, and nothing of another model or tenant has the same key.

    head      magic, version, lengths, key of the block before, own key, then in full: identity, namespace, tokens
    checksum  CRC-32 of head and payload
    payload   the exact bytes of the pages, one after the other

Whoever reads a block knows its whole head beforehand.  So every byte of a file is compared with what it must be, or is
under the checksum: damage anywhere makes the file unusable, never wrong.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from hashlib import blake2b
from typing import NamedTuple
from zlib import crc32

from radix.node import TOKEN_BYTES

MAGIC = b"SAPWOODK"
VERSION = 1
KEY_BYTES = 20
# magic, version, lengths of identity, namespace and tokens, length of the payload, key before, own key.
_FIXED = struct.Struct(f"<8sIIIIQ{KEY_BYTES}s{KEY_BYTES}s")
_CHECKSUM = struct.Struct("<I")
CHECKSUM_BYTES = _CHECKSUM.size


class UnusableFile(ValueError):
    """The file is not the one that was asked for, or is damaged; the message says which, in a few words."""


class Block(NamedTuple):
    """A block of a run: its tokens (packed int32) and what stands before them.  `depth`: blocks before it."""

    namespace: str
    previous: bytes
    key: bytes
    tokens: bytes
    depth: int


def root_key(identity: bytes, namespace: str) -> bytes:
    """What the chain of a namespace begins with: 20 bytes.  `identity`: all that the bytes of a page depend on."""
    return blake2b(namespace.encode(), digest_size=KEY_BYTES, key=blake2b(identity).digest()).digest()


def next_key(previous: bytes, tokens: bytes) -> bytes:
    """The key of the block with these tokens behind the block, or root, with the key `previous`."""
    return blake2b(previous + tokens, digest_size=KEY_BYTES).digest()


class BlockChain:
    """The keys of one run's blocks, each computed once.  The run may grow; what is there may not change."""

    __slots__ = ("_block_bytes", "_keys", "_root", "namespace", "saved")

    def __init__(self, identity: bytes, namespace: str, block_tokens: int) -> None:
        self.namespace = namespace
        self._root = root_key(identity, namespace)
        self._block_bytes = block_tokens * TOKEN_BYTES
        self._keys: list[bytes] = []
        # Leading blocks that are kept already, or about to be: for whoever writes them.
        self.saved = 0

    def key(self, tokens: bytes, depth: int) -> bytes:
        """The key of block `depth` of the run that begins with `tokens` (packed), which must reach its end."""
        keys, size = self._keys, self._block_bytes
        while len(keys) <= depth:
            start = len(keys) * size
            keys.append(next_key(keys[-1] if keys else self._root, tokens[start : start + size]))
        return keys[depth]

    def block(self, tokens: bytes, depth: int) -> Block:
        """Block `depth` of the run."""
        key = self.key(tokens, depth)
        previous = self._keys[depth - 1] if depth else self._root
        start = depth * self._block_bytes
        return Block(self.namespace, previous, key, tokens[start : start + self._block_bytes], depth)


def encode_head(identity: bytes, block: Block, payload_bytes: int) -> bytes:
    """The bytes with which the file of a block begins, up to the checksum."""
    namespace = block.namespace.encode()
    lengths = (len(identity), len(namespace), len(block.tokens), payload_bytes)
    return _FIXED.pack(MAGIC, VERSION, *lengths, block.previous, block.key) + identity + namespace + block.tokens


class Head(NamedTuple):
    """What the head of a file says of its block."""

    namespace: str
    previous: bytes
    key: bytes
    tokens: bytes


def decode_head(data: bytes, identity: bytes) -> Head | None:
    """The head that the file beginning with `data` has; None when it is not one of this identity, or is cut off."""
    if len(data) < _FIXED.size or not data.startswith(MAGIC):
        return None
    _, version, identity_bytes, namespace_bytes, token_bytes, _, previous, key = _FIXED.unpack_from(data)
    begin = _FIXED.size + identity_bytes
    end = begin + namespace_bytes + token_bytes
    if version != VERSION or data[_FIXED.size : begin] != identity or len(data) < end:
        return None
    namespace = data[begin : begin + namespace_bytes].decode("utf-8", "replace")
    return Head(namespace, previous, key, data[begin + namespace_bytes : end])


def blocks_beginning_with(heads: Iterable[Head], root: bytes, tokens: bytes) -> set[bytes]:
    """The keys of the blocks of one namespace that hold what begins with `tokens` (packed; empty: everything).

    With them those of the tokens themselves from which nothing else goes on, and those whose beginning has no file any
    more: what they begin with cannot be told, and nobody can load them.  `root`: that of the namespace.
    """
    following: dict[bytes, list[Head]] = {}
    for head in heads:
        following.setdefault(head.previous, []).append(head)
    doomed: set[bytes] = set()
    prefix: list[bytes] = []
    reached: set[bytes] = set()
    waiting = [(head, 0, "inside") for head in following.get(root, ())]
    while waiting:
        head, start, place = waiting.pop()
        end = start + len(head.tokens)
        if place == "inside":
            if not head.tokens.startswith(tokens[start:end]):
                place = "parted"
            elif end >= len(tokens):
                place = "behind"
        reached.add(head.key)
        if place == "behind":
            doomed.add(head.key)
        elif place == "inside":
            prefix.append(head.key)
        waiting += [(child, end, place) for child in following.get(head.key, ())]
    for key in reversed(prefix):
        if all(child.key in doomed for child in following.get(key, ())):
            doomed.add(key)
    return doomed | {head.key for children in following.values() for head in children if head.key not in reached}


def checksum(head: bytes, payload: bytes | memoryview) -> bytes:
    """What stands between head and payload.  Lets other threads run while it sums."""
    return _CHECKSUM.pack(crc32(payload, crc32(head)))


def verify(expected_head: bytes, head: bytes, stored: bytes, payload: bytes | memoryview) -> None:
    """Raises UnusableFile unless what was read is what was written under `expected_head`."""
    if head != expected_head:
        raise UnusableFile(_difference(expected_head, head))
    if checksum(head, payload) != stored:
        raise UnusableFile("damaged: the checksum does not fit")


def _difference(expected: bytes, found: bytes) -> str:
    """In which respect a head is another one than expected."""
    if len(found) < _FIXED.size or not found.startswith(MAGIC):
        return "no file of pages"
    wanted, got = _FIXED.unpack_from(expected), _FIXED.unpack_from(found)
    if got[1] != wanted[1]:
        return f"written in format {got[1]}, this is format {wanted[1]}"
    identity_end = _FIXED.size + wanted[2]
    if got[2] != wanted[2] or found[_FIXED.size : identity_end] != expected[_FIXED.size : identity_end]:
        return "of another model, number format or layout"
    if got[3:6] != wanted[3:6]:
        return "of another size"
    return "of another namespace or other tokens, or its head is damaged"
