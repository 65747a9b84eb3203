"""The ranges of sampling parameters, and the native spelling of them."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from srt.answer import RequestFailed
from srt.messages import SamplingParams
from srt.sampling_rules import (
    MAX_BIASED_TOKENS,
    MAX_STOP_STRINGS,
    NativeSampling,
    check_sampling,
    sampling_from_native,
)

VOCABULARY = 512
RANGES = {
    "temperature": (0.0, 100.0, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (0.0, 100.0, True),
    "frequency_penalty": (-2.0, 2.0, False),
    "presence_penalty": (-2.0, 2.0, False),
}


@given(st.sampled_from(sorted(RANGES)), st.floats() | st.sampled_from([-2.0, -0.0, 0.0, 1.0, 2.0, 100.0]))
def test_a_number_is_taken_when_it_is_in_its_range_and_else_named(name: str, value: float) -> None:
    low, high, above = RANGES[name]
    params = msgspec.structs.replace(SamplingParams(), **{name: value})
    if not math.isnan(value) and (low < value if above else low <= value) and value <= high:
        assert check_sampling(params, VOCABULARY) == params
    else:
        with pytest.raises(RequestFailed) as caught:
            check_sampling(params, VOCABULARY)
        assert (caught.value.status, caught.value.param) == (400, name)
        assert f"{value:g}" in caught.value.message


@pytest.mark.parametrize(
    ("given_k", "taken"),
    [(-1, -1), (0, -1), (1, 1), (VOCABULARY - 1, VOCABULARY - 1), (VOCABULARY, -1), (1_000_000, -1), (2**62, -1)],
)
def test_top_k_is_off_when_it_excludes_nothing(given_k: int, taken: int) -> None:
    assert check_sampling(SamplingParams(top_k=given_k), VOCABULARY).top_k == taken


@pytest.mark.parametrize(
    ("params", "param"),
    [
        (SamplingParams(top_k=-2), "top_k"),
        (SamplingParams(max_new_tokens=-1), "max_new_tokens"),
        (SamplingParams(max_new_tokens=2**40), "max_new_tokens"),
        (SamplingParams(min_new_tokens=-1), "min_new_tokens"),
        (SamplingParams(max_new_tokens=3, min_new_tokens=4), "min_new_tokens"),
        (SamplingParams(logit_bias={VOCABULARY: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={-1: 1.0}), "logit_bias"),
        (SamplingParams(logit_bias={5: math.nan}), "logit_bias"),
        (SamplingParams(logit_bias={5: 1000.0}), "logit_bias"),
        (SamplingParams(logit_bias=dict.fromkeys(range(MAX_BIASED_TOKENS + 1), 1.0)), "logit_bias"),
        (SamplingParams(stop=("",)), "stop"),
        (SamplingParams(stop=("ok", "\ud800")), "stop"),
        (SamplingParams(stop=("x" * 5000,)), "stop"),
        (SamplingParams(stop=tuple(map(str, range(MAX_STOP_STRINGS + 1)))), "stop"),
        (SamplingParams(stop_token_ids=(VOCABULARY,)), "stop_token_ids"),
        (SamplingParams(stop_token_ids=tuple(range(512)) * 3), "stop_token_ids"),
    ],
)
def test_what_is_out_of_range_is_named(params: SamplingParams, param: str) -> None:
    with pytest.raises(RequestFailed) as caught:
        check_sampling(params, VOCABULARY)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_native_names_become_ours() -> None:
    native = sampling_from_native(
        {
            "max_new_tokens": 5,
            "min_new_tokens": 2.0,
            "temperature": 0,
            "top_k": 4,
            "stop": "end",
            "stop_token_ids": [3, 4],
            "ignore_eos": True,
            "logit_bias": {"7": -5, 8: 2.5},
            "n": 3,
            "sampling_seed": 11,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "top_p": None,
        }
    )
    assert native.params == SamplingParams(
        max_new_tokens=5,
        min_new_tokens=2,
        temperature=0.0,
        top_k=4,
        stop=("end",),
        stop_token_ids=(3, 4),
        ignore_eos=True,
        logit_bias={7: -5.0, 8: 2.5},
        no_stop_trim=True,
        skip_special_tokens=False,
    )
    assert (native.n, native.seed) == (3, 11)


def test_native_defaults_are_those_of_the_native_interface() -> None:
    assert sampling_from_native(None).params == SamplingParams(max_new_tokens=128)
    assert sampling_from_native({"max_new_tokens": None}).params.max_new_tokens is None
    assert (sampling_from_native({}).n, sampling_from_native({}).seed) == (1, None)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
NAMES = [field for field in SamplingParams.__struct_fields__ if field != "stop"]
NAMES += ["stop", "n", "seed", "sampling_seed", "other"]


def outcome(given_json: Any) -> NativeSampling | RequestFailed:
    try:
        native = sampling_from_native(given_json)
        check_sampling(native.params, VOCABULARY)
    except RequestFailed as failure:
        return failure
    return native


@given(st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3) | JSON)
def test_whatever_json_stands_there_is_taken_or_refused_with_a_name(given_json: Any) -> None:
    result = outcome(given_json)
    if isinstance(result, RequestFailed):
        assert result.status == 400
        assert result.param
    else:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(result.params), type=SamplingParams) == result.params
        assert 1 <= result.n <= 128


def test_both_spellings_of_the_seed_must_agree() -> None:
    assert sampling_from_native({"seed": 4, "sampling_seed": 4}).seed == 4
    with pytest.raises(RequestFailed, match="sampling_seed"):
        sampling_from_native({"seed": 4, "sampling_seed": 5})
