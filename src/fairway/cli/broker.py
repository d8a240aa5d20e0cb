"""`fairway up` and `fairway broker`: run a broker on a data directory until SIGTERM or Ctrl-C.

`up` also runs a delay server behind the broker's port, with its data in the directory `delay` of the broker's, and
answers what clients ask meta servers. `broker` runs a broker alone, or one copy of a broker group.

`fairway broker promote` names another master of a server group by hand. A meta server that keeps the registry does so
on request. With ZooKeeper this process changes the registry itself.

A server reserves its ports before it makes anything on disk. It may be asked to end while it starts, for instance
while it waits for a registry. `delay`, `meta` and `replica_server` start and end in the same way.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from fairway import __version__, limits
from fairway.batch.layout import numpy_or_none
from fairway.cli import connections, output
from fairway.cli.settings import CliOptions, ConfigFile, RegistryUrl, ServerFlags, resolve, server_flags
from fairway.client.url import BrokerAddress
from fairway.errors import CannotListen, FairwayError, Misuse
from fairway.lookup.registries import META, open_registry
from fairway.names import GroupName
from fairway.protocol import ConnectionOptions
from fairway.protocol.route_messages import Govern, Governed, RouteChange
from fairway.runtime import host as host_machine
from fairway.runtime import service, terminal
from fairway.runtime.clock import RealClock
from fairway.runtime.disk import Disk
from fairway.runtime.net import Net, RealNet
from fairway.runtime.rng import RealRng
from fairway.runtime.threads import ThreadPool

if TYPE_CHECKING:
    from fairway.broker.server import Broker, BrokerOptions
    from fairway.delay.engine import DelayOptions
    from fairway.delay.service import Delay, DelayWorld
    from fairway.runtime.real_disk import RealDisk
    from fairway.serving.memory_plan import MemoryPlan
    from fairway.serving.session_manager import SessionManagerOptions
    from fairway.storage.recovery import Finding
    from fairway.storage.store import Store


T = TypeVar("T")


@asynccontextmanager
async def ports_taken(host: str, port: int, http_port: int | None) -> AsyncIterator[RealNet]:
    """A net with these ports reserved; `CannotListen` with the remedy where another program has one of them."""
    net = RealNet()
    try:
        for flag, number in (("--port", port), ("--http-port", http_port)):
            try:
                if number is not None:
                    await net.reserve(host, number)
            except CannotListen as error:
                if not error.is_taken:
                    raise
                sentence = f"{error}: stop it, or choose another port with {flag} N (0: any that is free)"
                raise CannotListen(sentence, is_taken=True) from error
        yield net
    finally:
        net.release()


async def unless_asked(asked: Callable[[], Awaitable[object]], start: Coroutine[Any, Any, T]) -> T | None:
    """Start, unless the process is asked to end first; then cancel the start, which closes what it opened.

    Returns the server, or None after a cancelled start.
    """
    starting, ending = asyncio.ensure_future(start), asyncio.ensure_future(asked())
    try:
        await asyncio.wait([starting, ending], return_when=asyncio.FIRST_COMPLETED)
    finally:
        ending.cancel()
    if not starting.done():
        starting.cancel()
        await asyncio.wait([starting])
    return None if starting.cancelled() else starting.result()


def settle(role: str) -> None:
    """Tell the collector that what a ready server has loaded stays, and log a shortage of descriptors from now on."""
    service.settle_memory()
    service.watch_descriptors(lambda sentence: output.line(f"fairway {role}: {sentence}"))


_NAME = f"fairway {__version__}"
_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_DELAY = "delay"  # the directory of the delay server, in that of the broker
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  where to dial whoever listens so

UP_HELP = """Run a broker and a delay server in one process; print the URL when ready.

Clients may use it as a meta server, too. SIGTERM or Ctrl-C stops it cleanly,
with exit status 0.
"""
BROKER_HELP = """Run a broker alone; print its URL when ready.

SIGTERM or Ctrl-C stops it: it accepts no new connections, answers what is
durable, writes a checkpoint and exits with status 0. Exit status 1: it could
not start, or its disk failed; a sentence on stderr says why.

