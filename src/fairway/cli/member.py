"""`fairway broker --registry URL --group NAME`: one copy of several, until it is told to end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from fairway.cli.options import Options
from fairway.errors import FairwayError, Misuse

if TYPE_CHECKING:
    from pathlib import Path

    from fairway.broker.member import BrokerMember, MemberOptions
    from fairway.broker.server import BrokerOptions

_WATCH_S = 0.5
_BEAT_MS_MIN = 1_000
_ANYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104


async def serve(data: Path, options: Options, broker: BrokerOptions) -> None:
    """Start, say what it does whenever that changes, wait, hand over, stop. Raises what ended it, if anything did."""
    from fairway.broker.member import BrokerMember, MemberWorld
    from fairway.cli.broker import asked_to_end, first_of, open_disk
    from fairway.lookup.opening import open_registry
    from fairway.world.clock import RealClock
    from fairway.world.net import RealNet
    from fairway.world.rng import RealRng
    from fairway.world.service import settle_memory

    membership = member_options(options)
    asked = asked_to_end()
    clock, net, rng = RealClock(), RealNet(), RealRng()
    name = f"broker {membership.group}"
    registry = await open_registry(str(options.registry), net, clock, rng, session_ms=membership.session_ms, name=name)
    world = MemberWorld(clock, lambda: open_disk(data), net, rng, registry)
    try:
        member = await BrokerMember.start(world, _with_quick_pulse(broker, membership), membership)
    except FairwayError:
        await registry.close()
        raise
    settle_memory()
    say_ready(member, data)

    async def tell() -> None:
        await _tell(member)

    await first_of(asked, member.failed, tell)
    await member.stop()


def _with_quick_pulse(broker: BrokerOptions, membership: MemberOptions) -> BrokerOptions:
    """Clients give up a master that stands still soon after its replicas do: after three beats."""
    from dataclasses import replace

    beat_ms = min(max(membership.session_ms // 2, _BEAT_MS_MIN), broker.connection.heartbeat_ms)
    return replace(broker, connection=replace(broker.connection, heartbeat_ms=beat_ms))


def member_options(options: Options) -> MemberOptions:
    """What a copy makes of the settings."""
    from fairway.broker.member import MemberOptions
    from fairway.names import Group

    if options.group is None:
        raise Misuse("a registry and no group: name the group that this broker is a copy of, with --group NAME")
    if options.registry is None:
        raise Misuse("a group and no registry: say where its copies find one another, with --registry URL")
    if options.host in _ANYWHERE and options.advertise is None:
        raise Misuse(f"{options.host} is no address that others could dial: add --advertise HOST:PORT")
    return MemberOptions(
        str(Group.parse(options.group)),
        advertise=None if options.advertise is None else _address(options.advertise),
        min_in_sync=options.min_in_sync,
        session_ms=options.session_ms,
    )


def _address(raw: str) -> tuple[str, int]:
    host, _, port = raw.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise Misuse(f"bad address {raw!r}: write HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def say_ready(member: BrokerMember, data: Path) -> None:
    host, port = member.address
    typer.echo(
        f"fairway broker: ready at fairway://{host}:{port}, data in {data}, "
        f"copy {member.directory} of group {member.membership.group}"
    )


async def _tell(member: BrokerMember) -> None:
    """For ever: a line on stderr whenever the copy does something else."""
    import asyncio

    said = ""
    told = 0
    while True:
        for finding in member.findings[told:]:
            typer.echo(f"remark: {finding}", err=True)
        told = len(member.findings)
        sentence = member.sentence()
        if sentence != said:
            said = sentence
            typer.echo(f"fairway broker: {sentence}", err=True)
        await asyncio.sleep(_WATCH_S)
