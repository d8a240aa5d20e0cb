"""Election: the interface between a candidate and a service that elects; and an election within one process.

Each candidate has an election object of its own, for a place in a queue that all candidates of a career share.
`zookeeper_election`, `meta_election`, `fairway.sql.election` and `LocalElection` implement the interface. An
implementation must keep three promises:

1. At most one candidate leads at a time. The next candidate is elected when the leader's place is given up or expires.
2. A confirmation says until when the leadership is certain. It counts from before the question was sent, on this
   process's monotonic clock, and ends before anybody else can be elected.
3. Tokens grow with every term, over all candidates, for ever.

Promise 2 fails if a machine is paused between reading the clock and acting. Promise 3 still holds then: a fence that
checks the token in the effect's transaction refuses a deposed leader.

`ElectionThread` is an election with a thread of its own, which asks all questions. A subclass says what to do now
(`_attend`), how to leave the queue (`_withdraw`), and how to end (`_leave`).

`LocalBallot` is for tests of careers, and for programs whose candidates are threads:

    ballot = LocalBallot()
    first, second = ballot.election(), ballot.election()

A local election has no session to lose, unless a test says so: `suspend`, `resume`, `expire`.
"""

from __future__ import annotations

import enum
import queue
from typing import Protocol

from fairway.career.state_machine import Confirmation
from fairway.errors import Misuse
from fairway.runtime.threads import Lock, Workers

FOLDER = "/fairway/careers"  # of the queues, where a registry or ZooKeeper keeps them


class ElectionListener(Protocol):
    """Receives the events of an election, from any thread. Its methods do not block."""

    def elected(self, confirmation: Confirmation) -> None:
        """The candidate is elected."""

    def confirmed(self, confirmation: Confirmation) -> None:
        """The candidate still leads."""

    def suspended(self) -> None:
        """The session is suspended, and nobody knows who leads. A confirmation or a loss follows."""

    def lost(self, token: int) -> None:
        """The candidate does not lead any more."""

    def resigned(self) -> None:
        """The request of `resign` is done."""

    def closed(self) -> None:
        """The request of `close` is done."""

    def failed(self, error: Exception) -> None:
        """This election can never elect anybody: it is set up wrongly."""


class Election(Protocol):
    """One candidate's place in the queue. No call blocks or raises; the listener receives the results."""

    def open(self, listener: ElectionListener) -> None:
        """Begin. If the service cannot be reached, wait for it."""

    def campaign(self) -> None:
        """Join the end of the queue, until elected or resigned."""

    def resign(self) -> None:
        """Give up the place in the queue, or the leadership. The listener always gets `resigned`, even with nothing to
        give up."""

    def close(self) -> None:
        """End, and give up the place in the queue."""


class ElectionTask(enum.Enum):
    """A note for the thread."""

    CAMPAIGN = "campaign"
    RESIGN = "resign"
    CLOSE = "close"
    LOOK = "look"  # something may have changed


class ElectionState:
    """How far a candidate has come, and the reports to its listener that follow from that."""

    _is_running = False  # wants to be elected, or is
    _is_elected = False
    _is_suspended = False
    _token = 0

    def _forget(self) -> None:
        """Forget the place in the queue."""
        self._is_elected = self._is_suspended = False

    def _suspend(self, listener: ElectionListener) -> None:
        """Report, once, that nobody knows whether the candidate still leads."""
        if self._is_elected and not self._is_suspended:
            self._is_suspended = True
            listener.suspended()

    def _lose(self, listener: ElectionListener) -> None:
        """The place is gone. A waiting candidate campaigns again. A leader reports the loss, and waits for its
        candidate."""
        token, was_elected = self._token, self._is_elected
        self._forget()
        if was_elected:
            self._is_running = False
            listener.lost(token)

    def _fail(self, listener: ElectionListener, failure: Exception, cause: Exception) -> None:
        """This election can never elect anybody."""
        self._is_running = False
        failure.__cause__ = cause
        listener.failed(failure)


class ElectionThread(ElectionState):
    """An election with a thread of its own."""

    def __init__(self) -> None:
        self._notes: queue.SimpleQueue[ElectionTask] = queue.SimpleQueue()
        self._workers = Workers()
        self._listener: ElectionListener | None = None

    # --- the port ----------------------------------------------------------------------------------------------------

    def open(self, listener: ElectionListener) -> None:
        if self._listener is not None:
            raise Misuse("this election has its candidate: make another one")
        self._listener = listener
        self._workers.start("fairway-election", lambda: self._serve(listener))

    def campaign(self) -> None:
        self._notes.put(ElectionTask.CAMPAIGN)

    def resign(self) -> None:
        self._notes.put(ElectionTask.RESIGN)

    def close(self) -> None:
        self._notes.put(ElectionTask.CLOSE)

    # --- for subclasses ----------------------------------------------------------------------------------------------

    def _attend(self, listener: ElectionListener) -> float | None:
        """Do what is due now. Return how long to wait at most for the next note."""
        raise NotImplementedError

    def _withdraw(self) -> None:
        """Leave the queue, also with a node whose creation is under way."""
        raise NotImplementedError

    def _leave(self) -> None:
        """End. Nothing is called after this."""

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _serve(self, listener: ElectionListener) -> None:
        wait_s: float | None = None
        try:
            while (note := self._next_note(wait_s)) is not ElectionTask.CLOSE:
                if note is ElectionTask.CAMPAIGN:
                    self._is_running = True
                elif note is ElectionTask.RESIGN:
                    self._is_running = False
                    self._withdraw()
                    listener.resigned()
                wait_s = self._attend(listener) if self._is_running else None
            self._is_running = False
            self._withdraw()
            self._leave()
        except Exception as error:  # a bug: otherwise nobody would ever be elected, silently
            listener.failed(error)
            raise
        finally:
            listener.closed()

    def _next_note(self, wait_s: float | None) -> ElectionTask | None:
        try:
            return self._notes.get(timeout=wait_s)
        except queue.Empty:
            return None


_NEVER_NS = 1 << 62


class LocalBallot:
    """The queue of one career's candidates."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._queue: list[LocalElection] = []
        self._token = 0
        self._leader: LocalElection | None = None  # the candidate that got `elected`

    def election(self) -> LocalElection:
        """An election for one more candidate."""
        return LocalElection(self)

    def _join(self, election: LocalElection) -> None:
        with self._lock:
            if election not in self._queue:
                self._token += 1
                election._token = self._token  # places are taken in order, so tokens grow from term to term
                self._queue.append(election)
            self._elect_first()

    def _leave(self, election: LocalElection) -> bool:
        """Return whether the candidate led."""
        with self._lock:
            if election in self._queue:
                self._queue.remove(election)
            was_leader = self._leader is election
            if was_leader:
                self._leader = None
            self._elect_first()
            return was_leader

    def _elect_first(self) -> None:
        if self._queue and self._leader is None:
            self._leader = self._queue[0]
            self._leader._listen().elected(self._leader._confirmation())


class LocalElection:
    """One candidate's place in the queue of a `LocalBallot`."""

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

    # --- session events, for tests -----------------------------------------------------------------------------------

    def suspend(self) -> None:
        """Act as if the connection were lost."""
        self._listen().suspended()

    def resume(self) -> None:
        """Act as if the connection came back in time."""
        self._listen().confirmed(self._confirmation())

    def expire(self) -> None:
        """Act as if the session expired. A leader loses, and the next candidate is elected at once. A waiting candidate
        joins the end of the queue again."""
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
