"""What a replica asks of its master. Logs go over the wire as they are on disk: a copy is a byte-identical prefix.

A replica asks, the master answers. FOLLOW begins: who I am, and under which epoch. COMPARE finds where two histories
part. Then each REPLICATE is a credit and a confirmation at once: the master keeps it until there is something to
send, and the replica, which has several of them out, sends the next one as soon as it has synced what came.

What has rotted on a replica it asks for with MEND. What has rotted on the master it says it wants, in its answers, and
a replica brings it with GIVE.

A delay server's logs are not all there is to it: what they said long ago is in its buckets alone. A replica that lacks
that asks for a SNAPSHOT, files of one instant that the master keeps for it, and FETCHes them part by part.
"""

from __future__ import annotations

from fairway.protocol.messages import ControlMessage, Natural

MESSAGES, ACTIONS = 0, 1  # the two logs, by number


class LogExtent(ControlMessage, frozen=True):
    """What there is of one log."""

    log_id: Natural
    first_base: Natural  # the first segment that retention has left
    end: Natural  # synced
    committed_end: Natural


class Follow(ControlMessage, frozen=True):
    """A replica introduces itself. Refused as NOT_MASTER by whoever does not lead, as FENCED where epochs differ or the
    copy's node in the registry has the verifier of another secret."""

    group: str
    epoch: Natural
    directory_id: Natural
    secret: bytes = b""  # of the process that runs the copy; its verifier stands in the copy's node. Or none

    def __repr__(self) -> str:
        """Without the secret: a repr ends up in logs."""
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name != "secret")
        return f"Follow({shown}, secret=<{len(self.secret)} bytes>)"


class Followed(ControlMessage, frozen=True):
    epoch: Natural
    logs: list[LogExtent]  # messages, actions


class Compare(ControlMessage, frozen=True):
    """Which records begin at these positions of a log?"""

    log: Natural
    positions: list[Natural]
    knows_rot: bool = False  # an answer may say that nobody knows; else the question is refused


class RecordMark(ControlMessage, frozen=True):
    """A record's epoch, and the checksum of its header, which covers its body's; all 0: none begins there. Epoch 0 and
    checksum 1: it has rotted, and nobody knows."""

    epoch: Natural
    crc: Natural


class Compared(ControlMessage, frozen=True):
    marks: list[RecordMark]


class Replicate(ControlMessage, frozen=True):
    """Everything below these ends is synced here; send what follows."""

    group: str
    epoch: Natural
    directory_id: Natural
    number: Natural  # of this credit: they count up from 1 after each FOLLOW
    ends: list[Natural]  # synced, of messages and actions
    starts: list[Natural] = []  # noqa: RUF012  (msgspec copies an empty default)  # in the first: send from here on
    wait_ms: Natural = 1_000


class Chunk(ControlMessage, frozen=True):
    """A stretch of one segment; its bytes are attached: whole records, the segment's header before the first."""

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
    first_bases: list[Natural]  # what retention has left: the replica may let go of what lies before
    wanted: list[Want] = []  # noqa: RUF012  # to be brought with GIVE


class Mend(ControlMessage, frozen=True):
    """Bytes of a log, to repair a copy with: from one segment, below the committed end."""

    log: Natural
    position: Natural
    size: Natural


class Mended(ControlMessage, frozen=True):
    """The bytes are attached; fewer than asked for where the segment ends."""

    position: Natural


class Give(ControlMessage, frozen=True):
    """What the master wants; its bytes are attached: whole records, a segment's header before the first."""

    epoch: Natural
    directory_id: Natural
    log: Natural
    position: Natural
    sentence: str = ""  # why this copy has none of it; then nothing is attached


class Given(ControlMessage, frozen=True):
    """The master has everything whole again from the position up to here."""

    end: Natural


class TakeSnapshot(ControlMessage, frozen=True):
    """A replica lacks what the logs no longer have: which files would make it whole?"""

    group: str
    epoch: Natural
    directory_id: Natural


class SnapshotFile(ControlMessage, frozen=True):
    """One file, up to the size that it had."""

    name: str
    size: Natural


class Snapshot(ControlMessage, frozen=True):
    """What a power cut at one instant would have left on the master, but for what names it."""

    epoch: Natural
    number: Natural
    files: list[SnapshotFile]


class Fetch(ControlMessage, frozen=True):
    """Bytes of one file of a snapshot."""

    number: Natural  # of the snapshot
    file: Natural  # its place in the list
    position: Natural
    size: Natural


class Fetched(ControlMessage, frozen=True):
    """The bytes are attached, all that were asked for."""

    position: Natural
    crc: Natural
