"""`fairway delay serve`: a delay server as its own process, until it is told to end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

from fairway import limits
from fairway.cli import broker as broker_verbs
from fairway.cli import output, server_log
from fairway.cli.broker import (
    Advertise,
    AllowRemote,
    BufferMib,
    Data,
    Group,
    HorizonDays,
    Host,
    HttpPort,
    LogData,
    LowWaterMib,
    MemoryMib,
    MinInSync,
    PendingMax,
    Port,
    Registry,
    SessionMs,
)
from fairway.cli.options import CliOptions, flag
from fairway.cli.settings import ConfigFile, resolve
from fairway.errors import FairwayError, Misuse

if TYPE_CHECKING:
    from pathlib import Path

    from fairway.client.url import BrokerAddress
    from fairway.delay.server import DelayServer, ServerOptions
    from fairway.delay.service import DelayWorld

HELP = """Run a delay server alone. Prints one line with its address when it is ready.

It takes delayed messages of clients that name it (fairway://BROKER?delay=HOST:PORT) and sends each to its broker group
when it is due. SIGTERM or Ctrl-C stops it cleanly, with exit status 0; what is pending stays on its disk.

With --registry and --group in the place of --broker it is part of a cluster: clients of the cluster find it, and it
finds the broker groups. It is one copy of several then: it leads, or follows the one that does and takes over from it.
"""
_REMEDY = "give --broker HOST:PORT, or NAME=HOST:PORT for each of several broker groups, with spaces between them"

Brokers = Annotated[str | None, flag("broker", "HOST:PORT")]


def serve(  # noqa: PLR0913, PLR0917  (typer takes the flags from here)
    data: Data = None,
    host: Host = None,
    port: Port = None,
    http_port: HttpPort = None,
    broker: Brokers = None,
    horizon_days: HorizonDays = None,
    pending_max: PendingMax = None,
    log_data: LogData = None,
    memory_mib: MemoryMib = None,
    buffer_mib: BufferMib = None,
    low_water_mib: LowWaterMib = None,
    registry: Registry = None,
    group: Group = None,
    advertise: Advertise = None,
    min_in_sync: MinInSync = None,
    session_ms: SessionMs = None,
    allow_remote: AllowRemote = None,
    config: ConfigFile = None,
) -> None:
    """The help text is above."""
    flags = {name: value for name, value in locals().items() if name != "config"}
    with output.failures("delay serve"):
        options = resolve(config, **flags).options
        directory = broker_verbs.data_directory(options)
        from fairway.world import service

        if options.registry is None and options.group is None:
            service.run_server(_serve(directory, options, parse_brokers(options.broker)))
        else:
            if options.broker is not None:
                raise Misuse("a registry and --broker: leave out --broker, for the meta servers know the broker groups")
            from fairway.cli import member

            service.run_server(member.serve_delay(directory, options, server_options(options)))


def parse_brokers(raw: str | None) -> dict[str, tuple[BrokerAddress, ...]]:
    """Broker groups by name; a single one without a name is called by its addresses."""
    from fairway.client.url import BrokerAddress

    if not raw or not raw.split():
        raise Misuse(f"no broker: {_REMEDY}")
    found: dict[str, tuple[BrokerAddress, ...]] = {}
    for word in raw.split():
        name, equals, places = word.rpartition("=")
        if (equals and not name) or (not equals and len(raw.split()) > 1) or (name or places) in found:
            raise Misuse(f"{word!r} has no name of its own: {_REMEDY}")
        found[name or places] = tuple(BrokerAddress.parse(each) for each in places.split(","))
    return found


def server_options(options: CliOptions) -> ServerOptions:
    """What the delay server makes of the settings."""
    from fairway import __version__
    from fairway.delay.server import ServerOptions
    from fairway.protocol import ConnectionOptions
    from fairway.serving.hall import SessionManagerOptions
    from fairway.serving.memory_plan import delay_plan

    memory = delay_plan(options.memory_mib, options.buffer_mib, options.pending_max)
    connections_max = min(broker_verbs.connections_max(), memory.connections_max)
    buffer_bytes = options.buffer_mib * limits.MIB
    connection = ConnectionOptions(name=f"fairway delay {__version__}")
    return ServerOptions(
        host=options.host,
        port=options.port,
        allow_remote=options.allow_remote,
        http_port=options.http_port,
        waiting_bytes_max=buffer_bytes,
        memory_bytes_max=memory.ceiling_bytes,
        hall=SessionManagerOptions(connections_max, buffer_bytes, buffer_bytes, connection),
        delay=broker_verbs.delay_options(options, memory),
    )


async def _serve(data: Path, options: CliOptions, brokers: dict[str, tuple[BrokerAddress, ...]]) -> None:
    """Start, say so, wait, stop. Raises the fault that ended it, if one did."""
    from fairway.cli.starting import ports_taken, settle
    from fairway.client.url import BrokerAddress

    asked = broker_verbs.asked_to_end()
    server = server_options(options)
    async with ports_taken(options.host, options.port, options.http_port) as net:
        world = broker_verbs.delay_world(data, options, net)
        started = await _start(world, data, server, brokers)
        broker_verbs.say_findings(started.delay.engine.store, started.delay.engine.log.findings)
        http = f" and http://{BrokerAddress(options.host, started.http_port)}" if started.http_port is not None else ""
        where = BrokerAddress(options.host, started.port)
        settle("delay")
        server_log.ready(f"fairway delay: ready at {where}{http}, data in {data}, sends to {', '.join(brokers)}")
        await broker_verbs.first_of(asked, started.failed)
        await started.stop()


async def _start(
    world: DelayWorld, data: Path, server: ServerOptions, brokers: dict[str, tuple[BrokerAddress, ...]]
) -> DelayServer:
    from fairway.delay.server import DelayServer

    try:
        broker_verbs.check_alone(world.log_disk or world.disk, data)
    except FairwayError:
        world.close()
        raise
    return await DelayServer.start(world, server, brokers)
