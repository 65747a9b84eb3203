"""What the detokenizer process does with each step's output, without sockets: one stream of text for each request."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence

import msgspec

from detokenizer_proc.reports import Texts
from detokenizer_proc.stream import Stream
from detokenizer_proc.vocabulary import Vocabulary
from srt.cache_messages import CacheReport, CacheTree
from srt.messages import Finish, StepOutput, StopFound, TextDelta, TextOutput, TokenDelta

log = logging.getLogger("sapwood.detokenizer")

# Far more than ever run at once: only requests of a scheduler that died are this many and this old.
MAX_STREAMS = 16_384
MAX_REMEMBERED_ENDS = 16_384


class DetokenizerCore:
    """Turns steps of token ids into text.

    `dropped` counts deltas of requests nobody opened here (their first output went to a process that is gone).
    Deltas that follow a stop string are dropped too, without being counted: the scheduler hears of it a step late.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        decode: Callable[[Sequence[int]], str] | None = None,
        max_streams: int = MAX_STREAMS,
        max_remembered_ends: int = MAX_REMEMBERED_ENDS,
    ) -> None:
        self._vocabulary = vocabulary
        self._decode = decode
        self._texts = Texts(vocabulary, decode)
        self._max_streams = max_streams
        self._max_remembered_ends = max_remembered_ends
        # Least recently active first.
        self._streams: OrderedDict[str, Stream] = OrderedDict()
        # Requests that ended here before the scheduler knew, oldest first.
        self._ended: OrderedDict[str, None] = OrderedDict()
        self.dropped = 0

    @property
    def byte_level(self) -> bool:
        """Whether text is joined from the tokens' bytes; otherwise windows of tokens are decoded."""
        return self._vocabulary.byte_level

    @property
    def num_streams(self) -> int:
        """Requests whose output is going on."""
        return len(self._streams)

    @property
    def num_remembered_ends(self) -> int:
        """Requests that ended at a stop string and whose last word from the scheduler is still to come."""
        return len(self._ended)

    def step(self, output: StepOutput) -> tuple[TextOutput, list[StopFound]]:
        """The text to send to the front, and the stop strings found, for the scheduler."""
        texts: list[TextDelta] = []
        stops: list[StopFound] = []
        for place, rid in enumerate(output.rids):
            packed = output.ids[4 * place : 4 * place + 4]
            stream = self._streams.get(rid)
            shown = None if stream is None else stream.whole_token(rid, packed)
            if shown is None:
                self._take(TokenDelta(rid, packed), texts, stops)
            else:
                self._streams.move_to_end(rid)
                texts.append(shown)
        for delta in output.deltas:
            self._take(delta, texts, stops)
        return TextOutput(tuple(texts)), stops

    def tree(self, tree: CacheTree) -> CacheTree:
        """The tree that the scheduler tells of, with text."""
        try:
            return self._texts.tree(tree)
        except Exception:
            log.exception("the text of cached tokens could not be told")
            return tree

    def _take(self, delta: TokenDelta, texts: list[TextDelta], stops: list[StopFound]) -> None:
        if delta.rid in self._ended:
            if delta.finish is not None:
                del self._ended[delta.rid]
            return
        stream = self._stream_of(delta, texts)
        if stream is None:
            self._drop(delta)
            return
        try:
            shown, stopped_by = stream.step(delta)
        except Exception:
            # One request's broken output must not end everybody's.
            log.exception("request %s: its output could not be decoded", delta.rid)
            shown = TextDelta(delta.rid, finish=Finish("error", message="the output could not be decoded", status=500))
            stopped_by = 0
        if delta.open is not None and delta.open.cache_report is not None:
            shown = msgspec.structs.replace(shown, cache_report=self._report(delta.open.cache_report))
        texts.append(shown)
        if shown.finish is not None:
            self._streams.pop(delta.rid, None)
        if stopped_by is not None:
            if delta.finish is None:
                self._remember_end(delta.rid)
            stops.append(StopFound(delta.rid, stopped_by))

    def _report(self, report: CacheReport) -> CacheReport:
        try:
            return self._texts.report(report)
        except Exception:
            # A report is good to have, the output is what was asked for.
            log.exception("the text of a cache report could not be told")
            return report

    def _stream_of(self, delta: TokenDelta, texts: list[TextDelta]) -> Stream | None:
        stream = self._streams.get(delta.rid)
        if stream is not None:
            self._streams.move_to_end(delta.rid)
        elif delta.open is not None:
            stream = self._streams[delta.rid] = Stream(self._vocabulary, self._decode, delta.open)
            self._shed(texts)
        return stream

    def _shed(self, texts: list[TextDelta]) -> None:
        """Give up the stream that has been silent longest when there are too many."""
        if len(self._streams) <= self._max_streams:
            return
        rid, _ = self._streams.popitem(last=False)
        log.error("more than %d requests are open: request %s is given up", self._max_streams, rid)
        texts.append(TextDelta(rid, finish=Finish("error", message="the server lost this request", status=500)))

    def _remember_end(self, rid: str) -> None:
        self._ended[rid] = None
        if len(self._ended) > self._max_remembered_ends:
            self._ended.popitem(last=False)

    def _drop(self, delta: TokenDelta) -> None:
        self.dropped += 1
        if self.dropped == 1:
            log.warning("dropped output of request %s, which was never opened here", delta.rid)
        else:
            log.debug("dropped output of request %s (%d so far)", delta.rid, self.dropped)
