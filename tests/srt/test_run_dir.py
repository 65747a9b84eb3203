"""The private run folder: its mode, its lock, the sweep of those left by the dead."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from srt.child import StartError
from srt.run_dir import LOCK_NAME, MAX_FOLDER_BYTES, UNLOCKED_GRACE_SECONDS, RunDir, sweep

HOLD = """
import sys, time
from srt.run_dir import RunDir
run_dir = RunDir.create()
print(run_dir.path, flush=True)
sys.stdin.read()
"""


def test_a_run_folder_is_private_and_goes_when_removed(run_base: Path) -> None:
    run_dir = RunDir.create()
    assert run_dir.path.parent == run_base
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    (run_dir.path / "front.sock").touch()
    run_dir.remove()
    run_dir.remove()
    assert os.listdir(run_base) == []


def test_folders_of_the_living_are_left_alone_and_those_of_the_killed_are_swept(run_base: Path) -> None:
    def hold() -> tuple[subprocess.Popen[str], Path]:
        process = subprocess.Popen(
            [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        return process, Path(process.stdout.readline().strip())

    living, its_folder = hold()
    killed, left_behind = hold()
    killed.kill()
    killed.communicate()
    assert left_behind.is_dir()
    run_dir = RunDir.create()
    assert its_folder.is_dir()
    assert not left_behind.exists()
    run_dir.remove()
    living.communicate()
    assert sweep(run_base) == [its_folder]
    assert os.listdir(run_base) == []


def test_the_sweep_touches_nothing_that_is_not_ours(run_base: Path) -> None:
    old = UNLOCKED_GRACE_SECONDS + 10.0
    notes = run_base / "sapwood-notes"
    notes.mkdir(mode=0o700)
    (notes / "notes.txt").touch()
    open_to_all = run_base / "sapwood-open"
    open_to_all.mkdir()
    open_to_all.chmod(0o755)
    (open_to_all / LOCK_NAME).touch()
    (run_base / "sapwood-file").touch()
    (run_base / "sapwood-link").symlink_to(notes)
    for path in run_base.iterdir():
        os.utime(path, (path.stat().st_atime - old, path.stat().st_mtime - old))
    before = sorted(os.listdir(run_base))
    assert sweep(run_base) == []
    assert sorted(os.listdir(run_base)) == before
    assert os.listdir(notes) == ["notes.txt"]


def test_an_empty_folder_is_swept_only_when_its_maker_has_had_time_to_lock_it(run_base: Path) -> None:
    folder = run_base / "sapwood-abcdefgh"
    folder.mkdir(mode=0o700)
    assert sweep(run_base) == []
    past = folder.stat().st_mtime - UNLOCKED_GRACE_SECONDS - 10.0
    os.utime(folder, (past, past))
    assert sweep(run_base) == [folder]


def test_a_base_whose_path_is_too_long_for_a_socket_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path / ("x" * MAX_FOLDER_BYTES)
    base.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    run_dir = RunDir.create()
    assert run_dir.path.parent != base
    assert len(os.fsencode(run_dir.path)) <= MAX_FOLDER_BYTES
    run_dir.remove()
    assert os.listdir(base) == []


def test_when_no_place_will_do_the_message_names_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = tmp_path / ("x" * MAX_FOLDER_BYTES)
    base.mkdir()
    monkeypatch.setattr("srt.run_dir._bases", lambda: iter([base]))
    with pytest.raises(StartError, match="too long for a socket"):
        RunDir.create()
