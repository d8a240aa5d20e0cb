"""Reads the action log of a broker over the network: event names, the names behind numbers, and the records.

`event_of` and `detail_of` turn an action into words: one word for each thing that can happen to a message, a group or a
consumer. `docs/how-to/spark.md` explains the words.

`Resolver` finds the subject, group and consumer that a number stands for. A number never gets another name, so a name
is right wherever the resolver finds it: in the records on the way, by asking the broker, or further back in the log. A
number whose name is lost, because its record is damaged, is shown as `#7`.

`ActionLogReader` asks for bytes of the log and puts them together to records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, TypeVar

import msgspec

from fairway import group_events
from fairway.errors import Code, FairwayError, Refused, RemoteProtocolError
from fairway.group_events import ActionKind
from fairway.groups import config
from fairway.groups.config import Mode
from fairway.limits import NAMES_MAX, RETRACE_BYTES_MAX
from fairway.protocol import admin_messages
from fairway.protocol.admin_messages import Named, NumberedConsumer, Retrace, Retraced
from fairway.protocol.messages import Whence
from fairway.storage import record
from fairway.storage.action_log import walk
from fairway.storage.record import BadRecord, Record, RecordKind
from fairway.storage.segment import HEADER_BYTES as SEGMENT_HEADER_BYTES

PRODUCED: Final = "produced"
SOUGHT: Final = "sought"

# The words of actions whose kind is enough to choose one.
_PLAIN: Final[dict[int, str]] = {
    ActionKind.GROUP_CONFIG: "configured",
    ActionKind.JOIN: "joined",
    ActionKind.LEAVE: "left",
    ActionKind.EXPIRE: "expired",
    ActionKind.PULL: "pulled",
    ActionKind.ACK: "acked",
    ActionKind.DEAD: "dead",
    ActionKind.DECLINE: "declined",
    ActionKind.WEIGHT: "weighed",
    ActionKind.RATE: "paced",
    ActionKind.REMOVE: "removed",
    ActionKind.PARK: "parked",
    ActionKind.GO_ON: "gone on",
    ActionKind.VERIFIER: "secured",
}
_MAY_LOSE: Final = frozenset({ActionKind.ACK, ActionKind.DEAD})  # with LOST as their detail
_CURSOR: Final = {group_events.SOUGHT: SOUGHT, group_events.LOST: "lost"}


def event_of(kind: int, due_ms: int, lot: int, detail: bytes) -> str:
    """The word for an action."""
    plain = _PLAIN.get(kind)
    if plain is not None:
        return "lost" if detail == group_events.LOST and kind in _MAY_LOSE else plain
    match kind:
        case ActionKind.RETRY if due_ms == group_events.RELEASED:
            return "released"
        case ActionKind.RETRY if due_ms == group_events.REJECTED:
            return "rejected"
        case ActionKind.RETRY:
            return "doubted" if detail == group_events.UNSURE else "retried"
        case ActionKind.CURSOR:
            return _CURSOR.get(detail, "skipped")
        case ActionKind.PAUSE:
            return "paused" if lot else "resumed"
        case ActionKind.READ_ONLY:
            return "closed" if lot else "opened"
        case _:
            return f"kind {kind}"  # from a later release


def detail_of(kind: int, lot: int, detail: bytes) -> str | None:
    """The detail of an action for people: a reason, the paused consumer, a weight or rate, the mode of a group."""
    match kind:
        case ActionKind.GROUP_CONFIG:
            mode = named_config(detail)[1]
            return None if mode is None else mode.value
        case ActionKind.RETRY if detail != group_events.UNSURE:
            return detail.decode(errors="replace") or None
        case ActionKind.PAUSE:
            return detail.decode(errors="replace") or None
        case ActionKind.WEIGHT:
            return f"{lot / 1_000:g}"
        case ActionKind.RATE:
            return str(lot)
        case _:
            return None


def named_config(detail: bytes) -> tuple[str, Mode | None]:
    """The group's name and mode in a GROUP_CONFIG. The mode is None where a segment only restates the name."""
    try:
        name, packed = msgspec.msgpack.decode(detail, type=tuple[str, bytes])
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"a group's name cannot be read: {error}") from error
    return name, config.decode(packed).mode if packed else None


IdT = TypeVar("IdT")
AskNames = Callable[[admin_messages.Names], Named]

_NAMING = frozenset({int(ActionKind.GROUP_CONFIG), int(ActionKind.JOIN)})
_WITH_NAMES: Final = frozenset({int(RecordKind.ACTIONS), int(RecordKind.NAMES)})


class Ids(NamedTuple):
    """The numbers to find names for."""

    subjects: set[int]
    groups: set[int]
    consumers: set[tuple[int, int]]


