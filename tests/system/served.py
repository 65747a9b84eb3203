"""A real `sapwood serve` in a process of its own, with the means to watch it, load it and hurt it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.servers import end_with_parent

# What prctl leaves of the workers' names.
WORKERS = {"scheduler": "sapwood-schedul", "tokenizer": "sapwood-tokeniz", "detokenizer": "sapwood-detoken"}
GENEROUS_SECONDS = 60.0


def wait_until(condition: Callable[[], bool], seconds: float = GENEROUS_SECONDS) -> None:
    """Wait for something to become true; the limit only keeps a broken test from hanging."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def process_state(pid: int) -> tuple[str, str, int] | None:
    """(name, state letter, parent's pid), or None when there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    state, parent = rest.split()[:2]
    return name, state, int(parent)


def is_alive(pid: int) -> bool:
    """True for a process that runs (one that waits to be reaped has ended)."""
    state = process_state(pid)
    return state is not None and state[1] != "Z"


@dataclass
class Streamed:
    """What one streaming client got: text, finish reason, and the error that ended it if one did."""

    text: str = ""
    finish: str | None = None
    error: dict[str, Any] | None = None
    status: int = 0
    done: bool = False
    begun: asyncio.Event = field(default_factory=asyncio.Event)


class Served:
    """A running server.  `base`: where its run folder is; nothing else is there."""

    def __init__(self, model: Path, base: Path, *flags: str, port: int = 0) -> None:
        self.base = base
        environment = {**os.environ, "XDG_RUNTIME_DIR": str(base), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "sapwood.cli", "serve", "--model", str(model), "--port", str(port),
                "--threads", "1", "--max-total-tokens", "16384", "--log-level", "warning", *flags,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,
            preexec_fn=end_with_parent,
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Returns when it serves; then `url`, `port` and `workers` are known."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("Sapwood serves "), f"{line!r} {self.process.communicate()}"
        self.url = line.split(" at ")[1].split()[0]
        self.port = int(self.url.rsplit(":", 1)[1])

    def workers(self) -> dict[str, int]:
        """Role -> pid of each worker that is there."""
        found = {}
        for entry in Path("/proc").iterdir():
            state = process_state(int(entry.name)) if entry.name.isdigit() else None
            if state is not None and state[2] == self.process.pid and state[1] != "Z":
                found.update({role: int(entry.name) for role, name in WORKERS.items() if name == state[0]})
        return found

    def request(self, prompt: str = "Hello", tokens: int = 5) -> httpx.Response:
        """One whole completion."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=GENEROUS_SECONDS)

    def is_whole(self) -> bool:
        """True when nothing runs or waits and every page of the pool is accounted for and unlocked."""
        info = httpx.get(f"{self.url}/server_info", timeout=GENEROUS_SECONDS).json()["scheduler"]
        whole = info["pages_free"] + info["pages_cached"] == info["pages_total"]
        return bool(whole and info["running"] == info["waiting"] == info["pages_in_use"] == 0)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the parent alone."""
        os.kill(self.process.pid, number)

    def end(self) -> tuple[int, str]:
        """Wait for the end: exit code and what stands on standard error."""
        _, errors = self.process.communicate(timeout=GENEROUS_SECONDS)
        return self.process.returncode, errors

    def assert_nothing_is_left(self, pids: Sequence[int]) -> None:
        """No process, no file."""
        wait_until(lambda: not any(is_alive(pid) for pid in pids))
        wait_until(lambda: os.listdir(self.base) == [])


@contextmanager
def serving(model: Path, base: Path, *flags: str, port: int = 0) -> Iterator[Served]:
    """A server that is ready; killed at the end if it still runs."""
    served = Served(model, base, *flags, port=port)
    try:
        served.wait_until_ready()
        yield served
    finally:
        served.process.kill()
        served.process.communicate()


@contextmanager
def empty_cache(served: Served) -> Iterator[httpx.Client]:
    """A client before an empty cache."""
    with httpx.Client(base_url=served.url, timeout=120) as client:
        assert client.post("/flush_cache").status_code == 200
        yield client


async def stream(client: httpx.AsyncClient, url: str, prompt: str, tokens: int, result: Streamed) -> None:
    """Stream one completion to its end, whatever that is."""
    try:
        await _stream(client, url, prompt, tokens, result)
    except httpx.HTTPError as error:
        result.error = {"message": f"connection lost: {error}", "code": "connection_lost"}
    result.begun.set()


async def _stream(client: httpx.AsyncClient, url: str, prompt: str, tokens: int, result: Streamed) -> None:
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", f"{url}/v1/completions", json=body) as reply:
        result.status = reply.status_code
        if reply.status_code != 200:
            await reply.aread()
            result.error = reply.json()["error"]
            return
        async for line in reply.aiter_lines():
            if line == "data: [DONE]":
                result.done = True
            elif line.startswith("data: "):
                take(json.loads(line.removeprefix("data: ")), result)


def take(chunk: dict[str, Any], result: Streamed) -> None:
    """Add one event of a stream."""
    if "error" in chunk:
        result.error = chunk["error"]
    for choice in chunk.get("choices", ()):
        result.text += choice["text"]
        result.finish = choice["finish_reason"] or result.finish
    result.begun.set()


async def load(served: Served, count: int, tokens: int, when_flowing: Callable[[], Any]) -> list[Streamed]:
    """Run `count` streams; call `when_flowing` once each has got something; return when all have ended."""
    async with httpx.AsyncClient(timeout=GENEROUS_SECONDS) as client:
        results = [Streamed() for _ in range(count)]
        tasks = [
            asyncio.create_task(stream(client, served.url, f"Stream number {index}", tokens, result))
            for index, result in enumerate(results)
        ]
        await asyncio.gather(*(result.begun.wait() for result in results))
        await asyncio.to_thread(when_flowing)
        await asyncio.gather(*tasks)
        return results
