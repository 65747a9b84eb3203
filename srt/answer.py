"""What a caller asks of the runtime, and the handle on the answer: one stream of text for each sample.

    ask = Ask(prompt=TextPrompt("Hello"), sampling=SamplingParams(max_new_tokens=8), n=2)
    async for index, delta in front.ask(ask):      # until both samples have ended
        ...

A reader that is slower than the model never blocks anybody: what waits for it is merged into one delta per
sample, so that an answer's buffer is never larger than the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from srt.cache_messages import CacheReport, PinWish, SessionMark
from srt.messages import ChatPrompt, Finish, IdsPrompt, SamplingParams, TextDelta, TextPrompt
from srt.sample_times import SampleClock, SampleTimes

Prompt = TextPrompt | IdsPrompt | ChatPrompt
SEED_MASK = (1 << 63) - 1


class RequestFailed(Exception):
    """A request ends here, and why.

    `status` is the HTTP status that fits, `message` one sentence for the caller, `param` the field at fault,
    `code` a stable word such as `context_length_exceeded`, `retry_after` the seconds after which another try
    makes sense (None: the same request will fail again).
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = retry_after


# After so many seconds another try makes sense where a process is being started again, or a queue is full.
RETRY_AFTER_SECONDS = 1.0


def unavailable(message: str, code: str, retry_after: float | None = RETRY_AFTER_SECONDS) -> RequestFailed:
    """A failure that is the server's and not the request's."""
    return RequestFailed(503, message, code=code, retry_after=retry_after)


@dataclass(frozen=True)
class Ask:
    """One prompt, to be sampled `n` times.

    `seed`: sample i uses (seed + i) modulo 2**63, so that a call can be repeated and its samples differ; None
    draws one.  `logprobs`: None for none, k for those of the chosen token and of the k most likely ones.
    `prompt_logprobs_from`: the first prompt position whose logprob is wanted.  `namespace` is the cache identity
    beside the tokens: requests share cached prefixes only within one.
    """

    prompt: Prompt
    sampling: SamplingParams = field(default_factory=SamplingParams)
    n: int = 1
    seed: int | None = None
    namespace: str = ""
    tenant: str = ""
    priority: int = 0
    logprobs: int | None = None
    prompt_logprobs_from: int | None = None
    use_cache: bool = True
    # The session that the request is part of, and how it goes on.
    session: SessionMark | None = None
    # Seconds: the time to the first token that is asked for (read by the deadline policy); further below the longest
    # that the whole request may take.
    ttft_target: float | None = None
    # Seconds from token to token that are asked for; with the one above, what goodput is counted by.
    tpot_target: float | None = None
    timeout: float | None = None
    # What of the prompt is to be pinned in the cache; and whether the request leaves nothing behind there.
    pins: tuple[PinWish, ...] = ()
    no_store: bool = False


@dataclass(frozen=True)
class RequestEnd:
    """What one Ask came to, told to the front's observers once, when its last sample has ended.

    Token counts: the prompt counts once, whatever n; `cached_tokens` is the smallest over the samples, which is
    what was in the cache before the call; `completion_tokens` is the sum.  Times are in seconds since `ask`;
    `ttft` is None when no token came.  `gaps` has (seconds since the sample's last delta, tokens that came) for
    every delta but each sample's first.  `finish_reasons` has one entry for each sample; a sample that was cut
    off by `failure` has "error".
    """

    rid: str
    tenant: str
    finish_reasons: tuple[str, ...]
    failure: RequestFailed | None
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    ttft: float | None
    queue_seconds: float
    e2e_seconds: float
    gaps: tuple[tuple[float, int], ...]
    # Of the cache report; None for a request that was never admitted.
    cache_reason: str | None = None
    samples: tuple[SampleTimes, ...] = ()
    # As asked for; None: no wish.
    ttft_target: float | None = None
    tpot_target: float | None = None


