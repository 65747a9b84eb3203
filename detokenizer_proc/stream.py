"""One request's way from token ids to shown text: decoding, stop strings, and what goes out together.

A token is given out (its id, its logprob, its place in the count) together with the last of its text, so that ids,
logprobs and text of a delta belong together, and their sums agree at every time:

    tokens     |  a  |  b  |  c  |  d  |
    text       |-------|-----|---------|
    given out  ==============|            c and d wait: a stop string may have begun inside c
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from detokenizer_proc.decode import ByteLevelDecoder, StreamDecoder, WindowDecoder
from detokenizer_proc.stops import StopMatch, StopMatcher
from detokenizer_proc.vocabulary import Vocabulary
from srt.messages import Finish, RequestTimes, StreamOpen, TextDelta, TokenDelta, TokenLogprob, pack_ids, unpack_ids


class _Token:
    """A token that is not given out yet.  `end`: where its text ends, once all of it is decoded."""

    __slots__ = ("end", "id", "logprob", "number")

    def __init__(self, number: int, token_id: int, logprob: TokenLogprob | None) -> None:
        self.number = number
        self.id = token_id
        self.logprob = logprob
        self.end: int | None = None


class Stream:
    """The text of one request.  Offsets are in characters from the beginning of the output."""

    def __init__(
        self, vocabulary: Vocabulary, decode: Callable[[Sequence[int]], str] | None, opening: StreamOpen
    ) -> None:
        """`decode` is only needed (and not None) where the vocabulary is not byte-level."""
        self._vocabulary = vocabulary
        self._decoder = _make_decoder(vocabulary, decode, opening)
        self._matcher = StopMatcher(opening.stop)
        # Whether a token that is a text by itself is shown as it comes, if none waits.
        self._direct = vocabulary.byte_level and not self._matcher.has_stops
        self._skip_special = opening.skip_special_tokens
        self._no_stop_trim = opening.no_stop_trim
        self._text = ""  # decoded, from offset _shown on
        self._shown = 0
        self._num_tokens = 0
        self._waiting: deque[_Token] = deque()
        # (offset, token number): the text up to the offset was there when the token had been decoded.
        self._reached: deque[tuple[int, int]] = deque()
        self._given_out = 0
        # The scheduler's last account, and the tokens that had come then.
        self._times = RequestTimes()
        self._timed_at = 0

    def whole_token(self, rid: str, packed: bytes) -> TextDelta | None:
        """What `step` says of one more token and nothing else, where that needs no thought: the token spells whole
        characters, nothing waits, and no stop string is looked for.  None: it is `step` that has to be asked.

        That is nearly every token of nearly every stream.
        """
        if not self._direct or self._waiting:
            return None
        text = self._vocabulary.whole_text(int.from_bytes(packed, "little"), self._skip_special)
        if text is None:
            return None
        self._num_tokens += 1
        self._given_out += 1
        self._shown += len(text)
        self._matcher.skip(len(text))
        return TextDelta(rid, text, packed, completion_tokens=self._given_out)

    def step(self, delta: TokenDelta) -> tuple[TextDelta, int | None]:
        """What a step's tokens bring to show, and, if a stop string ended the output, the token that completed it.

        With a stop string the delta's finish says so, whatever the scheduler had found in the same step: a stop
        string comes before EOS, and EOS before length.
        """
        match = self._take_tokens(delta)
        if match is None and delta.finish is not None:
            match = self._end_of_tokens()
        if match is not None:
            text, tokens, stopped_by = self._stop_at(match)
            finish: Finish | None = Finish("stop", match.stop)
        else:
            text, tokens = self._give_out(final=delta.finish is not None)
            finish, stopped_by = delta.finish, None
        self._given_out += len(tokens)
        shown = TextDelta(
            rid=delta.rid,
            text=text,
            ids=pack_ids(token.id for token in tokens),
            finish=finish,
            prompt_tokens=delta.prompt_tokens,
            cached_tokens=delta.cached_tokens,
            completion_tokens=self._given_out,
            logprobs=tuple(token.logprob for token in tokens if token.logprob is not None),
            prompt_logprobs=tuple(self._with_bytes(entry) for entry in delta.prompt_logprobs),
            times=self._times_of(delta, ended=finish is not None),
        )
        return shown, stopped_by

    def _times_of(self, delta: TokenDelta, ended: bool) -> RequestTimes | None:
        """The account that goes with a delta.  Of an end that the scheduler does not know of yet, it is made here."""
        if delta.times is not None:
            self._times, self._timed_at = delta.times, self._num_tokens
        elif ended:
            # Each token since then was sampled by a step that ran one token of the request.
            ran = self._times.scheduled_tokens + self._num_tokens - self._timed_at
            return msgspec.structs.replace(self._times, scheduled_tokens=ran)
        return delta.times

    def _take_tokens(self, delta: TokenDelta) -> StopMatch | None:
        """Decode the delta's tokens one by one, until a stop string is found."""
        ids = unpack_ids(delta.ids)
        entries: Sequence[TokenLogprob | None] = delta.logprobs or [None] * len(ids)
        # The token that ended the output is counted, but its text is shown only to those who want the stop itself.
        hidden = len(ids) - 1 if delta.trailing_stop and not self._no_stop_trim else len(ids)
        for place, (token_id, entry) in enumerate(zip(ids, entries, strict=True)):
            self._num_tokens += 1
            token = _Token(self._num_tokens, token_id, self._with_bytes(entry) if entry else None)
            self._waiting.append(token)
            if place >= hidden:
                continue
            match = self._take_text(self._decoder.feed(token_id))
            self._mark_decoded(len(self._waiting) - self._decoder.held_tokens)
            if match is not None:
                return match
        return None

    def _end_of_tokens(self) -> StopMatch | None:
        """Take the text that was still held in the decoder; nothing more will come."""
        match = self._take_text(self._decoder.finish())
        self._mark_decoded(len(self._waiting))
        return match or self._matcher.finish()

    def _take_text(self, text: str) -> StopMatch | None:
        self._text += text
        self._reached.append((self._shown + len(self._text), self._num_tokens))
        return self._matcher.feed(text)

    def _mark_decoded(self, count: int) -> None:
        """The first `count` waiting tokens have all their text in `_text` now."""
        end = self._shown + len(self._text)
        for token in self._waiting:
            if count <= 0:
                return
            if token.end is None:
                token.end = end
            count -= 1

    def _give_out(self, final: bool) -> tuple[str, list[_Token]]:
        """The text that no stop string can claim any more, and the tokens that end in it."""
        until = self._shown + len(self._text) if final else self._matcher.safe
        text = self._cut(until)
        tokens = []
        while self._waiting and (final or (self._waiting[0].end is not None and self._waiting[0].end <= until)):
            tokens.append(self._waiting.popleft())
        while self._reached and self._reached[0][0] <= until:
            self._reached.popleft()
        return text, tokens

    def _stop_at(self, match: StopMatch) -> tuple[str, list[_Token], int]:
        """The text before the stop string (or through it, untrimmed), and the tokens through the completing one."""
        number = next(number for offset, number in self._reached if offset >= match.end)
        text = self._cut(match.end if self._no_stop_trim else match.start)
        return text, [token for token in self._waiting if token.number <= number], number

    def _cut(self, until: int) -> str:
        """Take the text up to offset `until` out of the buffer."""
        size = until - self._shown
        text, self._text = self._text[:size], self._text[size:]
        self._shown = until
        return text

    def _with_bytes(self, entry: TokenLogprob) -> TokenLogprob:
        return msgspec.structs.replace(
            entry,
            token=self._vocabulary.token_bytes(entry.id),
            top_tokens=tuple(self._vocabulary.token_bytes(token_id) for token_id in entry.top_ids),
        )


def _make_decoder(
    vocabulary: Vocabulary, decode: Callable[[Sequence[int]], str] | None, opening: StreamOpen
) -> StreamDecoder:
    if vocabulary.byte_level or decode is None:
        return ByteLevelDecoder(vocabulary, opening.skip_special_tokens)
    return WindowDecoder(decode, vocabulary, opening.skip_special_tokens, unpack_ids(opening.prompt_tail))
