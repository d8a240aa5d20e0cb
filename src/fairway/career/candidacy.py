"""A candidate among threads: it does what the law says is next, in the thread that calls `run`."""

from __future__ import annotations

from collections.abc import Callable

from fairway.career.careers import Career, checked, name_of
from fairway.career.election import Election
from fairway.career.law import Duty
from fairway.career.office import CandidateCore
from fairway.errors import Misuse
from fairway.world import farewell
from fairway.world.bell import Bell
from fairway.world.clock import Clock, RealClock
from fairway.world.workers import Ending

_TICK_S = 0.25  # how soon a signal is noticed while nothing else happens
_CLOSE_S = 30.0  # for an election to be left; a session that is not ended by then expires by itself


class Candidacy:
    """One candidate for one career. `elect` is all that most programs call; this is for those that stop it themselves.

    `run` returns after `stop`, or a signal; and raises what the career raised.
    """

    def __init__(self, career: Career, election: Election, *, clock: Clock | None = None) -> None:
        if not isinstance(career, Career):
            raise Misuse(f"a career is a fairway.Career, not {type(career).__name__}; coroutines: fairway.aio.elect")
        self._career = career
        self._election = election
        self._bell = Bell()
        self._ending = Ending()
        clock = clock or RealClock()
        self._office = CandidateCore(name_of(career), career.in_hand, clock, self._ending, self._bell.ring)

    def run(self) -> None:
        """Be a candidate, and rule when elected, until told to end by `stop`, SIGTERM or SIGINT."""
        leave = farewell.listen(self._ending)
        try:
            self._election.open(self._office)
            try:
                while self._step():
                    pass
            finally:
                self._election.close()
                self._await_closed()
        finally:
            leave()
        if self._office.failure is not None:
            raise self._office.failure

    def stop(self) -> None:
        """End: finish or abort what is in hand, hand over, resign. From any thread; returns at once."""
        self._ending.ask()
        self._bell.ring()

    def _step(self) -> bool:
        """Do what is next; False: nothing is."""
        duty, wait_s = self._office.next()
        match duty:
            case Duty.WAIT:
                self._wait(wait_s)
            case Duty.CAMPAIGN:
                self._election.campaign()
            case Duty.INAUGURATE:
                self._career._mandate = self._office.mandate()
                self._have(self._inaugurate)
            case Duty.EXECUTE:
                self._have(self._execute)
            case Duty.HAND_OVER:
                self._have(self._hand_over)
            case Duty.RESIGN:
                self._career._mandate = None
                self._election.resign()
        return duty is not Duty.END

    def _wait(self, wait_s: float | None) -> None:
        try:
            self._bell.wait(_TICK_S if wait_s is None else min(wait_s, _TICK_S))
        except KeyboardInterrupt as error:  # the second Ctrl-C: still, who rules does not vanish without a word
            self._office.give_up(error)

    def _have(self, part: Callable[[], bool]) -> None:
        try:
            is_more = part()
        except BaseException as error:
            self._office.stumbled(error)
        else:
            self._office.done(is_more=is_more)

    def _inaugurate(self) -> bool:
        self._career.inaugurate()
        return True

    def _execute(self) -> bool:
        return checked(self._career, self._career.execute(self._career.mandate.token))

    def _hand_over(self) -> bool:
        self._career.hand_over()
        return True

    def _await_closed(self) -> None:
        for _ in range(int(_CLOSE_S / _TICK_S)):
            if self._office.is_closed:
                return
            self._bell.wait(_TICK_S)
