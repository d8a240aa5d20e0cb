"""An election within one process: for tests of careers, and for programs whose candidates are threads.

    ballot = LocalBallot()
    first, second = ballot.election(), ballot.election()

There is no session that could be lost, unless a test says so: `suspend`, `resume`, `expire`.
"""

from __future__ import annotations

from fairway.career.election import ElectionListener
from fairway.career.law import Confirmation
from fairway.errors import Misuse
from fairway.world.gate import Lock

_NEVER_NS = 1 << 62


class LocalBallot:
    """The line that the candidates of one career stand in."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._line: list[LocalElection] = []
        self._token = 0
        self._told: LocalElection | None = None  # who was told of being elected

    def election(self) -> LocalElection:
        """A place for one more candidate."""
        return LocalElection(self)

    def _join(self, election: LocalElection) -> None:
        with self._lock:
            if election not in self._line:
                self._token += 1
                election._token = self._token  # places are taken in order, so tokens grow from reign to reign
                self._line.append(election)
            self._tell()

    def _leave(self, election: LocalElection) -> bool:
        """Whether it had the office."""
        with self._lock:
            if election in self._line:
                self._line.remove(election)
            ruled = self._told is election
            if ruled:
                self._told = None
            self._tell()
            return ruled

    def _tell(self) -> None:
        if self._line and self._told is None:
            self._told = self._line[0]
            self._told._listen().elected(self._told._confirmation())


class LocalElection:
    """One candidate's place in the line of a `LocalBallot`."""

    def __init__(self, ballot: LocalBallot) -> None:
        self._ballot = ballot
        self._token = 0
        self._listener: ElectionListener | None = None

    def open(self, listener: ElectionListener) -> None:
        if self._listener is not None:
            raise Misuse("this election has its candidate: ask the ballot for another one")
        self._listener = listener

    def campaign(self) -> None:
        self._ballot._join(self)

    def resign(self) -> None:
        self._ballot._leave(self)
        self._listen().resigned()

    def close(self) -> None:
        self._ballot._leave(self)
        self._listen().closed()

    # --- what happens to sessions ------------------------------------------------------------------------------------

    def suspend(self) -> None:
        """As if the connection were lost."""
        self._listen().suspended()

    def resume(self) -> None:
        """As if it were found again in time."""
        self._listen().confirmed(self._confirmation())

    def expire(self) -> None:
        """As if it were not: the next one is elected, whatever this candidate does. One that was waiting stands in
        line again, at its end."""
        token = self._token
        if self._ballot._leave(self):
            self._listen().lost(token)
        else:
            self._ballot._join(self)

    def _confirmation(self) -> Confirmation:
        return Confirmation(self._token, _NEVER_NS, _NEVER_NS)

    def _listen(self) -> ElectionListener:
        if self._listener is None:
            raise Misuse("this election has no candidate yet: run one with it first")
        return self._listener
