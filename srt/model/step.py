"""One step of a plan: close and open slots, copy pages, run the model, sample, and take the logprobs asked for."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from srt.model.draw import Chooser
from srt.model.interface import ForwardBatch, LanguageModel
from srt.model.logprobs import join, token_logprobs
from srt.model.sampler import NOT_FINITE, Sampler
from srt.plan import Int32Array, Plan, RowLogprobs, StepResult

# Prompt logprobs are taken in slices whose float32 logits stay below this.
LOGIT_SLICE_BYTES = 32 * 2**20


class LastTokens:
    """The token that each request slot sampled last, for plans that were made before it was known."""

    def __init__(self) -> None:
        self._by_slot = np.zeros(64, dtype=np.int32)

    def store(self, slots: Int32Array, tokens: Int32Array) -> None:
        """Remember the tokens of a step; a negative one (the row failed) becomes 0, so that a wasted row can run."""
        needed = int(slots.max(initial=-1)) + 1
        if needed > len(self._by_slot):
            self._by_slot = np.concatenate([self._by_slot, np.zeros(max(needed, len(self._by_slot)), dtype=np.int32)])
        self._by_slot[slots] = np.maximum(tokens, 0)

    def fill_in(self, token_ids: Int32Array) -> Int32Array:
        """`token_ids` with every promise -(slot + 1) replaced by that slot's token."""
        promised = token_ids < 0
        if not promised.any():
            return token_ids
        filled = token_ids.copy()
        filled[promised] = self._by_slot[-token_ids[promised] - 1]
        return filled


class LogitsMemory:
    """Room for the logits of a step, used again by the next: new memory in every step costs more than reading it."""

    def __init__(self, vocab_size: int) -> None:
        self._all = torch.empty((0, vocab_size), dtype=torch.float32)
        # To cut a tensor anew takes longer than to sample from one row.
        self._parts: dict[int, torch.Tensor] = {}

    def rows(self, count: int) -> torch.Tensor:
        """Float32 [count, vocab], the same memory in every call."""
        part = self._parts.get(count)
        if part is None:
            if count > len(self._all):
                self._all = torch.empty((max(count, 2 * len(self._all)), self._all.shape[1]), dtype=torch.float32)
                self._parts.clear()
            part = self._parts[count] = self._all[:count]
        return part


