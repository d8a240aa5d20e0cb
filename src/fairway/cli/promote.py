"""`fairway broker promote GROUP`: name another master by hand, of brokers or of delay servers.

A copy that is in sync takes over without a loss: the master is deposed, steps down, and follows. One that is not may
lack messages that were acknowledged; that is done only where it is said that they may go.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.cli.options import Options, flag
from fairway.cli.settings import ConfigFile, resolve
from fairway.errors import FairwayError, Misuse
from fairway.world import terminal

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fairway.registry.layout import GroupRecord, Member
    from fairway.registry.port import Registry

_TRIES = 10


class NotPromoted(FairwayError):
    """It cannot be done, or not without a loss; the sentence says what to do instead."""


def promote(
    group: Annotated[str, typer.Argument(help="The group of copies.")],
    to: Annotated[str | None, typer.Option("--to", metavar="DIR-ID", help="The copy; unset: one that is fit.")] = None,
    accept_data_loss: Annotated[
        bool,
        typer.Option("--accept-data-loss", help="Take a copy that may lack messages and acks which were acknowledged."),
    ] = False,
    registry: Annotated[str | None, flag("registry", "URL")] = None,
    config: ConfigFile = None,
) -> None:
    """Make another copy of a group its master.

    Without --to: one that is in sync and does not lead yet. `fairway cluster` shows the ids of the copies.
    """
    with output.failures("broker promote"):
        options = resolve(config, registry=registry).options
        if options.registry is None:
            raise Misuse("no registry: say where the copies find one another, with --registry URL")
        from fairway.names import Group
        from fairway.world import service

        name = str(Group.parse(group))
        told = service.run(_promote(options, name, to, accepts_data_loss=accept_data_loss))
        terminal.say(told)


async def _promote(options: Options, group: str, to: str | None, *, accepts_data_loss: bool) -> str:
    from fairway.lookup.opening import open_registry
    from fairway.world.clock import RealClock
    from fairway.world.net import RealNet
    from fairway.world.rng import RealRng

    registry = await open_registry(
        str(options.registry), RealNet(), RealClock(), RealRng(), session_ms=options.session_ms, name="promote"
    )
    try:
        return await change_master(registry, group, to, accepts_data_loss=accepts_data_loss)
    finally:
        await registry.close()


async def change_master(registry: Registry, group: str, to: str | None, *, accepts_data_loss: bool = False) -> str:
    """Write the new master into the group's node; the sentence says what was done."""
    from fairway.replication import law
    from fairway.replication.node import GroupNode, living

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
    group: str, record: GroupRecord, alive: Mapping[str, Member], to: str | None, *, accepts_data_loss: bool
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


def _made_anew(group: str, alive: Mapping[str, Member], to: str | None, *, accepts_data_loss: bool) -> GroupRecord:
    """A registry that has lost the group: it begins again with one copy, which says whose logs they are."""
    from fairway.registry.layout import GroupRecord

    if to is None or not accepts_data_loss:
        raise NotPromoted(
            f"the registry knows no group {group}; to make it anew from one copy, name that with --to DIR-ID and "
            "--accept-data-loss"
        )
    if to not in alive:
        raise NotPromoted(f"copy {to} of group {group} does not live: start it first")
    epoch = max((each.epoch for each in alive.values()), default=0) + 1
    return GroupRecord(alive[to].kind, epoch, to, [to], members=[to])