class NameResolver:
    """The names that one reader has learnt, and the modes of groups, as far as the reader has met them."""

    def __init__(self) -> None:
        self.subjects: dict[int, str] = {}
        self.groups: dict[int, str] = {}
        self.modes: dict[int, Mode] = {}
        self.consumers: dict[tuple[int, int], str] = {}

    def learn(self, record: Record) -> None:
        """Learn the names in a record: of groups that were configured and consumers that joined."""
        body = record.body
        for action in walk(body):
            if action.kind in _NAMING:
                detail = body[action.detail_at : action.detail_at + action.detail_bytes]
                if action.kind == ActionKind.JOIN:
                    self.consumers[action.group_id, action.consumer_id] = detail.decode(errors="replace")
                else:
                    self.groups[action.group_id], mode = named_config(detail)
                    if mode is not None:
                        self.modes[action.group_id] = mode

    def subject(self, subject_id: int) -> str | None:
        return _shown(self.subjects.get(subject_id), subject_id)

    def group(self, group_id: int) -> str | None:
        return _shown(self.groups.get(group_id), group_id)

    def consumer(self, group_id: int, consumer_id: int) -> str | None:
        return _shown(self.consumers.get((group_id, consumer_id)), consumer_id)


class Resolver:
    """Finds names: in records on the way, from the broker, or in the log before the place where a reader begins."""

    def __init__(self, ask: AskNames, log: ActionLogReader, names: NameResolver, begin: int) -> None:
        self._ask_names = ask
        self._log = log
        self._names = names
        self._searched_from = begin
        self._is_done = False  # a search further back would find nothing new
        self._is_first = True

    def meet(self, found: Record) -> None:
        """Take the names from a record on the way."""
        if found.header.kind in _WITH_NAMES:
            self._names.learn(found)
        if self._is_first:
            self._is_done = found.header.kind == RecordKind.NAMES
            self._is_first = False

    def resolve(self, ids: Ids) -> None:
        names = self._names
        self._ask([each for each in sorted(ids.subjects) if each not in names.subjects], [], [])
        self._ask([], *self._missing(ids))
        while not self._is_done and any(self._missing(ids)):
            self._search_back()

    def _missing(self, ids: Ids) -> tuple[list[int], list[tuple[int, int]]]:
        names = self._names
        return (
            [each for each in sorted(ids.groups) if each not in names.groups],
            [each for each in sorted(ids.consumers) if each not in names.consumers],
        )

    def _ask(self, subjects: list[int], groups: list[int], consumers: list[tuple[int, int]]) -> None:
        for at in range(0, max(len(subjects), len(groups), len(consumers)), NAMES_MAX // 2):
            page = slice(at, at + NAMES_MAX // 2)
            pairs = consumers[page]
            asked = admin_messages.Names(subjects[page], groups[page], [NumberedConsumer(*each) for each in pairs])
            named = self._ask_names(asked)
            self._names.subjects |= _known(subjects[page], named.subjects)
            self._names.groups |= _known(groups[page], named.groups)
            self._names.consumers |= _known(pairs, named.consumers)

    def _search_back(self) -> None:
        """Learn the names in the segment before the part that was searched."""
        if not self._searched_from:
            self._is_done = True
            return
        end = self._searched_from
        found = self._log.look(Whence.SEQUENCE, end - 1)
        if found.segment_base >= end:
            self._is_done = True  # the earlier segment was removed
            return
        for each in self._log.records(found.segment_base, end):
            if each.header.kind in _WITH_NAMES:
                self._names.learn(each)
            self._is_done |= each.header.kind == RecordKind.NAMES
        self._searched_from = found.segment_base


def _known(ids: list[IdT], names: list[str]) -> dict[IdT, str]:
    return {each: name for each, name in zip(ids, names, strict=True) if name}


def _shown(name: str | None, number: int) -> str | None:
    if not number:
        return None
    return f"#{number}" if name is None else name


Answer = Callable[[], Retraced]  # waits for the answer
Ask = Callable[[Retrace], Answer]  # does not wait, so one answer is under way while the reader parses another


class ActionLogReader:
    """Reads the action log in order. Strict: missing or damaged parts are errors; otherwise the reader skips them."""

    def __init__(self, ask: Ask, log_id: int | None, *, is_strict: bool) -> None:
        self._ask = ask
        self._log_id = log_id
        self._is_strict = is_strict

    # --- errors; subclasses may choose other words --------------------------------------------------------------------

    def other_log(self) -> FairwayError:
        return FairwayError("the action log is another one than this reading began with: the broker has new data")

    def refused(self, refused: Refused) -> FairwayError:
        return FairwayError(f"the broker will not show its actions: {refused}")

    def cut_short(self, at: int, end: int) -> FairwayError:
        return FairwayError(f"the action log ends at {at}, and it was seen to reach to {end} before")

    def damaged(self, position: int, why: str) -> FairwayError:
        return FairwayError(f"the action log is damaged at position {position} ({why}): `fairway verify` shows more")

    # --- places -------------------------------------------------------------------------------------------------------

    def look(self, whence: Whence, value: int = 0) -> Retraced:
        """Ask for the positions around a place, without data."""
        return self._take(self._ask(Retrace(whence, value, 0, self._log_id)))

    def told_from_ms(self) -> int:
        """The time of the first record that the log still has; 0: the log is complete from the beginning."""
        log = self.look(Whence.EARLIEST)
        if log.first_position <= SEGMENT_HEADER_BYTES:  # still in the first segment
            return 0
        first = next(self.records(log.first_position, log.committed_end), None)
        return 0 if first is None else first.header.appended_ms

    def position_at(self, time_ms: int) -> int:
        """The position of the first record that was written at that time or later."""
        found = self.look(Whence.TIME, time_ms)
        for each in self.records(found.segment_base, found.segment_end):
            if each.header.appended_ms >= time_ms:
                return each.header.position
        return found.segment_end

    def boundary(self, position: int, end: int) -> int:
        """The first position from `position` on where a record begins; `end` if there is none before `end`."""
        at = position
        data, start = b"", position
        while at < end:
            found = self._take(self._page(at))
            if found.position != at:
                return min(found.position, end)  # a segment begins here
            if not found.data:
                break
            data += found.data
            offset = record.find_header(data, 0, start, found.log_id)
            if offset is not None:
                return min(start + offset, end)
            at = found.position + len(found.data)
            keep = min(len(data), record.HEADER_BYTES)
            data, start = data[len(data) - keep :], at - keep
        return end

    # --- records ------------------------------------------------------------------------------------------------------

    def records(self, begin: int, end: int) -> Iterator[Record]:
        """Yield the records from `begin` up to `end`. Both are positions where a record or a segment begins."""
        piecing: _Piecing | None = None
        at = begin
        answer: Answer | None = self._page(at) if begin < end else None
        while answer is not None:
            found = self._take(answer)
            if self._is_strict and found.committed_end < end:
                raise self.cut_short(found.committed_end, end)
            if piecing is None or found.position != at:
                self._check_jump(piecing, at, found)
                piecing = _Piecing(found.log_id, found.position, self._lose)
            is_stuck = found.position == at and not found.data
            at = found.position + len(found.data)
            answer = None if is_stuck or at >= min(end, found.committed_end) else self._page(at)
            for each in piecing.add(found.data):
                if each.header.position >= end:
                    return
                yield each
        if piecing is not None and piecing.rest_at < min(at, end):
            self._lose(piecing.rest_at, "cut short")

    def _page(self, position: int) -> Answer:
        return self._ask(Retrace(Whence.SEQUENCE, position, RETRACE_BYTES_MAX, self._log_id))

    def _take(self, answer: Answer) -> Retraced:
        try:
            return answer()
        except Refused as refused:
            raise (self.other_log() if refused.code is Code.FENCED else self.refused(refused)) from refused

    def _check_jump(self, piecing: _Piecing | None, asked: int, found: Retraced) -> None:
        if piecing is not None and piecing.rest_at < asked:
            self._lose(piecing.rest_at, "cut short")
        if found.position > asked and found.position - asked != SEGMENT_HEADER_BYTES:
            self._lose(asked, "missing")

    def _lose(self, position: int, why: str) -> None:
        if self._is_strict:
            raise self.damaged(position, why)


class _Piecing:
    """Puts records together from consecutive bytes."""

    def __init__(self, log_id: int, position: int, lose: Callable[[int, str], None]) -> None:
        self._log_id = log_id
        self._lose = lose  # called for damage; raises if the reader is strict
        self._data = b""
        self.rest_at = position  # position of the bytes that have not made a record yet

    def add(self, data: bytes) -> Iterator[Record]:
        self._data = data if not self._data else self._data + data
        at = 0
        while len(self._data) - at >= record.HEADER_BYTES:
            try:
                header = record.parse_header(self._data, at, self.rest_at + at, self._log_id)
                body_at = at + record.HEADER_BYTES
                if len(self._data) - body_at < header.body_bytes:
                    break
                body = self._data[body_at : body_at + header.body_bytes]
                record.check_body(header, body)
            except BadRecord as bad:
                at = self._step_over(at, bad)
            else:
                yield Record(header, body)
                at = body_at + header.body_bytes
        self._data = self._data[at:]
        self.rest_at += at

    def _step_over(self, at: int, bad: BadRecord) -> int:
        self._lose(self.rest_at + at, bad.why)
        found = record.find_header(self._data, at + record.ALIGNMENT, self.rest_at, self._log_id)
        if found is not None:
            return found
        end = len(self._data) - record.HEADER_BYTES + record.ALIGNMENT  # a header may begin after this
        return max(at + record.ALIGNMENT, end)
