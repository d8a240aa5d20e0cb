"""Those who wait for a producer: until all is settled, or until there is room."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fairway.protocol.pending import PendingBatch


class Flush:
    """Everything that was added before is settled, well or not, when `is_done`."""

    def __init__(self) -> None:
        self._left = 1  # the caller, until it has named all batches
        self._callbacks: list[Callable[[], None]] = []

    @property
    def is_done(self) -> bool:
        return self._left == 0

    def when_done(self, callback: Callable[[], None]) -> None:
        """Called once, under the owner's lock, like `PendingBatch.when_settled`; at once if it is done."""
        if self.is_done:
            callback()
        else:
            self._callbacks.append(callback)

    def watch(self, pending: PendingBatch) -> None:
        """One more to wait for."""
        self._left += 1
        pending.when_settled(self.count_down)

    def count_down(self, _: object = None) -> None:
        """One less."""
        self._left -= 1
        if self._left == 0:
            for callback in self._callbacks:
                callback()


class _Waiter:
    """Somebody who waits for room."""

    __slots__ = ("callback", "messages", "size_bytes")

    def __init__(self, messages: int, size_bytes: int, callback: Callable[[], None]) -> None:
        self.messages = messages
        self.size_bytes = size_bytes
        self.callback = callback


class RoomQueue:
    """Those who wait for room, in order of asking. `fits` says whether so much more may be added, `fits_alone` whether
    it may if nobody else adds anything: an empty buffer takes anything."""

    __slots__ = ("_fits", "_fits_alone", "_waiters")

    def __init__(self, fits: Callable[[int, int], bool], fits_alone: Callable[[int, int], bool]) -> None:
        self._fits = fits
        self._fits_alone = fits_alone
        self._waiters: dict[_Waiter, None] = {}

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def join(self, messages: int, size_bytes: int, callback: Callable[[], None]) -> Callable[[], None]:
        """One more; returns what cancels it."""
        waiter = _Waiter(messages, size_bytes, callback)
        self._waiters[waiter] = None
        self.offer()
        return partial(self._cancel, waiter)

    def _cancel(self, waiter: _Waiter) -> None:
        self._waiters.pop(waiter, None)
        self.offer()

    def offer(self) -> None:
        """Call those who would fit, one after the other, as if each took what it wants."""
        messages = size_bytes = 0
        for waiter in tuple(self._waiters):
            is_first = not messages
            messages += waiter.messages
            size_bytes += waiter.size_bytes
            if not (self._fits_alone if is_first else self._fits)(messages, size_bytes):
                return
            del self._waiters[waiter]
            waiter.callback()
