"""What a restart costs: time to first token of a long head, cold, from memory, and from disk after kill -9.

    python -m benchmarks.restart --model smollm2 --head 4000

Every run has a head of its own: it is sent cold, again with another ending (warm, from memory), then the server and
its workers are killed with SIGKILL and started again on the same folder, and the very first request has the head and a
third ending (from disk).  Medians are printed with their ratios, and the cached tokens of every request are checked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from benchmarks.client import Client, Reply
from benchmarks.servers import Server, free_port

# How long the server may take to start, and pages to reach the disk.
PATIENCE = 300.0
TAIL_TOKENS = 8


class Killable:
    """A server in a process group of its own."""

    def __init__(self, model: str, *flags: str) -> None:
        port = free_port()
        self.command = [sys.executable, "-m", "sapwood.cli", "serve", "--model", model, "--port", str(port)]
        self.command += ["--log-level", "warning", *flags]
        begin = time.perf_counter()
        self._process = subprocess.Popen(self.command, start_new_session=True, stdout=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{port}"
        while True:
            try:
                name = httpx.get(f"{url}/v1/models", timeout=5.0).json()["data"][0]["id"]
                break
            except httpx.HTTPError:
                if self._process.poll() is not None or time.perf_counter() - begin > PATIENCE:
                    raise RuntimeError(f"no server: {' '.join(self.command)}") from None
                time.sleep(0.05)
        self.server = Server(url, name, time.perf_counter() - begin, self.command)

    def scheduler(self) -> dict[str, float]:
        """The scheduler's last report."""
        report: dict[str, float] = httpx.get(f"{self.server.base_url}/server_info", timeout=60.0).json()["scheduler"]
        return report

    def kill(self) -> None:
        """SIGKILL to all of it, and wait for the end of the parent."""
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def ask(server: Server, prompt: list[int]) -> Reply:
    """One request.  Raises RuntimeError when it fails."""

    async def drive() -> Reply:
        client = Client(server.base_url, server.model)
        try:
            return await client.complete(prompt, 2)
        finally:
            await client.close()

    reply = asyncio.run(drive())
    if reply.error:
        raise RuntimeError(reply.error)
    return reply


def wait_until_written(served: Killable) -> None:
    """Until the files of the folder have stayed as many for a second."""
    before, since = -1.0, time.perf_counter()
    begin = since
    while time.perf_counter() - since < 1.0 and time.perf_counter() - begin < PATIENCE:
        blocks = served.scheduler()["disk_blocks"]
        if blocks != before:
            before, since = blocks, time.perf_counter()
        time.sleep(0.1)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--head", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("flags", nargs="*", help="more flags for the server, after --")
    arguments = parser.parse_args()
    randomness = random.Random(7)
    times: dict[str, list[float]] = {"cold": [], "memory": [], "disk": []}
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--disk-cache-dir", folder, *arguments.flags]
        served = Killable(arguments.model, *flags)
        print("server:", " ".join(served.command[1:]))
        try:
            for run in range(arguments.runs):
                head = [randomness.randrange(1000, 20_000) for _ in range(arguments.head)]
                tails = [[randomness.randrange(1000, 20_000) for _ in range(TAIL_TOKENS)] for _ in range(3)]
                cold = ask(served.server, head + tails[0])
                memory = ask(served.server, head + tails[1])
                wait_until_written(served)
                served.kill()
                served = Killable(arguments.model, *flags)
                disk = ask(served.server, head + tails[2])
                report = served.scheduler()
                for name, reply in (("cold", cold), ("memory", memory), ("disk", disk)):
                    times[name].append(reply.first_token)
                print(
                    f"run {run + 1}: cold {cold.first_token:.3f} s, memory {memory.first_token:.3f} s "
                    f"({memory.cached_tokens} cached), disk {disk.first_token:.3f} s ({disk.cached_tokens} cached, "
                    f"{report['disk_tokens']:.0f} from disk, {report['disk_read_bytes'] / 1e6:.0f} MB read); "
                    f"start {served.server.started_seconds:.1f} s"
                )
                assert cold.cached_tokens < 16 <= arguments.head <= memory.cached_tokens
                assert disk.cached_tokens >= arguments.head // 16 * 16
                assert report["disk_tokens"] == disk.cached_tokens
            size = sum(path.stat().st_size for path in Path(folder).rglob("*.kv"))
            print(f"{size / 1e6:.0f} MB on disk for {arguments.runs} heads")
        finally:
            served.kill()
    cold_s, memory_s, disk_s = (statistics.median(times[name]) for name in ("cold", "memory", "disk"))
    print(f"medians of {arguments.runs}: cold {cold_s:.3f} s, memory {memory_s:.3f} s, disk {disk_s:.3f} s")
    print(f"disk / memory: {disk_s / memory_s:.2f}   cold / disk: {cold_s / disk_s:.1f}")


if __name__ == "__main__":
    main()
