"""`fairway meta`: run a meta server until SIGTERM or Ctrl-C."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from fairway import limits
from fairway.cli import broker as broker_verbs
from fairway.cli import output
from fairway.cli.broker import and_http
from fairway.cli.settings import DEFAULT, OnOff, ServerFlags, Settings, flag, resolve, server_flags
from fairway.client.url import META_PORT, BrokerAddress
from fairway.errors import Misuse
from fairway.lookup.registries import is_sqlite, open_registry, parse_sqlite
from fairway.redaction import without_password
from fairway.runtime import host as host_machine
from fairway.runtime import service
from fairway.runtime.clock import RealClock
from fairway.runtime.net import Net
from fairway.runtime.rng import RealRng

if TYPE_CHECKING:
    from fairway.meta.server import MetaOptions, MetaServer, MetaWorld

HELP = """Run a meta server: it tells clients which broker groups carry a subject.

Clients connect with meta://HOST:PORT. With --registry zookeeper://HOST:PORT
any number of meta servers may run. With --registry sqlite:DIR there is one,
and brokers register with it: --registry meta://HOST:PORT.

SIGTERM or Ctrl-C stops it cleanly, with exit status 0.
"""
_REMEDY = "give --registry sqlite:DIR for a meta server alone, or zookeeper://HOST:PORT,HOST:PORT for several"

Port = Annotated[int | None, flag("port", "N", default=META_PORT)]


@server_flags(
    "registry", "host", "port", "http_port", "advertise", "create_subjects", "spread", "session_ms", "memory_mib",
    "buffer_mib", "allow_remote", port=Port,
)  # fmt: skip
def serve(*, flags: ServerFlags) -> None:
    """See `HELP`."""
    with output.failures("meta"):
        settings = resolve(**flags)
        if not host_machine.can_serve():
            raise Misuse("a meta server needs Linux, or macOS for development; the other commands work on this system")
        check_registry(settings.options.registry)
        service.run_server(_serve(settings))


def check_registry(url: str | None) -> str:
    """Check the registry of a meta server; it cannot be another meta server."""
    if not url:
        raise Misuse(f"no registry: {_REMEDY}")
    if url.startswith("meta://"):
        raise Misuse(f"{without_password(url)} is a meta server, and cannot be the registry of another: {_REMEDY}")
    return url


def meta_options(settings: Settings) -> MetaOptions:
    """The settings as options of a meta server."""
    from fairway.meta.server import MetaOptions
    from fairway.serving.memory_plan import meta_plan

    options = settings.options
    memory = meta_plan(options.memory_mib, options.buffer_mib)
    return MetaOptions(
        host=options.host,
        port=META_PORT if settings.origins["port"] == DEFAULT else options.port,
        allow_remote=options.allow_remote,
        http_port=options.http_port,
        advertise=options.advertise or "",
        create_subjects=options.create_subjects is OnOff.ON,
        spread=options.spread,
        waiting_bytes_max=options.buffer_mib * limits.MIB,
        memory_bytes_max=memory.ceiling_bytes,
        registry_bytes_max=memory.registry_bytes,
        session_manager=broker_verbs.session_options(options, memory, "fairway meta"),
    )


async def _open_world(url: str, session_ms: int, net: Net) -> MetaWorld:
    from fairway.meta.server import MetaWorld
    from fairway.registry.sqlite import SqliteRegistry

    clock, rng = RealClock(), RealRng()
    if is_sqlite(url):
        broker_verbs.check_directory(Path(parse_sqlite(url)), "--registry sqlite:DIR")
        owner = await SqliteRegistry.open(parse_sqlite(url), clock=clock)
        return MetaWorld(clock, net, rng, owner, owner)
    registry = await open_registry(url, net, clock, rng, session_ms=session_ms, name="fairway meta")
    return MetaWorld(clock, net, rng, registry)


async def _serve(settings: Settings) -> None:
    options = meta_options(settings)
    url = check_registry(settings.options.registry)

    async def start(net: Net) -> MetaServer:
        from fairway.meta.server import MetaServer

        world = await _open_world(url, settings.options.session_ms, net)
        return await MetaServer.start(world, options, lambda sentence: output.line(f"fairway meta: {sentence}"))

    def say_ready(started: MetaServer) -> None:
        where = f"{BrokerAddress(options.host, started.port)}{and_http(options.host, started.http_port)}"
        output.ready(f"fairway meta: ready at meta://{where}, registry {url}")

    listening = msgspec.structs.replace(settings.options, port=options.port)  # a meta server has a port of its own
    await broker_verbs.run_until_asked("meta", listening, start, say_ready)
