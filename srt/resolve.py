"""From what the user asked for to the settings of every process: checked, completed, and then never changed.

Whatever makes no sense is a StartError that names the flag, the value found and what would be right.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from srt.api_keys import read_api_keys
from srt.child import StartError
from srt.config import (
    DetokenizerConfig,
    ModelFacts,
    Role,
    RoleConfig,
    SchedulerConfig,
    ServerConfig,
    TokenizerConfig,
)
from srt.machine import Machine, look_at_machine
from srt.model.config import UnsupportedModel, kv_bytes_per_token, read_model_config, read_model_facts

DEVICE = "cpu"
DEFAULT_CHUNK_TOKENS = 512
# Unless told otherwise the pool does not grow beyond this: on a laptop other programs want memory too.
DEFAULT_MAX_POOL_TOKENS = 131_072
MAX_PAGE_SIZE = 1024
MAX_TOKENIZER_WORKERS = 64
# The ids of earlier replies that a tokenizer remembers: some tens of thousands of replies.
HISTORY_BYTES = 64 * 2**20
# Kernels multiply page by page size in 32 bits.
MAX_POOL_TOKENS = 2**31 - 1
STORED_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# int4: with the scale and the minimum of each 32 weights.
WEIGHT_BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 5}


@dataclass(frozen=True)
class Resolved:
    """A configuration in which nothing is left open.  `kv_dtype`, `kv_bytes`: those of the page pool;
    `public_heads`: packed token ids of the beginnings of prompts that all tenants share."""

    config: ServerConfig
    facts: ModelFacts
    dtype: str
    kv_dtype: str
    threads: int
    num_pages: int
    max_step_tokens: int
    kv_bytes: int
    public_heads: tuple[bytes, ...] = ()

    @property
    def pool_tokens(self) -> int:
        """Tokens that the page pool holds."""
        return self.num_pages * self.config.page_size

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that leaves room for one more token."""
        return min(self.facts.context_length, self.pool_tokens) - 1

    @property
    def history_bytes(self) -> int:
        """Memory of each tokenizer for the ids of earlier replies; where nothing is cached they are of no use."""
        off = self.config.disable_exact_history or self.config.disable_radix_cache
        return 0 if off else HISTORY_BYTES

    def role_configs(self, run_dir: str) -> Iterator[tuple[Role, int, RoleConfig]]:
        """(role, index, settings) of every process.  The scheduler first: it takes the longest to start."""
        config = self.config
        yield (
            "scheduler",
            0,
            SchedulerConfig(
                run_dir=run_dir,
                model=self.facts,
                device=DEVICE,
                dtype=self.dtype,
                quantization=config.quantization,
                kv_dtype=None if self.kv_dtype == self.dtype else self.kv_dtype,
                threads=self.threads,
                pin_threads=config.pin_threads,
                attention_backend=config.attention_backend,
                page_size=config.page_size,
                num_pages=self.num_pages,
                disable_radix_cache=config.disable_radix_cache,
                schedule_policy=config.schedule_policy,
                radix_eviction_policy=config.radix_eviction_policy,
                max_step_tokens=self.max_step_tokens,
                max_running_requests=config.max_running_requests,
                max_queued_requests=config.max_queued_requests,
                max_queued_per_tenant=config.max_queued_per_tenant,
                queue_timeout=config.queue_timeout,
                tpot_target_ms=config.tpot_target_ms,
                preemption_mode=config.preemption_mode,
                swap_bytes=int(config.swap_space_gb * 10**9),
                overlap=not config.disable_overlap_schedule,
                stream_interval=config.stream_interval,
                disk_cache_dir=None if config.disk_cache_dir is None else str(Path(config.disk_cache_dir).absolute()),
                disk_cache_bytes=int(config.disk_cache_gb * 1e9),
                public_heads=self.public_heads,
                max_pinned_share=config.max_pinned_share,
                log_level=config.log_level,
            ),
        )
        for index in range(config.tokenizer_workers):
            yield (
                "tokenizer",
                index,
                TokenizerConfig(
                    run_dir=run_dir,
                    index=index,
                    model=self.facts,
                    max_prompt_tokens=self.max_prompt_tokens,
                    chat_template=config.chat_template,
                    history_bytes=self.history_bytes,
                    log_level=config.log_level,
                ),
            )
        yield "detokenizer", 0, DetokenizerConfig(run_dir=run_dir, model=self.facts, log_level=config.log_level)

    def line(self) -> str:
        """Everything that was decided, in one line for the log."""
        config = self.config
        words = {
            "model": self.facts.name,
            "type": self.facts.model_type,
            "device": DEVICE,
            "dtype": self.dtype,
            "quantization": config.quantization or "off",
            "kv_cache_dtype": self.kv_dtype,
            "threads": f"{self.threads} pinned" if config.pin_threads else self.threads,
            "attention": config.attention_backend,
            "context": self.facts.context_length,
            "pool_tokens": self.pool_tokens,
            "pool_mib": round(self.kv_bytes / 2**20),
            "page": config.page_size,
            "chunk": self.max_step_tokens,
            "policy": config.schedule_policy,
            "running": config.max_running_requests,
            "queued": "no limit" if config.max_queued_requests is None else config.max_queued_requests,
            "radix_cache": "off" if config.disable_radix_cache else "on",
            "exact_history": "on" if self.history_bytes else "off",
            "public_prefixes": len(self.public_heads),
            "disk_cache": "off" if config.disk_cache_dir is None else f"{config.disk_cache_gb:g}GB",
            "overlap": "off" if config.disable_overlap_schedule else "on",
            "tokenizers": config.tokenizer_workers,
        }
        return " ".join(f"{name}={value}" for name, value in words.items())


