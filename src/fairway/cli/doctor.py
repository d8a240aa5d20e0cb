"""`fairway doctor`: check this machine, the settings and the broker, with a remedy for each problem."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from importlib.util import find_spec

import msgspec
import typer

import fairway
from fairway import Client, InTransit, __version__, limits
from fairway.cli import output
from fairway.cli.connections import CommonOptions, common_options, describe
from fairway.cli.settings import CliOptions, Data, Settings, resolve
from fairway.errors import Refused, Unreachable
from fairway.protocol.admin_messages import Depth
from fairway.runtime import host, terminal
from fairway.runtime.clock import RealClock

_PYTHON_MIN = (3, 11)
_DESCRIPTORS_WANTED = limits.CONNECTIONS_MAX + limits.SPARE_DESCRIPTORS
_ROOM_BYTES_LOW = limits.GIB  # a busy broker writes this in a minute
_CLOCKS_APART_MS_MAX = 1_000  # beyond this, retention and the times of messages are visibly wrong
_CONNECTIONS_HIGH = 0.8
_EXTRAS = {
    "numpy": "large batches are checked much faster with it",
    "uvloop": "a broker's loop is faster with it",
}


class CheckStatus(enum.Enum):
    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


class Check(msgspec.Struct, frozen=True):
    """A check and its result."""

    name: str
    state: CheckStatus
    found: str
    remedy: str = ""


@common_options
def doctor(data: Data = None, *, common: CommonOptions) -> None:
    """Check this machine, the settings and the broker; name a remedy for each problem.

    Exit status: 0 ok or warnings alone, 1 a check failed, 3 the broker does not
    answer and nothing else failed.
    """
    with output.failures("doctor"):
        settings = resolve(common.config, url=common.url, patience_s=common.patience_s, data=data)
        checks = [*_machine(settings.options), *_settings(settings), *_broker(settings.options)]
    if common.json:
        output.write_json({"checks": checks})
    else:
        _show(checks)
    failed = [each.name for each in checks if each.state is CheckStatus.FAILED]
    if failed:
        raise typer.Exit(output.Exit.UNREACHABLE if failed == ["broker"] else output.Exit.FAILED)


def _show(checks: list[Check]) -> None:
    from rich.text import Text

    out = terminal.console()
    colours = {CheckStatus.OK: "green", CheckStatus.WARNING: "yellow", CheckStatus.FAILED: "red"}
    for each in checks:
        colour = colours[each.state]
        out.print(Text(f"{each.state.value:8}", colour), f" {each.name}: {each.found}", sep="", soft_wrap=True)
        if each.remedy:
            out.print(f"         {each.remedy}", soft_wrap=True)


def _verdict(name: str, found: str, *, is_ok: bool, remedy: str, otherwise: CheckStatus = CheckStatus.WARNING) -> Check:
    return Check(name, CheckStatus.OK, found) if is_ok else Check(name, otherwise, found, remedy)


# --- this machine -----------------------------------------------------------------------------------------------------


def _machine(options: CliOptions) -> Iterator[Check]:
    version = host.python_version()
    yield _verdict(
        "python",
        ".".join(map(str, version)),
        is_ok=version >= _PYTHON_MIN,
        remedy="use Python 3.11 or newer",
        otherwise=CheckStatus.FAILED,
    )
    for name, why in _EXTRAS.items():
        is_there = find_spec(name) is not None
        remedy = f"{why}, where a broker runs: {output.install(output.EXTRAS[name])}"
        yield _verdict(name, "installed" if is_there else "not installed", is_ok=is_there, remedy=remedy)
    most = host.descriptors_max()
    if most is not None:
        yield _verdict(
            "descriptors",
            f"a process may have {most:,}",
            is_ok=most >= _DESCRIPTORS_WANTED,
            remedy=f"a broker here takes fewer connections: raise the hard limit to {_DESCRIPTORS_WANTED:,} "
            "(ulimit -Hn, LimitNOFILE= of systemd)",
        )
    if options.data:
        yield from _directory(options.data, options.low_water_mib * limits.MIB)


def _directory(data: str, low_water_bytes: int) -> Iterator[Check]:
    yield _verdict(
        "data directory",
        data,
        is_ok=host.may_write(data),
        remedy="this user may not write there: change its owner, or name another with --data",
        otherwise=CheckStatus.FAILED,
    )
    free = host.free_bytes(data)
    yield _room("disk room", free, is_full=free < low_water_bytes)


def _disk(free_bytes: int, *, is_read_only: bool) -> Iterator[Check]:
    """The disk of the broker. An older broker reports 0 free bytes."""
    if free_bytes or is_read_only:
        yield _room("broker's disk", free_bytes, is_full=is_read_only)


def _room(name: str, free_bytes: int, *, is_full: bool) -> Check:
    found = f"{output.size(free_bytes)} free"
    if is_full:
        return Check(
            name, CheckStatus.FAILED, found, "no messages are taken until there is room: free some, or add a disk"
        )
    remedy = "soon no messages will be taken: free some, or keep less (keep_hours, keep_gib)"
    return _verdict(name, found, is_ok=free_bytes >= _ROOM_BYTES_LOW, remedy=remedy)


def _settings(settings: Settings) -> Iterator[Check]:
    found = "defaults" if settings.file is None else str(settings.file)
    strangers = ", ".join(settings.strangers)
    yield _verdict(
        "settings",
        f"{found}; set in vain: {strangers}" if strangers else found,
        is_ok=not strangers,
        remedy="these variables mean nothing to Fairway: see fairway config show for those that do",
    )


# --- the broker -------------------------------------------------------------------------------------------------------


def _broker(options: CliOptions) -> Iterator[Check]:
    clock = RealClock()
    try:
        with fairway.connect(options.url, patience=options.patience_s) as client:
            asked_ms = clock.wall_ms()
            state, subjects = describe(client, Depth.GROUPS)
            answered_ms = clock.wall_ms()
            in_transit = _in_transit(client)
    except (Unreachable, TimeoutError) as error:
        yield Check(
            "broker", CheckStatus.FAILED, str(error), "start one (fairway up --data DIR), or name it with --url"
        )
        return
    yield Check("broker", CheckStatus.OK, f"answers at {options.url} in {answered_ms - asked_ms} ms")
    yield _verdict(
        "version",
        f"broker {state.server}, here fairway {__version__}",
        is_ok=state.server == f"fairway {__version__}",
        remedy="they understand each other, but run one version: upgrade the older",
    )
    if state.now_ms:
        apart_ms = max(asked_ms - state.now_ms, state.now_ms - answered_ms, 0)
        remedy = "set both by NTP: times of messages and what is deleted by age depend on it"
        is_ok = apart_ms <= _CLOCKS_APART_MS_MAX
        yield _verdict("clock", f"{output.age(apart_ms / 1_000)} from the broker's", is_ok=is_ok, remedy=remedy)
    yield from _disk(state.free_bytes, is_read_only=state.is_read_only)
    if state.rotten_spans:
        remedy = "`fairway verify` shows what was in them; replace the disk"
        yield _verdict("broker's logs", f"{state.rotten_spans:,} spans have rotted", is_ok=False, remedy=remedy)
    if state.durability:
        remedy = "a power cut takes the last 100 ms: restart with --durability sync unless that was meant"
        yield _verdict("durability", state.durability, is_ok=state.durability == "sync", remedy=remedy)
    if state.connections_max:
        is_ok = state.connections < _CONNECTIONS_HIGH * state.connections_max
        found = f"{state.connections:,} of {state.connections_max:,}"
        yield _verdict("connections", found, is_ok=is_ok, remedy="raise the broker's limit of descriptors")
    yield from _waiting(in_transit)
    idle = [(each, on) for on in subjects for each in on.groups if each.lag > 0 and not each.consumers_count]
    forsaken = [f"{each.name} on {on.name}" for each, on in idle]
    remedy = "start consumers, or move them (fairway seek SUBJECT GROUP latest): what they owe is kept"
    found = f"behind and without consumers: {', '.join(forsaken[:5])}" if forsaken else "none is forsaken"
    yield _verdict("groups", found, is_ok=not forsaken, remedy=remedy)
    lost = [f"{each.name} on {on.name} {each.lost:,}" for on in subjects for each in on.groups if each.lost]
    remedy = (
        "retention (keep_owed_gib) or a damaged disk took them before the group was done: `fairway verify` shows "
        "damage; send them again from a copy, if they matter"
    )
    found = f"messages that groups never had: {', '.join(lost[:5])}" if lost else "no group has missed a message"
    yield _verdict("lost messages", found, is_ok=not lost, remedy=remedy)


def _in_transit(client: Client) -> list[InTransit]:
    """Delayed messages on their way; none without a delay server."""
    try:
        return client.delayed.in_transit()
    except (Refused, Unreachable, TimeoutError):
        return []


def _waiting(in_transit: list[InTransit]) -> Iterator[Check]:
    lost = [f"{each.messages:,} for {each.group}" for each in in_transit if not each.is_reachable]
    if lost:
        remedy = (
            "start the servers of that group: only it can say what it has. If it is gone for good, "
            "`fairway delay retry --group GROUP --may-repeat` sends them to others"
        )
        found = f"wait for a broker group that cannot be reached: {', '.join(lost[:5])}"
        yield _verdict("delayed messages", found, is_ok=False, remedy=remedy)
