"""The kernels under the address and undefined-behaviour sanitizers: no read or write strays, nothing is undefined."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from srt.model.kernels.build import SOURCE_FOLDER, build_library, find_compiler, host_variants
from srt.model.native import native_available
from tests.model.families import save_family
from tests.model.native_kernels import FORMATS
from tests.model.sanitized_run import FAMILIES, HEAD_DIMS

RUNTIMES = ("libasan.so", "libubsan.so", "libstdc++.so.6")
# Variant, and number formats as in FORMATS: those on the best, and others on variants with narrower vectors.
RUNS = {
    **{number_format: ("best", *formats) for number_format, formats in FORMATS.items()},
    "int8-kv8 of avx2": ("avx2", "bfloat16", "int8", "int8"),
    "float32-int4-kv16 of portable": ("portable", "float32", "int4", "bfloat16"),
}


def preload(compiler: str) -> str:
    """The sanitizers' runtimes as the compiler names them; they must be in the process before Python's own memory."""
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=True).stdout
        for name in RUNTIMES
    ]
    return " ".join(path.strip() for path in found)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of every family the run takes, and with heads of every size."""
    folder = tmp_path_factory.mktemp("models")
    for family in FAMILIES:
        save_family(family, folder / family)
    for head_dim, (family, _) in HEAD_DIMS.items():
        # One head of K and V; a vocabulary of whole blocks and layers that fill no panel.
        sizes = {"vocab_size": 256, "hidden_size": 72, "intermediate_size": 104, "num_attention_heads": 2}
        save_family(family, folder / str(head_dim), head_dim=head_dim, num_key_value_heads=1, **sizes)
    return folder


@pytest.mark.parametrize("run", RUNS)
def test_every_path_of_the_kernels_is_clean_under_the_sanitizers(models: Path, run: str) -> None:
    compiler = find_compiler()
    if compiler is None:
        assert not native_available()
        return
    name, *formats = RUNS[run]
    variants = {variant.name: variant for variant in host_variants()}
    variant = variants.get(name, host_variants()[0])
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "OMP_NUM_THREADS": "1",
        "LD_PRELOAD": preload(compiler),
        # Python itself leaves memory to the end of the process.
        "ASAN_OPTIONS": "detect_leaks=0",
    }

    # Compiled before, since the compiler would run with the sanitizers in it too.
    build_library(variant, *formats, sanitize=True)
    command = [
        sys.executable,
        "-m",
        "tests.model.sanitized_run",
        str(models),
        variant.name,
        *(f or "-" for f in formats),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.strip() == "clean"


def test_the_thread_pool_does_every_unit_once_however_often_workers_come_late(tmp_path: Path) -> None:
    compiler = find_compiler()
    if compiler is None:
        assert not native_available()
        return
    program, source = tmp_path / "thread_pool", Path(__file__).with_name("thread_pool.cpp")
    flags = ["-std=c++17", "-O1", "-pthread", "-w", f"-I{SOURCE_FOLDER}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(program)], check=True, timeout=200)
    done = subprocess.run([program], capture_output=True, text=True, timeout=200, check=True)
    assert done.stdout.strip() == "0"
