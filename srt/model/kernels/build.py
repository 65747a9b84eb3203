"""Compiles the native kernels with the system's compiler, once, into the cache folder.

A library is made for one instruction set (a variant) and one choice of number formats, of
activations, of weights and of KV.
Its file name carries a hash of the sources, the compiler's version and the flags, so a library in the cache is
always the right one.  Several processes may start at once: they wait for one another on a lock file, and the library
appears under its name whole or not at all.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

log = logging.getLogger("sapwood.kernels")

SOURCE_FOLDER = Path(__file__).parent
COMPILERS = ("c++", "g++", "clang++")
# What is fused into one rounding is written so in the sources: see simd.h.
COMMON_FLAGS = ("-O2", "-std=c++17", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-w")
SANITIZE_FLAGS = ("-O0", "-g1", "-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
COMPILE_SECONDS = 300
# Names in kernels/simd.h.
FORMATS = {"float32": "F32", "bfloat16": "BF16", "int8": "I8", "int4": "I4"}


class BuildFailed(Exception):
    """No library can be made; the message is one line that says why."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One instruction set: the CPU flags it needs (as Linux names them) and the compiler flags that name it."""

    name: str
    needs: frozenset[str]
    flags: tuple[str, ...]


AVX2 = ("-mavx2", "-mfma")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
AVX512_CPU = frozenset({"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"})
# The best first.
VARIANTS = (
    Variant("avx512bf16", AVX512_CPU | {"avx512_bf16", "avx512_vnni"}, (*AVX512, "-mavx512bf16", "-mavx512vnni")),
    Variant("avx512", AVX512_CPU, AVX512),
    Variant("avx2", frozenset({"avx2", "fma"}), AVX2),
    Variant("portable", frozenset(), ()),
)


def cpu_flags() -> frozenset[str]:
    """The CPU's features as /proc/cpuinfo names them; empty where there is no such file or no x86 CPU."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    for line in text.splitlines():
        if line.startswith("flags"):
            return frozenset(line.partition(":")[2].split())
    return frozenset()


def host_variants() -> tuple[Variant, ...]:
    """The variants that this CPU can run, the best first; the portable one always is."""
    flags = cpu_flags() if platform.machine() in ("x86_64", "AMD64") else frozenset()
    return tuple(variant for variant in VARIANTS if variant.needs <= flags)


def find_compiler() -> str | None:
    """The C++ compiler to use: the environment's CXX where it is set, else the first one installed."""
    chosen = os.environ.get("CXX")
    candidates = (chosen,) if chosen else COMPILERS
    return next((found for name in candidates if (found := shutil.which(name))), None)


def cache_folder() -> Path:
    """Where compiled libraries are kept: `kernels` in $SAPWOOD_HOME, or in ~/.cache/sapwood."""
    return Path(os.environ.get("SAPWOOD_HOME") or "~/.cache/sapwood").expanduser() / "kernels"


def build_library(
    variant: Variant,
    dtype: str,
    quantization: str | None = None,
    kv_dtype: str | None = None,
    *,
    sanitize: bool = False,
) -> Path:
    """The library of `variant` for `dtype` (float32 or bfloat16), compiled now unless it is in the cache.

    `quantization`: the format of the packed weights where it is not `dtype`; int8 or int4.
    `kv_dtype`: the format of KV in the pool where it is not `dtype`; bfloat16 or int8.

    Raises BuildFailed when there is no compiler, it fails, or the cache folder cannot be written.
    """
    compiler = find_compiler()
    if compiler is None:
        raise BuildFailed(f"no C++ compiler found ({os.environ.get('CXX') or ', '.join(COMPILERS)})")
    kv_dtype = None if kv_dtype == dtype else kv_dtype
    formats = (
        f"-DFORMAT={FORMATS[dtype]}",
        f"-DWEIGHTS={FORMATS[quantization or dtype]}",
        f"-DKV_FORMAT={FORMATS[kv_dtype or dtype]}",
    )
    flags = (*COMMON_FLAGS, *variant.flags, *formats, *(SANITIZE_FLAGS if sanitize else ()))
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        parts = (variant.name, dtype, quantization, kv_dtype and f"kv-{kv_dtype}", "sanitized" if sanitize else None)
        kind = "-".join(filter(None, parts))
        library = folder / f"{kind}-{_fingerprint(compiler, flags)}.so"
        if not library.is_file():
            with _locked(library.with_suffix(".lock")):
                if not library.is_file():
                    _compile(compiler, flags, library)
    except (OSError, subprocess.SubprocessError) as error:
        raise BuildFailed(f"cannot build the native kernels: {error}") from None
    return library


def _fingerprint(compiler: str, flags: tuple[str, ...]) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=COMPILE_SECONDS, check=True).stdout
    digest = hashlib.sha256(version)
    digest.update("\0".join((platform.machine(), compiler, *flags)).encode())
    for source in sorted(SOURCE_FOLDER.glob("*.cpp")) + sorted(SOURCE_FOLDER.glob("*.h")):
        digest.update(source.name.encode() + b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _compile(compiler: str, flags: tuple[str, ...], library: Path) -> None:
    log.info("compiling the native kernels (%s) with %s, once", library.stem, compiler)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(dir=library.parent) as scratch:
        made = Path(scratch) / library.name
        command = [compiler, *flags, str(SOURCE_FOLDER / "kernels.cpp"), "-o", str(made)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_SECONDS, check=False)
        if result.returncode != 0:
            lines = result.stderr.strip().splitlines() or [f"exit code {result.returncode}"]
            raise BuildFailed(f"{compiler} failed: {next((line for line in lines if 'error' in line), lines[0])}")
        os.replace(made, library)
    log.info("compiled the native kernels in %.1f s: %s", time.perf_counter() - begin, library)
