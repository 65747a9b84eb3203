"""What transformers makes of a prompt, greedily and in float32, and the comparison of our output with it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

NEW_TOKENS = 64
# A difference of ids is only forgiven where the two best logits are closer than this.
TIE = 1e-4


@dataclass(frozen=True)
class Reference:
    """What transformers makes of one prompt: output ids, and the gap between the two best logits at each."""

    prompt: list[int]
    ids: list[int]
    gaps: list[float]


def chat_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


@torch.inference_mode()
def refer(model: Any, prompt: list[int]) -> Reference:
    ids, gaps, past, step = [], [], None, torch.tensor([prompt])
    for _ in range(NEW_TOKENS):
        out = model(step, past_key_values=past, use_cache=True)
        past = out.past_key_values
        best = out.logits[0, -1].float().topk(2)
        ids.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        step = torch.tensor([[ids[-1]]])
    return Reference(prompt, ids, gaps)


def compare(references: list[Reference], outputs: list[list[int]], name: str) -> None:
    """Raises AssertionError at the first difference that is no tie."""
    for index, (reference, output) in enumerate(zip(references, outputs, strict=True)):
        assert len(output) == NEW_TOKENS
        for place, (wanted, got) in enumerate(zip(reference.ids, output, strict=True)):
            if wanted != got:
                gap = reference.gaps[place]
                print(f"{name}: prompt {index}, output token {place}: {got} for {wanted}, top-2 gap {gap:.2e}")
                assert gap < TIE, f"{name}: prompt {index} differs at {place} with a gap of {gap:.2e}"
                break
