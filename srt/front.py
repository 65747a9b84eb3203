"""The front: takes asks, sends them round through the worker processes, hands the text back.

HTTP and the in-process Engine both stand on it.  A Front belongs to the event loop that started it and touches
no signal handler; everything but `start`, `drain`, `stop` and the calls that wait for a reply is synchronous.

Of every ask it knows one thing only: its Answer, under each of its request ids.  An answer leaves the table in the
moment it ends, whichever way: finished, aborted, refused, or its worker dead.  Whatever the workers still send
for it is then a message to nobody and is dropped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import secrets
import time
from collections import Counter
from collections.abc import Callable
from typing import Literal, TypeVar

import msgspec

from srt.answer import RETRY_AFTER_SECONDS, SEED_MASK, Answer, Ask, RequestEnd, RequestFailed, merge_deltas, unavailable
from srt.cache_messages import CacheTree, Call, CallReply, Sessions, SessionState
from srt.calls import Calls
from srt.launch import Worker, WorkerCommand, worker_command
from srt.messages import (
    Abort,
    ChatPrompt,
    FrontInbox,
    Rejected,
    Remember,
    SamplingParams,
    Submit,
    TextOutput,
    TextPrompt,
    TokenizeCall,
    Tokenized,
    unpack_ids,
)
from srt.resolve import Resolved
from srt.runtime import DETOKENIZER, SCHEDULER, Listener, Runtime
from srt.sampling_rules import check_ask, check_prompt
from srt.stats import SchedulerStats
from srt.totals import RunningTotals
from srt.wires import Place

__all__ = ["Answer", "Ask", "Front", "FrontStatus", "RequestEnd", "RequestFailed", "merge_deltas"]

log = logging.getLogger("sapwood.front")

# How long an ask waits for a worker that is being started again.
HOLD_SECONDS = 10.0
STOP_GRACE_SECONDS = 5.0
# Prompts given to the tokenizers and not yet tokenized; below the high-water mark of a socket, so that none is lost.
MAX_UNTOKENIZED = 8192

# Ended asks whose prompt's mark may still come: what a tokenizer is just handing on.
MAX_UNMARKED = 256

ReplyT = TypeVar("ReplyT")

# The roles of the processes that a reply comes through; a tree's tokens become text on their way.
CALL_ROLES = ("scheduler",)
TREE_ROLES = ("scheduler", "detokenizer")


class FrontStatus(msgspec.Struct, frozen=True):
    """How the runtime is.  `workers`: name of each process -> "up" or "down"; `requests`: asks that have not ended."""

    state: Literal["starting", "ok", "restarting", "draining", "stopped"]
    workers: dict[str, str]
    requests: int


class Front:
    """The runtime as its callers see it.

    `observers` are called with a RequestEnd whenever an ask has ended.  `start_phases`: (name, seconds) of the
    start-up.  `worker_facts`: name of each process -> the settings it said it runs with.
    """

    def __init__(self, resolved: Resolved, command: WorkerCommand = worker_command) -> None:
        self.config = resolved.config
        self.facts = resolved.facts
        self.observers: list[Callable[[RequestEnd], None]] = []
        self.worker_facts: dict[str, dict[str, str | int | float | bool]] = {}
        self.start_phases: list[tuple[str, float]] = []
        self._resolved = resolved
        self._command = command
        self._runtime: Runtime | None = None
        self._state: Literal["new", "starting", "serving", "stopped"] = "new"
        self._draining = False
        self._totals = RunningTotals()
        self._prefix = secrets.token_hex(4)
        self._counter = itertools.count()
        self._turn = itertools.count()
        self._seeds = random.Random(resolved.config.random_seed)
        # Every ask that has not ended, by the id of the ask; and by the id of each sample, with its index.
        self._asks: dict[str, Answer] = {}
        self._samples: dict[str, tuple[Answer, int]] = {}
        # By the id of the ask: those that wait for a worker, with their time limit; those that a tokenizer has.
        self._held: dict[str, tuple[Answer, Submit, asyncio.TimerHandle]] = {}
        self._tokenizing: dict[str, Worker] = {}
        # Asks that have ended before their prompt's mark came.
        self._unmarked: dict[str, Answer] = {}
        self._calls = Calls()
        self._idle: asyncio.Future[None] | None = None

    # Life.

    async def start(self) -> None:
        """Start the worker processes and wait until all are ready.

        Raises StartError (one line) when one cannot start; nothing is left then.
        """
        if self._state != "new":
            raise RuntimeError("a Front is started once")
        self._state = "starting"
        listener = Listener(self._on_message, self._on_death, self._on_up)
        try:
            self._runtime = await Runtime.start(self._resolved, self._command, listener)
        except BaseException:
            self._state = "stopped"
            raise
        self.start_phases = self._runtime.start_phases
        self.worker_facts = self._runtime.worker_facts
        self._state = "serving"

    async def drain(self, seconds: float) -> bool:
        """Take no new asks and wait for those that run.  True when all have ended within `seconds`."""
        self._draining = True
        if self._asks:
            if self._idle is None:
                self._idle = asyncio.get_running_loop().create_future()
            await asyncio.wait((self._idle,), timeout=seconds)
        return not self._asks

    def end_all(self, message: str) -> None:
        """Take no new asks, and end those that run with RequestFailed 503."""
        self._draining = True
        for answer in list(self._asks.values()):
            answer.fail(unavailable(message, "shutting_down", None))
        self._calls.fail_all(unavailable(message, "shutting_down", None))

    async def stop(self, grace_seconds: float = STOP_GRACE_SECONDS) -> None:
        """End every ask, end the processes (by force after `grace_seconds`), remove every file.  Again: nothing."""
        runtime, self._runtime = self._runtime, None
        self.end_all("the server is stopping")
        self._state = "stopped"
        if runtime is not None:
            await runtime.stop(grace_seconds)

    # How it is.

    @property
    def kv_bytes_per_page(self) -> int:
        """Memory of one page of the pool."""
        return self._resolved.kv_bytes // self._resolved.num_pages

    @property
    def stats(self) -> SchedulerStats | None:
        """The scheduler's last report, its totals summed over restarts; None before the first."""
        return self._totals.stats

    @property
    def healthy(self) -> bool:
        """True while new asks are taken and every process is up.  A long step does not make it unhealthy."""
        return self.status().state == "ok"

    def status(self) -> FrontStatus:
        """How the runtime is at this moment."""
        workers = [] if self._runtime is None else self._runtime.workers
        state: Literal["starting", "ok", "restarting", "draining", "stopped"]
        if self._state != "serving":
            state = "stopped" if self._state == "stopped" else "starting"
        elif self._draining:
            state = "draining"
        else:
            state = "ok" if all(worker.up for worker in workers) else "restarting"
        return FrontStatus(state, {worker.name: "up" if worker.up else "down" for worker in workers}, len(self._asks))

    def worker_pids(self) -> dict[str, int]:
        """Name of each process that is there -> its process id."""
        workers = [] if self._runtime is None else self._runtime.workers
        return {worker.name: worker.process.pid for worker in workers if worker.process is not None}

    # What callers ask.

    def ask(self, ask: Ask) -> Answer:
        """Send a prompt on its way.

        Raises RequestFailed at once when it can never run (400) or the server takes no new asks (503).  While a
        worker is being started again the ask waits for it, for 10 seconds at most.
        """
        self._refuse_unless_serving()
        sampling = check_ask(ask, self.facts.vocab_size)
        if len(self._tokenizing) + len(self._held) >= MAX_UNTOKENIZED:
            raise unavailable("too many prompts wait to be tokenized", "overloaded")
        rids = tuple(f"{self._prefix}{next(self._counter):x}" for _ in range(ask.n))
        answer = Answer(ask, rids, time.perf_counter)
        answer.on_end = self._on_end
        self._asks[answer.id] = answer
        for index, rid in enumerate(rids):
            self._samples[rid] = (answer, index)
        self._submit(answer, self._make_submit(ask, sampling, rids))
        return answer

    async def tokenize(self, prompt: TextPrompt | ChatPrompt) -> list[int]:
        """The ids of a prompt as `ask` would use them.  Raises RequestFailed."""
        self._refuse_unless_serving()
        check_prompt(prompt)
        tokenizer = self._choose_tokenizer()
        if tokenizer is None or len(self._tokenizing) >= MAX_UNTOKENIZED:
            raise unavailable("no tokenizer is free", "overloaded")
        rid = f"{self._prefix}{next(self._counter):x}"
        self._tokenizing[rid] = tokenizer
        place: Place = ("tokenizer", tokenizer.index)
        try:
            # Which tokenizer has it is known in `_tokenizing`, so no role stands here.
            return await self._reply((), list, rid, place, TokenizeCall(rid, prompt))
        finally:
            self._tokenizing.pop(rid, None)

    async def flush_cache(self) -> CallReply:
        """Empty the prefix cache.  The reply says whether it was done; it is refused while requests run."""
        return await self._call("flush_cache")

    async def check(self) -> CallReply:
        """Let the scheduler recount every page, lock and queue; the reply's message names the first fault."""
        return await self._call("check")

    async def fresh_stats(self) -> SchedulerStats | None:
        """Ask the scheduler for a report now.  Raises RequestFailed 503 when it cannot answer."""
        await self._call("stats")
        return self.stats

    async def cache_tree(self, tenant: str, depth: int, max_nodes: int) -> CacheTree:
        """What a tenant has in the prefix cache: the nodes of the first `depth` levels, `max_nodes` at most.

        Raises RequestFailed 503 when the processes that know it are not there.
        """
        call_id = self._new_call_id()
        call = Call(call_id, "cache_tree", tenant=tenant, depth=depth, max_nodes=max_nodes)
        return await self._reply(TREE_ROLES, CacheTree, call_id, SCHEDULER, call)

    async def cache_pins(self, tenant: str) -> CacheTree:
        """A tenant's pins.  Raises RequestFailed 503 as `cache_tree` does."""
        call_id = self._new_call_id()
        call = Call(call_id, "cache_pins", tenant=tenant)
        return await self._reply(TREE_ROLES, CacheTree, call_id, SCHEDULER, call)

    async def change_cache(
        self,
        what: Literal["unpin", "forget"],
        tenant: str,
        namespace: str | None = None,
        tokens: bytes = b"",
        pin: int | None = None,
        session: str | None = None,
    ) -> CallReply:
        """Unpin or forget the prefixes of a namespace (None: of all of the tenant's) that begin with packed `tokens`.

        `pin`: unpin the one of this name.  `session`: forget its runs.  Raises RequestFailed 503.
        """
        call_id = self._new_call_id()
        call = Call(call_id, what, tenant, namespace, tokens, pin, session=session)
        return await self._reply(CALL_ROLES, CallReply, call_id, SCHEDULER, call)

    async def sessions(self, tenant: str, most: int, session: str | None = None) -> Sessions:
        """What the scheduler knows of a tenant's sessions, those used last first; with a name, of that one.

        Raises RequestFailed 503 when it cannot answer.
        """
        call = Call(self._new_call_id(), "sessions", tenant=tenant, session=session, max_sessions=most)
        return await self._reply(CALL_ROLES, Sessions, call.call_id, SCHEDULER, call)

    async def set_session_state(self, tenant: str, session: str, state: SessionState) -> Sessions:
        """Tell how a session goes on; the answer has it as it is then, or nothing when it is not known.

        Raises RequestFailed 503 when the scheduler cannot answer.
        """
        call = Call(self._new_call_id(), "session_state", tenant=tenant, session=session, state=state)
        return await self._reply(CALL_ROLES, Sessions, call.call_id, SCHEDULER, call)

    # The way out.

    def _refuse_unless_serving(self) -> None:
        if self._draining or self._state == "stopped":
            raise unavailable("the server is shutting down and takes no new requests", "shutting_down", None)
        if self._state != "serving":
            raise unavailable("the server is starting", "starting")

    def _make_submit(self, ask: Ask, sampling: SamplingParams, rids: tuple[str, ...]) -> Submit:
        seed = self._seeds.getrandbits(63) if ask.seed is None else ask.seed
        return Submit(
            rids=rids,
            prompt=ask.prompt,
            sampling=sampling,
            seeds=tuple((seed + index) & SEED_MASK for index in range(ask.n)),
            namespace=ask.namespace,
            tenant=ask.tenant,
            priority=ask.priority,
            logprobs=ask.logprobs,
            prompt_logprobs_from=ask.prompt_logprobs_from,
            use_cache=ask.use_cache,
            session=ask.session,
            ttft_target=ask.ttft_target,
            timeout=ask.timeout,
            pins=ask.pins,
            no_store=ask.no_store,
        )

    def _submit(self, answer: Answer, submit: Submit) -> None:
        """Give an ask to a tokenizer, or hold it back while a process that it needs is being started again."""
        assert self._runtime is not None
        tokenizer = self._choose_tokenizer()
        if tokenizer is None or not self._runtime.is_up(SCHEDULER) or not self._runtime.is_up(DETOKENIZER):
            self._hold(answer, submit)
            return
        self._tokenizing[answer.id] = tokenizer
        self._runtime.send(("tokenizer", tokenizer.index), submit)

    def _choose_tokenizer(self) -> Worker | None:
        """The ready tokenizer that has the fewest prompts; among equals, each in turn."""
        ready = [] if self._runtime is None else self._runtime.ready_tokenizers()
        if len(ready) < 2:
            return ready[0] if ready else None
        load = Counter(worker.index for worker in self._tokenizing.values())
        first = next(self._turn) % len(ready)
        return min(ready[first:] + ready[:first], key=lambda worker: load[worker.index])

    def _hold(self, answer: Answer, submit: Submit) -> None:
        def give_up() -> None:
            answer.fail(unavailable("a worker process is being started again and is not ready yet", "worker_died"))

        timer = asyncio.get_running_loop().call_later(HOLD_SECONDS, give_up)
        self._held[answer.id] = (answer, submit, timer)

    def _on_end(self, answer: Answer, running: tuple[str, ...]) -> None:
        """Forget an answer that has ended, and end in the workers what still runs of it."""
        del self._asks[answer.id]
        for rid in answer.rids:
            del self._samples[rid]
        self._tokenizing.pop(answer.id, None)
        held = self._held.pop(answer.id, None)
        if held is not None:
            held[2].cancel()
        elif self._runtime is not None:
            for rid in running:
                self._runtime.send(SCHEDULER, Abort(rid))
        self._remember(answer)
        self._tell_observers(answer.summary())
        if not self._asks and self._idle is not None and not self._idle.done():
            self._idle.set_result(None)

    def _remember(self, answer: Answer) -> None:
        """Tell every tokenizer what was said after a prompt: any of them may get the history that has it."""
        if answer.mark is None and answer.completion_tokens:
            # The prompt's mark takes another way than the text, and may come later than all of it.
            self._unmarked[answer.id] = answer
            if len(self._unmarked) > MAX_UNMARKED:
                del self._unmarked[next(iter(self._unmarked))]
        if not answer.mark or self._runtime is None:
            return
        ask = answer.ask
        for text, ids in answer.outputs():
            if text:
                remember = Remember(answer.mark, text, ids, ask.namespace, ask.tenant)
                for tokenizer in self._runtime.ready_tokenizers():
                    self._runtime.send(("tokenizer", tokenizer.index), remember)

    def _tell_observers(self, end: RequestEnd) -> None:
        for observer in self.observers:
            try:
                observer(end)
            except Exception:
                log.exception("an observer failed")

    async def _call(self, what: Literal["flush_cache", "stats", "check"]) -> CallReply:
        call_id = self._new_call_id()
        return await self._reply(CALL_ROLES, CallReply, call_id, SCHEDULER, Call(call_id, what))

    def _new_call_id(self) -> str:
        """A name for a call to the scheduler.  Raises RequestFailed 503 when it is not there."""
        if self._runtime is None or not self._runtime.is_up(SCHEDULER):
            raise unavailable("the scheduler process is not there", "worker_died")
        return f"{self._prefix}{next(self._counter):x}"

    async def _reply(
        self, roles: tuple[str, ...], kind: type[ReplyT], key: str, place: Place, message: msgspec.Struct
    ) -> ReplyT:
        """Send a message to which one reply will come, and wait for it.  Raises RequestFailed 503 when none comes."""
        runtime = self._runtime
        assert runtime is not None
        unanswered = f"the {place[0]} process does not answer"
        return await self._calls.make(key, roles, kind, lambda: runtime.send(place, message), unanswered)

    # The way back.

    def _on_message(self, message: FrontInbox) -> None:
        match message:
            case TextOutput(deltas=deltas):
                for delta in deltas:
                    found = self._samples.get(delta.rid)
                    if found is not None:
                        answer, index = found
                        if self._tokenizing:
                            self._tokenizing.pop(answer.id, None)
                        answer.deliver(index, delta)
            case Tokenized():
                self._on_tokenized(message)
            case Rejected():
                self._on_rejected(message)
            case SchedulerStats():
                # The last words of a process that has died meanwhile are in the totals already, or are let go.
                if self._runtime is None or self._runtime.is_up(SCHEDULER):
                    self._totals.report(message)
            case CallReply(call_id=call_id) | CacheTree(call_id=call_id) | Sessions(call_id=call_id):
                self._calls.answer(call_id, message)

    def _on_tokenized(self, message: Tokenized) -> None:
        rid = message.rids[0]
        self._tokenizing.pop(rid, None)
        if self._calls.answer(rid, unpack_ids(message.ids or b"")):
            return
        if rid in self._samples:
            answer = self._samples[rid][0]
            answer.prompt_tokens = message.prompt_tokens
            answer.mark = message.mark
        elif rid in self._unmarked:
            answer = self._unmarked.pop(rid)
            answer.mark = message.mark
            self._remember(answer)

    def _on_rejected(self, message: Rejected) -> None:
        retry_after = RETRY_AFTER_SECONDS if message.status in (429, 503) else None
        failure = RequestFailed(message.status, message.message, message.param, message.code, retry_after)
        self._calls.fail(message.rids[0], failure)
        for rid in message.rids:
            found = self._samples.get(rid)
            if found is not None:
                found[0].fail(failure, ended=message.rids)

    # Workers come and go.

    def _on_death(self, worker: Worker, how: str) -> None:
        """End what the dead process had in hand.

        The scheduler has every request that was tokenized, and what a tokenizer is just handing on; the
        detokenizer has the text of them all.  A tokenizer has only what it was given and has not handed on.
        """
        message = f"the {worker.role} process died ({how}); it is being started again"
        if worker.role == "tokenizer":
            concerned = {key for key, tokenizer in self._tokenizing.items() if tokenizer is worker}
        else:
            concerned = self._asks.keys() - self._held.keys()
        for key in sorted(concerned):
            if key in self._asks:
                self._asks[key].fail(unavailable(message, "worker_died"))
            else:
                self._calls.fail(key, unavailable(message, "worker_died"))
        if worker.role == "scheduler":
            self._totals.process_died()
        self._calls.fail_those_of(worker.role, unavailable(message, "worker_died"))

    def _on_up(self, worker: Worker) -> None:
        """Send on what was held back; what still lacks a process is held on, with the time it has left."""
        # A worker may say that it is up while the front stops.
        if self._runtime is None:
            return
        if not (self._runtime.is_up(SCHEDULER) and self._runtime.is_up(DETOKENIZER)):
            return
        if self._choose_tokenizer() is None:
            return
        held, self._held = self._held, {}
        for answer, submit, timer in held.values():
            timer.cancel()
            self._submit(answer, submit)
