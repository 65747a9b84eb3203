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

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from itertools import groupby
from typing import NamedTuple

import msgspec

from srt.messages import Remember, unpack_ids
from tokenizer_proc.encode import Encoder
from tokenizer_proc.heads import KnownHeads
from tokenizer_proc.history import History, Hit, Mark, Reply, block_digests, common_characters, digest_of_ids, mark_of

# So many replies may turn out to have followed other ids before the search ends: each costs a tokenization.
MAX_STRANGERS = 3

# UTF-8 has up to four bytes for a character, and a token at least one byte.
MAX_TOKENS_OF_A_CHARACTER = 4

Encode = Callable[[str], list[int]]


def scope_of(tenant: str, namespace: str) -> str:
    """Who may find what was remembered: the same tenant in the same namespace."""
    return f"{len(tenant)}:{tenant}{namespace}"


class _Link(NamedTuple):
    """A reply put in: all ids up to its end, which is character `end`; the first `before` of them stand before it."""

    reply: Reply
    before: int
    ids: list[int]
    end: int


class ExactHistory:
    """Tokenizes prompts, with what is remembered of earlier replies."""

    def __init__(self, encoder: Encoder, max_bytes: int) -> None:
        self._encoder = encoder
        self._history = History(max_bytes)
        self._heads = KnownHeads(encoder) if encoder.parts_between_words else None
        self._encode_mark = msgspec.msgpack.Encoder()
        self._decode_mark = msgspec.msgpack.Decoder(Mark)

    @property
    def num_replies(self) -> int:
        """Replies that are remembered."""
        return len(self._history)

    def encode(self, scope: str, text: str, encode: Encode, keep: bool = True) -> tuple[list[int], bytes]:
        """The ids of a prompt's text, and the mark by which a reply to it is remembered.

        `encode` is the plain tokenization: of the whole prompt, or of its beginning.  With `keep` prompts that begin
        alike need not be tokenized from their beginning.
        """
        digests = block_digests(scope, text)
        ids = self._exact(digests, text, encode)
        if not ids:
            heads = self._heads
            ids = encode(text) if heads is None else heads.encode(digests, text, encode, keep)
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
        last = self._last_candidate(ids, text)
        # A token may end inside a character, whose replacement agrees with nothing: a few steps back there is none.
        steps = range(last, max(0, last - MAX_TOKENS_OF_A_CHARACTER), -1)
        return next((ids[:count] for count in steps if text.startswith(self._encoder.decode(ids[:count]))), [])

    def _last_candidate(self, ids: list[int], text: str) -> int:
        """How many of the ids can agree with the text at most: about where they part from it."""
        ends = self._encoder.character_ends(ids)
        if ends is not None:
            return bisect_right(ends, common_characters(self._encoder.decode(ids), text, 0))
        return bisect_left(
            range(1, len(ids) + 1), True, key=lambda n: not text.startswith(self._encoder.decode(ids[:n]))
        )

    def _exact(self, digests: list[bytes], text: str, encode: Encode) -> list[int] | None:
        """The ids with every remembered reply that can be put in; None when there is none."""
        hits = self._history.find(digests, text, lambda place: self._encoder.begins_apart(text, place))
        chain = self._chain(hits, text, encode)
        plain: list[int] | None = None
        for link in reversed(chain):
            rest = self._part(text[link.end :], None)
            if rest and not self._encoder.begins_apart(text, link.end):
                plain = encode(text) if plain is None else plain
                if plain[-len(rest) :] != rest:
                    continue
            if self._spells(link.ids + rest, text):
                self._use(chain, link)
                return link.ids + rest
        return None

    def _chain(self, hits: list[Hit], text: str, encode: Encode) -> list[_Link]:
        """The replies that followed the very ids before them, one after another from the beginning."""
        chain = self._known_beginning(hits, text)
        ids, at = (chain[0].ids, chain[0].end) if chain else ([], 0)
        strangers = 0
        for start, group in groupby(hits, key=lambda hit: hit.reply.start):
            # Where the ids before a reply are others, those before later replies mostly are too.
            if start < at or strangers == MAX_STRANGERS:
                continue
            before = ids + self._part(text[at:start], None if chain else encode)
            digest = digest_of_ids(before)
            hit = next((hit for hit in group if hit.reply.ids_digest == digest), None)
            if hit is None:
                strangers += 1
                continue
            chain.append(self._link(before, hit, text))
            ids, at = chain[-1].ids, chain[-1].end
        return chain

    def _known_beginning(self, hits: list[Hit], text: str) -> list[_Link]:
        """The last reply before which the ids are kept: the text is the same as it was then."""
        for known, _ in reversed(hits):
            if known.before is not None:
                # Of the replies to that very prompt the longest, as everywhere.
                same = (known.start, known.ids_digest)
                hit = next(hit for hit in hits if (hit.reply.start, hit.reply.ids_digest) == same)
                return [self._link(known.before.tolist(), hit, text)]
        return []

    def _link(self, before: list[int], hit: Hit, text: str) -> _Link:
        reply = hit.reply
        ids = reply.ids.tolist()
        if hit.kept < len(reply.text):
            ids = self._whole_tokens(ids, reply.text[: hit.kept])
        end = hit.end if len(ids) == len(reply.ids) else reply.start + len(self._encoder.decode(ids))
        return _Link(reply, len(before), before + ids, end)

    def _use(self, chain: list[_Link], last: _Link) -> None:
        """These replies were of use, up to `last`.  It alone keeps the ids before it: they have all the others'."""
        for link in chain:
            self._history.touch(link.reply)
            if link is not last and link.reply.before is not None:
                self._history.keep_before(link.reply, None)
        if last.reply.before is None:
            self._history.keep_before(last.reply, last.ids[: last.before])

    def _part(self, text: str, encode: Encode | None) -> list[int]:
        """The ids of a part of a prompt; the beginning is tokenized as a prompt of its own would be."""
        return (encode or self._encoder.encode_chat)(text) if text else []

    def _spells(self, ids: list[int], text: str) -> bool:
        head = self._encoder.special_head
        return self._encoder.decode(ids) == text or (
            bool(head) and ids[: len(head)] == head and self._encoder.decode(ids[len(head) :]) == text
        )
