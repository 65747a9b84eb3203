"""The disk tier's threads and files: events for everything, failures counted and told once, never raised."""

from __future__ import annotations

import errno
import logging
import os
import select
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from radix.disk import Block, BlockChain
from scheduler.page_folder import PageFolder
from scheduler.tier_io import RETRY_SECONDS, TierFiles, Wake
from scheduler.tier_protocol import BlockLoaded, BlockSaved, FilesChanged, FilesForgotten, TierEvent

PAGE_BYTES = 64
PATIENCE = 20.0


class Memory:
    """Pages of their own number, each byte."""

    page_bytes = PAGE_BYTES
    layout = "bytes"

    def __init__(self) -> None:
        self.pages = {page: bytes([page]) * PAGE_BYTES for page in range(100)}

    def read_page(self, page: int) -> bytes:
        """See PageMemory."""
        return self.pages[page]

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """See PageMemory."""
        self.pages[page] = bytes(data)


class Time:
    """A clock to be set."""

    now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


def chain(count: int = 5) -> list[Block]:
    keys = BlockChain(b"me", "", 4)
    return [keys.block(array("i", range(4 * count)).tobytes(), depth) for depth in range(count)]


def files(
    folder: Path, limit: int = 10**6, wake: Wake | None = None, clock: Callable[[], float] | None = None
) -> TierFiles:
    made = TierFiles(PageFolder(folder, b"me", limit), Memory(), 2, 2, wake, clock or Time())
    made.poll()
    return made


def wait_for(tier: TierFiles, wake: Wake, count: int) -> list[TierEvent]:
    """Events, as the loop gets them: only when the descriptor says that there are any."""
    events: list[TierEvent] = []
    deadline = time.monotonic() + PATIENCE
    while len(events) < count:
        assert select.select([wake.fd], [], [], max(0.0, deadline - time.monotonic()))[0], "nobody woke us"
        events += tier.poll()
    return events


def test_threads_write_and_read_and_wake_whoever_waits(tmp_path: Path) -> None:
    wake = Wake()
    tier = files(tmp_path, wake=wake, clock=time.monotonic)
    tier.start()
    blocks = chain()
    for place, block in enumerate(blocks):
        tier.save(place, block, [2 * place, 2 * place + 1])
    saved = wait_for(tier, wake, 5)
    assert [(event.save_id, event.ok) for event in saved if isinstance(event, BlockSaved)] == [
        (i, True) for i in range(5)
    ]
    tier.load(7, blocks, [[50 + 2 * place, 51 + 2 * place] for place in range(5)])
    loaded = wait_for(tier, wake, 5)
    assert sorted((event.place, event.ok) for event in loaded if isinstance(event, BlockLoaded)) == [
        (i, True) for i in range(5)
    ]
    memory = tier._memory
    assert [memory.read_page(50 + page) for page in range(10)] == [memory.read_page(page) for page in range(10)]
    tier.close()
    assert not any(thread.is_alive() for thread in tier._threads)
    tier.poll()
    assert not select.select([wake.fd], [], [], 0)[0], "nothing is left to wake for"
    wake.close()


def test_closing_writes_what_waits_to_be_written(tmp_path: Path) -> None:
    tier = files(tmp_path, clock=time.monotonic)
    blocks = chain()
    for place, block in enumerate(blocks):
        tier.save(place, block, [0, 1])
    tier.start()
    tier.close()
    assert len(list(tmp_path.rglob("*.kv"))) == 5


def test_a_cancelled_load_ends_with_an_event_for_each_block(tmp_path: Path) -> None:
    tier = files(tmp_path)
    tier.load(1, chain(), [[0, 1]] * 5)
    tier.load(2, chain(2), [[0, 1]] * 2)
    tier.read_one()
    tier.cancel(1)
    tier.read_one()
    tier.read_one()
    assert not tier.read_one()
    assert [(event.load_id, event.place, event.missing) for event in tier.poll() if isinstance(event, BlockLoaded)] == [
        (1, 0, True), (1, 1, False), (1, 2, False), (1, 3, False), (1, 4, False), (2, 0, True), (2, 1, True),
    ]  # fmt: skip


def test_dropped_saves_leave_no_event_and_no_file(tmp_path: Path) -> None:
    tier = files(tmp_path)
    first, second, third, *_ = chain()
    tier.save(1, first, [0, 1])
    tier.write_one()
    tier.save(2, second, [0, 1])
    tier.touch([(first.key, 0)])
    tier.save(3, third, [0, 1])
    assert tier.drop_saves() == [2, 3]
    while tier.write_one():
        pass
    assert [event.save_id for event in tier.poll() if isinstance(event, BlockSaved)] == [1]
    assert len(list(tmp_path.rglob("*.kv"))) == 1


