"""The scheduler over a folder of page files, while reading is slow, files are damaged and removed, and it is killed.

The oracle's KV is the tokens themselves: a wrong page from disk would be a wrong token in some output.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import precondition, rule

from tests.scheduler.bench import Bench
from tests.scheduler.test_core_stateful import HEADS, SchedulerMachine

MEMORY_FOLDER = Path("/dev/shm")


class TierMachine(SchedulerMachine):
    """As without a disk: every request ends once with the right tokens, and nothing leaks."""

    def begin(self) -> None:
        if not hasattr(self, "folder"):
            self.folder = Path(tempfile.mkdtemp(dir=MEMORY_FOLDER if MEMORY_FOLDER.is_dir() else None))
            self.settings["disk"] = self.folder
            self.settings["block_pages"] = 1 + int(self.mean) % 3
            self.keep_heads()
        super().begin()
        self.bench.disk_works = False

    def keep_heads(self) -> None:
        """A server was here before that knew the beginnings of most prompts."""
        if self.settings["use_cache"]:
            known = Bench(**{**self.settings, "pages": 100})  # type: ignore[arg-type]
            for number, head in enumerate(HEADS):
                known.send(str(number), head, 1)
            known.run()
            known.finish_disk()

    @rule(reads=st.integers(0, 8), writes=st.integers(0, 8))
    def the_disk_works(self, reads: int, writes: int) -> None:
        assert self.bench.files is not None
        for _ in range(reads):
            self.bench.files.read_one()
        for _ in range(writes):
            self.bench.files.write_one()

    @rule()
    def the_disk_does_all_it_has_to_do(self) -> None:
        self.bench.finish_disk()

    @rule(seconds=st.sampled_from([1.0, 20.0]))
    def time_passes(self, seconds: float) -> None:
        self.bench.now += seconds

    @rule(seconds=st.sampled_from([0.0, 1e-6, 1e-3, 1.0]))
    def a_block_takes_so_long_to_read(self, seconds: float) -> None:
        self.bench.disk_tick = seconds

    @rule()
    def the_folder_is_looked_at(self) -> None:
        assert self.bench.files is not None
        self.bench.files.refresh()

    def files(self) -> list[Path]:
        return sorted(self.folder.rglob("*.kv"))

    @precondition(lambda self: self.files())
    @rule(data=st.data(), how=st.sampled_from(["flip", "cut", "remove", "swap", "empty"]))
    def a_file_is_damaged(self, data: st.DataObject, how: str) -> None:
        path = data.draw(st.sampled_from(self.files()))
        content = path.read_bytes()
        if how == "remove":
            path.unlink()
        elif how == "swap":
            path.write_bytes(data.draw(st.sampled_from(self.files())).read_bytes())
        elif how == "empty":
            path.write_bytes(b"")
        else:
            place = data.draw(st.integers(0, len(content) - 1)) if content else 0
            flipped = bytes([content[place] ^ 1]) if content else b"x"
            path.write_bytes(content[:place] + (flipped + content[place + 1 :] if how == "flip" else b""))

    @rule(written=st.booleans())
    def the_server_is_killed_and_started_again(self, written: bool) -> None:
        if written:
            self.bench.finish_disk()
        for rid in [rid for rid in self.expected if rid not in self.bench.rejected]:
            stream = self.bench.streams[rid]
            assert stream.ids == self.expected[rid][: len(stream.ids)] or rid in self.stopped
        self.begin()

    @rule()
    def everybody_is_served(self) -> None:
        self.bench.disk_works = True
        self.bench.run()
        self.bench.disk_works = False
        self.check_replies()

    def teardown(self) -> None:
        if hasattr(self, "folder"):
            self.bench.disk_works = True
        super().teardown()
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder)


TierMachine.TestCase.settings = settings(
    max_examples=300,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestTier = TierMachine.TestCase