def merge_deltas(deltas: Sequence[TextDelta]) -> TextDelta:
    """One delta that says all that these (of one request, in order, at least one) say."""
    if len(deltas) == 1:
        return deltas[0]
    last = deltas[-1]
    return TextDelta(
        rid=last.rid,
        text="".join(delta.text for delta in deltas),
        ids=b"".join(delta.ids for delta in deltas),
        finish=last.finish,
        prompt_tokens=max(delta.prompt_tokens for delta in deltas),
        cached_tokens=max(delta.cached_tokens for delta in deltas),
        completion_tokens=max(delta.completion_tokens for delta in deltas),
        logprobs=tuple(item for delta in deltas for item in delta.logprobs),
        prompt_logprobs=tuple(item for delta in deltas for item in delta.prompt_logprobs),
        times=next((delta.times for delta in reversed(deltas) if delta.times is not None), None),
        cache_report=next((delta.cache_report for delta in deltas if delta.cache_report is not None), None),
    )


@dataclass
class _Sample:
    """How far one sample has come."""

    rid: str
    finish: Finish | None = None
    reported: bool = False
    cached_tokens: int = 0
    completion_tokens: int = 0
    clock: SampleClock = field(default_factory=SampleClock)
    first_at: float | None = None
    last_at: float = 0.0
    gaps: list[tuple[float, int]] = field(default_factory=list)
    cache_report: CacheReport | None = None
    # What the caller was given, piece by piece.
    texts: list[str] = field(default_factory=list)
    ids: list[bytes] = field(default_factory=list)

    def note(self, delta: TextDelta, now: float) -> None:
        """Take over the counters of a delta that has just come."""
        self.reported = True
        if delta.cached_tokens > self.cached_tokens:
            self.cached_tokens = delta.cached_tokens
        if delta.times is not None:
            self.clock.told(delta.times)
        self.finish = delta.finish
        if self.cache_report is None:
            self.cache_report = delta.cache_report
        self.texts.append(delta.text)
        self.ids.append(delta.ids)
        tokens = delta.completion_tokens - self.completion_tokens
        if tokens <= 0:
            return
        self.completion_tokens = delta.completion_tokens
        self.clock.tokens(tokens, now)
        if self.first_at is None:
            self.first_at = now
        else:
            self.gaps.append((now - self.last_at, tokens))
        self.last_at = now


