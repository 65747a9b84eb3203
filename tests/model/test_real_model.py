"""The real models in float32 through the forward worker: greedy ids and logits are those of transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from srt.model.worker import ForwardWorker
from tests.model.paged_driver import PagedDriver, Sequence, load_torch_model
from tests.model.plan_driver import PlanDriver, Request, commit

NEW_TOKENS = 24
# A difference of ids is only forgiven where the two best logits are closer than this.
NEAR_TIE = 1e-4
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts does it take in total?",
    "List three colours, separated by commas.",
    "def add(a, b):",
    "Translate to Spanish: good morning 🌅",
)


@pytest.fixture(scope="module")
def prompt_ids(any_real_model: Path) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(any_real_model)
    return [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for prompt in PROMPTS
    ]


@pytest.fixture(scope="module")
def reference(any_real_model: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(any_real_model, dtype=torch.float32).eval()
    return model


@torch.inference_mode()
def logits_of(reference: torch.nn.Module, ids: list[int]) -> torch.Tensor:
    logits: torch.Tensor = reference(torch.tensor([ids])).logits[0]
    return logits


@pytest.mark.real
def test_greedy_ids_of_a_batch_are_those_of_transformers(
    any_real_model: Path, prompt_ids: list[list[int]], reference: torch.nn.Module
) -> None:
    worker = ForwardWorker(load_torch_model(any_real_model, 64, 16), overlap=False)
    driver = PlanDriver(16)
    requests = [Request(slot, ids) for slot, ids in enumerate(prompt_ids)]
    for _ in range(NEW_TOKENS):
        result = worker.launch(driver.plan([(r, r.total - r.computed) for r in requests])).wait()
        for request, token in zip(requests, result.token_ids.tolist(), strict=True):
            commit(request, token)
    for request in requests:
        # Each token is the reference's best one after the same tokens: so its own greedy output is the same.
        logits = logits_of(reference, request.ids[:-1])[len(request.prompt) - 1 :]
        best = logits.topk(2).values
        for step, token in enumerate(request.ids[len(request.prompt) :]):
            if token != int(logits[step].argmax()):
                gap = float(best[step, 0] - best[step, 1])
                assert gap < NEAR_TIE, f"prompt {request.slot}, token {step}: the two best logits are {gap} apart"


@pytest.mark.real
def test_logits_of_a_prefill_are_within_a_thousandth(
    any_real_model: Path, prompt_ids: list[list[int]], reference: torch.nn.Module
) -> None:
    driver = PagedDriver.with_pages(load_torch_model(any_real_model, 64, 16), "ascending")
    ids = [token for prompt in prompt_ids for token in prompt]
    found = driver.step([(Sequence(ids), len(ids))])[0]
    assert (found - logits_of(reference, ids)).abs().max().item() < 1e-3
