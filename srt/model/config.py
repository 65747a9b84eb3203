"""The model's configuration as its folder states it, and the check that it is one we compute.   No torch here.

A folder is what Hugging Face's `save_pretrained` writes, in its older style (`rope_theta`, `rope_scaling`,
`torch_dtype`) or its newer one (`rope_parameters`, `dtype`).  Where a key is absent, the family's own default
holds, as in transformers.  Whatever would change the numbers and is not computed here is refused by its name.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from srt.config import ModelFacts

# Tokens that end a turn in the chat templates of these families, for folders whose settings name only the
# token that ends a text.
CHAT_END_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Number formats that KV can be kept in whatever the model is computed in.
KV_DTYPES = ("bfloat16", "int8")
# What a vector of K or V in int8 is multiplied with.
SCALE_BYTES = 4

Activation = Literal["silu", "gelu_tanh"]
# Every name that configurations give the activations.
ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class UnsupportedModel(Exception):
    """The folder holds a model that we do not compute; the message is one line that names what and where."""


class BrokenModelFolder(UnsupportedModel):
    """The folder, or a file that a model needs, is missing or cannot be read; the message is one line."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding.  `factor` and the three numbers after it count only for the kinds that use them.

    `linear` divides every frequency by `factor`; `llama3` divides the long wavelengths (beyond
    `original_max_position_embeddings / low_freq_factor`), keeps the short ones, and blends in between.
    """

    theta: float
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only model of the Llama or the Gemma family.

    `sliding_windows` has one entry for each layer: None, or the number of tokens that a token sees, itself
    included.  `dtype` is the one that the weights are stored in, as the configuration says.  What follows it is at its
    default in the Llama family: `window_rope` turns the heads of layers with a window where it is not `rope`;
    `unit_offset_norms`: a norm multiplies by 1 + its weight; `post_norms`: the outputs of attention and of the MLP are
    normed before they are added; a soft cap c makes c * tanh(s / c) of a score, or of a logit.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    tie_word_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_windows: tuple[int | None, ...]
    dtype: str
    window_rope: RopeConfig | None = None
    activation: Activation = "silu"
    unit_offset_norms: bool = False
    post_norms: bool = False
    scaled_embedding: bool = False
    query_pre_attn_scalar: float | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None

    @property
    def attention_scale(self) -> float:
        """What the products of queries and keys are multiplied with."""
        return 1.0 / math.sqrt(self.query_pre_attn_scalar or self.head_dim)

    @property
    def embedding_scale(self) -> float:
        """What embeddings are multiplied with, not yet rounded to the dtype of the weights."""
        return math.sqrt(self.hidden_size) if self.scaled_embedding else 1.0


@dataclass(frozen=True, slots=True)
class GemmaDefaults:
    """What the generations of Gemma differ in.  Of every `window_pattern` layers the last one sees everything."""

    window_pattern: int
    ropes_by_kind: bool = False
    attention_softcap: float | None = None
    final_softcap: float | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """What tells one architecture from the others, and the defaults of keys that its configurations may leave out."""

    model_type: str
    qkv_bias: bool = False
    bias_keys: bool = False
    qk_norm: bool = False
    head_dim: int | None = None
    kv_heads_default_to_heads: bool = False
    window: Literal["none", "all_layers", "switched", "patterned"] = "none"
    rms_norm_eps: float = 1e-6
    gemma: GemmaDefaults | None = None


GEMMA_HEAD_DIM = 256
FAMILIES = {
    "LlamaForCausalLM": Family("llama", bias_keys=True, kv_heads_default_to_heads=True),
    "MistralForCausalLM": Family("mistral", window="all_layers"),
    "Qwen2ForCausalLM": Family("qwen2", qkv_bias=True, window="switched"),
    "Qwen3ForCausalLM": Family("qwen3", bias_keys=True, qk_norm=True, head_dim=128, window="switched"),
    "Gemma2ForCausalLM": Family(
        "gemma2",
        bias_keys=True,
        head_dim=GEMMA_HEAD_DIM,
        window="patterned",
        gemma=GemmaDefaults(2, attention_softcap=50.0, final_softcap=30.0),
    ),
    "Gemma3ForCausalLM": Family(
        "gemma3_text",
        bias_keys=True,
        qk_norm=True,
        head_dim=GEMMA_HEAD_DIM,
        window="patterned",
        gemma=GemmaDefaults(6, ropes_by_kind=True),
    ),
}
DEFAULT_WINDOW = 4096


def kv_bytes_per_token(config: ModelConfig, dtype: str) -> int:
    """Bytes that the K and V of one token take in the pool, all layers together.

    `dtype`: float32, bfloat16, or int8 with a float32 scale for each vector of K and of V.
    """
    vector = config.head_dim + SCALE_BYTES if dtype == "int8" else config.head_dim * DTYPE_BYTES[dtype]
    return 2 * config.num_layers * config.num_kv_heads * vector


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.  Raises BrokenModelFolder when the file is absent or holds something else."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise BrokenModelFolder(f"{path.parent}: no {path.name} there") from None
    except (OSError, ValueError) as error:
        raise BrokenModelFolder(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise BrokenModelFolder(f"{path}: holds no JSON object")
    return value


class Fields:
    """The keys of a config.json, read with their type checked; what is wrong is refused with the file and the key."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def broken(self, key: str, expected: str) -> BrokenModelFolder:
        """The error for a key that is absent or is not what is expected."""
        found = f"is {self.values[key]!r}" if key in self.values else "is absent"
        return BrokenModelFolder(f"{self.path}: {key} {found}, expected {expected}")

    def integer(self, key: str, default: int | None = None) -> int:
        """A positive int; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise self.broken(key, "a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A positive number; null counts as absent."""
        value = self.values.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
            raise self.broken(key, "a positive number")
        return float(value)

    def optional_number(self, key: str, default: float | None) -> float | None:
        """A positive number; an explicit null stands for none, an absent key for the default."""
        if self.values.get(key, default) is None:
            return None
        return self.number(key, default)

    def boolean(self, key: str, default: bool) -> bool:
        """A bool; null counts as absent."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.broken(key, "true or false")
        return value

    def mapping(self, key: str) -> dict[str, Any]:
        """An object; null counts as absent, and absent as empty."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self.broken(key, "an object")
        return value


