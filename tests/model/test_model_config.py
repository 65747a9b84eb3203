"""Reading a model's configuration: both styles of transformers, every family, and refusals that name what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from srt.model.config import (
    BrokenModelFolder,
    RopeConfig,
    UnsupportedModel,
    kv_bytes_per_token,
    read_model_config,
    read_model_facts,
)

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
}


def write(folder: Path, **changes: Any) -> Path:
    """A folder with BASE as its config.json; a change to Ellipsis leaves the key out."""
    values = {key: value for key, value in {**BASE, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def test_the_older_and_the_newer_style_say_the_same(tmp_path: Path) -> None:
    scaling = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    older = read_model_config(
        write(tmp_path, rope_theta=5e5, rope_scaling={"rope_type": "llama3", **scaling}, torch_dtype="bfloat16")
    )
    newer = read_model_config(
        write(tmp_path, rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **scaling}, dtype="bfloat16")
    )
    assert older == newer
    assert older.rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 512)
    assert older.dtype == "bfloat16"


def test_linear_scaling_is_read_under_its_oldest_name(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, rope_scaling={"type": "linear", "factor": 2.0}))
    assert config.rope == RopeConfig(10000.0, "linear", 2.0)


def test_absent_keys_take_the_familys_defaults(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path, num_key_value_heads=..., rms_norm_eps=...))
    assert (config.num_kv_heads, config.head_dim, config.rms_norm_eps) == (8, 8, 1e-6)
    assert (config.rope, config.tie_word_embeddings, config.qkv_bias, config.dtype) == (
        RopeConfig(10000.0),
        False,
        False,
        "float32",
    )
    assert read_model_config(write(tmp_path, architectures=["Qwen3ForCausalLM"])).head_dim == 128


def test_families_differ_in_biases_and_norms(tmp_path: Path) -> None:
    qwen2 = read_model_config(write(tmp_path, architectures=["Qwen2ForCausalLM"]))
    assert (qwen2.qkv_bias, qwen2.o_bias, qwen2.qk_norm, qwen2.model_type) == (True, False, False, "qwen2")
    qwen3 = read_model_config(write(tmp_path, architectures=["Qwen3ForCausalLM"], attention_bias=True))
    assert (qwen3.qkv_bias, qwen3.o_bias, qwen3.qk_norm) == (True, True, True)
    llama = read_model_config(write(tmp_path, attention_bias=True, mlp_bias=True))
    assert (llama.qkv_bias, llama.o_bias, llama.mlp_bias) == (True, True, True)
    mistral = read_model_config(write(tmp_path, architectures=["MistralForCausalLM"], attention_bias=True))
    assert not mistral.qkv_bias


def test_sliding_windows_are_told_for_each_layer(tmp_path: Path) -> None:
    def windows(name: str, **changes: Any) -> tuple[int | None, ...]:
        return read_model_config(write(tmp_path, architectures=[name], **changes)).sliding_windows

    assert windows("LlamaForCausalLM", sliding_window=7) == (None,) * 4
    assert windows("MistralForCausalLM", sliding_window=7) == (7,) * 4
    assert windows("MistralForCausalLM", sliding_window=None) == (None,) * 4
    assert windows("MistralForCausalLM") == (4096,) * 4
    assert windows("Qwen2ForCausalLM", sliding_window=7) == (None,) * 4
    assert windows("Qwen2ForCausalLM", sliding_window=7, use_sliding_window=True, max_window_layers=3) == (
        (None,) * 3 + (7,)
    )
    kinds = ["full_attention", "sliding_attention"] * 2
    assert windows("Qwen3ForCausalLM", sliding_window=7, use_sliding_window=True, layer_types=kinds) == ((None, 7) * 2)


def test_gemma_3_has_ropes_and_windows_by_the_type_of_a_layer_in_both_styles(tmp_path: Path) -> None:
    gemma: dict[str, Any] = {"architectures": ["Gemma3ForCausalLM"], "sliding_window": 32, "head_dim": ...}
    scaling = {"rope_type": "linear", "factor": 8.0}
    older = read_model_config(
        write(
            tmp_path,
            **gemma,
            sliding_window_pattern=3,
            rope_theta=2e6,
            rope_local_base_freq=5000.0,
            rope_scaling=scaling,
        )
    )
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    ropes = {"full_attention": {"rope_theta": 2e6, **scaling}, "sliding_attention": {"rope_theta": 5000.0}}
    assert older == read_model_config(write(tmp_path, **gemma, layer_types=kinds, rope_parameters=ropes))
    assert older.sliding_windows == (32, 32, None, 32)
    assert (older.rope, older.window_rope) == (RopeConfig(2e6, "linear", 8.0), RopeConfig(5000.0))
    assert (older.head_dim, older.attention_scale, older.embedding_scale) == (256, 256**-0.5, 8.0)
    assert (older.qk_norm, older.post_norms, older.unit_offset_norms, older.tie_word_embeddings) == (True,) * 4
    assert (older.activation, older.attention_softcap, older.final_softcap) == ("gelu_tanh", None, None)
    bare = read_model_config(write(tmp_path, **gemma, num_hidden_layers=7))
    assert bare.sliding_windows == (32,) * 5 + (None, 32)
    assert (bare.rope, bare.window_rope) == (RopeConfig(1e6), RopeConfig(1e4))


def test_gemma_2_has_soft_caps_unless_they_are_null(tmp_path: Path) -> None:
    gemma = {"architectures": ["Gemma2ForCausalLM"], "query_pre_attn_scalar": 144}
    config = read_model_config(write(tmp_path, **gemma))
    assert (config.attention_softcap, config.final_softcap, config.attention_scale) == (50.0, 30.0, 1 / 12)
    assert config.sliding_windows == (4096, None) * 2
    assert (config.rope, config.window_rope, config.qk_norm) == (RopeConfig(10000.0), None, False)
    config = read_model_config(write(tmp_path, **gemma, attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (config.attention_softcap, config.final_softcap) == (None, None)


def test_the_architecture_may_be_known_by_the_model_type_alone(tmp_path: Path) -> None:
    assert read_model_config(write(tmp_path, architectures=..., model_type="qwen2")).model_type == "qwen2"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "GPT2LMHeadModel"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ..., "model_type": "gpt2"}, "gpt2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"hidden_act": "gelu_pytorch_tanh"}, "gelu_pytorch_tanh"),
        ({"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "silu"}, "silu"),
        ({"architectures": ["Gemma3ForCausalLM"], "use_bidirectional_attention": True}, "bidirectional"),
        ({"architectures": ["Gemma3ForCausalLM"], "attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"architectures": ["Gemma3ForCausalLM"], "layer_types": ["chunked_attention"] * 4}, "chunked_attention"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "dynamic"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["linear_attention"] * 4,
            },
            "linear_attention",
        ),
    ],
)
def test_what_is_not_supported_is_refused_by_name_in_one_line(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_model_config(write(tmp_path, **changes))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"vocab_size": ...}, "vocab_size"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": True}, "num_attention_heads"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"head_dim": 7}, "head_dim"),
        ({"rms_norm_eps": -1}, "rms_norm_eps"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"rope_scaling": [1]}, "rope_scaling"),
        ({"architectures": ["Gemma3ForCausalLM"], "rope_parameters": {"rope_theta": 1e4}}, "rope_parameters"),
        ({"architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": -3.0}, "final_logit_softcapping"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings"),
        ({"architectures": ["MistralForCausalLM"], "num_key_value_heads": ...}, "num_key_value_heads"),
    ],
)
def test_a_configuration_that_makes_no_sense_names_the_key(tmp_path: Path, changes: dict[str, Any], key: str) -> None:
    with pytest.raises(BrokenModelFolder) as caught:
        read_model_config(write(tmp_path, **changes))
    assert key in str(caught.value)
    assert "\n" not in str(caught.value)


def test_missing_and_broken_folders_are_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelFolder, match="no such folder"):
        read_model_config(tmp_path / "absent")
    with pytest.raises(BrokenModelFolder, match=r"no config\.json there"):
        read_model_config(tmp_path)
    for content in (b"{", b"\xff\xfe", b"[]"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(BrokenModelFolder, match=r"config\.json") as caught:
            read_model_config(tmp_path)
        assert "\n" not in str(caught.value)


def test_facts_gather_every_end_token_that_the_folder_knows(tmp_path: Path) -> None:
    write(tmp_path, eos_token_id=2)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    added = [{"id": 0, "content": "<s>"}, {"id": 3, "content": "<|im_end|>"}, {"id": 4, "content": "</s>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    facts = read_model_facts(tmp_path, "some-name")
    assert facts.eos_token_ids == (2, 7)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "chat_template": "{{ '<|im_end|>' }}"})
    )
    facts = read_model_facts(tmp_path, "some-name")
    assert facts.eos_token_ids == (2, 3, 4, 7)
    assert (facts.name, facts.path, facts.vocab_size, facts.context_length) == ("some-name", str(tmp_path), 1000, 4096)


def test_facts_leave_out_ids_beyond_the_vocabulary_and_bear_their_absence(tmp_path: Path) -> None:
    assert read_model_facts(write(tmp_path, eos_token_id=[1, 5000]), "m").eos_token_ids == (1,)
    assert read_model_facts(write(tmp_path, eos_token_id=None), "m").eos_token_ids == ()


def test_kv_bytes_count_keys_and_values_of_all_layers(tmp_path: Path) -> None:
    config = read_model_config(write(tmp_path))
    assert kv_bytes_per_token(config, "float32") == 2 * 4 * 2 * 8 * 4
    assert kv_bytes_per_token(config, "bfloat16") == 2 * 4 * 2 * 8 * 2


def test_reading_a_configuration_does_not_import_torch() -> None:
    code = "import sys, srt.model.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
