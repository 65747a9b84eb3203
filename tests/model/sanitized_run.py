"""Run as a program with the sanitizers' runtime preloaded: small models through every path of the kernels.

python -m tests.model.sanitized_run <folder of saved models> <number format>
"""

from __future__ import annotations

import ctypes
import random
import sys
from pathlib import Path

import numpy as np
import torch

from srt.model.draw import DrawParams
from srt.model.kernels.build import build_library, host_variants
from srt.model.native import Kernels, NativeModel, bind
from srt.model.native_sampling import NativeChooser
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
    choose(model)
    model.kv.write_page(0, model.kv.read_page(model.kv.num_pages - 1))


def choose(model: NativeModel) -> None:
    """Every filter, on rows that are random, all alike, and broken."""
    chooser = NativeChooser(model)
    logits = torch.randn(7, model.config.vocab_size, generator=torch.Generator().manual_seed(1)) * 4
    logits[2] = 1.5
    logits[3] = float("-inf")
    logits[3, -1] = 0.0
    logits[5, -1] = float("nan")
    rows = [0, 1, 2, 3, 6]
    assert chooser.broken(logits) == [3, 5]
    assert chooser.greedy(logits, rows).tolist()[2:4] == [0, 268]
    for top_k, top_p, min_p in ((999, 1.0, 0.0), (5, 1.0, 0.0), (999, 0.5, 0.0), (40, 0.9, 0.2), (1, 1e-9, 1.0)):
        count = len(rows)
        uniform = torch.tensor([2.0**-49, 0.5, 1.0 - 2.0**-49, 0.3, 0.9], dtype=torch.float64)
        params = DrawParams(torch.full((count,), 0.8), [top_k] * count, [top_p] * count, [min_p] * count, uniform)
        assert chooser.draw(logits, rows, params)[3] == 268


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
