"""Tiny random models of every family, made with transformers' own classes and saved as folders."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

SIZES = {
    "vocab_size": 269,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "attn_implementation": "eager",
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}


@dataclass(frozen=True)
class FamilyCase:
    """A model class with the settings that make it special."""

    config_class: Any
    model_class: Any
    settings: dict[str, Any]


CASES = {
    "llama": FamilyCase(LlamaConfig, LlamaForCausalLM, {"head_dim": 16}),
    "llama-one-kv-head-tied": FamilyCase(
        LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1, "tie_word_embeddings": True}
    ),
    "llama-many-heads-to-one": FamilyCase(
        LlamaConfig, LlamaForCausalLM, {"num_attention_heads": 16, "num_key_value_heads": 1, "head_dim": 16}
    ),
    "llama-biases": FamilyCase(LlamaConfig, LlamaForCausalLM, {"attention_bias": True, "mlp_bias": True}),
    "llama3-rope": FamilyCase(LlamaConfig, LlamaForCausalLM, {"rope_parameters": LLAMA3_ROPE}),
    "llama-linear-rope": FamilyCase(LlamaConfig, LlamaForCausalLM, {"rope_parameters": LINEAR_ROPE}),
    "mistral": FamilyCase(MistralConfig, MistralForCausalLM, {"sliding_window": None, "head_dim": 32}),
    "mistral-window": FamilyCase(MistralConfig, MistralForCausalLM, {"sliding_window": 24}),
    "qwen2": FamilyCase(Qwen2Config, Qwen2ForCausalLM, {"tie_word_embeddings": True}),
    "qwen2-window-in-upper-layers": FamilyCase(
        Qwen2Config, Qwen2ForCausalLM, {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 1}
    ),
    "qwen3": FamilyCase(Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "attention_bias": True}),
    "gemma2": FamilyCase(
        Gemma2Config,
        Gemma2ForCausalLM,
        {
            "head_dim": 32,
            "sliding_window": 24,
            # Small enough to bend the scores and logits of a random model.
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 1.5,
            "query_pre_attn_scalar": 24,
        },
    ),
    "gemma3": FamilyCase(
        Gemma3TextConfig,
        Gemma3ForCausalLM,
        {
            "head_dim": 32,
            "num_key_value_heads": 1,
            "sliding_window": 70,
            "query_pre_attn_scalar": 40,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": LINEAR_ROPE,
                "sliding_attention": {"rope_type": "default", "rope_theta": 700.0},
            },
        },
    ),
    "gemma3-capped": FamilyCase(
        Gemma3TextConfig, Gemma3ForCausalLM, {"head_dim": 16, "sliding_window": 280, "final_logit_softcapping": 1.5}
    ),
}


# One of each family, with what makes it special, for the sizes of heads that models of today have.
EVERY_FAMILY = ["llama3-rope", "mistral-window", "qwen2", "qwen3", "gemma2", "gemma3"]
HEAD_DIMS = [64, 80, 96, 128, 256]


def save_family(case: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Write the random float32 model of a case into `folder`, with biases and norms that are not trivial.

    `changes`: settings of the configuration beside those of the case.
    """
    torch.manual_seed(seed)
    family = CASES[case]
    model = family.model_class(family.config_class(**{**SIZES, **family.settings, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                # Gemma's norms multiply by 1 + weight.
                center = 1.0 if "norm" in name and not case.startswith("gemma") else 0.0
                parameter.copy_(center + 0.2 * torch.randn(parameter.shape))
            else:
                parameter.copy_(torch.randn(parameter.shape) * (1.2 / parameter.shape[-1] ** 0.5))
    model.save_pretrained(folder)
    return folder


def reference_logits(folder: Path, ids: list[int]) -> torch.Tensor:
    """transformers' float32 logits [tokens, vocab] for one sequence."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0]
    return logits
