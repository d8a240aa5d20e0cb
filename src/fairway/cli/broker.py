"""`fairway up` and `fairway broker`: one broker on one data directory, until it is told to end.

`up` is everything that a newcomer needs in one process. That is a broker today; the meta server and the delay server
join it when they are there, and `broker` remains the broker alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway import limits
from fairway.cli import output
from fairway.cli.options import Durability, Options, flag
from fairway.cli.settings import ConfigFile, resolve
from fairway.errors import Misuse
from fairway.world import host as host_machine

if TYPE_CHECKING:
    from fairway.broker.server import Broker, BrokerOptions

_SPARE_DESCRIPTORS = 256  # for segments, indexes and the loop itself
_HOUR_MS = 3_600_000

UP_HELP = """Run everything in one process. Prints one line with its URL when it is ready.

Everything is the broker, so far. SIGTERM or Ctrl-C stops it cleanly, with exit status 0.
"""
BROKER_HELP = """Run a broker alone. Prints one line with its URL when it is ready.

SIGTERM or Ctrl-C stops it: it accepts nobody any more, answers what is durable, writes a checkpoint and exits with
status 0. Exit status 1: it could not start, or its disk failed; a sentence on stderr says why.
"""

Data = Annotated[str | None, flag("data", "DIR")]
Host = Annotated[str | None, flag("host", "HOST")]
Port = Annotated[int | None, flag("port", "N")]
HttpPort = Annotated[int | None, flag("http_port", "N")]
AllowRemote = Annotated[bool | None, flag("allow_remote")]
Durable = Annotated[Durability | None, flag("durability")]
BufferMib = Annotated[int | None, flag("buffer_mib", "MIB")]
KeepHours = Annotated[float | None, flag("keep_hours", "HOURS")]
KeepGib = Annotated[float | None, flag("keep_gib", "GIB")]
KeepOwedGib = Annotated[float | None, flag("keep_owed_gib", "GIB")]
LowWaterMib = Annotated[int | None, flag("low_water_mib", "MIB")]


def serve(
    context: typer.Context,
    data: Data = None,
    host: Host = None,
    port: Port = None,
    http_port: HttpPort = None,
    durability: Durable = None,
    buffer_mib: BufferMib = None,
    keep_hours: KeepHours = None,
    keep_gib: KeepGib = None,
    keep_owed_gib: KeepOwedGib = None,
    low_water_mib: LowWaterMib = None,
    allow_remote: AllowRemote = None,
    config: ConfigFile = None,
) -> None:
    """Registered under both names, with the help texts below."""
    verb = context.info_name or "up"
    with output.failures(verb):
        options = resolve(
            config,
            data=data,
            host=host,
            port=port,
            http_port=http_port,
            durability=durability,
            buffer_mib=buffer_mib,
            keep_hours=keep_hours,
            keep_gib=keep_gib,
            keep_owed_gib=keep_owed_gib,
            low_water_mib=low_water_mib,
            allow_remote=allow_remote,
        ).options
        if not host_machine.can_serve():
            raise Misuse("a broker runs on Linux, or on macOS for development; the other commands run here, too")
        if not options.data:
            raise Misuse("no data directory: give --data DIR, or set FAIRWAY_DATA, or data in fairway.toml")
        from fairway.world import service

        service.run(_serve(verb, Path(options.data), broker_options(options)))


def broker_options(options: Options) -> BrokerOptions:
    """What the broker makes of the settings."""
    from fairway import __version__
    from fairway.broker.server import BrokerOptions
    from fairway.protocol import Options as ConnectionOptions
    from fairway.storage import flusher
    from fairway.storage.retention import Policy
    from fairway.storage.store import StoreOptions

    policy = Policy(
        age_ms_max=None if options.keep_hours is None else round(options.keep_hours * _HOUR_MS),
        bytes_max=_bytes_of(options.keep_gib),
        owed_bytes_max=_bytes_of(options.keep_owed_gib),
    )
    return BrokerOptions(
        host=options.host,
        port=options.port,
        http_port=options.http_port,
        allow_remote=options.allow_remote,
        connections_max=_connections_max(),
        partial_bytes_max=options.buffer_mib * limits.MIB,
        waiting_bytes_max=options.buffer_mib * limits.MIB,
        unsent_bytes_max=options.buffer_mib * limits.MIB,
        connection=ConnectionOptions(name=f"fairway {__version__}"),
        store=StoreOptions(
            durability=flusher.Durability(options.durability.value),
            retention=policy,
            low_water_bytes=options.low_water_mib * limits.MIB,
        ),
    )


def _bytes_of(gib: float | None) -> int | None:
    return None if gib is None else round(gib * limits.GIB)


def _connections_max() -> int:
    from fairway.broker.server import BrokerOptions
    from fairway.world import service

    return max(1, min(BrokerOptions().connections_max, service.raise_descriptor_limit() - _SPARE_DESCRIPTORS))


async def _serve(verb: str, data: Path, options: BrokerOptions) -> None:
    """Start, say so, wait, stop. Raises the fault that ended it, if one did."""
    import asyncio

    from fairway.broker.server import Broker, BrokerWorld
    from fairway.world import service
    from fairway.world.clock import RealClock
    from fairway.world.net import RealNet
    from fairway.world.real_disk import RealDisk
    from fairway.world.rng import RealRng

    asked = service.asked_to_end()
    disk = RealDisk(data, post=asyncio.get_running_loop().call_soon_threadsafe)
    started = await Broker.start(BrokerWorld(RealClock(), disk, RealNet(), RealRng()), options)
    _say_ready(verb, started, data)
    ending = [asyncio.ensure_future(asked.wait()), asyncio.ensure_future(started.failed())]
    await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    for each in ending:
        each.cancel()
    await started.stop()


def _say_ready(verb: str, started: Broker, data: Path) -> None:
    for finding in started.store.findings:
        span = f"{finding.damage.end - finding.damage.start:,} bytes at {finding.damage.start:,}"
        typer.echo(f"{finding.verdict.value}: {span}: {finding.damage.why}", err=True)
    for remark in started.store.remarks:
        typer.echo(f"remark: {remark}", err=True)
    http = f" and {started.http_url}" if started.http_url is not None else ""
    typer.echo(f"fairway {verb}: ready at {started.url}{http}, data in {data}")