class Answer:
    """The handle on one Ask.  Lives on the front's event loop; is read once, by `async for` or by `collect`."""

    def __init__(self, ask: Ask, rids: tuple[str, ...], clock: Callable[[], float]) -> None:
        self.ask = ask
        self.rids = rids
        self.prompt_tokens = 0
        # The tokenizers' name for the prompt; empty where what follows it is not to be remembered; None: not told yet.
        self.mark: bytes | None = None
        self.failure: RequestFailed | None = None
        self._clock = clock
        self._asked_at = clock()
        self._ended_at: float | None = None
        self._samples = [_Sample(rid) for rid in rids]
        self._pending: dict[int, list[TextDelta]] = {}
        self._waiter: asyncio.Future[None] | None = None
        # Set by the front: told once when the answer has ended, with the rids that still run in the workers.
        self.on_end: Callable[[Answer, tuple[str, ...]], None] | None = None

    @property
    def id(self) -> str:
        """The name of the whole request: the rid of its first sample."""
        return self.rids[0]

    @property
    def ended(self) -> bool:
        """True once every sample has ended or the request has failed; there may still be text to read."""
        return self._ended_at is not None

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were in the cache before this call: the smallest count over the samples."""
        return min((sample.cached_tokens for sample in self._samples if sample.reported), default=0)

    @property
    def cache_report(self) -> CacheReport | None:
        """The report of the sample that found least in the cache: it is what the cache had before this call.  None
        until a sample has been admitted."""
        reports = (sample.cache_report for sample in self._samples if sample.cache_report is not None)
        return min(reports, key=lambda report: report.cached_tokens, default=None)

    def outputs(self) -> list[tuple[str, bytes]]:
        """(text, packed ids) that the caller was given of each sample that has ended in order or was cut off."""
        return [
            ("".join(sample.texts), b"".join(sample.ids))
            for sample in self._samples
            if sample.finish is not None and sample.finish.reason != "error"
        ]

    @property
    def completion_tokens(self) -> int:
        """Output tokens so far, over all samples."""
        return sum(sample.completion_tokens for sample in self._samples)

    def sample_tokens(self, index: int) -> int:
        """Output tokens so far of one sample."""
        return self._samples[index].completion_tokens

    @property
    def queue_seconds(self) -> float:
        """The longest that one of the samples waited for admission."""
        return max(self.sample_times(index).queue for index in range(len(self._samples)))

    def sample_times(self, index: int) -> SampleTimes:
        """Where the time of one sample went so far."""
        return self._samples[index].clock.report(self._asked_at)

    @property
    def e2e_seconds(self) -> float:
        """Seconds from the call to its end, or to now while it runs."""
        return (self._clock() if self._ended_at is None else self._ended_at) - self._asked_at

    def __aiter__(self) -> AsyncIterator[tuple[int, TextDelta]]:
        """(sample index, what is new) until every sample has ended.  Leaving early aborts what still runs.

        Raises RequestFailed, after the text that came before it, when the request was rejected, failed in the
        model, or lost its worker.
        """
        return self._read()

    async def _read(self) -> AsyncIterator[tuple[int, TextDelta]]:
        try:
            while True:
                if self._pending:
                    index = next(iter(self._pending))
                    yield index, merge_deltas(self._pending.pop(index))
                elif self.failure is not None:
                    raise self.failure
                elif self._ended_at is not None:
                    return
                else:
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        finally:
            self.abort()

    async def collect(self) -> list[TextDelta]:
        """The whole answer at once, one delta for each sample.  Raises RequestFailed as iteration does."""
        parts: list[list[TextDelta]] = [[] for _ in self.rids]
        async for index, delta in self:
            parts[index].append(delta)
        return [merge_deltas(sample) for sample in parts]

    def abort(self) -> None:
        """End what still runs; its samples end with finish reason "abort".  Again, or after the end: nothing."""
        if self.ended:
            return
        running = tuple(sample.rid for sample in self._samples if sample.finish is None)
        for index, sample in enumerate(self._samples):
            if sample.finish is None:
                self._put(index, TextDelta(rid=sample.rid, finish=Finish("abort")))
        self._end(running)

    def deliver(self, index: int, delta: TextDelta) -> None:
        """Called by the front: new text of one sample."""
        if self._ended_at is not None or self._samples[index].finish is not None:
            return
        if delta.prompt_tokens > self.prompt_tokens:
            self.prompt_tokens = delta.prompt_tokens
        finish = delta.finish
        if finish is None:
            self._put(index, delta)
            return
        if finish.reason == "error" or finish.status is not None:
            self._put(index, msgspec.structs.replace(delta, finish=None))
            self._samples[index].finish = finish
            self.fail(RequestFailed(finish.status or 500, finish.message or "the request failed in the model"))
            return
        self._put(index, delta)
        if all(sample.finish is not None for sample in self._samples):
            self._end(())

    def fail(self, failure: RequestFailed, ended: tuple[str, ...] = ()) -> None:
        """Called by the front: nothing more will come, for this reason.  `ended`: rids that no longer run anywhere."""
        if self.ended:
            return
        self.failure = failure
        self._end(tuple(s.rid for s in self._samples if s.finish is None and s.rid not in ended))

    def _put(self, index: int, delta: TextDelta) -> None:
        self._samples[index].note(delta, self._clock())
        pending = self._pending.get(index)
        if pending is None:
            self._pending[index] = [delta]
            self._wake()
        else:
            pending.append(delta)

    def _end(self, running: tuple[str, ...]) -> None:
        self._ended_at = self._clock()
        self._wake()
        if self.on_end is not None:
            self.on_end(self, running)

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def summary(self) -> RequestEnd:
        """What the request came to; called once it has ended."""
        firsts = [sample.first_at - self._asked_at for sample in self._samples if sample.first_at is not None]
        return RequestEnd(
            rid=self.id,
            tenant=self.ask.tenant,
            finish_reasons=tuple("error" if s.finish is None else s.finish.reason for s in self._samples),
            failure=self.failure,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            completion_tokens=self.completion_tokens,
            ttft=min(firsts, default=None),
            queue_seconds=self.queue_seconds,
            e2e_seconds=self.e2e_seconds,
            gaps=tuple(gap for sample in self._samples for gap in sample.gaps),
            cache_reason=None if self.cache_report is None else self.cache_report.reason,
            samples=tuple(self.sample_times(index) for index in range(len(self._samples))),
            ttft_target=self.ask.ttft_target,
            tpot_target=self.ask.tpot_target,
        )
