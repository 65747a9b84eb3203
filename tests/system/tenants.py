"""A server with an operator and two tenants, and a client for each."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from tests.system.served import Served

KEYS = {"operator": "operators-key-0", "alice": "alices-key-11", "bob": "bobs-key-2222"}


def flags(folder: Path, *more: str) -> tuple[str, ...]:
    """Those of a small server that knows `KEYS`, the file of which is put into `folder`."""
    path = folder / "keys"
    path.write_text("".join(f"{key} {name}\n" for name, key in KEYS.items() if name != "operator"))
    path.chmod(0o600)
    own = ("--api-key", KEYS["operator"], "--api-keys-file", str(path), "--dtype", "float32")
    return (*own, "--max-total-tokens", "2048", "--max-running-requests", "4", *more)


def client_of(served: Served, name: str) -> httpx.Client:
    """A client with the key of this name."""
    return httpx.Client(base_url=served.url, headers={"authorization": f"Bearer {KEYS[name]}"}, timeout=120)


@contextmanager
def everybody(served: Served) -> Iterator[dict[str, httpx.Client]]:
    """A client for each name, before an empty cache."""
    with ExitStack() as stack:
        clients = {name: stack.enter_context(client_of(served, name)) for name in KEYS}
        assert clients["operator"].post("/flush_cache").status_code == 200
        yield clients
