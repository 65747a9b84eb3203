"""Bytes written to a process's inbox past `Outbox`: what a broken or foreign sender might write."""

from __future__ import annotations

import socket

from srt.ipc import LENGTH_BYTES


def framed(data: bytes) -> bytes:
    """A frame as it is written to a socket."""
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


def write(path: str, data: bytes) -> None:
    """Write to the inbox at `path` over a connection of its own, which is closed behind it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.connect(path)
        raw.sendall(data)
