"""Offsets of a stream of events: a position in each log that it reads, and for each subject the sequence that comes
next."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from fairway.errors import Misuse
from fairway.spark.event_delay import LogPlace, Places

NAME: Final = "fairway.events"
_VERSION: Final = 1
_DELAY: Final = "delay"


class EventOffset(NamedTuple):
    """Which logs, and where in them."""

    actions_id: int
    messages_id: int
    position: int
    sequences: Mapping[str, int]
    delay: Places = {}  # noqa: RUF012  (never changed)

    def to_json(self) -> dict[str, Any]:
        said = {
            NAME: _VERSION,
            "actions_log": f"{self.actions_id:016x}",
            "messages_log": f"{self.messages_id:016x}",
            "position": self.position,
            "subjects": {name: self.sequences[name] for name in sorted(self.sequences)},
        }
        if self.delay:
            said[_DELAY] = {
                name: [f"{self.delay[name].log_id:016x}", self.delay[name].position] for name in sorted(self.delay)
            }
        return said


def parse(said: Mapping[str, Any]) -> EventOffset:
    """What `to_json` wrote, as it comes back from a checkpoint."""
    if said.get(NAME) != _VERSION:
        raise Misuse(
            f"the checkpoint has an offset of version {said.get(NAME)}: this release reads {_VERSION}; upgrade fairway"
        )
    return EventOffset(
        int(said["actions_log"], 16),
        int(said["messages_log"], 16),
        int(said["position"]),
        dict(said["subjects"]),
        {name: LogPlace(int(log, 16), int(position)) for name, (log, position) in said.get(_DELAY, {}).items()},
    )


def between(begin: Places, end: Places, target: Places) -> dict[str, LogPlace]:
    """The end, but not before the beginning and not behind the target."""
    return {
        name: at._replace(position=max(_in(begin, name, at, 0), min(at.position, _in(target, name, at, at.position))))
        for name, at in end.items()
    }


def _in(places: Places, name: str, log: LogPlace, otherwise: int) -> int:
    """The position there, if it is one in the same log."""
    found = places.get(name)
    return found.position if found is not None and found.log_id == log.log_id else otherwise
