"""What `send` returns to a program without a loop: an outcome that can be waited for.

A message costs no lock and no event of its own: only who has to wait makes one, and only for that wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fairway.client.core import Duration, limit_of
from fairway.protocol.pending import BatchReceipt, Pending, PendingBatch, Receipt

if TYPE_CHECKING:
    from fairway.world.link import Link


class SyncBatch(PendingBatch):
    """The outcome of a batch, shared by its messages; what `send_many` returns."""

    __slots__ = ("_link",)

    def __init__(self, subject: str, run_later: Callable[[Callable[[], None]], None], link: Link) -> None:
        super().__init__(subject, run_later)
        self._link = link

    def wait(self, timeout: Duration | None) -> None:
        """Return when the outcome is known; TimeoutError if that takes too long, and waiting again is fine."""
        if not self.done() and not self._link.wait_told(self._tell, limit_of(timeout)) and not self.done():
            raise TimeoutError(f"no receipt for a batch to {self.subject} after {timeout} s: it may still come")

    def _tell(self, told: Callable[[], None]) -> None:
        self.when_settled(lambda _: told())

    def result(self, timeout: Duration | None = None) -> BatchReceipt:
        """The receipt, once the whole batch is durable; raises what went wrong."""
        self.wait(timeout)
        return self.receipt()

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """What went wrong; None if it is durable."""
        self.wait(timeout)
        return super().exception()

    def add_done_callback(self, callback: Callable[[PendingBatch], object]) -> None:
        """Have `callback(batch)` called, by the thread that reads; at once if it is done. It must not wait."""
        with self._link.lock:
            if not self.done():
                super().add_done_callback(callback)
                return
        callback(self)


class SyncPending(Pending):
    """The outcome of one message."""

    __slots__ = ()

    batch: SyncBatch

    def result(self, timeout: Duration | None = None) -> Receipt:
        """The receipt, once the message is durable; raises what went wrong, or TimeoutError."""
        batch = self.batch
        if not batch.done():
            batch.wait(timeout)
        return self.receipt()

    def exception(self, timeout: Duration | None = None) -> Exception | None:
        """What went wrong; None if it is durable."""
        return self.batch.exception(timeout)
