"""Scans that wait for the first message behind the end of a subject. They wait here, not in a mailbox: an actor for
scans serves many subjects, and a wake-up that is spent on a scan of another one would be lost to this one."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from fairway.errors import Refused
from fairway.protocol import Message
from fairway.scheduling import Expiry, Processor, Scheduler
from fairway.serving.requests import ServedRequest

_Request = ServedRequest[Message]
_Processor = Processor[_Request]
CallLater = Callable[..., None]


class Watches:
    """All waiting scans of a broker. Each has one timer, however often it looks in vain."""

    def __init__(self, scheduler: Scheduler, call_later: CallLater) -> None:
        self._scheduler = scheduler
        self._call_later = call_later
        self._waiting: dict[int, dict[_Request, tuple[Hashable, _Processor]]] = {}
        self._timed: set[_Request] = set()

    def add(self, subject_id: int, key: Hashable, request: _Request, processor: _Processor, now_ns: int) -> None:
        """Keep it until something is committed to the subject, or its wait ends; then it goes back to its actor."""
        self._waiting.setdefault(subject_id, {})[request] = (key, processor)
        if request not in self._timed:
            self._timed.add(request)
            self._call_later(max(request.wait_until_ns - now_ns, 0) / 1e9, self._end, subject_id, request)

    def release(self, subject_id: int) -> None:
        """The subject has something new to show."""
        for request, (key, processor) in self._waiting.pop(subject_id, {}).items():
            try:
                self._scheduler.dispatch(key, request, processor)
            except Refused as full:
                processor.fail(request, full)

    def release_all(self) -> None:
        """Any subject may have something new to show."""
        for subject_id in list(self._waiting):
            self.release(subject_id)

    def close(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for of_subject in waiting.values():
            for request, (_, processor) in of_subject.items():
                processor.expire(request, Expiry.STOPPED)

    def _end(self, subject_id: int, request: _Request) -> None:
        """Its wait is over; it has been answered meanwhile, or is looking, if it is not here."""
        self._timed.discard(request)
        waiting = self._waiting.get(subject_id, {})
        found = waiting.pop(request, None)
        if not waiting:
            self._waiting.pop(subject_id, None)
        if found is not None:
            found[1].expire(request, Expiry.WAITED)