def read_model_config(folder: Path) -> ModelConfig:
    """The configuration in `folder`/config.json.

    Raises BrokenModelFolder when it is missing or makes no sense, UnsupportedModel when it asks for something
    that we do not compute.
    """
    if not folder.is_dir():
        raise BrokenModelFolder(f"{folder}: no such folder")
    fields = Fields(folder / "config.json", read_json(folder / "config.json"))
    family = _family(fields)
    _refuse_unsupported(fields, family)
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads if family.kv_heads_default_to_heads else None)
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", family.head_dim or max(1, hidden_size // num_heads))
    if num_heads % num_kv_heads:
        raise fields.broken("num_key_value_heads", f"a divisor of num_attention_heads ({num_heads})")
    if head_dim % 2:
        raise BrokenModelFolder(f"{fields.path}: head_dim is {head_dim}, expected an even number")
    num_layers = fields.integer("num_hidden_layers")
    config = ModelConfig(
        model_type=family.model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", family.rms_norm_eps),
        max_position_embeddings=fields.integer("max_position_embeddings"),
        rope=_rope(fields, family),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", family.gemma is not None),
        qkv_bias=family.qkv_bias or (family.bias_keys and fields.boolean("attention_bias", False)),
        o_bias=family.bias_keys and fields.boolean("attention_bias", False),
        mlp_bias=family.model_type == "llama" and fields.boolean("mlp_bias", False),
        qk_norm=family.qk_norm,
        sliding_windows=_sliding_windows(fields, family, num_layers),
        dtype=_dtype(fields),
    )
    return config if family.gemma is None else _as_gemma(config, fields, family.gemma)


def _as_gemma(config: ModelConfig, fields: Fields, defaults: GemmaDefaults) -> ModelConfig:
    return replace(
        config,
        window_rope=_window_rope(fields) if defaults.ropes_by_kind else None,
        activation="gelu_tanh",
        unit_offset_norms=True,
        post_norms=True,
        scaled_embedding=True,
        query_pre_attn_scalar=fields.number("query_pre_attn_scalar", GEMMA_HEAD_DIM),
        attention_softcap=fields.optional_number("attn_logit_softcapping", defaults.attention_softcap),
        final_softcap=fields.optional_number("final_logit_softcapping", defaults.final_softcap),
    )


