"""The file of tenants' keys: what is read from it, and what it is refused for, in one line and without a key."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from srt.api_keys import ApiKeys, Holder, read_api_keys, warn_if_readable
from srt.child import StartError
from srt.config import ServerConfig


def config_of(folder: Path, text: str | bytes, api_key: str | None = None) -> ServerConfig:
    path = folder / "keys.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    path.chmod(0o600)
    return ServerConfig(model="m", api_key=api_key, api_keys_file=str(path))


def test_lines_name_a_key_and_its_tenant(tmp_path: Path) -> None:
    keys = read_api_keys(config_of(tmp_path, "# ours\n\nsk-1 alice\r\nsk-2\tbob\n  sk-3  alice \n", "root"))
    assert keys is not None
    assert keys.holder(b"sk-1") == keys.holder(b"sk-3") == Holder("alice", operator=False)
    assert keys.holder(b"sk-2") == Holder("bob", operator=False)
    assert keys.holder(b"root") == Holder("", operator=True)
    for nobodys in (b"", b"sk", b"sk-1 ", b"SK-1", b"sk-11", b"alice", b"\xff"):
        assert keys.holder(nobodys) is None


def test_one_key_is_the_operators_and_none_is_no_check() -> None:
    keys = read_api_keys(ServerConfig(model="m", api_key="k"))
    assert keys is not None
    assert keys.holder(b"k") == Holder()
    assert read_api_keys(ServerConfig(model="m")) is None


def test_keys_are_kept_as_digests_alone() -> None:
    keys = ApiKeys("operators-key", [("tenants-key", "alice")])
    assert "tenants-key" not in repr(vars(keys))
    assert "operators-key" not in repr(vars(keys))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "has no key"),
        ("# nothing\n\n", "has no key"),
        ("sk-secret\n", "line 1: has 1 words; it must be KEY TENANT"),
        ("sk-secret a\nsk-secret2 b c\n", "line 2: has 3 words"),
        ("sk-secret a\n\nsk-secret b\n", "line 3: the key is that of line 1 already"),
        ("operator-secret b\n", "line 1: the key is that of --api-key already"),
        ("sk-secret\x01 b\n", "line 1: the key must be"),
        ("sk-sécret b\n", "line 1: the key must be"),
        (f"sk-secret{'x' * 512} b\n", "line 1: the key must be at most 512"),
        ("sk-secret b\x1b\n", "line 1: the tenant must be"),
        (f"sk-secret {'b' * 129}\n", "line 1: the tenant must be at most 128"),
        (b"sk-secret \xff\n", "is not UTF-8"),
    ],
)
def test_a_faulty_file_is_refused_in_a_line_that_holds_no_key(tmp_path: Path, text: str | bytes, words: str) -> None:
    with pytest.raises(StartError) as refusal:
        read_api_keys(config_of(tmp_path, text, "operator-secret"))
    message = str(refusal.value)
    assert message.startswith(f"--api-keys-file {tmp_path / 'keys.txt'}")
    assert words in message
    assert "\n" not in message
    assert "secret" not in message


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path / "none"), str(tmp_path), ""):
        with pytest.raises(StartError, match="--api-keys-file"):
            read_api_keys(ServerConfig(model="m", api_keys_file=name))


def test_a_file_that_others_can_read_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = config_of(tmp_path, "sk-secret alice\n")
    with caplog.at_level(logging.WARNING):
        warn_if_readable(config)
        assert caplog.text == ""
        (tmp_path / "keys.txt").chmod(0o644)
        warn_if_readable(config)
    assert "mode 644" in caplog.text
    assert "secret" not in caplog.text
