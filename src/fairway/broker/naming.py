"""Names for the numbers in the action log, for those who read it.

A group and its members know their own. Of consumers that have left, the latest are remembered: whoever reads the end of
the log finds them here, and whoever reads further back finds them in the log, where each segment restates the names
that it needs (`storage.action_log`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from fairway import limits
from fairway.broker.groups import GroupHost, Groups
from fairway.errors import Code, Refused
from fairway.groups import GroupDecision, GroupEventKind
from fairway.protocol.tracing import Named, Names, NumberedConsumer
from fairway.storage.subjects import SubjectTable

LATEST_MAX = 10_000  # consumers that have joined, about 2 MB


class NameTable:
    """Who has which number, as far as it is known without reading the log."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._latest: OrderedDict[tuple[int, int], str] = OrderedDict()

    def note(self, decided: Iterable[tuple[GroupHost, GroupDecision]]) -> None:
        """Remember who joins."""
        for host, decision in decided:
            for event in decision.events:
                if event.kind is GroupEventKind.JOIN:
                    self._latest[host.id, event.consumer_id] = event.detail.decode()
        while len(self._latest) > LATEST_MAX:
            self._latest.popitem(last=False)

    def answer(self, asked: Names, subjects: SubjectTable) -> Named:
        count = len(asked.subjects) + len(asked.groups) + len(asked.consumers)
        if count > limits.NAMES_MAX:
            raise Refused(Code.BAD_REQUEST, f"{count} names asked for at once: at most {limits.NAMES_MAX}")
        return Named(
            [str(subjects.by_id(each).name) if each in subjects else "" for each in asked.subjects],
            [self._group(each) for each in asked.groups],
            [self._consumer(each) for each in asked.consumers],
        )

    def _group(self, group_id: int) -> str:
        host = self._groups.of_id(group_id)
        return "" if host is None else str(host.name)

    def _consumer(self, asked: NumberedConsumer) -> str:
        host = self._groups.of_id(asked.group)
        name = None if host is None else host.law.name_of(asked.consumer)
        return str(name) if name is not None else self._latest.get((asked.group, asked.consumer), "")
