"""Every way to damage one array of a sound step, so that a test can see each of them refused.

Only damage that shows in the arrays themselves: which of the pages that a row merely reads are the right ones, they
cannot tell.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from srt.model.interface import ForwardBatch
from srt.plan import Int32Array

EXTREMES = (-(2**31), -(2**31) + 1, -1, 2**31 - 1)


@dataclass(frozen=True)
class Damage:
    """`batch` is broken in the array `name`; `how` says in which way."""

    name: str
    how: str
    batch: ForwardBatch


def wrong_forms(values: Int32Array) -> Iterator[tuple[str, Any]]:
    """The same numbers in every form that the kernels cannot take."""
    for dtype in ("i8", "f4", "u4", "i2", ">i4", "O"):
        yield f"of dtype {dtype}", values.astype(dtype)
    yield "with two dimensions", values.reshape(1, -1)
    yield "with no dimension", np.array(values[0])
    if len(values) > 1:
        yield "with gaps", np.repeat(values, 2)[::2]
        yield "backwards in memory", values[::-1].copy()[::-1]
    yield "at an odd address", np.frombuffer(b"\0" + values.tobytes(), np.int32, offset=1)
    yield "as a list", values.tolist()
    yield "as a tensor", torch.from_numpy(values)
    yield "missing", None


def wrong_lengths(values: Int32Array) -> Iterator[tuple[str, Int32Array]]:
    """An entry fewer, an entry more, none."""
    yield "short", values[:-1].copy()
    yield "long", np.append(values, values[-1])
    yield "empty", values[:0].copy()


def changed(values: Int32Array, index: int, value: int) -> Int32Array:
    """A copy with one entry changed; the value goes around as int32 does."""
    copy = values.copy()
    copy[index] = np.int64(value).astype(np.int32)
    return copy


def wrong_tokens(values: Int32Array, count: int, rng: random.Random) -> Iterator[tuple[str, Any]]:
    """Broken copies of an array of indices below `count`, whose length and order are free."""
    yield from wrong_forms(values)
    index = rng.randrange(len(values))
    for value in (*EXTREMES, count, count + 1):
        yield f"[{index}] = {value}", changed(values, index, value)


def damages(batch: ForwardBatch, *, vocab_size: int, num_pages: int, rng: random.Random) -> Iterator[Damage]:
    """All damages of a sound step, at entries that `rng` picks."""
    yield Damage("page_size", "another", dataclasses.replace(batch, page_size=batch.page_size + 1))
    yield Damage("page_size", "none", dataclasses.replace(batch, page_size=0))
    size = batch.page_size
    beyond = {
        "token_ids": (vocab_size,),
        "kv_indices": (num_pages,),
        "kv_last_page_len": (0, size + 1),
        "out_slots": (num_pages * size,),
    }
    # Off by one is wrong for these wherever it is; the others have neighbours that are as good.
    for name in ("positions", "out_slots", "qo_indptr", "kv_indptr", "kv_last_page_len"):
        beyond[name] = (*beyond.get(name, ()), -2, -3)
    for name in [field.name for field in dataclasses.fields(batch) if field.name != "page_size"]:
        values: Int32Array = getattr(batch, name)
        for how, broken in (*wrong_forms(values), *wrong_lengths(values)):
            yield Damage(name, how, dataclasses.replace(batch, **{name: broken}))
        for index in {0, len(values) - 1, rng.randrange(len(values))}:
            wrong = {*EXTREMES, *beyond.get(name, ())}
            if name not in ("token_ids", "kv_indices"):
                wrong |= {int(values[index]) - 1, int(values[index]) + 1, int(values[index]) + size}
            for value in wrong - {int(values[index])}:
                broken = changed(values, index, value)
                yield Damage(name, f"[{index}] = {value}", dataclasses.replace(batch, **{name: broken}))
    yield from _exchanged(batch, rng)
    yield from _false_lengths(batch)
    yield from _pages_written_twice(batch, num_pages, rng)


def _exchanged(batch: ForwardBatch, rng: random.Random) -> Iterator[Damage]:
    """Two entries in each other's place, or one like the other, where no two are alike."""
    for name in ("positions", "out_slots", "qo_indptr", "kv_indptr"):
        values: Int32Array = getattr(batch, name)
        first, second = rng.randrange(len(values)), rng.randrange(len(values))
        if values[first] == values[second]:
            continue
        swapped = values.copy()
        swapped[[first, second]] = values[[second, first]]
        yield Damage(name, f"[{first}] and [{second}] exchanged", dataclasses.replace(batch, **{name: swapped}))
        alike = changed(values, first, int(values[second]))
        yield Damage(name, f"[{first}] like [{second}]", dataclasses.replace(batch, **{name: alike}))


