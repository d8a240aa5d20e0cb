"""Pulls of consumers that are paused, or stand by in a group of strict order. They wait here, not in the mailbox: there
the first that waits is asked on behalf of all, and one who may take nothing would keep what comes from the others."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from fairway.errors import Refused
from fairway.protocol import Message
from fairway.scheduling import Expiry, Processor, Scheduler
from fairway.serving.requests import ServedRequest

_Processor = Processor[ServedRequest[Message]]
CallLater = Callable[..., None]


class Parking:
    """All parked pulls of a broker. Each is answered at the end of its wait, unless it goes on before."""

    def __init__(self, scheduler: Scheduler, call_later: CallLater) -> None:
        self._scheduler = scheduler
        self._call_later = call_later
        self._parked: dict[Hashable, dict[ServedRequest[Message], _Processor]] = {}

    def park(self, key: Hashable, request: ServedRequest[Message], processor: _Processor, now_ns: int) -> None:
        self._parked.setdefault(key, {})[request] = processor
        self._call_later(max(request.wait_until_ns - now_ns, 0) / 1e9, self._end, key, request)

    def release(self, key: Hashable) -> None:
        """The actor's consumers here may look again."""
        for request, processor in self._parked.pop(key, {}).items():
            try:
                self._scheduler.dispatch(key, request, processor)
            except Refused as full:
                processor.fail(request, full)

    def withdraw(
        self, key: Hashable, is_meant: Callable[[ServedRequest[Message]], bool]
    ) -> list[ServedRequest[Message]]:
        """Take some out, for somebody else to answer."""
        taken = [each for each in self._parked.get(key, {}) if is_meant(each)]
        for request in taken:
            self._take(key, request)
        return taken

    def close(self) -> None:
        parked, self._parked = self._parked, {}
        for of_actor in parked.values():
            for request, processor in of_actor.items():
                processor.expire(request, Expiry.STOPPED)

    def _end(self, key: Hashable, request: ServedRequest[Message]) -> None:
        processor = self._take(key, request)
        if processor is not None:
            processor.expire(request, Expiry.WAITED)

    def _take(self, key: Hashable, request: ServedRequest[Message]) -> _Processor | None:
        parked = self._parked.get(key, {})
        found = parked.pop(request, None)
        if not parked:
            self._parked.pop(key, None)
        return found
