"""`fairway spool status|drain|retry|discard`: what waits on this host's disk for the broker; to the broker with it, or
away with what was set aside."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import meta_client, output
from fairway.cli.client import AsJson, Patience, Url
from fairway.cli.settings import ConfigFile, resolve
from fairway.client.url import META_SCHEME
from fairway.errors import FairwayError, Misuse, Unreachable
from fairway.world import terminal

if TYPE_CHECKING:
    from fairway import Client
    from fairway.cli.options import CliOptions
    from fairway.client.spool_again import Changed
    from fairway.client.spool_survey import JournalReport, SpoolReport

app = typer.Typer(no_args_is_help=True)

_LOOK_S = 0.2  # how often a drain is looked at
_ADOPT_MS = 200

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The spool: what connect(spool=...) names.", show_default=False)
]
Timeout = Annotated[
    float | None, typer.Option("--timeout-s", min=0, metavar="SECONDS", help="Give up after so long; else never.")
]
Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="[ID]...", help="Batches, JOURNAL/NUMBER as `spool status` shows them.", show_default=False),
]
Pinned = Annotated[
    str | None,
    typer.Option("--group", metavar="GROUP", help="What waits for this broker group, which was given up for good."),
]
MayRepeat = Annotated[
    bool, typer.Option("--may-repeat", help="Also what may be stored already: it may be stored twice then.")
]
Everything = Annotated[bool, typer.Option("--all", help="All that was set aside.")]


@app.callback()
def _root() -> None:
    """Messages that wait on this host's disk for the broker."""


@app.command("status")
def status(directory: Directory, json: AsJson = False) -> None:
    """What is in a spool: journals of living and dead processes, what was set aside and why, damage.

    Exit status 4 if something was set aside or is damaged.
    """
    with output.failures("spool status"):
        report = _surveyed(directory)
    if json:
        output.write_json(report)
    else:
        _show(report)
    if not report.is_sound:
        raise typer.Exit(output.Exit.DAMAGE)


