"""Log probabilities of chosen tokens and of the likeliest ones, from the model's own logits.

They are the log-softmax of the raw logits: before penalties, biases and temperature, which say how a token was
picked and not what the model holds likely.
"""

from __future__ import annotations

import numpy as np
import torch

from srt.plan import Int32Array, RowLogprobs


def token_logprobs(logits: torch.Tensor, chosen: Int32Array, top: int) -> RowLogprobs:
    """Logprobs for each row of float32 `logits` [n, vocab]: of the `chosen` ids [n] and of the `top` likeliest.

    The likeliest stand best first, equals by id.  `top` above the vocabulary's size means all of it.
    """
    top = min(top, logits.shape[1])
    logprobs = logits.log_softmax(dim=-1)
    of_chosen = logprobs.gather(1, torch.from_numpy(chosen).long()[:, None]).flatten()
    ids = _likeliest(logprobs, top) if top else torch.empty((len(logits), 0), dtype=torch.long)
    return RowLogprobs(of_chosen.numpy(), ids.int().numpy(), logprobs.gather(1, ids).numpy())


def _likeliest(logprobs: torch.Tensor, top: int) -> torch.Tensor:
    """int64 [n, top].  A top-k leaves open which of equals it takes: rows with equals at its end are done again."""
    values, ids = logprobs.topk(min(top + 1, logprobs.shape[1]), dim=-1)
    ids = ids[:, :top].sort(dim=-1).values
    order = logprobs.gather(1, ids).argsort(dim=-1, descending=True, stable=True)
    ids = ids.gather(1, order)
    if values.shape[1] > top:
        for row in (values[:, top - 1] == values[:, top]).nonzero().flatten().tolist():
            candidates = (logprobs[row] >= values[row, top - 1]).nonzero().flatten()
            order = logprobs[row, candidates].argsort(descending=True, stable=True)
            ids[row] = candidates[order[:top]]
    return ids


def join(parts: list[RowLogprobs]) -> RowLogprobs:
    """Consecutive parts of one row, as one."""
    return RowLogprobs(
        np.concatenate([part.logprobs for part in parts]),
        np.concatenate([part.top_ids for part in parts]),
        np.concatenate([part.top_logprobs for part in parts]),
    )
