"""What the system says of this machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from srt import machine


def test_this_machine_has_cores_and_memory() -> None:
    here = machine.look_at_machine()
    assert 1 <= here.cores <= (os.cpu_count() or 1)
    assert 0 < here.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert here.cpu_name


@pytest.fixture
def cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("srt.machine.CGROUP", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("quota", "at_most"), [("50000 100000", 1), ("max 100000", 10_000), ("nonsense", 10_000), ("100000 100000", 1)]
)
def test_a_container_gives_no_more_cores_than_its_quota(cgroup: Path, quota: str, at_most: int) -> None:
    (cgroup / "cpu.max").write_text(quota)
    assert 1 <= machine.usable_cores() <= at_most


def test_a_container_gives_no_more_memory_than_its_limit_leaves(cgroup: Path) -> None:
    (cgroup / "memory.max").write_text("9000000\n")
    (cgroup / "memory.current").write_text("5000000\n")
    (cgroup / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    assert machine.available_memory() == 5_000_000
    (cgroup / "memory.max").write_text("max\n")
    assert machine.available_memory() > 5_000_000
