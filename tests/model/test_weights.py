"""Loading weights: files, shards, dtypes, and tensors that are missing, left over or of the wrong shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.model.config import BrokenModelFolder, read_model_config
from srt.model.weights import Weights, load_weights
from tests.model.families import save_family


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return load_weights(folder, read_model_config(folder), dtype)


def rewrite(folder: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, folder / "model.safetensors")


def test_shards_give_the_same_tensors_as_one_file(tmp_path: Path) -> None:
    whole = load(save_family("qwen3", tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in parts.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load(tmp_path)
    assert torch.equal(whole.lm_head, sharded.lm_head)
    for one, other in zip(whole.layers, sharded.layers, strict=True):
        assert torch.equal(one.qkv, other.qkv)
        assert torch.equal(one.gate_up, other.gate_up)
        assert one.qk_norm is not None
        assert torch.equal(one.qk_norm, other.qk_norm)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(BrokenModelFolder, match=r"no b\.safetensors there"):
        load(tmp_path)


def test_an_index_that_names_tensors_its_files_lack_is_refused(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    names = [*load_file(tmp_path / "a.safetensors"), "model.layers.9.mlp.up_proj.weight"]
    index = {"weight_map": dict.fromkeys(names, "a.safetensors")}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(BrokenModelFolder, match=r"model\.layers\.9\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_every_stored_dtype_is_converted(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for stored in (torch.float16, torch.bfloat16, torch.float32):
        rewrite(tmp_path, {name: tensor.to(stored) for name, tensor in tensors.items()})
        for wanted in (torch.float32, torch.bfloat16):
            weights = load(tmp_path, wanted)
            assert weights.layers[0].qkv.dtype == weights.embedding.dtype == wanted
            expected = tensors["model.layers.0.self_attn.q_proj.weight"].to(stored).to(wanted)
            assert torch.equal(weights.layers[0].qkv[: len(expected)], expected)


def test_tied_weights_are_one_tensor_even_when_the_file_holds_a_copy(tmp_path: Path) -> None:
    save_family("llama-one-kv-head-tied", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    rewrite(tmp_path, tensors)
    weights = load(tmp_path)
    assert weights.lm_head is weights.embedding


def test_missing_tensors_are_named(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    rewrite(tmp_path, tensors)
    with pytest.raises(BrokenModelFolder, match=r"1 tensors are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)


def test_left_over_tensors_are_named_but_old_rotary_buffers_are_not(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert len(load(tmp_path).layers) == 3
    rewrite(tmp_path, {**tensors, "model.layers.0.self_attn.q_proj.bias": torch.ones(64)})
    with pytest.raises(BrokenModelFolder, match=r"model\.layers\.0\.self_attn\.q_proj\.bias"):
        load(tmp_path)


def test_a_wrong_shape_is_told_with_both_shapes(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, {**tensors, "model.norm.weight": torch.ones(63)})
    with pytest.raises(BrokenModelFolder, match=r"model\.norm\.weight has shape \[63\].*asks for \[64\]"):
        load(tmp_path)


def test_missing_and_broken_files_are_told_in_one_line(tmp_path: Path) -> None:
    save_family("llama", tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(BrokenModelFolder, match=r"model\.safetensors: cannot be read") as caught:
        load(tmp_path)
    assert "\n" not in str(caught.value)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(BrokenModelFolder, match=r"neither model\.safetensors nor"):
        load(tmp_path)
