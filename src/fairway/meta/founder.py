"""Makes subjects on first use, at a rate. Requests are retried until they succeed, or expire 60 s after the last."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from fairway.errors import FairwayError, Refused
from fairway.meta.governing import ClusterAdmin
from fairway.serving.creation_rate import CreationRate
from fairway.world.clock import Clock

WISHES_MAX = 1_000  # for subjects that cannot be made now; beyond it askers are told to come back
WISH_S = 60  # a poll renews it every half minute
_AGAIN_S = 1.0
_NS = 1_000_000_000
_SHORT_WAIT_S = 0.1  # for the rate of creation: the asker waits, instead of a refusal now and a change soon after


@dataclass(slots=True)
class _CreationRequest:
    expires_ns: int
    connection: object  # that asked for it first, and whose share of the rate it takes
    trouble: str = ""  # why it has not come true yet
    decided: asyncio.Event = field(default_factory=asyncio.Event)  # it has been tried once
    task: asyncio.Task[None] | None = None


class SubjectCreator:
    """One task per subject that somebody wishes for."""

    def __init__(self, governor: ClusterAdmin, clock: Clock, rate: CreationRate) -> None:
        self._governor = governor
        self._rate = rate
        self._counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # wishes by connection
        self._turns: WeakKeyDictionary[object, asyncio.Lock] = WeakKeyDictionary()  # those of one connection, in turn
        self._clock = clock
        self._wishes: dict[str, _CreationRequest] = {}
        self._chance = asyncio.Event()  # something has changed: another attempt may succeed

    def trouble_of(self, subject: str) -> str:
        """Why it has not been made yet; empty: nobody has tried, or it is under way."""
        wish = self._wishes.get(subject)
        return "" if wish is None else wish.trouble

    def wish(self, subject: str, connection: object) -> asyncio.Event | None:
        """Make it, now or later. What is set once it has been tried; None: there are too many wishes, or half of these
        are this connection's."""
        wish = self._wishes.get(subject)
        expires_ns = self._clock.monotonic_ns() + WISH_S * _NS
        if wish is not None:
            wish.expires_ns = expires_ns
            return wish.decided
        of_connection = self._counts.get(connection, 0)
        if len(self._wishes) >= WISHES_MAX or of_connection >= WISHES_MAX // 2:
            return None
        self._counts[connection] = of_connection + 1
        wish = self._wishes[subject] = _CreationRequest(expires_ns, connection)
        wish.task = asyncio.get_running_loop().create_task(self._make(subject, wish), name="fairway-meta-founder")
        return wish.decided

    def try_again(self) -> None:
        """Groups have come or gone."""
        chance, self._chance = self._chance, asyncio.Event()
        chance.set()

    async def stop(self) -> None:
        for wish in [*self._wishes.values()]:
            if wish.task is not None:
                wish.task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await wish.task

    async def _make(self, subject: str, wish: _CreationRequest) -> None:
        try:
            await self._take_turn(wish)
            while self._clock.monotonic_ns() < wish.expires_ns:
                chance = self._chance
                try:
                    await self._governor.create(subject, is_on_first_use=True)
                except FairwayError as error:
                    wish.trouble = error.sentence if isinstance(error, Refused) else str(error)
                else:
                    return
                wish.decided.set()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(_AGAIN_S):
                        await chance.wait()
        finally:
            wish.decided.set()
            del self._wishes[subject]
            self._counts[wish.connection] -= 1

    async def _take_turn(self, wish: _CreationRequest) -> None:
        """Return when the rate of creation allows it, or when nobody wants it any more."""
        turn = self._turns.setdefault(wish.connection, asyncio.Lock())
        async with turn:
            while self._clock.monotonic_ns() < wish.expires_ns:
                try:
                    self._rate.check(wish.connection)
                except Refused as refused:
                    wait_s = (refused.retry_after_ms or 0) / 1_000
                    wish.trouble = refused.sentence
                    if wait_s > _SHORT_WAIT_S:
                        wish.decided.set()
                    await asyncio.sleep(wait_s)
                else:
                    self._rate.note(wish.connection)
                    return
