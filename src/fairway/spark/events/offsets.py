"""Offsets of a stream of events.

An offset has, for each broker group, a position in the action log and the next sequence of each subject. If delayed
messages are wanted, it also has a position in each log of each group of delay servers.

    {"fairway.events": 1, "actions_log": …, "messages_log": …, "position": 4096, "subjects": {"orders": 17}}
    {"fairway.events": 2, "groups": {"g1": {"actions_log": …, "messages_log": …, "position": 4096, "subjects": {…}}}}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from fairway.errors import Misuse
from fairway.spark.events.delay_log import LogPlace, Places
from fairway.spark.events.delay_log import renamed as delay_renamed
from fairway.spark.server_groups import BROKER_GROUP
from fairway.spark.stream import ALONE, CLUSTER, renamed

NAME: Final = "fairway.events"
_DELAY: Final = "delay"


class LogsPlace(NamedTuple):
    """A position in the two logs of one broker group, and the ids of the logs."""

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
    """A position in the logs of all groups."""

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
    """An offset from the form that `to_json` wrote, as a checkpoint returns it."""
    version = said.get(NAME)
    if version not in {ALONE, CLUSTER}:
        raise Misuse(
            f"the checkpoint has an offset of version {version}: this release reads {ALONE} and {CLUSTER}; "
            "upgrade fairway"
        )
    groups = {BROKER_GROUP: said} if version == ALONE else said["groups"]
    delay = {name: LogPlace(int(log, 16), int(position)) for name, (log, position) in said.get(_DELAY, {}).items()}
    return EventOffset({name: _logs_place(each) for name, each in groups.items()}, delay)


def _logs_place(said: Mapping[str, Any]) -> LogsPlace:
    ids = int(said["actions_log"], 16), int(said["messages_log"], 16)
    return LogsPlace(*ids, int(said["position"]), dict(said["subjects"]))


def mapped(offset: EventOffset, now: EventOffset, where: str) -> EventOffset:
    """The offset with the present names of broker groups. Groups are matched by the ids of their logs."""
    ids = [{name: each.actions_id for name, each in of.groups.items()} for of in (offset, now)]
    names = renamed(ids[0], ids[1], where)
    groups = {names[name]: each for name, each in offset.groups.items()}
    return EventOffset(groups, delay_renamed(offset.delay, now.delay))


def between(begin: Places, end: Places, target: Places | None) -> dict[str, LogPlace]:
    """The end, but not before the beginning and not behind the target, which has nothing of a newer group. A group that
    no longer exists keeps its place, so that nothing is read twice if the group comes back."""
    aims = None if target is None else delay_renamed(target, end)
    found = dict(begin)
    for name, at in end.items():
        most = at.position if aims is None else min(at.position, _in(aims, name, at))
        found[name] = at._replace(position=max(_in(begin, name, at), most))
    return found


def _in(places: Places, name: str, log: LogPlace) -> int:
    """The position there, if it is in the same log; else 0."""
    found = places.get(name)
    return found.position if found is not None and found.log_id == log.log_id else 0
