"""The port of an election: who rules, for how long that is certain, and a token that only grows.

Each candidate has an election of its own, a place in a line that all candidates of a career share: in ZooKeeper
(`zookeeper`), or in this process (`local`). A lease in a database or on a server fits as well, for all that is asked of
a form is this:

1. At most one candidate has the office at a time; the next one is elected when the place of the one before it is given
   up, or expires.
2. A confirmation says until when the office is certain. It is counted from *before* the question was sent, on this
   process's monotonic clock, and ends before anybody else could be elected.
3. Tokens grow with every reign, over all candidates, for ever.

Where 2 fails (a machine that is paused between looking at the clock and acting), 3 still holds, and a fence that checks
the token in the transaction of the effect lets nothing of a deposed leader through.
"""

from __future__ import annotations

from typing import Protocol

from fairway.career.law import Confirmation


class ElectionListener(Protocol):
    """Whom an election tells. It may be called from any thread, and does not block."""

    def elected(self, confirmation: Confirmation) -> None:
        """The office is yours."""

    def confirmed(self, confirmation: Confirmation) -> None:
        """It is still yours."""

    def suspended(self) -> None:
        """Nobody knows: the session is suspended. A confirmation or a loss follows."""

    def lost(self, token: int) -> None:
        """It is yours no longer."""

    def resigned(self) -> None:
        """What `resign` asked for is done."""

    def closed(self) -> None:
        """What `close` asked for is done."""

    def failed(self, error: Exception) -> None:
        """This election will never elect anybody: it is set up wrongly."""


class Election(Protocol):
    """One candidate's place in the line. No call blocks or raises; what comes of it is told to the listener."""

    def open(self, listener: ElectionListener) -> None:
        """Begin. An election that cannot be reached is waited for."""

    def campaign(self) -> None:
        """Stand in line, at its end, until elected or resigned."""

    def resign(self) -> None:
        """Give up the place in line, or the office. It is answered, also where there is nothing to give up."""

    def close(self) -> None:
        """End, and give up what is held."""
