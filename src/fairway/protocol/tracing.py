"""What is asked by whoever retraces the life of messages: Spark, and tools. Logs go over the wire as they are written
(`docs/formats.md`), so that a broker has no more work with a thousand events than with one."""

from __future__ import annotations

from fairway.protocol.messages import ControlMessage, Natural, Whence


class Retrace(ControlMessage, frozen=True):
    """Read the action log, from a position on. With `bytes_max` 0 it only says where things are."""

    whence: Whence
    value: Natural  # TIME: ms since 1970 UTC; SEQUENCE: a position in the log; otherwise 0
    bytes_max: Natural
    log_id: Natural | None = None  # refuse as FENCED if the log is another one by now
    wait_ms: Natural = 0  # where there is nothing yet: how long to wait for it


class Retraced(ControlMessage, frozen=True):
    """Bytes of one segment, committed ones; they may end within a record, and go on at `position` + their length."""

    data: bytes
    position: Natural  # of the first byte: past what was asked for where a segment begins there, or a part is missing
    segment_base: Natural  # of the segment that holds it; nothing holds the end of the log, where it is the position
    segment_end: Natural  # as far as it is committed
    first_position: Natural  # of what is still stored
    committed_end: Natural
    log_id: Natural
    epoch: Natural


class NumberedConsumer(ControlMessage, frozen=True):
    group: Natural
    consumer: Natural


class Names(ControlMessage, frozen=True):
    """Ask for the names of numbers that actions speak of."""

    subjects: list[Natural]
    groups: list[Natural]
    consumers: list[NumberedConsumer]


class Named(ControlMessage, frozen=True):
    """In the order asked. Empty: the broker does not know it any more, and the log does."""

    subjects: list[str]
    groups: list[str]
    consumers: list[str]


class Index(ControlMessage, frozen=True):
    """Read the entries of a subject's batches: what was stored when, without the messages."""

    subject: str
    whence: Whence
    value: Natural
    end: Natural | None  # stop before batches that begin at this sequence; None: at the committed end
    entries_max: Natural  # 0: none, only the numbers of the answer
    log_id: Natural | None = None
    is_dry: bool = False  # choose as ever, and send nothing: how far so many reach


class Indexed(ControlMessage, frozen=True):
    """The first entry may be of a batch that begins before the place asked for."""

    data: bytes  # entries as in an index file, one behind the other
    entries: Natural  # chosen
    next_sequence: Natural  # go on here
    first_sequence: Natural  # the first that retention has left
    committed_end: Natural
    log_id: Natural
    epoch: Natural
