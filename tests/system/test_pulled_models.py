"""Every pulled model over HTTP: ids and text are those of transformers, also beyond a sliding window."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from srt.model.config import read_model_facts
from tests.system.greedy import NEW_TOKENS, Reference, chat_ids, compare, refer
from tests.system.served import Served, serving

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Name three trees. 🌳"}]
# More than the 512 tokens that Gemma's windows have.
LONG = 560


@pytest.fixture(scope="module")
def served(any_real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("r")
    with serving(any_real_model, folder, "--dtype", "float32", "--max-total-tokens", "4096") as server:
        yield server


@pytest.fixture(scope="module")
def tokenizer(any_real_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(any_real_model)


@pytest.fixture(scope="module")
def references(any_real_model: Path, tokenizer: Any) -> list[Reference]:
    """Of a chat, of a short text and of one that is longer than a window."""
    licence = (Path(__file__).parents[2] / "LICENSE").read_text()
    prompts = [chat_ids(tokenizer, CHAT), tokenizer("The capital of France")["input_ids"]]
    prompts.append(tokenizer(licence)["input_ids"][:LONG])
    model = AutoModelForCausalLM.from_pretrained(any_real_model, dtype=torch.float32).eval()
    return [refer(model, prompt) for prompt in prompts]


def test_ids_are_those_of_transformers_cold_and_warm(served: Served, references: list[Reference]) -> None:
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    body = {"input_ids": [reference.prompt for reference in references], "sampling_params": sampling}
    for name in ("cold", "warm"):
        answer = httpx.post(f"{served.url}/generate", json=body, timeout=300)
        assert answer.status_code == 200, answer.text
        compare(references, [reply["output_ids"] for reply in answer.json()], name)


def test_a_chat_is_written_as_the_models_template_says(
    served: Served, any_real_model: Path, tokenizer: Any, references: list[Reference]
) -> None:
    body = {"model": any_real_model.name, "messages": CHAT, "temperature": 0, "max_tokens": NEW_TOKENS}
    answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=300).json()
    ends = set(read_model_facts(any_real_model, "m").eos_token_ids)
    ids = references[0].ids
    until = next((place for place, token in enumerate(ids) if token in ends), NEW_TOKENS)
    assert answer["choices"][0]["message"]["content"] == tokenizer.decode(ids[:until], skip_special_tokens=True)
    assert answer["choices"][0]["finish_reason"] == ("stop" if until < NEW_TOKENS else "length")
    assert answer["usage"]["prompt_tokens"] == len(references[0].prompt)
