"""One frozen configuration for the server and one for each process role.

`ServerConfig` is what a user asks for (every flag of `sapwood serve` is one of its fields, with the same
name).  `resolve` turns it, once, into the settings of each role; nothing changes them later.  The children
get theirs as a JSON file in the private run directory.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

Role = Literal["tokenizer", "scheduler", "detokenizer"]


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a user can set.  None means: chosen at start-up, and printed there."""

    model: str
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 30000
    api_key: str | None = None
    # A file of keys that belong to tenants; whoever has `api_key` is then the operator.
    api_keys_file: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    # Text
    tokenizer_workers: int = 1
    chat_template: str | None = None
    stream_interval: int = 1
    # Execution
    device: Literal["auto", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    quantization: Literal["int8", "int4"] | None = None
    # The number format of the page pool; auto: that of --dtype.
    kv_cache_dtype: Literal["auto", "bfloat16", "int8"] = "auto"
    threads: int | None = None
    pin_threads: bool = False
    attention_backend: Literal["auto", "native", "torch"] = "auto"
    # Memory
    context_length: int | None = None
    page_size: int = 16
    max_total_tokens: int | None = None
    mem_fraction_static: float = 0.5
    disable_radix_cache: bool = False
    # Where prefixes are kept on disk too, and how large that folder may grow, in GB of 10^9 bytes.
    disk_cache_dir: str | None = None
    disk_cache_gb: float = 10.0
    disable_exact_history: bool = False
    # A file of beginnings of prompts whose cached pages all tenants share.
    public_prefix: str | None = None
    # A file of prefixes to compute before the first request.
    prewarm: str | None = None
    # Share of the pool, 0 to 1, that pinned prefixes of one namespace may keep.
    max_pinned_share: float = 0.25
    # Scheduling
    schedule_policy: Literal["lpm", "fcfs", "priority", "deadline", "dfs-weight", "fair"] = "lpm"
    radix_eviction_policy: Literal["lru", "lfu", "adaptive"] = "lru"
    chunked_prefill_size: int | None = None
    max_running_requests: int = 64
    max_queued_requests: int | None = None
    max_queued_per_tenant: int | None = None
    queue_timeout: float | None = None
    ttft_target_ms: float | None = None
    tpot_target_ms: float | None = None
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    swap_space_gb: float = 1.0
    disable_overlap_schedule: bool = False
    random_seed: int | None = None
    # Life
    drain_seconds: float = 30.0
    max_body_bytes: int = 8 * 1024 * 1024
    # A file to which every accepted request is appended.
    record: str | None = None


class ModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What every process may need to know of the model, read from its folder without torch."""

    path: str
    name: str
    model_type: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]


class TokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one tokenizer process."""

    run_dir: str
    index: int
    model: ModelFacts
    # Prompts longer than this many tokens are refused (context and pool size both allow one more token).
    max_prompt_tokens: int
    chat_template: str | None = None
    # Memory for the ids of earlier replies, put in where a history has their text again; 0: none is kept.
    history_bytes: int = 0
    log_level: str = "info"


class DetokenizerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the detokenizer process."""

    run_dir: str
    model: ModelFacts
    log_level: str = "info"


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the scheduler process and of the executor inside it."""

    run_dir: str
    model: ModelFacts
    device: str
    dtype: str
    threads: int
    attention_backend: str
    page_size: int
    num_pages: int
    disable_radix_cache: bool
    schedule_policy: str
    # Token budget of a step: decode rows first, then prefill chunks.
    max_step_tokens: int
    max_running_requests: int
    max_queued_requests: int | None
    overlap: bool
    # The number formats of the weights and of the page pool, where they are not `dtype`.
    quantization: str | None = None
    kv_dtype: str | None = None
    # Each thread of the forward pass stays on a core of its own.
    pin_threads: bool = False
    max_queued_per_tenant: int | None = None
    # Seconds that a request may wait for its first admission.
    queue_timeout: float | None = None
    radix_eviction_policy: str = "lru"
    # Milliseconds between two tokens of a stream that prefill chunks must leave room for.
    tpot_target_ms: float | None = None
    preemption_mode: Literal["auto", "recompute", "swap"] = "auto"
    # Memory outside the pool for the pages of retracted requests; 0 for none.
    swap_bytes: int = 0
    stream_interval: int = 1
    disk_cache_dir: str | None = None
    disk_cache_bytes: int = 0
    # Packed token ids of the beginnings that all tenants share.
    public_heads: tuple[bytes, ...] = ()
    max_pinned_share: float = 0.25
    log_level: str = "info"


RoleConfig = TokenizerConfig | SchedulerConfig | DetokenizerConfig


def write_role_config(config: RoleConfig, path: Path) -> None:
    """Write a role's settings for its process to read."""
    path.write_bytes(msgspec.json.encode(config))


def read_tokenizer_config(path: Path) -> TokenizerConfig:
    """The settings written by `write_role_config`.  Raises msgspec.ValidationError when they are not a tokenizer's."""
    return msgspec.json.decode(path.read_bytes(), type=TokenizerConfig)


def read_scheduler_config(path: Path) -> SchedulerConfig:
    """The settings written by `write_role_config`.  Raises msgspec.ValidationError when they are not a scheduler's."""
    return msgspec.json.decode(path.read_bytes(), type=SchedulerConfig)


def read_detokenizer_config(path: Path) -> DetokenizerConfig:
    """The settings that `write_role_config` wrote.  Raises msgspec.ValidationError when not a detokenizer's."""
    return msgspec.json.decode(path.read_bytes(), type=DetokenizerConfig)


def inbox_path(run_dir: str, role: str, index: int = 0) -> str:
    """The ipc endpoint that a process binds; `role` is front, tokenizer, scheduler or detokenizer."""
    name = f"{role}-{index}" if role == "tokenizer" else role
    return f"ipc://{run_dir}/{name}.sock"
