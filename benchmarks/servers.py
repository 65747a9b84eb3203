"""Starts a server for a benchmark, waits until it answers, and stops it."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Server:
    """A running server."""

    base_url: str
    model: str
    started_seconds: float
    command: list[str]
    pid: int = 0
    # The server closes kept-alive connections after each stream.
    fresh_connections: bool = False


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def sapwood(model: str, *flags: str) -> Iterator[Server]:
    """`sapwood serve` of this checkout, with `flags`, until the block ends."""
    port = free_port()
    command = [sys.executable, "-m", "sapwood.cli", "serve", "--model", model, "--port", str(port)]
    command += ["--log-level", "warning", *flags]
    with running(command, port, "/health") as server:
        yield server


def end_with_parent() -> None:
    """In the new process: be sent SIGTERM when the benchmark ends, however it does (Linux: prctl)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


@contextlib.contextmanager
def running(
    command: list[str],
    port: int,
    health: str,
    patience: float = 180.0,
    environment: dict[str, str] | None = None,
    log: Path | None = None,
    fresh_connections: bool = False,
) -> Iterator[Server]:
    """Any server: started, waited for at `health`, stopped with SIGTERM and, if it stays, SIGKILL.

    It leads a session of its own, so that its workers can be told from others.  `environment` is added to this
    process's; what the server prints goes to `log` where one is given.
    """
    begin = time.perf_counter()
    with contextlib.ExitStack() as files:
        output = files.enter_context(log.open("wb")) if log else None
        process = subprocess.Popen(
            command,
            start_new_session=True,
            preexec_fn=end_with_parent,
            env=os.environ | (environment or {}),
            stdout=output,
            stderr=subprocess.STDOUT if output else None,
        )
    base_url = f"http://127.0.0.1:{port}"
    try:
        while True:
            if process.poll() is not None:
                raise RuntimeError(f"the server ended with code {process.returncode}: {' '.join(command)}")
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(base_url + health, timeout=1.0).status_code == 200:
                    break
            if time.perf_counter() - begin > patience:
                raise RuntimeError(f"no answer at {health} after {patience:.0f} s: {' '.join(command)}")
            time.sleep(0.05)
        model = httpx.get(base_url + "/v1/models", timeout=10.0).json()["data"][0]["id"]
        seconds = time.perf_counter() - begin
        yield Server(base_url, model, seconds, command, process.pid, fresh_connections)
    finally:
        process.terminate()
        try:
            process.wait(60.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(ProcessLookupError):
            # Workers that a killed server left behind.
            os.killpg(process.pid, signal.SIGKILL)
