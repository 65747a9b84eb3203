"""Step times: the roofline by hand, measured profiles, and a fit that finds the model it was made from."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sapwood.profile import Row, design, plan_of
from sapwood.simulate.cost import (
    Fitted,
    Hardware,
    Load,
    ModelShape,
    ProfileError,
    Roofline,
    Scheduling,
    load_of,
    read_profile,
    write_profile,
)
from sapwood.simulate.fit import Point, fit, nonnegative_least_squares
from sapwood.simulate.hardware import MACHINES, MODELS, profile_by_name

SHAPE = ModelShape(
    hidden_size=8,
    intermediate_size=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    vocab_size=100,
    context_length=64,
)
MACHINE = Hardware(
    name="slow",
    flops_per_second=1000.0,
    bytes_per_second=100.0,
    compute_share=1.0,
    memory_share=1.0,
    step_seconds=0.5,
)
ROOFLINE = Roofline(hardware=MACHINE, model=SHAPE)


# ---- load --------------------------------------------------------------------------------------------------------


@given(
    st.lists(st.builds(Row, st.integers(0, 40), st.integers(1, 20)), min_size=1, max_size=6),
    st.sampled_from([1, 4, 16]),
)
def test_the_load_of_a_plan_counts_what_its_rows_do(rows: list[Row], page_size: int) -> None:
    load = load_of(plan_of(0, tuple(rows), page_size, 50))
    assert (load.rows, load.sampled) == (len(rows), len(rows))
    assert load.tokens == sum(row.new for row in rows)
    assert load.context == sum(row.start + row.new for row in rows)
    # Each new token sees all before it and itself.
    assert load.pairs == sum(place + 1 for row in rows for place in range(row.start, row.start + row.new))


# ---- roofline ----------------------------------------------------------------------------------------------------


def test_a_step_takes_each_part_s_arithmetic_or_traffic_whichever_is_longer() -> None:
    # A layer has 8 * 2 * (2 * 4 + 2 * 2) = 192 weights of attention and 3 * 8 * 16 = 384 others; there are two.
    assert SHAPE.layer_parameters == 2 * 576
    assert SHAPE.head_parameters == 800
    assert SHAPE.kv_token_bytes == 2 * 2 * 2 * 2 * 2
    decode = ROOFLINE.seconds(Load(rows=1, sampled=1, tokens=1, context=10, pairs=10))
    # Weights are read: 2,304 bytes; KV of ten tokens: 320 bytes, against 4 * 2 * 4 * 2 * 10 operations; head: 1,600.
    assert decode == pytest.approx(0.5 + 23.04 + 3.2 + 16.0)
    prefill = ROOFLINE.seconds(Load(rows=1, sampled=0, tokens=50, context=50, pairs=1275))
    assert prefill == pytest.approx(0.5 + 2 * 1152 * 50 / 1000 + 64 * 1275 / 1000)


def test_the_pool_is_what_the_weights_leave_of_nine_tenths_of_the_memory() -> None:
    assert ROOFLINE.pool_tokens is None
    machine = msgspec.structs.replace(MACHINE, memory_bytes=10_000.0)
    roofline = msgspec.structs.replace(ROOFLINE, hardware=machine)
    assert roofline.pool_tokens == (9000 - (1152 + 1600) * 2) // 32


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_a_known_machine_with_a_known_model_is_a_profile(machine: str, model: str) -> None:
    profile = profile_by_name(f"{machine}-{model}")
    assert profile.model == MODELS[model]
    small, large = (profile.seconds(Load(n, n, n, 500 * n, 500 * n)) for n in (1, 64))
    assert 1e-4 < small <= large < 1.0


def test_what_has_no_room_for_the_weights_is_refused() -> None:
    profile = profile_by_name("l4-qwen3-32b")
    with pytest.raises(ProfileError, match="does not hold the model's weights"):
        profile.check()


# ---- measured ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "seconds"), [(1, 2.0), (2, 2.0), (3, 2.5), (6, 4.0), (8, 5.0), (10, 7.0), (20, 17.0)]
)
def test_seconds_by_tokens_lie_on_the_lines_through_the_points(tokens: int, seconds: float) -> None:
    profile = Fitted(tokens=[(2, 2.0), (6, 4.0), (8, 5.0), (9, 6.0)])
    assert profile.seconds(Load(0, 0, tokens, 0, 0)) == pytest.approx(seconds)


def test_rows_pairs_and_context_come_on_top() -> None:
    profile = Fitted(tokens=[(1, 1.0)], sampled=0.1, pair=0.01, context=0.001)
    assert profile.seconds(Load(rows=9, sampled=2, tokens=5, context=30, pairs=7)) == pytest.approx(1.3)


@pytest.mark.parametrize("profile", [ROOFLINE, Fitted(tokens=[(1, 0.5), (4, 1.0)], pair=1e-6, facts={"model": "m"})])
def test_a_profile_comes_back_from_its_file(profile: Roofline | Fitted, tmp_path: Path) -> None:
    write_profile(tmp_path / "p.json", profile)
    assert read_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "truncated"),
        ("{}", "kind"),
        ('{"kind": "guess"}', "guess"),
        ('{"kind": "fitted"}', "tokens"),
        ('{"kind": "fitted", "tokens": []}', "rising"),
        ('{"kind": "fitted", "tokens": [[4, 1.0], [2, 2.0]]}', "rising"),
        ('{"kind": "fitted", "tokens": [[1, -1.0]]}', "negative"),
        ('{"kind": "fitted", "tokens": [[1, 1.0]], "pair": -1}', "negative"),
    ],
)
def test_a_fault_in_a_profile_is_told_in_one_line(content: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    path.write_text(content)
    with pytest.raises(ProfileError) as caught:
        read_profile(path)
    assert said in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


def test_a_machine_that_computes_nothing_is_refused(tmp_path: Path) -> None:
    broken = msgspec.structs.replace(ROOFLINE, hardware=msgspec.structs.replace(MACHINE, bytes_per_second=0.0))
    write_profile(tmp_path / "p.json", broken)
    with pytest.raises(ProfileError, match=r"hardware\.bytes_per_second is 0"):
        read_profile(tmp_path / "p.json")


# ---- fit ---------------------------------------------------------------------------------------------------------

TRUTH = Fitted(
    tokens=[(1, 0.01), (8, 0.012), (32, 0.03), (512, 0.4)],
    row=5e-4,
    sampled=2e-4,
    pair=3e-8,
    context=1e-6,
    scheduling=Scheduling(),
)


def designed_points(noise: float = 0.0) -> list[Point]:
    rng = np.random.default_rng(3)
    steps = design(512, 64, 4096, 131_072, 16)
    loads = [load_of(plan_of(0, step, 16, 50)) for step in steps]
    return [Point(load, TRUTH.seconds(load) * float(np.exp(noise * rng.standard_normal()))) for load in loads]


def test_a_fit_recovers_the_model_behind_the_measurements() -> None:
    found = fit(designed_points())
    assert found.worst_error < 0.01
    assert found.profile.row == pytest.approx(TRUTH.row, rel=0.05)
    assert found.profile.sampled == pytest.approx(TRUTH.sampled, rel=0.05)
    assert found.profile.pair == pytest.approx(TRUTH.pair, rel=0.05)
    assert found.profile.context == pytest.approx(TRUTH.context, rel=0.05)
    for tokens in (1, 4, 8, 32, 100, 512):
        load = Load(1, 1, tokens, 1000, 1000 * tokens)
        assert found.profile.seconds(load) == pytest.approx(TRUTH.seconds(load), rel=0.03)


def test_a_fit_sees_through_noise_and_says_how_much_it_misses() -> None:
    found = fit(designed_points(noise=0.1))
    assert 0.02 < found.median_error < 0.1 < found.worst_error
    errors = [abs(found.profile.seconds(p.load) / TRUTH.seconds(p.load) - 1) for p in designed_points()]
    assert sorted(errors)[len(errors) // 2] < 0.05


def test_steps_during_which_the_machine_did_something_else_hardly_move_a_fit() -> None:
    rng = np.random.default_rng(5)
    points = designed_points(noise=0.03)
    for index in rng.choice(len(points), len(points) // 8, replace=False):
        points[index] = Point(points[index].load, points[index].seconds * float(rng.uniform(2.0, 5.0)))
    found = fit(points).profile
    errors = sorted(abs(found.seconds(p.load) / TRUTH.seconds(p.load) - 1) for p in designed_points())
    assert errors[len(errors) // 2] < 0.02
    assert errors[int(0.9 * len(errors))] < 0.06


def test_more_tokens_never_take_less_time() -> None:
    found = fit(designed_points(noise=0.3)).profile
    found.check()
    seconds = [seconds for _, seconds in found.tokens]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("points", [[], [Point(Load(1, 1, 1, 1, 1), 0.0)]])
def test_nothing_cannot_be_fitted(points: list[Point]) -> None:
    with pytest.raises(ValueError):
        fit(points)


def test_one_step_alone_is_a_fit_too() -> None:
    found = fit([Point(Load(1, 1, 1, 1, 1), 0.25)])
    assert found.worst_error < 1e-9


@settings(max_examples=60)
@given(seed=st.integers(0, 10_000), rows=st.integers(1, 30), columns=st.integers(1, 10))
def test_least_squares_meets_the_conditions_of_an_optimum(seed: int, rows: int, columns: int) -> None:
    rng = np.random.default_rng(seed)
    a, b = rng.standard_normal((rows, columns)), rng.standard_normal(rows)
    x = nonnegative_least_squares(a, b)
    # Karush-Kuhn-Tucker: feasible, no coordinate wants to grow, and those that are not at the border want nothing.
    gradient = a.T @ (a @ x - b)
    assert (x >= 0).all()
    assert (gradient >= -1e-7).all()
    assert abs(gradient @ x) < 1e-7


# ---- design ------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(
    max_tokens=st.integers(1, 600),
    max_rows=st.integers(1, 300),
    context=st.integers(2, 5000),
    pool=st.integers(64, 20_000),
    page_size=st.sampled_from([1, 16, 64]),
)
def test_a_designed_step_exceeds_no_limit(
    max_tokens: int, max_rows: int, context: int, pool: int, page_size: int
) -> None:
    for step in design(max_tokens, max_rows, context, pool, page_size):
        plan = plan_of(1, step, page_size, 50)
        assert plan.num_rows <= max_rows
        assert plan.num_tokens <= max_tokens
        assert max(row.start + row.new for row in step) <= context
        assert min(row.start for row in step) >= 0
        assert len(plan.kv_indices) * page_size <= pool


def test_a_designed_step_is_a_plan_that_an_executor_can_run() -> None:
    for number, step in enumerate(design(64, 8, 200, 4096, 16)):
        plan = plan_of(number, step, 16, 50)
        for row in range(plan.num_rows):
            first, end = plan.qo_indptr[row], plan.qo_indptr[row + 1]
            pages = plan.kv_indices[plan.kv_indptr[row] : plan.kv_indptr[row + 1]]
            positions = plan.positions[first:end]
            assert (plan.out_slots[first:end] == pages[positions // 16] * 16 + positions % 16).all()
            assert (len(pages) - 1) * 16 + plan.kv_last_page_len[row] == positions[-1] + 1
        assert len(set(plan.out_slots.tolist())) == plan.num_tokens
        assert len(set(plan.kv_indices.tolist())) == len(plan.kv_indices)
