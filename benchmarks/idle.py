"""What a server without work takes: percent of one core, for each process and together.

    python -m benchmarks.idle --model smollm2

Processor time from /proc, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.servers import free_port
from benchmarks.startup import pids, until_answered


def processor_seconds(pid: int) -> float:
    """User and system time of a process, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Start a server, ask it once, watch it sleep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    port = free_port()
    command = [sys.executable, "-m", "sapwood.cli", "serve", "--model", arguments.model, "--port", str(port)]
    process = subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.DEVNULL)
    try:
        url = f"http://127.0.0.1:{port}"
        until_answered(url, time.perf_counter())
        watched = {"front": process.pid, **pids(url)}
        time.sleep(3.0)
        before, begin = {name: processor_seconds(pid) for name, pid in watched.items()}, time.perf_counter()
        time.sleep(arguments.seconds)
        seconds = time.perf_counter() - begin
        taken = {name: processor_seconds(pid) - before[name] for name, pid in watched.items()}
    finally:
        process.terminate()
        process.wait()
    for name, cpu in taken.items():
        print(f"{name:<12} {100 * cpu / seconds:5.2f} % of a core")
    print(f"{'together':<12} {100 * sum(taken.values()) / seconds:5.2f} % over {seconds:.0f} s")


if __name__ == "__main__":
    main()
