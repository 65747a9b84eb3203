"""A worker process as the launcher starts it, with the front's and the scheduler's inboxes in the test's hands."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import zmq

from srt.config import ModelFacts, RoleConfig, inbox_path, write_role_config
from srt.ipc import Inbox, Outbox
from srt.messages import FrontInbox, Ready, SchedulerInbox, Shutdown

REPOSITORY = Path(__file__).resolve().parent.parent
PATIENCE_SECONDS = 60.0


def model_facts(folder: Path, context_length: int = 2048, vocab_size: int = 512) -> ModelFacts:
    """What a worker is told of a model."""
    return ModelFacts(
        path=str(folder),
        name="tiny",
        model_type="llama",
        vocab_size=vocab_size,
        context_length=context_length,
        eos_token_ids=(2,),
    )


def new_run_dir() -> str:
    """A private folder for sockets; its path is short, since that of a socket must be."""
    return tempfile.mkdtemp(prefix="sapwood-test-")


class Worker:
    """One process of `python -m <module>`; leave the context to end it."""

    def __init__(self, module: str, role: str, config: RoleConfig) -> None:
        self.run_dir = config.run_dir
        settings = Path(self.run_dir) / f"{role}.json"
        write_role_config(config, settings)
        self._context: zmq.Context[Any] = zmq.Context()
        self._front: Inbox[Any] = Inbox(self._context, inbox_path(self.run_dir, "front"), FrontInbox)
        self._scheduler: Inbox[Any] = Inbox(self._context, inbox_path(self.run_dir, "scheduler"), SchedulerInbox)
        self._kept: dict[str, list[Any]] = {"front": [], "scheduler": []}
        read_end, self._watch_fd = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, str(settings), str(read_end)], cwd=REPOSITORY, pass_fds=[read_end]
        )
        os.close(read_end)
        self.outbox = Outbox(self._context, inbox_path(self.run_dir, role))

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.abandon()
        self.outbox.close()
        self._front.close()
        self._scheduler.close()
        self._context.destroy(linger=0)
        for file in Path(self.run_dir).glob("*") if Path(self.run_dir).exists() else ():
            file.unlink()
        if Path(self.run_dir).exists():
            Path(self.run_dir).rmdir()

    def send(self, message: msgspec.Struct) -> None:
        """A message to the worker."""
        self.outbox.send(message)

    def send_frame(self, frame: bytes) -> None:
        """Raw bytes to the worker."""
        self.outbox.socket.send(frame)

    def from_worker(self, to: str, count: int = 1) -> list[Any]:
        """The next `count` messages that the worker sent to the front or to the scheduler."""
        inbox = self._front if to == "front" else self._scheduler
        kept, deadline = self._kept[to], time.monotonic() + PATIENCE_SECONDS
        while len(kept) < count:
            assert time.monotonic() < deadline, f"{len(kept)} of {count} messages came"
            assert self.process.poll() is None or inbox.wait(0.2), f"the worker ended with {self.process.poll()}"
            if inbox.wait(0.1):
                kept.extend(inbox.drain())
        self._kept[to] = kept[count:]
        return kept[:count]

    def wait_ready(self) -> Ready:
        """The worker's first word."""
        (ready,) = self.from_worker("front")
        assert isinstance(ready, Ready), ready
        return ready

    def shut_down(self) -> int:
        """Tell the worker to leave; its exit code."""
        self.send(Shutdown())
        return self.process.wait(PATIENCE_SECONDS)

    def interrupt(self) -> None:
        """What a terminal sends to the whole process group."""
        self.process.send_signal(signal.SIGINT)
        self.process.send_signal(signal.SIGTERM)

    def abandon(self) -> None:
        """Close the pipe that says the parent lives."""
        if self._watch_fd >= 0:
            os.close(self._watch_fd)
            self._watch_fd = -1

    def resident_bytes(self) -> int:
        """Memory of the process that is in RAM now."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024

    def mapped_files(self) -> str:
        """The files that the process has mapped, libraries among them."""
        return Path(f"/proc/{self.process.pid}/maps").read_text()
