"""Fixtures of this room's tests."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def run_base(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The place for run folders, private to a test; short, since the path of a socket must be."""
    base = tmp_path_factory.mktemp("r")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(base))
    return base
