"""How long a step takes: from what a model must compute and move, or from steps that were measured.

Both kinds are JSON files of one shape (`read_profile`), told apart by their field "kind".

roofline   the step is done by parts one after another, and each takes as long as its arithmetic or its memory traffic,
           whichever is longer (Williams, Waterman, Patterson 2009): the linear layers, attention, the output layer
fitted     seconds by the number of tokens, read off a line through measured points, and on top of it something for
           each row and each sampled row, each pair of query and key, and each cached token read (`sapwood profile`)
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np

from srt.plan import Plan


class ProfileError(Exception):
    """A profile cannot be read or makes no sense; the message is one line."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a step has to do.

    rows, sampled   scheduled requests, and those of them that sample a token
    tokens          new tokens, all rows together
    context         tokens whose KV is read: for each row all before its last new one, and that
    pairs           (query, key) pairs that attention scores
    """

    rows: int
    sampled: int
    tokens: int
    context: int
    pairs: int


def load_of(plan: Plan) -> Load:
    """The load of a plan."""
    rows = len(plan.slots)
    # All pages but each row's last are full.
    last = plan.kv_last_page_len
    context = (len(plan.kv_indices) - rows) * plan.page_size + int(np.add.reduce(last, dtype=np.int64))
    tokens = len(plan.token_ids)
    if tokens == rows:
        pairs = context
    else:
        ends = (plan.kv_indptr[1:] - plan.kv_indptr[:-1] - 1) * np.int64(plan.page_size) + last
        new = (plan.qo_indptr[1:] - plan.qo_indptr[:-1]).astype(np.int64)
        pairs = int((new * ends - new * (new - 1) // 2).sum())
    return Load(rows, int(np.count_nonzero(plan.samples)), tokens, context, pairs)


class Scheduling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is paid beside the forward pass, in seconds.

    step, row   planning, committing and sending of a step; hidden behind the step before it where that is longer
    request     from a client to the scheduler and back: HTTP, tokenizer, detokenizer, sockets
    """

    step: float = 0.0
    row: float = 0.0
    request: float = 0.0

    def seconds(self, rows: int) -> float:
        """Processor time of the scheduler for a step of so many rows."""
        return self.step + self.row * rows


