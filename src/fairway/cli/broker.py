"""`fairway up` and `fairway broker`: one broker on one data directory, until it is told to end.

`up` is everything that a newcomer needs in one process: a broker, and a delay server behind the broker's port, with
its data in the directory `delay` in the broker's; what is asked of meta servers it answers with itself. `broker` is the
broker alone, or one copy of several.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway import limits
from fairway.cli import output, server_log
from fairway.cli.options import CliOptions, DurabilityChoice, flag
from fairway.cli.promote import promote
from fairway.cli.settings import ConfigFile, resolve
from fairway.errors import FairwayError, Misuse
from fairway.world import host as host_machine

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from fairway.broker.server import Broker, BrokerOptions
    from fairway.delay.options import DelayOptions
    from fairway.delay.service import Delay, DelayWorld
    from fairway.serving.memory_plan import MemoryPlan
    from fairway.storage.recovery import Finding
    from fairway.storage.store import Store
    from fairway.world.disk import Disk
    from fairway.world.net import Net, RealNet
    from fairway.world.real_disk import RealDisk

_HOUR_MS = 3_600_000
_DAY_MS = 24 * _HOUR_MS
_DELAY = "delay"  # the directory
_ANYWHERE = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104  where to dial whoever listens so

UP_HELP = """Run everything in one process. Prints one line with its URL when it is ready.

Everything is a broker, a delay server, and the answers of a meta server. SIGTERM or Ctrl-C stops it cleanly, with exit
status 0.
"""
BROKER_HELP = """Run a broker alone. Prints one line with its URL when it is ready.

SIGTERM or Ctrl-C stops it: it accepts nobody any more, answers what is durable, writes a checkpoint and exits with
status 0. Exit status 1: it could not start, or its disk failed; a sentence on stderr says why.

