"""Every damage to a sound step is refused by name before any native code runs, and the step itself is right."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from srt.model.draw import DrawParams, remaining_probabilities
from srt.model.interface import ForwardBatch, LanguageModel
from srt.model.native import NativeModel
from srt.model.native_sampling import NativeChooser
from tests.model.damage import damages, wrong_tokens
from tests.model.families import save_family
from tests.model.native_kernels import all_kernels, load_native_model
from tests.model.paged_driver import PagedDriver, Sequence, load_torch_model

VOCAB, TOKENS = 269, 2048
FAMILIES = ("llama", "mistral-window", "qwen2-window-in-upper-layers", "gemma2")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: save_family(family, tmp_path_factory.mktemp(family)) for family in FAMILIES}


class NoLibrary:
    """In the place of the compiled library."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"{name} is called")


@contextmanager
def no_native_calls(model: NativeModel) -> Iterator[None]:
    """Whoever calls the library meanwhile fails the test."""
    kept = model.kernels
    model.kernels = model.kv._kernels = dataclasses.replace(kept, library=NoLibrary())  # type: ignore[arg-type]
    try:
        yield
    finally:
        model.kernels = model.kv._kernels = kept


def assert_refused(name: str, how: str, call: Callable[..., object], *arguments: object) -> None:
    message = "accepted"
    try:
        call(*arguments)
    except ValueError as error:
        message = str(error)
    assert name in re.findall(r"\w+", message), f"{name} {how}: {message}"
    assert "\n" not in message


@dataclass(frozen=True)
class Row:
    """A row of the step: `shared` tokens of the trunk, `past` computed tokens of its own, and the `new` ones."""

    shared: int
    past: int
    new: int


@dataclass(frozen=True)
class Layout:
    """What is computed before the step, and the step."""

    family: str
    page_size: int
    trunk: int
    trunk_goes_on: bool
    rows: tuple[Row, ...]
    seed: int


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    trunk = draw(st.integers(1, 150))
    row = st.builds(
        Row,
        shared=st.integers(0, trunk),
        past=st.integers(0, 30),
        new=st.one_of(st.just(1), st.integers(1, 40)),
    )
    return Layout(
        family=draw(st.sampled_from(FAMILIES)),
        page_size=draw(st.one_of(st.sampled_from([1, 2, 16, 64]), st.integers(1, 64))),
        trunk=trunk,
        trunk_goes_on=draw(st.booleans()),
        rows=tuple(draw(st.lists(row, min_size=1, max_size=5))),
        seed=draw(st.integers(0, 2**32 - 1)),
    )


def prepare(model: LanguageModel, layout: Layout) -> ForwardBatch:
    """Compute what comes before the step; the step's arrays."""
    ids = random.Random(layout.seed)
    driver = PagedDriver.with_pages(model, "shuffled", layout.seed)
    trunk = Sequence(ids.choices(range(VOCAB), k=layout.trunk + 1))
    driver.step([(trunk, layout.trunk)])
    rows = [driver.fork(trunk, row.shared, ids.choices(range(VOCAB), k=row.past + row.new)) for row in layout.rows]
    before = [(sequence, row.past) for sequence, row in zip(rows, layout.rows, strict=True) if row.past]
    if before:
        driver.step(before)
    work = [(sequence, row.new) for sequence, row in zip(rows, layout.rows, strict=True)]
    if layout.trunk_goes_on:
        work.insert(ids.randrange(len(work) + 1), (trunk, 1))
    return driver.batch(work)


