"""Offsets of a stream of events: in each broker group a position in the action log and for each subject the sequence
that comes next; and a position in each log of each group of delay servers, where they are asked.

    {"fairway.events": 1, "actions_log": …, "messages_log": …, "position": 4096, "subjects": {"orders": 17}}
    {"fairway.events": 2, "groups": {"g1": {"actions_log": …, "messages_log": …, "position": 4096, "subjects": {…}}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from fairway.errors import Misuse
from fairway.spark.event_delay import LogPlace, Places
from fairway.spark.event_delay import renamed as delay_renamed
from fairway.spark.offsets import ALONE, CLUSTER, renamed
from fairway.spark.places import BROKER_GROUP

NAME: Final = "fairway.events"
_DELAY: Final = "delay"


class LogsPlace(NamedTuple):
    """A place in the two logs of one broker group, and which logs they are."""

    actions_id: int
    messages_id: int
    position: int
    sequences: Mapping[str, int]

    @property
    def ids(self) -> tuple[int, int]:
        return self.actions_id, self.messages_id

    def to_json(self) -> dict[str, Any]:
        return {
            "actions_log": f"{self.actions_id:016x}",
            "messages_log": f"{self.messages_id:016x}",
            "position": self.position,
            "subjects": {name: self.sequences[name] for name in sorted(self.sequences)},
        }


class EventOffset(NamedTuple):
    """Which logs, and where in them."""

    groups: Mapping[str, LogsPlace]
    delay: Places = {}  # noqa: RUF012  (never changed)

    def to_json(self) -> dict[str, Any]:
        said: dict[str, Any]
        if set(self.groups) == {BROKER_GROUP}:
            said = {NAME: ALONE, **self.groups[BROKER_GROUP].to_json()}
        else:
            said = {NAME: CLUSTER, "groups": {name: self.groups[name].to_json() for name in sorted(self.groups)}}
        if self.delay:
            said[_DELAY] = {
                name: [f"{self.delay[name].log_id:016x}", self.delay[name].position] for name in sorted(self.delay)
            }
        return said


def parse(said: Mapping[str, Any]) -> EventOffset:
    """What `to_json` wrote, as it comes back from a checkpoint."""
    version = said.get(NAME)
    if version not in {ALONE, CLUSTER}:
        raise Misuse(
            f"the checkpoint has an offset of version {version}: this release reads {ALONE} and {CLUSTER}; "
            "upgrade fairway"
        )
    groups = {BROKER_GROUP: said} if version == ALONE else said["groups"]
    delay = {name: LogPlace(int(log, 16), int(position)) for name, (log, position) in said.get(_DELAY, {}).items()}
    return EventOffset({name: _parsed(each) for name, each in groups.items()}, delay)


def _parsed(said: Mapping[str, Any]) -> LogsPlace:
    ids = int(said["actions_log"], 16), int(said["messages_log"], 16)
    return LogsPlace(*ids, int(said["position"]), dict(said["subjects"]))


def mapped(offset: EventOffset, now: EventOffset, where: str) -> EventOffset:
    """The same, with the names that broker groups have now; it is the same one if it has the same logs."""
    ids = [{name: each.actions_id for name, each in of.groups.items()} for of in (offset, now)]
    names = renamed(ids[0], ids[1], where)
    groups = {names[name]: each for name, each in offset.groups.items()}
    return EventOffset(groups, delay_renamed(offset.delay, now.delay))


def between(begin: Places, end: Places, target: Places | None) -> dict[str, LogPlace]:
    """The end, but not before the beginning and not behind the target, which has nothing of a group that is newer. A
    group that is not there any more keeps its place: should it come back, it is not read once more."""
    aims = None if target is None else delay_renamed(target, end)
    found = dict(begin)
    for name, at in end.items():
        most = at.position if aims is None else min(at.position, _in(aims, name, at))
        found[name] = at._replace(position=max(_in(begin, name, at), most))
    return found


def _in(places: Places, name: str, log: LogPlace) -> int:
    """The position there, if it is one in the same log."""
    found = places.get(name)
    return found.position if found is not None and found.log_id == log.log_id else 0
