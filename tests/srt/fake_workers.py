"""Worker processes that speak the real messages over real sockets and compute nothing, so that the front, its
supervision and its shutdown are tested in milliseconds.

A prompt's ids are its characters; the output repeats the prompt for ever.  What a prompt begins with makes things
happen: see the three `serve` functions.  Run as `python fake_workers.py <role> <settings.json> <watch fd>`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import zmq

from srt.cache_messages import CacheNode, CacheTree, Call, CallReply
from srt.child import Phases, StartError, run_worker
from srt.config import inbox_path, read_detokenizer_config, read_scheduler_config, read_tokenizer_config
from srt.ipc import Inbox, Outbox
from srt.messages import (
    Abort,
    ChatPrompt,
    DetokenizerInbox,
    Finish,
    Generate,
    IdsPrompt,
    Rejected,
    Remember,
    RequestTimes,
    SchedulerInbox,
    Shutdown,
    StepOutput,
    Submit,
    TextDelta,
    TextOutput,
    TextPrompt,
    TokenDelta,
    TokenizeCall,
    Tokenized,
    TokenizerInbox,
    pack_ids,
    unpack_ids,
)
from srt.stats import SchedulerStats

TICK_SECONDS = 0.001


def serve_tokenizer(
    path: Path, context: zmq.Context[Any], front: Outbox, phases: Phases, ready: Callable[..., None]
) -> None:
    """ "tokenizer dies": exits at such a prompt; "tokenizer sleeps": never answers it; "refuse": rejects it; "recall":
    answered by the remembered replies, each as mark:namespace:text:ids; "forget": its replies are not to be remembered.
    """
    config = read_tokenizer_config(path)
    inbox: Inbox[TokenizerInbox] = Inbox(context, inbox_path(config.run_dir, "tokenizer", config.index), TokenizerInbox)
    scheduler = Outbox(context, inbox_path(config.run_dir, "scheduler"))
    if config.chat_template == "cannot start":
        raise StartError("the chat template has a hole")
    if config.chat_template == "dies while starting":
        os._exit(7)
    ready(config.index, role="tokenizer")
    remembered: list[str] = []
    while True:
        inbox.wait(None)
        for message in inbox.drain():
            if isinstance(message, Shutdown):
                if config.chat_template == "never leaves":
                    time.sleep(1000)
                return
            if isinstance(message, Remember):
                said = "".join(map(chr, unpack_ids(message.ids)))
                remembered.append(f"{message.mark.decode()}:{message.namespace}:{message.text}:{said}")
                continue
            text = text_of(message.prompt)
            if text.startswith("recall"):
                text = " ".join(remembered)
            if text.startswith("tokenizer dies"):
                os._exit(3)
            if text.startswith("tokenizer sleeps"):
                continue
            ids = pack_ids(map(ord, text))
            rids = (message.rid,) if isinstance(message, TokenizeCall) else message.rids
            if text.startswith("refuse"):
                front.send(Rejected(rids, 400, f"{text!r} is refused", "prompt", "refused"))
            elif isinstance(message, TokenizeCall):
                front.send(Tokenized(rids, len(text), ids))
            else:
                generate(message, ids, scheduler)
                mark = b"" if text.startswith("forget") else text.encode()
                front.send(Tokenized(message.rids, len(text), mark=mark))


def text_of(prompt: TextPrompt | IdsPrompt | ChatPrompt) -> str:
    """A prompt as text; of a chat, what the messages say."""
    match prompt:
        case TextPrompt(text=text):
            return text
        case IdsPrompt(ids=ids):
            return "".join(map(chr, unpack_ids(ids)))
        case ChatPrompt(messages_json=messages):
            return "".join(message["content"] for message in msgspec.json.decode(messages))


def generate(submit: Submit, ids: bytes, scheduler: Outbox) -> None:
    """Hand every sample on."""
    for rid, seed in zip(submit.rids, submit.seeds, strict=True):
        scheduler.send(Generate(rid, submit.rids[0], ids, submit.sampling, seed))


class FakeRun:
    """A request that runs: its output, token by token."""

    def __init__(self, request: Generate) -> None:
        self.request = request
        self.prompt = unpack_ids(request.prompt_ids)
        self.limit = 1 << 30 if request.sampling.max_new_tokens is None else request.sampling.max_new_tokens
        self.count = 0

    def step(self) -> TokenDelta:
        """The next token.  A prompt that begins with "seed" gives the digits of the seed, over and over."""
        text = "".join(map(chr, self.prompt))
        source = str(self.request.seed) if text.startswith("seed") else text
        token = ord(source[self.count % len(source)])
        self.count += 1
        finish = Finish("length") if self.count >= self.limit else None
        if text.startswith("model fails") and self.count == 3:
            finish = Finish("error", message="the logits are not finite", status=500)
        return TokenDelta(
            self.request.rid,
            pack_ids([token]),
            finish=finish,
            prompt_tokens=len(self.prompt),
            cached_tokens=len(text) - 1 if self.request.rid != self.request.group else 2,
            times=RequestTimes(queue=0.25) if self.count == 1 else None,
        )


def serve_scheduler(
    path: Path, context: zmq.Context[Any], front: Outbox, phases: Phases, ready: Callable[..., None]
) -> None:
    """ "scheduler dies": exits at such a prompt; "busy": rejected with 503."""
    config = read_scheduler_config(path)
    inbox: Inbox[SchedulerInbox] = Inbox(context, inbox_path(config.run_dir, "scheduler"), SchedulerInbox)
    detokenizer = Outbox(context, inbox_path(config.run_dir, "detokenizer"))
    running: dict[str, FakeRun] = {}
    aborted: list[str] = []
    output_tokens = 0
    with phases("load"):
        pass
    ready(device=config.device, pages=config.num_pages)
    while True:
        inbox.wait(TICK_SECONDS if running else None)
        for message in inbox.drain():
            match message:
                case Shutdown():
                    return
                case Generate():
                    text = "".join(map(chr, unpack_ids(message.prompt_ids)))
                    if text.startswith("scheduler dies"):
                        os._exit(9)
                    if text.startswith("busy"):
                        front.send(Rejected((message.rid,), 503, "the queue is full", None, "queue_full"))
                    elif message.rid not in aborted:
                        running[message.rid] = FakeRun(message)
                case Abort(rid=rid):
                    aborted.append(rid)
                    running.pop(rid, None)
                case Call(call_id=call_id, what=what):
                    if what == "stats":
                        front.send(stats(len(running), len(aborted), output_tokens))
                        front.send(CallReply(call_id, True))
                    elif what == "cache_tree":
                        node = CacheNode(message.tenant, -1, message.depth, message.max_nodes, b"", 0, 0, 0.0, 0)
                        detokenizer.send(CacheTree(call_id, (node,), config.page_size))
                    else:
                        front.send(CallReply(call_id, not running, "requests are running" if running else ""))
        deltas = tuple(run.step() for run in running.values())
        output_tokens += len(deltas)
        running = {delta.rid: running[delta.rid] for delta in deltas if delta.finish is None}
        if deltas:
            detokenizer.send(StepOutput(deltas))


def stats(running: int, aborts: int, output_tokens: int) -> SchedulerStats:
    """A report in which only these three numbers mean anything."""
    return SchedulerStats(running, 0, 8, 8, 0, 0, 16, 0, 0, 0, output_tokens, 0, 0, aborts, 0, 0, 0.0, 0.0)


def serve_detokenizer(
    path: Path, context: zmq.Context[Any], front: Outbox, phases: Phases, ready: Callable[..., None]
) -> None:
    """An id is a character."""
    config = read_detokenizer_config(path)
    inbox: Inbox[DetokenizerInbox] = Inbox(context, inbox_path(config.run_dir, "detokenizer"), DetokenizerInbox)
    counts: dict[str, int] = {}
    ready()
    while True:
        inbox.wait(None)
        for message in inbox.drain():
            if isinstance(message, Shutdown):
                return
            if isinstance(message, CacheTree):
                if message.nodes[0].namespace == "detokenizer dies":
                    os._exit(4)
                front.send(message)
                continue
            front.send(TextOutput(tuple(to_text(delta, counts) for delta in message.deltas)))


def to_text(delta: TokenDelta, counts: dict[str, int]) -> TextDelta:
    """The text of a delta of ids."""
    ids = unpack_ids(delta.ids)
    counts[delta.rid] = counts.get(delta.rid, 0) + len(ids)
    return TextDelta(
        rid=delta.rid,
        text="".join(map(chr, ids)),
        ids=delta.ids,
        finish=delta.finish,
        prompt_tokens=delta.prompt_tokens,
        cached_tokens=delta.cached_tokens,
        completion_tokens=counts[delta.rid],
        times=delta.times,
    )


SERVE = {"tokenizer": serve_tokenizer, "scheduler": serve_scheduler, "detokenizer": serve_detokenizer}

if __name__ == "__main__":
    sys.exit(run_worker(sys.argv[1], SERVE[sys.argv[1]], sys.argv[1:]))
