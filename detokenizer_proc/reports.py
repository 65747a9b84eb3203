"""The text beside token ids in what is told of the cache, for people to read."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from detokenizer_proc.vocabulary import Vocabulary
from srt.cache_messages import CacheNode, CachePin, CacheReport, CacheTree
from srt.messages import unpack_ids


class Texts:
    """Spells runs of ids that may begin and end anywhere, special tokens included."""

    def __init__(self, vocabulary: Vocabulary, decode: Callable[[Sequence[int]], str] | None) -> None:
        """`decode` is only needed (and not None) where the vocabulary is not byte-level."""
        self._vocabulary = vocabulary
        self._decode = decode

    def text(self, packed: bytes) -> str:
        """The text of packed ids; what is no whole character becomes U+FFFD, an id without a token nothing."""
        ids = unpack_ids(packed)
        if self._vocabulary.byte_level or self._decode is None:
            return b"".join(map(self._vocabulary.token_bytes, ids)).decode("utf-8", "replace")
        return self._decode([token_id for token_id in ids if self._vocabulary.is_shown(token_id, False)])

    def report(self, report: CacheReport) -> CacheReport:
        """The report with the text on both sides of the place where reuse stopped."""
        return msgspec.structs.replace(
            report,
            cached_text=self.text(report.cached_next),
            prompt_text=self.text(report.prompt_next),
            before_text=self.text(report.before),
        )

    def tree(self, tree: CacheTree) -> CacheTree:
        """The tree with the text of each run's first tokens, and of both ends of each pin."""
        nodes = tuple(self._node(node) for node in tree.nodes)
        return msgspec.structs.replace(tree, nodes=nodes, pins=tuple(self._pin(pin) for pin in tree.pins))

    def _pin(self, pin: CachePin) -> CachePin:
        return msgspec.structs.replace(pin, text=self.text(pin.head), tail_text=self.text(pin.tail))

    def _node(self, node: CacheNode) -> CacheNode:
        return msgspec.structs.replace(node, text=self.text(node.head))
