"""Sampling settings of every kind, for tests that compare samplers."""

from __future__ import annotations

import random

from srt.messages import SamplingParams


def settings_of_all_kinds(rng: random.Random, vocab: int) -> SamplingParams:
    """Settings in which any of the features may be on."""
    return SamplingParams(
        temperature=rng.choice([0.0, 0.0, 0.4, 1.0, 2.5]),
        top_p=rng.choice([1.0, 1.0, 0.95, 0.4]),
        top_k=rng.choice([-1, -1, 1, 20, 700, 10**6]),
        min_p=rng.choice([0.0, 0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        frequency_penalty=rng.choice([0.0, 0.0, 0.7]),
        presence_penalty=rng.choice([0.0, 0.0, -0.4]),
        logit_bias=rng.choice([{}, {}, {3: 2.0, vocab - 1: -5.0}]),
        min_new_tokens=rng.choice([0, 2]),
    )
