"""Rotary frequencies and rotations against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from srt.model.config import read_model_config
from srt.model.rope import inverse_frequencies, rotate, rotation
from tests.model.families import CASES, SIZES


@pytest.mark.parametrize("case", ["llama", "llama3-rope", "llama-linear-rope"])
def test_frequencies_are_those_of_transformers_to_the_bit(tmp_path: Path, case: str) -> None:
    config = LlamaConfig(**{**SIZES, **CASES[case].settings, "architectures": ["LlamaForCausalLM"]})
    config.save_pretrained(tmp_path)
    embedding = LlamaRotaryEmbedding(config)
    read = read_model_config(tmp_path)
    frequencies = inverse_frequencies(read.rope, read.head_dim)
    assert torch.equal(frequencies, embedding.inv_freq)
    positions = torch.tensor([0, 1, 17, 8191, 131_071], dtype=torch.int32)
    heads = torch.randn(5, 3, config.head_dim)
    cosine, sine = embedding(heads, positions[None])
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cosine, sine)
    torch.testing.assert_close(rotate(heads, *rotation(frequencies, positions)), expected[0].transpose(0, 1))


def test_rotating_bfloat16_rounds_once_at_the_end() -> None:
    heads = torch.randn(4, 2, 16).bfloat16()
    turn = rotation(torch.rand(8), torch.tensor([0, 5, 900, 8000]))
    assert torch.equal(rotate(heads, *turn), rotate(heads.float(), *turn).bfloat16())