def resolve(config: ServerConfig, folder: Path, machine: Machine | None = None) -> Resolved:
    """Check and complete a configuration for the model in `folder`.  Raises StartError."""
    check_config(config)
    machine = machine or look_at_machine()
    folder = folder.absolute()
    try:
        model = read_model_config(folder)
        facts = read_model_facts(folder, config.served_model_name or default_name(config.model))
    except UnsupportedModel as error:
        raise StartError(str(error)) from error
    facts = msgspec.structs.replace(facts, context_length=_context_length(config, facts))
    dtype = _dtype(config, machine)
    kv_dtype = dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    token_bytes = kv_bytes_per_token(model, kv_dtype)
    weights_bytes = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    weights_bytes = weights_bytes * WEIGHT_BITS[config.quantization or dtype] // (8 * STORED_BYTES[model.dtype])
    num_pages = _num_pages(config, facts.context_length, token_bytes, weights_bytes, machine.memory_bytes)
    return Resolved(
        config=config,
        facts=facts,
        dtype=dtype,
        kv_dtype=kv_dtype,
        threads=config.threads or machine.cores,
        num_pages=num_pages,
        max_step_tokens=_step_tokens(config, facts.context_length),
        kv_bytes=num_pages * config.page_size * token_bytes,
    )


def default_name(model: str) -> str:
    """The name that a model is served under when none is given: the last part of its path, without the suffix."""
    name = Path(model).name or Path(model).absolute().name
    return name.removesuffix(".gguf") or model


def check_config(config: ServerConfig) -> None:
    """Raise StartError for a value that is in no model's and no machine's range."""
    _between("--port", config.port, 0, 65535)
    _between("--tokenizer-workers", config.tokenizer_workers, 1, MAX_TOKENIZER_WORKERS)
    _between("--stream-interval", config.stream_interval, 1, None)
    _between("--threads", config.threads, 1, 1024)
    _between("--context-length", config.context_length, 2, None)
    _between("--page-size", config.page_size, 1, MAX_PAGE_SIZE)
    _between("--max-total-tokens", config.max_total_tokens, 2, MAX_POOL_TOKENS)
    _between("--max-running-requests", config.max_running_requests, 1, 65536)
    _between("--max-queued-requests", config.max_queued_requests, 1, None)
    _between("--max-queued-per-tenant", config.max_queued_per_tenant, 1, None)
    for flag, value in (
        ("--queue-timeout", config.queue_timeout),
        ("--ttft-target-ms", config.ttft_target_ms),
        ("--tpot-target-ms", config.tpot_target_ms),
    ):
        if value is not None and not (math.isfinite(value) and value > 0.0):
            raise StartError(f"{flag} {value:g}: must be above 0")
    if not (math.isfinite(config.swap_space_gb) and config.swap_space_gb >= 0.0):
        raise StartError(f"--swap-space-gb {config.swap_space_gb:g}: must be 0 or more")
    _between("--max-body-bytes", config.max_body_bytes, 1, None)
    _between("--random-seed", config.random_seed, 0, 2**63 - 1)
    if config.chunked_prefill_size != -1:
        _between("--chunked-prefill-size", config.chunked_prefill_size, 1, MAX_POOL_TOKENS)
    if not 0.0 < config.mem_fraction_static < 1.0:
        raise StartError(f"--mem-fraction-static {config.mem_fraction_static:g}: must be above 0 and below 1")
    if not 0.0 <= config.max_pinned_share <= 1.0:
        raise StartError(f"--max-pinned-share {config.max_pinned_share:g}: must be at least 0 and at most 1")
    if not (math.isfinite(config.drain_seconds) and config.drain_seconds >= 0.0):
        raise StartError(f"--drain-seconds {config.drain_seconds:g}: must be 0 or more")
    _check_disk_cache(config)
    if config.public_prefix is not None and config.disable_radix_cache:
        raise StartError("--public-prefix: says what tenants share of the radix cache, so it is of no use without it")
    if config.served_model_name == "":
        raise StartError("--served-model-name: must not be empty")
    if config.api_key == "":
        raise StartError("--api-key: must not be empty; leave it out to serve without a key")
    read_api_keys(config)


