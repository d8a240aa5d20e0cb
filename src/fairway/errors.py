"""The errors of Fairway, and what to do about each.

    RemoteProtocolError   the peer (or a file) broke the rules         → close the connection, reject the bytes
    Refused               a request that cannot be granted now         → answer with the code, keep the connection
    Unreachable           no server answers at that address            → try another, or again later
    NotSent, BufferFull   certainly not stored                         → send again at any time
    OutcomeUnknown        perhaps stored                               → ask, or send again if a duplicate does no harm
    Deposed               another leader has taken over                → roll back, hand over
    StorageFault          the disk or the data directory failed        → stop the store, exit
    Misuse                the caller broke the rules                   → fix the program

`invariant` states what must hold for every input. It also checks under `python -O`.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class FairwayError(Exception):
    """Base of all errors that Fairway raises on purpose."""


class RemoteProtocolError(FairwayError):
    """Bytes from a peer or a file do not follow the format."""


class Misuse(FairwayError, ValueError):
    """A call with arguments that can never be right; the sentence names the remedy."""


class BadName(Misuse):
    """A subject, group or consumer name outside the allowed alphabet or length."""


class InvariantViolated(FairwayError):
    """A bug in Fairway itself: an invariant does not hold."""


class Code(enum.Enum):
    """Why a request was refused. In every case nothing was appended and nothing changed.

    The value goes over the wire; `docs/internals/protocol.md` says what a client does about each code.
    """

    BUSY = "busy"
    """A bound is reached: too many requests, or too many bytes that are not yet on disk. Wait, then repeat the
    request."""
    READ_ONLY = "read_only"
    """The subject or the whole store takes no messages now: by command, or because the disk is nearly full."""
    TOO_LARGE = "too_large"
    """More bytes or messages than a bound allows. The same request will never be granted."""
    BAD_NAME = "bad_name"
    """A subject, group or consumer name outside the alphabet or length that `fairway.names` allows."""
    NOT_MASTER = "not_master"
    """This broker must not answer for the subject: ask the meta server for the master."""
    SEQUENCE_CONFLICT = "sequence_conflict"
    """Other bytes, or a later epoch of the same producer, have taken these producer sequences."""
    SEQUENCE_GAP = "sequence_gap"
    """A batch before this one has not arrived: send the earlier batch first."""
    UNKNOWN_PRODUCER = "unknown_producer"
    """The stream resumes, but the broker has forgotten it: nobody knows whether its last batches were stored."""
    FOREIGN_STREAM = "foreign_stream"
    """The stream belongs to a sender with another secret: begin a stream of your own."""

    BAD_REQUEST = "bad_request"
    """Well formed, but its values contradict one another or lie outside their range."""
    UNSUPPORTED = "unsupported"
    """This side does not know that protocol version, or that verb."""
    NO_SUCH_SUBJECT = "no_such_subject"
    """No message was ever sent to that subject here."""
    NO_SUCH_GROUP = "no_such_group"
    """No consumer has joined that group on that subject here, and no operator has configured it."""
    NOT_A_MEMBER = "not_a_member"
    """The consumer has not joined, or its lease ran out: join again."""
    STALE_CONFIG = "stale_config"
    """The group's configuration has another version than the request expects: read it, then decide."""
    FENCED = "fenced"
    """A newer owner has taken this place: another connection of the same consumer, a later epoch, another log."""
    EXPIRED = "expired"
    """The server could not answer the request in time, and did not begin it."""
    DAMAGED = "damaged"
    """The requested data is quarantined: stored, but unreadable on this copy."""
    DRAINING = "draining"
    """The peer has said goodbye and takes no new requests: connect again, or elsewhere."""
    TOO_MANY_CONNECTIONS = "too_many_connections"
    """The server has no room for another connection now."""
    PROTOCOL_ERROR = "protocol_error"
    """The bytes broke the rules of the protocol; the connection is closed."""
    OTHER = "other"
    """A code that this version does not know; the sentence says what happened."""


class StoredRange(NamedTuple):
    """A batch that a broker has stored in a producer stream."""

    first: int  # producer sequence
    messages: int
    crc: int

    @property
    def end(self) -> int:
        return self.first + self.messages


class Refused(FairwayError):
    """The request cannot be granted; nothing was appended and nothing changed.

    `stored`, of a SEQUENCE_CONFLICT: the batches that are stored at the places of the refused one; empty if there are
    none. None: the broker cannot tell, or is too old to say.
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
    """The messages were sent and no answer came: they may be stored, and sending them again may make duplicates."""


class BufferFull(FairwayError):
    """The producer's buffer has no room: messages come faster than the broker takes them. Wait, or choose a larger
    buffer.

    `messages` and `size_bytes` say how much room the call needed.
    """

    def __init__(self, sentence: str, messages: int, size_bytes: int) -> None:
        super().__init__(sentence)
        self.messages = messages
        self.size_bytes = size_bytes


class CircuitOpen(FairwayError):
    """The broker has failed again and again. Until a probe succeeds, sends fail at once, because of `fails_fast`."""


class Deposed(FairwayError):
    """A later leader is in office, or may be: no action of this leader is accepted any more. Roll back, and stop."""

    def __init__(self, career: str, token: int, why: str) -> None:
        super().__init__(f"token {token} of career {career} is deposed: {why}")
        self.career = career
        self.token = token


class CannotListen(FairwayError):
    """The server cannot listen on the address; the sentence names the address and the reason."""

    def __init__(self, sentence: str, *, is_taken: bool = False) -> None:
        super().__init__(sentence)
        self.is_taken = is_taken  # by another program


class StorageFault(FairwayError):
    """The disk or the data directory failed; the sentence names the file and the remedy."""


class DiskFull(StorageFault):
    """The disk has no room. The bytes of the failed operation are removed from the file again."""


class NoSuchFile(StorageFault):
    """The file does not exist."""


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
