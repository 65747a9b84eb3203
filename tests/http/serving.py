"""The whole server, started as its users start it, on a port that the system chooses."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.http.strict_metrics import Scrape, parse

START_SECONDS = 120.0


class Served:
    """A running server."""

    def __init__(self, url: str, process: subprocess.Popen[str]) -> None:
        self.url = url
        self.process = process

    def scrape(self) -> Scrape:
        """The metrics."""
        return parse(httpx.get(f"{self.url}/metrics", timeout=30).text)

    def until_idle(self) -> Scrape:
        """Wait until nothing runs or waits and every page is free or cached; fail when that does not come."""
        found = Scrape()
        for _ in range(300):
            found = self.scrape()
            names = ("num_open_requests", "num_running_reqs", "num_queue_reqs", "pages_in_use")
            if not any(found.value(f"sapwood_{name}") for name in names):
                break
            time.sleep(0.1)
        else:
            raise AssertionError(f"the server does not come to rest: {found.samples}")
        free, cached = found.value("sapwood_pages_free"), found.value("sapwood_pages_cached")
        assert free + cached == found.value("sapwood_pages_total"), found.samples
        return found


@contextmanager
def serving(model: Path, *flags: str) -> Iterator[Served]:
    """`sapwood serve` with a model and more flags, until the block ends; then it must leave with exit code 0."""
    command = [sys.executable, "-m", "sapwood.cli", "serve", "--model", str(model), "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.search(r"http://\S+", line)
        assert found, f"the server did not start: {line!r}"
        yield Served(found.group(), process)
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()
