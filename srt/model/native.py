"""The native backend: a model whose layers run in compiled C++, one call for a whole step.

    NativeModel -- arrays of the step, checked --> sapwood_forward (kernels/model.h): all layers, no Python between

The library is called on raw pointers through ctypes, which lets other Python threads run meanwhile.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from srt.model.config import DTYPE_BYTES, ModelConfig, kv_bytes_per_token
from srt.model.interface import ForwardBatch
from srt.model.kernels.build import BuildFailed, Variant, build_library, host_variants
from srt.model.kernels.check import STEP_ARRAYS, check_batch, check_copies, check_logits, check_tokens
from srt.model.pinning import pinned
from srt.model.rope import inverse_frequencies
from srt.model.weights import TensorSource, check_tensors, norm_names, open_tensors
from srt.plan import Int32Array

log = logging.getLogger("sapwood.kernels")

# Head sizes are stored rounded up to whole strips: STRIP in kernels/pages.h.
STRIP = 16
# In the order of enum Weight and enum Vector in kernels/model.h.
MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
HEAD = len(MATRICES)
NORMS = {"input_norm": 0, "mlp_norm": 1, "attention_post_norm": 12, "mlp_post_norm": 13}
HEAD_NORMS = {"self_attn.q_norm": 3, "self_attn.k_norm": 4}
FINAL_NORM = 2
FIRST_BIAS = 5
# Number formats that weights can be held in beside the dtypes.
QUANTIZATIONS = ("int8", "int4")
# In the order of enum Phase in kernels/model.h.
PHASES = ("prepare", "norm", "qkv", "attention", "output", "gate_up", "down", "head")


class NativeUnavailable(Exception):
    """The kernels cannot be compiled or loaded here; the message is one line that says why."""


class Spec(ctypes.Structure):
    """`struct Spec` of kernels/model.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim")),
        *((name, ctypes.c_int32) for name in ("vocab", "num_pages", "page_size", "threads")),
        *((name, ctypes.c_int32) for name in ("qk_norm", "gelu", "ropes")),
        *((name, ctypes.c_float) for name in ("norm_eps", "rope_scale", "attention_scale", "embedding_scale")),
        *((name, ctypes.c_float) for name in ("attention_cap", "final_cap")),
        *((name, ctypes.c_void_p) for name in ("inverse_frequencies", "windows", "kv")),
    )


