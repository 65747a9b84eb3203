"""Opens the disk tier of a scheduler process: whose pages they are, the folder, the threads, the decisions."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from scheduler.page_folder import PageFolder
from scheduler.tier import DiskTier
from scheduler.tier_io import TierFiles, Wake
from srt.child import StartError
from srt.config import SchedulerConfig
from srt.model.config import ModelConfig, read_model_config
from srt.model.fingerprint import weights_fingerprint
from srt.plan import PageMemory

# A file holds whole pages of at least so many tokens: smaller ones would cost more to open than to read.
BLOCK_TOKENS = 16
# Of the pool so much is touched before the first request, where there are files to fill it from: the system hands out
# memory when it is first written, which takes longer than reading a file.
TOUCHED_BYTES = 256 * 10**6


@dataclass(frozen=True)
class OpenTier:
    """The decisions for the core, and what has to be waited for and closed."""

    tier: DiskTier
    files: TierFiles
    wake: Wake

    def close(self) -> None:
        """Write what waits to be written, end the threads."""
        self.files.close()


def open_tier(config: SchedulerConfig, memory: PageMemory) -> OpenTier:
    """The tier that the configuration asks for, its threads running.  Raises StartError when there can be no folder."""
    assert config.disk_cache_dir is not None
    root, folder = Path(config.disk_cache_dir), Path(config.model.path)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"--disk-cache-dir {root}: cannot be made: {error.strerror}") from error
    block_pages = max(1, BLOCK_TOKENS // config.page_size)
    weights = weights_fingerprint(folder, root / "fingerprints", config.threads)
    identity = page_identity(weights, read_model_config(folder), config, memory.layout, block_pages)
    wake = Wake()
    files = TierFiles(PageFolder(root, identity, config.disk_cache_bytes), memory, block_pages, config.threads, wake)
    tier = DiskTier(files, identity, block_pages, memory.page_bytes)
    # The pool gives its pages out from the first on.
    for page in range(min(config.num_pages, files.num_blocks * block_pages, TOUCHED_BYTES // memory.page_bytes)):
        memory.write_page(page, bytes(memory.page_bytes))
    files.start()
    return OpenTier(tier, files, wake)


def page_identity(weights: str, model: ModelConfig, config: SchedulerConfig, layout: str, block_pages: int) -> bytes:
    """Everything that the bytes of a page depend on beside its tokens, in words.

    The model's configuration has the positions (rope) in it; `layout` who computes and how a page is laid out.
    """
    parts = {
        "weights": weights,
        "model": dataclasses.asdict(model),
        "dtype": config.dtype,
        "kv_dtype": config.kv_dtype or config.dtype,
        "layout": layout,
        "page_size": config.page_size,
        "pages": block_pages,
    }
    return json.dumps(parts, sort_keys=True).encode()
