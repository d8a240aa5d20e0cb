"""`fairway delay`: list, count, cancel and reschedule delayed messages, and resend those of a lost broker group.

`fairway delay serve` runs a delay server in a process of its own, until SIGTERM or Ctrl-C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from fairway import DelayedMessage, DelayedOutcome, limits
from fairway.cli import arguments, connections, output
from fairway.cli import broker as broker_verbs
from fairway.cli.arguments import Limit
from fairway.cli.broker import and_http, ports_taken, settle
from fairway.cli.connections import CommonOptions, common_options
from fairway.cli.settings import CliOptions, ServerFlags, resolve, server_flags
from fairway.client.delayed_messages import Between
from fairway.client.url import META_SCHEME, SCHEME, BrokerAddress
from fairway.errors import FairwayError, Misuse
from fairway.runtime import service, terminal
from fairway.runtime.clock import RealClock

if TYPE_CHECKING:
    from pathlib import Path

    from fairway.delay.server import ServerOptions

_BAR_CHARS = 40  # of the longest bar
_ROWS_MAX = 60  # of a histogram for people

OfSubject = Annotated[str | None, typer.Option("--subject", "-s", metavar="SUBJECT", help="Only this subject.")]
KeyPrefix = Annotated[str | None, typer.Option("--key-prefix", metavar="TEXT", help="Only keys that begin with TEXT.")]
From = Annotated[
    str | None,
    typer.Option(
        "--from", metavar="WHEN", help=f"Due then or later: a time, or how long from now ({arguments.SPAN_HELP})."
    ),
]
To = Annotated[str | None, typer.Option("--to", metavar="WHEN", help="Due before then.")]
Width = Annotated[
    str, typer.Option("--width", "-w", metavar="SPAN", help=f"Time span of one row: {arguments.SPAN_HELP}.")
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="Message IDs; or give --subject and --key.")]
InSubject = Annotated[str | None, typer.Option("--subject", "-s", metavar="SUBJECT", help="Subject of the messages.")]
Key = Annotated[str | None, typer.Option("--key", "-k", metavar="KEY", help="All pending messages of this key.")]
After = Annotated[
    str | None, typer.Option("--after", metavar="SPAN", help=f"New due time, from now: {arguments.SPAN_HELP}.")
]
At = Annotated[str | None, typer.Option("--at", metavar="TIME", help="New due time: 2027-01-01T00:00:00Z.")]
GoneGroup = Annotated[str, typer.Option("--group", metavar="GROUP", help="The broker group that is gone for good.")]
MayRepeat = Annotated[bool, typer.Option("--may-repeat", help="Accept that some messages may be delivered twice.")]


@common_options
def list_delayed(
    subject: OfSubject = None,
    key_prefix: KeyPrefix = None,
    start: From = None,
    end: To = None,
    limit: Limit = 100,
    *,
    common: CommonOptions,
) -> None:
    """List pending delayed messages, the next one first."""
    with common.connected("delay list") as client:
        found = client.delayed.list(subject, key_prefix, _between(start, end))
        shown = list(islice(found, limit))
        has_more = len(shown) == limit and next(found, None) is not None
    if common.json:
        output.write_json({"messages": shown, "has_more": has_more})
        return
    now_ms = RealClock().wall_ms()
    table = output.table("delayed messages", "due (UTC)", "in>", "subject", "id", "key", "size>")
    output.show_rows(table, [_row(each, now_ms) for each in shown], "nothing waits for its time", rows_max=limit)
    if has_more:
        terminal.say(f"there are more: --limit {10 * limit}")


def _row(message: DelayedMessage, now_ms: int) -> tuple[str, ...]:
    due_ms = round(message.due_at.timestamp() * 1_000)
    wait = output.age((due_ms - now_ms) / 1_000) if due_ms > now_ms else "due"
    return (
        output.moment(due_ms),
        wait,
        message.subject,
        message.id,
        message.key or "",
        output.size(message.size_bytes),
    )


@common_options
def count_delayed(
    subject: OfSubject = None,
    key_prefix: KeyPrefix = None,
    start: From = None,
    end: To = None,
    *,
    common: CommonOptions,
) -> None:
    """Count delayed messages: pending, and due on their way to a broker group."""
    with common.connected("delay count") as client:
        count = client.delayed.count(subject, key_prefix, _between(start, end))
        in_transit = client.delayed.in_transit()
    sentences = [f"{output.count(count, 'message')} pending"]
    for each in in_transit:
        where = f"broker group {each.group}" + ("" if each.is_reachable else ", which cannot be reached")
        sentences.append(f"{output.count(each.messages, 'message')} of all subjects on the way to {where}")
    common.say({"count": count, "in_transit": in_transit}, *sentences)


@common_options
def retry_delayed(group: GoneGroup, may_repeat: MayRepeat = False, *, common: CommonOptions) -> None:
    """Send messages that wait for a lost broker group to other groups.

    Only the lost group knows what it has stored: start it again if you can.

    Exit status 1 if some messages cannot be sent now; they wait, and none is
    lost.
    """
    with common.connected("delay retry") as client:
        waiting = sum(each.messages for each in client.delayed.in_transit() if each.group == group)
        if waiting and not may_repeat:
            raise Misuse(
                f"{output.count(waiting, 'message')} may be stored in broker group {group} already: sent again, they "
                "may be delivered twice. Add --may-repeat to accept that"
            )
        if waiting:
            _check_gone(group, common)
        done = client.delayed.resend(group) if waiting else None
    messages, left = (0, 0) if done is None else (done.messages, done.left)
    sent = f"{output.count(messages, 'message')} sent to other broker groups"
    common.say({"messages": messages, "left": left}, sent if waiting else f"nothing waits for broker group {group}")
    if left:
        terminal.say(
            f"fairway delay retry: {output.count(left, 'message')} left: no other group takes them now, or {group} "
            "can be reached and is asked",
            err=True,
        )
        raise typer.Exit(output.Exit.FAILED)


def _check_gone(group: str, common: CommonOptions) -> None:
    """Refuse while the broker group may come back: only that group knows what it has stored."""
    options = common.resolve()
    if not options.url.startswith(META_SCHEME):
        return
    found = connections.everything(options)
    if any(each.name == group for each in found.groups):
        raise FairwayError(
            f"the meta server knows broker group {group}, which knows what it has stored: start its servers; or, if "
            f"its disks are lost, remove the group first with `fairway cluster decommission {group} --force`"
        )
    if found.is_old:
        raise connections.unknown_fate(group)


@common_options
def histogram_delayed(
    width: Width = "1d",
    subject: OfSubject = None,
    key_prefix: KeyPrefix = None,
    start: From = None,
    end: To = None,
    *,
    common: CommonOptions,
) -> None:
    """Count pending delayed messages by due time. Empty rows are left out."""
    with common.connected("delay histogram") as client:
        stretch = arguments.span(width)
        found = client.delayed.histogram(stretch, subject, key_prefix, _between(start, end))
    if common.json:
        stretches = [{"start_at": at, "count": count} for at, count in found.items()]
        output.write_json({"width_s": stretch.total_seconds(), "stretches": stretches})
        return
    most = max(found.values(), default=1)
    table = output.table(f"due, by {width}", "from (UTC)", "messages>", "")
    rows = [
        (output.moment(round(at.timestamp() * 1_000)), f"{count:,}", "█" * max(round(_BAR_CHARS * count / most), 1))
        for at, count in islice(found.items(), _ROWS_MAX)
    ]
    output.show_rows(table, rows, "nothing waits for its time", rows_max=_ROWS_MAX)
    if len(found) > _ROWS_MAX:
        terminal.say(f"{len(found) - _ROWS_MAX:,} more behind these: a larger --width shows them, or --json")


@common_options
def cancel_delayed(ids: Ids = None, subject: InSubject = None, key: Key = None, *, common: CommonOptions) -> None:
    """Cancel delayed messages. Exit status 1 if one was already sent, or is unknown."""
    with common.connected("delay cancel") as client:
        decided = _each(ids, key, lambda one: client.delayed.cancel(one, subject=subject, key=key))
    _say("cancel", decided, subject, key, as_json=common.json)


@common_options
def reschedule_delayed(
    ids: Ids = None,
    subject: InSubject = None,
    key: Key = None,
    after: After = None,
    at: At = None,
    *,
    common: CommonOptions,
) -> None:
    """Change the due time of delayed messages. Exit status 1 if one was sent or cancelled, or is unknown."""
    with common.connected("delay reschedule") as client:
        wait = None if after is None else arguments.span(after)
        due = None if at is None else arguments.due(at)
        decided = _each(
            ids, key, lambda one: client.delayed.reschedule(one, subject=subject, key=key, after=wait, at=due)
        )
    _say("reschedule", decided, subject, key, as_json=common.json)


# --- words ------------------------------------------------------------------------------------------------------------

_DONE = {"cancel": "cancelled", "reschedule": "rescheduled"}
_WHY_NOT = {
    "already_dispatched": "was sent before",
    "unknown": "is not known here: never scheduled, or sent long ago",
    "cancelled": "was cancelled before",
}


def _between(start: str | None, end: str | None) -> Between:
    return None if start is None else arguments.ahead(start), None if end is None else arguments.ahead(end)


def _each(
    ids: Sequence[str] | None, key: str | None, decide: Callable[[str | None], DelayedOutcome]
) -> list[tuple[str | None, DelayedOutcome]]:
    if bool(ids) == (key is not None):
        raise Misuse("give message IDs, or --subject and --key")
    meant: Sequence[str | None] = ids or [None]
    return [(one, decide(one)) for one in meant]


def _say(
    verb: str, decided: list[tuple[str | None, DelayedOutcome]], subject: str | None, key: str | None, *, as_json: bool
) -> None:
    """Print the outcome of each; exit status 1 if one failed."""
    failed = [(one, each) for one, each in decided if each.fate != _DONE[verb]]
    if as_json:
        named = [{"id": one, "subject": subject, "key": key, **output.named(each)} for one, each in decided]
        output.write_json({"decisions": named})
    else:
        changed = sum(each.messages for _, each in decided)
        if changed or not failed:
            before = "" if changed else ": that was done before"
            terminal.say(f"{output.count(changed, 'message')} {_DONE[verb]}{before}")
        for one, each in failed:
            what = one if one is not None else f"what has the key {key} in {subject}"
            terminal.say(f"fairway delay {verb}: {what} {_WHY_NOT[each.fate]}", err=True)
    if failed:
        raise typer.Exit(output.Exit.FAILED)


# --- the server -------------------------------------------------------------------------------------------------------

SERVE_HELP = """Run a delay server alone; print its address when ready.

