"""`fairway`: the entry point, and which verbs there are.

The modules of the verbs import little more than typer; whatever they need is imported when they run.
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
    config,
    configure,
    consume,
    dead,
    delay,
    demo,
    doctor,
    group,
    inspect,
    meta,
    outbox,
    pipeline,
    produce,
    spool,
    steer,
    subject,
    subjects,
    tail,
    top,
)
from fairway.cli.trace import trace
from fairway.cli.verify import verify
from fairway.world import terminal
from fairway.world.log_format import EscapingFormatter

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

    Exit status: 0 ok, 1 failed, 2 usage, 3 nobody answers, 4 found damage or imbalance.
    """


_RUN, _USE, _WATCH, _STEER, _DATA, _CARE = "Run", "Send and consume", "Watch", "Steer", "Data on Spark", "Care"

app.command("up", help=broker.UP_HELP, rich_help_panel=_RUN)(broker.up)
app.add_typer(broker.app, name="broker", rich_help_panel=_RUN)
app.command("meta", help=meta.HELP, rich_help_panel=_RUN)(meta.serve)
app.add_typer(demo.app, name="demo", rich_help_panel=_RUN)
app.command(rich_help_panel=_USE)(produce.produce)
app.command(rich_help_panel=_USE)(consume.consume)
app.command(rich_help_panel=_USE)(tail.tail)
app.command(rich_help_panel=_WATCH)(top.top)
app.command(rich_help_panel=_WATCH)(subjects.subjects)
app.command(rich_help_panel=_WATCH)(subjects.groups)
app.command(rich_help_panel=_WATCH)(subjects.lag)
app.add_typer(cluster.app, name="cluster", rich_help_panel=_WATCH)
app.command(rich_help_panel=_WATCH)(trace)
app.command(rich_help_panel=_STEER)(steer.seek)
app.command(rich_help_panel=_STEER)(steer.weight)
app.command(rich_help_panel=_STEER)(steer.pause)
app.command(rich_help_panel=_STEER)(steer.resume)
app.command(rich_help_panel=_STEER)(configure.configure)
app.add_typer(subject.app, name="subject", rich_help_panel=_STEER)
app.add_typer(group.app, name="group", rich_help_panel=_STEER)
app.add_typer(dead.app, name="dead", rich_help_panel=_STEER)
app.add_typer(delay.app, name="delay", rich_help_panel=_STEER)
app.add_typer(spool.app, name="spool", rich_help_panel=_STEER)
app.add_typer(outbox.app, name="outbox", rich_help_panel=_STEER)
app.add_typer(pipeline.app, name="pipeline", rich_help_panel=_DATA)
app.command(rich_help_panel=_CARE)(doctor.doctor)
app.command(rich_help_panel=_CARE)(bench.bench)
app.command(rich_help_panel=_CARE)(inspect.inspect)
app.command(rich_help_panel=_CARE)(verify)
app.add_typer(config.app, name="config", rich_help_panel=_CARE)


def main() -> None:
    """What the console script calls."""
    if logging.lastResort is not None:  # has the warnings of libraries, for verbs that set up no log
        logging.lastResort.setFormatter(EscapingFormatter())
    app()


if __name__ == "__main__":
    main()
