"""`fairway`, `python -m fairway`: the entry point, and which verbs there are.

The modules of the verbs import the client and typer; whatever else they need is imported when they run.
"""

from __future__ import annotations

import logging
from typing import Annotated

import typer

from fairway import __version__
from fairway.cli import (
    bench,
    broker,
    cluster,
    consume,
    dead,
    delay,
    directory,
    doctor,
    group_admin,
    meta,
    outbox,
    pipeline,
    produce,
    settings,
    spool,
    subject,
    top,
)
from fairway.cli.directory import verify
from fairway.cli.trace import trace
from fairway.demo import broker as demo
from fairway.runtime import terminal
from fairway.runtime.service import EscapingFormatter

app = typer.Typer(
    name="fairway",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _say_version(is_wanted: bool) -> None:
    if is_wanted:
        terminal.say(f"fairway {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A message queue for Python shops whose data platform is Spark.

    Exit status: 0 ok, 1 failed, 2 usage, 3 unreachable,
    4 found damage or imbalance.
    """


_RUN, _USE, _WATCH = "Run", "Send and consume", "Watch"
_ADMINISTER, _SPARK, _CHECK = "Administer", "Spark jobs", "Check and measure"

app.command("up", help=broker.UP_HELP, rich_help_panel=_RUN)(broker.up)
app.add_typer(broker.app, name="broker", rich_help_panel=_RUN)
app.command("meta", help=meta.HELP, rich_help_panel=_RUN)(meta.serve)
app.add_typer(demo.app, name="demo", rich_help_panel=_RUN)
app.command(rich_help_panel=_USE)(produce.produce)
app.command(rich_help_panel=_USE)(consume.consume)
app.command(rich_help_panel=_USE)(consume.tail)
app.command(rich_help_panel=_WATCH)(top.top)
app.command(rich_help_panel=_WATCH)(subject.subjects)
app.command(rich_help_panel=_WATCH)(subject.groups)
app.command(rich_help_panel=_WATCH)(subject.lag)
app.add_typer(cluster.app, name="cluster", rich_help_panel=_WATCH)
app.command(rich_help_panel=_WATCH)(trace)
app.command(rich_help_panel=_ADMINISTER)(group_admin.seek)
app.command(rich_help_panel=_ADMINISTER)(group_admin.weight)
app.command(rich_help_panel=_ADMINISTER)(group_admin.pause)
app.command(rich_help_panel=_ADMINISTER)(group_admin.resume)
app.command(rich_help_panel=_ADMINISTER)(group_admin.configure)
app.add_typer(subject.app, name="subject", rich_help_panel=_ADMINISTER)
app.add_typer(group_admin.app, name="group", rich_help_panel=_ADMINISTER)
app.add_typer(dead.app, name="dead", rich_help_panel=_ADMINISTER)
app.add_typer(delay.app, name="delay", rich_help_panel=_ADMINISTER)
app.add_typer(spool.app, name="spool", rich_help_panel=_ADMINISTER)
app.add_typer(outbox.app, name="outbox", rich_help_panel=_ADMINISTER)
app.add_typer(pipeline.app, name="pipeline", rich_help_panel=_SPARK)
app.command(rich_help_panel=_CHECK)(doctor.doctor)
app.command(rich_help_panel=_CHECK)(bench.bench)
app.command(rich_help_panel=_CHECK)(directory.inspect)
app.command(rich_help_panel=_CHECK)(verify)
app.add_typer(settings.app, name="config", rich_help_panel=_CHECK)


def main() -> None:
    """The entry point of the console script."""
    if logging.lastResort is not None:  # prints the warnings of libraries for verbs without a log
        logging.lastResort.setFormatter(EscapingFormatter())
    app()


if __name__ == "__main__":
    main()