@app.command("drain")
def drain(
    directory: Directory,
    timeout_s: Timeout = None,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Send what dead processes left in a spool. Living ones send their own.

    Exit status 1 if some of it is left, 3 if nobody answers, 4 if something was set aside or is damaged.
    """
    with output.failures("spool drain"):
        before = _surveyed(directory)
        orphaned = sum(each.messages for each in before.journals if each.process is None)
        options = resolve(config, url=url, patience_s=patience_s).options
        delivered, is_done, trouble, to = 0, True, "", options.url
        if any(each.process is None for each in before.journals):
            delivered, is_done, trouble = _drained(directory, to, options.patience_s, orphaned, timeout_s)
        after = _surveyed(directory)
    _tell(delivered, is_done, trouble, after, to, json=json)


@app.command("retry")
def retry(
    directory: Directory,
    ids: Ids = None,
    group: Pinned = None,
    may_repeat: MayRepeat = False,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """Put back what was set aside, all of it or these batches: `spool drain` sends it again, or the next client.

    What may be stored already needs --may-repeat. With --group, it is what waits for that broker group that is put
    back; the meta server (--url meta://HOST:PORT) is asked, and must not know the group any more.

    Exit status 1 if something stays as it was: there is no such id, or its process lives.
    """
    from fairway.client import spool_again
    from fairway.world.clock import RealClock
    from fairway.world.rng import RealRng

    with output.failures("spool retry"):
        if group is None:
            done = spool_again.retry(str(directory), ids or None, RealClock(), RealRng(), may_repeat=may_repeat)
        elif ids:
            raise Misuse("name the ids of batches that were set aside, or a --group, not both")
        else:
            options = resolve(config, url=url, patience_s=patience_s).options
            _check_given_up(directory, group, options, may_repeat=may_repeat)
            done = spool_again.retry_pinned(str(directory), group, RealClock(), RealRng())
    what = f"put back: `fairway spool drain {directory}` sends them, or the next client that names the spool"
    if_none = "nothing was set aside" if group is None else f"nothing waits for broker group {group}"
    _tell_changed("spool retry", done, what, if_none, json=json)


@app.command("discard")
def discard(directory: Directory, ids: Ids = None, everything: Everything = False, json: AsJson = False) -> None:
    """Delete what was set aside: its messages are never sent. Exit status 1 if something stays as it was."""
    from fairway.client import spool_again
    from fairway.world.clock import RealClock
    from fairway.world.rng import RealRng

    with output.failures("spool discard"):
        if bool(ids) == everything:
            raise Misuse("name the ids of batches, or say --all; `fairway spool status` shows what was set aside")
        done = spool_again.discard(str(directory), ids or None, RealClock(), RealRng())
    _tell_changed("spool discard", done, "deleted", "nothing was set aside", json=json)


def _check_given_up(directory: Path, group: str, options: CliOptions, *, may_repeat: bool) -> None:
    """Only the group can tell whether it has what waits for it: while it may come back, that is what is asked."""
    from fairway.protocol.routing import ClientRole, Route, Routed

    waiting = sum(each.pinned.get(group, 0) for each in _surveyed(directory).journals)
    if not waiting:
        return
    if not may_repeat:
        raise Misuse(
            f"{output.count(waiting, 'message')} may be stored in broker group {group} already: sent again, they may "
            "be stored twice. Say --may-repeat if they may"
        )
    if not options.url.startswith(META_SCHEME):
        raise Misuse(
            f"{options.url} is no meta server, and one must say that group {group} is gone: --url meta://HOST:PORT"
        )
    found = meta_client.ask(options, Route(ClientRole.TOOL, []), Routed)
    if any(each.name == group for each in found.groups):
        raise FairwayError(
            f"the meta server knows broker group {group}, which can tell what it has stored: start its servers, and "
            f"drain; or give it up first, with `fairway cluster decommission {group}`"
        )
    if found.is_old:
        raise FairwayError(f"the registry cannot be reached, so nobody knows whether group {group} is gone: try again")


def _tell_changed(verb: str, done: Changed, what: str, if_none: str, *, json: bool) -> None:
    is_short = bool(done.unknown or done.left)
    if json:
        output.write_json(done)
    else:
        batches, messages = output.count(len(done.ids), "batch"), output.count(done.messages, "message")
        if done.ids or not is_short:
            terminal.say(f"{batches} with {messages} {what}" if done.ids else if_none)
        if done.may_repeat and verb == "spool retry":
            terminal.say(f"{output.count(done.may_repeat, 'message')} may be stored twice, under the same id")
        for sentence in [*(f"{each} is not among what was set aside" for each in done.unknown), *done.left]:
            terminal.say(f"fairway {verb}: {sentence}", err=True)
    if is_short:
        raise typer.Exit(output.Exit.FAILED)


def _surveyed(directory: Path) -> SpoolReport:
    from fairway.client.spool_survey import survey
    from fairway.world.clock import RealClock

    return survey(str(directory), RealClock())


def _drained(
    directory: Path, url: str, patience_s: float, orphaned: int, timeout_s: float | None
) -> tuple[int, bool, str]:
    """How many messages were sent, whether that is all, and what stood in the way."""
    import fairway
    from fairway.world.clock import RealClock
    from fairway.world.host import asked_to_end

    clock = RealClock()
    end_ns = None if timeout_s is None else clock.monotonic_ns() + int(timeout_s * 1e9)
    spool = fairway.SpoolOptions(str(directory), adopt_ms=_ADOPT_MS)
    with asked_to_end() as ending, fairway.connect(url, spool=spool) as client:
        _check_reached(client, patience_s)
        is_done = False
        with output.slow_bar("spool", orphaned) as advance:
            while not is_done and not ending.is_asked and (end_ns is None or clock.monotonic_ns() < end_ns):
                is_done = client.wait_drained(_LOOK_S)
                advance(_delivered(client)[0])
        if not is_done:
            client.abandon()
        return (_delivered(client)[0], is_done, _delivered(client)[1])


def _check_reached(client: Client, patience_s: float) -> None:
    try:
        client.wait_connected(patience_s)
    except Unreachable:
        client.abandon()
        raise


def _delivered(client: Client) -> tuple[int, str]:
    state = client.spool
    return (0, "") if state is None else (state.delivered, state.trouble)


def _tell(delivered: int, is_done: bool, trouble: str, after: SpoolReport, url: str, *, json: bool) -> None:
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
    """What became of a dead process's journal that is not empty."""
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
    from fairway.client.spool_again import batch_id

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
        terminal.say(f"to send it again, once the cause is mended: `fairway spool retry {report.directory}`")
