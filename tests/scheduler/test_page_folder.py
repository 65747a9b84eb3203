"""The folder of page files: whole files only, below its size, shared by several processes."""

from __future__ import annotations

import errno
import os
import stat
from array import array
from pathlib import Path

import pytest

from radix.disk import Block, BlockChain, UnusableFile
from scheduler.page_folder import PageFolder

PAYLOAD = bytes(range(256)) * 4
SECOND = 10**9


class Time:
    """A clock to be set."""

    def __init__(self) -> None:
        self.now = 1_700_000_000 * SECOND

    def __call__(self) -> int:
        """Nanoseconds."""
        return self.now


def chain(first: int = 0, count: int = 4, identity: bytes = b"me") -> list[Block]:
    tokens = array("i", [first, *range(1, 2 * count)]).tobytes()
    keys = BlockChain(identity, "", 2)
    return [keys.block(tokens, depth) for depth in range(count)]


def read(folder: PageFolder, block: Block) -> bytes:
    payload = memoryview(bytearray(len(PAYLOAD)))
    folder.read(block, payload)
    return bytes(payload)


def has(folder: PageFolder, block: Block) -> bool:
    return folder.path(block.key).exists()


def test_a_block_comes_back_as_it_was_written(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, b"me", 10**6)
    (block, *_) = chain()
    written = folder.write(block, PAYLOAD)
    assert read(folder, block) == PAYLOAD
    assert folder.path(block.key).stat().st_size == written == folder.used_bytes
    assert folder.write(block, PAYLOAD) == 0, "it is there already"


def test_prompts_are_for_their_owner_alone(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path / "new", b"me", 10**6)
    (block, *_) = chain()
    folder.write(block, PAYLOAD)
    path = folder.path(block.key)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("more", [b"", b"x", PAYLOAD])
def test_a_file_of_another_length_is_unusable(tmp_path: Path, more: bytes) -> None:
    folder = PageFolder(tmp_path, b"me", 10**6)
    (block, *_) = chain()
    folder.write(block, PAYLOAD)
    path = folder.path(block.key)
    path.write_bytes(path.read_bytes() + more if more else path.read_bytes()[:-1])
    with pytest.raises(UnusableFile):
        read(folder, block)


def test_a_file_cut_short_is_unusable_though_the_buffer_holds_its_rest_from_before(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, b"me", 10**6)
    (block, *_) = chain()
    folder.write(block, PAYLOAD)
    buffer = memoryview(bytearray(len(PAYLOAD)))
    folder.read(block, buffer)
    os.truncate(folder.path(block.key), folder.path(block.key).stat().st_size - 100)
    with pytest.raises(UnusableFile):
        folder.read(block, buffer)


def test_another_identity_has_other_files(tmp_path: Path) -> None:
    mine, other = PageFolder(tmp_path, b"me", 10**6), PageFolder(tmp_path, b"you", 10**6)
    (block, *_) = chain()
    mine.write(block, PAYLOAD)
    assert not has(other, block)
    other.path(block.key).parent.mkdir(parents=True)
    mine.path(block.key).rename(other.path(block.key))
    with pytest.raises(UnusableFile, match="another model"):
        read(other, block)


def test_what_others_write_and_remove_is_seen_by_the_next_look(tmp_path: Path) -> None:
    mine, other = PageFolder(tmp_path, b"me", 10**6), PageFolder(tmp_path, b"me", 10**6)
    blocks = chain()
    assert mine.refresh() == ([], [])
    for block in blocks:
        other.write(block, PAYLOAD)
    added, gone = mine.refresh()
    assert (sorted(added), gone) == (sorted(block.key for block in blocks), [])
    assert mine.used_bytes == other.used_bytes
    assert mine.num_blocks == 4
    assert mine.refresh() == ([], [])
    other.discard(blocks[2].key)
    assert mine.refresh() == ([], [blocks[2].key])
    other.forget()
    added, gone = mine.refresh()
    assert (added, len(gone), mine.used_bytes) == ([], 3, 0)


def test_what_one_wrote_itself_is_no_news(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, b"me", 10**6)
    for block in chain():
        folder.write(block, PAYLOAD)
    assert folder.refresh() == ([], [])
    folder.trim()
    assert folder.refresh() == ([], [])


