"""`fairway spool status|drain|retry|discard`: the messages that wait on this host's disk for the broker."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import fairway
from fairway import Client
from fairway.cli import connections, output
from fairway.cli.arguments import AsJson
from fairway.cli.connections import CommonOptions, common_options
from fairway.cli.settings import CliOptions
from fairway.client.url import META_SCHEME
from fairway.errors import FairwayError, Misuse, Unreachable
from fairway.protocol.route_messages import ClientRole, Route, Routed
from fairway.runtime import terminal
from fairway.runtime.clock import RealClock
from fairway.runtime.host import asked_to_end
from fairway.runtime.rng import RealRng

if TYPE_CHECKING:
    from fairway.client.spool.spool_directory import Changed, JournalReport, SpoolReport

app = typer.Typer(no_args_is_help=True)

_LOOK_S = 0.2  # between two looks at a drain
_ADOPT_MS = 200

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The spool directory, as in connect(spool=...).", show_default=False)
]
Timeout = Annotated[
    float | None, typer.Option("--timeout-s", min=0, metavar="SECONDS", help="Give up after SECONDS; unset: never.")
]
Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID", help="Batches, JOURNAL/NUMBER as `spool status` shows them.", show_default=False),
]
Pinned = Annotated[
    str | None,
    typer.Option("--group", metavar="GROUP", help="Messages that wait for this broker group, which is gone for good."),
]
MayRepeat = Annotated[
    bool,
    typer.Option("--may-repeat", help="Also batches that may be stored already: accept that they may be stored twice."),
]
Everything = Annotated[bool, typer.Option("--all", help="All batches that were set aside.")]


@app.callback()
def _root() -> None:
    """The spool: messages that wait on this host's disk for the broker.

    A batch that the broker refuses for good is set aside: it waits for `spool
    retry` or `spool discard`.
    """


@app.command("status")
def status(directory: Directory, json: AsJson = False) -> None:
    """Show a spool: journals of running and dead processes, batches set aside, damage.

    Exit status 4 if a batch was set aside or something is damaged.
    """
    with output.failures("spool status"):
        report = _survey(directory)
    if json:
        output.write_json(report)
    else:
        _show(report)
    if not report.is_sound:
        raise typer.Exit(output.Exit.DAMAGE)


@app.command("drain")
@common_options
def drain(directory: Directory, timeout_s: Timeout = None, *, common: CommonOptions) -> None:
    """Send the messages that dead processes left in a spool. Running ones send their own.

    Exit status: 1 some messages are left, 3 no broker answers, 4 a batch was set
    aside or something is damaged.
    """
    with output.failures("spool drain"):
        before = _survey(directory)
        orphaned = sum(each.messages for each in before.journals if each.process is None)
        options = common.resolve()
        delivered, is_done, trouble, to = 0, True, "", options.url
        if any(each.process is None for each in before.journals):
            delivered, is_done, trouble = _drained(directory, to, options.patience_s, orphaned, timeout_s)
        after = _survey(directory)
    _show_drained(delivered, is_done, trouble, after, to, json=common.json)


@app.command("retry")
@common_options
def retry(
    directory: Directory, ids: Ids = None, group: Pinned = None, may_repeat: MayRepeat = False, *, common: CommonOptions
) -> None:
    """Put batches that were set aside back into the spool: all, or those with these IDs.

    `spool drain` or the next client sends them. Batches that may be stored
    already need --may-repeat. With --group, batches that wait for that broker
    group are put back; the meta server (--url meta://HOST:PORT) must not know
    the group any more.

    Exit status 1 if a batch stays: its ID is unknown, or its process runs.
    """
    from fairway.client.spool import spool_directory

    with output.failures("spool retry"):
        if group is None:
            done = spool_directory.retry(str(directory), ids or None, RealClock(), RealRng(), may_repeat=may_repeat)
        elif ids:
            raise Misuse("give the IDs of batches, or --group, not both")
        else:
            options = common.resolve()
            _check_given_up(directory, group, options, may_repeat=may_repeat)
            done = spool_directory.retry_pinned(str(directory), group, RealClock(), RealRng())
    what = f"put back: `fairway spool drain {directory}` sends them, or the next client that names the spool"
    if_none = "nothing was set aside" if group is None else f"nothing waits for broker group {group}"
    _show_changed("spool retry", done, what, if_none, json=common.json)


@app.command("discard")
def discard(directory: Directory, ids: Ids = None, everything: Everything = False, json: AsJson = False) -> None:
    """Delete batches that were set aside: their messages are never sent. Exit status 1 if one stays."""
    from fairway.client.spool import spool_directory

    with output.failures("spool discard"):
        if bool(ids) == everything:
            raise Misuse("give the IDs of batches, or --all; `fairway spool status` shows the batches set aside")
        done = spool_directory.discard(str(directory), ids or None, RealClock(), RealRng())
    _show_changed("spool discard", done, "deleted", "nothing was set aside", json=json)


def _check_given_up(directory: Path, group: str, options: CliOptions, *, may_repeat: bool) -> None:
    """Refuse while the broker group may come back: only that group knows what it has stored."""
    waiting = sum(each.pinned.get(group, 0) for each in _survey(directory).journals)
    if not waiting:
        return
    if not may_repeat:
        raise Misuse(
            f"{output.count(waiting, 'message')} may be stored in broker group {group} already: sent again, they may "
            "be stored twice. Add --may-repeat to accept that"
        )
    if not options.url.startswith(META_SCHEME):
        raise Misuse(
            f"{options.url} is not a meta server, and only a meta server can tell that group {group} is gone: "
            "give --url meta://HOST:PORT"
        )
    found = connections.ask(options, Route(ClientRole.TOOL, []), Routed)
    if any(each.name == group for each in found.groups):
        raise FairwayError(
            f"the meta server knows broker group {group}, which can tell what it has stored: start its servers, and "
            f"drain; or give it up first, with `fairway cluster decommission {group}`"
        )
    if found.is_old:
        raise connections.unknown_fate(group)


def _show_changed(verb: str, done: Changed, what: str, if_none: str, *, json: bool) -> None:
    is_short = bool(done.unknown or done.left)
    if json:
        output.write_json(done)
    else:
        batches, messages = output.count(len(done.ids), "batch"), output.count(done.messages, "message")
        if done.ids or not is_short:
            terminal.say(f"{batches} with {messages} {what}" if done.ids else if_none)
        if done.may_repeat and verb == "spool retry":
            terminal.say(f"{output.count(done.may_repeat, 'message')} may be stored twice, under the same id")
        for sentence in [*(f"no batch {each} is set aside" for each in done.unknown), *done.left]:
            terminal.say(f"fairway {verb}: {sentence}", err=True)
    if is_short:
        raise typer.Exit(output.Exit.FAILED)


def _survey(directory: Path) -> SpoolReport:
    from fairway.client.spool.spool_directory import survey

    return survey(str(directory), RealClock())


def _drained(
    directory: Path, url: str, patience_s: float, orphaned: int, timeout_s: float | None
) -> tuple[int, bool, str]:
    """How many messages were sent, whether all were, and the last problem."""
    clock = RealClock()
    end_ns = None if timeout_s is None else clock.monotonic_ns() + int(timeout_s * 1e9)
    spool = fairway.SpoolOptions(str(directory), adopt_ms=_ADOPT_MS)
    with asked_to_end() as ending, fairway.connect(url, spool=spool) as client:
        try:
            client.wait_connected(patience_s)
        except Unreachable:
            client.abandon()
            raise
        is_done = False
        with output.slow_bar("spool", orphaned) as advance:
            while not is_done and not ending.is_asked and (end_ns is None or clock.monotonic_ns() < end_ns):
                is_done = client.wait_drained(_LOOK_S)
                advance(_delivered(client)[0])
        if not is_done:
            client.abandon()
        return (_delivered(client)[0], is_done, _delivered(client)[1])


def _delivered(client: Client) -> tuple[int, str]:
    state = client.spool
    return (0, "") if state is None else (state.delivered, state.trouble)


def _show_drained(delivered: int, is_done: bool, trouble: str, after: SpoolReport, url: str, *, json: bool) -> None:
    left = sum(each.messages for each in after.journals if each.process is None)
    if json:
        output.write_json({"delivered": delivered, "left": left, "trouble": trouble, "spool": after})
    else:
        terminal.say(f"{output.count(delivered, 'message')} delivered, {left:,} left")
        for each in after.journals:
            if each.process is not None:
                terminal.say(f"journal {each.name}: process {each.process} lives, and sends its own {each.messages:,}")
            elif each.messages:
                terminal.say(_why_left(each, url))
        if trouble:
            terminal.say(f"fairway spool drain: {trouble}", err=True)
        if not after.is_sound:
            terminal.say("fairway spool drain: something was set aside or is damaged: `fairway spool status`", err=True)
    if not after.is_sound:
        raise typer.Exit(output.Exit.DAMAGE)
    if left or not is_done:
        raise typer.Exit(output.Exit.FAILED)


def _why_left(journal: JournalReport, url: str) -> str:
    """Why the journal of a dead process is not empty."""
    what = f"journal {journal.name}: {journal.messages:,} left"
    if journal.is_cluster is not url.startswith(META_SCHEME):
        whose, remedy = (
            ("a cluster", "meta://HOST:PORT") if journal.is_cluster else ("one broker", "fairway://HOST:PORT")
        )
        return f"{what}, by a client of {whose}: drain it with --url {remedy}"
    if journal.pinned:
        groups = ", ".join(f"{name} ({messages:,})" for name, messages in journal.pinned.items())
        return (
            f"{what}, of which some may be stored in broker group {groups}: it alone can tell, so they wait for it; if "
            "it was given up for good: `fairway spool retry --group`"
        )
    return what


def _show(report: SpoolReport) -> None:
    from fairway.client.spool.spool_directory import batch_id

    table = output.table(
        f"spool {report.directory}", "journal", "process", "messages>", "batches>", "size>", "oldest (UTC)",
        "pinned to", "trouble",
    )  # fmt: skip
    rows = [
        (
            each.name,
            "dead" if each.process is None else str(each.process or "alive"),
            f"{each.messages:,}",
            f"{each.batches:,}",
            output.size(each.size_bytes),
            output.moment(each.since_ms),
            ", ".join(f"{name} ({messages:,})" for name, messages in each.pinned.items()),
            "; ".join(filter(None, [each.trouble, *(f"damaged: {name}" for name in each.damaged)])),
        )
        for each in report.journals
    ]
    output.show_rows(table, rows, f"nothing is in the spool {report.directory}")
    aside = [
        (
            batch_id(journal.name, each.number),
            each.subject,
            f"{each.messages:,}",
            output.moment(each.time_ms),
            each.reason,
        )
        for journal in report.journals
        for each in journal.set_aside
    ]
    if aside:
        titles = ("id", "subject", "messages>", "when (UTC)", "why")
        output.show_rows(output.table("set aside", *titles), aside, "")
        terminal.say(f"remove the cause, then send the batches again: `fairway spool retry {report.directory}`")
