"""How near the native kernels come to what the machine can do: each product, attention, and whole steps.

    python -m benchmarks.kernels --model smollm2 [--quantization int4] [--kv-cache-dtype int8]

The machine's own limits are measured in the same run, around every case: dot products of registers for arithmetic,
the packed weights read from front to back for memory, torch's product of two large matrices for comparison.  A
case is repeated; its best round is printed, and the median behind it.  `of bound` is the time that the larger of
the two limits allows, divided by the time taken.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch

from sapwood.pull import resolve_model
from srt.model.config import DTYPE_BYTES, KV_DTYPES, ModelConfig, kv_bytes_per_token, read_model_config
from srt.model.interface import ForwardBatch
from srt.model.native import QUANTIZATIONS, NativeModel
from srt.resolve import WEIGHT_BITS

PAGE_SIZE = 16
POOL_TOKENS = 64 * 1024
TORCH_SIZE = 2048


@dataclass(frozen=True)
class Work:
    """What one phase of a step must do at least: arithmetic and bytes read from memory."""

    operations: float
    bytes: float


@dataclass
class Limits:
    """The best that the machine has shown so far: operations and bytes per second."""

    operations: float = 0.0
    bytes: float = 0.0

    def measure(self, model: NativeModel) -> None:
        """Look again; the best counts."""
        operations, read = model.measure_peaks()
        self.operations, self.bytes = max(self.operations, operations), max(self.bytes, read)

    def seconds(self, work: Work) -> float:
        """The least time that the work can take."""
        return max(work.operations / self.operations, work.bytes / self.bytes)


@dataclass
class Case:
    """A step to repeat: what it does, and the seconds of its phases, round by round."""

    name: str
    batch: ForwardBatch
    work: dict[str, Work]
    tokens: int
    share_prefixes: bool = True
    rounds: list[dict[str, float]] = field(default_factory=list)
    walls: list[float] = field(default_factory=list)

    def run(self, model: NativeModel) -> None:
        """One round."""
        model.share_prefixes = self.share_prefixes
        wanted = (self.batch.qo_indptr[1:] - 1).astype(np.int32)
        model.take_seconds()
        begin = time.perf_counter()
        model.forward(self.batch, wanted)
        self.walls.append(time.perf_counter() - begin)
        self.rounds.append(model.take_seconds())

    def report(self, limits: Limits) -> None:
        """Print the case: one line for the whole, one for each phase that has a bound."""
        best, median = min(self.walls), statistics.median(self.walls)
        print(
            f"{self.name}: {best * 1e3:.2f} ms ({median * 1e3:.2f}), {self.tokens / best:.0f} tokens/s"
            f" ({self.tokens / median:.0f})"
        )
        for phase, work in self.work.items():
            seconds = [measured[phase] for measured in self.rounds]
            best, median = min(seconds), statistics.median(seconds)
            print(
                f"    {phase:<10}{best * 1e3:9.2f} ms ({median * 1e3:.2f})"
                f"{work.operations / best / 1e9:7.0f} GFLOP/s{work.bytes / best / 1e9:7.1f} GB/s"
                f"{100 * limits.seconds(work) / best:6.0f}% of bound ({100 * limits.seconds(work) / median:.0f}%)"
            )


@dataclass(frozen=True)
class Formats:
    """Number formats: `dtype` of activations, the others of weights and KV where they have another."""

    dtype: str
    quantization: str | None = None
    kv_dtype: str | None = None

    @property
    def layer_bytes(self) -> float:
        """Bytes of a weight of the layers, with its share of what scales it."""
        return WEIGHT_BITS[self.quantization or self.dtype] / 8

    @property
    def head_bytes(self) -> float:
        """Bytes of a weight of the head, which int4 leaves in int8."""
        return 1.0 if self.quantization else self.layer_bytes


def product_work(config: ModelConfig, rows: int, logits: int, formats: Formats) -> dict[str, Work]:
    """The products of a step of `rows` tokens; the last layer computes all but K and V only for `logits` of them."""
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim
    qkv = heads + 2 * config.num_kv_heads * config.head_dim
    layers = config.num_layers
    kept = rows * (layers - 1) + logits

    def work(weights: int, layers_read: int, row_layers: int, element: float = formats.layer_bytes) -> Work:
        return Work(2.0 * weights * row_layers, weights * layers_read * element)

    return {
        "qkv": work(hidden * qkv, layers, rows * layers),
        "output": work(heads * hidden, layers, kept),
        "gate_up": work(2 * hidden * inner, layers, kept),
        "down": work(inner * hidden, layers, kept),
        "head": work(hidden * config.vocab_size, 1, logits, formats.head_bytes),
    }


def attention_work(config: ModelConfig, before: list[int], read: Callable[[int], int], formats: Formats) -> Work:
    """Attention of queries with `before` tokens each, their own included; `read(window)`: tokens of KV that differ."""
    operations = read_bytes = 0.0
    layer_bytes = kv_bytes_per_token(config, formats.kv_dtype or formats.dtype) / config.num_layers
    for window, layers in Counter(window or max(before) for window in config.sliding_windows).items():
        seen = sum(min(tokens, window) for tokens in before)
        operations += 4.0 * config.num_heads * config.head_dim * layers * seen
        read_bytes += layer_bytes * layers * read(window)
    return Work(operations, read_bytes)


def batch_of(rows: list[tuple[list[int], int, int]], vocab: int) -> ForwardBatch:
    """Rows of (pages, first new position, new tokens) with random tokens."""
    chooser = random.Random(1)
    positions = [p for _, start, count in rows for p in range(start, start + count)]
    slots = [
        pages[p // PAGE_SIZE] * PAGE_SIZE + p % PAGE_SIZE
        for pages, start, count in rows
        for p in range(start, start + count)
    ]
    return ForwardBatch(
        page_size=PAGE_SIZE,
        token_ids=np.array(chooser.choices(range(vocab), k=len(positions)), np.int32),
        positions=np.array(positions, np.int32),
        out_slots=np.array(slots, np.int32),
        qo_indptr=np.cumsum([0] + [count for _, _, count in rows]).astype(np.int32),
        kv_indptr=np.cumsum([0] + [len(pages) for pages, _, _ in rows]).astype(np.int32),
        kv_indices=np.array([page for pages, _, _ in rows for page in pages], np.int32),
        kv_last_page_len=np.array([(start + count - 1) % PAGE_SIZE + 1 for _, start, count in rows], np.int32),
    )


def pages_for(first: int, tokens: int) -> list[int]:
    return list(range(first, first + -(-tokens // PAGE_SIZE)))


def decode_case(
    config: ModelConfig, formats: Formats, rows: int, length: int, shared: int = 0, share: bool = True
) -> Case:
    """`rows` requests that compute one token each on `length` tokens, the first `shared` of them the same pages."""
    head = pages_for(0, shared)
    tables = []
    for row in range(rows):
        own = pages_for(len(head) + row * (-(-length // PAGE_SIZE) + 1), length + 1 - shared)
        tables.append((head + own, length, 1))

    def read(window: int) -> int:
        low = max(0, length + 1 - window)
        return max(0, shared - low) * (1 if share else rows) + rows * (length + 1 - max(shared, low))

    work = product_work(config, rows, rows, formats)
    work["attention"] = attention_work(config, [length + 1] * rows, read, formats)
    name = f"decode, {rows} rows on {length} tokens"
    if shared:
        name += f", {shared} of them shared, sharing {'on' if share else 'off'}"
    return Case(name, batch_of(tables, config.vocab_size), work, rows, share)


def prefill_case(config: ModelConfig, formats: Formats, tokens: int, before: int = 0) -> Case:
    """One chunk of `tokens` tokens on top of `before`."""
    work = product_work(config, tokens, 1, formats)

    def read(window: int) -> int:
        return before + tokens - max(0, before + 1 - window)

    work["attention"] = attention_work(config, [before + i + 1 for i in range(tokens)], read, formats)
    table = [(pages_for(0, before + tokens), before, tokens)]
    return Case(f"prefill, {tokens} tokens on {before}", batch_of(table, config.vocab_size), work, tokens)


def torch_operations(dtype: str, threads: int) -> float:
    """Operations per second of torch's product of two large matrices."""
    torch.set_num_threads(threads)
    a = torch.randn(TORCH_SIZE, TORCH_SIZE, dtype=getattr(torch, dtype))
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        torch.mm(a, a)
        best = min(best, time.perf_counter() - begin)
    return 2.0 * TORCH_SIZE**3 / best


