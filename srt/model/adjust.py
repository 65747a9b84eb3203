"""Changes to the logits before a token is chosen: penalties, biases, and ids that may not come yet.

They touch few ids, so a request keeps only the ids that it has seen, and a step changes the logits of all its
rows at once, at these places alone.  In this order:

    repetition    a logit of an id in prompt or output is divided by the penalty where positive, else multiplied
                  by it (Keskar et al., "CTRL", 2019; as transformers does)
    frequency,    minus frequency penalty times the count in the output, minus the presence penalty where that
    presence      count is not zero (as the OpenAI API defines them)
    bias          plus the logit bias
    forbidden     stop ids become -inf while the output is shorter than `min_new_tokens`
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from srt.messages import SamplingParams
from srt.plan import Int32Array

IdArray = npt.NDArray[np.int64]


class SeenTokens:
    """The different ids of a request's prompt and output, and how often each is in the output."""

    def __init__(self, prompt_ids: Int32Array, output_ids: Int32Array) -> None:
        unique, index = np.unique(np.concatenate([prompt_ids, output_ids]), return_inverse=True)
        self._count = len(unique)
        # Room to grow, doubled when it is used up.
        self._ids = np.zeros(max(64, 2 * self._count), dtype=np.int64)
        self._outputs = np.zeros(len(self._ids), dtype=np.int64)
        self._ids[: self._count] = unique
        self._outputs[: self._count] = np.bincount(index[len(prompt_ids) :], minlength=self._count)
        self._index = {token: place for place, token in enumerate(unique.tolist())}

    def add(self, token: int) -> None:
        """Count one more output token."""
        place = self._index.get(token)
        if place is None:
            place = self._index[token] = self._count
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._outputs = np.concatenate([self._outputs, np.zeros_like(self._outputs)])
            self._ids[place] = token
            self._count += 1
        self._outputs[place] += 1

    @property
    def ids(self) -> IdArray:
        """int64 [different ids], each once."""
        return self._ids[: self._count]

    @property
    def outputs(self) -> IdArray:
        """int64 [different ids]: how often each is in the output."""
        return self._outputs[: self._count]


class Adjustments:
    """What a request does to its logits, with the tokens seen so far."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: Int32Array,
        output_ids: Int32Array,
        stop_ids: tuple[int, ...],
    ) -> None:
        self.sampling = sampling
        self.seen = SeenTokens(prompt_ids, output_ids) if has_penalty(sampling) else None
        self.bias_ids = np.array(list(sampling.logit_bias), dtype=np.int64)
        self.bias = np.array(list(sampling.logit_bias.values()), dtype=np.float32)
        self.stop_ids = np.array(sorted(set(stop_ids)), dtype=np.int64)
        self._prompt_length = len(prompt_ids)

    def forbidden(self, position: int) -> IdArray:
        """The ids that may not be sampled after `position` tokens of prompt and output."""
        too_early = position - self._prompt_length < self.sampling.min_new_tokens
        return self.stop_ids if too_early else self.stop_ids[:0]


def has_penalty(sampling: SamplingParams) -> bool:
    """Whether the tokens seen so far count for the next one."""
    return sampling.repetition_penalty != 1.0 or sampling.frequency_penalty != 0.0 or sampling.presence_penalty != 0.0


def needs_adjustment(sampling: SamplingParams, stop_ids: tuple[int, ...]) -> bool:
    """Whether anything here ever applies to a request with these settings."""
    return has_penalty(sampling) or bool(sampling.logit_bias) or (sampling.min_new_tokens > 0 and bool(stop_ids))


def adjust(logits: torch.Tensor, rows: dict[int, Adjustments], positions: dict[int, int]) -> None:
    """Change float32 `logits` [n, vocab] in place: row i as `rows[i]` asks after `positions[i]` tokens."""
    flat = logits.view(-1)
    vocab = logits.shape[1]
    penalised = [(i, row.seen, row.sampling) for i, row in rows.items() if row.seen is not None]
    if penalised:
        places = _tensor([seen.ids + i * vocab for i, seen, _ in penalised])
        outputs = _tensor([seen.outputs for _, seen, _ in penalised])
        sizes = torch.tensor([len(seen.ids) for _, seen, _ in penalised])
        penalties = torch.tensor(
            [(s.repetition_penalty, s.frequency_penalty, s.presence_penalty) for _, _, s in penalised],
            dtype=torch.float32,
        )
        repetition, frequency, presence = penalties.repeat_interleave(sizes, dim=0).unbind(1)
        values = flat[places]
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat[places] = values - frequency * outputs - presence * (outputs > 0)
    biased = [(i, row) for i, row in rows.items() if len(row.bias_ids)]
    if biased:
        flat[_tensor([row.bias_ids + i * vocab for i, row in biased])] += _tensor([row.bias for _, row in biased])
    flat[_tensor([row.forbidden(positions[i]) + i * vocab for i, row in rows.items()])] = float("-inf")


def _tensor(arrays: list[npt.NDArray[np.int64]] | list[npt.NDArray[np.float32]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))
