"""Weights from safetensors files by memory map: which tensors a model needs, under which names, in which dtype."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from srt.model.config import BrokenModelFolder, ModelConfig, read_json

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
NAMES_SHOWN = 5


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer's tensors; matrices are [out, in], biases None where the family has none.

    qkv: [(heads + 2 * kv_heads) * head_dim, hidden], the rows of q, then k, then v.
    gate_up: [2 * intermediate, hidden], the rows of gate, then up.
    qk_norm: [heads + kv_heads, head_dim], the norm weight of each head of q, then k.
    attention_post_norm, mlp_post_norm: [hidden], None where a branch is added to the stream as it is.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    attention_post_norm: torch.Tensor | None = None
    mlp_post_norm: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Weights:
    """All tensors of a model in one dtype.  `lm_head` is `embedding` itself where the two are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    lm_head: torch.Tensor


def norm_names(config: ModelConfig) -> dict[str, str]:
    """Field of `LayerWeights` -> name, within a layer, of the tensor of each norm over the hidden size."""
    if not config.post_norms:
        return {"input_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    return {
        "input_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor that the model needs, in the order of the layers."""
    hidden, inner, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * head_dim, config.num_kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden)}
    for layer in range(config.num_layers):
        prefix = f"model.layers.{layer}"
        for name in norm_names(config).values():
            shapes[f"{prefix}.{name}.weight"] = (hidden,)
        linears = (
            ("self_attn.q_proj", q_size, hidden, config.qkv_bias),
            ("self_attn.k_proj", kv_size, hidden, config.qkv_bias),
            ("self_attn.v_proj", kv_size, hidden, config.qkv_bias),
            ("self_attn.o_proj", hidden, q_size, config.o_bias),
            ("mlp.gate_proj", inner, hidden, config.mlp_bias),
            ("mlp.up_proj", inner, hidden, config.mlp_bias),
            ("mlp.down_proj", hidden, inner, config.mlp_bias),
        )
        for name, rows, columns, has_bias in linears:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = (head_dim,)
            shapes[f"{prefix}.self_attn.k_norm.weight"] = (head_dim,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    return shapes


class TensorSource:
    """Tensors by name out of one or several mapped files, converted on the way to one dtype."""

    def __init__(self, files: dict[str, Any], dtype: torch.dtype) -> None:
        self._files = files
        self._dtype = dtype

    def names(self) -> set[str]:
        """Every tensor there is."""
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        """Without touching the data."""
        return tuple(self._files[name].get_slice(name).get_shape())

    def get(self, name: str) -> torch.Tensor:
        """The tensor; where the dtype is right already its memory is the file's, read when it is first used."""
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor.to(self._dtype)

    def stack(self, names: tuple[str, ...]) -> torch.Tensor:
        """The named tensors one below the other, in one block of memory."""
        return torch.cat([self.get(name) for name in names])


def load_weights(folder: Path, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Map the safetensors of `folder` and bring them into the form that the layers use.

    Raises BrokenModelFolder when files or tensors are missing, have another shape than the configuration says, or
    are there but belong to nothing that would be computed.
    """
    with open_tensors(folder, dtype) as source:
        check_tensors(folder, config, source)
        embedding = source.get("model.embed_tokens.weight")
        return Weights(
            embedding=embedding,
            layers=tuple(_layer(source, config, f"model.layers.{layer}") for layer in range(config.num_layers)),
            norm=source.get("model.norm.weight"),
            lm_head=embedding if config.tie_word_embeddings else source.get("lm_head.weight"),
        )


@contextmanager
def open_tensors(folder: Path, dtype: torch.dtype) -> Iterator[TensorSource]:
    """The tensors of model.safetensors, or of the files that model.safetensors.index.json names."""
    with ExitStack() as stack:
        if (folder / SINGLE_FILE).is_file():
            opened = stack.enter_context(_open(folder / SINGLE_FILE))
            yield TensorSource(dict.fromkeys(opened.keys(), opened), dtype)
            return
        if not (folder / INDEX_FILE).is_file():
            raise BrokenModelFolder(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} there")
        weight_map = read_json(folder / INDEX_FILE).get("weight_map")
        if not isinstance(weight_map, dict):
            raise BrokenModelFolder(f"{folder / INDEX_FILE}: holds no weight_map")
        shards = {name: stack.enter_context(_open(folder / name)) for name in sorted(set(weight_map.values()))}
        held = {shard: set(opened.keys()) for shard, opened in shards.items()}
        lost = [name for name, shard in weight_map.items() if name not in held[shard]]
        if lost:
            raise BrokenModelFolder(f"{folder / INDEX_FILE}: names tensors that its files lack: {_some(lost)}")
        yield TensorSource({name: shards[shard] for name, shard in weight_map.items()}, dtype)


def _open(path: Path) -> Any:
    if not path.is_file():
        raise BrokenModelFolder(f"{path.parent}: no {path.name} there")
    try:
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        raise BrokenModelFolder(f"{path}: cannot be read: {error}") from None


def check_tensors(folder: Path, config: ModelConfig, source: TensorSource) -> None:
    """Raises BrokenModelFolder unless the source holds exactly what the configuration needs."""
    expected = expected_shapes(config)
    found = source.names()
    missing = [name for name in expected if name not in found]
    if missing:
        raise BrokenModelFolder(f"{folder}: {len(missing)} tensors are missing: {_some(missing)}")
    unexpected = sorted(name for name in found - set(expected) if not _may_be_ignored(name, config))
    if unexpected:
        raise BrokenModelFolder(
            f"{folder}: {len(unexpected)} tensors belong to nothing in a {config.model_type} model with this "
            f"config.json: {_some(unexpected)}"
        )
    for name, shape in expected.items():
        if source.shape(name) != shape:
            raise BrokenModelFolder(
                f"{folder}: tensor {name} has shape {list(source.shape(name))}, config.json asks for {list(shape)}"
            )


def _may_be_ignored(name: str, config: ModelConfig) -> bool:
    # Old checkpoints carry the rotary frequencies, which follow from the configuration, and a copy of tied weights.
    return name.endswith(".rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:NAMES_SHOWN])
    return shown if len(names) <= NAMES_SHOWN else f"{shown} and {len(names) - NAMES_SHOWN} more"


def _layer(source: TensorSource, config: ModelConfig, prefix: str) -> LayerWeights:
    attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
    qkv = tuple(f"{attention}.{part}_proj" for part in "qkv")
    gate_up = (f"{mlp}.gate_proj", f"{mlp}.up_proj")

    def weight(names: tuple[str, ...]) -> torch.Tensor:
        return source.stack(tuple(f"{name}.weight" for name in names))

    def bias(names: tuple[str, ...], there: bool) -> torch.Tensor | None:
        return source.stack(tuple(f"{name}.bias" for name in names)) if there else None

    qk_norm = None
    if config.qk_norm:
        q_norm, k_norm = source.get(f"{attention}.q_norm.weight"), source.get(f"{attention}.k_norm.weight")
        qk_norm = torch.cat([q_norm.expand(config.num_heads, -1), k_norm.expand(config.num_kv_heads, -1)])
    return LayerWeights(
        qkv=weight(qkv),
        qkv_bias=bias(qkv, config.qkv_bias),
        qk_norm=qk_norm,
        o=source.get(f"{attention}.o_proj.weight"),
        o_bias=bias((f"{attention}.o_proj",), config.o_bias),
        gate_up=weight(gate_up),
        gate_up_bias=bias(gate_up, config.mlp_bias),
        down=source.get(f"{mlp}.down_proj.weight"),
        down_bias=bias((f"{mlp}.down_proj",), config.mlp_bias),
        **{field: source.get(f"{prefix}.{name}.weight") for field, name in norm_names(config).items()},
    )
