"""Core of a candidate, common to threads and loops: the state machine with a lock, a clock, and a callback to wake it.

The election calls the core from any thread when something changes. The candidate asks the core for the next duty.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from fairway.career.state_machine import CareerStateMachine, Confirmation, Duty, Hold, InHand, Wish
from fairway.errors import Deposed, Misuse
from fairway.names import GroupName
from fairway.runtime.clock import Clock
from fairway.runtime.signals import Ending
from fairway.runtime.threads import Lock

# How long a candidate waits to campaign again after a fence refused it. An election that was set up again counts from
# the beginning, and every leadership would end at once.
_REST_NS = 1_000_000_000

_log = logging.getLogger("fairway.career")


class Leadership:
    """The leadership of one term, for code in `execute` to check. Any thread may use it."""

    def __init__(self, office: CandidateCore, token: int) -> None:
        self._core = office
        self.token = token

    @property
    def holds(self) -> bool:
        """Whether it is certain now that nobody else leads."""
        return self._core.holds(self.token)

    def check(self) -> None:
        """Raise `Deposed` if the work in hand must not go on: the leadership is lost. For a career that aborts its
        work, also if the leadership is suspended or about to end."""
        self._core.check(self.token)

    def step_down(self) -> None:
        """Hand over when this `execute` has ended, so that another candidate has a turn."""
        self._core.ask(Wish.YIELD, self.token)


class CandidateCore:
    """One candidate, as its election and its career see it."""

    def __init__(self, name: str, in_hand: InHand, clock: Clock, ending: Ending, ring: Callable[[], None]) -> None:
        """The core calls `ring` when `next` may have another answer, from any thread and without the lock. The core
        polls `ending` instead of listening to it: a signal may arrive while this thread holds the lock."""
        if in_hand not in ("finish", "abort"):
            raise Misuse(f"in_hand={in_hand!r} of career {name}: what is in hand is 'finish'ed, or 'abort'ed")
        self.name = str(GroupName.parse(name))  # the alphabet of a fence and of a path
        self._state_machine = CareerStateMachine(in_hand)
        self._lock = Lock()
        self._clock = clock
        self._ending = ending
        self._ring = ring
        self.is_closed = False
        self._rests_until_ns = 0
        self.failure: BaseException | None = None

    # --- for the election --------------------------------------------------------------------------------------------

    def elected(self, confirmation: Confirmation) -> None:
        _log.info("career %s: elected, token %d", self.name, confirmation.token)
        with self._lock:
            self._state_machine.elected(confirmation)
        self._ring()

    def confirmed(self, confirmation: Confirmation) -> None:
        with self._lock:
            self._state_machine.confirmed(confirmation, self._clock.monotonic_ns())
        self._ring()

    def suspended(self) -> None:
        _log.warning("career %s: the session is suspended, nothing new is begun", self.name)
        with self._lock:
            self._state_machine.suspended()
        self._ring()

    def lost(self, token: int) -> None:
        _log.warning("career %s: the office is lost, token %d", self.name, token)
        with self._lock:
            self._state_machine.lost(token)
        self._ring()

    def resigned(self) -> None:
        with self._lock:
            self._state_machine.resigned()
        self._ring()

    def failed(self, error: Exception) -> None:
        """The election can never elect this candidate: end with this error."""
        with self._lock:
            self._end(error)
            if self._state_machine.token is not None:
                self._state_machine.lost(self._state_machine.token)
        self._ring()

    def closed(self) -> None:
        self.is_closed = True
        self._ring()

    # --- for the career ----------------------------------------------------------------------------------------------

    def holds(self, token: int) -> bool:
        with self._lock:
            return (
                token == self._state_machine.token and self._state_machine.hold(self._clock.monotonic_ns()) is Hold.HELD
            )

    def check(self, token: int) -> None:
        with self._lock:
            now_ns = self._now_ns()
            is_current = token == self._state_machine.token
            hold = self._state_machine.hold(now_ns) if is_current else Hold.LOST
            if is_current and self._state_machine.may_go_on(now_ns):
                return
        why = {Hold.HELD: "it is to step down", Hold.SUSPENDED: "the session is suspended"}
        raise Deposed(self.name, token, why.get(hold, "the office is lost"))

    def ask(self, wish: Wish, token: int | None = None) -> None:
        """Ask to yield or to end; with a token, only if that term still lasts."""
        with self._lock:
            if token is None or token == self._state_machine.token:
                self._state_machine.ask(wish)
        self._ring()

    # --- for the candidate -------------------------------------------------------------------------------------------

    def next(self) -> tuple[Duty, float | None]:
        """The next duty, which begins with this call; with WAIT, how long to wait at most, in seconds."""
        with self._lock:
            now_ns = self._now_ns()
            duty = self._state_machine.duty(now_ns)
            if duty is Duty.CAMPAIGN and now_ns < self._rests_until_ns:
                return Duty.WAIT, (self._rests_until_ns - now_ns) / 1e9
            self._state_machine.begin(duty)
            due_ns = self._state_machine.next_deadline(now_ns)
        return duty, None if due_ns is None else (due_ns - now_ns) / 1e9

    def leadership(self) -> Leadership:
        """The leadership of the term that has begun."""
        with self._lock:
            return Leadership(self, self._state_machine.token or 0)

    def abort_due_s(self) -> float | None:
        """How long the work in hand may go on, as far as known; None: no end is known."""
        with self._lock:
            now_ns = self._now_ns()
            if not self._state_machine.may_go_on(now_ns):
                return 0.0
            due_ns = self._state_machine.next_deadline(now_ns)
        return None if due_ns is None else (due_ns - now_ns) / 1e9

    def done(self, *, is_more: bool = True) -> None:
        with self._lock:
            self._state_machine.done(is_more=is_more)

    def stumbled(self, error: BaseException) -> None:
        """The duty ended with an error. `Deposed` does not end the candidacy. Either the state machine knows the reason
        already, or a fence raised the error; then the leadership is lost, whatever the election believes."""
        with self._lock:
            is_news = self._state_machine.may_go_on(self._now_ns())
            self._state_machine.broken_off()
            if not isinstance(error, Deposed):
                self._end(error)
            elif is_news:
                _log.warning("career %s: %s", self.name, error)
                self._state_machine.lost(error.token)
                self._rests_until_ns = self._clock.monotonic_ns() + _REST_NS

    def give_up(self, error: BaseException) -> None:
        """The program was interrupted: hand over, resign, and raise this error."""
        with self._lock:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._state_machine.ask(Wish.END)

    def _now_ns(self) -> int:
        """The time. Reading the time also notices a request to end."""
        if self._ending.is_asked:
            self._state_machine.ask(Wish.END)
        return self._clock.monotonic_ns()
