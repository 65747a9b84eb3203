"""Public heads: beginnings of prompts that are declared to be shared by all namespaces.

    public      [pages 0-3] -+- [4-7]                  pages of declared heads, in a namespace of their own
                             |    :..... "a"           a branch for each namespace whose prompts went on from there
                             |    :       +- [8-9]     with pages that are in no head
                             :..... "b"
                                     +- [4-6]

How many of a prompt's first pages are public follows from its tokens and the declared heads alone, and does not fall
when the prompt grows.  So each run has one place, and it does not matter who comes first.  A branch is an empty node:
nothing that looks at the children of a node sees what hangs in the branches, and a node with branches is no leaf, so
a head outlives what goes on from it.
"""

from __future__ import annotations

from collections.abc import Iterable

from radix.node import TOKEN_BYTES, common_tokens


class PublicHeads:
    """The declared heads.  `namespace`: the name that nobody else may have under which their pages are.

    `any`: whether there are any.
    """

    def __init__(self, namespace: str = "", heads: Iterable[bytes] = (), page_size: int = 1) -> None:
        """`heads`: packed int32 token ids; of each, the whole pages count."""
        self.namespace = namespace
        self._page_size = page_size
        page_bytes = page_size * TOKEN_BYTES
        whole = (head[: len(head) // page_bytes * page_bytes] for head in heads)
        # Most heads differ from most prompts in their first token.
        self._by_first: dict[bytes, list[bytes]] = {}
        for head in dict.fromkeys(whole):
            if head:
                self._by_first.setdefault(head[:TOKEN_BYTES], []).append(head)
        self.any = bool(self._by_first)

    def pages(self, tokens: bytes) -> int:
        """How many of the first pages of `tokens` (packed) are those of a head."""
        heads = self._by_first.get(tokens[:TOKEN_BYTES], ())
        return max((common_tokens(head, tokens, 0, 1) for head in heads), default=0) // self._page_size
