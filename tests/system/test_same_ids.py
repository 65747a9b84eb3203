"""Greedy ids of real prompts equal those of transformers on the same weights, however Sapwood is set up.

Where two ids differ, the reference's gap between its two best tokens at that place is printed, and must be so small
that rounding alone decides; what follows such a place is another text and is not compared.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sapwood import Engine
from tests.system.greedy import NEW_TOKENS, Reference, chat_ids, compare, refer

pytestmark = [pytest.mark.real, pytest.mark.timeout(1500)]

# Enough pages for 32 prompts and their outputs, whatever the page size.
POOL_TOKENS = 32768


@pytest.fixture(scope="module")
def references(real_model: Path, test_data: Path) -> list[Reference]:
    """Computed once, in float32, on one thread: torch's threads spin, which stops everything on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in (test_data / "chat_prompts.jsonl").read_text().splitlines()]
    found = [refer(model, chat_ids(tokenizer, row["messages"])) for row in rows]
    torch.set_num_threads(threads)
    return found


def outputs(engine: Engine, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Output ids and cached tokens of every prompt, sent together."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    replies = engine.generate(input_ids=prompts, sampling_params=sampling)
    return [r["output_ids"] for r in replies], [r["meta_info"]["cached_tokens"] for r in replies]


SETTINGS: dict[str, dict[str, Any]] = {
    "page 16": {},
    "page 1": {"page_size": 1},
    "page 64, chunk 32": {"page_size": 64, "chunked_prefill_size": 32},
    "chunk 2048": {"chunked_prefill_size": 2048},
    "overlap off": {"disable_overlap_schedule": True},
    "cache off": {"disable_radix_cache": True},
    "torch backend": {"attention_backend": "torch"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_batched_ids_equal_the_reference_cold_and_warm(
    references: list[Reference], real_model: Path, name: str
) -> None:
    settings = {"max_total_tokens": POOL_TOKENS, "max_running_requests": 16, "dtype": "float32", **SETTINGS[name]}
    prompts = [reference.prompt for reference in references]
    with Engine(model=str(real_model), **settings) as engine:
        cold, _ = outputs(engine, prompts)
        compare(references, cold, f"{name}, cold, 16 at a time")
        warm, cached = outputs(engine, prompts)
        compare(references, warm, f"{name}, warm, 16 at a time")
    if not settings.get("disable_radix_cache"):
        assert cached == [len(prompt) - 1 for prompt in prompts], "a known prompt is reused but for its last token"
    else:
        assert not any(cached)


def test_ids_of_a_lone_request_equal_the_reference_cold_and_warm(references: list[Reference], real_model: Path) -> None:
    with Engine(model=str(real_model), max_total_tokens=POOL_TOKENS, dtype="float32") as engine:
        for temperature in ("cold", "warm"):
            alone = [outputs(engine, [reference.prompt])[0][0] for reference in references]
            compare(references, alone, f"{temperature}, alone")
