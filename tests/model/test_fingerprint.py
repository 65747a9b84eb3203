"""The fingerprint of weights: another byte, another name, another model; and the memory of it is never out of date."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from srt.model import fingerprint
from srt.model.fingerprint import weights_fingerprint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 100)
    model = tmp_path / "model"
    model.mkdir()
    (model / "a.safetensors").write_bytes(bytes(range(250)))
    (model / "b.safetensors").write_bytes(b"")
    (model / "config.json").write_text("{}")
    return model


def test_every_byte_and_every_name_counts(folder: Path) -> None:
    seen = {weights_fingerprint(folder)}
    content = (folder / "a.safetensors").read_bytes()
    changes = [content[:place] + b"\xff" + content[place + 1 :] for place in range(0, 250, 10)]
    changes += [content[:-1], content + b"\0", content[100:200] + content[:100] + content[200:]]
    for change in changes:
        (folder / "a.safetensors").write_bytes(change)
        seen.add(weights_fingerprint(folder))
    (folder / "a.safetensors").write_bytes(content)
    (folder / "b.safetensors").rename(folder / "c.safetensors")
    seen.add(weights_fingerprint(folder))
    assert len(seen) == 2 + len(changes)


def test_where_the_folder_is_and_what_else_is_in_it_does_not_count(folder: Path, tmp_path: Path) -> None:
    before = weights_fingerprint(folder)
    (folder / "config.json").write_text('{"other": 1}')
    moved = folder.rename(tmp_path / "elsewhere")
    assert weights_fingerprint(moved) == before


def test_the_answer_is_remembered_until_a_file_changes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    first = weights_fingerprint(folder, notes)
    with monkeypatch.context() as patch:
        patch.setattr(fingerprint, "_digest", lambda files, threads: pytest.fail("read again"))
        assert weights_fingerprint(folder, notes) == first
    times = (folder / "a.safetensors").stat()
    (folder / "a.safetensors").write_bytes(bytes(250))
    # Whoever puts the old times back changes the time of that.
    os.utime(folder / "a.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert weights_fingerprint(folder, notes) != first


@pytest.mark.parametrize("damage", ["", "{", "[]", json.dumps({"state": "x", "fingerprint": "y"})])
def test_a_damaged_note_is_not_believed(folder: Path, tmp_path: Path, damage: str) -> None:
    notes = tmp_path / "notes"
    first = weights_fingerprint(folder, notes)
    (note,) = notes.iterdir()
    note.write_text(damage)
    assert weights_fingerprint(folder, notes) == first


def test_notes_that_cannot_be_written_are_no_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a file")
    assert weights_fingerprint(folder, tmp_path / "notes") == weights_fingerprint(folder)