With --registry and --group it is one copy of a broker group: it leads, or
follows the master and can take over from it.
"""


@server_flags(
    "data", "host", "port", "http_port", "durability", "memory_mib", "buffer_mib", "keep_hours", "keep_gib",
    "keep_owed_gib", "low_water_mib", "horizon_days", "pending_max", "log_data", "allow_remote",
)  # fmt: skip
def up(*, flags: ServerFlags) -> None:
    """See `UP_HELP`."""
    _run("up", flags)


@server_flags(
    "data", "host", "port", "http_port", "durability", "memory_mib", "buffer_mib", "keep_hours", "keep_gib",
    "keep_owed_gib", "low_water_mib", "registry", "group", "advertise", "min_in_sync", "session_ms", "allow_remote",
)  # fmt: skip
def serve(context: typer.Context, *, flags: ServerFlags) -> None:
    """`fairway broker`: see `BROKER_HELP`."""
    if context.invoked_subcommand is None:
        _run("broker", flags)


app = typer.Typer(help=BROKER_HELP, invoke_without_command=True)
app.callback(help=BROKER_HELP)(serve)


def _run(verb: str, flags: ServerFlags) -> None:
    with output.failures(verb):
        options = resolve(**flags).options
        data = data_directory(options)
        if verb == "broker" and (options.group is not None or options.registry is not None):
            from fairway.cli import replica_server

            service.run_server(replica_server.serve(data, options, broker_options(options)))
        else:
            service.run_server(_serve(verb, data, options))


def data_directory(options: CliOptions) -> Path:
    """The data directory of a server; `Misuse` where a server cannot run, or the directory cannot be."""
    if not host_machine.can_serve():
        raise Misuse("a broker needs Linux, or macOS for development; the other commands work on this system")
    if not options.data:
        raise Misuse("no data directory: give --data DIR, or set FAIRWAY_DATA, or data in fairway.toml")
    if options.log_data is not None:
        check_directory(Path(options.log_data), "--log-data")
    return check_directory(Path(options.data), "--data")


def check_directory(path: Path, flag: str) -> Path:
    """Check that the path is a directory or can become one; `Misuse` where a file is in the way."""
    for each in (path, *path.parents):
        if each.is_dir():
            break
        if each.exists():
            raise Misuse(f"{each} is a file, and {flag} names a directory: give another path, or move the file away")
    return path


def broker_memory(options: CliOptions, *, with_delay: bool = False) -> MemoryPlan:
    """How a broker divides its memory; `Misuse` if the sum does not fit. `with_delay`: a delay server runs beside."""
    from fairway.serving.memory_plan import broker_plan

    return broker_plan(options.memory_mib, options.buffer_mib, options.pending_max if with_delay else None)


def broker_options(options: CliOptions, memory: MemoryPlan | None = None) -> BrokerOptions:
    """The settings as options of a broker. `memory`: the plan, where a delay server has a part of the memory."""
    memory = memory or broker_memory(options)
    from fairway.broker.server import BrokerOptions
    from fairway.storage import flusher
    from fairway.storage.retention import AgeSource, Policy
    from fairway.storage.store import StoreOptions

    policy = Policy(
        age_ms_max=round(options.keep_hours * _HOUR_MS) if isinstance(options.keep_hours, float) else None,
        bytes_max=_bytes_of(options.keep_gib),
        owed_bytes_max=_bytes_of(options.keep_owed_gib),
    )
    return BrokerOptions(
        host=options.host,
        port=options.port,
        http_port=options.http_port,
        allow_remote=options.allow_remote,
        connections_max=min(connections_max(), memory.connections_max),
        memory_bytes_max=memory.ceiling_bytes,
        groups_bytes_max=memory.groups_bytes,
        partial_bytes_max=options.buffer_mib * limits.MIB,
        waiting_bytes_max=options.buffer_mib * limits.MIB,
        unsent_bytes_max=options.buffer_mib * limits.MIB,
        connection=ConnectionOptions(name=_NAME),
        store=StoreOptions(
            durability=flusher.Durability(options.durability.value),
            retention=policy,
            age_source=AgeSource.DIRECTORY if options.keep_hours is None else AgeSource.CHOICE,
            low_water_bytes=options.low_water_mib * limits.MIB,
            streams_bytes_max=memory.streams_bytes,
            subjects_max=memory.subjects_max,
        ),
    )


def _bytes_of(gib: float | None) -> int | None:
    return None if gib is None else round(gib * limits.GIB)


class TooFewDescriptors(FairwayError):
    """The descriptor limit of the process is too low for a server; the sentence names the number and the remedy."""


def connections_max() -> int:
    """How many connections the descriptors of the process allow; `TooFewDescriptors` names the number needed."""
    limit = service.raise_descriptor_limit()
    room = limit - limits.SPARE_DESCRIPTORS
    if room < limits.CONNECTIONS_MIN:
        spare, least = limits.SPARE_DESCRIPTORS, limits.CONNECTIONS_MIN
        raise TooFewDescriptors(
            f"this process may have {limit} descriptors, and a server needs {spare + least}: {spare} for its files and "
            f"{least} for connections. Raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd); with "
            f"{spare + limits.CONNECTIONS_MAX} it takes as many connections as it can"
        )
    return min(limits.CONNECTIONS_MAX, room)


def session_options(options: CliOptions, memory: MemoryPlan, name: str) -> SessionManagerOptions:
    """The bounds of the connections of a delay server or a meta server."""
    from fairway.serving.session_manager import SessionManagerOptions

    buffer_bytes = options.buffer_mib * limits.MIB
    most = min(connections_max(), memory.connections_max)
    return SessionManagerOptions(most, buffer_bytes, buffer_bytes, ConnectionOptions(name=f"{name} {__version__}"))


def and_http(host: str, http_port: int | None) -> str:
    """The HTTP address, for the line that says that a server is ready."""
    return "" if http_port is None else f" and http://{BrokerAddress(host, http_port)}"


def delay_options(options: CliOptions, memory: MemoryPlan) -> DelayOptions:
    """The settings as options of a delay server."""
    from fairway.delay.engine import DelayOptions
    from fairway.storage.store import StoreOptions

    default: StoreOptions = DelayOptions().store
    return DelayOptions(
        horizon_ms=round(options.horizon_days * _DAY_MS),
        pending_max=options.pending_max,
        store=replace(
            default,
            low_water_bytes=options.low_water_mib * limits.MIB,
            streams_bytes_max=memory.delay_streams_bytes,
            subjects_max=memory.delay_subjects_max,
        ),
    )


async def _serve(verb: str, data: Path, options: CliOptions) -> None:
    """Start the server, print that it is ready, wait, stop. Raises the fault that ended it, if there is one."""

    asked = asked_to_end()
    memory = broker_memory(options, with_delay=verb == "up")
    broker = broker_options(options, memory)
    async with ports_taken(options.host, options.port, options.http_port) as net:
        from fairway.broker.server import Broker, BrokerWorld
        from fairway.storage import directory

        disk = open_disk(data)
        directory.identify(disk)  # before Fairway makes a file in a directory of another program
        check_alone(disk, data)
        delay = _open_delay(data, options, memory, net) if verb == "up" else None
        try:
            world = BrokerWorld(RealClock(), disk, net, RealRng(), ThreadPool())
            started = await Broker.start(world, broker, delay=None if delay is None else delay.request_handler)
        except FairwayError:
            if delay is not None:
                await delay.stop()
            raise
        if delay is not None:
            delay.reach_here((_ANYWHERE.get(options.host, options.host), started.port))
            say_findings(delay.engine.store, delay.engine.log.findings)
        settle(verb)
        say_findings(started.store)
        http = f" and {started.http_url}" if started.http_url is not None else ""
        output.ready(f"fairway {verb}: ready at {started.url}{http}, data in {data}")
        await run_to_end(asked, started, delay)


async def run_to_end(asked: Callable[[], Awaitable[object]], started: Broker, delay: Delay | None) -> None:
    """Wait until the process is asked to end or a server fails; then stop both servers. Raises the fault."""
    await first_of(asked, started.failed, *([] if delay is None else [delay.failed]))
    try:
        if delay is not None and started.store.fault is not None:
            await delay.stop(drain_ms=0)  # a broker that has failed answers nothing
        elif delay is not None:
            await delay.stop()
    finally:
        await started.stop()


def check_alone(disk: Disk, data: Path) -> None:
    """`Misuse` if the directory is a copy of a server group."""
    from fairway.replication.leadership import EpochPromise

    if EpochPromise(disk).epoch:
        raise Misuse(
            f"{data} is a copy of a server group: start it with --registry and --group. A single broker would write "
            "messages that the other copies do not have"
        )


def _open_delay(data: Path, options: CliOptions, memory: MemoryPlan, net: Net) -> Delay | None:
    if numpy_or_none() is None:
        output.line("remark: without numpy no delayed messages are taken: pip install 'fairway[server]'")
        return None
    from fairway.delay.service import Delay

    world = delay_world(data / _DELAY, options, net, is_below=True)
    return Delay.open(world, delay_options(options, memory), _NAME)


def delay_world(data: Path, options: CliOptions, net: Net, *, is_below: bool = False) -> DelayWorld:
    """Clock, disk and net of a delay server with its data at `data`; `is_below` as for `open_disk`."""
    from fairway.delay.service import DelayWorld

    log_disk = None if options.log_data is None else open_disk(Path(options.log_data))
    return DelayWorld(RealClock(), open_disk(data, is_below=is_below), net, RealRng(), log_disk)


def open_disk(path: Path, *, is_below: bool = False, is_copy: bool = False) -> RealDisk:
    """The disk of a directory. `is_below`: the operator has named the directory above. `is_copy`: the server keeps a
    lease, so its loop never waits for the device: a device that stalls would depose a master."""
    from fairway.runtime.directory_writer import InlineCommits
    from fairway.runtime.real_disk import RealDisk

    new_inline = None if is_copy else InlineCommits
    post = asyncio.get_running_loop().call_soon_threadsafe
    return RealDisk(path, post=post, is_below=is_below, new_inline=new_inline)


def asked_to_end() -> Callable[[], Awaitable[object]]:
    """An awaitable that returns when the process is asked to end."""
    return service.asked_to_end().wait


async def first_of(*ways: Callable[[], Awaitable[object]]) -> None:
    """Wait until one of the awaitables returns."""
    ending = [asyncio.ensure_future(way()) for way in ways]
    await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    for each in ending:
        each.cancel()


async def run_until_asked(
    role: str,
    options: CliOptions,
    start: Callable[[RealNet], Coroutine[Any, Any, T]],
    say_ready: Callable[[T], None],
    watch: Callable[[T], Awaitable[object]] | None = None,
) -> None:
    """Start a server, say that it is ready, wait, stop. Raises the fault that ended it, if there is one."""
    asked = asked_to_end()
    async with ports_taken(options.host, options.port, options.http_port) as net:
        server: Any = await unless_asked(asked, start(net))
    if server is None:
        return
    settle(role)
    say_ready(server)
    await first_of(asked, server.failed, *([] if watch is None else [partial(watch, server)]))
    await server.stop()


def say_findings(store: Store, others: Sequence[Finding] = ()) -> None:
    """Log what recovery had to repair."""
    for finding in (*store.findings, *others):
        span = f"{finding.damage.end - finding.damage.start:,} bytes at {finding.damage.start:,}"
        output.line(f"{finding.verdict.value}: {span}: {finding.damage.why}")
    for remark in store.remarks:
        output.line(f"remark: {remark}")


@app.command("promote")
def promote(
    group: Annotated[str, typer.Argument(metavar="GROUP", help="The server group.")],
    to: Annotated[
        str | None, typer.Option("--to", metavar="DIR-ID", help="The copy that is to lead; unset: any that is in sync.")
    ] = None,
    accept_data_loss: Annotated[
        bool,
        typer.Option("--accept-data-loss", help="Accept a copy that may lack acknowledged messages and acks."),
    ] = False,
    registry: RegistryUrl = None,
    config: ConfigFile = None,
) -> None:
    """Make another copy of a server group its master.

    `fairway cluster` shows the IDs of the copies.
    """
    with output.failures("broker promote"):
        options = resolve(config, registry=registry).options
        if options.registry is None:
            raise Misuse("no registry: give the registry of the cluster with --registry URL")
        name = str(GroupName.parse(group))
        terminal.say(service.run(_promote(options, name, to, accepts_data_loss=accept_data_loss)))


async def _promote(options: CliOptions, group: str, to: str | None, *, accepts_data_loss: bool) -> str:
    url = str(options.registry)
    if url.startswith(META):
        asked = Govern(RouteChange.PROMOTE, group, [] if to is None else [to], is_forced=accepts_data_loss)
        return (await connections.ask_at(url, options.patience_s, asked, Governed)).sentence
    from fairway.replication.leadership import change_master

    registry = await open_registry(
        url, RealNet(), RealClock(), RealRng(), session_ms=options.session_ms, name="promote"
    )
    try:
        return await change_master(registry, group, to, accepts_data_loss=accepts_data_loss)
    finally:
        await registry.close()
