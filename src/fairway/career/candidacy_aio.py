"""A candidate among tasks: the twin of `candidacy`, on the loop that calls `run`.

Here what is in hand can be broken off: a career that says `in_hand = "abort"` has its `execute` cancelled as soon as
the office is in doubt or to be given up, and any career when it is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

from fairway.career.careers import AioCareer, checked, name_of
from fairway.career.election import Election
from fairway.career.law import Duty
from fairway.career.office import CandidateCore
from fairway.errors import Deposed, Misuse
from fairway.world import farewell
from fairway.world.clock import Clock, RealClock
from fairway.world.workers import Ending

_TICK_S = 0.25  # how soon a signal is noticed while nothing else happens
_CLOSE_S = 30.0  # for an election to be left; a session that is not ended by then expires by itself


class AioCandidacy:
    """One candidate for one career. `run` returns after `stop`, or a signal; and raises what the career raised.

    A task of it that is cancelled hands over and resigns first; cancelled once more, it ends at once.
    """

    def __init__(self, career: AioCareer, election: Election, *, clock: Clock | None = None) -> None:
        if not isinstance(career, AioCareer):
            raise Misuse(f"a career on a loop is a fairway.aio.Career, not {type(career).__name__}")
        self._career = career
        self._election = election
        self._ending = Ending()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._rung = asyncio.Event()
        clock = clock or RealClock()
        self._office = CandidateCore(name_of(career), career.in_hand, clock, self._ending, self._ring)

    async def run(self) -> None:
        """Be a candidate, and rule when elected, until told to end by `stop`, SIGTERM or SIGINT."""
        self._loop = asyncio.get_running_loop()
        leave = farewell.listen(self._ending)
        try:
            self._election.open(self._office)
            try:
                while await self._step():
                    pass
            finally:
                self._election.close()
                await self._await_closed()
        finally:
            leave()
            self._loop = None
        if self._office.failure is not None:
            raise self._office.failure

    def stop(self) -> None:
        """End: finish or abort what is in hand, hand over, resign. From any thread; returns at once."""
        self._ending.ask()
        self._ring()

    def _ring(self) -> None:
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._rung.set)

    async def _step(self) -> bool:
        """Do what is next; False: nothing is."""
        self._rung.clear()
        duty, wait_s = self._office.next()
        match duty:
            case Duty.WAIT:
                await self._wait(wait_s)
            case Duty.CAMPAIGN:
                self._election.campaign()
            case Duty.INAUGURATE:
                self._career._mandate = self._office.mandate()
                await self._have(self._inaugurate())
            case Duty.EXECUTE:
                await self._have(self._execute())
            case Duty.HAND_OVER:
                await self._have(self._hand_over(), is_breakable=False)
            case Duty.RESIGN:
                self._career._mandate = None
                self._election.resign()
        return duty is not Duty.END

    async def _wait(self, wait_s: float | None) -> None:
        try:
            await self._listen(wait_s)
        except asyncio.CancelledError as error:
            self._give_up(error)

    async def _listen(self, wait_s: float | None) -> None:
        """Until the bell rings, or so long."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._rung.wait(), _TICK_S if wait_s is None else min(wait_s, _TICK_S))
        self._rung.clear()

    async def _have(self, part: Coroutine[Any, Any, bool], *, is_breakable: bool = True) -> None:
        """Have a part of the career done, in a task of its own, so that it can be broken off and we cannot."""
        task = asyncio.get_running_loop().create_task(part)
        while not task.done():
            try:
                await self._attend(task, is_breakable=is_breakable)
            except asyncio.CancelledError as error:  # of ours, not of the task
                if is_breakable or self._is_cancelled:
                    task.cancel()
                self._give_up(error)
        self._note(task)

    async def _attend(self, task: asyncio.Task[bool], *, is_breakable: bool) -> None:
        """Wait until the task is done, or something may have changed; break it off if it must not go on."""
        left_s = self._office.abort_due_s() if is_breakable else None
        if left_s == 0.0:
            task.cancel()
            await asyncio.wait([task])
            return
        self._rung.clear()
        listening = asyncio.get_running_loop().create_task(self._listen(left_s))
        try:
            await asyncio.wait([task, listening], return_when=asyncio.FIRST_COMPLETED)
        finally:
            listening.cancel()

    def _note(self, task: asyncio.Task[bool]) -> None:
        if task.cancelled():
            token = self._career.mandate.token
            self._office.stumbled(Deposed(self._office.name, token, "it was broken off"))
        elif (error := task.exception()) is not None:
            self._office.stumbled(error)
        else:
            self._office.done(is_more=task.result())

    def _give_up(self, error: asyncio.CancelledError) -> None:
        """Our own task is cancelled: go on until the office is handed over; the second time, do not."""
        if self._is_cancelled:
            raise error
        self._office.give_up(error)

    @property
    def _is_cancelled(self) -> bool:
        return isinstance(self._office.failure, asyncio.CancelledError)

    async def _inaugurate(self) -> bool:
        await self._career.inaugurate()
        return True

    async def _execute(self) -> bool:
        return checked(self._career, await self._career.execute(self._career.mandate.token))

    async def _hand_over(self) -> bool:
        await self._career.hand_over()
        return True

    async def _await_closed(self) -> None:
        for _ in range(int(_CLOSE_S / _TICK_S)):
            if self._office.is_closed:
                return
            await self._listen(None)
