"""`fairway delay serve`: run a delay server in a process of its own, until SIGTERM or Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fairway import limits
from fairway.cli import broker as broker_verbs
from fairway.cli import output
from fairway.cli.settings import CliOptions, ServerFlags, resolve, server_flags
from fairway.errors import FairwayError, Misuse

if TYPE_CHECKING:
    from pathlib import Path

    from fairway.client.url import BrokerAddress
    from fairway.delay.server import DelayServer, ServerOptions
    from fairway.delay.service import DelayWorld

HELP = """Run a delay server alone; print its address when ready.

Clients name it in their URL (fairway://BROKER?delay=HOST:PORT). It keeps their
delayed messages, and sends each to its broker group when the message is due.
SIGTERM or Ctrl-C stops it cleanly, with exit status 0; pending messages stay
on its disk.

With --registry and --group instead of --broker it is one copy of a delay group
of a cluster: it leads, or follows the master and can take over from it.
Clients of the cluster find it, and it finds the broker groups.
"""
_REMEDY = "give --broker HOST:PORT, or NAME=HOST:PORT for each of several broker groups, with spaces between them"


@server_flags(
    "data", "host", "port", "http_port", "broker", "horizon_days", "pending_max", "log_data", "memory_mib",
    "buffer_mib", "low_water_mib", "registry", "group", "advertise", "min_in_sync", "session_ms", "allow_remote",
)  # fmt: skip
def serve(*, flags: ServerFlags) -> None:
    """See `HELP`."""
    with output.failures("delay serve"):
        options = resolve(**flags).options
        directory = broker_verbs.data_directory(options)
        from fairway.runtime import service

        if options.registry is None and options.group is None:
            service.run_server(_serve(directory, options, parse_brokers(options.broker)))
        else:
            if options.broker is not None:
                raise Misuse(
                    "--registry excludes --broker: leave out --broker, because meta servers know the broker groups"
                )
            from fairway.cli import replica_server

            service.run_server(replica_server.serve_delay(directory, options, server_options(options)))


def parse_brokers(raw: str | None) -> dict[str, tuple[BrokerAddress, ...]]:
    """Broker groups by name; a single one without a name is called by its addresses. `fairway://` may precede them."""
    from fairway.client.url import META_SCHEME, SCHEME, BrokerAddress

    if not raw or not raw.split():
        raise Misuse(f"no broker: {_REMEDY}")
    found: dict[str, tuple[BrokerAddress, ...]] = {}
    for word in raw.split():
        name, equals, places = word.rpartition("=")
        places = places.removeprefix(SCHEME)
        if places.startswith(META_SCHEME):
            raise Misuse(f"{word!r} names a meta server: give --registry {places} and --group NAME instead of --broker")
        if (equals and not name) or (not equals and len(raw.split()) > 1) or (name or places) in found:
            raise Misuse(f"{word!r} needs a name of its own: {_REMEDY}")
        found[name or places] = tuple(BrokerAddress.parse(each) for each in places.split(","))
    return found


def server_options(options: CliOptions) -> ServerOptions:
    """The settings as options of a delay server process."""
    from fairway import __version__
    from fairway.delay.server import ServerOptions
    from fairway.protocol import ConnectionOptions
    from fairway.serving.memory_plan import delay_plan
    from fairway.serving.session_manager import SessionManagerOptions

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
        session_manager=SessionManagerOptions(connections_max, buffer_bytes, buffer_bytes, connection),
        delay=broker_verbs.delay_options(options, memory),
    )


async def _serve(data: Path, options: CliOptions, brokers: dict[str, tuple[BrokerAddress, ...]]) -> None:
    """Start the server, print that it is ready, wait, stop. Raises the fault that ended it, if there is one."""
    from fairway.cli.broker import ports_taken, settle
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
        output.ready(f"fairway delay: ready at {where}{http}, data in {data}, sends to {', '.join(brokers)}")
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
