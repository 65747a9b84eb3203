"""`--record FILE`: every accepted request as one line of JSON, for `sapwood lint` and for repeating a load.

A line is {"time": seconds since 1970, "path": "/v1/chat/completions", "body": {...}}.  Keys travel in headers and are
never written.  Prompts are private: the file can be read by its owner alone.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
from starlette.requests import Request

from srt.child import StartError

log = logging.getLogger("sapwood.http")


class Recorder:
    """Appends to a file.  A disk that is full is told of once, and costs no request anything."""

    def __init__(self, path: str, clock: Callable[[], float] = time.time) -> None:
        """Raises StartError when the file cannot be written."""
        try:
            descriptor = os.open(Path(path).expanduser(), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise StartError(f"--record {path}: {error.strerror or error}") from error
        # One write for a line: several servers may append to one file.
        self._file = open(descriptor, "ab", buffering=0)  # noqa: SIM115 - it is kept
        self._clock = clock
        self._failed = False

    def write(self, path: str, body: bytes) -> None:
        """Append one request.  `body` is valid JSON."""
        head = msgspec.json.encode({"time": round(self._clock(), 3), "path": path})[:-1]
        line = b'%b,"body":%b}\n' % (head, msgspec.json.format(body, indent=-1))
        try:
            self._file.write(line)
        except OSError as error:
            if not self._failed:
                log.error("--record: requests are not recorded any more: %s", error)
            self._failed = True

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def keep_for_record(request: Request, recorder: Recorder, body: bytes) -> None:
    """Note the body of a request, which is recorded when the request has been accepted."""
    request.state.record = (recorder, body)


def accepted(request: Request) -> None:
    """The request is being worked on: record it, where that is wanted."""
    noted: tuple[Recorder, bytes] | None = getattr(request.state, "record", None)
    if noted is not None:
        noted[0].write(request.url.path, noted[1])
