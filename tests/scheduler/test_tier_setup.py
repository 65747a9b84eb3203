"""What pages depend on: whatever changes the bytes of a page, or what they mean, is in their identity."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import msgspec
import pytest

from radix.disk import BlockChain
from scheduler.tier_setup import open_tier, page_identity
from srt.child import StartError
from srt.config import ModelFacts, SchedulerConfig
from srt.model.config import read_model_config
from srt.model.fingerprint import weights_fingerprint


class Memory:
    """Pages of one size, all empty."""

    page_bytes = 64
    layout = "none"

    def __init__(self) -> None:
        self.touched: list[int] = []

    def read_page(self, page: int) -> bytes:
        """See PageMemory."""
        return bytes(64)

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """See PageMemory."""
        self.touched.append(page)


def config(model: Path, **changes: object) -> SchedulerConfig:
    facts = ModelFacts(
        path=str(model), name="m", model_type="llama", vocab_size=512, context_length=100, eos_token_ids=()
    )
    made = SchedulerConfig(
        run_dir="", model=facts, device="cpu", dtype="float32", threads=1, attention_backend="torch", page_size=4,
        num_pages=8, disable_radix_cache=False, schedule_policy="lpm", max_step_tokens=32, max_running_requests=4,
        max_queued_requests=None, overlap=True,
    )  # fmt: skip
    return msgspec.structs.replace(made, **changes)


def test_everything_that_changes_a_page_changes_the_identity(tiny_model: Path) -> None:
    model, base = read_model_config(tiny_model), config(tiny_model)
    other_positions = dataclasses.replace(model, rope=dataclasses.replace(model.rope, factor=2.0, kind="linear"))
    identities = {
        page_identity("w", model, base, "native", 4),
        page_identity("v", model, base, "native", 4),
        page_identity("w", other_positions, base, "native", 4),
        page_identity("w", dataclasses.replace(model, num_layers=3), base, "native", 4),
        page_identity("w", model, config(tiny_model, dtype="bfloat16"), "native", 4),
        page_identity("w", model, config(tiny_model, kv_dtype="int8"), "native", 4),
        page_identity("w", model, config(tiny_model, page_size=8), "native", 4),
        page_identity("w", model, base, "torch", 4),
        page_identity("w", model, base, "native", 2),
    }
    assert len(identities) == 9
    same = config(tiny_model, num_pages=99, schedule_policy="fcfs", run_dir="/elsewhere", threads=2)
    assert page_identity("w", model, same, "native", 4) == page_identity("w", model, base, "native", 4)
    assert json.loads(page_identity("w", model, base, "native", 4))["model"]["rope"]["theta"] == 10000.0


def test_a_folder_that_cannot_be_made_stops_the_start(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    settings = config(tiny_model, disk_cache_dir=str(tmp_path / "file" / "pages"), disk_cache_bytes=10**6)
    with pytest.raises(StartError, match=r"--disk-cache-dir .*pages: cannot be made"):
        open_tier(settings, Memory())


def test_memory_is_touched_beforehand_only_where_there_is_something_to_come(tiny_model: Path, tmp_path: Path) -> None:
    settings = config(tiny_model, disk_cache_dir=str(tmp_path / "pages"), disk_cache_bytes=10**6)
    memory = Memory()
    opened = open_tier(settings, memory)
    assert memory.touched == []
    identity = page_identity(
        weights_fingerprint(tiny_model), read_model_config(tiny_model), settings, memory.layout, block_pages=4
    )
    opened.files.save(1, BlockChain(identity, "", 16).block(bytes(64), 0), [0, 1, 2, 3])
    opened.close()
    opened = open_tier(settings, memory)
    opened.close()
    assert memory.touched == [0, 1, 2, 3]
