"""The requests of a client beside sending and consuming.

First come functions that check their arguments and return a `Command`: the request, with the type of its answer. The
blocking and the asyncio client ask it, through the `RequestQueue` of a line. `repeats` decides when to ask again:

    the connection was lost      if a second time does no harm; otherwise the caller gets `OutcomeUnknown`
    NOT_MASTER, DRAINING         always, at the next server
    BUSY of a delay server       when the server says: it has just been started and reads its files
    any other refusal            never: the caller decides
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Generic, Literal, TypeAlias, TypeVar

from fairway import limits
from fairway.batch import MessageId
from fairway.errors import Code, InvariantViolated, Misuse, OutcomeUnknown, Refused
from fairway.names import ConsumerName, GroupName, Subject
from fairway.protocol import codec
from fairway.protocol.admin_messages import (
    Configure,
    Configured,
    Depth,
    Describe,
    Described,
    Index,
    Lever,
    Names,
    Redrive,
    Redriven,
    Removed,
    RemoveGroup,
    RemoveSubject,
    Retrace,
    Scan,
    Scanned,
    Seek,
    Sought,
    Switch,
    Switched,
    Weigh,
)
from fairway.protocol.delay_messages import Cancel, DelayTally, PendingListed, Reschedule, Resend
from fairway.protocol.delivery import DecodedBatches, LazyBatch
from fairway.protocol.line import ELSEWHERE, Answer, ConnectionLost
from fairway.protocol.messages import FIRST_REQUEST_VERB, ControlMessage, Done, Whence
from fairway.protocol.request_queue import PendingRequest
from fairway.protocol.route_messages import Govern, Route
from fairway.runtime.buffers import Bytes

if TYPE_CHECKING:
    from fairway.groups import GroupConfig


SeekTarget: TypeAlias = "Literal['earliest', 'latest'] | int | datetime"  # a place in a subject; an int is a sequence

SCAN_BYTES = limits.MIB


def place_of(place: SeekTarget) -> tuple[Whence, int]:
    """The place in the protocol's form."""
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
    """A command for any request of the protocol."""
    verb = codec.REQUESTS.get(type(message))
    if verb is None or verb < FIRST_REQUEST_VERB:
        raise Misuse(f"a {type(message).__name__} is not a request")
    return Command(message, codec.ANSWERS[verb])


def describe(
    subject: str | None = None, group: str | None = None, *, depth: Depth = Depth.GROUPS, after: str = ""
) -> Command[Described]:
    """Describe the broker: one page. `after` is `next` of the page before."""
    subject = None if subject is None else str(Subject.parse_any(subject))
    group = None if group is None else str(GroupName.parse(group))
    return Command(Describe(depth, subject, group, after), Described)


def _checked(subject: str, group: str) -> tuple[str, str]:
    """The names of a subject, or of an inbox or the dead letters of a group, and of a group."""
    return str(Subject.parse_any(subject)), str(GroupName.parse(group))


def seek(subject: str, group: str, to: SeekTarget) -> Command[Sought]:
    return Command(Seek(*_checked(subject, group), *place_of(to)), Sought)


def switch(subject: str, group: str, consumer: str | None, *, is_on: bool) -> Command[Switched]:
    """Pause or resume a group, or one consumer of it."""
    lever = Lever.PAUSE_GROUP if consumer is None else Lever.PAUSE_CONSUMER
    name = "" if consumer is None else str(ConsumerName.parse(consumer))
    return Command(Switch(lever, is_on, *_checked(subject, group), name), Switched)


def go_on(subject: str, group: str, key: str | None) -> Command[Switched]:
    """Go on with a key that has halted, or with all such keys."""
    return Command(Switch(Lever.HALT_KEY, False, *_checked(subject, group), key=key), Switched)


def read_only(subject: str, *, is_on: bool) -> Command[Switched]:
    return Command(Switch(Lever.READ_ONLY, is_on, str(Subject.parse(subject))), Switched)


def weigh(subject: str, group: str, weight: float) -> Command[Done]:
    if not weight > 0:
        raise Misuse(f"a weight of {weight}: it is above 0, and 1 unless set")
    return Command(Weigh(*_checked(subject, group), float(weight)), Done)


