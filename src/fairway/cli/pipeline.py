"""`fairway pipeline archive|trace|repetition|replay|report|reconcile`: jobs on Spark over the log.

A job is a program for `spark-submit`, too, and has options of its own (`fairway.spark.jobs`). The command line hands
its arguments on, with the settings of this machine. Spark is imported when a job runs.
"""

from __future__ import annotations

from collections.abc import Callable

import typer

from fairway.cli import output, settings

app = typer.Typer(no_args_is_help=True)

_JOBS = {
    "archive": "Archive subjects to Parquet, exactly once, by subject and date.",
    "trace": "Show what became of messages, group by group.",
    "repetition": "Measure how often keys repeat, and what coalescing would save.",
    "replay": "Send messages again, to a subject or to one group, with their old IDs.",
    "report": "Report isolation and capacity: shares of broker time, lag, lateness, due messages.",
    "reconcile": "Compare sent and handled: find missing, duplicate, late and stuck messages.",
}


@app.callback()
def _root() -> None:
    """Spark jobs: archive, trace, report on, reconcile and replay messages."""


def _verb(name: str) -> Callable[[typer.Context], None]:
    def run(context: typer.Context) -> None:
        with output.failures(f"pipeline {name}"):
            from fairway.spark.jobs import archive, job, reconcile, repetition, replay, report, trace

            jobs = (archive, trace, repetition, replay, report, reconcile)
            commands = {each.__name__.rpartition(".")[2]: each.command for each in jobs}
            found = settings.resolve(None)
            defaults: dict[str, object] = {"url": found.options.url}
            if found.origins["patience_s"] != settings.DEFAULT:
                defaults["patience_s"] = max(1, round(found.options.patience_s))
            job.main(commands[name], context.info_name or "", context.args, **defaults)

    return run


for _name, _help in _JOBS.items():
    app.command(
        _name,
        help=_help,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
        add_help_option=False,
    )(_verb(_name))