Clients name it in their URL (fairway://BROKER?delay=HOST:PORT). It keeps
their delayed messages, and sends each to its broker group when the message is
due. SIGTERM or Ctrl-C stops it cleanly, with exit status 0; pending messages
stay on its disk.

With --registry and --group instead of --broker it is one copy of a delay
group of a cluster: it leads, or follows the master and can take over from it.
Clients of the cluster find it, and it finds the broker groups.
"""
_REMEDY = "give --broker HOST:PORT, or NAME=HOST:PORT for each of several broker groups, with spaces between them"


@server_flags(
    "data", "host", "port", "http_port", "broker", "horizon_days", "pending_max", "log_data", "memory_mib",
    "buffer_mib", "low_water_mib", "registry", "group", "advertise", "min_in_sync", "session_ms", "allow_remote",
)  # fmt: skip
def serve(*, flags: ServerFlags) -> None:
    """See `SERVE_HELP`."""
    with output.failures("delay serve"):
        options = resolve(**flags).options
        directory = broker_verbs.data_directory(options)
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
    from fairway.delay.server import ServerOptions
    from fairway.serving.memory_plan import delay_plan

    memory = delay_plan(options.memory_mib, options.buffer_mib, options.pending_max)
    return ServerOptions(
        host=options.host,
        port=options.port,
        allow_remote=options.allow_remote,
        http_port=options.http_port,
        waiting_bytes_max=options.buffer_mib * limits.MIB,
        memory_bytes_max=memory.ceiling_bytes,
        session_manager=broker_verbs.session_options(options, memory, "fairway delay"),
        delay=broker_verbs.delay_options(options, memory),
    )


async def _serve(data: Path, options: CliOptions, brokers: dict[str, tuple[BrokerAddress, ...]]) -> None:
    """Start the server, print that it is ready, wait, stop. Raises the fault that ended it, if there is one."""
    from fairway.delay.server import DelayServer

    asked = broker_verbs.asked_to_end()
    server = server_options(options)
    async with ports_taken(options.host, options.port, options.http_port) as net:
        world = broker_verbs.delay_world(data, options, net)
        try:
            broker_verbs.check_alone(world.log_disk or world.disk, data)
        except FairwayError:
            world.close()
            raise
        started = await DelayServer.start(world, server, brokers)
        broker_verbs.say_findings(started.delay.engine.store, started.delay.engine.log.findings)
        where = f"{BrokerAddress(options.host, started.port)}{and_http(options.host, started.http_port)}"
        settle("delay")
        output.ready(f"fairway delay: ready at {where}, data in {data}, sends to {', '.join(brokers)}")
        await broker_verbs.first_of(asked, started.failed)
        await started.stop()


app = typer.Typer(no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Delayed messages: list, count, cancel and reschedule them; run a delay server."""


app.command("serve", help=SERVE_HELP)(serve)
app.command("list")(list_delayed)
app.command("count")(count_delayed)
app.command("histogram")(histogram_delayed)
app.command("cancel")(cancel_delayed)
app.command("reschedule")(reschedule_delayed)
app.command("retry")(retry_delayed)
