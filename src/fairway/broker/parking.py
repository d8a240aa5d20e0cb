"""Pulls of consumers that are paused, or stand by in a group of strict order. They wait here, not in the mailbox: there
the first that waits is asked on behalf of all, and one who may take nothing would keep what comes from the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import islice

from fairway.broker.watching import RELEASED_PER_TURN
from fairway.errors import Refused
from fairway.protocol import ControlMessage
from fairway.scheduling import Expiry, Processor, Scheduler
from fairway.serving.requests import ServedRequest, hand_to

_Request = ServedRequest[ControlMessage]
_Processor = Processor[_Request]
CallLater = Callable[..., Callable[[], None]]


class PausedPullList:
    """All parked pulls of a broker. Each is answered at the end of its wait, unless it goes on before."""

    def __init__(self, scheduler: Scheduler, call_later: CallLater) -> None:
        self._scheduler = scheduler
        self._call_later = call_later
        self._parked: dict[Hashable, dict[_Request, _Processor]] = {}
        self._released: dict[_Request, tuple[Hashable, _Processor]] = {}  # about to look again
        self._is_called = False

    def park(self, key: Hashable, request: _Request, processor: _Processor, now_ns: int) -> None:
        self._parked.setdefault(key, {})[request] = processor
        request.wait_at(partial(self._end, key, request, Expiry.GONE))
        wait_s = max(request.wait_until_ns - now_ns, 0) / 1e9
        request.wait_until(self._call_later(wait_s, self._end, key, request, Expiry.WAITED))

    def release(self, key: Hashable) -> None:
        """The actor's consumers here may look again, a few in each turn of the loop."""
        parked = self._parked.pop(key, None)
        if parked:
            self._released.update((request, (key, processor)) for request, processor in parked.items())
            if not self._is_called:
                self._release_some()

    def withdraw(self, key: Hashable, is_meant: Callable[[_Request], bool]) -> list[_Request]:
        """Take some out, for somebody else to answer."""
        released = [each for each, (of_actor, _) in self._released.items() if of_actor == key]
        taken = [each for each in (*self._parked.get(key, {}), *released) if is_meant(each)]
        for request in taken:
            self._take(key, request)
        return taken

    def close(self) -> None:
        parked, self._parked = self._parked, {}
        released, self._released = self._released, {}
        told = [each for of_actor in parked.values() for each in of_actor.items()]
        for request, processor in [*told, *((each, processor) for each, (_, processor) in released.items())]:
            processor.expire(request, Expiry.STOPPED)

    def _release_some(self) -> None:
        self._is_called = False
        for request in list(islice(self._released, RELEASED_PER_TURN)):
            key, processor = self._released.pop(request)
            try:
                hand_to(self._scheduler, key, request, processor)
            except Refused as full:
                processor.fail(request, full)
        if self._released:
            self._is_called = True
            self._call_later(0, self._release_some)

    def _end(self, key: Hashable, request: _Request, expiry: Expiry) -> None:
        processor = self._take(key, request)
        if processor is not None:
            processor.expire(request, expiry)

    def _take(self, key: Hashable, request: _Request) -> _Processor | None:
        parked = self._parked.get(key, {})
        found = parked.pop(request, None)
        if not parked:
            self._parked.pop(key, None)
        if found is None and request in self._released:
            _, found = self._released.pop(request)
        return found
