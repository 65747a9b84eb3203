"""The worker processes with the wires to them and the folder they meet in: made together, gone together."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from srt.child import StartError
from srt.config import write_role_config
from srt.launch import Worker, WorkerCommand, Workers
from srt.messages import FrontInbox, Ready, Shutdown, StartFailed, TextOutput
from srt.resolve import Resolved
from srt.run_dir import RunDir
from srt.wires import Place, Wires

log = logging.getLogger("sapwood.runtime")

# A process that cannot start sends its reason before it ends, but its end may be noticed first.
REASON_SECONDS = 0.5
SCHEDULER: Place = ("scheduler", 0)
DETOKENIZER: Place = ("detokenizer", 0)


@dataclass(frozen=True)
class Listener:
    """What the owner of a runtime is told, on the event loop.

    `message`: anything a worker sends but Ready and StartFailed.  `died`: a worker that was up is gone, and how it
    went; it is being started again.  `up`: a worker that was gone is back.
    """

    message: Callable[[FrontInbox], None]
    died: Callable[[Worker, str], None]
    up: Callable[[Worker], None]


class Runtime:
    """Make one with `start`; `stop` gives everything back."""

    def __init__(self, resolved: Resolved, command: WorkerCommand, listener: Listener) -> None:
        self.start_phases: list[tuple[str, float]] = []
        self.worker_facts: dict[str, dict[str, str | int | float | bool]] = {}
        self._resolved = resolved
        self._listener = listener
        self._run_dir = RunDir.create()
        try:
            self._wires = Wires(str(self._run_dir.path), self._on_message)
        except BaseException:
            self._run_dir.remove()
            raise
        self._workers = Workers(command, self._on_death)
        self._all_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(cls, resolved: Resolved, command: WorkerCommand, listener: Listener) -> Runtime:
        """Start every process and wait until all are ready.  Raises StartError; nothing is left then."""
        begin = time.perf_counter()
        runtime = cls(resolved, command, listener)
        try:
            runtime._launch_all()
            runtime.start_phases.append(("processes started", time.perf_counter() - begin))
            await runtime._all_ready
        except BaseException:
            await runtime.stop(grace_seconds=0.0)
            raise
        runtime.start_phases.append(("all ready", time.perf_counter() - begin))
        return runtime

    def _launch_all(self) -> None:
        for role, index, settings in self._resolved.role_configs(str(self._run_dir.path)):
            path = self._run_dir.path / f"{role}-{index}.json"
            write_role_config(settings, path)
            self._wires.open((role, index))
            self._workers.launch(role, index, path)

    @property
    def workers(self) -> list[Worker]:
        """Every place, filled or not."""
        return self._workers.all

    def is_up(self, place: Place) -> bool:
        """True when the process at that place can take messages."""
        return any((worker.role, worker.index) == place and worker.up for worker in self._workers.all)

    def ready_tokenizers(self) -> list[Worker]:
        """The tokenizers that can take prompts."""
        return [worker for worker in self._workers.all if worker.role == "tokenizer" and worker.up]

    def send(self, place: Place, message: msgspec.Struct) -> None:
        """Send to the process at that place; while none is there, the message waits for the next."""
        self._wires.send(place, message)

    def _on_message(self, message: FrontInbox) -> None:
        match message:
            case TextOutput():
                # First, since it is what nearly all are.
                self._listener.message(message)
            case Ready():
                self._on_ready(message)
            case StartFailed(role=role, message=reason):
                if self._all_ready.done():
                    log.error("the %s process cannot start: %s", role, reason)
                else:
                    self._all_ready.set_exception(StartError(reason))
            case _:
                self._listener.message(message)

    def _on_ready(self, ready: Ready) -> None:
        worker = self._workers.mark_up(ready.role, ready.index, ready.pid)
        if worker is None:
            return
        self.worker_facts[worker.name] = ready.facts
        if self._all_ready.done():
            log.info("the %s process is up again", worker.name)
            self._listener.up(worker)
            return
        self.start_phases += [(f"{worker.name}: {name}", seconds) for name, seconds in ready.phases]
        if all(worker.up for worker in self._workers.all):
            self._all_ready.set_result(None)

    def _on_death(self, worker: Worker, how: str) -> None:
        if not self._all_ready.done():
            asyncio.get_running_loop().call_later(REASON_SECONDS, self._start_failed, worker, how)
            return
        log.error("the %s process died (%s)", worker.name, how)
        self._wires.open((worker.role, worker.index))
        self._listener.died(worker, how)

    def _start_failed(self, worker: Worker, how: str) -> None:
        if not self._all_ready.done():
            message = f"the {worker.name} process ended while starting ({how}); what it said stands above"
            self._all_ready.set_exception(StartError(message))

    async def stop(self, grace_seconds: float) -> None:
        """Tell the processes to leave, end by force those that stay longer, remove every file."""
        if not self._all_ready.done():
            self._all_ready.cancel()
        elif not self._all_ready.cancelled():
            self._all_ready.exception()
        for worker in self._workers.all:
            self._wires.send((worker.role, worker.index), Shutdown())
        try:
            await self._workers.stop(grace_seconds)
        finally:
            self._wires.close()
            self._run_dir.remove()