class StepRunner:
    """Carries out plans: everything that a step does, on the calling thread."""

    def __init__(self, model: LanguageModel, chooser: Chooser | None = None) -> None:
        """`chooser`: what picks the tokens; torch unless it is given."""
        self._model = model
        self._sampler = Sampler(model.config.vocab_size, chooser)
        self._last_tokens = LastTokens()
        self._logits = LogitsMemory(model.config.vocab_size)

    @torch.inference_mode()
    def run(self, plan: Plan) -> StepResult:
        """Close, open, copy, forward, sample.  Raises what the model raises; the slots' state is then still right."""
        begin = time.perf_counter()
        for slot in plan.closed:
            self._sampler.close(slot)
        for opening in plan.opened:
            self._sampler.open(opening)
        if len(plan.copies):
            self._model.kv.copy_rows(plan.copies)
        if plan.num_tokens == 0:
            return StepResult(plan.step, np.full(plan.num_rows, -1, np.int32), seconds=time.perf_counter() - begin)
        batch = self._batch(plan)
        sampling_rows = np.flatnonzero(plan.samples)
        sampled_from = plan.qo_indptr[1:][sampling_rows] - 1
        wanted = self._prompt_targets(plan, batch)
        if wanted:
            tokens = np.concatenate([sampled_from, *(positions for positions, _ in wanted.values())])
            hidden = self._model.forward_hidden(batch, tokens)
            logits = self._model.project(hidden[: len(sampled_from)])
            prompt_logprobs = self._prompt_logprobs(plan, hidden[len(sampled_from) :], wanted)
            broken = [row for row, found in prompt_logprobs.items() if not np.isfinite(found.logprobs).all()]
        else:
            logits = self._model.forward(batch, sampled_from, self._logits.rows(len(sampled_from)))
            prompt_logprobs, broken = {}, []
        result = self._sample(plan, sampling_rows, logits)
        return StepResult(
            step=plan.step,
            token_ids=result.token_ids,
            logprobs=result.logprobs,
            prompt_logprobs={row: found for row, found in prompt_logprobs.items() if row not in broken},
            errors={**result.errors, **dict.fromkeys(broken, NOT_FINITE)},
            seconds=time.perf_counter() - begin,
        )

    def _batch(self, plan: Plan) -> ForwardBatch:
        token_ids = self._last_tokens.fill_in(plan.token_ids)
        vocab = self._model.config.vocab_size
        if int(token_ids.max()) >= vocab:
            raise ValueError(f"token id {int(token_ids.max())} is not below the vocabulary's size {vocab}")
        return ForwardBatch(
            page_size=plan.page_size,
            token_ids=token_ids,
            positions=plan.positions,
            out_slots=plan.out_slots,
            qo_indptr=plan.qo_indptr,
            kv_indptr=plan.kv_indptr,
            kv_indices=plan.kv_indices,
            kv_last_page_len=plan.kv_last_page_len,
        )

    def _sample(self, plan: Plan, rows: npt.NDArray[np.intp], logits: torch.Tensor) -> StepResult:
        """Sample the given rows of the plan; results are by row of the plan."""
        token_ids = np.full(plan.num_rows, -1, dtype=np.int32)
        slots = plan.slots[rows]
        positions = plan.positions[plan.qo_indptr[1:][rows] - 1] + 1
        sampled = self._sampler.sample(logits, slots.tolist(), positions)
        token_ids[rows] = sampled.token_ids
        self._last_tokens.store(slots, sampled.token_ids)
        return StepResult(
            plan.step,
            token_ids,
            logprobs={int(rows[i]): found for i, found in sampled.logprobs.items()},
            errors={int(rows[i]): message for i, message in sampled.errors.items()},
        )

    def _prompt_targets(self, plan: Plan, batch: ForwardBatch) -> dict[int, tuple[Int32Array, Int32Array]]:
        """row -> (the batch's tokens whose next token's logprob is wanted, those next tokens), both int32 [n]."""
        targets = {}
        for row in np.flatnonzero(plan.prompt_logprobs >= 0).tolist():
            first, stop = int(plan.qo_indptr[row]), int(plan.qo_indptr[row + 1])
            following = np.append(batch.token_ids[first + 1 : stop], plan.prompt_next[row])
            # Only tokens of the prompt count as next ones: a resumed request computes its outputs again too.
            begin = int(plan.positions[first])
            in_prompt = self._sampler.state(int(plan.slots[row])).prompt_length - 1 - begin
            end = min(stop - first, max(in_prompt, 0))
            if end == stop - first and plan.prompt_next[row] < 0:
                end -= 1
            skip = max(int(plan.prompt_logprobs[row]) - begin, 0)
            if skip < end:
                targets[row] = (np.arange(first + skip, first + end, dtype=np.int32), following[skip:end])
        return targets

    def _prompt_logprobs(
        self, plan: Plan, hidden: torch.Tensor, wanted: dict[int, tuple[Int32Array, Int32Array]]
    ) -> dict[int, RowLogprobs]:
        """Logprobs of prompt tokens by row, from the hidden states of all rows' wanted tokens, one below the other."""
        slice_rows = max(1, LOGIT_SLICE_BYTES // (4 * self._model.config.vocab_size))
        found = {}
        offset = 0
        for row, (tokens, following) in wanted.items():
            top = self._sampler.state(int(plan.slots[row])).logprobs or 0
            parts = []
            for low in range(0, len(tokens), slice_rows):
                high = min(low + slice_rows, len(tokens))
                logits = self._model.project(hidden[offset + low : offset + high])
                parts.append(token_logprobs(logits, following[low:high], top))
            found[row] = join(parts)
            offset += len(tokens)
        return found
