"""`sapwood doctor`: what this machine, this installation and the model folder look like to Sapwood."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from sapwood.pull import KNOWN_MODELS, models_home
from srt.machine import look_at_machine
from srt.model.config import UnsupportedModel, read_model_config

PACKAGES = (
    "sapwood",
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "numpy",
    "pyzmq",
    "msgspec",
    "orjson",
    "uvloop",
    "fastapi",
    "uvicorn",
)
VECTOR_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8", "asimd", "bf16", "sve")


def doctor() -> int:
    """Print the report; exit code 0 when a server could run here, 1 when something is missing."""
    problems: list[str] = []
    for title, lines in (
        ("Machine", _machine()),
        ("Packages", _packages(problems)),
        ("Kernels", _kernels(problems)),
        ("Models", _models()),
        ("Run folders", _run_folders(problems)),
    ):
        print(title)
        for line in lines:
            print(f"  {line}")
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return 1 if problems else 0


def _machine() -> Iterator[str]:
    machine = look_at_machine()
    yield f"{platform.platform()}, Python {platform.python_version()} at {sys.executable}"
    yield f"{machine.cpu_name}: {machine.cores} cores for us"
    yield "vector instructions: " + (", ".join(f for f in VECTOR_FLAGS if f in machine.cpu_flags) or "none known")
    yield f"memory free: {machine.memory_bytes / 2**30:.1f} GiB"
    yield f"--dtype auto means {'bfloat16' if machine.has_fast_bfloat16 else 'float32'}"


def _packages(problems: list[str]) -> Iterator[str]:
    for name in PACKAGES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            problems.append(f"the package {name} is not installed")
            yield f"{name} not installed"


def _kernels(problems: list[str]) -> Iterator[str]:
    try:
        from srt.model.config import KV_DTYPES
        from srt.model.native import QUANTIZATIONS, NativeUnavailable, load_kernels
    except ImportError as error:
        problems.append(f"torch cannot be loaded: {error}")
        return
    for dtype in ("float32", "bfloat16"):
        try:
            variant = load_kernels(dtype).variant.name
            yield (
                f"{dtype}: native, variant {variant}; weights in {', '.join(QUANTIZATIONS)} with --quantization"
                f", KV in {', '.join(KV_DTYPES)} with --kv-cache-dtype"
            )
        except NativeUnavailable as error:
            yield f"{dtype}: torch ({error})"


def _models() -> Iterator[str]:
    home = models_home()
    folders = sorted(path for path in home.glob("*") if path.is_dir()) if home.is_dir() else []
    yield f"{home}: {len(folders)} folders, {_mib(home)} MiB"
    for folder in folders:
        try:
            config = read_model_config(folder)
            yield f"{folder.name}: {config.model_type}, {config.num_layers} layers, {_mib(folder)} MiB"
        except UnsupportedModel as error:
            yield f"{folder.name}: cannot be served: {error}"
    for name in sorted(KNOWN_MODELS):
        if not (home / name).is_dir():
            yield f"{name}: not here yet, get it with: sapwood pull {name}"


def _run_folders(problems: list[str]) -> Iterator[str]:
    from srt.child import StartError
    from srt.run_dir import RunDir

    try:
        run_dir = RunDir.create()
    except StartError as error:
        problems.append(str(error))
        return
    yield f"made in {run_dir.path.parent}"
    run_dir.remove()


def _mib(folder: Path) -> int:
    size = 0
    for path, _, names in os.walk(folder):
        size += sum(os.lstat(os.path.join(path, name)).st_size for name in names)
    return round(size / 2**20)
