"""The lower tier's files and threads: implements `scheduler.tier_protocol.TierIO` over a `PageFolder`.

    reader threads   file -> buffer -> checked -> pages -> event       several, in the order of the loads
    writer thread    pages -> file -> event; keeps the folder's size, looks what other processes have changed

The work of a thread is a method that does one piece of it, so that a test can do it by hand, in any order.  Whatever
goes wrong with a file is an event and at most one line in the log: nothing is raised to anybody.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from radix.disk import Block, UnusableFile
from scheduler.page_folder import PageFolder
from scheduler.tier_protocol import BlockLoaded, BlockSaved, Concerns, FilesChanged, FilesForgotten, TierEvent
from srt.plan import PageMemory

log = logging.getLogger("sapwood.disk")

T = TypeVar("T")

MAX_READERS = 4
# The folder is looked at again after this, and after so many times the time that the last look took.
REFRESH_SECONDS = 5.0
REFRESH_PAUSES = 50
# After a failure nothing is written for this long.
RETRY_SECONDS = 5.0
# At shutdown, how long the writer may go on.
CLOSE_SECONDS = 5.0


class _Read(NamedTuple):
    load_id: int
    place: int
    block: Block
    pages: Sequence[int]


class _Save(NamedTuple):
    save_id: int
    block: Block
    pages: Sequence[int]


class _Touch(NamedTuple):
    blocks: Sequence[tuple[bytes, int]]


class _Forget(NamedTuple):
    """Remove what begins with these tokens in such namespaces; None: everything."""

    concerns: Concerns | None
    tokens: bytes


class Wake:
    """A file descriptor that becomes readable when `set` is called, from any thread, until `clear` is."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Spares `clear` a system call.  True only after the byte is there, so that none is left behind unseen.
        self._is_set = False

    def set(self) -> None:
        """Make `fd` readable."""
        try:
            os.write(self._write, b"\0")
        except BlockingIOError:
            # It is full, so it is readable.
            pass
        self._is_set = True

    def clear(self) -> None:
        """Make `fd` unreadable until the next `set`."""
        if not self._is_set:
            return
        self._is_set = False
        try:
            while os.read(self.fd, 4096):
                pass
        except BlockingIOError:
            pass

    def close(self) -> None:
        """Close both ends; nobody may use it any more."""
        os.close(self.fd)
        os.close(self._write)


