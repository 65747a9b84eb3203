"""A front on an event loop of its own, in a thread of its own: what the in-process Engine stands on.

No signal handler is touched.  The thread is a daemon, so that it never keeps an interpreter from ending; what is
still open then is stopped before the interpreter goes.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import uvloop

from srt.front import Front
from srt.launch import WorkerCommand, worker_command
from srt.resolve import Resolved

log = logging.getLogger("sapwood.engine")

ResultT = TypeVar("ResultT")


class FrontThread:
    """Starts the front when made, and returns when it is ready.  Raises StartError when it cannot be."""

    def __init__(self, resolved: Resolved, command: WorkerCommand = worker_command) -> None:
        self._pid = os.getpid()
        self._stopping = False
        # Reentrant, since the garbage collector may end a stream or an engine while this thread is in `submit`.
        self._lock = threading.RLock()
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name="sapwood-front", daemon=True)
        self._thread.start()
        atexit.register(self.stop)
        self.front = Front(resolved, command)
        try:
            self.run(self.front.start())
        except BaseException:
            self.stop()
            raise

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()
            atexit.unregister(self.stop)

    def submit(self, coroutine: Coroutine[Any, Any, ResultT]) -> Future[ResultT]:
        """Run a coroutine on the front's loop.  Raises RuntimeError when the thread has been stopped."""
        with self._lock:
            if self._stopping or self._pid != os.getpid():
                coroutine.close()
                raise RuntimeError("the engine has been shut down, or belongs to another process")
            return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, ResultT]) -> ResultT:
        """Run a coroutine on the front's loop and wait for it.  An interrupt while waiting cancels it."""
        future = self.submit(coroutine)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop_soon(self) -> None:
        """Begin to end every request, every process and the thread.  Again, or in a forked child: nothing."""
        with self._lock:
            if not self._stopping and self._pid == os.getpid():
                self._stopping = True
                asyncio.run_coroutine_threadsafe(self._stop_front(), self._loop)

    def stop(self) -> None:
        """The same, and wait until it is done."""
        self.stop_soon()
        if self._pid == os.getpid() and threading.current_thread() is not self._thread:
            self._thread.join()

    async def _stop_front(self) -> None:
        try:
            await self.front.stop()
            await self._end_tasks()
        except Exception:
            log.exception("the engine did not stop cleanly")
        finally:
            self._loop.stop()

    async def _end_tasks(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
