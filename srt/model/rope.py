"""Rotary position embedding (Su et al., "RoFormer", 2021) in float32, in the layout of Hugging Face checkpoints.

Dimension i of a head is rotated together with dimension i + head_dim / 2.
"""

from __future__ import annotations

import math

import torch

from srt.model.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each rotated pair, float32 [head_dim / 2], with the configured scaling applied."""
    # float32 throughout, as the checkpoints were trained: other roundings drift apart at high positions.
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        wavelengths = 2 * math.pi / frequencies
        low, high = rope.low_freq_factor, rope.high_freq_factor
        original = rope.original_max_position_embeddings
        # 0 where the wavelength is long (scaled fully), 1 where it is short (kept), a linear blend in between.
        kept = ((original / wavelengths - low) / (high - low)).clamp(0.0, 1.0)
        return (1 - kept) * frequencies / rope.factor + kept * frequencies
    return frequencies


def rotation(frequencies: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine for `positions` int [T]: float32 [T, 1, head_dim / 2] each, made once per step."""
    angles = positions.to(torch.float32)[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(heads: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Rotate `heads` [T, heads, head_dim] by the step's angles; computed in float32, returned in the dtype given."""
    first, second = heads.float().chunk(2, dim=-1)
    rotated = torch.empty(heads.shape, dtype=torch.float32, device=heads.device)
    left, right = rotated.chunk(2, dim=-1)
    torch.mul(first, cosine, out=left).addcmul_(second, sine, value=-1)
    torch.mul(second, cosine, out=right).addcmul_(first, sine)
    return rotated.to(heads.dtype)
