"""Calls to other processes that one reply answers, and who waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from srt.answer import RequestFailed, unavailable

CALL_SECONDS = 120.0

ReplyT = TypeVar("ReplyT")


class Calls:
    """Those that nobody has answered yet, by their names."""

    def __init__(self) -> None:
        # With the roles of the processes that the reply has to come through.
        self._waiting: dict[str, tuple[tuple[str, ...], asyncio.Future[Any]]] = {}

    async def make(
        self, key: str, roles: tuple[str, ...], kind: type[ReplyT], send: Callable[[], None], unanswered: str
    ) -> ReplyT:
        """Call `send`, and wait for the reply to `key`, which is of this kind.

        Raises RequestFailed: 503 with `unanswered` when none comes, or what `fail` is given.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[key] = roles, future
        send()
        try:
            reply = await asyncio.wait_for(future, CALL_SECONDS)
        except TimeoutError:
            raise unavailable(unanswered, "timeout") from None
        finally:
            del self._waiting[key]
        assert isinstance(reply, kind), f"{key} was answered by {type(reply).__name__}"
        return reply

    def answer(self, key: str, reply: object) -> bool:
        """End the wait with the reply.  False when nobody waits for it."""
        _, future = self._waiting.get(key, ((), None))
        if future is None:
            return False
        if not future.done():
            future.set_result(reply)
        return True

    def fail(self, key: str, failure: RequestFailed) -> None:
        """End the wait with a failure, if somebody waits."""
        _, future = self._waiting.get(key, ((), None))
        if future is not None and not future.done():
            future.set_exception(failure)

    def fail_those_of(self, role: str, failure: RequestFailed) -> None:
        """A process of this role has died: end the waits for replies that have to come through it."""
        for key in [key for key, (roles, _) in self._waiting.items() if role in roles]:
            self.fail(key, failure)

    def fail_all(self, failure: RequestFailed) -> None:
        """End every wait."""
        for key in list(self._waiting):
            self.fail(key, failure)
