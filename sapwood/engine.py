"""The runtime without HTTP, inside a Python program: for notebooks, batches and tests.

    with Engine(model="smollm2") as engine:
        print(engine.generate("The capital of France is", {"max_new_tokens": 8})["text"])

The same processes as behind the server do the work.  An Engine may be used from any thread and from any event loop,
touches no signal handler, and ends its processes when it is shut down, collected, or the interpreter ends.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from sapwood import runs
from sapwood.host import FrontThread
from sapwood.items import Item, Options, Settings, chats_of, items_of, prompts_of
from sapwood.prewarm import prewarm, read_prewarm
from sapwood.public_heads import resolve_with_heads
from sapwood.pull import resolve_model
from srt.answer import Prompt
from srt.config import ModelFacts, ServerConfig
from srt.launch import WorkerCommand, worker_command
from srt.messages import TextPrompt
from srt.resolve import Resolved
from srt.stats import SchedulerStats

Reply = dict[str, Any]


class Engine:
    """Starts when made and returns when it is ready.

    `model` (or `model_path`) is what `sapwood serve --model` takes.  Takes every field of `srt.config.ServerConfig`;
    those of HTTP have no effect here, and the processes log warnings only unless `log_level` says otherwise.
    Raises StartError, in one line, for a model that is not there, a setting out of range, or a process that
    cannot start; TypeError for a setting that there is not, or of the wrong type.
    """

    def __init__(
        self, model: str | Path | None = None, *, model_path: str | Path | None = None, **settings: Any
    ) -> None:
        chosen = model if model_path is None else model_path
        if chosen is None or (model is not None and model_path is not None):
            raise TypeError("give either model or model_path")
        unknown = [name for name in settings if name not in ServerConfig.__struct_fields__]
        if unknown:
            raise TypeError(f"there is no setting {', '.join(unknown)}")
        try:
            config = msgspec.convert({"log_level": "warning", **settings, "model": str(chosen)}, ServerConfig)
        except msgspec.ValidationError as error:
            raise TypeError(str(error)) from None
        self._start(resolve_with_heads(config, Path(resolve_model(config.model))), worker_command)

    @classmethod
    def from_resolved(cls, resolved: Resolved, command: WorkerCommand = worker_command) -> Engine:
        """An engine for a configuration that has been resolved already."""
        engine = cls.__new__(cls)
        engine._start(resolved, command)
        return engine

    def _start(self, resolved: Resolved, command: WorkerCommand) -> None:
        asks = read_prewarm(resolved.config.prewarm, resolved.facts.vocab_size)
        self._host = FrontThread(resolved, command)
        # The collector may come at any moment and in any thread: it must not wait.
        weakref.finalize(self, self._host.stop_soon).atexit = False
        try:
            self._host.run(prewarm(self._host.front, asks))
        except BaseException:
            self._host.stop()
            raise

    # Life.

    def shutdown(self) -> None:
        """End every request and every process.  Again: nothing."""
        self._host.stop()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # What it is.

    @property
    def config(self) -> ServerConfig:
        """The settings as given."""
        return self._host.front.config

    @property
    def facts(self) -> ModelFacts:
        """The model."""
        return self._host.front.facts

    @property
    def start_phases(self) -> list[tuple[str, float]]:
        """(name, seconds) of the start-up."""
        return self._host.front.start_phases

    def stats(self) -> SchedulerStats | None:
        """What the scheduler says of itself now."""
        return self._host.run(self._host.front.fresh_stats())

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False when requests that run keep it from being emptied."""
        return self._host.run(self._host.front.flush_cache()).ok

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text as `generate` would use them."""
        return self._host.run(self._host.front.tokenize(TextPrompt(text)))

    # Generating.

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Settings | Sequence[Settings] = None,
        input_ids: Sequence[Any] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """Continue a prompt, or each of a list of prompts.

        `prompt`: a text or a list of texts; or `input_ids`: a list of ids or a list of such lists.
        `sampling_params`: one object for all, or a list with one for each prompt; names as POST /generate has them.
        Options: return_logprob, logprob_start_len, top_logprobs_num, return_text_in_logprobs, cache_salt, priority,
        ttft_target, tpot_target, timeout, pin ({"tokens", "ttl_seconds"}: keep the prompt's beginning in the cache),
        no_store.

        Returns the native reply ({"text", "output_ids", "meta_info"}) for one prompt with one sample, else a list of
        them in prompt-major order.  With `stream` an iterator of replies, each with everything so far and, where
        there are several, with its place in that list as "index".
        Raises RequestFailed; one bad prompt or setting of a list fails the call, names its place, and leaves
        nothing running.
        """
        prompts, single = prompts_of(prompt, input_ids)
        return self._answer(prompts, single, sampling_params, stream, options)

    def chat(
        self,
        messages: Sequence[Any],
        sampling_params: Settings | Sequence[Settings] = None,
        stream: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """Answer a chat (a list of {"role", "content"}), or each of a list of chats.  Otherwise as `generate`."""
        prompts, single = chats_of(messages, chat_template_kwargs or {})
        return self._answer(prompts, single, sampling_params, stream, options)

    async def generate_async(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Settings | Sequence[Settings] = None,
        input_ids: Sequence[Any] | None = None,
        stream: bool = False,
        **options: Any,
    ) -> Any:
        """`generate` on the caller's event loop.  With `stream` an asynchronous iterator."""
        prompts, single = prompts_of(prompt, input_ids)
        return await self._answer_async(prompts, single, sampling_params, stream, options)

    async def chat_async(
        self,
        messages: Sequence[Any],
        sampling_params: Settings | Sequence[Settings] = None,
        stream: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        """`chat` on the caller's event loop.  With `stream` an asynchronous iterator."""
        prompts, single = chats_of(messages, chat_template_kwargs or {})
        return await self._answer_async(prompts, single, sampling_params, stream, options)

    def _items(
        self,
        prompts: list[Prompt],
        single: bool,
        settings: Settings | Sequence[Settings],
        options: Mapping[str, Any],
    ) -> tuple[list[Item], bool]:
        items = items_of(prompts, single, settings, Options(**options), self.facts.vocab_size)
        return items, not single or items[0].ask.n > 1

    def _answer(
        self,
        prompts: list[Prompt],
        single: bool,
        settings: Settings | Sequence[Settings],
        stream: bool,
        options: Mapping[str, Any],
    ) -> Any:
        items, several = self._items(prompts, single, settings, options)
        if stream:
            return ReplyStream(self._host, runs.stream(self._host.front, items), several)
        replies = self._host.run(runs.collect(self._host.front, items))
        return [reply for samples in replies for reply in samples] if several else replies[0][0]

    async def _answer_async(
        self,
        prompts: list[Prompt],
        single: bool,
        settings: Settings | Sequence[Settings],
        stream: bool,
        options: Mapping[str, Any],
    ) -> Any:
        items, several = self._items(prompts, single, settings, options)
        if stream:
            return AsyncReplyStream(self._host, runs.stream(self._host.front, items), several)
        replies = await asyncio.wrap_future(self._host.submit(runs.collect(self._host.front, items)))
        return [reply for samples in replies for reply in samples] if several else replies[0][0]


def _numbered(entry: tuple[int, Reply], several: bool) -> Reply:
    place, reply = entry
    return {**reply, "index": place} if several else reply


class ReplyStream:
    """An iterator of replies that come while the model writes.  Closing or dropping it aborts what still runs."""

    def __init__(self, host: FrontThread, replies: AsyncGenerator[tuple[int, Reply], None], several: bool) -> None:
        self._host = host
        self._replies = replies
        self._several = several
        self._finalizer = weakref.finalize(self, _close, host, replies)
        self._finalizer.atexit = False

    def __iter__(self) -> ReplyStream:
        return self

    def __next__(self) -> Reply:
        entry = self._host.run(runs.next_of(self._replies))
        if entry is None:
            raise StopIteration
        return _numbered(entry, self._several)

    def close(self) -> None:
        """Abort what still runs.  Again: nothing."""
        self._finalizer()

    def __enter__(self) -> ReplyStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class AsyncReplyStream:
    """The same for `async for`."""

    def __init__(self, host: FrontThread, replies: AsyncGenerator[tuple[int, Reply], None], several: bool) -> None:
        self._host = host
        self._replies = replies
        self._several = several
        self._finalizer = weakref.finalize(self, _close, host, replies)
        self._finalizer.atexit = False

    def __aiter__(self) -> AsyncReplyStream:
        return self

    async def __anext__(self) -> Reply:
        entry = await asyncio.wrap_future(self._host.submit(runs.next_of(self._replies)))
        if entry is None:
            raise StopAsyncIteration
        return _numbered(entry, self._several)

    async def aclose(self) -> None:
        """Abort what still runs.  Again: nothing."""
        self._finalizer()


def _close(host: FrontThread, replies: AsyncGenerator[Any, None]) -> None:
    """Ask the front's loop to end a stream, without waiting: this may be called on that very loop."""
    try:
        host.submit(runs.close(replies))
    except RuntimeError:
        # The engine is gone, and with it everything that ran.
        return
