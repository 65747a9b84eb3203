"""A model's tokenizer and chat template without a server: one tokenizer process, as the server has it, and no more.

What it says of a prompt is what the server would do with it, to the token, since it is the same process.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import zmq
from tokenizers import Tokenizer

from srt.answer import RequestFailed
from srt.child import StartError
from srt.config import TokenizerConfig, inbox_path, write_role_config
from srt.ipc import Inbox, Outbox
from srt.launch import worker_command
from srt.messages import (
    ChatPrompt,
    FrontInbox,
    IdsPrompt,
    Ready,
    Rejected,
    Shutdown,
    StartFailed,
    TextPrompt,
    TokenizeCall,
    Tokenized,
    unpack_ids,
)
from srt.model.config import UnsupportedModel, read_model_facts
from srt.run_dir import RunDir

# No prompt is too long to be looked at.
NO_LIMIT = 2**31 - 2
# Nothing for so long means that the process hangs.
PATIENCE_SECONDS = 60.0
STOP_SECONDS = 5.0


@dataclass(frozen=True)
class PromptTokens:
    """A prompt's ids; `message_starts`, for a chat: the token at which each message begins, and what follows them."""

    ids: list[int]
    message_starts: list[int]


class OfflineTokenizer:
    """Ends its process when the context is left.  Raises StartError when the model folder has no usable tokenizer."""

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        try:
            facts = read_model_facts(folder, folder.name)
        except UnsupportedModel as error:
            raise StartError(str(error)) from error
        self._folder = folder
        self._decoder: Tokenizer | None = None
        self._run_dir = RunDir.create()
        run_dir = str(self._run_dir.path)
        self._context: zmq.Context[Any] = zmq.Context()
        self._inbox: Inbox[FrontInbox] = Inbox(self._context, inbox_path(run_dir, "front"), FrontInbox)
        self._outbox = Outbox(self._context, inbox_path(run_dir, "tokenizer", 0))
        config = TokenizerConfig(
            run_dir=run_dir,
            index=0,
            model=facts,
            max_prompt_tokens=NO_LIMIT,
            chat_template=chat_template,
            log_level="error",
        )
        settings = self._run_dir.path / "tokenizer-0.json"
        write_role_config(config, settings)
        watch_read, self._watch_write = os.pipe()
        self._process = subprocess.Popen(
            worker_command("tokenizer", settings, watch_read), stdin=subprocess.DEVNULL, pass_fds=(watch_read,)
        )
        os.close(watch_read)

    def __enter__(self) -> OfflineTokenizer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the process and remove its folder."""
        self._outbox.send(Shutdown())
        try:
            self._process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._watch_write)
        self._inbox.close()
        self._outbox.close()
        self._context.destroy(linger=0)
        self._run_dir.remove()

    def tokenize(self, prompts: Sequence[TextPrompt | IdsPrompt | ChatPrompt]) -> list[PromptTokens | RequestFailed]:
        """For each prompt its tokens, or why it has none.  Raises StartError when the process ends or hangs."""
        found: dict[int, PromptTokens | RequestFailed] = {}
        for place, prompt in enumerate(prompts):
            if isinstance(prompt, IdsPrompt):
                found[place] = PromptTokens(unpack_ids(prompt.ids), [])
            else:
                self._outbox.send(TokenizeCall(str(place), prompt))
        while len(found) < len(prompts):
            self._receive(found)
        return [found[place] for place in range(len(prompts))]

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens included."""
        if self._decoder is None:
            self._decoder = Tokenizer.from_file(str(self._folder / "tokenizer.json"))
        return str(self._decoder.decode(list(ids), skip_special_tokens=False))

    def _receive(self, found: dict[int, PromptTokens | RequestFailed]) -> None:
        """Take what has come, and wait for it if nothing has."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._inbox.wait(0.1):
            self._outbox.flush()
            if self._process.poll() is not None and not self._inbox.wait(0.0):
                raise StartError(f"the tokenizer process ended with code {self._process.returncode}")
            if time.monotonic() > deadline:
                raise StartError("the tokenizer process does not answer")
        for message in self._inbox.drain():
            match message:
                case StartFailed(message=reason):
                    raise StartError(reason)
                case Tokenized(rids=(place,), ids=ids, message_starts=starts):
                    found[int(place)] = PromptTokens(unpack_ids(ids or b""), unpack_ids(starts))
                case Rejected(rids=(place,)):
                    found[int(place)] = RequestFailed(message.status, message.message, message.param, message.code)
                case Ready():
                    self._outbox.flush()
