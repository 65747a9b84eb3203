"""A fingerprint of a model's weights: every byte of them, so that no two models are ever taken for one another.

Reading a whole model takes seconds, so the answer is remembered beside the size, the times and the inode of each file.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path

# A file is digested in pieces of this size, several at a time, and then the digests of the pieces.
PIECE_BYTES = 16 * 2**20
DIGEST_BYTES = 32


def weights_fingerprint(folder: Path, remembered_in: Path | None = None, threads: int = 2) -> str:
    """A hexadecimal digest of all safetensors files in `folder`, names included.  Raises OSError.

    `remembered_in`: a folder where the answer is kept, and taken from as long as no file has changed; that this cannot
    be written is no error.
    """
    files = sorted(folder.glob("*.safetensors"))
    state = json.dumps([_state(file) for file in files])
    note = None
    if remembered_in is not None:
        note = remembered_in / f"{blake2b(state.encode(), digest_size=16).hexdigest()}.json"
        with contextlib.suppress(OSError, ValueError):
            found = json.loads(note.read_bytes())
            if isinstance(found, dict) and found.get("state") == state and isinstance(found.get("fingerprint"), str):
                return str(found["fingerprint"])
    fingerprint = _digest(files, threads)
    # What was changed while it was read must not be remembered.
    if note is not None and json.dumps([_state(file) for file in files]) == state:
        with contextlib.suppress(OSError):
            note.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            temporary = note.with_suffix(f".{os.getpid()}.tmp")
            temporary.write_text(json.dumps({"state": state, "fingerprint": fingerprint}))
            os.replace(temporary, note)
    return fingerprint


def _state(file: Path) -> list[str | int]:
    status = file.stat()
    # The time of the last change of the inode cannot be set back by who replaces a file.
    numbers = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev)
    return [str(file.resolve()), *numbers]


def _digest(files: Sequence[Path], threads: int) -> str:
    whole = blake2b(digest_size=DIGEST_BYTES)
    with ThreadPoolExecutor(threads) as pool:
        for file in files:
            size = file.stat().st_size
            pieces = pool.map(lambda start, file=file: _piece(file, start), range(0, size, PIECE_BYTES))
            whole.update(f"{len(file.name)} {file.name} {size}\n".encode())
            for piece in pieces:
                whole.update(piece)
    return whole.hexdigest()


def _piece(file: Path, start: int) -> bytes:
    with file.open("rb") as opened:
        opened.seek(start)
        return blake2b(opened.read(PIECE_BYTES), digest_size=DIGEST_BYTES).digest()
