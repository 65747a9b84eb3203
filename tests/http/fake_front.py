"""A front without processes behind it: real asks, real answers, a made-up model.

A prompt's token ids are its UTF-8 bytes.  The output repeats the prompt's last sentence for ever, a byte at a time,
and ends as the sampling parameters say; text is held back until a character is whole and can be no stop string any
more.  What a prompt begins with makes things happen, see `COMMANDS`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from srt.answer import Answer, Ask, RequestEnd, RequestFailed
from srt.cache_messages import CacheNode, CacheReport, CacheTree, CallReply
from srt.config import ModelFacts, ServerConfig
from srt.front import FrontStatus
from srt.messages import (
    ChatPrompt,
    Finish,
    IdsPrompt,
    SamplingParams,
    TextDelta,
    TextPrompt,
    TokenLogprob,
    pack_ids,
    unpack_ids,
)
from srt.sampling_rules import check_ask, check_prompt
from srt.stats import SchedulerStats
from tokenizer_proc.chat import read_messages
from tokenizer_proc.errors import PromptError

VOCAB_SIZE = 256
CONTEXT_LENGTH = 2048
EOS = 2

COMMANDS = {
    "hang": "nothing ever comes",
    "hang after": "nothing comes after the fifth token",
    "fail": "the request fails in the model before the first token",
    "break": "the request fails in the model after the fifth token",
    "full": "the queue is full",
    "end": "the model ends by itself after the fifth token",
    "slow": "a token takes 20 ms",
}


def prompt_text(prompt: TextPrompt | IdsPrompt | ChatPrompt) -> bytes:
    """The bytes of a prompt; a chat is its contents, a line each."""
    match prompt:
        case TextPrompt(text=text):
            return text.encode()
        case IdsPrompt(ids=ids):
            return bytes(unpack_ids(ids))
        case ChatPrompt(messages_json=messages):
            return "\n".join(message["content"] for message in read_messages(messages)).encode()


class FakeFront:
    """What HTTP uses of a Front."""

    def __init__(self, **config: Any) -> None:
        self.config = ServerConfig(model="fake", **config)
        self.facts = ModelFacts(
            path="/models/fake",
            name="fake",
            model_type="llama",
            vocab_size=VOCAB_SIZE,
            context_length=CONTEXT_LENGTH,
            eos_token_ids=(EOS,),
        )
        self.observers: list[Callable[[RequestEnd], None]] = []
        self.worker_facts: dict[str, dict[str, str | int | float | bool]] = {"scheduler": {"threads": 1}}
        self.start_phases: list[tuple[str, float]] = [("model", 0.5)]
        self.state = "ok"
        self.asks: list[Ask] = []
        self.ends: list[RequestEnd] = []
        self.running = 0
        self.busy = False
        self._names = itertools.count()
        self._seen: dict[str, set[bytes]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.observers.append(self.ends.append)

    def worker_pids(self) -> dict[str, int]:
        """See Front."""
        return {"scheduler": 4711}

    def status(self) -> FrontStatus:
        """How it is."""
        return FrontStatus(self.state, {"scheduler": "up"}, self.running)  # type: ignore[arg-type]

    @property
    def stats(self) -> SchedulerStats:
        """A report in which the pages add up."""
        return SchedulerStats(
            running=self.running,
            waiting=0,
            pages_total=100,
            pages_free=90,
            pages_cached=10,
            pages_in_use=0,
            page_size=16,
            prompt_tokens=0,
            cached_tokens=0,
            computed_tokens=1000,
            output_tokens=0,
            evicted_tokens=0,
            retractions=0,
            aborts=0,
            steps=3,
            step_rows=3,
            step_seconds=0.06,
            plan_seconds=0.001,
            step_tokens=21,
            scheduling_seconds=0.003,
            step_histogram=(0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0),
            rows_histogram=(3, *[0] * 15),
            tokens_histogram=(0, 0, 0, 3, *[0] * 12),
            scheduling_histogram=(0, 0, 0, 0, 0, 3, *[0] * 15),
        )

    async def flush_cache(self) -> CallReply:
        """Forget the prompts; refused while `busy`."""
        if self.busy:
            return CallReply("c", False, "2 requests hold parts of the cache")
        self._seen.clear()
        return CallReply("c", True)

    async def check(self) -> CallReply:
        """Something is wrong while `busy`."""
        return CallReply("c", not self.busy, "page 3 has 2 owners and a count of 1" if self.busy else "")

    @property
    def kv_bytes_per_page(self) -> int:
        """A page holds a token, a token is a kilobyte."""
        return 1024

    async def cache_tree(self, tenant: str, depth: int, max_nodes: int) -> CacheTree:
        """Every prompt seen as a run of its own, in order, with one run more below the first; those of `depth` 1."""
        if self.state != "ok":
            raise RequestFailed(503, "the scheduler process is not there", code="worker_died", retry_after=1.0)
        seen = [(name, text) for name, texts in self._seen.items() for text in sorted(texts)]
        nodes = [self._node(name, -1, text, int(not place)) for place, (name, text) in enumerate(seen)]
        below = [self._node(seen[0][0], 0, b"below", 0)] if seen and depth > 1 else []
        told = [*nodes, *below][:max_nodes]
        return CacheTree("c", tuple(told), 1, bool(seen) + len(nodes) - len(told))

    def _node(self, namespace: str, parent: int, text: bytes, children: int) -> CacheNode:
        head = text[:4]
        return CacheNode(
            namespace=namespace,
            parent=parent,
            tokens=len(text),
            pages=len(text),
            head=pack_ids(list(head)),
            users=0,
            hits=2,
            age_seconds=1.5,
            children=children,
            text=head.decode("utf-8", "replace"),
        )

    async def tokenize(self, prompt: TextPrompt | ChatPrompt) -> list[int]:
        """The bytes."""
        check_prompt(prompt)
        return list(prompt_text(prompt))

    def ask(self, ask: Ask) -> Answer:
        """As Front.ask."""
        if self.state != "ok":
            raise RequestFailed(503, "the server is shutting down", code="shutting_down", retry_after=1.0)
        sampling = check_ask(ask, VOCAB_SIZE)
        self.asks.append(ask)
        try:
            text = prompt_text(ask.prompt)
        except PromptError as error:
            text, refusal = b"", RequestFailed(400, error.message, error.param, error.code)
        else:
            refusal = None
        answer = Answer(ask, tuple(f"f{next(self._names)}" for _ in range(ask.n)), time.perf_counter)
        answer.on_end = self._on_end
        self.running += 1
        play = _Play(answer, text, sampling, self._cached(ask.namespace, text), refusal)
        self._tasks[answer.id] = asyncio.ensure_future(play.run())
        return answer

    def _cached(self, namespace: str, text: bytes) -> int:
        seen = self._seen.setdefault(namespace, set())
        cached = max((_common(text, other) for other in seen), default=0)
        seen.add(text)
        return min(cached, max(len(text) - 1, 0))

    def _on_end(self, answer: Answer, running: tuple[str, ...]) -> None:
        self.running -= 1
        self._tasks.pop(answer.id).cancel()
        for observer in self.observers:
            observer(answer.summary())


def _common(one: bytes, other: bytes) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class _Play:
    """Plays one answer's samples out, all in step."""

    def __init__(
        self, answer: Answer, text: bytes, sampling: SamplingParams, cached: int, refusal: RequestFailed | None
    ) -> None:
        self.answer, self.text, self.sampling, self.cached, self.refusal = answer, text, sampling, cached, refusal

    async def run(self) -> None:
        """Deliver tokens until all samples have ended."""
        answer, text = self.answer, self.text
        await asyncio.sleep(0)
        if self.refusal is not None:
            answer.fail(self.refusal)
            return
        if len(text) >= CONTEXT_LENGTH:
            message = f"the prompt has {len(text)} tokens; the context has room for {CONTEXT_LENGTH - 1}"
            answer.fail(RequestFailed(400, message, "prompt", "context_length_exceeded"))
            return
        if text.startswith(b"full"):
            answer.fail(RequestFailed(429, "8 requests are waiting and the queue holds 8", None, "queue_full", 1.0))
            return
        answer.prompt_tokens = len(text)
        if text.startswith(b"hang") and not text.startswith(b"hang after"):
            return
        for token, delta in enumerate(self._deltas(), start=1):
            if token == 1:
                delta = msgspec.structs.replace(delta, cache_report=self._report())
            await asyncio.sleep(0.02 if text.startswith(b"slow") else 0)
            if text.startswith(b"fail") or (text.startswith(b"break") and token == 6):
                answer.fail(RequestFailed(500, "the logits were not finite", code="model_failed"))
            if text.startswith(b"hang after") and token == 6:
                return
            for index, rid in enumerate(answer.rids):
                answer.deliver(index, msgspec.structs.replace(delta, rid=rid))
            if answer.ended:
                return

    def _report(self) -> CacheReport:
        """Where the prompt left what had been seen; a message of a chat is a line."""
        left, total = self.cached, len(self.text)
        line = self.text[:left].count(b"\n")
        return CacheReport(
            cached_tokens=left,
            computed_tokens=total - left,
            reason="diverged" if left < total - 1 else "all_cached",
            position=left,
            prompt_next=pack_ids(list(self.text[left : left + 8])),
            prompt_text=self.text[left : left + 8].decode("utf-8", "replace"),
            before_text=self.text[max(0, left - 8) : left].decode("utf-8", "replace"),
            message=f"messages[{line}]" if isinstance(self.answer.ask.prompt, ChatPrompt) else "",
            message_offset=left - (self.text.rfind(b"\n", 0, left) + 1),
        )

    def _deltas(self) -> Iterator[TextDelta]:
        common = {"rid": "", "prompt_tokens": len(self.text), "cached_tokens": self.cached}
        room = CONTEXT_LENGTH - len(self.text)
        most = room if self.sampling.max_new_tokens is None else min(room, self.sampling.max_new_tokens)
        prompt_logprobs = self._prompt_logprobs()
        if most == 0:
            yield TextDelta(**common, finish=Finish("length"), prompt_logprobs=prompt_logprobs)  # type: ignore[arg-type]
            return
        held, source = b"", self.text.rsplit(b". ", 1)[-1] or b"?"
        for count in range(1, most + 1):
            token = EOS if self.text.startswith(b"end") and count == 6 else source[(count - 1) % len(source)]
            finish = self._finish(token, count, most)
            if not (finish and finish.reason == "stop"):
                held += bytes([token])
            shown, held, matched = self._show(held, finish is not None)
            yield TextDelta(
                **common,  # type: ignore[arg-type]
                text=shown,
                ids=pack_ids([token]),
                completion_tokens=count,
                finish=Finish("stop", matched) if matched else finish,
                logprobs=() if self.answer.ask.logprobs is None else (self._logprob(token),),
                prompt_logprobs=prompt_logprobs if count == 1 else (),
            )
            if matched or finish:
                return

    def _finish(self, token: int, count: int, most: int) -> Finish | None:
        if token in self.sampling.stop_token_ids or (token == EOS and not self.sampling.ignore_eos):
            return Finish("stop", token)
        return Finish("length") if count == most else None

    def _show(self, held: bytes, is_last: bool) -> tuple[str, bytes, str | None]:
        """(text to show, bytes to hold back, stop string found)."""
        for stop in self.sampling.stop:
            at = held.find(stop.encode())
            if at >= 0:
                return held[:at].decode("utf-8", "replace"), b"", stop
        if is_last:
            return held.decode("utf-8", "replace"), b"", None
        keep = max(
            (n for stop in self.sampling.stop for n in range(len(stop)) if held.endswith(stop.encode()[:n])), default=0
        )
        ready, rest = held[: len(held) - keep], held[len(held) - keep :]
        try:
            return ready.decode(), rest, None
        except UnicodeDecodeError as error:
            return ready[: error.start].decode(), ready[error.start :] + rest, None

    def _logprob(self, token: int, is_first_of_prompt: bool = False) -> TokenLogprob:
        top = self.answer.ask.logprobs or 0
        tops = [(token + i) % VOCAB_SIZE for i in range(top)]
        return TokenLogprob(
            token,
            None if is_first_of_prompt else -0.5,
            tuple(tops),
            tuple(-0.5 - i for i in range(top)),
            bytes([token]),
            tuple(bytes([other]) for other in tops),
        )

    def _prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        start = self.answer.ask.prompt_logprobs_from
        if start is None:
            return ()
        return tuple(self._logprob(token, place == 0) for place, token in enumerate(self.text) if place >= start)
