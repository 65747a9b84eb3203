"""Lines of text that are hard to tokenize and to stream: the repository's own, and a larger data folder's."""

from __future__ import annotations

from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"


def sample_lines() -> list[str]:
    """The lines that come with the repository."""
    return (DATA / "text_samples.txt").read_text(encoding="utf-8").split("\n")


def all_lines(shared_data: Path | None) -> list[str]:
    """Those lines and, where there is a data folder beside the repository, every line of its hardest texts."""
    lines = sample_lines()
    for name in ("mixed_100k.txt", "emoji_sequences.txt") if shared_data is not None else ():
        lines += (Path(str(shared_data)) / "unicode" / name).read_text(encoding="utf-8").split("\n")
    return lines
