"""Starts the worker processes, notices at once when one dies, starts it again, and ends them all.

The processes are known by the names of their modules only.  A worker that dies is started again with its old
settings at its old address: at once the first time, then after growing pauses, which a minute of health resets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from srt.child import StartError
from srt.config import Role

log = logging.getLogger("sapwood.launch")

MODULES: dict[Role, str] = {
    "tokenizer": "tokenizer_proc",
    "scheduler": "scheduler",
    "detokenizer": "detokenizer_proc",
}
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 30.0
HEALTHY_SECONDS = 60.0
KILL_SECONDS = 5.0

WorkerCommand = Callable[[Role, Path, int], Sequence[str]]


def worker_command(role: Role, settings: Path, watch_fd: int) -> Sequence[str]:
    """The command line of a worker.  -P: a file in the caller's folder must not pass for one of our packages."""
    if not sys.executable:
        raise StartError("this Python does not know its own executable, so it cannot start worker processes")
    return [sys.executable, "-P", "-m", MODULES[role], str(settings), str(watch_fd)]


def pause_before_restart(failures: int) -> float:
    """Seconds to wait before a worker that has died `failures` times in a row (at least once) starts again."""
    if failures <= 1:
        return 0.0
    return min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2.0 ** min(failures - 2, 16))


def describe_exit(code: int) -> str:
    """How a process went, from its return code."""
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


@dataclass(eq=False)
class Worker:
    """The place of one worker process in the runtime, whichever process fills it at the moment.

    `up` from the moment it says Ready until it dies; `failures` counts its deaths in a row.
    """

    role: Role
    index: int
    settings: Path
    process: subprocess.Popen[bytes] | None = None
    up: bool = False
    failures: int = 0
    up_since: float = 0.0
    restart: asyncio.TimerHandle | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        """The role, with the index where there may be several."""
        return f"{self.role}-{self.index}" if self.role == "tokenizer" else self.role


class Workers:
    """All worker processes of one runtime.  To be used on one event loop."""

    def __init__(self, command: WorkerCommand, on_death: Callable[[Worker, str], None]) -> None:
        self.all: list[Worker] = []
        self._command = command
        self._on_death = on_death
        self._watch_read, self._watch_write = os.pipe()
        self._stopping = False
        self._gone = asyncio.Event()

    def launch(self, role: Role, index: int, settings: Path) -> Worker:
        """Start a worker for the first time.  Raises StartError when there can be no process at all."""
        worker = Worker(role, index, settings)
        self.all.append(worker)
        try:
            self._spawn(worker)
        except OSError as error:
            raise StartError(f"cannot start the {worker.name} process: {error}") from error
        return worker

    def _spawn(self, worker: Worker) -> None:
        # A group of its own: a Ctrl-C in the terminal is the parent's alone to deal with.
        process = subprocess.Popen(
            self._command(worker.role, worker.settings, self._watch_read),
            stdin=subprocess.DEVNULL,
            pass_fds=(self._watch_read,),
            process_group=0,
        )
        worker.process = process
        loop = asyncio.get_running_loop()

        def wait() -> None:
            code = process.wait()
            # The loop may have been closed since; then nobody is left who wants to know.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(self._exited, worker, process, code)

        threading.Thread(target=wait, name=f"wait-{worker.name}", daemon=True).start()

    def mark_up(self, role: str, index: int, pid: int) -> Worker | None:
        """Note that a process has said Ready.  None when it is not one that fills a place now."""
        for worker in self.all:
            if (
                (worker.role, worker.index) == (role, index)
                and worker.process is not None
                and worker.process.pid == pid
            ):
                worker.up = True
                worker.up_since = time.monotonic()
                return worker
        return None

    def _exited(self, worker: Worker, process: subprocess.Popen[bytes], code: int) -> None:
        if worker.process is not process:
            return
        worker.process = None
        was_up, worker.up = worker.up, False
        if self._stopping:
            if not self._present():
                self._gone.set()
            return
        if was_up and time.monotonic() - worker.up_since >= HEALTHY_SECONDS:
            worker.failures = 0
        worker.failures += 1
        pause = pause_before_restart(worker.failures)
        worker.restart = asyncio.get_running_loop().call_later(pause, self._restart, worker)
        self._on_death(worker, describe_exit(code))

    def _restart(self, worker: Worker) -> None:
        worker.restart = None
        if self._stopping:
            return
        log.info("starting the %s process again", worker.name)
        try:
            self._spawn(worker)
        except OSError as error:
            log.error("cannot start the %s process: %s", worker.name, error)
            worker.failures += 1
            pause = pause_before_restart(worker.failures)
            worker.restart = asyncio.get_running_loop().call_later(pause, self._restart, worker)

    async def stop(self, grace_seconds: float) -> None:
        """Wait for the processes, which have been told to leave, then kill those that are still there.

        Also when it is cancelled no process is left.
        """
        self._stopping = True
        for worker in self.all:
            worker.up = False
            if worker.restart is not None:
                worker.restart.cancel()
        try:
            if self._present():
                await self._wait_until_gone(grace_seconds)
        finally:
            for worker in self._present():
                assert worker.process is not None
                worker.process.kill()
            for fd in (self._watch_read, self._watch_write):
                os.close(fd)

    def _present(self) -> list[Worker]:
        return [worker for worker in self.all if worker.process is not None]

    async def _wait_until_gone(self, grace_seconds: float) -> None:
        try:
            await asyncio.wait_for(self._gone.wait(), grace_seconds)
        except TimeoutError:
            for worker in self._present():
                assert worker.process is not None
                if grace_seconds > 0.0:
                    log.warning("the %s process does not leave: killing it", worker.name)
                worker.process.kill()
            await asyncio.wait_for(self._gone.wait(), KILL_SECONDS)
