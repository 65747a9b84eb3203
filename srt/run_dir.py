"""The private folder that a runtime's sockets and settings live in, and the sweep of those left by the dead.

The parent holds an exclusive lock on the folder's lock file as long as it lives.  So a folder whose lock can be
taken has lost its parent, however that went, and may be removed by whoever starts next.
"""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from srt.child import StartError, remove_folder

PREFIX = "sapwood-"
LOCK_NAME = "sapwood.lock"
# The path of a Unix socket has at most 107 bytes; the longest name in the folder is tokenizer-NNN.sock.
MAX_FOLDER_BYTES = 107 - len("/tokenizer-999.sock")
# A folder without a lock file is either being made at this moment or was left by a parent that died doing so.
UNLOCKED_GRACE_SECONDS = 60.0


class RunDir:
    """A folder of mode 0700 with a lock held.  `remove` gives both back."""

    def __init__(self, path: Path, lock_fd: int) -> None:
        self.path = path
        self._lock_fd = lock_fd

    @classmethod
    def create(cls) -> RunDir:
        """Make one under XDG_RUNTIME_DIR or the temporary folder, after sweeping what the dead have left there.

        Raises StartError when no place will do.
        """
        problems = []
        for base in _bases():
            try:
                sweep(base)
                run_dir = _try_create(base)
            except OSError as error:
                problems.append(f"{base}: {error.strerror or error}")
                continue
            if run_dir is not None:
                return run_dir
            problems.append(f"{base}: the path is too long for a socket")
        raise StartError("no place for the run folder: " + "; ".join(problems))

    def remove(self) -> None:
        """Remove the folder and let the lock go.  Again: nothing."""
        if self._lock_fd < 0:
            return
        remove_folder(self.path)
        os.close(self._lock_fd)
        self._lock_fd = -1


def _bases() -> Iterator[Path]:
    seen = set()
    for name in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        if name and name not in seen and os.path.isdir(name):
            seen.add(name)
            yield Path(name)


def _try_create(base: Path) -> RunDir | None:
    """A new locked folder, or None where its path would be too long."""
    while True:
        path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        if len(os.fsencode(path)) > MAX_FOLDER_BYTES:
            path.rmdir()
            return None
        lock_fd = _take_lock(path)
        if lock_fd is not None:
            return RunDir(path, lock_fd)


def _take_lock(path: Path) -> int | None:
    """The held lock of a folder, or None when somebody else holds it or has removed it meanwhile."""
    try:
        lock_fd = os.open(path / LOCK_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(lock_fd).st_ino == os.stat(path / LOCK_NAME).st_ino:
            return lock_fd
    except OSError:
        pass
    os.close(lock_fd)
    return None


def sweep(base: Path) -> list[Path]:
    """Remove this user's run folders whose parent is gone; returns those removed."""
    removed = []
    for path in sorted(base.glob(f"{PREFIX}*")):
        lock_fd = _take_lock(path) if _may_be_ours(path) else None
        if lock_fd is not None:
            remove_folder(path)
            os.close(lock_fd)
            removed.append(path)
    return removed


def _may_be_ours(path: Path) -> bool:
    """True for a folder that looks like one of ours.  Somebody's own folder of that name is never touched: ours has
    the lock file, or nothing at all when its maker died before it made one."""
    try:
        about = path.lstat()
        if not stat.S_ISDIR(about.st_mode) or stat.S_IMODE(about.st_mode) != 0o700 or about.st_uid != os.getuid():
            return False
        if (path / LOCK_NAME).exists():
            return True
        return time.time() - about.st_mtime > UNLOCKED_GRACE_SECONDS and not any(path.iterdir())
    except OSError:
        return False
