"""`fairway broker promote GROUP`: name another master of a server group, by hand.

A meta server that keeps the registry does so on request. With ZooKeeper this process changes the registry itself.
"""

from __future__ import annotations

from typing import Annotated

import typer

from fairway.cli import output
from fairway.cli.settings import CliOptions, ConfigFile, flag, resolve
from fairway.errors import Misuse
from fairway.runtime import terminal


def promote(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The server group.")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="DIR-ID", help="The copy that is to lead; unset: any that is in sync.")
    ] = None,
    accept_data_loss: Annotated[
        bool,
        typer.Option("--accept-data-loss", help="Accept a copy that may lack acknowledged messages and acks."),
    ] = False,
    registry: Annotated[str | None, flag("registry", "URL")] = None,
    config: ConfigFile = None,
) -> None:
    """Make another copy of a server group its master.

    `fairway cluster` shows the IDs of the copies.
    """
    with output.failures("broker promote"):
        options = resolve(config, registry=registry).options
        if options.registry is None:
            raise Misuse("no registry: give the registry of the cluster with --registry URL")
        from fairway.names import GroupName
        from fairway.runtime import service

        name = str(GroupName.parse(group))
        told = service.run(_promote(options, name, to, accepts_data_loss=accept_data_loss))
        terminal.say(told)


async def _promote(options: CliOptions, group: str, to: str | None, *, accepts_data_loss: bool) -> str:
    from fairway.lookup.registries import META

    if str(options.registry).startswith(META):
        return await _ask(options, group, to, accepts_data_loss=accepts_data_loss)
    from fairway.lookup.registries import open_registry
    from fairway.replication.leadership import change_master
    from fairway.runtime.clock import RealClock
    from fairway.runtime.net import RealNet
    from fairway.runtime.rng import RealRng

    registry = await open_registry(
        str(options.registry), RealNet(), RealClock(), RealRng(), session_ms=options.session_ms, name="promote"
    )
    try:
        return await change_master(registry, group, to, accepts_data_loss=accepts_data_loss)
    finally:
        await registry.close()


async def _ask(options: CliOptions, group: str, to: str | None, *, accepts_data_loss: bool) -> str:
    from fairway.cli import connections
    from fairway.protocol.route_messages import Govern, Governed, RouteChange

    asked = Govern(RouteChange.PROMOTE, group, [] if to is None else [to], is_forced=accepts_data_loss)
    return (await connections.ask_at(str(options.registry), options.patience_s, asked, Governed)).sentence
