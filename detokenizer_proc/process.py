"""The rim of the detokenizer process: sockets around `DetokenizerCore`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from detokenizer_proc.core import DetokenizerCore
from detokenizer_proc.vocabulary import vocabulary_of
from srt.cache_messages import CacheTree
from srt.child import Phases, StartError, configure_logging
from srt.config import inbox_path, read_detokenizer_config
from srt.ipc import Inbox, Outbox
from srt.messages import DetokenizerInbox, Shutdown
from srt.tokenizer_file import parse_tokenizer_file, read_tokenizer_file

# How long to wait for new messages while a peer is too slow to take what was sent.
RETRY_SECONDS = 0.02


def serve(
    settings_path: Path, context: zmq.Context[Any], front: Outbox, phases: Phases, ready: Callable[..., None]
) -> None:
    """Detokenize until told to shut down.  Raises StartError when the model folder has no usable tokenizer."""
    config = read_detokenizer_config(settings_path)
    configure_logging(config.log_level, "detokenizer")
    with phases("tokenizer"):
        core = make_core(Path(config.model.path))
    inbox: Inbox[DetokenizerInbox] = Inbox(context, inbox_path(config.run_dir, "detokenizer"), DetokenizerInbox)
    scheduler = Outbox(context, inbox_path(config.run_dir, "scheduler"))
    ready(0, decoding="bytes" if core.byte_level else "windows")
    try:
        _loop(core, inbox, front, scheduler)
    finally:
        for socket in (inbox, scheduler):
            socket.close()


def make_core(model_path: Path) -> DetokenizerCore:
    """The core for a model folder.  Only tokenizers that are not byte-level need the `tokenizers` library here."""
    content = read_tokenizer_file(model_path)
    vocabulary = vocabulary_of(parse_tokenizer_file(content))
    return DetokenizerCore(vocabulary, None if vocabulary.byte_level else _decode_function(content))


def _decode_function(tokenizer_json: bytes) -> Callable[[Sequence[int]], str]:
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:
        raise StartError(f"tokenizer.json cannot be read: {error}") from error

    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    return decode


def _loop(core: DetokenizerCore, inbox: Inbox[DetokenizerInbox], front: Outbox, scheduler: Outbox) -> None:
    while True:
        all_sent = front.flush() & scheduler.flush()
        inbox.wait(None if all_sent else RETRY_SECONDS)
        for message in inbox.drain():
            if isinstance(message, Shutdown):
                return
            if isinstance(message, CacheTree):
                front.send(core.tree(message))
                continue
            texts, stops = core.step(message)
            # Every token that the scheduler computes beyond a stop is wasted, so it hears first.
            for stop in stops:
                scheduler.send(stop)
            if texts.deltas:
                front.send(texts)
