"""Exact conversations: a history that comes back as text gets the very ids that were generated.

Text has many spellings in tokens, and a model that samples often writes another one than the tokenizer would.  What
is computed and cached belongs to the ids that were generated, so these are put where the reply stands again:

    prompt as text   |first prompt          |reply      |and what follows
    ids              |as tokenized then     |as sampled |as the tokenizer cuts it

That is done only where it cannot change what the prompt says: the ids before the reply are those that it followed,
the ids of the reply spell its text, what follows is tokenized as it would be in the whole, and all ids together spell
the whole prompt.  In every other case the plain tokenization is used.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby

import msgspec

from srt.messages import Remember, unpack_ids
from tokenizer_proc.encode import Encoder
from tokenizer_proc.history import History, Mark, Reply, block_digests, digest_of_ids, mark_of

# So many replies may turn out to have followed other ids before the search ends: each costs a tokenization.
MAX_STRANGERS = 3

Encode = Callable[[str], list[int]]


def scope_of(tenant: str, namespace: str) -> str:
    """Who may find what was remembered: the same tenant in the same namespace."""
    return f"{len(tenant)}:{tenant}{namespace}"


class ExactHistory:
    """Tokenizes prompts, with what is remembered of earlier replies."""

    def __init__(self, encoder: Encoder, max_bytes: int) -> None:
        self._encoder = encoder
        self._history = History(max_bytes)
        self._encode_mark = msgspec.msgpack.Encoder()
        self._decode_mark = msgspec.msgpack.Decoder(Mark)

    @property
    def num_replies(self) -> int:
        """Replies that are remembered."""
        return len(self._history)

    def encode(self, scope: str, text: str, encode: Encode) -> tuple[list[int], bytes]:
        """The ids of a prompt's text, and the mark by which a reply to it is remembered.

        `encode` is the plain tokenization: of the whole prompt, or of its beginning.
        """
        digests = block_digests(scope, text)
        ids = self._exact(digests, text, encode) or encode(text)
        return ids, self._encode_mark.encode(mark_of(digests, text, ids))

    def remember(self, message: Remember) -> None:
        """Keep a reply, as far as its text is that of whole tokens.  Raises msgspec.DecodeError for a broken mark."""
        mark = self._decode_mark.decode(message.mark)
        ids = self._whole_tokens(unpack_ids(message.ids), message.text)
        if ids:
            self._history.add(Reply(mark, self._encoder.decode(ids), ids))

    def _whole_tokens(self, ids: list[int], text: str) -> list[int]:
        """The first of `ids` that spell `text` or a beginning of it: the rest was cut off by a stop string, is a stop
        token, or is not part of the text because it is special or no whole character."""
        for kept in (ids, ids[:-1]):
            if kept and self._encoder.decode(kept) == text:
                return kept
        low, high = 0, len(ids)
        while low < high:
            middle = (low + high + 1) // 2
            if text.startswith(self._encoder.decode(ids[:middle])):
                low = middle
            else:
                high = middle - 1
        return ids[:low]

    def _exact(self, digests: list[bytes], text: str, encode: Encode) -> list[int] | None:
        """The ids with every remembered reply that can be put in; None when there is none."""
        # Each entry: the ids of everything up to the end of a reply, and that reply.
        chain: list[tuple[list[int], Reply]] = []
        at = 0
        ids: list[int] = []
        strangers = 0
        for start, replies in groupby(self._history.find(digests, text), key=lambda reply: reply.start):
            # Where the ids before a reply are others, those before later replies mostly are too.
            if start < at or strangers == MAX_STRANGERS:
                continue
            before = ids + self._part(text[at:start], None if chain else encode)
            digest = digest_of_ids(before)
            reply = next((reply for reply in replies if reply.ids_digest == digest), None)
            if reply is None:
                strangers += 1
                continue
            ids, at = before + reply.ids.tolist(), reply.end
            chain.append((ids, reply))
        plain: list[int] | None = None
        for ids, reply in reversed(chain):
            rest = self._part(text[reply.end :], None)
            if rest and not self._encoder.begins_apart(text, reply.end):
                plain = encode(text) if plain is None else plain
                if plain[-len(rest) :] != rest:
                    continue
            if self._spells(ids + rest, text):
                for _, used in chain:
                    self._history.touch(used)
                return ids + rest
        return None

    def _part(self, text: str, encode: Encode | None) -> list[int]:
        """The ids of a part of a prompt; the beginning is tokenized as a prompt of its own would be."""
        return (encode or self._encoder.encode_chat)(text) if text else []

    def _spells(self, ids: list[int], text: str) -> bool:
        head = self._encoder.special_head
        return self._encoder.decode(ids) == text or (
            bool(head) and ids[: len(head)] == head and self._encoder.decode(ids[len(head) :]) == text
        )
