"""A folder of page files: read, write, and keep below a size.  No threads of its own; two processes may share it.

    DIR/<identity>/<first two digits>/<key>.kv         one block of pages, see radix/disk.py
    DIR/.trim.lock                                     held by whoever removes files to keep the size

- A file appears whole: it is written under another name and renamed.  So nobody ever sees half of one, and of two who
  write the same block either may win, since both write the same.
- The modification time says when a block was of use last.  The blocks of one chain get slightly older the deeper they
  are, so that what others depend on goes last.
- Only names that this file gives are ever touched.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from radix.disk import (
    CHECKSUM_BYTES,
    Block,
    Head,
    UnusableFile,
    blocks_beginning_with,
    checksum,
    decode_head,
    encode_head,
    root_key,
    verify,
)

log = logging.getLogger("sapwood.disk")

IDENTITY_NAME = re.compile(r"[0-9a-f]{32}")
SHARD_NAME = re.compile(r"[0-9a-f]{2}")
BLOCK_NAME = re.compile(r"[0-9a-f]{40}\.kv")
TEMPORARY_NAME = re.compile(r"\.[0-9a-f]{40}\.\d+\.\d+\.tmp")
# What a killed process left half written is removed when it is so old.
TEMPORARY_SECONDS = 600.0
# A folder that was changed so short a time ago may be changed again without its time showing it.
CLOCK_NANOSECONDS = 100_000_000
# Trimming goes on below the limit, so that it need not be done for every file.
TRIM_TO = 0.9
# No head is longer: identity, namespace and the tokens of one block.
MAX_HEAD_BYTES = 64 * 1024


@dataclass(slots=True)
class Shard:
    """What is known of one folder of files: its time when it was listed (-1: list it again), sizes and names."""

    changed: int = -1
    num_bytes: int = 0
    names: frozenset[str] = frozenset()


class PageFolder:
    """The files of one identity, and the size of all.  `identity`: what the bytes depend on beside the tokens.

    Reading is for any number of threads; everything else for one at a time.
    """

    def __init__(self, root: Path, identity: bytes, limit_bytes: int, clock: Callable[[], int] = time.time_ns) -> None:
        self.identity = identity
        self._root = root
        self._own = root / blake2b(identity, digest_size=16).hexdigest()
        self._limit = limit_bytes
        self._clock = clock
        self._shards: dict[str, Shard] = {}
        self.used_bytes = 0

    def path(self, key: bytes) -> Path:
        """Where the block with this key is kept."""
        name = key.hex()
        return self._own / name[:2] / f"{name}.kv"

    @property
    def num_blocks(self) -> int:
        """Files of our identity, as of the last look."""
        return sum(len(shard.names) for path, shard in self._shards.items() if path.startswith(f"{self._own}/"))

    # ---- one block -----------------------------------------------------------------------------------------------

    def read(self, block: Block, payload: memoryview) -> int:
        """Fill `payload`, which is as long as the block's, from its file.  Returns the bytes read.

        Raises UnusableFile when the file is not that block's or is damaged, and FileNotFoundError or another OSError
        when it cannot be read; `payload` may then hold anything.
        """
        expected = encode_head(self.identity, block, len(payload))
        head, stored = bytearray(len(expected)), bytearray(CHECKSUM_BYTES)
        file = os.open(self.path(block.key), os.O_RDONLY | os.O_CLOEXEC)
        try:
            size = os.fstat(file).st_size
            num_bytes = _read_all(file, [memoryview(head), memoryview(stored), payload])
        finally:
            os.close(file)
        verify(expected, bytes(head), bytes(stored), payload)
        if num_bytes != len(expected) + CHECKSUM_BYTES + len(payload) or size != num_bytes:
            raise UnusableFile(f"damaged: {size} bytes long")
        return num_bytes

    def write(self, block: Block, payload: bytes) -> int:
        """Keep a block.  Returns the bytes written, 0 when there is such a file already.  Raises OSError."""
        path = self.path(block.key)
        if path.exists():
            return 0
        head = encode_head(self.identity, block, len(payload))
        temporary = path.parent / f".{block.key.hex()}.{os.getpid()}.{threading.get_native_id()}.tmp"
        try:
            file = self._create(temporary)
            try:
                num_bytes = _write_all(file, [head, checksum(head, payload), payload])
                self._stamp(file, self._clock(), block.depth)
            finally:
                os.close(file)
            os.rename(temporary, path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        shard = self._shards.setdefault(str(path.parent), Shard())
        shard.changed = -1
        shard.num_bytes += num_bytes
        shard.names |= {path.name}
        self.used_bytes += num_bytes
        return num_bytes

    def _create(self, path: Path) -> int:
        # The tokens of prompts are in the files: they are for their owner alone.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            return os.open(path, flags, 0o600)
        except FileNotFoundError:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            return os.open(path, flags, 0o600)

    @staticmethod
    def _stamp(where: int | Path, now: int, depth: int) -> None:
        stamp = now - depth * 1000
        os.utime(where, ns=(stamp, stamp))

    def touch(self, blocks: Sequence[tuple[bytes, int]]) -> None:
        """These blocks (key, depth) were of use now.  Raises OSError; one that is gone is none."""
        now = self._clock()
        for key, depth in blocks:
            with contextlib.suppress(FileNotFoundError):
                self._stamp(self.path(key), now, depth)

    def discard(self, key: bytes) -> None:
        """Remove a file that is of no use, if that can be done: it would keep a good one from being written."""
        with contextlib.suppress(OSError):
            self.path(key).unlink()

    # ---- all of them ---------------------------------------------------------------------------------------------

    def refresh(self) -> tuple[list[bytes], list[bytes]]:
        """Look at what has changed since the last time.  Returns the keys of our identity that came and that went."""
        added: list[bytes] = []
        gone: list[bytes] = []
        found = dict(self._shard_folders())
        for path in [path for path in self._shards if path not in found]:
            found[path] = -1
        for path, changed in found.items():
            shard = self._shards.get(path, Shard())
            if changed == shard.changed and changed != -1:
                continue
            listed = self._list(path) if changed != -1 else Shard()
            # What happens within the resolution of the clock after this look must be seen by the next one.
            listed.changed = changed if self._clock() - changed > CLOCK_NANOSECONDS else -1
            if path.startswith(f"{self._own}/"):
                added += [_key(name) for name in listed.names - shard.names]
                gone += [_key(name) for name in shard.names - listed.names]
            if changed == -1 and not os.path.isdir(path):
                self._shards.pop(path, None)
            else:
                self._shards[path] = listed
        self.used_bytes = sum(shard.num_bytes for shard in self._shards.values())
        return added, gone

    def _shard_folders(self) -> Iterator[tuple[str, int]]:
        for identity in _entries(str(self._root), IDENTITY_NAME):
            for shard in _entries(identity.path, SHARD_NAME):
                with contextlib.suppress(OSError):
                    yield shard.path, shard.stat().st_mtime_ns

    def _list(self, path: str) -> Shard:
        names, total = [], 0
        for entry in _entries(path, BLOCK_NAME):
            with contextlib.suppress(OSError):
                total += entry.stat().st_size
                names.append(entry.name)
        for entry in _entries(path, TEMPORARY_NAME):
            with contextlib.suppress(OSError):
                if entry.stat().st_mtime < self._clock() / 1e9 - TEMPORARY_SECONDS:
                    os.unlink(entry.path)
        return Shard(num_bytes=total, names=frozenset(names))

    def size(self, block: Block, payload_bytes: int) -> int:
        """Bytes of a block's file."""
        return len(encode_head(self.identity, block, payload_bytes)) + CHECKSUM_BYTES + payload_bytes

    def has_room(self, num_bytes: int) -> bool:
        """Whether so much more keeps the limit.  If not, `trim` has something to do."""
        return self.used_bytes + num_bytes <= self._limit

    def trim(self, num_bytes: int = 0) -> None:
        """Remove the files that were of use longest ago until there is room for so much.  `refresh` tells which.

        Where another process does so at this moment nothing is done.  Raises OSError.
        """
        with _locked(self._root / ".trim.lock") as ours:
            if not ours:
                return
            files = []
            for path, _ in self._shard_folders():
                for entry in _entries(path, BLOCK_NAME):
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat()
                        files.append((status.st_mtime_ns, status.st_size, entry.path))
            files.sort()
            total = sum(size for _, size, _ in files)
            for _, size, path in files:
                if total <= min(self._limit * TRIM_TO, self._limit - num_bytes):
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                total -= size

    def forget_prefix(self, concerns: Callable[[str], bool], tokens: bytes) -> None:
        """Remove the files of our identity that hold what begins with packed `tokens` in a namespace that is concerned.

        Reads the head of every file.  Raises OSError.
        """
        heads: dict[str, list[Head]] = {}
        for shard in _entries(str(self._own), SHARD_NAME):
            for entry in _entries(shard.path, BLOCK_NAME):
                head = self._head(entry.path)
                if head is not None and concerns(head.namespace):
                    heads.setdefault(head.namespace, []).append(head)
        for namespace, its in heads.items():
            for key in blocks_beginning_with(its, root_key(self.identity, namespace), tokens):
                with contextlib.suppress(FileNotFoundError):
                    self.path(key).unlink()

    def _head(self, path: str) -> Head | None:
        with contextlib.suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                return decode_head(os.pread(file, MAX_HEAD_BYTES, 0), self.identity)
            finally:
                os.close(file)
        return None

    def forget(self) -> None:
        """Remove every file of our identity.  Raises OSError."""
        for shard in _entries(str(self._own), SHARD_NAME):
            for entry in _entries(shard.path, BLOCK_NAME):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(entry.path)


