"""What all jobs share: errors, shuffle sizes, progress, options, the session, and exit statuses.

Errors. A task's error passes through two processes, and arrives as a page of traces in which one sentence says what
happened. `sentences` raises that sentence as an error of Fairway.

Shuffles. Spark gives every shuffle 200 parts, whatever its size. What is kept or checkpointed has as many parts, and a
union adds them up. Reconciling 20,000 messages ran stages of 200, 403 and 809 tasks, nearly all of them empty. A job
knows how many messages it looks at, and `sized` sets the number of parts.

Progress. A job reports rows, rate and what remains to a `ProgressListener`, which decides whether to show them.

Commands. A job's `command` is both `fairway pipeline JOB` and a program for `spark-submit`. There spark-submit brings
its own master and settings; otherwise `running` makes a session on this machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias

import typer
from py4j.protocol import Py4JError, Py4JJavaError, Py4JNetworkError  # type: ignore[import-untyped]
from pyspark.errors import PySparkException
from pyspark.logger import PySparkLogger
from pyspark.sql import Row, SparkSession

from fairway.errors import FairwayError, Misuse, Unreachable
from fairway.runtime import host, terminal
from fairway.runtime.clock import Clock, RealClock
from fairway.spark.session import SETTINGS, session

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_OURS = re.compile(r"^(?:.*?: )?(?P<module>fairway\.[\w.]+)\.(?P<kind>[A-Z]\w+): (?P<sentence>.+)$", re.MULTILINE)
_KINDS: dict[str, type[FairwayError]] = {"Unreachable": Unreachable, "Misuse": Misuse, "BadName": Misuse}
_LINE_CHARS = 500


class SparkFailed(FairwayError):
    """Spark failed for a reason of its own; the message is the first line of that reason."""


@contextmanager
def sentences(doing: str) -> Iterator[None]:
    """Turn errors of Spark into errors of Fairway; the traces stay as the cause."""
    try:
        yield
    except (PySparkException, Py4JJavaError) as error:
        raise translated(str(error), doing) from error
    except (Py4JNetworkError, ConnectionError) as error:
        raise SparkFailed(f"{doing}: Spark itself has gone away ({error})") from error
    except Py4JError as error:
        raise SparkFailed(f"{doing}: {_first_line(str(error))}") from error


def translated(text: str, doing: str) -> FairwayError:
    """The last Fairway error in a trace, or else the first line of Spark's error."""
    found = list(_OURS.finditer(text))
    if found:
        kind = _KINDS.get(found[-1]["kind"], FairwayError)
        return kind(f"{doing}: {found[-1]['sentence'].strip()}")
    if "OutOfMemory" in text:
        return SparkFailed(f"{doing}: Spark is out of memory; give it more (spark.driver.memory), or smaller batches")
    return SparkFailed(f"{doing}: {_first_line(text)}")


def _first_line(text: str) -> str:
    line = next((each.strip() for each in text.splitlines() if each.strip()), "no reason given")
    return line[:_LINE_CHARS]


SETTING: Final = "spark.sql.shuffle.partitions"
PARTITIONS_MAX: Final = 200  # Spark's own default: a user with more to do sets it
TASK_MESSAGES: Final = 50_000  # per task: some ten MB of what is known of messages


