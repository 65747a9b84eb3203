"""The executor's request slots: who has one, and which of them the next plan opens and closes."""

from __future__ import annotations

from scheduler.request import Request
from srt.plan import SlotOpen


class Slots:
    """`count` slots, one for each running request."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._free = list(range(count - 1, -1, -1))
        self._opened: list[SlotOpen] = []
        self._closed: list[int] = []

    @property
    def any_free(self) -> bool:
        """Whether another request may run."""
        return bool(self._free)

    def take(self, request: Request) -> None:
        """Give the request a slot, which the next plan opens."""
        request.slot = self._free.pop()
        self._opened.append(request.slot_open())

    def give_back(self, request: Request) -> None:
        """The request's slot is free again, and closed by the next plan where one has opened it."""
        slot, request.slot = request.slot, None
        assert slot is not None
        opened = len(self._opened)
        self._opened = [o for o in self._opened if o.slot != slot]
        if len(self._opened) == opened:
            self._closed.append(slot)
        self._free.append(slot)

    def changes(self) -> tuple[list[SlotOpen], list[int]]:
        """What the plan that is being made opens and closes; counts as told to the executor from here on."""
        opened, self._opened = self._opened, []
        closed, self._closed = self._closed, []
        return opened, closed

    def check(self, running: list[Request]) -> None:
        """Every running request has a slot, and no slot is lost.  Raises AssertionError."""
        taken = [request.slot for request in running if request.slot is not None]
        assert len(taken) == len(running), "a running request has a slot"
        assert sorted([*self._free, *taken]) == list(range(self._count)), "slots"
