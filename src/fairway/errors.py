"""The error families, and the fate each one has.

    RemoteProtocolError   the other side (or a file) broke the rules   → close the connection, reject the bytes
    Refused               a request that cannot be granted now         → answer with the code, keep the connection
    Unreachable           nobody answers at that address               → try another, or again later
    NotSent, BufferFull   certainly not stored                         → send again when you like
    OutcomeUnknown        perhaps stored                               → ask, or send again if twice does no harm
    Deposed               another leader has taken over                → roll back, hand over
    StorageFault          the disk or the data directory failed us     → stop the store, exit
    Misuse                our own caller broke the rules               → fix the program

`invariant` states what must hold whatever the input; it survives `python -O`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class FairwayError(Exception):
    """Base of everything that Fairway raises on purpose."""


class RemoteProtocolError(FairwayError):
    """Bytes that came from elsewhere do not follow the format."""


class Misuse(FairwayError, ValueError):
    """A call with arguments that can never be right; the sentence names the remedy."""


class BadName(Misuse):
    """A subject, group or consumer name outside the allowed alphabet or length."""


class InvariantViolated(FairwayError):
    """A bug in Fairway itself: what must always hold did not."""


class Code(enum.Enum):
    """Why a request was refused. In every case nothing was appended and nothing changed.

    The value is what goes over the wire; `docs/protocol.md` says what a client does about each.
    """

    BUSY = "busy"
    """A bound is reached: too many requests, or too much that is not yet on disk. Wait, then send the same again."""
    READ_ONLY = "read_only"
    """The subject or the whole store takes no messages now: by command, or because the disk is nearly full."""
    TOO_LARGE = "too_large"
    """More bytes or messages than a bound allows. The same request will never be granted."""
    BAD_NAME = "bad_name"
    """A subject, group or consumer name outside the alphabet or length that `fairway.names` allows."""
    NOT_MASTER = "not_master"
    """This broker may not answer for the subject: ask the meta server who does."""
    SEQUENCE_CONFLICT = "sequence_conflict"
    """These producer sequences are taken by other bytes, or by a later epoch of the same producer."""
    SEQUENCE_GAP = "sequence_gap"
    """A batch before this one has not arrived: send that one first."""
    UNKNOWN_PRODUCER = "unknown_producer"
    """The stream resumes but is not remembered: whether its last batches were stored cannot be said."""
    FOREIGN_STREAM = "foreign_stream"
    """The stream belongs to a sender with another secret: what this one sends goes into a stream of its own."""

    BAD_REQUEST = "bad_request"
    """Well formed, but its values contradict one another or lie outside their range."""
    UNSUPPORTED = "unsupported"
    """This side does not speak that protocol version, or does not know that verb."""
    NO_SUCH_SUBJECT = "no_such_subject"
    """Nothing was ever produced to it here."""
    NO_SUCH_GROUP = "no_such_group"
    """Nobody has joined or configured that group on that subject here."""
    NOT_A_MEMBER = "not_a_member"
    """The consumer has not joined, or its lease ran out: join again."""
    STALE_CONFIG = "stale_config"
    """The group's configuration has another version than the one that was expected: read it, then decide."""
    FENCED = "fenced"
    """Somebody newer has taken this place: another connection of the same consumer, a later epoch, another log."""
    EXPIRED = "expired"
    """The request could not be answered before its time was up. It was not begun."""
    DAMAGED = "damaged"
    """What was asked for is quarantined: stored, but unreadable on this copy."""
    DRAINING = "draining"
    """The other side has said goodbye and takes no new requests: connect again, or elsewhere."""
    TOO_MANY_CONNECTIONS = "too_many_connections"
    """The server has no place for one more connection now."""
    PROTOCOL_ERROR = "protocol_error"
    """The bytes broke the rules of the protocol; the connection is closed."""
    OTHER = "other"
    """A code that this version does not know; the sentence says what happened."""


class StoredRange(NamedTuple):
    """A batch that a broker has stored in some places of a producer stream."""

    first: int  # producer sequence
    messages: int
    crc: int

    @property
    def end(self) -> int:
        return self.first + self.messages


class Refused(FairwayError):
    """The request cannot be granted; nothing was appended and nothing changed.

    `stored`, of a SEQUENCE_CONFLICT: the batches that stand in the places of the refused one, none where nothing does.
    None: the broker cannot tell, or is too old to say.
    """

    def __init__(
        self,
        code: Code,
        sentence: str,
        *,
        retry_after_ms: int | None = None,
        stored: tuple[StoredRange, ...] | None = None,
    ) -> None:
        super().__init__(f"{code.name}: {sentence}")
        self.code = code
        self.sentence = sentence
        self.retry_after_ms = retry_after_ms
        self.stored = stored


class Unreachable(FairwayError):
    """No connection to that address; the sentence names it and says why."""


class NotSent(FairwayError):
    """The messages were given up and are certainly not stored: sending them again makes no duplicate."""


class OutcomeUnknown(FairwayError):
    """The messages were sent and no answer came: they may or may not be stored, and once more may make it twice."""


class BufferFull(FairwayError):
    """The producer's buffer has no room: messages come faster than the broker takes them. Wait, or make it larger.

    `messages` and `size_bytes` say how much room would have been needed.
    """

    def __init__(self, sentence: str, messages: int, size_bytes: int) -> None:
        super().__init__(sentence)
        self.messages = messages
        self.size_bytes = size_bytes


class CircuitOpen(FairwayError):
    """The broker has failed again and again; until a probe succeeds, sends fail at once, as was chosen."""


class Deposed(FairwayError):
    """A later leader rules, or may: nothing that this one does is accepted any more. Roll back, and stop."""

    def __init__(self, career: str, token: int, why: str) -> None:
        super().__init__(f"token {token} of career {career} is deposed: {why}")
        self.career = career
        self.token = token


class CannotListen(FairwayError):
    """The address cannot be listened on; the sentence names it and says why."""

    def __init__(self, sentence: str, *, is_taken: bool = False) -> None:
        super().__init__(sentence)
        self.is_taken = is_taken  # by another program


class StorageFault(FairwayError):
    """The disk or the data directory failed; the sentence names the file and the remedy."""


class DiskFull(StorageFault):
    """No room. What the failed operation had written is gone from the file again."""


class NoSuchFile(StorageFault):
    """The file is not there."""


class DirectoryLocked(StorageFault):
    """Another process owns this data directory."""


class DirectoryMoved(StorageFault):
    """The data directory's path no longer leads to the directory that this process locked."""


class ReadOnlyDisk(StorageFault):
    """The file system or its permissions forbid writing."""


class WrongDirectory(StorageFault):
    """The directory holds something that is not, or not yet, readable as Fairway data."""


def invariant(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvariantViolated(sentence)