def test_a_damaged_file_is_an_error_a_line_and_gone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = files(tmp_path)
    (block, *_) = chain()
    tier.save(1, block, [0, 1])
    tier.write_one()
    (path,) = tmp_path.rglob("*.kv")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    tier.poll()
    tier.load(1, [block], [[2, 3]])
    tier.read_one()
    (event,) = tier.poll()
    assert event == BlockLoaded(1, 0, ok=False, missing=True, error=True)
    assert "damaged" in caplog.text
    assert not path.exists()
    tier.save(2, block, [0, 1])
    tier.write_one()
    assert path.exists()


def test_a_file_that_is_gone_is_a_miss_and_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = files(tmp_path)
    tier.load(1, chain(1), [[2, 3]])
    tier.read_one()
    assert tier.poll() == [BlockLoaded(1, 0, ok=False, missing=True)]
    assert not caplog.text


def test_what_cannot_be_read_is_an_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = files(tmp_path)
    (block, *_) = chain()
    tier._folder.path(block.key).mkdir(parents=True)
    tier.load(1, [block], [[2, 3]])
    tier.read_one()
    assert tier.poll() == [BlockLoaded(1, 0, ok=False, missing=True, error=True)]
    assert "cannot be read" in caplog.text


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_a_disk_that_takes_nothing_is_told_once_and_tried_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    clock = Time()
    tier = files(tmp_path, clock=clock)
    blocks = chain()

    def fail(*arguments: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "writev", fail)
        for place in range(3):
            tier.save(place, blocks[place], [0, 1])
            tier.write_one()
        assert tier.poll() == [
            BlockSaved(0, ok=False, error=True),
            BlockSaved(1, ok=False),
            BlockSaved(2, ok=False),
        ]
        clock.now += RETRY_SECONDS
        tier.save(3, blocks[3], [0, 1])
        tier.write_one()
        assert tier.poll() == [BlockSaved(3, ok=False, error=True)]
    assert len(caplog.records) == 1
    assert os.strerror(number) in caplog.text
    clock.now += RETRY_SECONDS
    caplog.clear()
    caplog.set_level(logging.WARNING)
    tier.save(4, blocks[4], [0, 1])
    tier.write_one()
    (event,) = tier.poll()
    assert isinstance(event, BlockSaved)
    assert event.ok
    assert "possible again" in caplog.text


def test_a_folder_that_became_a_file_is_an_error_and_no_crash(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tier = files(tmp_path / "pages")
    (tmp_path / "pages").write_bytes(b"")
    (block, *_) = chain()
    tier.save(1, block, [0, 1])
    tier.touch([(block.key, 0)])
    tier.forget()
    while tier.write_one():
        pass
    assert tier.poll() == [BlockSaved(1, ok=False, error=True), FilesForgotten()]


def test_the_size_is_kept_and_what_went_is_told(tmp_path: Path) -> None:
    tier = files(tmp_path, limit=1000)
    blocks = chain()
    for place, block in enumerate(blocks):
        tier.save(place, block, [0, 1])
        tier.write_one()
        assert sum(path.stat().st_size for path in tmp_path.rglob("*.kv")) <= 1000
    events = tier.poll()
    assert all(event.ok for event in events if isinstance(event, BlockSaved))
    gone = {key for event in events if isinstance(event, FilesChanged) for key in event.gone}
    there = {bytes.fromhex(path.stem) for path in tmp_path.rglob("*.kv")}
    assert there | gone == {block.key for block in blocks}
    assert there
    assert not there & gone


def test_a_limit_below_one_block_keeps_nothing(tmp_path: Path) -> None:
    tier = files(tmp_path, limit=10)
    tier.save(1, chain()[0], [0, 1])
    tier.write_one()
    assert tier.poll() == [BlockSaved(1, ok=False)]
    assert not list(tmp_path.rglob("*.kv"))


def test_two_writers_of_the_same_blocks_leave_whole_files(tmp_path: Path) -> None:
    blocks = chain(40)
    pair = [files(tmp_path, clock=time.monotonic) for _ in range(2)]
    for place, block in enumerate(blocks):
        for tier in pair:
            tier.save(place, block, [place, place + 1])
    for tier in pair:
        tier.start()
    for tier in pair:
        tier.close()
        assert all(event.ok for event in tier.poll() if isinstance(event, BlockSaved))
    assert not list(tmp_path.rglob("*.tmp"))
    reader = files(tmp_path)
    reader.load(1, blocks, [[98, 99]] * 40)
    for place in range(40):
        assert reader.read_one()
        assert reader._memory.read_page(98) == bytes([place]) * PAGE_BYTES
    assert all(event.ok for event in reader.poll() if isinstance(event, BlockLoaded))


def test_what_is_there_at_the_start_is_told_first(tmp_path: Path) -> None:
    earlier = files(tmp_path)
    blocks = chain()
    for place, block in enumerate(blocks):
        earlier.save(place, block, [0, 1])
        earlier.write_one()
    tier = TierFiles(PageFolder(tmp_path, b"me", 10**6), Memory(), 2, 1)
    (event,) = tier.poll()
    assert isinstance(event, FilesChanged)
    assert set(event.added) == {block.key for block in blocks}
    assert tier.num_blocks == 5
