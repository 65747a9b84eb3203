"""Seconds from start to the first answer, and from the death of each worker to the next answer; memory of each process.

python -m benchmarks.startup --model smollm2
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path

import httpx

from benchmarks.servers import free_port, sapwood


def answered(base_url: str) -> bool:
    """Whether one short request is answered now."""
    try:
        body = {"text": "The capital of France is", "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
        return httpx.post(base_url + "/generate", json=body, timeout=30.0).status_code == 200
    except httpx.HTTPError:
        return False


def until_answered(base_url: str, begin: float) -> float:
    """Seconds since `begin` when a request is answered."""
    while not answered(base_url):
        if time.perf_counter() - begin > 120:
            raise RuntimeError("no answer for two minutes")
        time.sleep(0.02)
    return time.perf_counter() - begin


def first_answer(model: str) -> float:
    """Start a server with its default settings, ask, stop it."""
    port = free_port()
    command = [sys.executable, "-m", "sapwood.cli", "serve", "--model", model, "--port", str(port)]
    begin = time.perf_counter()
    process = subprocess.Popen([*command, "--log-level", "warning"], stdout=subprocess.DEVNULL)
    try:
        return until_answered(f"http://127.0.0.1:{port}", begin)
    finally:
        process.terminate()
        process.wait()


def pids(base_url: str) -> dict[str, int]:
    """Process id of each worker."""
    workers = httpx.get(base_url + "/server_info").json()["workers"]
    return {name: worker["pid"] for name, worker in workers.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--runs", type=int, default=5)
    arguments = parser.parse_args()
    times = [first_answer(arguments.model) for _ in range(arguments.runs)]
    print(f"start to first answer: median {statistics.median(times):.2f} s of {[round(t, 2) for t in times]}")
    with sapwood(arguments.model) as server:
        until_answered(server.base_url, time.perf_counter())
        for name, pid in pids(server.base_url).items():
            resident = int(Path(f"/proc/{pid}/status").read_text().split("VmRSS:")[1].split()[0]) / 1024
            print(f"{name}: {resident:.0f} MB resident")
        for name in pids(server.base_url):
            recoveries = []
            for _ in range(arguments.runs):
                os.kill(pids(server.base_url)[name], signal.SIGKILL)
                recoveries.append(until_answered(server.base_url, time.perf_counter()))
                time.sleep(1.0)
            print(f"kill -9 of {name}: next answer after {statistics.median(recoveries):.2f} s (median)")


if __name__ == "__main__":
    main()
