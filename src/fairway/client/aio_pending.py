"""What `send` returns on a loop: an outcome that can be awaited, by any number of tasks.

Each that waits has a future of its own, since cancelling a task cancels the future that it waits for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from typing import Any

from fairway.protocol.pending import BatchReceipt, Pending, PendingBatch, Receipt


class AioBatch(PendingBatch):
    """The outcome of a batch, shared by its messages."""

    __slots__ = ()

    def wait(self) -> Generator[Any, None, None]:
        """Return when the outcome is known."""
        if not self.done():
            told = asyncio.get_running_loop().create_future()
            self.when_settled(lambda _: None if told.done() else told.set_result(None))
            yield from told

    def __await__(self) -> Generator[Any, None, BatchReceipt]:
        yield from self.wait()
        return self.receipt()


class AioPending(Pending):
    """The outcome of one message: awaiting it gives the receipt, or raises what went wrong."""

    __slots__ = ()

    batch: AioBatch

    def result(self) -> Receipt:
        """The receipt; only when `done`."""
        return self.receipt()

    def __await__(self) -> Generator[Any, None, Receipt]:
        batch = self.batch
        if not batch.done():
            yield from batch.wait()
        return self.receipt()
