"""What a server that is one copy of several may answer now.

A master answers everything. A replica answers requests that only read. While a copy takes over or hands over, it
answers requests that only read, and those of replicas.
"""

from __future__ import annotations

from typing import Protocol

from fairway.errors import Code, FairwayError, Refused
from fairway.protocol import ControlMessage
from fairway.protocol.messages import Produce
from fairway.replication.leader import QUESTIONS, Leader
from fairway.replication.peer import NS_PER_MS, ReplicaQuestion
from fairway.replication.repairs import ReplicationCounters

_RETRY_AFTER_MS = 100  # about the time of a change of masters, where the old master hands over
_FOR_EVER_MS = 86_400_000  # a registry in the same process: its sessions end with the process


class CopyStatus:
    """The status of one copy. Its `CopyLifecycle` changes it."""

    def __init__(
        self,
        group: str,
        reads: tuple[type[ControlMessage], ...],
        questions: tuple[type[ControlMessage], ...] = QUESTIONS,
    ) -> None:
        """`reads`: requests that a replica answers, too. `questions`: requests of replicas. (A union written where it
        is needed costs 1 µs.)"""
        self.group = group
        self.leader: Leader | None = None
        self.is_open = False  # as a master, to all clients
        self.is_leaving = False  # it hands over
        self.master = ""  # HOST:PORT of the master, if that is another copy
        self.why = "it is starting"  # why no copy leads, as far as this copy knows
        self.tally = ReplicationCounters()
        self._reads = reads
        self._questions = questions

    @property
    def is_master(self) -> bool:
        return self.leader is not None and self.is_open

    def leads_ms(self, since_ns: int) -> int | None:
        """For how long after that moment no other copy can lead; None: without limit."""
        until_ns = 0 if self.leader is None else self.leader.certain_until_ns()
        leads_ms = max(until_ns - since_ns, 0) // NS_PER_MS
        return leads_ms if leads_ms < _FOR_EVER_MS else None

    def admit(self, message: ControlMessage) -> Leader | None:
        """`Refused` if this copy cannot answer the request; the leader if the request is one of a replica; None
        otherwise."""
        leader = self.leader
        is_question = isinstance(message, self._questions)
        if leader is None or not leader.is_certain():
            if not is_question and isinstance(message, self._reads):
                return None
            raise self._not_master()
        if is_question:
            return leader
        if not self.is_open:
            if isinstance(message, self._reads):
                return None
            what = "hands over to another" if self.is_leaving else "is about to lead"
            raise Refused(Code.NOT_MASTER, f"this copy of group {self.group} {what}", retry_after_ms=_RETRY_AFTER_MS)
        if isinstance(message, Produce):
            leader.check_writable(is_pinned=message.is_pinned)
        return None

    def _not_master(self) -> Refused:
        if self.master:
            sentence = f"this is a replica of group {self.group}: its master is at {self.master}"
        else:
            sentence = f"this copy of group {self.group} does not lead, and knows nobody who does: {self.why}"
        return Refused(Code.NOT_MASTER, sentence, retry_after_ms=_RETRY_AFTER_MS)


class ReplicaRequestHandler(Protocol):
    """Answers the requests of replicas."""

    def answer(self, question: ReplicaQuestion, /) -> None: ...


def answer(who: ReplicaRequestHandler, question: ReplicaQuestion) -> None:
    """Answer a replica's request at once, outside of any actor: the master's clients wait for the replica."""
    try:
        who.answer(question)
    except FairwayError:
        question.end()
        raise
