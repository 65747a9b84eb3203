"""Settings for the tests of the model room."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny tensors gain nothing from threads, and waiting for one another takes them long on a busy machine."""
    torch.set_num_threads(1)
