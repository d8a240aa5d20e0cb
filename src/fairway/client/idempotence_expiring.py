"""An inbox in a store whose entries expire, such as Redis or memcached: for effects that no transaction can hold.

A claim is written before the handler runs, and turned into `done` after it. If the program dies in between, nobody can
say whether the effect has happened: the claim runs out after `hold`, and the message is handled again. That is the one
case in which it happens twice. While a claim stands, others that get the message put it off.
"""

from __future__ import annotations

import enum
import inspect
from datetime import timedelta
from typing import Any, Final, Protocol

from fairway import limits
from fairway.client.core import Duration, seconds_of
from fairway.client.handling import Retry
from fairway.client.idempotence import By, Guarded, Handler, name_of
from fairway.client.idempotence_claims import Claims
from fairway.errors import Misuse

HOLD: Final = timedelta(minutes=5)
KEEP: Final = timedelta(days=7)
_LOOKS: Final = 4  # at a claim of somebody else's, until it runs out: each is an attempt of the message


class ClaimState(enum.Enum):
    """How an entry of the store stands."""

    MINE = "mine"
    """It was absent, and now is in process for this holder."""
    BUSY = "busy"
    """It is in process for another."""
    DONE = "done"


class ExpiringStore(Protocol):
    """What a store has to offer. Every call is atomic, and durable enough for the user when it returns.

    An entry is absent, in process (with its holder, for a while) or done (for a while); one that runs out is absent.
    """

    def claim(self, key: str, holder: str, hold_ms: int) -> ClaimState:
        """Where it is absent, make it in process for this holder, for so long."""

    def finish(self, key: str, keep_ms: int) -> None:
        """Make it done, for so long, whatever it was: the effect has happened."""

    def drop(self, key: str, holder: str) -> None:
        """Make it absent if it is in process for this holder; otherwise leave it alone."""


class AsyncExpiringStore(Protocol):
    """The same for `async def` handlers."""

    async def claim(self, key: str, holder: str, hold_ms: int) -> ClaimState: ...

    async def finish(self, key: str, keep_ms: int) -> None: ...

    async def drop(self, key: str, holder: str) -> None: ...


class ExpiringInbox(Claims):
    """`hold` is longer than the longest a handler takes; `keep` longer than any message is on its way."""

    def __init__(
        self,
        store: ExpiringStore | AsyncExpiringStore,
        *,
        hold: Duration = HOLD,
        keep: Duration = KEEP,
        by: By = None,
        replays: bool = True,
    ) -> None:
        super().__init__(by, replays=replays)
        self._store: Any = store
        self._hold_ms = round(seconds_of(hold) * 1_000)
        self._keep_ms = round(seconds_of(keep) * 1_000)
        if not 1 <= self._hold_ms <= limits.RETRY_AFTER_MS_MAX or self._keep_ms < 1:
            raise Misuse(f"hold={hold}, keep={keep}: hold is at most a day, and both are more than nothing")

    def guard(self, handler: Handler, *, is_async: bool, is_batch: bool) -> Guarded:
        if is_async is not inspect.iscoroutinefunction(self._store.claim):
            kind, wanted = ("async def", "AsyncExpiringStore") if is_async else ("def", "ExpiringStore")
            raise Misuse(f"{name_of(handler)} is `{kind}`: its inbox takes a store that is an {wanted}")
        return super().guard(handler, is_async=is_async, is_batch=is_batch)

    def _claim(self, key: str, holder: str) -> bool:
        return self._is_mine(self._store.claim(key, holder, self._hold_ms))

    async def _claim_async(self, key: str, holder: str) -> bool:
        return self._is_mine(await self._store.claim(key, holder, self._hold_ms))

    def _is_mine(self, claim: ClaimState) -> bool:
        if claim is ClaimState.BUSY:
            raise Retry("another consumer is at it, or has died over it", after=self._hold_ms / 1_000 / _LOOKS)
        return claim is ClaimState.MINE

    def _finish(self, key: str) -> None:
        self._store.finish(key, self._keep_ms)

    async def _finish_async(self, key: str) -> None:
        await self._store.finish(key, self._keep_ms)

    def _drop(self, key: str, holder: str) -> None:
        self._store.drop(key, holder)

    async def _drop_async(self, key: str, holder: str) -> None:
        await self._store.drop(key, holder)