def _key(name: str) -> bytes:
    return bytes.fromhex(name.removesuffix(".kv"))


def _entries(path: str, pattern: re.Pattern[str]) -> Iterator[os.DirEntry[str]]:
    """What in a folder has a name of this form; nothing where the folder cannot be read."""
    try:
        with os.scandir(path) as entries:
            found = [entry for entry in entries if pattern.fullmatch(entry.name)]
    except OSError:
        return
    yield from found


def _read_all(file: int, parts: Sequence[memoryview]) -> int:
    """Fill the parts one after the other, as far as the file goes.  Returns the bytes read."""
    total = 0
    waiting = list(parts)
    while waiting:
        count = os.readv(file, waiting)
        if not count:
            break
        total += count
        while waiting and count >= len(waiting[0]):
            count -= len(waiting.pop(0))
        if waiting:
            waiting[0] = waiting[0][count:]
    return total


def _write_all(file: int, parts: Sequence[bytes]) -> int:
    total = 0
    waiting = [memoryview(part) for part in parts]
    while waiting:
        count = os.writev(file, waiting)
        total += count
        while waiting and count >= len(waiting[0]):
            count -= len(waiting.pop(0))
        if waiting:
            waiting[0] = waiting[0][count:]
    return total


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """True while we hold the lock, False where somebody else does.  Raises OSError."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(file)
