"""Another master, by hand: which copy may lead, and what the group's node says from then on.

A copy that is in sync takes over without a loss: the master is deposed, steps down, and follows. One that is not may
lack messages that were acknowledged; that is done only where it is said that they may go.
"""

from __future__ import annotations

from collections.abc import Mapping

from fairway.errors import FairwayError
from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.registry.port import Registry
from fairway.replication import law
from fairway.replication.node import GroupNode, living

_TRIES = 10


class NotPromoted(FairwayError):
    """It cannot be done, or not without a loss; the sentence says what to do instead."""


async def change_master(registry: Registry, group: str, to: str | None, *, accepts_data_loss: bool = False) -> str:
    """Write the new master into the group's node; the sentence says what was done."""
    node = GroupNode(registry, group)
    for _ in range(_TRIES):
        record = await node.read(fresh=True)
        alive = await living(registry, group)
        if record is None:
            record = _made_anew(group, alive, to, accepts_data_loss=accepts_data_loss)
            chosen = record.master
        else:
            chosen = choose(group, record, alive, to, accepts_data_loss=accepts_data_loss)
            record = law.promoted(record, alive, chosen, accepts_data_loss=accepts_data_loss)
        if await node.change(record):
            return f"{chosen} leads group {group} from now on, under epoch {record.epoch} or a later one"
    raise NotPromoted(f"the node of group {group} changes all the time: try again")


def choose(
    group: str, record: GroupRecord, alive: Mapping[str, RegisteredCopy], to: str | None, *, accepts_data_loss: bool
) -> str:
    """The copy that is to lead."""
    fit = [each for each in record.in_sync if each in alive and each != record.master]
    if to is None and not fit:
        if not accepts_data_loss:
            raise NotPromoted(
                f"no copy of group {group} that lives and does not lead is in sync (in sync: "
                f"{', '.join(record.in_sync)}; alive: {', '.join(sorted(alive)) or 'none'}): start one of them, or "
                "take another with --accept-data-loss and lose what it lacks"
            )
        fit = sorted((each for each in alive if each != record.master), key=lambda each: sum(alive[each].ends))[-1:]
    chosen = to or (fit[0] if fit else "")
    if chosen not in alive:
        raise NotPromoted(f"copy {chosen or 'to take'} of group {group} does not live: start it first")
    if chosen == record.master and chosen in record.in_sync and not accepts_data_loss:
        raise NotPromoted(f"{chosen} leads group {group} already")
    if chosen not in record.in_sync and not accepts_data_loss:
        raise NotPromoted(
            f"{chosen} is not in sync, and may lack what was acknowledged: wait until it has caught up, or lose that "
            "with --accept-data-loss"
        )
    return chosen


def _made_anew(
    group: str, alive: Mapping[str, RegisteredCopy], to: str | None, *, accepts_data_loss: bool
) -> GroupRecord:
    """A registry that has lost the group: it begins again with one copy, which says whose logs they are."""
    if to is None or not accepts_data_loss:
        raise NotPromoted(
            f"the registry knows no group {group}; to make it anew from one copy, name that with --to DIR-ID and "
            "--accept-data-loss"
        )
    if to not in alive:
        raise NotPromoted(f"copy {to} of group {group} does not live: start it first")
    epoch = max((each.epoch for each in alive.values()), default=0) + 1
    return GroupRecord(alive[to].kind, epoch, to, [to], members=[to])
