"""`fairway broker promote GROUP`: name another master by hand, of brokers or of delay servers.

A meta server that keeps the registry is asked to do it, for nobody else changes who leads; in ZooKeeper it is done
from here.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fairway.cli import output
from fairway.cli.options import CliOptions, flag
from fairway.cli.settings import ConfigFile, resolve
from fairway.errors import Misuse
from fairway.world import terminal


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
        from fairway.names import GroupName
        from fairway.world import service

        name = str(GroupName.parse(group))
        told = service.run(_promote(options, name, to, accepts_data_loss=accept_data_loss))
        terminal.say(told)


async def _promote(options: CliOptions, group: str, to: str | None, *, accepts_data_loss: bool) -> str:
    from fairway.lookup.opening import META

    if str(options.registry).startswith(META):
        return await _ask(options, group, to, accepts_data_loss=accepts_data_loss)
    from fairway.lookup.opening import open_registry
    from fairway.replication.promotion import change_master
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


async def _ask(options: CliOptions, group: str, to: str | None, *, accepts_data_loss: bool) -> str:
    from fairway.cli import meta_client
    from fairway.protocol.routing import Govern, Governed, RouteChange

    asked = Govern(RouteChange.PROMOTE, group, [] if to is None else [to], is_forced=accepts_data_loss)
    return (await meta_client.ask_at(str(options.registry), options.patience_s, asked, Governed)).sentence