def _check_disk_cache(config: ServerConfig) -> None:
    if not (math.isfinite(config.disk_cache_gb) and config.disk_cache_gb > 0.0):
        raise StartError(f"--disk-cache-gb {config.disk_cache_gb:g}: must be above 0")
    if config.disk_cache_dir is None:
        return
    if config.disable_radix_cache:
        raise StartError("--disk-cache-dir: keeps what the radix cache holds, so it is of no use without it")
    folder = Path(config.disk_cache_dir)
    if config.disk_cache_dir == "" or (folder.exists() and not folder.is_dir()):
        raise StartError(f"--disk-cache-dir {config.disk_cache_dir}: is no folder")


def _between(flag: str, value: int | None, low: int, high: int | None) -> None:
    if value is None or (value >= low and (high is None or value <= high)):
        return
    most = "" if high is None else f" and at most {high}"
    raise StartError(f"{flag} {value}: must be at least {low}{most}")


def _context_length(config: ServerConfig, facts: ModelFacts) -> int:
    if config.context_length is None:
        return facts.context_length
    if config.context_length > facts.context_length:
        raise StartError(
            f"--context-length {config.context_length}: the model was made for at most {facts.context_length} tokens"
        )
    return config.context_length


def _dtype(config: ServerConfig, machine: Machine) -> str:
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if machine.has_fast_bfloat16 else "float32"


def _step_tokens(config: ServerConfig, context_length: int) -> int:
    if config.chunked_prefill_size is None:
        return DEFAULT_CHUNK_TOKENS
    return context_length if config.chunked_prefill_size == -1 else config.chunked_prefill_size


def _num_pages(config: ServerConfig, context: int, token_bytes: int, weights_bytes: int, memory_bytes: int) -> int:
    """Pages of the pool: as many tokens as asked for, or as a share of the memory holds beside the weights.

    The share is what weights and pool may take together.  One whole context is worth going beyond it, as long as
    it fits in memory at all.
    """
    page = config.page_size
    room = max(0, memory_bytes - weights_bytes)
    if config.max_total_tokens is not None:
        pages = config.max_total_tokens // page
        if pages * page < 2:
            raise StartError(f"--max-total-tokens {config.max_total_tokens}: less than one page of {page} tokens")
        if pages * page * token_bytes > room:
            raise StartError(
                f"--max-total-tokens {config.max_total_tokens}: takes {_mib(pages * page * token_bytes)} MiB, "
                f"but {_mib(room)} MiB are free beside the weights"
            )
        return pages
    share = max(0, int(memory_bytes * config.mem_fraction_static) - weights_bytes)
    tokens = min(share // token_bytes, DEFAULT_MAX_POOL_TOKENS)
    one_context = math.ceil(context / page) * page
    if tokens < one_context:
        tokens = min(one_context, room // token_bytes)
    if tokens // page * page < 2:
        raise StartError(
            f"not enough memory: {_mib(memory_bytes)} MiB are free, the weights take {_mib(weights_bytes)} MiB, "
            f"and a page of {page} tokens takes {_mib(page * token_bytes)} MiB"
        )
    return tokens // page


def _mib(size: int) -> int:
    return math.ceil(size / 2**20)