class ModelShape(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What of a decoder-only model decides its speed.  `weight_bytes`, `kv_bytes`: of one number."""

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    weight_bytes: float = 2.0
    kv_bytes: float = 2.0

    @property
    def layer_parameters(self) -> int:
        """Weights of all layers: what is multiplied for each token."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        return self.num_layers * (attention + 3 * self.hidden_size * self.intermediate_size)

    @property
    def head_parameters(self) -> int:
        """Weights of the output layer: what is multiplied for each sampled row."""
        return self.hidden_size * self.vocab_size

    @property
    def kv_token_bytes(self) -> float:
        """K and V of one token in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.kv_bytes


class Hardware(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a machine can do at best, and how much of that is reached in practice.

    flops_per_second, bytes_per_second   as the data sheet says, for the number format of the weights
    compute_share, memory_share          of these, reached by the kernels
    step_seconds                         launching a step, whatever is in it
    memory_bytes                         for weights and KV; 0 where the pool is given otherwise
    """

    name: str
    flops_per_second: float
    bytes_per_second: float
    compute_share: float = 0.6
    memory_share: float = 0.8
    step_seconds: float = 0.0005
    memory_bytes: float = 0.0


class Roofline(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="roofline", tag_field="kind"):
    """Step times from a model's shape and a machine's figures."""

    hardware: Hardware
    model: ModelShape
    scheduling: Scheduling = Scheduling()

    def seconds(self, load: Load) -> float:
        """The step's time on the device."""
        model = self.model
        attention = 4.0 * model.num_layers * model.num_heads * model.head_dim * load.pairs
        return (
            self.hardware.step_seconds
            + self._part(2.0 * model.layer_parameters * load.tokens, model.layer_parameters * model.weight_bytes)
            + self._part(attention, load.context * model.kv_token_bytes)
            + self._part(2.0 * model.head_parameters * load.sampled, model.head_parameters * model.weight_bytes)
        )

    def _part(self, flops: float, moved: float) -> float:
        if not flops:
            return 0.0
        hardware = self.hardware
        return max(
            flops / (hardware.flops_per_second * hardware.compute_share),
            moved / (hardware.bytes_per_second * hardware.memory_share),
        )

    @property
    def context_length(self) -> int:
        """The longest prompt and answer together."""
        return self.model.context_length

    @property
    def pool_tokens(self) -> int | None:
        """Tokens of KV beside the weights in nine tenths of the memory; None when the memory is not known."""
        model = self.model
        if not self.hardware.memory_bytes:
            return None
        weights = (model.layer_parameters + 2 * model.head_parameters) * model.weight_bytes
        return int((0.9 * self.hardware.memory_bytes - weights) / model.kv_token_bytes)

    def check(self) -> None:
        """Raise ProfileError for figures that no step time comes of."""
        hardware = self.hardware
        _positive("hardware", hardware, ("flops_per_second", "bytes_per_second", "compute_share", "memory_share"))
        _positive("model", self.model, ModelShape.__struct_fields__)
        if self.pool_tokens is not None and self.pool_tokens < 1:
            raise ProfileError(f"hardware.memory_bytes {hardware.memory_bytes:g} does not hold the model's weights")


class Fitted(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="fitted", tag_field="kind"):
    """Step times that were measured.

    tokens    [tokens, seconds] in rising order: what a step of so many tokens takes before the rest is added; between
              two points, and beyond the last, on the line through them
    row, sampled, pair, context   seconds for each of those of `Load`
    """

    tokens: list[tuple[int, float]]
    row: float = 0.0
    sampled: float = 0.0
    pair: float = 0.0
    context: float = 0.0
    scheduling: Scheduling = Scheduling()
    context_length: int = 131_072
    pool_tokens: int | None = None
    # What was measured where, for people.
    facts: dict[str, str | int | float] = {}
    # Measured steps: [rows, sampled, tokens, context, pairs, seconds].
    points: list[tuple[int, int, int, int, int, float]] = []

    def seconds(self, load: Load) -> float:
        """The step's time on the device."""
        return (
            self._of_tokens(load.tokens)
            + self.row * load.rows
            + self.sampled * load.sampled
            + self.pair * load.pairs
            + self.context * load.context
        )

    def _of_tokens(self, count: int) -> float:
        points = self.tokens
        if len(points) == 1 or count <= points[0][0]:
            return points[0][1]
        after = min(max(bisect_right(points, (count, 0.0)), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[after - 1], points[after]
        return y0 + (count - x0) / (x1 - x0) * (y1 - y0)

    def check(self) -> None:
        """Raise ProfileError for figures that no step time comes of."""
        if not self.tokens or any(a[0] >= b[0] for a, b in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ProfileError("tokens: must be a list of [tokens, seconds] with rising numbers of tokens")
        if min(self.row, self.sampled, self.pair, self.context, *(seconds for _, seconds in self.tokens)) < 0:
            raise ProfileError("times must not be negative")


Profile = Roofline | Fitted


def _positive(name: str, part: msgspec.Struct, fields: tuple[str, ...]) -> None:
    for field in fields:
        if not getattr(part, field) > 0:
            raise ProfileError(f"{name}.{field} is {getattr(part, field):g}, it must be above 0")


def read_profile(path: Path) -> Profile:
    """Read a profile of either kind.  Raises ProfileError."""
    try:
        profile = msgspec.json.decode(path.read_bytes(), type=Profile)
        profile.check()
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (msgspec.DecodeError, ProfileError) as error:
        raise ProfileError(f"{path}: {error}") from None
    return profile


def write_profile(path: Path, profile: Profile) -> None:
    """Write what `read_profile` reads."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
