"""The rim of a tokenizer process: sockets around `TokenizerCore`."""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from srt.child import Phases, configure_logging
from srt.config import inbox_path, read_tokenizer_config
from srt.ipc import Inbox, Outbox
from srt.messages import Rejected, Remember, Shutdown, TokenizerInbox
from tokenizer_proc.core import TokenizerCore
from tokenizer_proc.encode import load_encoder
from tokenizer_proc.exact import ExactHistory
from tokenizer_proc.template import load_chat_template
from tokenizer_proc.turns import how_turns_part

log = logging.getLogger("sapwood.tokenizer")

# How long to wait for new messages while a peer is too slow to take what was sent.
RETRY_SECONDS = 0.02

# Prompts beyond this size leave megabytes of freed memory behind.
LARGE_PROMPT_TOKENS = 20_000


def serve(
    settings_path: Path, context: zmq.Context[Any], front: Outbox, phases: Phases, ready: Callable[..., None]
) -> None:
    """Tokenize until told to shut down.  Raises StartError when the model folder has no usable tokenizer."""
    config = read_tokenizer_config(settings_path)
    configure_logging(config.log_level, f"tokenizer-{config.index}")
    folder = Path(config.model.path)
    with phases("tokenizer"):
        encoder = load_encoder(folder)
    with phases("chat template"):
        template = load_chat_template(folder, config.chat_template)
    exact = ExactHistory(encoder, config.history_bytes) if config.history_bytes else None
    core = TokenizerCore(encoder, template, config.model, config.max_prompt_tokens, exact)
    inbox: Inbox[TokenizerInbox] = Inbox(context, inbox_path(config.run_dir, "tokenizer", config.index), TokenizerInbox)
    scheduler = Outbox(context, inbox_path(config.run_dir, "scheduler"))
    parting = how_turns_part(template) if template.names else None
    if config.index == 0 and template.names:
        _tell_of_turns(parting)
    ready(
        config.index,
        chat_template=", ".join(template.names) or "none",
        max_prompt_tokens=config.max_prompt_tokens,
        turns_extend=parting is None,
        exact_history=exact is not None,
    )
    try:
        _loop(core, inbox, front, scheduler)
    finally:
        for socket in (inbox, scheduler):
            socket.close()


def _tell_of_turns(parting: str | None) -> None:
    """One line on whether conversations can be found in the cache turn after turn."""
    if parting is None:
        log.info("chat template: each turn is a prefix of the next, so that conversations are reused whole")
    else:
        log.warning("chat template: a turn is not a prefix of the next, so that reuse ends there: %s", parting)


def _loop(core: TokenizerCore, inbox: Inbox[TokenizerInbox], front: Outbox, scheduler: Outbox) -> None:
    while True:
        all_sent = front.flush() & scheduler.flush()
        inbox.wait(None if all_sent else RETRY_SECONDS)
        for message in inbox.drain():
            if isinstance(message, Shutdown):
                return
            if isinstance(message, Remember):
                core.remember(message)
                continue
            outcome = core.handle(message)
            for generate in outcome.generate:
                scheduler.send(generate)
            front.send(outcome.answer)
            if isinstance(outcome.answer, Rejected) or outcome.answer.prompt_tokens > LARGE_PROMPT_TOKENS:
                _give_memory_back()


def _give_memory_back() -> None:
    """Return freed memory to the system: a huge prompt would otherwise stay on this process's account for ever."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)
