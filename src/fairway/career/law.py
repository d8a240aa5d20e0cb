"""The law of a career: what a candidate does next. A table, no clock, no I/O, no thread.

A candidate is in one phase, holds its office more or less, and wishes to stay or to go:

    OUT ──campaign──► CAMPAIGNING ──elected──► ELECT ──inaugurate──► IN_OFFICE ⟲ execute
     ▲                                           │                       │
     └──────resigned────── RESIGNING ◄──resign── LEFT ◄──────────────hand over

    HELD         the election has confirmed the office, and the confirmation is still good
    SUSPENDED    the session is suspended, or the last confirmation is too old. Nothing new is begun. It may be
                 confirmed again: as long as the place in the election is ours, nobody else has ruled meanwhile
    LOST         the place is gone, or has been unconfirmed for so long that it may be. It never comes back

So a leader begins something only while it holds its office; what it has begun goes on, and is told (`may_go_on`).
The place in the election is given up only after the hand-over, and the next one waits for that, which is how it waits
for what the old leader finishes. A leader that is cut off or dead is waited for no longer than its session lasts.

Events of an earlier reign arrive late and are known by their token; they change nothing.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from fairway.errors import InvariantViolated, invariant

InHand: TypeAlias = Literal["finish", "abort"]


class Phase(enum.Enum):
    OUT = "out"
    CAMPAIGNING = "campaigning"
    ELECT = "elect"
    INAUGURATING = "inaugurating"
    IN_OFFICE = "in office"
    EXECUTING = "executing"
    HANDING_OVER = "handing over"
    LEFT = "left"
    RESIGNING = "resigning"
    ENDED = "ended"


class Hold(enum.Enum):
    HELD = "held"
    SUSPENDED = "suspended"
    LOST = "lost"


class Wish(enum.IntEnum):
    """Later ones override earlier ones."""

    STAY = 0
    YIELD = 1  # hand over, and be a candidate again: at the end of the line
    END = 2  # hand over, and be no candidate any more


class Duty(enum.Enum):
    """What the candidate is to do next; WAIT: nothing, until something happens."""

    WAIT = "wait"
    CAMPAIGN = "campaign"
    INAUGURATE = "inaugurate"
    EXECUTE = "execute"
    HAND_OVER = "hand over"
    RESIGN = "resign"
    END = "end"


# Who has no office: the phase, and whether the wish is to end.
_OUTSIDE: Final[dict[tuple[Phase, bool], Duty]] = {
    (Phase.OUT, False): Duty.CAMPAIGN,
    (Phase.OUT, True): Duty.END,
    (Phase.CAMPAIGNING, False): Duty.WAIT,
    (Phase.CAMPAIGNING, True): Duty.RESIGN,
    (Phase.LEFT, False): Duty.RESIGN,
    (Phase.LEFT, True): Duty.RESIGN,
    (Phase.RESIGNING, False): Duty.WAIT,
    (Phase.RESIGNING, True): Duty.WAIT,
}

# Who has one: the phase, how it is held, and whether the wish is to go.
_SEATED: Final[dict[tuple[Phase, Hold, bool], Duty]] = {
    (Phase.ELECT, Hold.HELD, False): Duty.INAUGURATE,
    (Phase.ELECT, Hold.SUSPENDED, False): Duty.WAIT,
    (Phase.ELECT, Hold.LOST, False): Duty.RESIGN,
    (Phase.ELECT, Hold.HELD, True): Duty.RESIGN,
    (Phase.ELECT, Hold.SUSPENDED, True): Duty.RESIGN,
    (Phase.ELECT, Hold.LOST, True): Duty.RESIGN,
    (Phase.IN_OFFICE, Hold.HELD, False): Duty.EXECUTE,
    (Phase.IN_OFFICE, Hold.SUSPENDED, False): Duty.WAIT,
    (Phase.IN_OFFICE, Hold.LOST, False): Duty.HAND_OVER,
    (Phase.IN_OFFICE, Hold.HELD, True): Duty.HAND_OVER,
    (Phase.IN_OFFICE, Hold.SUSPENDED, True): Duty.HAND_OVER,
    (Phase.IN_OFFICE, Hold.LOST, True): Duty.HAND_OVER,
}

_BEGUN: Final[dict[Duty, Phase]] = {
    Duty.CAMPAIGN: Phase.CAMPAIGNING,
    Duty.INAUGURATE: Phase.INAUGURATING,
    Duty.EXECUTE: Phase.EXECUTING,
    Duty.HAND_OVER: Phase.HANDING_OVER,
    Duty.RESIGN: Phase.RESIGNING,
    Duty.END: Phase.ENDED,
}

_DONE: Final[dict[Phase, Phase]] = {
    Phase.INAUGURATING: Phase.IN_OFFICE,
    Phase.EXECUTING: Phase.IN_OFFICE,
    Phase.HANDING_OVER: Phase.LEFT,
}

# One that was not inaugurated to the end has nothing to hand over.
_BROKEN_OFF: Final[dict[Phase, Phase]] = {
    Phase.INAUGURATING: Phase.LEFT,
    Phase.EXECUTING: Phase.IN_OFFICE,
    Phase.HANDING_OVER: Phase.LEFT,
}


@dataclass(frozen=True, slots=True)
class Confirmation:
    """What an election says of an office: good until then; and lost, if nothing is heard until that."""

    token: int
    until_ns: int
    gone_ns: int


class CareerStateMachine:
    """One candidate. Every call says what time it is; whoever shares it between threads keeps a lock around it."""

    def __init__(self, in_hand: InHand = "finish") -> None:
        self.phase = Phase.OUT
        self.wish = Wish.STAY
        self.in_hand = in_hand
        self._confirmed: Confirmation | None = None
        self._is_suspended = False
        self._is_lost = False

    @property
    def token(self) -> int | None:
        """Of the reign that is or was the last one."""
        return None if self._confirmed is None else self._confirmed.token

    # --- what the election says --------------------------------------------------------------------------------------

    def elected(self, confirmation: Confirmation) -> None:
        """The office is ours. Tokens only grow: whoever is elected later has a larger one."""
        if self.phase is not Phase.CAMPAIGNING:
            return  # we have resigned meanwhile
        before = self.token
        invariant(before is None or confirmation.token > before, "a later reign has a larger token")
        self.phase = Phase.ELECT
        self._confirmed = confirmation
        self._is_suspended = self._is_lost = False

    def confirmed(self, confirmation: Confirmation, now_ns: int) -> None:
        """It is still ours."""
        if confirmation.token == self.token and self.hold(now_ns) is not Hold.LOST:
            self._confirmed = confirmation
            self._is_suspended = False

    def suspended(self) -> None:
        """Whether it is still ours is not known."""
        self._is_suspended = True

    def lost(self, token: int) -> None:
        """It is ours no longer."""
        if token == self.token:
            self._is_lost = True

    def resigned(self) -> None:
        """The place in the election is given up, or was gone."""
        if self.phase is Phase.RESIGNING:
            self.phase = Phase.OUT
            if self.wish is Wish.YIELD:
                self.wish = Wish.STAY

    # --- what the candidate says -------------------------------------------------------------------------------------

    def ask(self, wish: Wish) -> None:
        self.wish = max(self.wish, wish)

    def begin(self, duty: Duty) -> None:
        """It does what `duty` has told it."""
        if duty is not Duty.WAIT:
            self.phase = _BEGUN[duty]

    def done(self, *, is_more: bool = True) -> None:
        """What was begun has ended; `is_more` is False when another one is to have its turn."""
        self.phase = self._following(_DONE)
        if not is_more:
            self.ask(Wish.YIELD)

    def broken_off(self) -> None:
        """What was begun has ended by an error."""
        self.phase = self._following(_BROKEN_OFF)

    def _following(self, table: dict[Phase, Phase]) -> Phase:
        if self.phase not in table:
            raise InvariantViolated(f"a candidate that is {self.phase.value} has begun nothing that could end")
        return table[self.phase]

    # --- what follows ------------------------------------------------------------------------------------------------

    def hold(self, now_ns: int) -> Hold:
        """How the office is held. Once it is lost it stays so, whatever is said later."""
        if self._confirmed is None or self._is_lost or now_ns >= self._confirmed.gone_ns:
            self._is_lost = True
            return Hold.LOST
        if self._is_suspended or now_ns >= self._confirmed.until_ns:
            return Hold.SUSPENDED
        return Hold.HELD

    def duty(self, now_ns: int) -> Duty:
        """What is to be done now. What is being done already is nobody's duty: WAIT."""
        outside = _OUTSIDE.get((self.phase, self.wish is Wish.END))
        if outside is not None:
            return outside
        return _SEATED.get((self.phase, self.hold(now_ns), self.wish is not Wish.STAY), Duty.WAIT)

    def may_go_on(self, now_ns: int) -> bool:
        """Whether what was begun may go on: not once the office is lost; and what is to be aborted rather than finished
        also not when it is in doubt, or is to be given up."""
        hold = self.hold(now_ns)
        if self.in_hand == "abort" and self.phase is Phase.EXECUTING:
            return hold is Hold.HELD and self.wish is Wish.STAY
        return hold is not Hold.LOST

    def next_deadline(self, now_ns: int) -> int | None:
        """When `duty` or `may_go_on` may change although nothing happens; None: never."""
        if self._confirmed is None or self._is_lost:
            return None
        coming = (due for due in (self._confirmed.until_ns, self._confirmed.gone_ns) if due > now_ns)
        return min(coming, default=None)
