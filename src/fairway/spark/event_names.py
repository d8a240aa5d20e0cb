"""Which subject, group and consumer a number in the action log stands for.

A number never gets another name, so a name is right wherever it was found: in the actions on the way, by asking the
broker, or further back in the log. What nobody can tell any more (its record is damaged) is shown as `#7`.
"""

from __future__ import annotations

import msgspec

from fairway.errors import RemoteProtocolError
from fairway.storage.action_log import ActionKind, walk
from fairway.storage.record import Record

_NAMING = frozenset({int(ActionKind.GROUP_CONFIG), int(ActionKind.JOIN)})


class Names:
    """The names that one task has learnt."""

    def __init__(self) -> None:
        self.subjects: dict[int, str] = {}
        self.groups: dict[int, str] = {}
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
                    self.groups[spot.group_id] = _group_name(detail)

    def subject(self, subject_id: int) -> str | None:
        return _shown(self.subjects.get(subject_id), subject_id)

    def group(self, group_id: int) -> str | None:
        return _shown(self.groups.get(group_id), group_id)

    def consumer(self, group_id: int, consumer_id: int) -> str | None:
        return _shown(self.consumers.get((group_id, consumer_id)), consumer_id)


def _group_name(detail: bytes) -> str:
    try:
        return msgspec.msgpack.decode(detail, type=tuple[str, bytes])[0]
    except msgspec.MsgspecError as error:
        raise RemoteProtocolError(f"a group's name cannot be read: {error}") from error


def _shown(name: str | None, number: int) -> str | None:
    if not number:
        return None
    return f"#{number}" if name is None else name
