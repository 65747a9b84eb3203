"""Run as a program with the sanitizers' runtime preloaded: small models through every path of the kernels.

python -m tests.model.sanitized_run <folder of saved models> <variant> <dtype> <weights' format> <KV's format>

The last two are `-` where they are the dtype.
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
from tests.model.native_kernels import load_native_model
from tests.model.paged_driver import PagedDriver, Sequence

# Cases of tests.model.families, which takes long to import here.
# Windows, soft caps, norms of Q and K, norms behind the branches, two ropes, biases, many heads to one of K and V.
FAMILIES = ("qwen3", "mistral-window", "llama-many-heads-to-one", "gemma2", "gemma3")
# Pages of whole strips, without strips, and of strips that are cut short.
PAGE_SIZES = (16, 1, 24)
# The sizes of heads that models of today have: (family, size of a page) of each.
HEAD_DIMS = {
    64: ("llama-biases", 16),
    80: ("qwen3", 24),
    96: ("gemma2", 16),
    128: ("mistral-window", 1),
    256: ("gemma3", 16),
}


def exercise(folder: Path, kernels: Kernels, page_size: int) -> None:
    """Chunks, forks, shared decode, copies, other threads' counts; the pool is as small as it can be."""
    model = load_native_model(folder, kernels, 2048 // page_size * page_size, page_size, threads=3)

    def ids(length: int, seed: int) -> list[int]:
        return random.Random(seed).choices(range(model.config.vocab_size), k=length)

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
    # Of more tokens than there are, in no order; and of none.
    for wanted in ([12, 0] * 10, []):
        model.project(model.forward_hidden(batch, np.array(wanted, np.int32)))
    choose(model)
    last = model.kv.num_pages - 1
    model.kv.copy_rows(np.array([[0, last, rows] for rows in (0, 1, page_size // 2, page_size)], np.int32))
    model.kv.write_page(0, model.kv.read_page(last))


def choose(model: NativeModel) -> None:
    """Every filter, on rows that are random, all alike, and broken."""
    chooser, vocab = NativeChooser(model), model.config.vocab_size
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(1)) * 4
    logits[2] = 1.5
    logits[3] = float("-inf")
    logits[3, -1] = 0.0
    logits[5, -1] = float("nan")
    rows = [0, 1, 2, 3, 6]
    assert np.flatnonzero(chooser.best(logits) < 0).tolist() == [3, 5]
    assert chooser.greedy(logits, rows).tolist()[2:4] == [0, vocab - 1]
    for top_k, top_p, min_p in ((999, 1.0, 0.0), (5, 1.0, 0.0), (999, 0.5, 0.0), (40, 0.9, 0.2), (1, 1e-9, 1.0)):
        count = len(rows)
        uniform = torch.tensor([2.0**-49, 0.5, 1.0 - 2.0**-49, 0.3, 0.9], dtype=torch.float64)
        params = DrawParams(torch.full((count,), 0.8), [top_k] * count, [top_p] * count, [min_p] * count, uniform)
        assert chooser.draw(logits, rows, params)[3] == vocab - 1


def main(folder: Path, variant_name: str, dtype: str, weights: str, kv: str) -> None:
    variant = next(variant for variant in host_variants() if variant.name == variant_name)
    formats = (dtype, None if weights == "-" else weights, None if kv == "-" else kv)
    library = build_library(variant, *formats, sanitize=True)
    kernels = Kernels(bind(ctypes.CDLL(str(library))), variant, *formats)
    for family in FAMILIES:
        for page_size in PAGE_SIZES:
            exercise(folder / family, kernels, page_size)
    for head_dim, (_, page_size) in HEAD_DIMS.items():
        exercise(folder / str(head_dim), kernels, page_size)
    print("clean")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
