"""The API keys of a server: one for the operator, and a file of keys that belong to tenants.

A line of the file is `KEY TENANT`; empty lines and those that begin with `#` say nothing.  A tenant may have several
keys, so that one can be replaced by another.  No message quotes a key.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from srt.child import StartError
from srt.config import ServerConfig

log = logging.getLogger("sapwood.keys")

FLAG = "--api-keys-file"
MAX_FILE_BYTES = 4 * 2**20
MAX_KEY_CHARACTERS = 512
MAX_TENANT_CHARACTERS = 128


@dataclass(frozen=True)
class Holder:
    """Who a key belongs to.

    The operator may see and do what concerns the whole server.  The operator, and everybody where no keys of tenants
    are configured, is the tenant of the empty name, which the file cannot give.
    """

    tenant: str = ""
    operator: bool = True


class ApiKeys:
    """The holders of keys.  Only digests are kept."""

    def __init__(self, operator_key: str | None, tenants: Sequence[tuple[str, str]] = ()) -> None:
        """`tenants`: pairs of a key and the name of its tenant; no key twice."""
        self._holders = [(_digest(key.encode()), Holder(tenant, operator=False)) for key, tenant in tenants]
        if operator_key is not None:
            self._holders.append((_digest(operator_key.encode()), Holder()))

    def holder(self, given: bytes) -> Holder | None:
        """Whose key it is; None for nobody's.

        Takes the same time whatever was given: digests of one length are compared in constant time, and always all.
        """
        digest = _digest(given)
        found = None
        for known, holder in self._holders:
            if hmac.compare_digest(digest, known):
                found = holder
        return found


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def read_api_keys(config: ServerConfig) -> ApiKeys | None:
    """The keys that a server asks for; None when it asks for none.  Raises StartError for a faulty file."""
    if config.api_keys_file is None:
        return None if config.api_key is None else ApiKeys(config.api_key)
    path = Path(config.api_keys_file).expanduser()
    tenants = list(_tenants(f"{FLAG} {config.api_keys_file}", _text(config.api_keys_file, path), config.api_key))
    if not tenants:
        raise StartError(f"{FLAG} {config.api_keys_file}: has no key; write one on each line, as KEY TENANT")
    return ApiKeys(config.api_key, tenants)


def warn_if_readable(config: ServerConfig) -> None:
    """Say so in the log when others than its owner can read the file of keys."""
    if config.api_keys_file is None:
        return
    mode = Path(config.api_keys_file).expanduser().stat().st_mode
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning(
            "%s %s: others than its owner may read or write it (mode %o); chmod 600 it",
            FLAG,
            config.api_keys_file,
            stat.S_IMODE(mode),
        )


def _text(given: str, path: Path) -> str:
    try:
        if given == "" or path.stat().st_size > MAX_FILE_BYTES:
            raise StartError(f"{FLAG} {given}: is no file of keys (at most {MAX_FILE_BYTES} bytes)")
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise StartError(f"{FLAG} {given}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise StartError(f"{FLAG} {given}: is not UTF-8") from None


def _tenants(where: str, text: str, operator_key: str | None) -> Iterator[tuple[str, str]]:
    """(key, tenant) of each line.  Raises StartError that names the line, and never the key."""
    seen = {} if operator_key is None else {operator_key: "--api-key"}
    for number, line in enumerate(text.split("\n"), start=1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        here = f"{where} line {number}"
        if len(words) != 2:
            raise StartError(f"{here}: has {len(words)} words; it must be KEY TENANT")
        key, tenant = words
        if not (key.isascii() and key.isprintable() and len(key) <= MAX_KEY_CHARACTERS):
            raise StartError(f"{here}: the key must be at most {MAX_KEY_CHARACTERS} printable ASCII characters")
        if not (tenant.isprintable() and len(tenant) <= MAX_TENANT_CHARACTERS):
            raise StartError(f"{here}: the tenant must be at most {MAX_TENANT_CHARACTERS} printable characters")
        if key in seen:
            raise StartError(f"{here}: the key is that of {seen[key]} already; each key must be given once")
        seen[key] = f"line {number}"
        yield key, tenant
