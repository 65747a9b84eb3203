"""The tiny model of the tests as a GGUF file."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from gguf import GGUFWriter, TokenType
from safetensors.numpy import load_file

TENSOR_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
LAYER_NAMES = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}


def save_tiny_gguf(model: Path, target: Path, splitting: str = "smollm") -> Path:
    """Write the model of the folder `model` as a float32 GGUF file."""
    config = json.loads((model / "config.json").read_text())
    target.parent.mkdir(parents=True, exist_ok=True)
    writer = GGUFWriter(target, "llama")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _add_tokenizer(writer, model, splitting)
    for name, weight in load_file(model / "model.safetensors").items():
        writer.add_tensor(_gguf_name(name), _reordered(name, weight, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def _add_tokenizer(writer: GGUFWriter, model: Path, splitting: str) -> None:
    spec = json.loads((model / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = spec["model"]["vocab"]
    specials = {token["content"] for token in spec["added_tokens"]}
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types([TokenType.CONTROL if token in specials else TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in spec["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(0)
    writer.add_add_bos_token(False)
    writer.add_chat_template(json.loads((model / "tokenizer_config.json").read_text())["chat_template"])


def _gguf_name(name: str) -> str:
    if name in TENSOR_NAMES:
        return TENSOR_NAMES[name]
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{LAYER_NAMES[part]}"


def _reordered(name: str, weight: np.ndarray, config: dict[str, int]) -> np.ndarray:
    """GGUF keeps the rows of query and key in the order of interleaved rotary pairs."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for part, count in heads.items():
        if part in name:
            rows, columns = weight.shape
            return weight.reshape(count, 2, rows // count // 2, columns).swapaxes(1, 2).reshape(rows, columns).copy()
    return weight
