"""Fixtures that more than one room's tests need."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def test_data() -> Path:
    """The small fixtures that come with the repository."""
    return REPOSITORY / "tests" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path | None:
    """A folder of larger data beside the repository, where there is one."""
    folder = REPOSITORY.parent / "shared" / "data"
    return folder if folder.is_dir() else None
