"""The builder of the kernels: what happens with and without a compiler, on a second start, on many starts at once."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest

from srt.model.kernels import build
from srt.model.kernels.build import BuildFailed, build_library, cpu_flags, find_compiler, host_variants
from srt.model.native import NativeUnavailable, load_kernels, native_available

STARTS = 4
# Stands for a compiler: notes each compilation, and makes a file where it is told to.
FAKE_COMPILER = """\
#!/bin/sh
[ "$1" = --version ] && { echo "fake 1.0"; exit 0; }
echo run >> "$(dirname "$0")/runs"
sleep 0.3
while [ "$1" != -o ]; do shift; done
echo library > "$2"
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SAPWOOD_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def install_fake(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str = FAKE_COMPILER) -> Path:
    folder.mkdir(exist_ok=True)
    compiler = folder / "fake-c++"
    compiler.write_text(script)
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return folder / "runs"


def test_without_a_compiler_the_backend_says_it_is_not_there(
    home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(home))
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() is None
    assert not native_available()
    assert "no C++ compiler found (c++, g++, clang++)" in caplog.text
    with pytest.raises(NativeUnavailable, match="no C\\+\\+ compiler"):
        load_kernels()


def test_a_compiler_named_by_the_environment_but_missing_is_named(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(BuildFailed, match="no-such-compiler"):
        build_library(host_variants()[-1], "float32")


def test_a_failing_compiler_is_logged_with_its_error_and_leaves_nothing(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    script = (
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\necho "note: x" >&2\necho "kernels.cpp:1: error: no" >&2\nexit 1\n'
    )
    install_fake(tmp_path / "bin", monkeypatch, script)
    assert not native_available("float32")
    assert "kernels.cpp:1: error: no" in caplog.text
    assert len(caplog.records) >= len(host_variants())
    assert not list(home.glob("kernels/*.so"))


def test_a_file_that_is_no_library_is_logged_and_the_backend_is_not_there(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake(tmp_path / "bin", monkeypatch)
    assert not native_available("float32")


def test_a_cache_folder_that_cannot_be_written_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("SAPWOOD_HOME", str(tmp_path / "file"))
    install_fake(tmp_path / "bin", monkeypatch)
    assert not native_available("float32")


def test_starts_at_the_same_time_compile_once_and_say_so_in_one_line_each_way(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runs = install_fake(tmp_path / "bin", monkeypatch)
    found: list[Path] = []
    starts = [
        threading.Thread(target=lambda: found.append(build_library(host_variants()[0], "bfloat16")))
        for _ in range(STARTS)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(set(found)) == 1
    assert len(found) == STARTS
    assert runs.read_text().split() == ["run"]
    assert [r.message.split()[0] for r in caplog.records if r.name == "sapwood.kernels"] == ["compiling", "compiled"]
    assert {path.suffix for path in found[0].parent.iterdir()} == {".so", ".lock"}


def test_another_compiler_version_or_another_source_makes_another_library(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_fake(tmp_path / "bin", monkeypatch)
    variant = host_variants()[-1]
    first = build_library(variant, "float32")
    assert build_library(variant, "float32") == first
    assert build_library(variant, "bfloat16") != first
    install_fake(tmp_path / "bin", monkeypatch, FAKE_COMPILER.replace("1.0", "1.1"))
    second = build_library(variant, "float32")
    sources = tmp_path / "sources"
    sources.mkdir()
    for source in build.SOURCE_FOLDER.glob("*.*"):
        (sources / source.name).write_bytes(source.read_bytes())
    (sources / "simd.h").write_text("// changed\n")
    monkeypatch.setattr(build, "SOURCE_FOLDER", sources)
    assert len({first, second, build_library(variant, "float32")}) == 3


def test_a_cpu_without_avx_gets_the_portable_variant_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"sse2", "avx2"}))
    assert [variant.name for variant in host_variants()] == ["portable"]
    monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx2", "fma"}))
    assert [variant.name for variant in host_variants()] == ["avx2", "portable"]


def test_cpu_flags_are_read_where_the_system_shows_them() -> None:
    shown = Path("/proc/cpuinfo").is_file() and "\nflags" in Path("/proc/cpuinfo").read_text()
    assert bool(cpu_flags()) == shown


def test_idle_worker_threads_sleep(tmp_path: Path) -> None:
    if find_compiler() is None:
        assert not native_available()
        return
    program = """
        import os, sys, time
        from pathlib import Path
        import numpy as np
        from tests.model.families import save_family
        from tests.model.native_kernels import all_kernels, load_native_model
        from tests.model.paged_driver import PagedDriver, Sequence
        model = load_native_model(save_family("llama", Path(sys.argv[1])), all_kernels("float32")[0], threads=4)
        driver = PagedDriver.with_pages(model, "ascending")
        driver.step([(Sequence(list(range(200))), 200)])
        def busy():
            states = [Path(f"/proc/self/task/{t}/stat").read_text().rsplit(")")[1].split()[0]
                      for t in os.listdir("/proc/self/task") if int(t) != os.getpid()]
            return [state for state in states if state == "R"]
        deadline = time.monotonic() + 30
        while busy() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not busy()
    """
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