def redrive(subject: str, group: str, ids: Sequence[str | MessageId] | None, rate_per_s: int = 0) -> Command[Redriven]:
    """Give dead letters back to their group: those with these ids, or all."""
    texts = None if ids is None else [str(each) for each in ids]
    return Command(Redrive(*_checked(subject, group), texts, rate_per_s), Redriven)


def remove_subject(subject: str, *, is_forced: bool) -> Command[Removed]:
    return Command(RemoveSubject(str(Subject.parse_joinable(subject)), is_forced), Removed)


def remove_group(subject: str, group: str, *, is_forced: bool, takes_dead: bool) -> Command[Removed]:
    subject, group = str(Subject.parse_joinable(subject)), str(GroupName.parse(group))
    return Command(RemoveGroup(subject, group, is_forced, takes_dead=takes_dead), Removed)


def configure(subject: str, group: str, config: GroupConfig | bytes, expected_version: int) -> Command[Configured]:
    """Compare and set a group's configuration. Bytes are MessagePack from `fairway.groups.config.encode`."""
    if not isinstance(config, bytes):
        from fairway.groups.config import encode  # most clients never need the package of groups

        config = encode(config)
    return Command(Configure(*_checked(subject, group), config, expected_version), Configured)


class Scanning:
    """Reads a subject without a group: ask `command()`, give the answer to `pages`, until `is_done`."""

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
        """The batches of an answer. The first may begin before the start, the last may reach past the end."""
        if self._end is None:
            self._end = scanned.committed_end
        self._log_id = scanned.log_id
        self._place = Whence.SEQUENCE, scanned.next_sequence
        self.is_done = scanned.next_sequence >= self._end
        for attached, data in zip(scanned.batches, attachments, strict=True):
            yield LazyBatch(data, attached.first_sequence, attached.appended_ms, self._decoded)


AnswerT = TypeVar("AnswerT", bound=ControlMessage)

# Asking one of these twice has the effect of asking once. CONFIGURE is not among them: the broker refuses the second
# because of the first.
ABOUT_DELAYED: frozenset[type[ControlMessage]] = frozenset({Cancel, Reschedule, PendingListed, DelayTally, Resend})
HARMLESS_TWICE: frozenset[type[ControlMessage]] = ABOUT_DELAYED | {
    Describe, Scan, Seek, Switch, Weigh, Redrive, Retrace, Index, Names, Route, Govern, RemoveSubject, RemoveGroup,
}  # fmt: skip


class Command(Generic[AnswerT]):
    """A request, and the type of its answer."""

    __slots__ = ("answer_type", "message")

    def __init__(self, message: ControlMessage, answer_type: type[AnswerT]) -> None:
        self.message = message
        self.answer_type = answer_type


class CommandRequest(PendingRequest, Generic[AnswerT]):
    """One command that was given to the line, and its outcome."""

    __slots__ = ("_answer_type",)

    def __init__(self, command: Command[AnswerT]) -> None:
        codec.encode(command.message)  # raises for the caller now, not later in the line's thread
        super().__init__(command.message)
        self._answer_type = command.answer_type

    def answer(self) -> tuple[AnswerT, Sequence[Bytes]]:
        """The answer and its attachments. Raises `Refused`, or `OutcomeUnknown` if the answer was lost."""
        outcome = self.outcome
        if isinstance(outcome, Answer) and isinstance(outcome.message, self._answer_type):
            return outcome.message, outcome.attachments
        if isinstance(outcome, Refused):
            raise outcome
        if isinstance(outcome, ConnectionLost):
            kind = type(self.message).__name__
            raise OutcomeUnknown(f"{kind} was asked and no answer came: {outcome.sentence}; look before asking again")
        raise InvariantViolated(f"{type(self.message).__name__} was answered with {outcome!r}")


def repeats(message: ControlMessage, outcome: Refused | ConnectionLost) -> bool:
    """Whether to ask a command again after this outcome."""
    if isinstance(outcome, ConnectionLost):
        return type(message) in HARMLESS_TWICE
    is_loading = outcome.code is Code.BUSY and bool(outcome.retry_after_ms) and type(message) in ABOUT_DELAYED
    return is_loading or outcome.code in ELSEWHERE
