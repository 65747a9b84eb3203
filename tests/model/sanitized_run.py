"""Run as a program with the sanitizers' runtime preloaded: small models through every path of the kernels.

python -m tests.model.sanitized_run <folder of saved models> <number format>
"""

from __future__ import annotations

import ctypes
import random
import sys
from pathlib import Path

import numpy as np

from srt.model.kernels.build import build_library, host_variants
from srt.model.native import Kernels, bind
from tests.model.native_kernels import FORMATS, load_native_model
from tests.model.paged_driver import PagedDriver, Sequence


def ids(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(269), k=length)


def exercise(folder: Path, kernels: Kernels, page_size: int) -> None:
    """Chunks, forks, shared decode, copies, other threads' counts; the pool is as small as it can be."""
    model = load_native_model(folder, kernels, 2048 // page_size * page_size, page_size, threads=3)
    driver = PagedDriver.with_pages(model, "shuffled")
    trunk = Sequence(ids(330, 1))
    for count in (300, 1, 9, 20):
        driver.step([(trunk, count)])
    forks = [driver.fork(trunk, 257 + 24 * i, ids(30, 10 + i)) for i in range(3)]
    fresh = Sequence(ids(70, 5))
    while any(sequence.computed < len(sequence.ids) for sequence in (*forks, fresh)):
        # As many new tokens as a short row has at most, and more.
        work = [(s, min(8, len(s.ids) - s.computed)) for s in forks if s.computed < len(s.ids)]
        if fresh.computed < len(fresh.ids):
            work.append((fresh, min(11, len(fresh.ids) - fresh.computed)))
        logits = driver.step(work)
        assert all(bool(part.isfinite().all()) for part in logits)
    batch = driver.batch([(Sequence(ids(13, 2)), 13)])
    model.project(model.forward_hidden(batch, np.array([12, 0], np.int32)))
    model.kv.write_page(0, model.kv.read_page(model.kv.num_pages - 1))


def main(folder: Path, number_format: str) -> None:
    variant = host_variants()[0]
    formats = FORMATS[number_format]
    library = build_library(variant, *formats, sanitize=True)
    kernels = Kernels(bind(ctypes.CDLL(str(library))), variant, *formats)
    for model_folder in sorted(folder.iterdir()):
        for page_size in (16, 1, 24):
            exercise(model_folder, kernels, page_size)
    print("clean")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
