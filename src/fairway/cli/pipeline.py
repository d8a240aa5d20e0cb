"""`fairway pipeline archive|trace|reconcile|repetition|replay|report`: jobs on Spark over the log.

A job's flags are its own (`fairway.spark.jobs`), since it is a program for `spark-submit`, too; here they are handed
on, with the settings of this machine. Spark is imported when a job runs.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from fairway.cli import output, settings

app = typer.Typer(no_args_is_help=True)

_HANDED_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@app.callback()
def _root() -> None:
    """Jobs on Spark over the log: archive it, follow it, look at it, replay it."""


@app.command("archive", context_settings=_HANDED_ON, add_help_option=False)
def archive(context: typer.Context) -> None:
    """Subjects to Parquet, exactly once, by subject and date."""
    with output.failures("pipeline archive"):
        from fairway.spark.jobs import archive

        _run(archive.command, context)


@app.command("trace", context_settings=_HANDED_ON, add_help_option=False)
def trace(context: typer.Context) -> None:
    """What became of messages, group by group."""
    with output.failures("pipeline trace"):
        from fairway.spark.jobs import trace

        _run(trace.command, context)


@app.command("repetition", context_settings=_HANDED_ON, add_help_option=False)
def repetition(context: typer.Context) -> None:
    """How often keys repeat, and what coalescing would save."""
    with output.failures("pipeline repetition"):
        from fairway.spark.jobs import repetition

        _run(repetition.command, context)


@app.command("replay", context_settings=_HANDED_ON, add_help_option=False)
def replay(context: typer.Context) -> None:
    """Messages once more, to a subject or to one group of it, with the ids they had."""
    with output.failures("pipeline replay"):
        from fairway.spark.jobs import replay

        _run(replay.command, context)


@app.command("report", context_settings=_HANDED_ON, add_help_option=False)
def report(context: typer.Context) -> None:
    """Isolation and capacity: shares of the broker's time, lag, lateness, what is due."""
    with output.failures("pipeline report"):
        from fairway.spark.jobs import report

        _run(report.command, context)


@app.command("reconcile", context_settings=_HANDED_ON, add_help_option=False)
def reconcile(context: typer.Context) -> None:
    """Do the books balance: what is missing, duplicate, late or stuck."""
    with output.failures("pipeline reconcile"):
        from fairway.spark.jobs import reconcile

        _run(reconcile.command, context)


def _run(command: Callable[..., None], context: typer.Context) -> None:
    from fairway.spark.jobs import program

    found = settings.resolve(None)
    defaults: dict[str, object] = {"url": found.options.url}
    if found.origins["patience_s"] != settings.DEFAULT:
        defaults["patience_s"] = max(1, round(found.options.patience_s))
    program.main(command, context.info_name or "", context.args, **defaults)
