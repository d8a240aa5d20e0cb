"""`fairway broker` and `fairway delay serve` with `--registry URL --group NAME`: one copy of a server group."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fairway.cli import output
from fairway.cli.broker import and_http, open_disk, run_until_asked, say_findings
from fairway.cli.settings import CliOptions
from fairway.client.url import BrokerAddress
from fairway.errors import Misuse
from fairway.lookup.registries import META, open_registry, parse_meta
from fairway.names import GroupName
from fairway.protocol import ConnectionOptions
from fairway.redaction import without_password
from fairway.runtime.clock import RealClock
from fairway.runtime.net import Net
from fairway.runtime.rng import RealRng
from fairway.runtime.threads import ThreadPool, ThreadRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from fairway.broker.broker_copy import BrokerCopy
    from fairway.broker.server import BrokerOptions
    from fairway.delay.server import DelayCopy, ServerOptions
    from fairway.replication.copies import CopyOptions, CopyRuntime
    from fairway.replication.copy_lifecycle import CopyLifecycle

    MemberT = TypeVar("MemberT", bound=CopyLifecycle[Any])

_WATCH_S = 0.5
_BEAT_MS_MIN = 1_000
_CLOSE_S = 2.0  # for a registry to end a session
_ANYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104


async def serve(data: Path, options: CliOptions, broker: BrokerOptions) -> None:
    """Start a copy, log each change of its role, wait, hand over, stop. Raises the fault that ended it, if any."""
    from fairway.broker.broker_copy import BrokerCopy

    membership = member_options(options)
    quick = replace(broker, connection=_with_quick_pulse(broker.connection, membership))

    def make(world: CopyRuntime) -> BrokerCopy:
        return BrokerCopy(world, quick, membership)

    await _serve("broker", data, options, make, lambda member: say_ready(member, data))


async def serve_delay(data: Path, options: CliOptions, server: ServerOptions) -> None:
    """The same for a delay server. If the logs have their own directory, that directory identifies the copy."""
    from fairway.delay.server import DelayCopy

    membership = member_options(options)
    session_manager = replace(server.session_manager, connection=_with_quick_pulse(server.connection, membership))
    url = str(options.registry)
    metas = parse_meta(url) if url.startswith(META) else ()
    logs = data if options.log_data is None else Path(options.log_data)

    def make(world: CopyRuntime) -> DelayCopy:
        beside = None if options.log_data is None else lambda: open_disk(data, is_copy=True)
        return DelayCopy(world, replace(server, session_manager=session_manager), membership, metas, beside)

    await _serve("delay", logs, options, make, lambda member: say_delay_ready(member, data))


async def _serve(
    verb: str,
    logs: Path,
    options: CliOptions,
    make: Callable[[CopyRuntime], MemberT],
    say: Callable[[MemberT], None],
) -> None:
    start = partial(_start, verb, logs, options, make)
    await run_until_asked(verb, options, start, say, partial(_log_changes, verb))


async def _start(
    verb: str, logs: Path, options: CliOptions, make: Callable[[CopyRuntime], MemberT], net: Net
) -> MemberT:
    """Open a session at the registry and start; a failed start ends the session."""
    from fairway.replication.copies import CopyRuntime

    clock, rng = RealClock(), RealRng()
    name = f"{verb} {options.group}"
    registry = await open_registry(str(options.registry), net, clock, rng, session_ms=options.session_ms, name=name)
    try:
        disk = partial(open_disk, logs, is_copy=True)
        member = make(CopyRuntime(clock, disk, net, rng, registry, ThreadRunner(), ThreadPool()))
        await member.begin()
    except BaseException:
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await registry.close()
        raise
    return member


def _with_quick_pulse(connection: ConnectionOptions, membership: CopyOptions) -> ConnectionOptions:
    """Clients give up a stalled master soon after its followers do: after three heartbeats."""
    beat_ms = min(max(membership.session_ms // 2, _BEAT_MS_MIN), connection.heartbeat_ms)
    return replace(connection, heartbeat_ms=beat_ms)


def member_options(options: CliOptions) -> CopyOptions:
    """The settings as options of a copy."""
    from fairway.replication.copies import CopyOptions

    if options.group is None:
        raise Misuse("--registry without --group: give --group NAME, the server group that this server is a copy of")
    if options.registry is None:
        raise Misuse("--group without --registry: give --registry URL, where the copies of the group find one another")
    if options.registry.startswith("sqlite:"):
        raise Misuse("sqlite: is for the meta server that keeps the registry: give --registry meta://HOST:PORT of that")
    if options.host in _ANYWHERE and options.advertise is None:
        raise Misuse(f"other machines cannot connect to {options.host}: add --advertise HOST:PORT")
    return CopyOptions(
        str(GroupName.parse(options.group)),
        advertise=None if options.advertise is None else _address(options.advertise),
        min_in_sync=options.min_in_sync,
        session_ms=options.session_ms,
    )


def _address(raw: str) -> tuple[str, int]:
    host, _, port = raw.rpartition(":")
    if not host or not port.isascii() or not port.isdigit():
        raise Misuse(f"bad address {without_password(raw)!r}: write HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def say_ready(member: BrokerCopy, data: Path) -> None:
    host, port = member.address
    output.ready(
        f"fairway broker: ready at fairway://{host}:{port}, data in {data}, "
        f"copy {member.directory} of group {member.membership.group}"
    )


def say_delay_ready(member: DelayCopy, data: Path) -> None:
    if member.server is not None:
        say_findings(member.server.store, member.server.delay.engine.log.findings)
    face = member.face
    where = f"{BrokerAddress(*member.address)}{and_http(face.host, face.http_port)}"
    output.ready(
        f"fairway delay: ready at {where}, data in {data}, copy {member.directory} of group {member.membership.group}"
    )


async def _log_changes(verb: str, member: CopyLifecycle[Any]) -> None:
    """Log every change of what the copy does, for ever."""
    last = ""
    logged = 0
    while True:
        for finding in member.findings[logged:]:
            output.line(f"remark: {finding}")
        logged = len(member.findings)
        sentence = member.sentence()
        if sentence != last:
            last = sentence
            output.line(f"fairway {verb}: {sentence}")
        await asyncio.sleep(_WATCH_S)