With --registry and --group it is one copy of several: it leads, or follows the one that does, and takes over from it.
"""

Data = Annotated[str | None, flag("data", "DIR")]
Host = Annotated[str | None, flag("host", "HOST")]
Port = Annotated[int | None, flag("port", "N")]
HttpPort = Annotated[int | None, flag("http_port", "N")]
AllowRemote = Annotated[bool | None, flag("allow_remote")]
Durable = Annotated[DurabilityChoice | None, flag("durability")]
MemoryMib = Annotated[int | None, flag("memory_mib", "MIB")]
BufferMib = Annotated[int | None, flag("buffer_mib", "MIB")]
KeepHours = Annotated[str | None, flag("keep_hours", "HOURS")]
KeepGib = Annotated[float | None, flag("keep_gib", "GIB")]
KeepOwedGib = Annotated[float | None, flag("keep_owed_gib", "GIB")]
LowWaterMib = Annotated[int | None, flag("low_water_mib", "MIB")]
HorizonDays = Annotated[float | None, flag("horizon_days", "DAYS")]
PendingMax = Annotated[int | None, flag("pending_max", "N")]
LogData = Annotated[str | None, flag("log_data", "DIR")]
Registry = Annotated[str | None, flag("registry", "URL")]
Group = Annotated[str | None, flag("group", "NAME")]
Advertise = Annotated[str | None, flag("advertise", "HOST:PORT")]
MinInSync = Annotated[int | None, flag("min_in_sync", "N")]
SessionMs = Annotated[int | None, flag("session_ms", "MS")]


def up(  # noqa: PLR0913, PLR0917  (typer takes the flags from here)
    data: Data = None,
    host: Host = None,
    port: Port = None,
    http_port: HttpPort = None,
    durability: Durable = None,
    memory_mib: MemoryMib = None,
    buffer_mib: BufferMib = None,
    keep_hours: KeepHours = None,
    keep_gib: KeepGib = None,
    keep_owed_gib: KeepOwedGib = None,
    low_water_mib: LowWaterMib = None,
    horizon_days: HorizonDays = None,
    pending_max: PendingMax = None,
    log_data: LogData = None,
    allow_remote: AllowRemote = None,
    config: ConfigFile = None,
) -> None:
    """The help text is above."""
    _run("up", config, locals())


def serve(  # noqa: PLR0913, PLR0917  (typer takes the flags from here)
    context: typer.Context,
    data: Data = None,
    host: Host = None,
    port: Port = None,
    http_port: HttpPort = None,
    durability: Durable = None,
    memory_mib: MemoryMib = None,
    buffer_mib: BufferMib = None,
    keep_hours: KeepHours = None,
    keep_gib: KeepGib = None,
    keep_owed_gib: KeepOwedGib = None,
    low_water_mib: LowWaterMib = None,
    registry: Registry = None,
    group: Group = None,
    advertise: Advertise = None,
    min_in_sync: MinInSync = None,
    session_ms: SessionMs = None,
    allow_remote: AllowRemote = None,
    config: ConfigFile = None,
) -> None:
    """`fairway broker`; the help text is above."""
    flags = locals()
    del flags["context"]
    if context.invoked_subcommand is None:
        _run("broker", config, flags)


app = typer.Typer(help=BROKER_HELP, invoke_without_command=True)
app.callback(help=BROKER_HELP)(serve)
app.command("promote")(promote)


def _run(verb: str, config: Path | None, flags: dict[str, object]) -> None:
    with output.failures(verb):
        options = resolve(config, **{name: value for name, value in flags.items() if name != "config"}).options
        data = data_directory(options)
        from fairway.world import service

        if verb == "broker" and (options.group is not None or options.registry is not None):
            from fairway.cli import member

            service.run_server(member.serve(data, options, broker_options(options)))
        else:
            service.run_server(_serve(verb, data, options))


def data_directory(options: CliOptions) -> Path:
    """Of a server; `Misuse` where there cannot be one."""
    if not host_machine.can_serve():
        raise Misuse("a broker runs on Linux, or on macOS for development; the other commands run here, too")
    if not options.data:
        raise Misuse("no data directory: give --data DIR, or set FAIRWAY_DATA, or data in fairway.toml")
    if options.log_data is not None:
        check_directory(Path(options.log_data), "--log-data")
    return check_directory(Path(options.data), "--data")


def check_directory(path: Path, flag: str) -> Path:
    """A path where a directory is, or can be made; `Misuse` where a file is in the way."""
    for each in (path, *path.parents):
        if each.is_dir():
            break
        if each.exists():
            raise Misuse(f"{each} is a file, and {flag} names a directory: give another path, or move the file away")
    return path


def broker_memory(options: CliOptions, *, with_delay: bool = False) -> MemoryPlan:
    """How a broker divides its memory; `Misuse` where the sum does not fit. `with_delay`: with a delay server."""
    from fairway.serving.memory_plan import broker_plan

    return broker_plan(options.memory_mib, options.buffer_mib, options.pending_max if with_delay else None)


def broker_options(options: CliOptions, memory: MemoryPlan | None = None) -> BrokerOptions:
    """What the broker makes of the settings. `memory`: how it is divided, where a delay server has a part of it."""
    memory = memory or broker_memory(options)
    from fairway.broker.server import BrokerOptions
    from fairway.protocol import ConnectionOptions
    from fairway.storage import flusher
    from fairway.storage.retention import Policy
    from fairway.storage.retention_choice import AgeSource
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
        connection=ConnectionOptions(name=_name()),
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
    """The process may not have as many as a server needs; the sentence names the number and the remedy."""


def connections_max() -> int:
    """As many as there are descriptors for; `TooFewDescriptors` names the number that is needed."""
    from fairway.world import service

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


def delay_options(options: CliOptions, memory: MemoryPlan) -> DelayOptions:
    """What the delay server makes of the settings."""
    from fairway.delay.options import DelayOptions
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
    """Start, say so, wait, stop. Raises the fault that ended it, if one did."""
    from fairway.cli.starting import ports_taken

    asked = asked_to_end()
    memory = broker_memory(options, with_delay=verb == "up")
    broker = broker_options(options, memory)
    async with ports_taken(options.host, options.port, options.http_port) as net:
        await _serve_on(net, verb, data, options, broker, memory, asked)


async def _serve_on(
    net: RealNet,
    verb: str,
    data: Path,
    options: CliOptions,
    broker: BrokerOptions,
    memory: MemoryPlan,
    asked: Callable[[], Awaitable[object]],
) -> None:
    from fairway.broker.server import Broker, BrokerWorld
    from fairway.cli.starting import settle
    from fairway.storage import directory
    from fairway.world.clock import RealClock
    from fairway.world.rng import RealRng
    from fairway.world.work_pool import ThreadPool

    disk = open_disk(data)
    directory.identify(disk)  # before anything is made in a directory that is not ours
    check_alone(disk, data)
    delay = _open_delay(data, options, memory, net) if verb == "up" else None
    try:
        world = BrokerWorld(RealClock(), disk, net, RealRng(), ThreadPool())
        started = await Broker.start(world, broker, delay=None if delay is None else delay.desk)
    except FairwayError:
        if delay is not None:
            await delay.stop()
        raise
    if delay is not None:
        delay.reach_here((_ANYWHERE.get(options.host, options.host), started.port))
        say_findings(delay.engine.store, delay.engine.log.findings)
    settle(verb)
    _say_ready(verb, started, data)
    await run_to_end(asked, started, delay)


async def run_to_end(asked: Callable[[], Awaitable[object]], started: Broker, delay: Delay | None) -> None:
    """Wait until the process is asked to end, or one of both has failed; then stop both. Raises what failed."""
    await first_of(asked, started.failed, *([] if delay is None else [delay.failed]))
    try:
        if delay is not None and started.store.fault is not None:
            await delay.stop(drain_ms=0)  # a broker that has failed answers nothing
        elif delay is not None:
            await delay.stop()
    finally:
        await started.stop()


def check_alone(disk: Disk, data: Path) -> None:
    """`Misuse` where a directory belongs to a group."""
    from fairway.replication.promise import EpochPromise

    if EpochPromise(disk).epoch:
        raise Misuse(
            f"{data} is a copy of a group, and alone it would write what the others do not have: start it with "
            "--registry and --group"
        )


def _open_delay(data: Path, options: CliOptions, memory: MemoryPlan, net: Net) -> Delay | None:
    from fairway.batch.arrays import numpy_or_none

    if numpy_or_none() is None:
        server_log.line("remark: without numpy no delayed messages are taken: pip install 'fairway[server]'")
        return None
    from fairway.delay.service import Delay

    world = delay_world(data / _DELAY, options, net, is_below=True)
    return Delay.open(world, delay_options(options, memory), _name())


def delay_world(data: Path, options: CliOptions, net: Net, *, is_below: bool = False) -> DelayWorld:
    """The world of a delay server with its data there; `is_below` as for `open_disk`."""
    from fairway.delay.service import DelayWorld
    from fairway.world.clock import RealClock
    from fairway.world.rng import RealRng

    log_disk = None if options.log_data is None else open_disk(Path(options.log_data))
    return DelayWorld(RealClock(), open_disk(data, is_below=is_below), net, RealRng(), log_disk)


def open_disk(path: Path, *, is_below: bool = False) -> RealDisk:
    """`is_below`: the operator has named the directory above."""
    import asyncio

    from fairway.world.real_disk import RealDisk

    return RealDisk(path, post=asyncio.get_running_loop().call_soon_threadsafe, is_below=is_below)


def asked_to_end() -> Callable[[], Awaitable[object]]:
    """Returns when somebody wants the process to end."""
    from fairway.world import service

    return service.asked_to_end().wait


async def first_of(*ways: Callable[[], Awaitable[object]]) -> None:
    """Return when one of them does."""
    import asyncio

    ending = [asyncio.ensure_future(way()) for way in ways]
    await asyncio.wait(ending, return_when=asyncio.FIRST_COMPLETED)
    for each in ending:
        each.cancel()


def say_findings(store: Store, others: Sequence[Finding] = ()) -> None:
    """What a start had to put right."""
    for finding in (*store.findings, *others):
        span = f"{finding.damage.end - finding.damage.start:,} bytes at {finding.damage.start:,}"
        server_log.line(f"{finding.verdict.value}: {span}: {finding.damage.why}")
    for remark in store.remarks:
        server_log.line(f"remark: {remark}")


def _name() -> str:
    from fairway import __version__

    return f"fairway {__version__}"


def _say_ready(verb: str, started: Broker, data: Path) -> None:
    say_findings(started.store)
    http = f" and {started.http_url}" if started.http_url is not None else ""
    server_log.ready(f"fairway {verb}: ready at {started.url}{http}, data in {data}")
