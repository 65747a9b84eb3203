"""One HTTP request's prompts on their way through the front: opened together, read as one stream, ended together.

Everything that the three generating endpoints share and that is no matter of their shapes.  A request may have
several prompts, and each prompt several samples; prompts are numbered as they came, samples within their prompt.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from starlette.requests import Request

from srt.answer import Answer, Ask, RequestFailed
from srt.cache_report import report_fields
from srt.front import Front
from srt.http.connection import EventStream, cancel, while_connected
from srt.http.errors import ApiError, bad_request, quoted
from srt.http.explanations import Explanations
from srt.http.record import accepted
from srt.messages import TextDelta
from srt.namespaces import namespace_of

# All samples of all prompts of one HTTP request.
MAX_SAMPLES = 4096

# A stream's head goes out with its first token, so that an early failure can still be told by a status.  When the
# token is long in coming it goes out before: after this long once the prompt has been tokenized, and at the latest
# when a client that waits for the head might lose patience.
HEAD_SECONDS = 1.0
LATEST_HEAD_SECONDS = 10.0

# From the runtime's name of a field to the endpoint's.
FieldName = Callable[[str | None], str | None]

# The fields that the rest of the runtime means by a fault in the prompt itself.
PROMPT_PARAMS = frozenset({"prompt", "text", "input_ids"})


@contextmanager
def faults_named(name_of: FieldName) -> Iterator[None]:
    """Within: a RequestFailed becomes the ApiError that calls the field at fault by the endpoint's own name."""
    try:
        yield
    except RequestFailed as failure:
        raise api_error(failure, name_of) from None


def api_error(failure: RequestFailed, name_of: FieldName, about: str = "") -> ApiError:
    """The HTTP error of a failure.  `about` goes before a message that would not say which prompt it is about."""
    param, message = name_of(failure.param), failure.message
    if failure.param is not None and param is not None and message.startswith(f"{failure.param}:"):
        message = param + message[len(failure.param) :]
    if about and about not in message:
        message = f"{about}: {message}"
    return ApiError(failure.status, message, param=param, code=failure.code, retry_after=failure.retry_after)


def cache_namespace(tenant: str, salt: str | None) -> str:
    """The namespace of a tenant's `cache_salt`: another salt, another cache.  Raises ApiError for an empty one."""
    if salt == "":
        raise bad_request("cache_salt", "cache_salt must not be empty; leave it out to share the common cache.")
    return namespace_of(tenant, salt)


@dataclass(frozen=True)
class LiveRequests:
    """The answers that are being waited for, by tenant and the id that the client knows them by; and what is kept of
    the last that have ended."""

    answers: dict[tuple[str, str], list[Answer]] = field(default_factory=dict)
    explanations: Explanations = field(default_factory=Explanations)

    def abort(self, tenant: str, rid: str) -> int:
        """End what a tenant has under exactly this id.  The number of prompts that were still running."""
        running = [answer for answer in self.answers.get((tenant, rid), ()) if not answer.ended]
        for answer in running:
            answer.abort()
        return len(running)


@dataclass(frozen=True)
class Prompted:
    """One prompt of an HTTP request.  `place`: the field it came from; `rid`: what the client calls it."""

    ask: Ask
    place: str
    rid: str

    @property
    def key(self) -> tuple[str, str]:
        """Ids are the client's to choose, so they are known by tenant."""
        return self.ask.tenant, self.rid


