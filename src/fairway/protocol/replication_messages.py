"""Messages between a replica and its master. Logs travel as they are on disk: a copy is a byte-identical prefix.

The replica asks and the master answers. FOLLOW begins: the replica names itself and its epoch. COMPARE finds where two
histories part. Each REPLICATE is a credit and a confirmation at once. The master holds it until there is something to
send. The replica keeps several in flight, and sends the next as soon as it has synced what came.

A replica asks for its own rotten bytes with MEND. The master lists its own rotten bytes in its answers, and a replica
brings them with GIVE.

A delay server keeps old state only in its buckets, because its logs no longer hold it. A replica that lacks such state
asks for a SNAPSHOT: files of one instant, which the master keeps for it. The replica then FETCHes the files part by
part.
"""

from __future__ import annotations

from fairway.protocol.messages import ControlMessage, Natural

MESSAGES, ACTIONS = 0, 1  # the two logs, by number


class LogExtent(ControlMessage, frozen=True):
    """The extent of one log on the master."""

    log_id: Natural
    first_base: Natural  # the first segment that retention has left
    end: Natural  # synced
    committed_end: Natural


class Follow(ControlMessage, frozen=True):
    """A replica introduces itself. A copy that is not master refuses as NOT_MASTER. The master refuses as FENCED if the
    epochs differ, or if the copy's node in the registry has the verifier of another secret."""

    group: str
    epoch: Natural
    directory_id: Natural
    secret: bytes = b""  # of the replica's process, whose verifier is in the copy's node; or empty

    def __repr__(self) -> str:
        """Leave out the secret: a repr ends up in logs."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "secret")
        return f"Follow({shown}, secret=<{len(self.secret)} bytes>)"


class Followed(ControlMessage, frozen=True):
    epoch: Natural
    logs: list[LogExtent]  # messages, actions


class Compare(ControlMessage, frozen=True):
    """Ask which records begin at these positions of a log."""

    log: Natural
    positions: list[Natural]
    knows_rot: bool = False  # the answer may call a record rotten; otherwise the master refuses instead


class RecordMark(ControlMessage, frozen=True):
    """A record's epoch, and the checksum of its header, which covers its body's. All 0: no record begins there. Epoch 0
    and checksum 1: the record has rotted, so the master does not know."""

    epoch: Natural
    crc: Natural


class Compared(ControlMessage, frozen=True):
    marks: list[RecordMark]


class Replicate(ControlMessage, frozen=True):
    """Ask for what follows; everything below `ends` is synced on the replica."""

    group: str
    epoch: Natural
    directory_id: Natural
    number: Natural  # of this credit: credits count up from 1 after each FOLLOW
    ends: list[Natural]  # synced, of messages and actions
    starts: list[Natural] = []  # noqa: RUF012  (msgspec copies an empty default)  # in the first: send from here on
    wait_ms: Natural = 1_000


class Chunk(ControlMessage, frozen=True):
    """A stretch of one segment. Its bytes are attached: whole records, the segment's header before the first."""

    log: Natural
    base: Natural  # of the segment
    position: Natural


class Want(ControlMessage, frozen=True):
    """Bytes of a log that have rotted on the master."""

    log: Natural
    position: Natural
    size: Natural


class Replicated(ControlMessage, frozen=True):
    epoch: Natural
    chunks: list[Chunk]
    committed_ends: list[Natural]
    first_bases: list[Natural]  # the replica may delete segments before these
    wanted: list[Want] = []  # noqa: RUF012  # to be brought with GIVE


class Mend(ControlMessage, frozen=True):
    """Ask for bytes to repair a copy with: from one segment, below the committed end."""

    log: Natural
    position: Natural
    size: Natural


class Mended(ControlMessage, frozen=True):
    """The bytes are attached; fewer than asked for if the segment ends."""

    position: Natural


class Give(ControlMessage, frozen=True):
    """Bring what the master wants. The bytes are attached: whole records, a segment's header before the first."""

    epoch: Natural
    directory_id: Natural
    log: Natural
    position: Natural
    sentence: str = ""  # why this copy does not have the bytes; then nothing is attached


class Given(ControlMessage, frozen=True):
    """The master's log is whole again from the position up to here."""

    end: Natural


class TakeSnapshot(ControlMessage, frozen=True):
    """A replica lacks state that the logs no longer hold, and asks which files would make it whole."""

    group: str
    epoch: Natural
    directory_id: Natural


class SnapshotFile(ControlMessage, frozen=True):
    """One file of a snapshot, up to the size that it had."""

    name: str
    size: Natural


class Snapshot(ControlMessage, frozen=True):
    """The files that a power cut at one instant would have left on the master, except those that identify the copy."""

    epoch: Natural
    number: Natural
    files: list[SnapshotFile]


class Fetch(ControlMessage, frozen=True):
    """Ask for bytes of one file of a snapshot."""

    number: Natural  # of the snapshot
    file: Natural  # index in the snapshot's list
    position: Natural
    size: Natural


class Fetched(ControlMessage, frozen=True):
    """All requested bytes are attached."""

    position: Natural
    crc: Natural
