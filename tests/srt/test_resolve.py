"""From what a user asks for to the settings of every process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from srt.child import StartError
from srt.config import (
    DetokenizerConfig,
    SchedulerConfig,
    ServerConfig,
    TokenizerConfig,
    read_detokenizer_config,
    read_scheduler_config,
    read_tokenizer_config,
    write_role_config,
)
from srt.machine import Machine
from srt.model.config import kv_bytes_per_token, read_model_config
from srt.resolve import DEFAULT_CHUNK_TOKENS, DEFAULT_MAX_POOL_TOKENS, Resolved, default_name, resolve

GIB = 2**30
PLAIN = Machine(cores=4, memory_bytes=8 * GIB, cpu_name="plain", cpu_flags=frozenset({"avx2"}))


def resolved(folder: Path, machine: Machine = PLAIN, **settings: Any) -> Resolved:
    return resolve(ServerConfig(model=str(folder), **settings), folder, machine)


def small_memory(folder: Path, tokens: float) -> Machine:
    """A machine on which beside the weights so many tokens fit, and no share of it is kept free."""
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    token_bytes = kv_bytes_per_token(read_model_config(folder), "float32")
    return changed(PLAIN, memory_bytes=weights + int(tokens * token_bytes))


def changed(machine: Machine, **values: Any) -> Machine:
    return Machine(**{**vars(machine), **values})


@pytest.mark.parametrize(
    ("flags", "dtype"),
    [({"avx2"}, "float32"), ({"avx512f", "avx512_bf16"}, "bfloat16"), ({"amx_bf16"}, "bfloat16")],
)
def test_the_number_format_is_chosen_by_what_the_machine_is_fast_at(
    tiny_model: Path, flags: set[str], dtype: str
) -> None:
    machine = changed(PLAIN, cpu_flags=frozenset(flags))
    assert resolved(tiny_model, machine).dtype == dtype
    assert resolved(tiny_model, machine, dtype="float32").dtype == "float32"


def test_what_is_left_open_is_taken_from_model_and_machine(tiny_model: Path) -> None:
    found = resolved(tiny_model)
    assert found.threads == 4
    assert found.max_step_tokens == DEFAULT_CHUNK_TOKENS
    assert found.facts.context_length == read_model_config(tiny_model).max_position_embeddings
    assert found.pool_tokens == DEFAULT_MAX_POOL_TOKENS
    assert found.facts.name == tiny_model.name
    assert found.max_prompt_tokens == found.facts.context_length - 1
    for part in ("float32", "threads=4", "page=16", "radix_cache=on", "overlap=on", f"model={tiny_model.name}"):
        assert part in found.line()
    assert "\n" not in found.line()


@pytest.mark.parametrize(("asked", "page", "pages"), [(600, 16, 37), (512, 64, 8), (600, 1, 600), (31, 16, 1)])
def test_the_pool_never_holds_more_tokens_than_asked_for(tiny_model: Path, asked: int, page: int, pages: int) -> None:
    found = resolved(tiny_model, max_total_tokens=asked, page_size=page)
    assert (found.num_pages, found.pool_tokens) == (pages, pages * page)
    assert found.max_prompt_tokens == min(found.facts.context_length, pages * page) - 1


def test_the_pool_is_a_share_of_the_memory_beside_the_weights(tiny_model: Path) -> None:
    weights = sum(file.stat().st_size for file in tiny_model.glob("*.safetensors"))
    token_bytes = kv_bytes_per_token(read_model_config(tiny_model), "float32")
    machine = changed(PLAIN, memory_bytes=100_000 * token_bytes + weights)
    found = resolved(tiny_model, machine, mem_fraction_static=0.5)
    assert abs(found.pool_tokens - (50_000 - weights / token_bytes / 2)) <= 16
    assert found.kv_bytes == found.pool_tokens * token_bytes


@pytest.mark.parametrize(("asked", "kept"), [("auto", "float32"), ("bfloat16", "bfloat16"), ("int8", "int8")])
def test_kv_in_fewer_bits_makes_room_for_more_tokens(tiny_model: Path, asked: str, kept: str) -> None:
    token_bytes = kv_bytes_per_token(read_model_config(tiny_model), kept)
    weights = sum(file.stat().st_size for file in tiny_model.glob("*.safetensors"))
    machine = changed(PLAIN, memory_bytes=2 * (5_000 * token_bytes + weights))
    found = resolved(tiny_model, machine, kv_cache_dtype=asked, dtype="float32")
    assert found.pool_tokens == 5_000 // 16 * 16
    assert found.kv_bytes == found.pool_tokens * token_bytes
    assert f"kv_cache_dtype={kept}" in found.line()


def test_where_the_share_is_too_small_one_context_is_still_held_when_it_fits(tiny_model: Path) -> None:
    context = read_model_config(tiny_model).max_position_embeddings
    assert resolved(tiny_model, small_memory(tiny_model, context * 1.2)).pool_tokens == context
    assert resolved(tiny_model, small_memory(tiny_model, 333)).pool_tokens == 320


@pytest.mark.parametrize(
    ("asked", "tokens"), [(None, DEFAULT_CHUNK_TOKENS), (-1, 2048), (1, 1), (100, 100), (5000, 5000)]
)
def test_the_token_budget_of_a_step(tiny_model: Path, asked: int | None, tokens: int) -> None:
    assert resolved(tiny_model, chunked_prefill_size=asked).max_step_tokens == tokens


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"page_size": 0}, "--page-size 0: must be at least 1"),
        ({"page_size": 2048}, "--page-size 2048"),
        ({"disk_cache_gb": 0.0}, "--disk-cache-gb 0: must be above 0"),
        ({"disk_cache_gb": float("nan")}, "--disk-cache-gb nan"),
        ({"disk_cache_dir": ""}, "--disk-cache-dir : is no folder"),
        ({"disk_cache_dir": __file__}, "is no folder"),
        ({"disk_cache_dir": "pages", "disable_radix_cache": True}, "--disk-cache-dir: keeps what the radix cache"),
        ({"chunked_prefill_size": 0}, "--chunked-prefill-size 0: must be at least 1"),
        ({"chunked_prefill_size": -2}, "--chunked-prefill-size -2"),
        ({"context_length": 1}, "--context-length 1"),
        ({"context_length": 4096}, "--context-length 4096: the model was made for at most 2048"),
        ({"max_total_tokens": 8}, "--max-total-tokens 8: less than one page of 16"),
        ({"max_total_tokens": 2**31 - 1}, "MiB are free"),
        ({"max_total_tokens": 2**31}, "--max-total-tokens 2147483648: must be"),
        ({"max_running_requests": 0}, "--max-running-requests 0"),
        ({"max_queued_requests": 0}, "--max-queued-requests 0"),
        ({"tokenizer_workers": 0}, "--tokenizer-workers 0"),
        ({"threads": 0}, "--threads 0"),
        ({"stream_interval": 0}, "--stream-interval 0"),
        ({"mem_fraction_static": 0.0}, "--mem-fraction-static 0"),
        ({"mem_fraction_static": float("nan")}, "--mem-fraction-static nan"),
        ({"mem_fraction_static": 1.5}, "--mem-fraction-static 1.5"),
        ({"drain_seconds": -1.0}, "--drain-seconds -1"),
        ({"drain_seconds": float("inf")}, "--drain-seconds inf"),
        ({"port": 70000}, "--port 70000"),
        ({"random_seed": -1}, "--random-seed -1"),
        ({"max_body_bytes": 0}, "--max-body-bytes 0"),
        ({"served_model_name": ""}, "--served-model-name"),
        ({"api_key": ""}, "--api-key"),
    ],
)
def test_a_setting_that_makes_no_sense_is_named_in_one_line(
    tiny_model: Path, settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(StartError) as caught:
        resolved(tiny_model, **settings)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_machine_without_the_memory_for_a_page_is_told_the_numbers(tiny_model: Path) -> None:
    with pytest.raises(StartError, match=r"not enough memory: \d+ MiB are free"):
        resolved(tiny_model, changed(PLAIN, memory_bytes=1000))


def test_a_folder_that_is_no_model_is_told_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(StartError, match=r"config\.json"):
        resolved(tmp_path)


def test_every_role_gets_its_settings_and_reads_them_back(tiny_model: Path, tmp_path: Path) -> None:
    found = resolved(tiny_model, tokenizer_workers=2, context_length=1000, chat_template="{{ x }}")
    roles = list(found.role_configs(str(tmp_path)))
    assert [(role, index) for role, index, _ in roles] == [
        ("scheduler", 0),
        ("tokenizer", 0),
        ("tokenizer", 1),
        ("detokenizer", 0),
    ]
    for role, index, settings in roles:
        path = tmp_path / f"{role}-{index}.json"
        write_role_config(settings, path)
        match settings:
            case SchedulerConfig():
                assert read_scheduler_config(path) == settings
                assert settings.model.context_length == 1000
            case TokenizerConfig():
                assert read_tokenizer_config(path) == settings
                assert (settings.index, settings.max_prompt_tokens) == (index, 999)
            case DetokenizerConfig():
                assert read_detokenizer_config(path) == settings


@pytest.mark.parametrize(
    ("model", "name"),
    [("smollm2", "smollm2"), ("models/my-model/", "my-model"), ("a/b.gguf", "b"), ("org/name", "name")],
)
def test_a_model_is_called_by_the_last_part_of_what_was_asked_for(model: str, name: str) -> None:
    assert default_name(model) == name


def test_the_disk_cache_is_off_unless_asked_for_and_its_folder_need_not_exist(tiny_model: Path, tmp_path: Path) -> None:
    found = resolved(tiny_model)
    assert next(settings for _, _, settings in found.role_configs("run")).disk_cache_dir is None  # type: ignore[union-attr]
    assert "disk_cache=off" in found.line()
    found = resolved(tiny_model, disk_cache_dir=str(tmp_path / "pages"), disk_cache_gb=1.5)
    scheduler = next(settings for _, _, settings in found.role_configs("run"))
    assert isinstance(scheduler, SchedulerConfig)
    assert (scheduler.disk_cache_dir, scheduler.disk_cache_bytes) == (str(tmp_path / "pages"), 1_500_000_000)
    assert "disk_cache=1.5GB" in found.line()