def partitions(messages: int, cores: int) -> int:
    """The number of parts for so many messages: at least one per core, unless the messages fit into one task."""
    wanted = -(-messages // TASK_MESSAGES)
    return max(min(max(wanted, cores if messages > TASK_MESSAGES else 1), PARTITIONS_MAX), 1)


@contextmanager
def sized(spark: SparkSession, messages: int) -> Iterator[None]:
    """Set the number of shuffle parts for so many messages, unless the user has set it."""
    if SETTING in spark.conf.getAll:
        yield
        return
    spark.conf.set(SETTING, str(partitions(messages, spark.sparkContext.defaultParallelism)))
    try:
        yield
    finally:
        spark.conf.unset(SETTING)


NS = 1_000_000_000


@dataclass(frozen=True)
class Point:
    """The progress of a job at one moment."""

    doing: str
    rows: int  # done so far
    remaining: int | None = None  # rows, as far as is known
    rate_per_s: float = 0.0

    @property
    def left_s(self) -> float | None:
        return self.remaining / self.rate_per_s if self.remaining is not None and self.rate_per_s > 0 else None

    @property
    def sentence(self) -> str:
        parts = [f"{self.doing}: {self.rows:,} rows"]
        if self.rate_per_s > 0:
            parts.append(f"{self.rate_per_s:,.0f} rows/s")
        if self.remaining is not None:
            parts.append(f"{self.remaining:,} to go")
        if self.left_s is not None and self.remaining:
            parts.append(f"about {self.left_s:,.0f} s")
        return ", ".join(parts)


ProgressListener: TypeAlias = Callable[[Point], None]  # gets a job's progress


def unwatched(_point: Point) -> None:
    """A listener that ignores progress."""


class ProgressCounter:
    """Counts rows since its start, and reports them to a listener."""

    def __init__(self, watch: ProgressListener, doing: str, clock: Clock | None = None) -> None:
        self._watch = watch
        self._doing = doing
        self._clock = clock or RealClock()
        self._start_ns = self._clock.monotonic_ns()
        self.rows = 0

    @property
    def elapsed_s(self) -> float:
        return (self._clock.monotonic_ns() - self._start_ns) / NS

    def add(self, rows: int, remaining: int | None) -> None:
        self.rows += rows
        elapsed_s = self.elapsed_s
        self._watch(Point(self._doing, self.rows, remaining, self.rows / elapsed_s if elapsed_s > 0 else 0.0))


@contextmanager
def on_terminal() -> Iterator[ProgressListener]:
    """A listener that redraws a line on stderr if stderr is a terminal; else one that does nothing."""
    from rich.text import Text

    errors = terminal.console(err=True)
    if not errors.is_terminal:
        yield unwatched
        return
    with errors.status("starting Spark") as status:
        yield lambda point: status.update(Text(terminal.escaped(point.sentence)))


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
# For a session on one machine that lives for one command.
_LOCAL: Final = {"spark.ui.enabled": "false", "spark.ui.showConsoleProgress": "false"}


@contextmanager
def running(
    job: str, master: str | None, spark_log: str, *, is_quiet: bool
) -> Iterator[tuple[SparkSession, ProgressListener]]:
    """A session for one job, stopped at the end. A Fairway error becomes a sentence and an exit status."""
    with failures(job), ExitStack() as stack:
        watch = unwatched if is_quiet else stack.enter_context(on_terminal())
        level = spark_log.upper()
        if level not in {"OFF", "ERROR", "WARN", "INFO", "DEBUG"}:
            raise Misuse(f"--spark-log {spark_log!r}: say off, error, warn, info or debug")
        if "PYSPARK_GATEWAY_PORT" in host.environment():  # spark-submit has started Spark with its own settings
            spark = session(f"fairway {job}", master)
        else:
            if level == "OFF":
                PySparkLogger.getLogger("SQLQueryContextLogger").addFilter(lambda _record: False)  # repeats errors
            spark = session(f"fairway {job}", master or "local[*]", settings(level))
        stack.callback(spark.stop)
        yield spark, watch


def settings(level: str) -> dict[str, str]:
    """The settings of a session on this machine, in addition to `SETTINGS`."""
    logging = f"-Dlog4j2.configurationFile={_LOGGING.as_uri()} -Dfairway.spark.log={level}"
    return {**_LOCAL, _JAVA: f"{SETTINGS[_JAVA]} {logging}"}


@contextmanager
def failures(job: str) -> Iterator[None]:
    """Print a Fairway error as one sentence on stderr, and exit with a status."""
    try:
        yield
    except FairwayError as error:
        terminal.say(f"fairway pipeline {job}: {error}", err=True)
        status = UNREACHABLE if isinstance(error, Unreachable) else USAGE if isinstance(error, Misuse) else FAILED
        raise typer.Exit(status) from error


def in_utc(row: Row) -> dict[str, Any]:
    """The row with times in UTC: Spark returns times in the driver's zone, without naming the zone."""
    return {name: each.astimezone(UTC) if isinstance(each, datetime) else each for name, each in row.asDict().items()}


def tell(result: DataclassInstance, as_json: bool, lines: Sequence[str]) -> None:
    """Print the result, as JSON or as lines."""
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
    """Run a job's command; `defaults` are values for options that are not given."""
    shown = f"fairway pipeline {job}" if arguments is not None else None
    as_app(command, job)(args=arguments, prog_name=shown, default_map=defaults)
