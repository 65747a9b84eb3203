"""The HTTP face over a fake front, on a real port; and a reader of event streams."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar, cast

import httpx
import uvloop

from srt.front import Front
from srt.http.server import make_server
from tests.http.fake_front import FakeFront

T = TypeVar("T")


class Running:
    """A server on a free port, its front, and the loop that both live on (in a thread of their own)."""

    def __init__(self, **config: Any) -> None:
        self.front = FakeFront(**config)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        listener = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = listener.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self._server = make_server(cast(Front, self.front), close_seconds=1)
        self._serving = asyncio.run_coroutine_threadsafe(self._server.serve([listener]), self._loop)
        self.eventually(lambda: self._server.started)

    def on_loop(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine run where the server runs."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    def eventually(self, condition: Callable[[], bool], seconds: float = 10.0) -> None:
        """Wait until the condition holds; fail when it does not within `seconds`."""

        async def wait() -> bool:
            for _ in range(int(seconds / 0.01)):
                if condition():
                    return True
                await asyncio.sleep(0.01)
            return False

        assert self.on_loop(wait())

    def close(self) -> None:
        """Stop the server and its thread."""
        self._server.should_exit = True
        self._serving.result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def events(response: httpx.Response) -> list[Any]:
    """The data of every event of a stream that has come whole, JSON decoded; "[DONE]" as it is.

    Strict: an event is one `data: ` line and an empty line; comments are events of their own and left out.
    """
    assert response.headers["content-type"].startswith("text/event-stream"), response.text
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "", "the stream ends within an event"
    data = []
    for block in blocks:
        if not block.startswith(":"):
            assert block.startswith("data: "), block
            assert "\n" not in block
            text = block.removeprefix("data: ")
            data.append(text if text == "[DONE]" else json.loads(text))
    return data
