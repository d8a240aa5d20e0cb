"""Scans that wait for the first message behind the end of a subject. They wait here, not in a mailbox: an actor for
scans serves many subjects, and a wake-up that is spent on a scan of another one would be lost to this one.

Many scans may wait for one message. They go back to their actors a few in each turn of the loop, because others have
business meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import islice

from fairway.errors import Refused
from fairway.protocol import ControlMessage
from fairway.scheduling import Expiry, Processor, Scheduler
from fairway.serving.requests import ServedRequest, hand_to

_Request = ServedRequest[ControlMessage]
_Processor = Processor[_Request]
CallLater = Callable[..., Callable[[], None]]

RELEASED_PER_TURN = 64  # about 0.3 ms, where their mailbox is full and each is refused


class ScanWaitList:
    """All waiting scans of a broker. Each has one timer, however often it looks in vain."""

    def __init__(self, scheduler: Scheduler, call_later: CallLater) -> None:
        self._scheduler = scheduler
        self._call_later = call_later
        self._waiting: dict[int, dict[_Request, tuple[Hashable, _Processor]]] = {}
        self._released: dict[_Request, tuple[Hashable, _Processor]] = {}  # about to look again
        self._is_called = False
        self._timed: set[_Request] = set()

    def add(self, subject_id: int, key: Hashable, request: _Request, processor: _Processor, now_ns: int) -> None:
        """Keep it until something is committed to the subject, or its wait ends; then it goes back to its actor."""
        self._waiting.setdefault(subject_id, {})[request] = (key, processor)
        request.wait_at(partial(self._end, subject_id, request, Expiry.GONE))
        if request not in self._timed:
            self._timed.add(request)
            wait_s = max(request.wait_until_ns - now_ns, 0) / 1e9
            cancel = self._call_later(wait_s, self._end, subject_id, request, Expiry.WAITED)
            request.wait_until(partial(self._forget_timer, request, cancel))

    def release(self, subject_id: int) -> None:
        """The subject has something new to show."""
        waiting = self._waiting.pop(subject_id, None)
        if waiting:
            self._released.update(waiting)
            if not self._is_called:
                self._release_some()

    def release_all(self) -> None:
        """Any subject may have something new to show."""
        for subject_id in list(self._waiting):
            self.release(subject_id)

    def close(self) -> None:
        waiting, self._waiting = [*self._waiting.values(), self._released], {}
        self._released = {}
        for each in waiting:
            for request, (_, processor) in each.items():
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

    def _end(self, subject_id: int, request: _Request, expiry: Expiry) -> None:
        """Its wait is over; it has been answered meanwhile, or is looking, if it is not here."""
        waiting = self._waiting.get(subject_id, {})
        found = waiting.pop(request, None)
        if not waiting:
            self._waiting.pop(subject_id, None)
        if expiry is Expiry.GONE and found is None:
            found = self._released.pop(request, None)
        if found is not None:
            found[1].expire(request, expiry)

    def _forget_timer(self, request: _Request, cancel: Callable[[], None]) -> None:
        self._timed.discard(request)
        cancel()
