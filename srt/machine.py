"""What this machine offers: cores, memory, vector instructions, accelerators.   Read from the system, without torch."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


@dataclass(frozen=True)
class Machine:
    """`cores`: those this process may use.  `memory_bytes`: what could be taken now without swapping."""

    cores: int
    memory_bytes: int
    cpu_name: str
    cpu_flags: frozenset[str]

    @property
    def has_fast_bfloat16(self) -> bool:
        """True where the CPU multiplies bfloat16 itself; elsewhere float32 is the faster of the two."""
        return "avx512_bf16" in self.cpu_flags or "amx_bf16" in self.cpu_flags


def look_at_machine() -> Machine:
    """This machine, now."""
    name, flags = _cpu()
    return Machine(usable_cores(), available_memory(), name, flags)


def usable_cores() -> int:
    """Cores that this process may run on, no more than the container's share allows."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.strip().isdigit():
        return max(1, min(affinity, math.ceil(int(quota) / int(period))))
    return affinity


def available_memory() -> int:
    """Bytes that can be taken without swapping, no more than the container has left."""
    limits = [_system_memory()]
    limit, used = _read(CGROUP / "memory.max").strip(), _read(CGROUP / "memory.current").strip()
    if limit.isdigit() and used.isdigit():
        limits.append(max(0, int(limit) - int(used) + _reclaimable()))
    return min(limits)


def _system_memory() -> int:
    for line in _read(Path("/proc/meminfo")).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _reclaimable() -> int:
    """File pages that count as the container's use but would be given up for the asking."""
    for line in _read(CGROUP / "memory.stat").splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0


def _cpu() -> tuple[str, frozenset[str]]:
    name, flags = os.uname().machine, frozenset[str]()
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            name = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = frozenset(value.split())
        elif not line and flags:
            break
    return name, flags


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
