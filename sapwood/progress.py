"""A progress bar on standard error: one line that redraws itself on a terminal, few plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO

BAR_WIDTH = 28
REDRAW_SECONDS = 0.1


class ProgressBar:
    """Shows how many of `total` bytes are done; use as a context manager."""

    def __init__(self, label: str, total: int, stream: TextIO | None = None) -> None:
        self._label = label
        self._total = max(total, 1)
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._begin = time.monotonic()
        self._next_draw = 0.0
        self._done = 0

    def __enter__(self) -> ProgressBar:
        if not self._terminal:
            self._write(f"{self._label}: {self._total / 1e6:.0f} MB\n")
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        if self._terminal:
            self._draw()
            self._write("\n")
        elif error is None:
            self._write(f"{self._label}: done in {time.monotonic() - self._begin:.1f} s\n")

    def update(self, done: int) -> None:
        """`done` bytes are there now; a number that falls back, as when a file is moved, is not shown."""
        self._done = max(self._done, min(done, self._total))
        now = time.monotonic()
        if self._terminal and now >= self._next_draw:
            self._next_draw = now + REDRAW_SECONDS
            self._draw()

    def _draw(self) -> None:
        share = self._done / self._total
        filled = int(share * BAR_WIDTH)
        rate = self._done / 1e6 / max(time.monotonic() - self._begin, 1e-3)
        bar = "#" * filled + "-" * (BAR_WIDTH - filled)
        self._write(f"\r{self._label} [{bar}] {share:4.0%}  {self._done / 1e6:.1f} MB  {rate:.1f} MB/s ")

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