def _family(fields: Fields) -> Family:
    architectures = fields.values.get("architectures") or []
    for name in architectures:
        if name in FAMILIES:
            return FAMILIES[name]
    known = ", ".join(FAMILIES)
    if architectures:
        raise UnsupportedModel(f"{fields.path}: architecture {architectures[0]} is not supported, only {known}")
    for family in FAMILIES.values():
        if fields.values.get("model_type") == family.model_type:
            return family
    found = fields.values.get("model_type")
    raise UnsupportedModel(f"{fields.path}: model type {found!r} is not supported, only those of {known}")


def _refuse_unsupported(fields: Fields, family: Family) -> None:
    quantization = fields.mapping("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "of an unnamed method")
        raise UnsupportedModel(f"{fields.path}: quantization_config {method} is not supported; use unquantised weights")
    # Gemma's folders may have hidden_act too, which counts for nothing there.
    key, wanted = ("hidden_act", "silu") if family.gemma is None else ("hidden_activation", "gelu_pytorch_tanh")
    activation = fields.values.get(key) or wanted
    if not isinstance(activation, str) or ACTIVATIONS.get(activation) != ACTIVATIONS[wanted]:
        raise UnsupportedModel(f"{fields.path}: {key} {activation!r} is not supported, only {wanted}")
    if fields.values.get("use_bidirectional_attention"):
        raise UnsupportedModel(f"{fields.path}: use_bidirectional_attention is not supported, only causal attention")
    if family.model_type == "gemma3_text" and fields.values.get("attn_logit_softcapping") is not None:
        # The reference reads the key and then leaves it out of its sums: which of the two was meant cannot be known.
        raise UnsupportedModel(f"{fields.path}: attn_logit_softcapping is not supported in a gemma3_text model")


def _rope(fields: Fields, family: Family) -> RopeConfig:
    by_kind = family.gemma is not None and family.gemma.ropes_by_kind
    if by_kind and fields.mapping("rope_parameters"):
        return _read_rope(fields, _rope_of_kind(fields, "full_attention"), "rope_theta", 1e6)
    key = "rope_parameters" if fields.mapping("rope_parameters") else "rope_scaling"
    parameters = Fields(fields.path, fields.mapping(key))
    if any(isinstance(value, dict) for value in parameters.values.values()):
        raise UnsupportedModel(f"{fields.path}: {key} that differ by layer type are not supported")
    return _read_rope(fields, parameters, "rope_theta", 1e6 if by_kind else 10000.0)


def _window_rope(fields: Fields) -> RopeConfig:
    return _read_rope(fields, _rope_of_kind(fields, "sliding_attention"), "rope_local_base_freq", 10000.0)


def _rope_of_kind(fields: Fields, kind: str) -> Fields:
    """Of `rope_parameters` by the layers' type those of one type; empty where the folder has the older keys."""
    by_kind = Fields(fields.path, fields.mapping("rope_parameters"))
    unknown = sorted(set(by_kind.values) - {"full_attention", "sliding_attention"})
    if unknown:
        raise fields.broken("rope_parameters", "an object with full_attention and sliding_attention")
    return Fields(fields.path, by_kind.mapping(kind))


def _read_rope(fields: Fields, parameters: Fields, theta_key: str, default_theta: float) -> RopeConfig:
    """The rope that `parameters` state; their theta may also stand in `fields` as `theta_key`."""
    theta = parameters.number("rope_theta", fields.number(theta_key, default_theta))
    for holder in (fields, parameters):
        if holder.number("partial_rotary_factor", 1.0) != 1.0:
            factor = holder.values["partial_rotary_factor"]
            raise UnsupportedModel(f"{fields.path}: partial_rotary_factor {factor} is not supported, only 1.0")
    kind = parameters.values.get("rope_type") or parameters.values.get("type") or "default"
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", parameters.number("factor"))
    if kind == "llama3":
        original = fields.integer("original_max_position_embeddings", fields.integer("max_position_embeddings"))
        return RopeConfig(
            theta,
            "llama3",
            parameters.number("factor"),
            parameters.number("low_freq_factor"),
            parameters.number("high_freq_factor"),
            parameters.integer("original_max_position_embeddings", original),
        )
    raise UnsupportedModel(f"{fields.path}: rope type {kind!r} is not supported, only default, linear and llama3")


def _sliding_windows(fields: Fields, family: Family, num_layers: int) -> tuple[int | None, ...]:
    if family.window == "none":
        return (None,) * num_layers
    if family.window == "all_layers":
        # An explicit null switches the window off; an absent key means the family's default.
        stated = fields.values.get("sliding_window", DEFAULT_WINDOW)
        return (None if stated is None else fields.integer("sliding_window", DEFAULT_WINDOW),) * num_layers
    if family.gemma is None and (
        not fields.boolean("use_sliding_window", False) or fields.values.get("sliding_window", DEFAULT_WINDOW) is None
    ):
        return (None,) * num_layers
    window = fields.integer("sliding_window", DEFAULT_WINDOW)
    layer_types = fields.values.get("layer_types")
    if layer_types is None and family.gemma is not None:
        pattern = fields.integer("sliding_window_pattern", family.gemma.window_pattern)
        return tuple(window if (layer + 1) % pattern else None for layer in range(num_layers))
    if layer_types is None:
        # As with the key absent in transformers: the first `max_window_layers` layers see everything.
        full = fields.values.get("max_window_layers", 28)
        if not isinstance(full, int):
            raise fields.broken("max_window_layers", "an integer")
        return tuple(window if layer >= full else None for layer in range(num_layers))
    kinds: dict[str, int | None] = {"full_attention": None, "sliding_attention": window}
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise fields.broken("layer_types", f"a list of {num_layers} entries, one for each layer")
    for kind in layer_types:
        if kind not in kinds:
            raise UnsupportedModel(f"{fields.path}: layer type {kind!r} is not supported, only {', '.join(kinds)}")
    return tuple(kinds[kind] for kind in layer_types)


def _dtype(fields: Fields) -> str:
    stored = fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"
    if stored not in ("float32", "bfloat16", "float16"):
        raise UnsupportedModel(f"{fields.path}: dtype {stored!r} is not supported, only float32, bfloat16, float16")
    return cast(str, stored)


def read_model_facts(folder: Path, name: str) -> ModelFacts:
    """What every process may need to know of the model in `folder`, served under `name`.  Raises as read_model_config.

    The ids that end an output are those of generation_config.json and config.json, with the tokenizer's own
    end token and the end-of-turn tokens that its chat template writes.
    """
    config = read_model_config(folder)
    stated = [read_json(folder / "config.json").get("eos_token_id")]
    if (folder / "generation_config.json").is_file():
        stated.append(read_json(folder / "generation_config.json").get("eos_token_id"))
    ids: set[int] = set()
    for value in stated:
        ids.update(v for v in (value if isinstance(value, list) else [value]) if isinstance(v, int))
    ids.update(_tokenizer_end_ids(folder))
    return ModelFacts(
        path=str(folder),
        name=name,
        model_type=config.model_type,
        vocab_size=config.vocab_size,
        context_length=config.max_position_embeddings,
        eos_token_ids=tuple(sorted(i for i in ids if 0 <= i < config.vocab_size)),
    )


def _tokenizer_end_ids(folder: Path) -> list[int]:
    if not (folder / "tokenizer.json").is_file():
        return []
    settings = read_json(folder / "tokenizer_config.json") if (folder / "tokenizer_config.json").is_file() else {}
    template = str(settings.get("chat_template") or "")
    if (folder / "chat_template.jinja").is_file():
        template += (folder / "chat_template.jinja").read_text(encoding="utf-8")
    end = settings.get("eos_token")
    wanted = {token for token in CHAT_END_TOKENS if token in template}
    wanted.add(str(end.get("content")) if isinstance(end, dict) else str(end))
    added = read_json(folder / "tokenizer.json").get("added_tokens") or []
    return [int(token["id"]) for token in added if token.get("content") in wanted]
