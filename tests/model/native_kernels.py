"""The native kernels that this machine can run, compiled once for a test session."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import numpy as np
import torch

from srt.model.config import read_model_config
from srt.model.kernels.build import find_compiler, host_variants
from srt.model.native import Kernels, NativeModel, load_kernels, native_available

COMPILERS_AT_ONCE = 2
# Name -> number format of activations, and those of weights and of KV where they are others.
FORMATS = {
    "float32": ("float32", None, None),
    "bfloat16": ("bfloat16", None, None),
    "int8": ("bfloat16", "int8", None),
    "int4": ("bfloat16", "int4", None),
    "kv8": ("bfloat16", None, "int8"),
    "kv8-float32": ("float32", None, "int8"),
    "kv16-float32": ("float32", None, "bfloat16"),
}
# Beside the others these have nothing that an instruction set could change; compiling takes time.
ON_BEST_VARIANT_ALONE = {"kv8-float32", "kv16-float32"}


@cache
def all_kernels(number_format: str) -> tuple[Kernels, ...]:
    """One for each variant of this CPU; none where there is no compiler, and then the backend must say so."""
    dtype, quantization, kv_dtype = FORMATS[number_format]
    if find_compiler() is None:
        assert not native_available(dtype)
        return ()
    variants = host_variants()[:1] if number_format in ON_BEST_VARIANT_ALONE else host_variants()
    with ThreadPoolExecutor(COMPILERS_AT_ONCE) as pool:
        return tuple(pool.map(lambda variant: load_kernels(dtype, (variant,), quantization, kv_dtype), variants))


def load_native_model(
    folder: Path,
    kernels: Kernels,
    tokens: int = 2048,
    page_size: int = 16,
    threads: int = 2,
    share_prefixes: bool = True,
) -> NativeModel:
    """A model with room for `tokens` tokens and a pool full of NaN, so that a read of stale KV shows."""
    model = NativeModel(
        read_model_config(folder),
        folder,
        getattr(torch, kernels.dtype),
        tokens // page_size,
        page_size,
        threads,
        share_prefixes=share_prefixes,
        kernels=kernels,
    )
    model.kv.pages.view(np.uint16)[:] = 0x7FFF
    return model
