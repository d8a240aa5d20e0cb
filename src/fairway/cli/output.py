"""How the command line speaks: tables for people or JSON for programs on stdout, progress and errors on stderr."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import TYPE_CHECKING

import typer

from fairway.errors import FairwayError, Unreachable

if TYPE_CHECKING:
    import msgspec
    from rich.console import Console
    from rich.table import Table

_PIPED_COLUMNS = 140  # what is not a terminal has no width; our widest table fits
_ROWS_MAX = 50  # per table: ten thousand subjects are for --json


class Exit(enum.IntEnum):
    """What the exit status means, for every verb."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    DAMAGE = 4


def console(*, stderr: bool = False) -> Console:
    """A console that lets names and numbers be: no colours of its own invention."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False, emoji=False)
    if not made.is_terminal:
        made.width = _PIPED_COLUMNS
    return made


@contextmanager
def failures(verb: str) -> Iterator[None]:
    """An error that Fairway raised on purpose is one sentence on stderr and an exit status, never a traceback."""
    try:
        yield
    except FairwayError as error:
        typer.echo(f"fairway {verb}: {error}", err=True)
        raise typer.Exit(Exit.UNREACHABLE if isinstance(error, Unreachable) else Exit.FAILED) from error


def write_json(value: msgspec.Struct) -> None:
    """One document, indented, and a newline."""
    import msgspec

    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


@contextmanager
def progress_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr, in bytes, if a person is watching. Call what it gives with (done, total)."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    errors = console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=errors, transient=True, disable=not errors.is_terminal) as progress:
        task = progress.add_task(title, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def table(title: str, *columns: str) -> Table:
    """A plain table; a column whose heading ends in `>` is of numbers and flush right."""
    from rich import box
    from rich.table import Table

    made = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in columns:
        made.add_column(heading.rstrip(">"), justify="right" if heading.endswith(">") else "left", overflow="fold")
    return made


def fill(into: Table, rows: Sequence[Sequence[str]]) -> None:
    """Add the rows: the newest ones where there are too many to read, and a word about the others."""
    from rich.text import Text

    left_out = len(rows) - _ROWS_MAX
    for row in rows[max(left_out, 0) :]:
        into.add_row(*map(Text, row))
    if left_out > 0:
        into.caption = f"{left_out:,} more before these: --json lists them all"
        into.caption_justify = "left"


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


def moment(ms: int | None) -> str:
    """UTC, to the second; empty where there is none."""
    if ms is None:
        return ""
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