def read_only(batch: ForwardBatch) -> ForwardBatch:
    """The kernels only read."""
    arrays = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    copies = {name: values.copy() for name, values in arrays.items() if name != "page_size"}
    for values in copies.values():
        values.flags.writeable = False
    return dataclasses.replace(batch, **copies)


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(layout=layouts())
def test_every_damage_to_a_step_is_refused_and_the_step_is_what_torch_computes(
    folders: dict[str, Path], layout: Layout
) -> None:
    folder, rng = folders[layout.family], random.Random(layout.seed)
    num_pages = TOKENS // layout.page_size
    for kernels in all_kernels("float32")[:1]:
        model = load_native_model(folder, kernels, TOKENS, layout.page_size)
        batch = prepare(model, layout)
        # Any order, and one twice.
        tokens = np.array(rng.choices(range(len(batch.token_ids)), k=rng.randint(1, 9)), np.int32)
        with no_native_calls(model):
            for damage in damages(batch, vocab_size=VOCAB, num_pages=num_pages, rng=rng):
                assert_refused(damage.name, damage.how, model.forward, damage.batch, tokens)
            for how, wrong in wrong_tokens(tokens, len(batch.token_ids), rng):
                assert_refused("logit_tokens", how, model.forward, batch, wrong)
                assert_refused("tokens", how, model.forward_hidden, batch, wrong)
        reference = load_torch_model(folder, num_pages, layout.page_size)
        expected = reference.forward(prepare(reference, layout), tokens)
        torch.testing.assert_close(model.forward(read_only(batch), tokens), expected, atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("page_size", [1, 16, 24])
def test_every_damage_to_copies_is_refused_and_sound_ones_are_carried_out(
    folders: dict[str, Path], page_size: int
) -> None:
    for kernels in all_kernels("float32")[:1]:
        model = load_native_model(folders["llama"], kernels, 8 * page_size, page_size)
        sound = np.array([[0, 3, page_size], [3, 7, 1], [7, 3, 0]], np.int32)
        broken: list[tuple[str, Any]] = [
            ("of int64", sound.astype(np.int64)),
            ("of the other byte order", sound.astype(">i4")),
            ("flat", sound.reshape(-1)),
            ("with two columns", sound[:, :2]),
            ("a list", sound.tolist()),
            ("onto itself", np.array([[0, 1, 1], [2, 2, 1]], np.int32)),
        ]
        for column, bound in ((0, 8), (1, 8), (2, page_size + 1)):
            for value in (-1, bound, -(2**31), 2**31 - 1):
                values = sound.copy()
                values[1, column] = value
                broken.append((f"[1, {column}] = {value}", values))
        with no_native_calls(model):
            for how, copies in broken:
                assert_refused("copies", how, model.kv.copy_rows, copies)
        for form in (sound, sound.T.copy().T, np.frombuffer(b"\0" + sound.tobytes(), np.int32, offset=1).reshape(3, 3)):
            model.kv.pages[:] = np.arange(8, dtype=np.uint8)[:, None]
            model.kv.copy_rows(form)
            assert (model.kv.pages[3] == 0).all()
            assert (model.kv.pages[7] == 0).sum() == model.kv.page_bytes // page_size


NAN, INF = float("nan"), float("inf")
WRONG_SETTINGS: dict[str, list[Any]] = {
    "temperature": [NAN, INF, -INF, 0.0, -0.0, -1.0],
    "top_k": [0, -1, -(2**31), -(2**63)],
    "top_p": [NAN, INF, 0.0, -0.5, 1.0 + 2.0**-50],
    "min_p": [NAN, INF, -INF, -(2.0**-100), 1.0 + 2.0**-20],
    "uniform": [NAN, INF, -INF, 0.0, 1.0, -1.0, 2.0],
}


def params_of(columns: dict[str, list[Any]]) -> DrawParams:
    return DrawParams(
        torch.tensor(columns["temperature"], dtype=torch.float32),
        columns["top_k"],
        columns["top_p"],
        columns["min_p"],
        torch.tensor(columns["uniform"], dtype=torch.float64),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_every_damage_to_the_settings_of_a_draw_is_refused_and_sound_ones_draw_what_they_leave(
    folders: dict[str, Path], data: st.DataObject
) -> None:
    rows = sorted(data.draw(st.sets(st.integers(0, 6), min_size=1), "rows"))
    sound = {
        "temperature": st.floats(1e-5, 100.0),
        "top_k": st.one_of(st.integers(1, 300), st.just(2**62)),
        "top_p": st.floats(1e-9, 1.0),
        "min_p": st.floats(0.0, 1.0),
        "uniform": st.floats(2.0**-49, 1.0 - 2.0**-49),
    }
    columns = {name: data.draw(st.lists(kind, min_size=len(rows), max_size=len(rows))) for name, kind in sound.items()}
    logits = torch.randn((7, VOCAB), generator=torch.Generator().manual_seed(data.draw(st.integers(0, 99)))) * 3
    place = data.draw(st.integers(0, len(rows) - 1))
    for kernels in all_kernels("float32")[:1]:
        model = load_native_model(folders["llama"], kernels, 64)
        chooser = NativeChooser(model)
        with no_native_calls(model):
            for name, values in columns.items():
                for value in WRONG_SETTINGS[name]:
                    broken = params_of({**columns, name: [*values[:place], value, *values[place + 1 :]]})
                    assert_refused(name, f"= {value}", chooser.draw, logits, rows, broken)
                for other in ([*values, values[0]], values[:-1]):
                    broken = params_of({**columns, name: other})
                    assert_refused(name, f"of {len(other)}", chooser.draw, logits, rows, broken)
        chosen = chooser.draw(logits, rows, params_of(columns))
        left = remaining_probabilities(logits[rows], params_of(columns))
        assert (left[torch.arange(len(rows)), torch.from_numpy(chosen).long()] > 0).all()


def test_every_damage_to_logits_and_their_rows_is_refused(folders: dict[str, Path]) -> None:
    logits = torch.randn((4, VOCAB), generator=torch.Generator().manual_seed(1))
    params = params_of({name: [0.5, 0.5] for name in WRONG_SETTINGS} | {"top_k": [7, 7]})
    for kernels in all_kernels("float32")[:1]:
        model = load_native_model(folders["llama"], kernels, 64)
        chooser = NativeChooser(model)
        with no_native_calls(model):
            for form in (logits.double(), logits.bfloat16(), logits[:, 1:], logits[0], logits.T.contiguous().T):
                assert_refused("logits", f"{form.dtype} {form.shape}", chooser.best, form)
                assert_refused("logits", f"{form.dtype}", chooser.greedy, form, [0])
                assert_refused("logits", f"{form.dtype}", chooser.draw, form, [0, 1], params)
            for rows in ([0, 4], [-1, 0], [2**31, 0], [0, -(2**31)]):
                assert_refused("rows", str(rows), chooser.greedy, logits, rows)
                assert_refused("rows", str(rows), chooser.draw, logits, rows, params)
            for at, value in ((slice(5, 6), NAN), (slice(0, 1), INF), (slice(None), -INF), (slice(None), NAN)):
                wrong = logits.clone()
                wrong[2, at] = value
                assert_refused("logits", f"[2] = {value}", chooser.draw, wrong, [1, 2], params)
        logits[2] = NAN
        assert len(chooser.draw(logits, [1, 3], params)) == 2
