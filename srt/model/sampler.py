"""The sampler: from a step's logits to one token for each row, with the state that requests keep between steps.

A row's token is a function of its own logits, settings, seed and position alone, to the last bit: it depends
neither on the other rows nor on how often the request was retracted and resumed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from srt.messages import SamplingParams
from srt.model.adjust import Adjustments, adjust, needs_adjustment
from srt.model.draw import MIN_TEMPERATURE, Chooser, DrawParams, TorchChooser
from srt.model.logprobs import token_logprobs
from srt.model.uniform import uniforms
from srt.plan import Int32Array, RowLogprobs, SlotOpen

NOT_FINITE = "the model's logits are not finite numbers"
NOTHING_LEFT = "no token is left to sample: logit_bias and min_new_tokens exclude them all"


@dataclass(frozen=True, slots=True)
class SlotState:
    """What a request's slot knows.  `error`: why the request cannot be sampled for at all."""

    sampling: SamplingParams
    seed: int
    prompt_length: int
    logprobs: int | None
    adjustments: Adjustments | None
    is_greedy: bool
    error: str | None = None


@dataclass(slots=True)
class Sampled:
    """token_ids int32 [n], -1 in rows that failed; errors and logprobs by row."""

    token_ids: Int32Array
    errors: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)


class Sampler:
    """Samples for the request slots that are open."""

    def __init__(self, vocab_size: int, chooser: Chooser | None = None) -> None:
        """`chooser`: what picks the tokens; torch unless it is given."""
        self._vocab_size = vocab_size
        self._chooser = chooser or TorchChooser()
        self._slots: dict[int, SlotState] = {}

    def open(self, opening: SlotOpen) -> None:
        """Set a slot up for a request, new or resumed."""
        sampling = opening.sampling
        stop_ids = tuple(token for token in opening.stop_ids if 0 <= token < self._vocab_size)
        adjustments = None
        error = self._bias_error(sampling)
        if error is None and needs_adjustment(sampling, stop_ids):
            adjustments = Adjustments(sampling, opening.prompt_ids, opening.output_ids, stop_ids)
        self._slots[opening.slot] = SlotState(
            sampling=sampling,
            seed=opening.seed,
            prompt_length=len(opening.prompt_ids),
            logprobs=opening.logprobs,
            adjustments=adjustments,
            is_greedy=sampling.temperature < MIN_TEMPERATURE or sampling.top_k == 1,
            error=error,
        )

    def close(self, slot: int) -> None:
        """Forget a slot's request."""
        self._slots.pop(slot, None)

    def state(self, slot: int) -> SlotState:
        """The state of an open slot.  Raises KeyError when it is not open."""
        return self._slots[slot]

    def sample(self, logits: torch.Tensor, slots: list[int], positions: Int32Array) -> Sampled:
        """One token for each row of float32 `logits` [n, vocab], which is left unchanged.

        `positions` int32 [n]: the number of tokens before the one to sample.  A row that cannot be sampled (its
        logits are not finite, or everything is excluded) is reported in `errors` and disturbs no other.
        """
        states = [self._slots[slot] for slot in slots]
        best = self._chooser.best(logits)
        result = Sampled(np.full(len(slots), -1, dtype=np.int32), self._errors(best, states))
        rows = [row for row in range(len(slots)) if row not in result.errors]
        plain = [row for row in rows if states[row].adjustments is None]
        greedy = [row for row in plain if states[row].is_greedy]
        result.token_ids[greedy] = best[greedy]
        self._draw(logits, {row: row for row in plain if not states[row].is_greedy}, states, positions, result)
        adjusted = [row for row in rows if states[row].adjustments is not None]
        if adjusted:
            self._sample_adjusted(logits, states, positions, adjusted, result)
        self._add_logprobs(logits, states, result)
        return result

    def _bias_error(self, sampling: SamplingParams) -> str | None:
        for token in sampling.logit_bias:
            if not 0 <= token < self._vocab_size:
                return f"logit_bias names token {token}, ids go from 0 to {self._vocab_size - 1}"
        return None

    def _errors(self, best: Int32Array, states: list[SlotState]) -> dict[int, str]:
        errors = {row: state.error for row, state in enumerate(states) if state.error is not None}
        return errors | dict.fromkeys(np.flatnonzero(best < 0).tolist(), NOT_FINITE)

    def _draw(
        self,
        logits: torch.Tensor,
        at: dict[int, int],
        states: list[SlotState],
        positions: Int32Array,
        result: Sampled,
    ) -> None:
        """Draw for the rows `at` of the result from the rows of `logits` that it gives for them, ascending."""
        if at:
            rows = list(at)
            params = self._draw_params([states[row] for row in rows], positions[rows])
            result.token_ids[rows] = self._chooser.draw(logits, list(at.values()), params)

    def _sample_adjusted(
        self,
        logits: torch.Tensor,
        states: list[SlotState],
        positions: Int32Array,
        rows: list[int],
        result: Sampled,
    ) -> None:
        """Rows whose logits are changed first."""
        adjustments = {i: found for i, row in enumerate(rows) if (found := states[row].adjustments) is not None}
        work = logits.index_select(0, torch.tensor(rows))
        adjust(work, adjustments, {i: int(positions[row]) for i, row in enumerate(rows)})
        for i, row in enumerate(rows):
            if not bool(work[i].amax().isfinite()):
                result.errors[row] = NOTHING_LEFT
        usable = {row: i for i, row in enumerate(rows) if row not in result.errors}
        greedy = [row for row in usable if states[row].is_greedy]
        if greedy:
            result.token_ids[greedy] = self._chooser.greedy(work, [usable[row] for row in greedy])
        drawn = {row: i for row, i in usable.items() if not states[row].is_greedy}
        self._draw(work, drawn, states, positions, result)
        for row, i in usable.items():
            seen = adjustments[i].seen
            if seen is not None:
                seen.add(int(result.token_ids[row]))

    def _draw_params(self, states: list[SlotState], positions: Int32Array) -> DrawParams:
        settings = [state.sampling for state in states]
        return DrawParams(
            temperature=torch.tensor([s.temperature for s in settings], dtype=torch.float32),
            top_k=[s.top_k if s.top_k > 0 else self._vocab_size for s in settings],
            top_p=[s.top_p for s in settings],
            min_p=[s.min_p for s in settings],
            uniform=torch.from_numpy(uniforms([state.seed for state in states], positions)),
        )

    def _add_logprobs(self, logits: torch.Tensor, states: list[SlotState], result: Sampled) -> None:
        # Rows of one `top` together; grouping does not change a row's result.
        by_top: dict[int, list[int]] = {}
        for row, state in enumerate(states):
            if state.logprobs is not None and row not in result.errors:
                by_top.setdefault(state.logprobs, []).append(row)
        for top, rows in by_top.items():
            found = token_logprobs(_rows(logits, rows), result.token_ids[rows], top)
            for i, row in enumerate(rows):
                result.logprobs[row] = RowLogprobs(
                    found.logprobs[i : i + 1], found.top_ids[i : i + 1], found.top_logprobs[i : i + 1]
                )


def _rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The given rows, ascending; no copy when it is all of them."""
    return logits if len(rows) == len(logits) else logits.index_select(0, torch.tensor(rows))
