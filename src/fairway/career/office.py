"""What both faces of a career have in common: the law, a lock around it, the time, and somebody to wake.

An election tells an office what happens, from whichever thread; the face asks it what to do, and does it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from fairway.career.law import CareerStateMachine, Confirmation, Duty, Hold, InHand, Wish
from fairway.errors import Deposed, Misuse
from fairway.names import GroupName
from fairway.world.clock import Clock
from fairway.world.gate import Lock
from fairway.world.workers import Ending

# Before one that a fence has refused stands again: an election that was set up anew counts from the beginning, and
# every reign would end at once.
_REST_NS = 1_000_000_000

_log = logging.getLogger("fairway.career")


class Leadership:
    """The right to rule, of one reign: for code within `execute` to look at. Any thread may."""

    def __init__(self, office: CandidateCore, token: int) -> None:
        self._office = office
        self.token = token

    @property
    def holds(self) -> bool:
        """Whether it is certain, now, that nobody else rules."""
        return self._office.holds(self.token)

    def check(self) -> None:
        """Raise `Deposed` if what is being done must not go on: the office is lost; or, for a career that aborts what
        is in hand, is suspended or to be given up."""
        self._office.check(self.token)

    def step_down(self) -> None:
        """Hand over when this `execute` has ended, and let another one have its turn."""
        self._office.ask(Wish.YIELD, self.token)


class CandidateCore:
    """One candidate, as its election and its career see it."""

    def __init__(self, name: str, in_hand: InHand, clock: Clock, ending: Ending, ring: Callable[[], None]) -> None:
        """`ring` is called when `next` may have another answer: from any thread, and without the lock. `ending` is
        looked at and not listened to, since a signal may ask for the end while this very thread has the lock."""
        if in_hand not in ("finish", "abort"):
            raise Misuse(f"in_hand={in_hand!r} of career {name}: what is in hand is 'finish'ed, or 'abort'ed")
        self.name = str(GroupName.parse(name))  # the alphabet of a fence, and of a path
        self._law = CareerStateMachine(in_hand)
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
            self._law.elected(confirmation)
        self._ring()

    def confirmed(self, confirmation: Confirmation) -> None:
        with self._lock:
            self._law.confirmed(confirmation, self._clock.monotonic_ns())
        self._ring()

    def suspended(self) -> None:
        _log.warning("career %s: the session is suspended, nothing new is begun", self.name)
        with self._lock:
            self._law.suspended()
        self._ring()

    def lost(self, token: int) -> None:
        _log.warning("career %s: the office is lost, token %d", self.name, token)
        with self._lock:
            self._law.lost(token)
        self._ring()

    def resigned(self) -> None:
        with self._lock:
            self._law.resigned()
        self._ring()

    def failed(self, error: Exception) -> None:
        """Nothing will come of it: end, and say why."""
        with self._lock:
            self._end(error)
            if self._law.token is not None:
                self._law.lost(self._law.token)
        self._ring()

    def closed(self) -> None:
        self.is_closed = True
        self._ring()

    # --- for the career ----------------------------------------------------------------------------------------------

    def holds(self, token: int) -> bool:
        with self._lock:
            return token == self._law.token and self._law.hold(self._clock.monotonic_ns()) is Hold.HELD

    def check(self, token: int) -> None:
        with self._lock:
            now_ns = self._now_ns()
            is_current = token == self._law.token
            hold = self._law.hold(now_ns) if is_current else Hold.LOST
            if is_current and self._law.may_go_on(now_ns):
                return
        why = {Hold.HELD: "it is to step down", Hold.SUSPENDED: "the session is suspended"}
        raise Deposed(self.name, token, why.get(hold, "the office is lost"))

    def ask(self, wish: Wish, token: int | None = None) -> None:
        """Wish for something; with a token only if that is still the reign."""
        with self._lock:
            if token is None or token == self._law.token:
                self._law.ask(wish)
        self._ring()

    # --- for the face ------------------------------------------------------------------------------------------------

    def next(self) -> tuple[Duty, float | None]:
        """What to do now, begun with this call; with WAIT, how long at most, in seconds."""
        with self._lock:
            now_ns = self._now_ns()
            duty = self._law.duty(now_ns)
            if duty is Duty.CAMPAIGN and now_ns < self._rests_until_ns:
                return Duty.WAIT, (self._rests_until_ns - now_ns) / 1e9
            self._law.begin(duty)
            due_ns = self._law.next_deadline(now_ns)
        return duty, None if due_ns is None else (due_ns - now_ns) / 1e9

    def mandate(self) -> Leadership:
        """Of the reign that has begun."""
        with self._lock:
            return Leadership(self, self._law.token or 0)

    def abort_due_s(self) -> float | None:
        """How long what is being done may go on, as far as is known; None: no end is known."""
        with self._lock:
            now_ns = self._now_ns()
            if not self._law.may_go_on(now_ns):
                return 0.0
            due_ns = self._law.next_deadline(now_ns)
        return None if due_ns is None else (due_ns - now_ns) / 1e9

    def done(self, *, is_more: bool = True) -> None:
        with self._lock:
            self._law.done(is_more=is_more)

    def stumbled(self, error: BaseException) -> None:
        """What was begun has ended by an error. `Deposed` is no failure: either the law had said so itself, and knows
        what follows; or a fence has, and the office is lost, whatever the election believes."""
        with self._lock:
            is_news = self._law.may_go_on(self._now_ns())
            self._law.broken_off()
            if not isinstance(error, Deposed):
                self._end(error)
            elif is_news:
                _log.warning("career %s: %s", self.name, error)
                self._law.lost(error.token)
                self._rests_until_ns = self._clock.monotonic_ns() + _REST_NS

    def give_up(self, error: BaseException) -> None:
        """Whoever runs this was interrupted: hand over, resign, and raise it."""
        with self._lock:
            self._end(error)

    def _end(self, error: BaseException) -> None:
        self.failure = self.failure or error
        self._law.ask(Wish.END)

    def _now_ns(self) -> int:
        """The time; and whoever asks for it learns of the end, too."""
        if self._ending.is_asked:
            self._law.ask(Wish.END)
        return self._clock.monotonic_ns()
