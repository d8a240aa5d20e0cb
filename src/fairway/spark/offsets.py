"""Offsets of a stream: which logs, and for each subject the sequence that comes next.

    {"fairway": 1, "log": "9f3c…", "epoch": 4, "subjects": {"orders": 4200, "payments": 17}}

of one broker, and of a cluster, where each broker group has a log and sequences of its own,

    {"fairway": 2, "logs": {"g1": ["9f3c…", 4], "g2": ["08aa…", 1]}, "subjects": {"orders": {"g1": 4200, "g2": 17}}}

Spark compares offsets as text, so the same offset must always be written in the same way: keys sorted, and an idle
stream gives back the very offset that it was given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeVar

from fairway.errors import Misuse
from fairway.spark.brokers import LogId
from fairway.spark.places import BROKER_GROUP, SubjectPart

ALONE: Final = 1  # of one broker
CLUSTER: Final = 2

T = TypeVar("T")


class Offset(NamedTuple):
    """A place in the logs of broker groups."""

    logs: Mapping[str, LogId]  # by broker group
    sequences: Mapping[SubjectPart, int]

    def to_json(self) -> dict[str, Any]:
        if set(self.logs) != {BROKER_GROUP}:
            return self._of_cluster()
        log = self.logs[BROKER_GROUP]
        return {
            "fairway": ALONE,
            "log": f"{log.id:016x}",
            "epoch": log.epoch,
            "subjects": {part.subject: self.sequences[part] for part in sorted(self.sequences)},
        }

    def _of_cluster(self) -> dict[str, Any]:
        subjects: dict[str, dict[str, int]] = {}
        for part in sorted(self.sequences):
            subjects.setdefault(part.subject, {})[part.broker_group] = self.sequences[part]
        logs = {group: [f"{self.logs[group].id:016x}", self.logs[group].epoch] for group in sorted(self.logs)}
        return {"fairway": CLUSTER, "logs": logs, "subjects": subjects}


def parse(said: Mapping[str, Any]) -> Offset:
    """What `to_json` wrote, as it comes back from a checkpoint."""
    version = said.get("fairway")
    if version == ALONE:
        log = LogId(int(said["log"], 16), int(said["epoch"]))
        return Offset({BROKER_GROUP: log}, {SubjectPart(name): at for name, at in said["subjects"].items()})
    if version != CLUSTER:
        raise Misuse(
            f"the checkpoint has an offset of version {version}: this release reads {ALONE} and {CLUSTER}; "
            "upgrade fairway"
        )
    logs = {group: LogId(int(log, 16), int(epoch)) for group, (log, epoch) in said["logs"].items()}
    sequences = {SubjectPart(name, group): at for name, of in said["subjects"].items() for group, at in of.items()}
    return Offset(logs, sequences)


def mapped(offset: Offset, logs: Mapping[str, LogId], where: str) -> Offset:
    """An offset of a broker that was named by its address, in terms of the cluster that it belongs to by now; or the
    other way round. `logs` are those that there are."""
    names = renamed({group: log.id for group, log in offset.logs.items()}, _ids(logs), where)
    return Offset(
        {names[group]: log for group, log in offset.logs.items()},
        {SubjectPart(subject, names[group]): at for (subject, group), at in offset.sequences.items()},
    )


def renamed(then: Mapping[str, int], now: Mapping[str, int], where: str) -> dict[str, str]:
    """What the broker groups of a checkpoint are called now, given the ids of logs by their groups. It is the same
    broker group if it is the same log; `Misuse` where there is none."""
    if (BROKER_GROUP in then) == (BROKER_GROUP in now):
        return {group: group for group in then}
    by_log = {log_id: group for group, log_id in now.items()}
    lost = [group for group, log_id in then.items() if log_id not in by_log]
    if not lost:
        return {group: by_log[log_id] for group, log_id in then.items()}
    if BROKER_GROUP in then:
        raise Misuse(
            f"the checkpoint is of a broker that was named by its address, and no broker group of {where} that holds "
            f"these subjects has its log ({then[BROKER_GROUP]:016x}): go on with that address, or begin with a new "
            "checkpoint"
        )
    raise Misuse(
        f"the checkpoint is of a cluster, and {where} does not have the log of its broker group {', '.join(lost)}: "
        "go on with meta://HOST:PORT, or begin with a new checkpoint"
    )


def _ids(logs: Mapping[str, LogId]) -> dict[str, int]:
    return {group: log.id for group, log in logs.items()}


def shares(backlogs: Mapping[T, int], total: int) -> dict[T, int]:
    """Divide `total` among subjects: each gets what it has or an equal share of what is left, the smallest first.

    Where there is less than one for each, those with most waiting are served: nobody is passed over for ever.
    """
    wanted = {name: backlog for name, backlog in backlogs.items() if backlog > 0}
    if total < len(wanted):
        most = sorted(wanted, key=lambda name: (-wanted[name], str(name)))[:total]
        return dict.fromkeys(most, 1)
    given: dict[T, int] = {}
    for place, name in enumerate(sorted(wanted, key=lambda name: (wanted[name], str(name)))):
        given[name] = min(wanted[name], total // (len(wanted) - place))
        total -= given[name]
    return given
