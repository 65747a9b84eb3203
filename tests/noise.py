"""Bytes written to a process's socket past ZeroMQ: what somebody writes who speaks another language."""

from __future__ import annotations

import socket


def write(endpoint: str, data: bytes) -> None:
    """Write to the inbox at `endpoint` over a connection of its own, which is closed behind it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as raw:
        raw.connect(endpoint.removeprefix("ipc://"))
        raw.sendall(data)
