"""What one step does and what it brought: the data between scheduler and executor.

A plan is flat arrays in the form that paged attention kernels want (CSR page tables).  With R rows (one for
each scheduled request) and T tokens over all rows:

    row r computes tokens  [qo_indptr[r], qo_indptr[r+1])        of token_ids / positions / out_slots
    row r attends to pages [kv_indptr[r], kv_indptr[r+1])        of kv_indices, the last filled to kv_last_page_len[r]
                           (its own new tokens included: the executor writes their KV before it attends)

A token id below zero is a promise: `-(slot + 1)` stands for the token that request slot `slot` sampled in the
last step that sampled for it, which the executor reads from its own buffer.  So a step can be planned before
the step in front of it has ended.

Pages are plain ints: the executor knows nothing of the tree, and the tree nothing of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from srt.messages import SamplingParams

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SlotOpen:
    """Sampling state to set up in a request slot before the step runs.

    `prompt_ids`: int32 [prompt].  `output_ids`: int32 [outputs so far], not empty when a retracted request
    comes back: penalties count them, and the random stream goes on at position prompt + outputs.
    """

    slot: int
    sampling: SamplingParams
    seed: int
    prompt_ids: Int32Array
    output_ids: Int32Array
    # None: no logprobs wanted; k: of the chosen token and the k best.
    logprobs: int | None = None
    # Ids that must not be sampled while fewer than `sampling.min_new_tokens` outputs exist (EOS and stop ids).
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.  Executors carry out in this order: close, open, copies, forward, sample.

    slots            int32 [R]    request slot of each row; a slot is at most once in a plan
    token_ids        int32 [T]    ids, or -(slot + 1) for the token that slot sampled last
    positions        int32 [T]    absolute positions
    out_slots        int32 [T]    physical token slot (page * page_size + offset) that takes the token's KV
    qo_indptr        int32 [R+1]
    kv_indptr        int32 [R+1]
    kv_indices       int32 [P]
    kv_last_page_len int32 [R]    1..page_size
    samples          bool  [R]    rows whose last token's logits are sampled
    copies           int32 [C,3]  (source page, destination page, rows): copy the first rows of K and V, in order
    opened           slots set up before the step; closed: slots given back (their state may be dropped)
    prompt_logprobs  int32 [R]    -1, or the first position p of the row from which prompt logprobs are wanted: for
                                  each position q >= p computed by the row whose next token the row also knows
                                  (q + 1 is a prompt token), the logprob of that next token.  Next tokens that lie
                                  beyond the row are in `prompt_next`: int32 [R], -1 where there is none.
    """

    step: int
    page_size: int
    slots: Int32Array
    token_ids: Int32Array
    positions: Int32Array
    out_slots: Int32Array
    qo_indptr: Int32Array
    kv_indptr: Int32Array
    kv_indices: Int32Array
    kv_last_page_len: Int32Array
    samples: BoolArray
    copies: Int32Array
    prompt_logprobs: Int32Array
    prompt_next: Int32Array
    opened: tuple[SlotOpen, ...] = ()
    closed: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """R."""
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class RowLogprobs:
    """Logprobs of some tokens of a row, in order: float32 [n]; top_ids int32 [n,k]; top_logprobs float32 [n,k]."""

    logprobs: Float32Array
    top_ids: Int32Array
    top_logprobs: Float32Array


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step brought.

    token_ids   int32 [R]: the sampled id, -1 for rows that did not sample
    logprobs    row index -> logprobs of the sampled token (n = 1), where the slot asked for them
    prompt_logprobs  row index -> logprobs of prompt tokens, where the plan asked for them: the i-th entry is
                for the token at position max(p, first position of the row) + i + 1
    errors      row index -> message: this request failed alone (its logits were not finite, for example)
    seconds     wall time of the step on the executor
    """

    step: int
    token_ids: Int32Array
    logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, RowLogprobs] = field(default_factory=dict)
    errors: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0


class StepHandle(Protocol):
    """A step that has been launched."""

    def wait(self) -> StepResult:
        """Block until the step is done.  Raises what the step raised."""
        ...


class Executor(Protocol):
    """Runs plans one after another, in the order in which they are launched."""

    def launch(self, plan: Plan) -> StepHandle:
        """Queue a step behind those launched before, and return at once."""
        ...

    def close(self) -> None:
        """Finish what is queued and give everything back."""
        ...


class PageMemory(Protocol):
    """The memory behind the page ids, for whoever keeps pages elsewhere too.  May be used from any thread.

    Pages that the tree holds are read at any time, others only while no step is in flight; only pages that no step
    knows are written.
    """

    @property
    def page_bytes(self) -> int:
        """What a page takes, all layers, K and V."""
        ...

    @property
    def layout(self) -> str:
        """Everything that the bytes depend on beside model, weights and number format: who computes, and how it is laid
        out.  Pages may be exchanged between memories of the same layout alone."""
        ...

    def read_page(self, page: int) -> bytes:
        """The exact bytes of a page."""
        ...

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """The inverse of `read_page`."""
        ...
