"""A wait list holds long polls of a broker outside of the mailboxes of actors, until an event lets them look again.

The broker has two wait lists, and both of them hold requests that a mailbox cannot:

- Scans wait for the first message behind the end of a subject. An actor for scans serves many subjects: a wake-up
  that the actor spends on a scan of one subject is lost to the scans of another. The event is the subject.
- Pulls wait while their consumer is paused, or stands by in a group of strict order. In a mailbox the actor tries the
  oldest pull on behalf of all: the pull of a consumer that may take nothing would hold up the others. The event is the
  actor of the group.

Many requests may wait for one event. They go back to their actors a few in each turn of the loop, because the loop has
other work meanwhile. Each request has one timer, however often it looks in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from itertools import islice
from typing import NamedTuple

from fairway.errors import Refused
from fairway.protocol import ControlMessage
from fairway.scheduling import Expiry, Processor, Scheduler
from fairway.serving.requests import ServedRequest, hand_to

RELEASED_PER_TURN = 64  # about 0.3 ms, where the mailbox is full and refuses each

_Request = ServedRequest[ControlMessage]
CallLater = Callable[..., Callable[[], None]]


class _WaitingRequest(NamedTuple):
    """What a request waits for, and the actor that handles the request."""

    event: Hashable
    key: Hashable
    processor: Processor[_Request]


class WaitList:
    """Requests by the event that they wait for. A request is answered at the end of its wait at the latest."""

    def __init__(self, scheduler: Scheduler, call_later: CallLater) -> None:
        self._scheduler = scheduler
        self._call_later = call_later
        self._waiting: dict[Hashable, dict[_Request, _WaitingRequest]] = {}
        self._released: dict[_Request, _WaitingRequest] = {}  # about to look again
        self._is_called = False
        self._timed: set[_Request] = set()

    def add(
        self, event: Hashable, key: Hashable, request: _Request, processor: Processor[_Request], now_ns: int
    ) -> None:
        """Keep the request until the event, or the end of its wait; after the event it goes back to its actor."""
        self._waiting.setdefault(event, {})[request] = _WaitingRequest(event, key, processor)
        request.wait_at(partial(self._end, event, request, Expiry.GONE))
        if request not in self._timed:
            self._timed.add(request)
            wait_s = max(request.wait_until_ns - now_ns, 0) / 1e9
            cancel = self._call_later(wait_s, self._end, event, request, Expiry.WAITED)
            request.wait_until(partial(self._forget_timer, request, cancel))

    def release(self, event: Hashable) -> None:
        """The event has happened: requests that wait for it look again, a few in each turn of the loop."""
        waiting = self._waiting.pop(event, None)
        if waiting:
            self._released.update(waiting)
            if not self._is_called:
                self._release_some()

    def release_all(self) -> None:
        """Any of the events may have happened."""
        for event in list(self._waiting):
            self.release(event)

    def withdraw(self, event: Hashable, is_meant: Callable[[_Request], bool]) -> list[_Request]:
        """Take requests out; the caller answers them."""
        released = [request for request, each in self._released.items() if each.event == event]
        taken = [request for request in (*self._waiting.get(event, ()), *released) if is_meant(request)]
        for request in taken:
            self._take(event, request, is_released_too=True)
        return taken

    def close(self) -> None:
        waiting, self._waiting = [*self._waiting.values(), self._released], {}
        self._released = {}
        for of_event in waiting:
            for request, each in of_event.items():
                each.processor.expire(request, Expiry.STOPPED)

    def _release_some(self) -> None:
        self._is_called = False
        for request in list(islice(self._released, RELEASED_PER_TURN)):
            each = self._released.pop(request)
            try:
                hand_to(self._scheduler, each.key, request, each.processor)
            except Refused as full:
                each.processor.fail(request, full)
        if self._released:
            self._is_called = True
            self._call_later(0, self._release_some)

    def _end(self, event: Hashable, request: _Request, expiry: Expiry) -> None:
        """End a wait. A request whose time is up, and which is about to look again, looks first."""
        if expiry is Expiry.WAITED:
            self._timed.discard(request)
        found = self._take(event, request, is_released_too=expiry is Expiry.GONE)
        if found is not None:
            found.processor.expire(request, expiry)

    def _take(self, event: Hashable, request: _Request, *, is_released_too: bool) -> _WaitingRequest | None:
        waiting = self._waiting.get(event, {})
        found = waiting.pop(request, None)
        if not waiting:
            self._waiting.pop(event, None)
        return self._released.pop(request, None) if found is None and is_released_too else found

    def _forget_timer(self, request: _Request, cancel: Callable[[], None]) -> None:
        self._timed.discard(request)
        cancel()
