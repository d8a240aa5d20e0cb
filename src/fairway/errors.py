"""The error families, and the fate each one has.

    RemoteProtocolError   the other side (or a file) broke the rules   → close the connection, reject the bytes
    Refused               a request that cannot be granted now         → answer with the code, keep the connection
    Unreachable           nobody answers at that address               → try another, or again later
    StorageFault          the disk or the data directory failed us     → stop the store, exit
    Misuse                our own caller broke the rules               → fix the program

`invariant` states what must hold whatever the input; it survives `python -O`.
"""

from __future__ import annotations

import enum


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
    """Why a request was refused. In every case nothing was appended."""

    BUSY = "busy"
    READ_ONLY = "read_only"
    TOO_LARGE = "too_large"
    BAD_NAME = "bad_name"
    NOT_MASTER = "not_master"
    SEQUENCE_CONFLICT = "sequence_conflict"
    SEQUENCE_GAP = "sequence_gap"
    UNKNOWN_PRODUCER = "unknown_producer"


class Refused(FairwayError):
    """The request cannot be granted; nothing was appended."""

    def __init__(self, code: Code, sentence: str, *, retry_after_ms: int | None = None) -> None:
        super().__init__(f"{code.name}: {sentence}")
        self.code = code
        self.sentence = sentence
        self.retry_after_ms = retry_after_ms


class Unreachable(FairwayError):
    """No connection to that address; the sentence names it and says why."""


class CannotListen(FairwayError):
    """The address cannot be listened on; the sentence names it and says why."""


class StorageFault(FairwayError):
    """The disk or the data directory failed; the sentence names the file and the remedy."""


class DiskFull(StorageFault):
    """No room. What the failed operation had written is gone from the file again."""


class NoSuchFile(StorageFault):
    """The file is not there."""


class DirectoryLocked(StorageFault):
    """Another process owns this data directory."""


class ReadOnlyDisk(StorageFault):
    """The file system or its permissions forbid writing."""


class WrongDirectory(StorageFault):
    """The directory holds something that is not, or not yet, readable as Fairway data."""


def invariant(holds: bool, sentence: str) -> None:
    if not holds:
        raise InvariantViolated(sentence)
