"""What a replica asks of its master. Logs go over the wire as they are on disk: a copy is a byte-identical prefix.

A replica asks, the master answers. FOLLOW begins: who I am, and under which epoch. COMPARE finds where two histories
part. Then each REPLICATE is a credit and a confirmation at once: the master keeps it until there is something to
send, and the replica, which has several of them out, sends the next one as soon as it has synced what came.
"""

from __future__ import annotations

from fairway.protocol.messages import Message, Natural

MESSAGES, ACTIONS = 0, 1  # the two logs, by number


class Extent(Message, frozen=True):
    """What there is of one log."""

    log_id: Natural
    first_base: Natural  # the first segment that retention has left
    end: Natural  # synced
    committed_end: Natural


class Follow(Message, frozen=True):
    """A replica introduces itself. Refused as NOT_MASTER by whoever does not lead, as FENCED where epochs differ."""

    group: str
    epoch: Natural
    directory_id: Natural


class Followed(Message, frozen=True):
    epoch: Natural
    logs: list[Extent]  # messages, actions


class Compare(Message, frozen=True):
    """Which records begin at these positions of a log?"""

    log: Natural
    positions: list[Natural]


class Mark(Message, frozen=True):
    """A record's epoch, and the checksum of its header, which covers its body's; all 0: none begins there."""

    epoch: Natural
    crc: Natural


class Compared(Message, frozen=True):
    marks: list[Mark]


class Replicate(Message, frozen=True):
    """Everything below these ends is synced here; send what follows."""

    group: str
    epoch: Natural
    directory_id: Natural
    number: Natural  # of this credit: they count up from 1 after each FOLLOW
    ends: list[Natural]  # synced, of messages and actions
    starts: list[Natural] = []  # noqa: RUF012  (msgspec copies an empty default)  # in the first: send from here on
    wait_ms: Natural = 1_000


class Chunk(Message, frozen=True):
    """A stretch of one segment; its bytes are attached: whole records, the segment's header before the first."""

    log: Natural
    base: Natural  # of the segment
    position: Natural


class Replicated(Message, frozen=True):
    epoch: Natural
    chunks: list[Chunk]
    committed_ends: list[Natural]
    first_bases: list[Natural]  # what retention has left: the replica may let go of what lies before


class Mend(Message, frozen=True):
    """Bytes of a log, to repair a copy with: from one segment, below the committed end."""

    log: Natural
    position: Natural
    size: Natural


class Mended(Message, frozen=True):
    """The bytes are attached; fewer than asked for where the segment ends."""

    position: Natural
