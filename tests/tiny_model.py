"""A tiny random Llama with its own tokenizer and chat template, written as a Hugging Face folder in a moment.

The weights are random but wide enough that the best token of a step is well apart from the second best, so
that greedy ids do not hang on rounding.  The folder is the same, byte for byte, in every test session.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 512
CONTEXT_LENGTH = 2048
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 2

# What the tokenizer learns its merges from; any prose that has a few hundred common letter pairs will do.
CORPUS = (
    "The sapwood of a tree is the living wood just under the bark. It carries water from the roots to the leaves.",
    "Each year the tree grows a new ring, and the oldest rings in the middle turn into heartwood, dark and dry.",
    "system user assistant You are a helpful assistant who answers questions about trees, rivers and numbers.",
    "Question: how many apples are left when seven of twelve have been eaten? Answer: five apples are left over.",
    "She opened the window, looked out over the harbour, and counted the ships that were coming in with the tide.",
    "def total(values): return sum(value for value in values if value > 0)  # only what is positive counts",
    "0 1 2 3 4 5 6 7 8 9 10 20 30 40 50 60 70 80 90 100 200 500 1000; Monday, Tuesday, Wednesday, Thursday, Friday.",
    "When the morning came there was nothing more to say, so they packed their things and walked towards the station.",
    "Words that share a beginning share a path: other, others, otherwise; weather, weathered; under, understand.",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer() -> Tokenizer:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` ids; the special tokens have the ids 0, 1 and 2."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def make_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights for a Llama of this configuration, under their Hugging Face names."""
    rng = np.random.default_rng(seed)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim

    def linear(out_size: int, in_size: int) -> np.ndarray:
        return (rng.standard_normal((out_size, in_size)) * (1.5 / in_size**0.5)).astype(np.float32)

    def norm() -> np.ndarray:
        return (1.0 + 0.1 * rng.standard_normal(hidden)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": rng.standard_normal((config["vocab_size"], hidden)).astype(np.float32),
        "model.norm.weight": norm(),
        "lm_head.weight": linear(config["vocab_size"], hidden) * np.float32(2.0),
    }
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        weights |= {
            f"{prefix}input_layernorm.weight": norm(),
            f"{prefix}self_attn.q_proj.weight": linear(q_size, hidden),
            f"{prefix}self_attn.k_proj.weight": linear(kv_size, hidden),
            f"{prefix}self_attn.v_proj.weight": linear(kv_size, hidden),
            f"{prefix}self_attn.o_proj.weight": linear(hidden, q_size),
            f"{prefix}post_attention_layernorm.weight": norm(),
            f"{prefix}mlp.gate_proj.weight": linear(inner, hidden),
            f"{prefix}mlp.up_proj.weight": linear(inner, hidden),
            f"{prefix}mlp.down_proj.weight": linear(hidden, inner),
        }
    return weights


def save_tiny_model(folder: Path) -> Path:
    """Write the tiny model into `folder` (made when absent) and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT_LENGTH,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "float32",
        "bos_token_id": 1,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
    }
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "unk_token": "<|endoftext|>",
        "model_max_length": CONTEXT_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    generation_config = {"bos_token_id": 1, "eos_token_id": EOS_ID, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config, indent=2))
    (folder / "generation_config.json").write_text(json.dumps(generation_config, indent=2))
    make_tokenizer().save(str(folder / "tokenizer.json"))
    save_file(make_weights(config), str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder
