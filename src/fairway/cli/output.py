"""What the command line prints: tables for people or JSON for programs on stdout, progress and errors on stderr.

A server prints one line on stdout when it is ready, without a time: programs that start servers wait for that line.
Before, an error is an answer to whoever typed the command, and has no time. Afterwards every line on stderr is a log
line and begins with the time in UTC.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import msgspec
import typer

from fairway.errors import FairwayError, Misuse, Unreachable
from fairway.runtime import terminal
from fairway.runtime.clock import RealClock
from fairway.runtime.service import TimedFormatter, stamp

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


_MOMENT_NS = 1_000_000_000  # shorter work needs no bar
_REDRAW_NS = 100_000_000
_ROWS_MAX = 50  # per table: ten thousand subjects are for --json


# Modules that the core install lacks, and the extras that have them.
EXTRAS = {"numpy": "server", "uvloop": "server", "pyarrow": "arrow"}


class Exit(enum.IntEnum):
    """What the exit status means, for every verb."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    DAMAGE = 4


@contextmanager
def failures(verb: str) -> Iterator[None]:
    """Turn an error that Fairway raises on purpose into a sentence on stderr and an exit status, without traceback."""
    try:
        yield
    except (FairwayError, TimeoutError) as error:
        _say_failure(f"fairway {verb}: {error}")
        raise typer.Exit(_status(error)) from error
    except OSError as error:
        if error.filename is None:  # about no file of the user: a bug, or a closed pipe
            raise
        _say_failure(f"fairway {verb}: {os_sentence(error)}")
        raise typer.Exit(Exit.FAILED) from error
    except ExceptionGroup as group:
        failed, other = group.split(FairwayError)
        if other is not None or failed is None:
            raise
        for sentence in dict.fromkeys(str(error) for error in failed.exceptions):
            _say_failure(f"fairway {verb}: {sentence}")
        raise typer.Exit(Exit.FAILED) from group
    except ModuleNotFoundError as error:
        extra = EXTRAS.get((error.name or "").partition(".")[0])
        if extra is None:
            raise
        terminal.say(f"fairway {verb}: this needs {error.name}: {install(extra)}", err=True)
        raise typer.Exit(Exit.FAILED) from error


def os_sentence(error: OSError) -> str:
    """The error of the system about a path, with the remedy."""
    return f"cannot use {error.filename}: {error.strerror}; check the path, and whether this user may go there"


def _say_failure(sentence: str) -> None:
    """Print the sentence; with the time, if the error ends a server that was ready."""
    if is_on():
        line(sentence)
    else:
        terminal.say(sentence, err=True)


def _status(error: Exception) -> Exit:
    if isinstance(error, Unreachable | TimeoutError):
        return Exit.UNREACHABLE
    return Exit.USAGE if isinstance(error, Misuse) else Exit.FAILED


def install(extra: str) -> str:
    """The command that installs an extra."""
    return f"pip install 'fairway[{extra}]'"


def write_json(value: object) -> None:
    """Write an indented document and a newline."""
    terminal.write_text(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


def write_json_line(value: object) -> None:
    """Write a document on one line and flush: for output without an end."""
    terminal.write_text(msgspec.json.encode(value).decode() + "\n")
    terminal.flush()


def named(value: object) -> Any:
    """A message of the protocol as a dict; on the wire it is an array without names."""
    if isinstance(value, msgspec.Struct):
        return {field: named(getattr(value, field)) for field in value.__struct_fields__}
    return [named(each) for each in value] if isinstance(value, list | tuple) else value


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A progress bar in bytes on stderr, if that is a terminal. Yields a function of (done, total)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    errors = terminal.console(err=True)
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def slow_bar(title: str, total: int | None, *, is_wanted: bool = True) -> Iterator[Callable[[int], None]]:
    """A progress bar in messages on stderr, if that is a terminal, after a second. Yields a function of (done)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    errors, clock = terminal.console(err=True), RealClock()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal)
    task = progress.add_task(title, total=total)
    start_ns, shown_ns = clock.monotonic_ns(), 0

    def advance(done: int) -> None:
        nonlocal shown_ns
        now_ns = clock.monotonic_ns()
        if now_ns - max(start_ns + _MOMENT_NS - _REDRAW_NS, shown_ns) < _REDRAW_NS:
            return
        if not shown_ns:
            progress.start()
        shown_ns = now_ns
        progress.update(task, completed=done)

    try:
        yield advance if errors.is_terminal and is_wanted else lambda _done: None
    finally:
        if shown_ns:
            progress.stop()


def table(title: str, *columns: str) -> Table:
    """A plain table; a heading that ends in `>` makes a column of numbers, flush right."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in columns:
        made.add_column(heading.rstrip(">"), justify="right" if heading.endswith(">") else "left", overflow="fold")
    return made


def show_rows(into: Table, rows: Sequence[Sequence[str]], if_none: str, rows_max: int = _ROWS_MAX) -> None:
    """Print the table, or a sentence instead of an empty table."""
    if not rows:
        terminal.say(if_none)
        return
    fill(into, rows, rows_max)
    terminal.console().print(into)


def print_rows(out: Console, into: Table, rows: Sequence[Sequence[str]]) -> None:
    """Print the table; nothing, if there are no rows."""
    if rows:
        fill(into, rows)
        out.print(into)


def fill(into: Table, rows: Sequence[Sequence[str]], rows_max: int = _ROWS_MAX) -> None:
    """Add the last `rows_max` rows, and a caption about the others."""
    left_out = len(rows) - rows_max
    for row in rows[max(left_out, 0) :]:
        into.add_row(*map(cell, row))
    if left_out > 0:
        into.caption = f"{left_out:,} more before these: --json lists them all"
        into.caption_justify = "left"


def cell(text: str) -> Text:
    """A text for a table on stdout. For a terminal it is escaped before the table measures its width."""
    from rich.text import Text

    return Text(terminal.shown(text))


def size(of_bytes: int) -> str:
    """`1.2 MiB`."""
    value, unit = float(of_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{of_bytes} B" if unit == "B" else f"{value:.1f} {unit}"


def count(number: int, noun: str) -> str:
    """`1 batch`, `12,000 batches`."""
    plural = f"{noun}es" if noun.endswith(("ch", "s", "x")) else f"{noun}s"
    return f"{number:,} {noun if number == 1 else plural}"


def age(seconds: float) -> str:
    """`0.3 s`, `12 s`, `5 min`, `3.5 h`, `12 d`."""
    for most, unit_s, unit in ((10, 1, "s"), (120, 1, "s"), (7_200, 60, "min"), (172_800, 3_600, "h")):
        if seconds < most:
            return f"{seconds / unit_s:.{int(most == 10)}f} {unit}"
    return f"{seconds / 86_400:,.0f} d"


def share(part: float) -> str:
    """`12 %`; `<1 %` for anything between 0 and 1 %."""
    return "<1 %" if 0 < part < 0.01 else f"{part:.0%}".replace("%", " %")


def moment(ms: int | None) -> str:
    """A time in UTC, to the second; empty for None."""
    if ms is None:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")


def lost(groups: int, messages: int, dead: int) -> str:
    """What was removed with a subject or a group, as the end of a sentence; empty for nothing."""
    counted = ((groups, "group"), (messages, "message"), (dead, "dead letter"))
    parts = [count(number, noun) for number, noun in counted if number]
    return f", with {' and '.join(parts)}" if parts else ""


_state = {"is_on": False}


def ready(sentence: str) -> None:
    """Print that the server is ready, and begin the log."""
    terminal.say(sentence)
    begin()


def begin() -> None:
    """Begin the log: warnings of libraries and the error that ends the process have a time from now on."""
    if not _state["is_on"]:
        _state["is_on"] = True
        handler = logging.StreamHandler()
        handler.setFormatter(TimedFormatter())
        logging.getLogger("fairway").addHandler(handler)


def is_on() -> bool:
    """Whether a server of this process has become ready."""
    return _state["is_on"]


def line(sentence: str) -> None:
    """Log one event, with the time."""
    terminal.say(f"{stamp(RealClock().wall_ms())} {sentence}", err=True)