def _false_lengths(batch: ForwardBatch) -> Iterator[Damage]:
    """No row at all; and last pages that are more than full, or less than empty, with positions to match."""
    nothing, zero = np.array([], np.int32), np.array([0], np.int32)
    empty = ForwardBatch(batch.page_size, nothing, nothing, nothing, zero, zero, nothing, nothing)
    yield Damage("kv_last_page_len", "of a step without rows", empty)
    for row, length in enumerate(batch.kv_last_page_len.tolist()):
        false_ones = [0, -1, batch.page_size + 1, 2 * batch.page_size]
        new = int(batch.qo_indptr[row + 1] - batch.qo_indptr[row])
        if batch.kv_indptr[row + 1] - batch.kv_indptr[row] == 1 < new:
            # In range, but no room for the row's own tokens.
            false_ones.append(new - 1)
        for false in false_ones:
            positions = batch.positions.copy()
            positions[batch.qo_indptr[row] : batch.qo_indptr[row + 1]] += false - length
            lengths = changed(batch.kv_last_page_len, row, false)
            lie = dataclasses.replace(batch, kv_last_page_len=lengths, positions=positions)
            yield Damage("kv_last_page_len", f"[{row}] = {false}, positions too", lie)


def _pages_written_twice(batch: ForwardBatch, num_pages: int, rng: random.Random) -> Iterator[Damage]:
    """A page that the step writes becomes another, and others become it; the slots follow the tables or not."""
    written = written_entries(batch)
    entry = rng.choice(written)
    for other in {rng.randrange(num_pages), *batch.kv_indices.tolist()} - {int(batch.kv_indices[entry])}:
        table = changed(batch.kv_indices, entry, other)
        yield Damage(
            "kv_indices", f"[{entry}] = {other}, not where slots are", dataclasses.replace(batch, kv_indices=table)
        )
        if other in batch.kv_indices:
            moved = dataclasses.replace(batch, kv_indices=table)
            moved = dataclasses.replace(moved, out_slots=slots_of(moved))
            yield Damage("kv_indices", f"[{entry}] = {other}, which is in a table already", moved)
    for reader in set(range(len(batch.kv_indices))) - set(written):
        table = changed(batch.kv_indices, reader, int(batch.kv_indices[entry]))
        yield Damage("kv_indices", f"[{reader}] is the page of [{entry}]", dataclasses.replace(batch, kv_indices=table))


def written_entries(batch: ForwardBatch) -> list[int]:
    """The places in kv_indices of the pages that the step writes."""
    places = [
        batch.kv_indptr[row] + batch.positions[token] // batch.page_size
        for row in range(len(batch.kv_last_page_len))
        for token in range(batch.qo_indptr[row], batch.qo_indptr[row + 1])
    ]
    return sorted({int(place) for place in places})


def slots_of(batch: ForwardBatch) -> Int32Array:
    """The slots that the tables give to the positions."""
    rows = np.repeat(np.arange(len(batch.kv_last_page_len)), np.diff(batch.qo_indptr))
    pages: npt.NDArray[np.int32] = batch.kv_indices[batch.kv_indptr[rows] + batch.positions // batch.page_size]
    return (pages * batch.page_size + batch.positions % batch.page_size).astype(np.int32)
