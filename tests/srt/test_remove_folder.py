"""A run folder goes whole, however many remove it at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from srt.child import remove_folder


def test_a_folder_that_many_remove_at_once_is_gone(tmp_path: Path) -> None:
    for attempt in range(30):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        for name in range(20):
            (folder / f"{name}.sock").touch()
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(remove_folder, [folder] * 8))
        assert not folder.exists()


def test_a_folder_that_is_not_there_is_nothing_to_remove(tmp_path: Path) -> None:
    remove_folder(tmp_path / "never")
