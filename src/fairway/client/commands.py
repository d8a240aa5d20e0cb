"""What a client can ask of a broker beside sending and consuming: the same for both faces.

Each function checks its arguments and gives the request with the kind of its answer; the faces ask it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Literal, TypeAlias

from fairway import limits
from fairway.batch import MessageId
from fairway.client.asking import Command
from fairway.errors import Misuse
from fairway.names import ConsumerName, GroupName, Subject
from fairway.protocol import codec
from fairway.protocol.admin import (
    Configure,
    Configured,
    Depth,
    Describe,
    Described,
    Lever,
    Redrive,
    Redriven,
    Removed,
    RemoveGroup,
    RemoveSubject,
    Scan,
    Scanned,
    Seek,
    Sought,
    Switch,
    Switched,
    Weigh,
)
from fairway.protocol.messages import FIRST_REQUEST_VERB, ControlMessage, Done, Whence
from fairway.protocol.page import DecodedBatches, LazyBatch
from fairway.world.buffers import Bytes

if TYPE_CHECKING:
    from fairway.groups import GroupConfig

SeekTarget: TypeAlias = "Literal['earliest', 'latest'] | int | datetime"  # a place in a subject; a number is a sequence

SCAN_BYTES = limits.MIB


def place_of(place: SeekTarget) -> tuple[Whence, int]:
    """How the protocol says it."""
    if place == "earliest":
        return Whence.EARLIEST, 0
    if place == "latest":
        return Whence.LATEST, 0
    if isinstance(place, datetime):
        if place.tzinfo is None:
            raise Misuse(f"{place} says no time zone: write datetime(..., tzinfo=UTC)")
        return Whence.TIME, max(0, round(place.timestamp() * 1_000))
    if type(place) is int and place >= 0:
        return Whence.SEQUENCE, place
    raise Misuse(f"no place in a subject: {place!r}; use 'earliest', 'latest', a sequence or a datetime")


def any_of(message: ControlMessage) -> Command[ControlMessage]:
    """Whatever request the protocol knows."""
    verb = codec.REQUESTS.get(type(message))
    if verb is None or verb < FIRST_REQUEST_VERB:
        raise Misuse(f"a {type(message).__name__} is not a request")
    return Command(message, codec.ANSWERS[verb])


def describe(
    subject: str | None = None, group: str | None = None, *, depth: Depth = Depth.GROUPS, after: str = ""
) -> Command[Described]:
    """One page; `after` is `next` of the page before."""
    subject = None if subject is None else str(Subject.parse_any(subject))
    group = None if group is None else str(GroupName.parse(group))
    return Command(Describe(depth, subject, group, after), Described)


def seek(subject: str, group: str, to: SeekTarget) -> Command[Sought]:
    return Command(Seek(str(Subject.parse_any(subject)), str(GroupName.parse(group)), *place_of(to)), Sought)


def switch(subject: str, group: str, consumer: str | None, *, is_on: bool) -> Command[Switched]:
    """Pause or resume a group, or one consumer of it."""
    lever = Lever.PAUSE_GROUP if consumer is None else Lever.PAUSE_CONSUMER
    name = "" if consumer is None else str(ConsumerName.parse(consumer))
    return Command(Switch(lever, is_on, str(Subject.parse_any(subject)), str(GroupName.parse(group)), name), Switched)


def go_on(subject: str, group: str, key: str | None) -> Command[Switched]:
    """With a key that has halted, or with all that have."""
    subject, group = str(Subject.parse_any(subject)), str(GroupName.parse(group))
    return Command(Switch(Lever.HALT_KEY, False, subject, group, key=key), Switched)


def read_only(subject: str, *, is_on: bool) -> Command[Switched]:
    return Command(Switch(Lever.READ_ONLY, is_on, str(Subject.parse(subject))), Switched)


def weigh(subject: str, group: str, weight: float) -> Command[Done]:
    if not weight > 0:
        raise Misuse(f"a weight of {weight}: it is above 0, and 1 unless set")
    return Command(Weigh(str(Subject.parse_any(subject)), str(GroupName.parse(group)), float(weight)), Done)


def redrive(subject: str, group: str, ids: Sequence[str | MessageId] | None, rate_per_s: int = 0) -> Command[Redriven]:
    """Dead letters by id, or all of them."""
    texts = None if ids is None else [str(each) for each in ids]
    return Command(Redrive(str(Subject.parse_any(subject)), str(GroupName.parse(group)), texts, rate_per_s), Redriven)


def remove_subject(subject: str, *, is_forced: bool) -> Command[Removed]:
    return Command(RemoveSubject(str(Subject.parse_joinable(subject)), is_forced), Removed)


def remove_group(subject: str, group: str, *, is_forced: bool, takes_dead: bool) -> Command[Removed]:
    subject, group = str(Subject.parse_joinable(subject)), str(GroupName.parse(group))
    return Command(RemoveGroup(subject, group, is_forced, takes_dead=takes_dead), Removed)


def configure(subject: str, group: str, config: GroupConfig | bytes, expected_version: int) -> Command[Configured]:
    """Compare and set; as bytes it is MessagePack, as `fairway.groups.config.encode` makes it."""
    if not isinstance(config, bytes):
        from fairway.groups.config import encode  # who configures nothing need not load the law of groups

        config = encode(config)
    return Command(
        Configure(str(Subject.parse_any(subject)), str(GroupName.parse(group)), config, expected_version), Configured
    )


class Scanning:
    """A walk through a subject without a group: ask `command()`, give the answer to `pages`, until `is_done`."""

    def __init__(self, subject: str, start: SeekTarget, end: int | None, bytes_max: int) -> None:
        self._subject = str(Subject.parse_any(subject))
        self._place = place_of(start)
        self._end = end
        self._bytes_max = bytes_max
        self._log_id: int | None = None
        self._decoded = DecodedBatches()
        self.is_done = False

    def command(self) -> Command[Scanned]:
        return Command(Scan(self._subject, *self._place, self._end, self._bytes_max, self._log_id), Scanned)

    def pages(self, scanned: Scanned, attachments: Sequence[Bytes]) -> Iterator[LazyBatch]:
        """The batches that came; the first may begin before the place asked for, the last may reach past the end."""
        if self._end is None:
            self._end = scanned.committed_end
        self._log_id = scanned.log_id
        self._place = Whence.SEQUENCE, scanned.next_sequence
        self.is_done = scanned.next_sequence >= self._end
        for attached, data in zip(scanned.batches, attachments, strict=True):
            yield LazyBatch(data, attached.first_sequence, attached.appended_ms, self._decoded)
