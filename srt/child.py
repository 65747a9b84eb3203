"""What every worker process does at its rim: read its settings, die with its parent, say Ready, leave on Shutdown.

A worker is started as `python -m <module> <settings.json> <watch fd>`.  The watch fd is the read end of a pipe
whose write end only the parent holds: it reads end-of-file when the parent is gone, however it went.  The
worker then removes the private run directory and leaves at once.  Workers ignore SIGINT and SIGTERM: a signal to
the whole process group must not end them before the parent has drained the requests.
"""

from __future__ import annotations

import ctypes
import logging
import os
import select
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srt.config import inbox_path
from srt.messages import Ready, StartFailed

if TYPE_CHECKING:
    import zmq

    from srt.ipc import Outbox

PARENT_POLL_SECONDS = 1.0
REMOVE_TRIES, REMOVE_PAUSE_SECONDS = 20, 0.05


class StartError(Exception):
    """A process cannot start; the message is one line for the user."""


class Phases:
    """The named parts of a start-up and how long each took, in seconds."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Time the block as phase `name`."""
        begin = time.perf_counter()
        yield
        self.taken.append((name, time.perf_counter() - begin))


def set_process_name(name: str) -> None:
    """The name that ps and top show (Linux only; elsewhere nothing happens)."""
    if sys.platform == "linux":
        pr_set_name = 15
        ctypes.CDLL(None).prctl(pr_set_name, name.encode()[:15], 0, 0, 0)


def configure_logging(level: str, role: str) -> None:
    """One line per event on standard error: time, level, role, message."""
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format=f"%(asctime)s %(levelname)-7s {role}: %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )


def remove_folder(path: Path) -> None:
    """Remove a folder that others may be removing at the same time.

    One pass is not enough then: whoever lists a folder while files leave it may be shown only a part of it.
    """
    for _ in range(REMOVE_TRIES):
        shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            return
        time.sleep(REMOVE_PAUSE_SECONDS)


def watch_parent(watch_fd: int, run_dir: str) -> None:
    """Leave at once, and remove the run directory, when the parent process is gone."""
    parent = os.getppid()

    def watch() -> None:
        while True:
            readable, _, _ = select.select([watch_fd], [], [], PARENT_POLL_SECONDS)
            if (readable and os.read(watch_fd, 1) == b"") or os.getppid() != parent:
                remove_folder(Path(run_dir))
                os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def run_worker(
    role: str,
    serve: Callable[[Path, zmq.Context[Any], Outbox, Phases, Callable[..., None]], None],
    argv: list[str],
) -> int:
    """Run one worker process to its end and return its exit code.

    `serve(settings_path, context, front, phases, ready)` does the work: it calls `ready(index, **facts)` once it can
    take messages, and returns when it was told to shut down.  A StartError (or any exception before `ready`)
    becomes a StartFailed message; an exception after it ends the process with a traceback in the log, which the
    parent notices as the death of the worker.
    """
    # Whoever only wants to raise a StartError loads no sockets.
    import zmq

    from srt.ipc import Outbox

    settings_path, watch_fd = Path(argv[1]), int(argv[2])
    run_dir = str(settings_path.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    set_process_name(f"sapwood-{role}")
    watch_parent(watch_fd, run_dir)
    context: zmq.Context[Any] = zmq.Context()
    front = Outbox(context, inbox_path(run_dir, "front"))
    phases = Phases()
    is_ready = False

    def ready(index: int = 0, **facts: str | int | float | bool) -> None:
        nonlocal is_ready
        is_ready = True
        front.send(Ready(role, index, os.getpid(), tuple(phases.taken), dict(facts)))

    code = 0
    try:
        serve(settings_path, context, front, phases, ready)
    except Exception as error:
        code = 1
        if is_ready or not isinstance(error, StartError):
            logging.getLogger("sapwood").exception("%s failed", role)
        if not is_ready:
            front.send(StartFailed(role, 0, str(error).splitlines()[0] if str(error) else type(error).__name__))
    finally:
        front.close(linger_seconds=1.0)
        context.destroy(linger=0)
    return code
