"""`fairway spool status|drain`: what waits on this host's disk for the broker, and to the broker with it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.cli.client import AsJson, Patience, Url
from fairway.cli.settings import ConfigFile, resolve
from fairway.errors import Unreachable

if TYPE_CHECKING:
    from fairway import Client
    from fairway.client.spool_survey import SpoolReport

app = typer.Typer(no_args_is_help=True)

_LOOK_S = 0.2  # how often a drain is looked at
_ADOPT_MS = 200

Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="The spool: what connect(spool=...) names.", show_default=False)
]
Timeout = Annotated[
    float | None, typer.Option("--timeout-s", min=0, metavar="SECONDS", help="Give up after so long; else never.")
]


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
        delivered, is_done, trouble = 0, True, ""
        if any(each.process is None for each in before.journals):
            options = resolve(config, url=url, patience_s=patience_s).options
            delivered, is_done, trouble = _drained(directory, options.url, options.patience_s, orphaned, timeout_s)
        after = _surveyed(directory)
    _tell(delivered, is_done, trouble, after, json=json)


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


def _tell(delivered: int, is_done: bool, trouble: str, after: SpoolReport, *, json: bool) -> None:
    left = sum(each.messages for each in after.journals if each.process is None)
    if json:
        output.write_json({"delivered": delivered, "left": left, "trouble": trouble, "spool": after})
    else:
        typer.echo(f"{output.count(delivered, 'message')} delivered, {left:,} left")
        for each in after.journals:
            if each.process is not None:
                typer.echo(f"journal {each.name}: process {each.process} lives, and sends its own {each.messages:,}")
        if trouble:
            typer.echo(f"fairway spool drain: {trouble}", err=True)
        if not after.is_sound:
            typer.echo("fairway spool drain: something was set aside or is damaged: `fairway spool status`", err=True)
    if not after.is_sound:
        raise typer.Exit(output.Exit.DAMAGE)
    if left or not is_done:
        raise typer.Exit(output.Exit.FAILED)


def _show(report: SpoolReport) -> None:
    table = output.table(
        f"spool {report.directory}", "journal", "process", "messages>", "batches>", "size>", "oldest (UTC)", "trouble"
    )
    rows = [
        (
            each.name,
            "dead" if each.process is None else str(each.process or "alive"),
            f"{each.messages:,}",
            f"{each.batches:,}",
            output.size(each.size_bytes),
            output.moment(each.since_ms),
            "; ".join(filter(None, [each.trouble, *(f"damaged: {name}" for name in each.damaged)])),
        )
        for each in report.journals
    ]
    output.show_rows(table, rows, f"nothing is in the spool {report.directory}")
    aside = [
        (journal.name, str(each.number), each.subject, f"{each.messages:,}", output.moment(each.time_ms), each.reason)
        for journal in report.journals
        for each in journal.set_aside
    ]
    if aside:
        titles = ("journal", "batch>", "subject", "messages>", "when (UTC)", "why")
        output.show_rows(output.table("set aside", *titles), aside, "")
