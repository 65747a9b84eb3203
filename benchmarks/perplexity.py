"""What a number format costs in quality: perplexity on real text, for each format beside float32.

    python -m benchmarks.perplexity --model smollm2 --text ../shared/data/docs ../shared/data/gsm8k/test.jsonl

Every text is cut into windows of tokens; each token of a window but the first is predicted from those before it in
the window.  The same windows are used for all formats.
"""

from __future__ import annotations

import argparse
import gzip
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from sapwood.pull import resolve_model
from srt.model.config import ModelConfig, read_model_config
from srt.model.interface import ForwardBatch
from srt.model.native import NativeModel

PAGE_SIZE = 16
SUFFIXES = {".txt", ".md", ".rst", ".jsonl", ".gz"}
# Logits of so many tokens are held at a time.
SLICE = 128
# Number formats of activations, of weights and of KV.
FORMATS: dict[str, tuple[torch.dtype, str | None, str | None]] = {
    "float32": (torch.float32, None, None),
    "bfloat16": (torch.bfloat16, None, None),
    "bfloat16, int8 KV": (torch.bfloat16, None, "int8"),
    "bfloat16, int8 weights": (torch.bfloat16, "int8", None),
    "bfloat16, int4 weights": (torch.bfloat16, "int4", None),
    "bfloat16, int4 weights, int8 KV": (torch.bfloat16, "int4", "int8"),
    "float32, int8 weights": (torch.float32, "int8", None),
    "float32, int4 weights": (torch.float32, "int4", None),
    "float32, bfloat16 KV": (torch.float32, None, "bfloat16"),
    "float32, int8 KV": (torch.float32, None, "int8"),
}


def read_texts(places: list[Path]) -> Iterator[str]:
    """The text of each file (unpacked where it is .gz); of a folder every text file below it, by name."""
    for place in places:
        for file in [place] if place.is_file() else sorted(p for p in place.rglob("*") if p.suffix in SUFFIXES):
            data = file.read_bytes()
            yield (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8", errors="replace")


def cut(texts: Iterator[str], tokenizer: Tokenizer, window: int, most: int) -> list[list[int]]:
    """At most `most` windows of `window` tokens, equally spread over the texts.

    Each begins with what the tokenizer puts in front of a text: some models are at a loss without it.
    """
    windows = []
    head = tokenizer.encode("").ids
    room = window - len(head)
    for text in texts:
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        windows += [head + ids[i : i + room] for i in range(0, len(ids) - room + 1, room)]
    step = max(1, len(windows) // most)
    return windows[::step][:most]


def one_row(ids: list[int]) -> ForwardBatch:
    """A whole window in one step, in the first pages of the pool."""
    positions = np.arange(len(ids), dtype=np.int32)
    pages = -(-len(ids) // PAGE_SIZE)
    return ForwardBatch(
        page_size=PAGE_SIZE,
        token_ids=np.array(ids, np.int32),
        positions=positions,
        out_slots=positions,
        qo_indptr=np.array([0, len(ids)], np.int32),
        kv_indptr=np.array([0, pages], np.int32),
        kv_indices=np.arange(pages, dtype=np.int32),
        kv_last_page_len=np.array([(len(ids) - 1) % PAGE_SIZE + 1], np.int32),
    )


def loss(model: NativeModel, ids: list[int]) -> float:
    """Summed negative log likelihood, in nats, of every token but the first."""
    batch = one_row(ids)
    hidden = model.forward_hidden(batch, batch.positions[:-1])
    targets = torch.tensor(ids[1:])
    total = 0.0
    for part, wanted in zip(torch.split(hidden, SLICE), torch.split(targets, SLICE), strict=True):
        total += torch.nn.functional.cross_entropy(model.project(part), wanted, reduction="sum").item()
    return total


def measure(config: ModelConfig, folder: Path, name: str, windows: list[list[int]], threads: int) -> float:
    """The perplexity of one format over all windows."""
    dtype, quantization, kv_dtype = FORMATS[name]
    pages = -(-len(windows[0]) // PAGE_SIZE)
    model = NativeModel(config, folder, dtype, pages, PAGE_SIZE, threads, quantization=quantization, kv_dtype=kv_dtype)
    total = sum(loss(model, ids) for ids in windows)
    return math.exp(total / sum(len(ids) - 1 for ids in windows))


def main() -> None:
    """Measure every format and print it beside the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, nargs="+", required=True, help="files or folders")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--most", type=int, default=64, help="windows to use")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", nargs="+", default=list(FORMATS), choices=list(FORMATS), help="formats to measure")
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model)
    config = read_model_config(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    windows = cut(read_texts(arguments.text), tokenizer, arguments.window, arguments.most)
    if not windows:
        parser.error(f"--text: less than {arguments.window} tokens there")
    print(f"{len(windows)} windows of {arguments.window} tokens")
    reference = None
    for name in arguments.only:
        begin = time.perf_counter()
        found = measure(config, folder, name, windows, arguments.threads)
        reference = reference or found
        seconds = time.perf_counter() - begin
        print(
            f"{name:<32} perplexity {found:8.4f}  {100 * (found / reference - 1):+.2f}%  ({seconds:.0f} s)", flush=True
        )


if __name__ == "__main__":
    main()
