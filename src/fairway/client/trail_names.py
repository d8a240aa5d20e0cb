"""Which subject, group and consumer a number in the action log stands for.

A number never gets another name, so a name is right wherever it was found: in the actions on the way, by asking the
broker, or further back in the log. What nobody can tell any more (its record is damaged) is shown as `#7`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple, TypeVar

from fairway.client.happenings import named_config
from fairway.client.trail import ActionLogReader
from fairway.groups.config import Mode
from fairway.limits import NAMES_MAX
from fairway.protocol import tracing
from fairway.protocol.messages import Whence
from fairway.protocol.tracing import Named, NumberedConsumer
from fairway.storage.action_log import ActionKind, walk
from fairway.storage.record import Record, RecordKind

IdT = TypeVar("IdT")
AskNames = Callable[[tracing.Names], Named]

_NAMING = frozenset({int(ActionKind.GROUP_CONFIG), int(ActionKind.JOIN)})
_WITH_NAMES: Final = frozenset({int(RecordKind.ACTIONS), int(RecordKind.NAMES)})


class Ids(NamedTuple):
    """Numbers that somebody wants names for."""

    subjects: set[int]
    groups: set[int]
    consumers: set[tuple[int, int]]


class NameResolver:
    """The names that one reader has learnt, and how each group is served, as far as it has met that."""

    def __init__(self) -> None:
        self.subjects: dict[int, str] = {}
        self.groups: dict[int, str] = {}
        self.modes: dict[int, Mode] = {}
        self.consumers: dict[tuple[int, int], str] = {}

    def learn(self, record: Record) -> None:
        """From the groups that were configured and the consumers that joined."""
        body = record.body
        for spot in walk(body):
            if spot.kind in _NAMING:
                detail = body[spot.detail_at : spot.detail_at + spot.detail_bytes]
                if spot.kind == ActionKind.JOIN:
                    self.consumers[spot.group_id, spot.consumer_id] = detail.decode(errors="replace")
                else:
                    self.groups[spot.group_id], mode = named_config(detail)
                    if mode is not None:
                        self.modes[spot.group_id] = mode

    def subject(self, subject_id: int) -> str | None:
        return _shown(self.subjects.get(subject_id), subject_id)

    def group(self, group_id: int) -> str | None:
        return _shown(self.groups.get(group_id), group_id)

    def consumer(self, group_id: int, consumer_id: int) -> str | None:
        return _shown(self.consumers.get((group_id, consumer_id)), consumer_id)


class Resolver:
    """Finds names: on the way, from the broker, or in the log before the place where a reader begins."""

    def __init__(self, ask: AskNames, trail: ActionLogReader, names: NameResolver, begin: int) -> None:
        self._ask_names = ask
        self._trail = trail
        self._names = names
        self._searched_from = begin
        self._is_done = False  # nothing further back can be of use
        self._is_first = True

    def meet(self, found: Record) -> None:
        """A record on the way."""
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
            asked = tracing.Names(subjects[page], groups[page], [NumberedConsumer(*each) for each in pairs])
            named = self._ask_names(asked)
            self._names.subjects |= _known(subjects[page], named.subjects)
            self._names.groups |= _known(groups[page], named.groups)
            self._names.consumers |= _known(pairs, named.consumers)

    def _search_back(self) -> None:
        """Learn the names in the segment before what is known, or in what is left of it."""
        if not self._searched_from:
            self._is_done = True
            return
        end = self._searched_from
        found = self._trail.look(Whence.SEQUENCE, end - 1)
        if found.segment_base >= end:
            self._is_done = True  # the segment before is gone
            return
        for each in self._trail.records(found.segment_base, end):
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
