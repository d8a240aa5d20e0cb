"""State machine of a candidate: the next duty, from a table. It has no clock, no I/O and no thread.

A candidate is in one phase. Its hold on the leadership is HELD, SUSPENDED or LOST, and it intends to stay or to go:

    OUT ──campaign──► CAMPAIGNING ──elected──► ELECT ──inaugurate──► IN_OFFICE ⟲ execute
     ▲                                           │                       │
     └──────resigned────── RESIGNING ◄──resign── LEFT ◄──────────────hand over

    HELD         the election has confirmed the leadership, and the confirmation is still good
    SUSPENDED    the session is suspended, or the last confirmation is too old. The candidate begins nothing new. A
                 confirmation may follow: while the place in the queue exists, nobody else has led meanwhile
    LOST         the place is gone, or has been unconfirmed for so long that it may be gone. It never comes back

So a leader begins a duty only while the leadership is HELD. A duty that has begun goes on, and can ask `may_go_on`. The
candidate gives up its place only after the hand-over, so the next leader waits until the old one has finished. Nobody
waits for a dead or disconnected leader longer than its session lasts.

Events of an earlier term may arrive late. Their token shows it, and they change nothing.
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


class Intention(enum.IntEnum):
    """A later intention overrides an earlier one."""

    STAY = 0
    YIELD = 1  # hand over, and campaign again at the end of the queue
    END = 2  # hand over, and end the candidacy


class Duty(enum.Enum):
    """What the candidate does next. WAIT: nothing, until something happens."""

    WAIT = "wait"
    CAMPAIGN = "campaign"
    INAUGURATE = "inaugurate"
    EXECUTE = "execute"
    HAND_OVER = "hand over"
    RESIGN = "resign"
    END = "end"


# Candidates without leadership: by phase, and whether the intention is to end.
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

# Candidates with leadership: by phase, how it is held, and whether the intention is to go.
_LEADING: Final[dict[tuple[Phase, Hold, bool], Duty]] = {
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

# Without a complete inauguration there is nothing to hand over.
_BROKEN_OFF: Final[dict[Phase, Phase]] = {
    Phase.INAUGURATING: Phase.LEFT,
    Phase.EXECUTING: Phase.IN_OFFICE,
    Phase.HANDING_OVER: Phase.LEFT,
}


@dataclass(frozen=True, slots=True)
class Confirmation:
    """A leadership as an election confirms it: certain until `until_ns`, and lost at `gone_ns` unless confirmed."""

    token: int
    until_ns: int
    gone_ns: int


class CareerStateMachine:
    """One candidate. Each call brings the time. A caller that shares it between threads holds a lock."""

    def __init__(self, in_hand: InHand = "finish") -> None:
        self.phase = Phase.OUT
        self.intention = Intention.STAY
        self.in_hand = in_hand
        self._confirmed: Confirmation | None = None
        self._is_suspended = False
        self._is_lost = False

    @property
    def token(self) -> int | None:
        """The token of the current or the last term."""
        return None if self._confirmed is None else self._confirmed.token

    # --- events of the election --------------------------------------------------------------------------------------

    def elected(self, confirmation: Confirmation) -> None:
        """The candidate is elected. Tokens only grow: a later leader has a larger one."""
        if self.phase is not Phase.CAMPAIGNING:
            return  # it has resigned meanwhile
        before = self.token
        invariant(before is None or confirmation.token > before, "a later reign has a larger token")
        self.phase = Phase.ELECT
        self._confirmed = confirmation
        self._is_suspended = self._is_lost = False

    def confirmed(self, confirmation: Confirmation, now_ns: int) -> None:
        """The candidate still leads."""
        if confirmation.token == self.token and self.hold(now_ns) is not Hold.LOST:
            self._confirmed = confirmation
            self._is_suspended = False

    def suspended(self) -> None:
        """Nobody knows whether the candidate still leads."""
        self._is_suspended = True

    def lost(self, token: int) -> None:
        """The candidate does not lead any more."""
        if token == self.token:
            self._is_lost = True

    def resigned(self) -> None:
        """The place in the queue is given up, or was gone."""
        if self.phase is Phase.RESIGNING:
            self.phase = Phase.OUT
            if self.intention is Intention.YIELD:
                self.intention = Intention.STAY

    # --- events of the candidate -------------------------------------------------------------------------------------

    def ask(self, intention: Intention) -> None:
        self.intention = max(self.intention, intention)

    def begin(self, duty: Duty) -> None:
        """The candidate begins the duty that `duty` returned."""
        if duty is not Duty.WAIT:
            self.phase = _BEGUN[duty]

    def done(self, *, is_more: bool = True) -> None:
        """The current duty has ended. `is_more` False: another candidate is to have a turn."""
        self.phase = self._following(_DONE)
        if not is_more:
            self.ask(Intention.YIELD)

    def broken_off(self) -> None:
        """The current duty has ended with an error."""
        self.phase = self._following(_BROKEN_OFF)

    def _following(self, table: dict[Phase, Phase]) -> Phase:
        if self.phase not in table:
            raise InvariantViolated(f"a candidate that is {self.phase.value} has begun nothing that could end")
        return table[self.phase]

    # --- decisions ---------------------------------------------------------------------------------------------------

    def hold(self, now_ns: int) -> Hold:
        """How the leadership is held. Once lost, it stays lost, whatever event comes later."""
        if self._confirmed is None or self._is_lost or now_ns >= self._confirmed.gone_ns:
            self._is_lost = True
            return Hold.LOST
        if self._is_suspended or now_ns >= self._confirmed.until_ns:
            return Hold.SUSPENDED
        return Hold.HELD

    def duty(self, now_ns: int) -> Duty:
        """The next duty. WAIT while another duty is under way."""
        outside = _OUTSIDE.get((self.phase, self.intention is Intention.END))
        if outside is not None:
            return outside
        return _LEADING.get((self.phase, self.hold(now_ns), self.intention is not Intention.STAY), Duty.WAIT)

    def may_go_on(self, now_ns: int) -> bool:
        """Whether the current duty may go on. It must not once the leadership is lost. Work that is aborted must also
        stop if the leadership is in doubt or about to end."""
        hold = self.hold(now_ns)
        if self.in_hand == "abort" and self.phase is Phase.EXECUTING:
            return hold is Hold.HELD and self.intention is Intention.STAY
        return hold is not Hold.LOST

    def next_deadline(self, now_ns: int) -> int | None:
        """When `duty` or `may_go_on` may change without an event; None: never."""
        if self._confirmed is None or self._is_lost:
            return None
        coming = (due for due in (self._confirmed.until_ns, self._confirmed.gone_ns) if due > now_ns)
        return min(coming, default=None)
