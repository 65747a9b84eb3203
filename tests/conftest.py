"""Fixtures that more than one room's tests need."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest

from tests.tiny_model import save_tiny_model

# In CI the examples are the same in every run of the same code, so that a red run can be repeated; elsewhere each run
# looks further.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

REPOSITORY = Path(__file__).resolve().parent.parent


def models_there() -> list[str]:
    """SmolLM2, which is pulled when it is not there yet, and those other known models that somebody has pulled."""
    from sapwood.pull import KNOWN_MODELS, models_home

    others = sorted(KNOWN_MODELS.keys() - {"smollm2"})
    return ["smollm2", *(name for name in others if (models_home() / name / "sapwood.json").is_file())]


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The small fixtures that come with the repository."""
    return REPOSITORY / "tests" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """A folder of larger data beside the repository, where there is one."""
    folder = REPOSITORY.parent / "shared" / "data"
    return folder if folder.is_dir() else None


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random Llama with a tokenizer of 512 ids, a chat template and a context of 2048."""
    return save_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def real_model() -> Path:
    """The folder of SmolLM2-135M-Instruct, which is pulled and converted when it is not there yet."""
    from sapwood.pull import pull_model

    return pull_model("smollm2")


@pytest.fixture(scope="session", params=models_there())
def any_real_model(request: pytest.FixtureRequest) -> Path:
    """The folders of all known models that are there, one after another."""
    from sapwood.pull import pull_model

    return pull_model(request.param)