class TierFiles:
    """See the head of the file.  `block_pages`: pages of a block; `wake` is set when there is an event to poll."""

    def __init__(
        self,
        folder: PageFolder,
        memory: PageMemory,
        block_pages: int,
        readers: int,
        wake: Wake | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.readers = min(readers, MAX_READERS)
        self._wake = wake
        self._folder = folder
        self._memory = memory
        self._block_bytes = block_pages * memory.page_bytes
        self._clock = clock
        self._events: deque[TierEvent] = deque()
        self._lock = threading.Lock()
        self._more_reads = threading.Condition(self._lock)
        self._more_writes = threading.Condition(self._lock)
        self._reads: deque[_Read] = deque()
        self._writes: deque[_Save | _Touch | _Forget] = deque()
        # What cannot be done to the folder at present, and when writing may be tried again.
        self._failing: set[str] = set()
        self._retry_at = 0.0
        self._refresh_at = 0.0
        self._stopping = False
        self._threads: list[threading.Thread] = []
        self.refresh()

    @property
    def num_blocks(self) -> int:
        """Blocks of our identity that have a file."""
        return self._folder.num_blocks

    # ---- from the scheduler's side -------------------------------------------------------------------------------

    def poll(self) -> list[TierEvent]:
        """See TierIO."""
        if self._wake is not None:
            self._wake.clear()
        events = []
        while self._events:
            events.append(self._events.popleft())
        return events

    def load(self, load_id: int, blocks: Sequence[Block], pages: Sequence[Sequence[int]]) -> None:
        """See TierIO."""
        with self._lock:
            self._reads += [
                _Read(load_id, place, block, its) for place, (block, its) in enumerate(zip(blocks, pages, strict=True))
            ]
            self._more_reads.notify(len(blocks))

    def cancel(self, load_id: int) -> None:
        """See TierIO."""
        with self._lock:
            dropped = [read for read in self._reads if read.load_id == load_id]
            if dropped:
                self._reads = deque(read for read in self._reads if read.load_id != load_id)
        for read in dropped:
            self._tell(BlockLoaded(load_id, read.place, ok=False))

    def save(self, save_id: int, block: Block, pages: Sequence[int]) -> None:
        """See TierIO."""
        self._put(_Save(save_id, block, pages))

    def drop_saves(self) -> list[int]:
        """See TierIO."""
        with self._lock:
            dropped = [job.save_id for job in self._writes if isinstance(job, _Save)]
            self._writes = deque(job for job in self._writes if not isinstance(job, _Save))
        return dropped

    def touch(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """See TierIO."""
        self._put(_Touch(blocks))

    def forget(self, concerns: Concerns | None = None, tokens: bytes = b"") -> None:
        """See TierIO."""
        self._put(_Forget(concerns, tokens))

    def _put(self, job: _Save | _Touch | _Forget) -> None:
        with self._lock:
            self._writes.append(job)
            self._more_writes.notify()

    # ---- threads -------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the threads.  They do not keep a process alive."""
        targets = [self._read_on] * self.readers + [self._write_on]
        self._threads = [threading.Thread(target=target, name="disk", daemon=True) for target in targets]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Write what waits to be written, for a short time, and end the threads."""
        with self._lock:
            self._stopping = True
            self._reads.clear()
            self._more_reads.notify_all()
            self._more_writes.notify_all()
        deadline = time.monotonic() + CLOSE_SECONDS
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _read_on(self) -> None:
        buffer = memoryview(bytearray(self._block_bytes))
        while True:
            with self._lock:
                while not self._reads and not self._stopping:
                    self._more_reads.wait()
                if self._stopping:
                    return
            self.read_one(buffer)

    def _write_on(self) -> None:
        while True:
            with self._lock:
                if not self._writes and not self._stopping:
                    self._more_writes.wait(max(0.0, self._refresh_at - self._clock()))
                if self._stopping and not self._writes:
                    return
            if not self.write_one():
                self.refresh()

    # ---- reading -------------------------------------------------------------------------------------------------

    def read_one(self, buffer: memoryview | None = None) -> bool:
        """Read the next block into its pages.  False when there is none."""
        with self._lock:
            if not self._reads:
                return False
            read = self._reads.popleft()
        payload = memoryview(bytearray(self._block_bytes)) if buffer is None else buffer
        self._tell(self._load_block(read, payload))
        return True

    def _load_block(self, read: _Read, payload: memoryview) -> BlockLoaded:
        begin = self._clock()
        path = self._folder.path(read.block.key)
        try:
            num_bytes = self._folder.read(read.block, payload)
            size = self._memory.page_bytes
            for index, page in enumerate(read.pages):
                self._memory.write_page(page, payload[index * size : (index + 1) * size])
        except FileNotFoundError:
            # Another process, or we ourselves, removed it to keep the size.
            return BlockLoaded(read.load_id, read.place, ok=False, missing=True)
        except UnusableFile as error:
            log.warning("%s is not used and removed: %s", path, error)
            self._folder.discard(read.block.key)
            return BlockLoaded(read.load_id, read.place, ok=False, missing=True, error=True)
        except Exception as error:
            log.warning("%s cannot be read: %s", path, error)
            return BlockLoaded(read.load_id, read.place, ok=False, missing=True, error=True)
        seconds = self._clock() - begin
        return BlockLoaded(read.load_id, read.place, ok=True, num_bytes=num_bytes, seconds=seconds)

    def _tell(self, event: TierEvent) -> None:
        self._events.append(event)
        if self._wake is not None:
            self._wake.set()

    # ---- writing -------------------------------------------------------------------------------------------------

    def write_one(self) -> bool:
        """Do the next job of the writer.  False when there is none."""
        with self._lock:
            if not self._writes:
                return False
            job = self._writes.popleft()
        if isinstance(job, _Save):
            self._tell(self._save_block(job))
        elif isinstance(job, _Touch):
            self._guarded("mark files in", lambda: self._folder.touch(job.blocks))
        else:
            self._guarded("remove files from", lambda: self._forget(job))
            self.refresh()
            self._tell(FilesForgotten())
        return True

    def _forget(self, job: _Forget) -> None:
        if job.concerns is None:
            self._folder.forget()
        else:
            self._folder.forget_prefix(job.concerns, job.tokens)

    def _save_block(self, save: _Save) -> BlockSaved:
        if self._clock() < self._retry_at or not self._make_room(save.block):
            return BlockSaved(save.save_id, ok=False)
        written = self._guarded("write to", lambda: self._write_block(save))
        if written is None:
            self._retry_at = self._clock() + RETRY_SECONDS
            return BlockSaved(save.save_id, ok=False, error=True)
        return BlockSaved(save.save_id, ok=True, num_bytes=written)

    def _write_block(self, save: _Save) -> int:
        payload = b"".join(self._memory.read_page(page) for page in save.pages)
        return self._folder.write(save.block, payload)

    def _make_room(self, block: Block) -> bool:
        """Keep the size of the folder, this block included.  False when that cannot be done now."""
        size = self._folder.size(block, self._block_bytes)
        if not self._folder.has_room(size):
            self._guarded("keep the size of", lambda: self._folder.trim(size))
            self.refresh()
        return self._folder.has_room(size)

    def _guarded(self, what: str, action: Callable[[], T]) -> T | None:
        """Do something to the folder.  None when it failed; the log is told when that begins and when it is over."""
        try:
            result = action()
        except Exception as error:
            if what not in self._failing:
                log.error("cannot %s the disk cache; serving goes on: %s", what, error)
            self._failing.add(what)
            return None
        if what in self._failing:
            self._failing.remove(what)
            log.warning("it is possible again to %s the disk cache", what)
        return result

    def refresh(self) -> None:
        """Look at what has changed in the folder, and tell it."""
        begin = self._clock()
        added, gone = self._folder.refresh()
        self._refresh_at = self._clock() + max(REFRESH_SECONDS, REFRESH_PAUSES * (self._clock() - begin))
        if added or gone:
            self._tell(FilesChanged(added, gone, self._folder.used_bytes))