class StepArrays(ctypes.Structure):
    """`struct StepArrays` of kernels/attention_plan.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("tokens", "rows", "wanted_count", "share_prefixes", "want_logits")),
        *((name, ctypes.c_void_p) for name in (*STEP_ARRAYS, "wanted", "out")),
    )


@dataclass(frozen=True, slots=True)
class Kernels:
    """A loaded library, the variant that it was compiled for and its number formats; None: `dtype` there too."""

    library: ctypes.CDLL
    variant: Variant
    dtype: str
    quantization: str | None = None
    kv_dtype: str | None = None


def load_kernels(
    dtype: str = "bfloat16",
    variants: tuple[Variant, ...] | None = None,
    quantization: str | None = None,
    kv_dtype: str | None = None,
) -> Kernels:
    """The kernels of the best variant that compiles, out of `variants` (those that this CPU can run).

    `dtype`: float32 or bfloat16.  `quantization`: None for weights in `dtype`; int8: one scale for each output
    channel of a weight matrix, and one for each 128 activations of a token; int4: scale and minimum for each 32
    weights of a channel, activations and the head as with int8.  `kv_dtype`: None for KV in `dtype`; bfloat16; or int8,
    with a scale for K and one for V of each token and KV head.  Raises NativeUnavailable when none compiles; each
    failure is logged.
    """
    reason = "no variant fits this CPU"
    for variant in host_variants() if variants is None else variants:
        try:
            library = ctypes.CDLL(str(build_library(variant, dtype, quantization, kv_dtype)))
            return Kernels(bind(library), variant, dtype, quantization, kv_dtype)
        except (BuildFailed, OSError) as error:
            reason = str(error)
            log.warning("no native kernels for %s: %s", variant.name, reason)
    raise NativeUnavailable(reason)


def bind(library: ctypes.CDLL) -> ctypes.CDLL:
    """Declare the types of the library's functions; returns it."""
    number, pointer = ctypes.c_int32, ctypes.c_void_p
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "sapwood_create": (pointer, (ctypes.POINTER(Spec),)),
        "sapwood_destroy": (None, (pointer,)),
        "sapwood_set_weight": (None, (pointer, number, number, pointer)),
        "sapwood_set_vector": (None, (pointer, number, number, pointer)),
        "sapwood_set_embedding": (None, (pointer, pointer)),
        "sapwood_forward": (number, (pointer, ctypes.POINTER(StepArrays))),
        "sapwood_project": (number, (pointer, pointer, number, pointer)),
        "sapwood_best": (None, (pointer, pointer, number, pointer)),
        "sapwood_greedy": (None, (pointer, pointer, pointer, number, pointer)),
        "sapwood_draw": (number, (pointer, pointer, pointer, number, pointer)),
        "sapwood_take_seconds": (None, (pointer, ctypes.POINTER(ctypes.c_double))),
        "sapwood_peaks": (None, (pointer, ctypes.POINTER(ctypes.c_double), ctypes.POINTER(ctypes.c_double))),
        "sapwood_copy_rows": (None, (pointer, number, number, number, number, pointer, number)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


def native_available(dtype: str = "bfloat16") -> bool:
    """Whether the kernels can run here.  Compiles them when they are not in the cache; a failure is logged."""
    try:
        load_kernels(dtype)
    except NativeUnavailable:
        return False
    return True


class NativeKVPool:
    """Implements `srt.model.interface.KVPool`.  The system gives the memory, in huge pages, when it is first used."""

    def __init__(self, config: ModelConfig, kernels: Kernels, num_pages: int, page_size: int) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        # The kernels' own layout: see kernels/pages.h.
        stored_dim = -(-config.head_dim // STRIP) * STRIP
        self.page_bytes = page_size * kv_bytes_per_token(
            dataclasses.replace(config, head_dim=stored_dim), kernels.kv_dtype or kernels.dtype
        )
        # The library's name tells the instruction set and every change of the source.
        self.layout = f"native {Path(kernels.library._name).stem}"
        self._shape = (page_size, config.num_layers, config.num_kv_heads, config.head_dim)
        self._kernels = kernels
        # Private, since the system gives huge pages to private memory only.
        memory = mmap.mmap(-1, max(1, num_pages) * self.page_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        self.pages = np.frombuffer(memory, np.uint8).reshape(-1, self.page_bytes)

    def copy_rows(self, copies: Int32Array) -> None:
        """See `KVPool.copy_rows`.  Raises ValueError when a page or a number of rows is out of range, or a page
        would be copied onto itself."""
        check_copies(copies, num_pages=self.num_pages, page_size=self.page_size)
        copies = np.require(copies, requirements=("C", "ALIGNED"))
        self._kernels.library.sapwood_copy_rows(self.pages.ctypes.data, *self._shape, copies.ctypes.data, len(copies))

    def read_page(self, page: int) -> bytes:
        """See `KVPool.read_page`.  Raises ValueError when there is no such page."""
        self._check_page(page)
        return bytes(self.pages[page].data)

    def write_page(self, page: int, data: bytes | memoryview) -> None:
        """See `KVPool.write_page`.  Raises ValueError when there is no such page or `data` is not a page long."""
        self._check_page(page)
        if len(data) != self.page_bytes:
            raise ValueError(f"a page holds {self.page_bytes} bytes, got {len(data)}")
        self.pages[page] = np.frombuffer(data, np.uint8)

    def _check_page(self, page: int) -> None:
        if not 0 <= page < self.num_pages:
            raise ValueError(f"page {page} is not one of {self.num_pages}")


class NativeModel:
    """Implements `srt.model.interface.LanguageModel` on the compiled kernels.

    The logits of a token depend on the tokens before it and on nothing else, to the bit: not on the other rows of
    the step, on how a prompt was cut into chunks, on the page size, nor on the number of threads.
    """

    def __init__(
        self,
        config: ModelConfig,
        folder: Path,
        dtype: torch.dtype,
        num_pages: int,
        page_size: int,
        threads: int,
        *,
        share_prefixes: bool = True,
        quantization: str | None = None,
        kv_dtype: str | None = None,
        kernels: Kernels | None = None,
        cores: Sequence[int] = (),
    ) -> None:
        """Load the weights of `folder` in `dtype` (torch.float32 or torch.bfloat16) and reserve the KV pool.

        `share_prefixes`: rows whose page tables begin alike are computed together against the pages they share.
        `kernels`: those of `load_kernels(dtype, None, quantization, kv_dtype)` unless they are given.
        `cores`: where all threads but the first, which is the caller's, are to stay; empty: anywhere.
        Raises NativeUnavailable when there are no kernels, BrokenModelFolder when the folder's tensors are wrong.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in DTYPE_BYTES:
            raise ValueError(f"dtype {name} is not one of {', '.join(DTYPE_BYTES)}")
        self.config = config
        self.kernels = load_kernels(name, None, quantization, kv_dtype) if kernels is None else kernels
        self.kv = NativeKVPool(config, self.kernels, num_pages, page_size)
        self.share_prefixes = share_prefixes
        self._dtype = dtype
        self._lock = threading.Lock()
        library = self.kernels.library
        with pinned(cores) if cores else nullcontext():
            self._handle = library.sapwood_create(ctypes.byref(self._spec(threads)))
        if not self._handle:
            raise MemoryError("not enough memory for the packed weights")
        self._finalizer = weakref.finalize(self, library.sapwood_destroy, self._handle)
        with open_tensors(folder, dtype) as source:
            check_tensors(folder, config, source)
            self._embedding = self._load(source)

    def _spec(self, threads: int) -> Spec:
        config = self.config
        # Kept as long as the model is being made: the kernels copy what these point at.
        ropes = [config.rope] if config.window_rope is None else [config.rope, config.window_rope]
        self._frequencies = torch.stack([inverse_frequencies(rope, config.head_dim) for rope in ropes])
        self._windows = np.array([window or 0 for window in config.sliding_windows], np.int32)
        return Spec(
            layers=config.num_layers,
            hidden=config.hidden_size,
            intermediate=config.intermediate_size,
            heads=config.num_heads,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            vocab=config.vocab_size,
            num_pages=self.kv.num_pages,
            page_size=self.kv.page_size,
            threads=threads,
            qk_norm=int(config.qk_norm),
            gelu=int(config.activation == "gelu_tanh"),
            ropes=len(ropes),
            norm_eps=config.rms_norm_eps,
            rope_scale=1.0,
            attention_scale=config.attention_scale,
            # Rounded as a weight is, before it is used.
            embedding_scale=float(torch.tensor(config.embedding_scale, dtype=self._dtype)),
            attention_cap=config.attention_softcap or 0.0,
            final_cap=config.final_softcap or 0.0,
            inverse_frequencies=self._frequencies.data_ptr(),
            windows=self._windows.ctypes.data,
            kv=self.kv.pages.ctypes.data,
        )

    def _load(self, source: TensorSource) -> torch.Tensor:
        """Pack every tensor; returns the embedding, which the kernels read in place."""
        names = source.names()
        for layer in range(self.config.num_layers):
            prefix = f"model.layers.{layer}."
            for which, matrix in enumerate(MATRICES):
                name = prefix + ("self_attn." if which < 4 else "mlp.") + matrix
                self._set_weight(layer, which, source.get(name + ".weight"))
                if name + ".bias" in names:
                    self._set_vector(layer, FIRST_BIAS + which, source.get(name + ".bias"))
            for field, norm in norm_names(self.config).items():
                self._set_norm(layer, NORMS[field], source.get(f"{prefix}{norm}.weight"))
            for norm, which in HEAD_NORMS.items():
                if self.config.qk_norm:
                    self._set_norm(layer, which, source.get(f"{prefix}{norm}.weight"))
        self._set_norm(0, FINAL_NORM, source.get("model.norm.weight"))
        embedding = source.get("model.embed_tokens.weight").contiguous()
        self._set_weight(0, HEAD, embedding if self.config.tie_word_embeddings else source.get("lm_head.weight"))
        self.kernels.library.sapwood_set_embedding(self._handle, embedding.data_ptr())
        return embedding

    def _set_weight(self, layer: int, which: int, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        self.kernels.library.sapwood_set_weight(self._handle, layer, which, tensor.data_ptr())

    def _set_norm(self, layer: int, which: int, tensor: torch.Tensor) -> None:
        self._set_vector(layer, which, 1.0 + tensor.float() if self.config.unit_offset_norms else tensor)

    def _set_vector(self, layer: int, which: int, tensor: torch.Tensor) -> None:
        values = tensor.float().contiguous()
        self.kernels.library.sapwood_set_vector(self._handle, layer, which, values.data_ptr())

    def forward(self, batch: ForwardBatch, logit_tokens: Int32Array, out: torch.Tensor | None = None) -> torch.Tensor:
        """See `LanguageModel.forward`.  Raises ValueError, which names the array, when the batch is not sound."""
        return self._run(batch, "logit_tokens", logit_tokens, out, want_logits=True)

    def forward_hidden(self, batch: ForwardBatch, tokens: Int32Array) -> torch.Tensor:
        """See `LanguageModel.forward_hidden`.  Raises ValueError as `forward` does."""
        return self._run(batch, "tokens", tokens, None, want_logits=False)

    def project(self, hidden: torch.Tensor) -> torch.Tensor:
        """See `LanguageModel.project`."""
        hidden = hidden.to(self._dtype).contiguous()
        if hidden.shape[1:] != (self.config.hidden_size,):
            raise ValueError(f"hidden is {list(hidden.shape)}, expected [L, {self.config.hidden_size}]")
        logits = torch.empty((len(hidden), self.config.vocab_size), dtype=torch.float32)
        with self._lock:
            code = self.kernels.library.sapwood_project(self._handle, hidden.data_ptr(), len(hidden), logits.data_ptr())
        if code:
            raise MemoryError("not enough memory for the logits' step")
        return logits

    def call(self, name: str, *arguments: int) -> int | None:
        """The library's function on this model, after whatever else it is doing; the arguments must be right."""
        with self._lock:
            code: int | None = getattr(self.kernels.library, name)(self._handle, *arguments)
        return code

    def take_seconds(self) -> dict[str, float]:
        """Wall seconds spent in each phase of the steps since the last call."""
        seconds = (ctypes.c_double * len(PHASES))()
        with self._lock:
            self.kernels.library.sapwood_take_seconds(self._handle, seconds)
        return dict(zip(PHASES, seconds, strict=True))

    def measure_peaks(self) -> tuple[float, float]:
        """What this machine does at best on the model's threads: (operations per second, bytes read per second)."""
        operations, read = ctypes.c_double(), ctypes.c_double()
        with self._lock:
            self.kernels.library.sapwood_peaks(self._handle, ctypes.byref(operations), ctypes.byref(read))
        return operations.value, read.value

    def _run(
        self, batch: ForwardBatch, name: str, wanted: Int32Array, out: torch.Tensor | None, *, want_logits: bool
    ) -> torch.Tensor:
        check_batch(batch, vocab_size=self.config.vocab_size, num_pages=self.kv.num_pages, page_size=self.kv.page_size)
        check_tokens(name, wanted, len(batch.token_ids))
        columns = self.config.vocab_size if want_logits else self.config.hidden_size
        if out is None:
            out = torch.empty((len(wanted), columns), dtype=torch.float32 if want_logits else self._dtype)
        else:
            check_logits("out", out, (), columns)
            if len(out) != len(wanted):
                raise ValueError(f"out has {len(out)} rows, {name} has {len(wanted)} entries")
        arrays = {name: getattr(batch, name).ctypes.data for name in STEP_ARRAYS}
        step = StepArrays(
            tokens=len(batch.token_ids),
            rows=len(batch.kv_last_page_len),
            wanted_count=len(wanted),
            share_prefixes=int(self.share_prefixes),
            want_logits=int(want_logits),
            wanted=wanted.ctypes.data,
            out=out.data_ptr(),
            **arrays,
        )
        with self._lock:
            code = self.kernels.library.sapwood_forward(self._handle, ctypes.byref(step))
        if code:
            raise MemoryError("not enough memory for this step's activations")
        return out
