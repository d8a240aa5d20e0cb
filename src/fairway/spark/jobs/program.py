"""What the commands of all jobs share: their options, a session, an answer for people or programs, an exit status.

A job's `command` is both `fairway pipeline JOB` and a program for `spark-submit`, which brings its own master and
settings; everything else (a session on this machine) is made here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from pyspark.logger import PySparkLogger
from pyspark.sql import SparkSession

from fairway.errors import FairwayError, Misuse, Unreachable
from fairway.spark.jobs.watching import ProgressListener, on_terminal, unwatched
from fairway.spark.session import SETTINGS, session
from fairway.world import host, terminal

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

QUIET: Final = "off"
FAILED, USAGE, UNREACHABLE = 1, 2, 3  # as everywhere on the command line

Url = Annotated[
    str,
    typer.Option("--url", envvar="FAIRWAY_URL", metavar="URL", help="The broker; or the cluster, meta://HOST:PORT."),
]
Patience = Annotated[
    int,
    typer.Option("--patience-s", min=1, metavar="SECONDS", help="How long to wait for a broker that does not answer."),
]
Master = Annotated[
    str | None,
    typer.Option(
        "--master",
        metavar="MASTER",
        help="Where Spark runs: local[2], spark://HOST:7077 (local[*], or spark-submit's).",
    ),
]
SparkLog = Annotated[
    str, typer.Option("--spark-log", metavar="LEVEL", help="What Spark logs to stderr: off, error, warn, info.")
]
AsJson = Annotated[bool, typer.Option("--json", help="JSON for programs, on stdout.")]

_JAVA: Final = "spark.driver.defaultJavaOptions"
_LOGGING: Final = Path(__file__).with_name("log4j2.properties")
# On one machine, for the time of one command.
_LOCAL: Final = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}


@contextmanager
def running(
    job: str, master: str | None, spark_log: str, *, is_quiet: bool
) -> Iterator[tuple[SparkSession, ProgressListener]]:
    """A session for one job, stopped at the end; an error of ours is a sentence and an exit status."""
    with failures(job), ExitStack() as stack:
        watch = unwatched if is_quiet else stack.enter_context(on_terminal())
        level = spark_log.upper()
        if level not in {"OFF", "ERROR", "WARN", "INFO", "DEBUG"}:
            raise Misuse(f"--spark-log {spark_log!r}: say off, error, warn, info or debug")
        if "PYSPARK_GATEWAY_PORT" in host.environment():  # spark-submit has started Spark already, as it was told to
            spark = session(f"fairway {job}", master)
        else:
            if level == "OFF":
                PySparkLogger.getLogger("SQLQueryContextLogger").addFilter(lambda _record: False)  # says it all twice
            spark = session(f"fairway {job}", master or "local[*]", settings(level))
        stack.callback(spark.stop)
        yield spark, watch


def settings(level: str) -> dict[str, str]:
    """Of a session on this machine, beside those of every session."""
    logging = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} -Dfairway.spark.log={level}"
    return {**_LOCAL, _JAVA: f"{SETTINGS[_JAVA]} {logging}"}


@contextmanager
def failures(job: str) -> Iterator[None]:
    """One sentence on stderr, never a page of traces."""
    try:
        yield
    except FairwayError as error:
        terminal.say(f"fairway pipeline {job}: {error}", err=True)
        status = UNREACHABLE if isinstance(error, Unreachable) else USAGE if isinstance(error, Misuse) else FAILED
        raise typer.Exit(status) from error


def tell(result: DataclassInstance, as_json: bool, lines: Sequence[str]) -> None:
    """What came of it."""
    if as_json:
        terminal.write_text(json.dumps(asdict(result), indent=2, default=str) + "\n")
        return
    for line in lines:
        terminal.say(line)


def as_app(command: Callable[..., None], job: str) -> typer.Typer:
    app = typer.Typer(name=job, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    app.command(context_settings={"help_option_names": ["-h", "--help"]})(command)
    return app


def main(command: Callable[..., None], job: str, arguments: Sequence[str] | None = None, **defaults: Any) -> None:
    """Run a job's command; `defaults` are for options that are not given."""
    shown = f"fairway pipeline {job}" if arguments is not None else None
    as_app(command, job)(args=arguments, prog_name=shown, default_map=defaults)
