"""A server that has nothing to do takes next to no processor time, in any of its processes."""

from __future__ import annotations

import os
import time
from pathlib import Path

from tests.system.served import serving

WATCHED_SECONDS = 4.0
# Of one core, all processes together.  A thread that spins takes nearly all of one; measured is well below a hundredth.
MOST = 0.25


def processor_seconds(pid: int) -> float:
    """What a process has taken so far, user and system, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_an_idle_server_sleeps(tiny_model: Path, tmp_path: Path) -> None:
    with serving(tiny_model, tmp_path, "--threads", "4") as served:
        # The threads of the forward pass are there once it has run.
        assert served.request(tokens=20).status_code == 200
        pids = [served.process.pid, *served.workers().values()]
        assert len(pids) == 4
        # What ends after a reply (the cache, statistics, memory given back) is not idling.
        time.sleep(1.0)
        before = sum(map(processor_seconds, pids))
        time.sleep(WATCHED_SECONDS)
        assert sum(map(processor_seconds, pids)) - before < MOST * WATCHED_SECONDS