def main() -> None:
    """Run all cases in turn, round after round, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(DTYPE_BYTES))
    parser.add_argument("--quantization", default=None, choices=QUANTIZATIONS)
    parser.add_argument("--kv-cache-dtype", default=None, choices=KV_DTYPES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    arguments = parser.parse_args()
    folder = resolve_model(arguments.model)
    config, dtype = read_model_config(folder), arguments.dtype
    formats = Formats(dtype, arguments.quantization, arguments.kv_cache_dtype)
    begin = time.perf_counter()
    model = NativeModel(
        config,
        folder,
        getattr(torch, dtype),
        POOL_TOKENS // PAGE_SIZE,
        PAGE_SIZE,
        arguments.threads,
        quantization=formats.quantization,
        kv_dtype=formats.kv_dtype,
    )
    loaded = time.perf_counter() - begin
    model.kv.pages[:] = 0
    cases = [prefill_case(config, formats, tokens) for tokens in (16, 64, 256, 512, 2048)]
    cases += [prefill_case(config, formats, 512, 1536)]
    cases += [decode_case(config, formats, rows, 128) for rows in (1, 2, 4, 8, 16, 32, 64)]
    cases += [decode_case(config, formats, rows, 1040) for rows in (1, 16)]
    cases += [decode_case(config, formats, 16, 1040, 1000, share) for share in (True, False)]
    cases = [case for case in cases if arguments.only in case.name]
    limits = Limits()
    for _ in range(arguments.rounds):
        for case in cases:
            limits.measure(model)
            case.run(model)
    print(
        f"{model.kernels.variant.name}, {dtype}, weights {formats.quantization or dtype},"
        f" KV {formats.kv_dtype or dtype}, {arguments.threads} threads; loaded and packed in {loaded:.2f} s"
    )
    print(
        f"limits: {limits.operations / 1e9:.0f} GFLOP/s in registers, {limits.bytes / 1e9:.1f} GB/s read;"
        f" torch.mm {torch_operations(dtype, arguments.threads) / 1e9:.0f} GFLOP/s"
    )
    for case in cases:
        case.report(limits)


if __name__ == "__main__":
    main()
