"""For how long a session certainly lives: the law, on the monotonic clock of whoever has the session.

The ensemble ends a session of which it has not heard for its time-out, T. What a client knows is when it sent a
question, and that an answer came. That is less than it seems: the server that answered may not have passed on yet that
it heard of us. Servers pass such news on twice per tick, and a session lasts two ticks or more: after T/4. So

- a connection that was made, for a session new or old, was heard of by the whole ensemble after it was asked for;
- a question was heard of by the whole ensemble once a later one on the same connection, sent T/4 after the first was
  answered, has been answered too;
- a session lives for T after the latest such question was *sent*, and is certain for no more than 2 T/3 after the
  latest question of all, so that small lies of clocks and late beats of servers do no harm.

With six questions in T the last bound is the one that counts, unless the client itself was away for a while.
"""

from __future__ import annotations

from collections import deque

QUESTIONS_PER_SESSION = 6
SILENCES_PER_SESSION = 3  # a question that has no answer for this part of a session breaks the connection


class Certainty:
    """What one session has been told."""

    def __init__(self) -> None:
        self.until_ns = 0
        self._session_ns = 0
        self._known_ns = 0  # the whole ensemble has heard of us since then
        self._answered: deque[tuple[int, int]] = deque()  # when sent, when answered: not known to be passed on

    def begin(self, asked_ns: int, session_ns: int) -> None:
        """A connection was made, by a request that was sent then; the session lasts so long."""
        self._session_ns = session_ns
        self._known_ns = asked_ns
        self._answered.clear()
        self._believe(asked_ns)

    def answered(self, sent_ns: int, now_ns: int) -> None:
        """A question that was sent then has been answered now, on the connection that was made last."""
        while self._answered and self._answered[0][1] + self._session_ns // 4 <= sent_ns:
            self._known_ns = max(self._known_ns, self._answered.popleft()[0])
        self._answered.append((sent_ns, now_ns))
        self._believe(sent_ns)

    def end(self) -> None:
        """The session is over, or is about to be."""
        self.until_ns = 0
        self._session_ns = 0
        self._answered.clear()

    def _believe(self, sent_ns: int) -> None:
        if self._session_ns:
            until_ns = min(sent_ns + self._session_ns * 2 // 3, self._known_ns + self._session_ns)
            self.until_ns = max(self.until_ns, until_ns)
