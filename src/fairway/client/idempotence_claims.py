"""Inboxes that claim a message before its handler runs, and remember it afterwards: in memory, or in a store.

absent ──claim──► in process ──finish──► done ──(kept for so long)──► absent
          ▲            │
          └────drop────┘    the handler failed, or its claim ran out
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial

from fairway.client.idempotence import By, Guarded, Handler, Naming, Sheaf, name_of, parameters_of
from fairway.errors import Misuse
from fairway.protocol.delivery import Message
from fairway.world.rng import RealRng


class Claims(ABC):
    """How a handler is run between claim and record. A key is the message's name with its subject and group."""

    def __init__(self, by: By, *, replays: bool) -> None:
        self._naming = Naming(by, replays=replays)
        self._rng = RealRng()

    # --- what a form does: the second of each pair for `async def` handlers

    @abstractmethod
    def _claim(self, key: str, holder: str) -> bool:
        """Take it; False: it was done before. Waits, or raises, while somebody else is at it."""

    @abstractmethod
    async def _claim_async(self, key: str, holder: str) -> bool: ...

    @abstractmethod
    def _finish(self, key: str) -> None:
        """It is done."""

    @abstractmethod
    async def _finish_async(self, key: str) -> None: ...

    @abstractmethod
    def _drop(self, key: str, holder: str) -> None:
        """It is not done, and anybody may claim it."""

    @abstractmethod
    async def _drop_async(self, key: str, holder: str) -> None: ...

    async def close_async(self) -> None:  # noqa: B027  nothing here is of a loop
        """Nothing to close."""

    # --- around the handler

    def guard(self, handler: Handler, *, is_async: bool, is_batch: bool) -> Guarded:
        taken = parameters_of(handler)
        if len(taken) != 1:
            raise Misuse(
                f"{name_of(handler)} takes ({', '.join(taken)}): with {type(self).__name__} there is no transaction to "
                "hand over, so it takes the message alone. fairway.sql.SqlInbox has one"
            )
        return partial(self._handle_async if is_async else self._handle, handler, is_batch)

    def _handle(self, handler: Handler, is_batch: bool, messages: Sequence[Message]) -> None:
        sheaf = Sheaf(messages, self._naming)
        key = _keys(messages)
        holder = f"{self._rng.bits(64):016x}"  # this call, and no other
        claimed: set[str] = set()
        try:
            claimed.update(name for name in sheaf.names if self._claim(key(name), holder))
            if held := sheaf.sift(claimed):
                handler(held if is_batch else held[0])
        except BaseException:
            for name in claimed:
                self._drop(key(name), holder)
            raise
        handed_back = set(sheaf.handed_back)
        for name in claimed:
            self._drop(key(name), holder) if name in handed_back else self._finish(key(name))
        sheaf.settle()

    async def _handle_async(self, handler: Handler, is_batch: bool, messages: Sequence[Message]) -> None:
        sheaf = Sheaf(messages, self._naming)
        key = _keys(messages)
        holder = f"{self._rng.bits(64):016x}"  # this call, and no other
        claimed: set[str] = set()
        try:
            for name in sheaf.names:
                if await self._claim_async(key(name), holder):
                    claimed.add(name)
            if held := sheaf.sift(claimed):
                await handler(held if is_batch else held[0])
        except BaseException:
            for name in claimed:
                await self._drop_async(key(name), holder)
            raise
        handed_back = set(sheaf.handed_back)
        for name in claimed:
            await (self._drop_async(key(name), holder) if name in handed_back else self._finish_async(key(name)))
        sheaf.settle()


def _keys(messages: Sequence[Message]) -> Callable[[str], str]:
    """All messages of a call are of one subject and group."""
    place = f"{messages[0].subject}/{messages[0].group}"
    return lambda name: f"{place}/{name}"