def test_the_size_of_all_identities_counts_but_only_their_keys_are_told(tmp_path: Path) -> None:
    PageFolder(tmp_path, b"you", 10**6).write(chain()[0], PAYLOAD)
    folder = PageFolder(tmp_path, b"me", 10**6)
    assert folder.refresh() == ([], [])
    assert folder.used_bytes > len(PAYLOAD)


def test_the_files_that_were_of_use_longest_ago_go_first(tmp_path: Path) -> None:
    time = Time()
    folder = PageFolder(tmp_path, b"me", 10**6, clock=time)
    old, young = chain(1), chain(2)
    for blocks in (old, young):
        for block in blocks:
            folder.write(block, PAYLOAD)
        time.now += SECOND
    size = folder.used_bytes // 8
    folder.touch([(old[0].key, 0), (old[1].key, 1)])
    small = PageFolder(tmp_path, b"me", 7 * size, clock=time)
    small.refresh()
    assert not small.has_room(1)
    small.trim()
    assert [has(small, block) for block in old] == [True, True, False, False]
    _, gone = small.refresh()
    assert sorted(gone) == sorted(block.key for block in old[2:])
    assert small.has_room(size)


def test_of_one_chain_the_deepest_goes_first(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, b"me", 10**6, clock=Time())
    blocks = chain()
    for block in blocks:
        folder.write(block, PAYLOAD)
    small = PageFolder(tmp_path, b"me", folder.used_bytes // 4 * 3, clock=Time())
    small.trim()
    assert [has(small, block) for block in blocks] == [True, True, False, False]


def test_only_one_process_trims_at_a_time(tmp_path: Path) -> None:
    import fcntl

    folder = PageFolder(tmp_path, b"me", 1)
    (block, *_) = chain()
    folder.write(block, PAYLOAD)
    with (tmp_path / ".trim.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        folder.trim()
        assert has(folder, block)
    folder.trim()
    assert not has(folder, block)


def test_what_is_not_ours_is_never_touched(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, b"me", 1)
    (block, *_) = chain()
    folder.write(block, PAYLOAD)
    others = [
        tmp_path / "notes.txt",
        tmp_path / "deadbeef" / "00" / ("0" * 40 + ".kv"),
        folder.path(block.key).parent / "x.kv",
        folder.path(block.key).parent.parent / "readme",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(PAYLOAD)
    folder.refresh()
    folder.trim()
    folder.forget()
    assert not has(folder, block)
    assert all(path.exists() for path in others)


def test_what_a_killed_writer_left_is_removed_when_it_is_old(tmp_path: Path) -> None:
    folder = PageFolder(tmp_path, b"me", 10**6)
    (block, *_) = chain()
    folder.write(block, PAYLOAD)
    left, young = (folder.path(block.key).parent / f".{'0' * 40}.{pid}.1.tmp" for pid in (1, 2))
    for path in (left, young):
        path.write_bytes(b"half")
    os.utime(left, (1, 1))
    PageFolder(tmp_path, b"me", 10**6).refresh()
    assert (left.exists(), young.exists()) == (False, True)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PageFolder(tmp_path, b"me", 10**6)
    first, second, *_ = chain()
    folder.write(first, PAYLOAD)
    used = folder.used_bytes

    def full(file: int, parts: list[memoryview]) -> int:
        os.write(file, b"the beginning")
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", full)
        with pytest.raises(OSError, match="no space"):
            folder.write(second, PAYLOAD)
    assert folder.used_bytes == used
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [folder.path(first.key)]
    assert read(folder, first) == PAYLOAD


def test_short_reads_and_writes_are_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = PageFolder(tmp_path, b"me", 10**6)
    (block, *_) = chain()
    monkeypatch.setattr(os, "writev", lambda file, parts: os.write(file, parts[0][:7]))

    def short(file: int, parts: list[memoryview]) -> int:
        data = os.read(file, min(7, len(parts[0])))
        parts[0][: len(data)] = data
        return len(data)

    monkeypatch.setattr(os, "readv", short)
    folder.write(block, PAYLOAD)
    assert read(folder, block) == PAYLOAD