class Batch:
    """The answers to the prompts of one HTTP request, in order.  To be closed, which aborts what still runs."""

    def __init__(self, front: Front, live: LiveRequests, prompts: Sequence[Prompted], name_of: FieldName) -> None:
        """Send every prompt on its way, or none: when one is refused, those before it are aborted.

        `name_of` gives the endpoint's names of fields.  Raises ApiError.
        """
        self.answers: list[Answer] = []
        self._live = live
        self._prompts = prompts
        self._name_of = name_of
        samples = sum(prompted.ask.n for prompted in prompts)
        if samples > MAX_SAMPLES:
            field = prompts[0].place.partition("[")[0]
            raise bad_request(
                field, f"{field} asks for {len(prompts)} prompts with {samples} samples in all; {MAX_SAMPLES} is most."
            )
        for key in {prompted.key for prompted in prompts}:
            if key in live.answers:
                raise bad_request("rid", f"rid {quoted(key[1])} is in use by a request that has not ended.")
        try:
            for index, prompted in enumerate(prompts):
                with self._failures_of(index):
                    answer = front.ask(prompted.ask)
                self.answers.append(answer)
                live.answers.setdefault(prompted.key, []).append(answer)
        except BaseException:
            self.close()
            raise
        for key in self._keys():
            told = zip(self._prompts, self.answers, strict=True)
            live.explanations.open(*key, [(prompted.place, answer) for prompted, answer in told if prompted.key == key])

    def _keys(self) -> list[tuple[str, str]]:
        """The ids of the prompts that were sent on their way, each once."""
        return list(dict.fromkeys(prompted.key for prompted in self._prompts[: len(self.answers)]))

    def close(self) -> None:
        """Abort what still runs and forget the ids.  Again: nothing."""
        for answer in self.answers:
            answer.abort()
        for key in self._keys():
            if self._live.answers.pop(key, None) is not None:
                self._live.explanations.close(*key)

    @property
    def tokenized(self) -> bool:
        """True once every prompt has been tokenized, and so found acceptable as far as that goes."""
        return all(answer.prompt_tokens > 0 for answer in self.answers)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts; a prompt counts once, however many samples it has."""
        return sum(answer.prompt_tokens for answer in self.answers)

    @property
    def cached_tokens(self) -> int:
        """Of these, those that were in the cache."""
        return sum(answer.cached_tokens for answer in self.answers)

    def cache_report(self) -> dict[str, Any] | list[dict[str, Any] | None] | None:
        """What the reply says of the cache: an object for one prompt, a list with one for each of several."""
        reports = [report_fields(answer.cache_report) for answer in self.answers]
        return reports[0] if len(reports) == 1 else reports

    @property
    def completion_tokens(self) -> int:
        """Output tokens of all samples."""
        return sum(answer.completion_tokens for answer in self.answers)

    async def collect(self) -> list[list[TextDelta]]:
        """Everything at once: for each prompt one whole delta for each sample.  Raises ApiError."""
        return await asyncio.gather(*(self._collect(index) for index in range(len(self.answers))))

    async def _collect(self, index: int) -> list[TextDelta]:
        with self._failures_of(index):
            return await self.answers[index].collect()

    async def read(self) -> AsyncGenerator[tuple[int, int, TextDelta], None]:
        """(prompt, sample, what is new) as it comes, until all have ended.  Raises ApiError."""
        if len(self.answers) == 1:
            with self._failures_of(0):
                async for sample, delta in self.answers[0]:
                    yield 0, sample, delta
        else:
            async with aclosing(self._read_many()) as items:
                async for item in items:
                    yield item

    async def _read_many(self) -> AsyncGenerator[tuple[int, int, TextDelta], None]:
        # A queue of one: what the client is too slow for waits, merged, in the answers.
        queue: asyncio.Queue[tuple[int, int, TextDelta] | ApiError | None] = asyncio.Queue(1)

        async def pump(index: int) -> None:
            try:
                with self._failures_of(index):
                    async for sample, delta in self.answers[index]:
                        await queue.put((index, sample, delta))
                await queue.put(None)
            except ApiError as error:
                await queue.put(error)

        pumps = [asyncio.ensure_future(pump(index)) for index in range(len(self.answers))]
        try:
            running = len(pumps)
            while running:
                item = await queue.get()
                if isinstance(item, ApiError):
                    raise item
                if item is None:
                    running -= 1
                else:
                    yield item
        finally:
            await cancel(*pumps)

    @contextmanager
    def _failures_of(self, index: int) -> Iterator[None]:
        """Within: a failure of one prompt is told under the name of the field that the prompt came from."""
        try:
            yield
        except RequestFailed as failure:
            place = self._prompts[index].place
            raise api_error(failure, partial(self._name_in, place), place if "[" in place else "") from None

    def _name_in(self, place: str, param: str | None) -> str | None:
        return place if param in PROMPT_PARAMS else self._name_of(param)


async def whole(request: Request, batch: Batch) -> list[list[TextDelta]]:
    """Everything that the batch brings, as `Batch.collect` has it.  Closes the batch, at once when the client goes."""
    accepted(request)
    try:
        return await while_connected(request.receive, batch.collect())
    finally:
        batch.close()


async def streamed(
    request: Request, batch: Batch, events: AsyncGenerator[bytes, None], preamble: bytes = b""
) -> EventStream:
    """The reply that streams `events`, once it is time for its head; `preamble` goes out with the head.

    Raises ApiError when the batch fails before that.  The batch is closed at the end, whichever way that comes.
    """
    accepted(request)
    try:
        ready = await while_connected(request.receive, _opened(batch, events))
    except BaseException:
        batch.close()
        raise
    return EventStream(ready, preamble, on_end=batch.close)


async def _opened(batch: Batch, events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    first = asyncio.ensure_future(anext(events))
    try:
        await asyncio.wait((first,), timeout=HEAD_SECONDS)
        if not first.done() and not batch.tokenized:
            await asyncio.wait((first,), timeout=LATEST_HEAD_SECONDS - HEAD_SECONDS)
        if first.done():
            first.result()
    except BaseException:
        await cancel(first)
        raise
    return _from_first(first, events)


async def _from_first(first: asyncio.Future[bytes], events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    try:
        yield await first
        async for data in events:
            yield data
    finally:
        await cancel(first)
        await events.aclose()
