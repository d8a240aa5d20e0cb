"""`fairway top`: a live table of groups. Rate, lag, oldest, share of the broker's time, share of cold reads."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from fairway.cli import output
from fairway.cli.client import AsJson, Patience, Url, connected, describe
from fairway.cli.rates import GroupRow, RateMeter
from fairway.cli.settings import ConfigFile
from fairway.world import host, terminal
from fairway.world.clock import RealClock

if TYPE_CHECKING:
    from rich.table import Table

    from fairway import Client
    from fairway.protocol.admin import BrokerState
    from fairway.world.workers import Ending

_ROWS_MAX = 40  # on a screen; --json has all
_NAMES = ("subject", "group")
_NUMBERS = ("in/s", "rate/s", "lag", "held", "wait", "oldest", "dead", "share", "cold")
_LEAST_FIRST = ("cold", "share", "in/s", "wait", "held", "dead", "oldest", "rate/s")  # left out where it is narrow
_NAME_CHARS_MIN = 8


class Sort(enum.Enum):
    """What the busiest group is."""

    SHARE = "share"
    RATE = "rate"
    LAG = "lag"
    OLDEST = "oldest"
    NAME = "name"


_KEYS = {
    Sort.SHARE: lambda row: (-row.share, -row.rate, row.subject, row.group),
    Sort.RATE: lambda row: (-row.rate, row.subject, row.group),
    Sort.LAG: lambda row: (-row.lag, row.subject, row.group),
    Sort.OLDEST: lambda row: (-(row.oldest_s or 0), row.subject, row.group),
    Sort.NAME: lambda row: (row.subject, row.group),
}

OnlySubject = Annotated[str | None, typer.Argument(metavar="[SUBJECT]", help="Only this subject.", show_default=False)]
Once = Annotated[bool, typer.Option("--once", help="Look for one interval, print, end.")]
Interval = Annotated[float, typer.Option("--interval-s", min=0.1, metavar="SECONDS", help="Between two looks.")]
SortBy = Annotated[Sort, typer.Option("--sort", help="Which groups are on top.")]


def top(
    subject: OnlySubject = None,
    once: Once = False,
    interval_s: Interval = 1.0,
    sort: SortBy = Sort.SHARE,
    json: AsJson = False,
    url: Url = None,
    patience_s: Patience = None,
    config: ConfigFile = None,
) -> None:
    """A live table of groups, until q or Ctrl-C. Where the terminal is narrow, the last columns are left out first.

    rate: messages settled for good, a second. oldest: age of the oldest message that the group is not done with. share:
    of the time of the broker's loop. cold: of the group's own time, spent on reads that missed the page cache. With
    --json: a line for each look.
    """
    with connected("top", config, url, patience_s) as client:
        look = _LiveView(client, subject, sort)
        with host.asked_to_end() as ending:
            if once or json:
                _print(look, interval_s, ending, is_once=once, as_json=json)
            else:
                with host.ended_by_key(ending, "q"):
                    _live(look, interval_s, ending)


class _LiveView:
    """One look after the other at the same broker."""

    def __init__(self, client: Client, subject: str | None, sort: Sort) -> None:
        self._client = client
        self._subject = subject
        self._sort = sort
        self._watch = RateMeter()
        self._clock = RealClock()

    def again(self) -> tuple[BrokerState, list[GroupRow]]:
        from fairway.protocol.admin import Depth

        broker, subjects = describe(self._client, Depth.CONSUMERS, self._subject)
        now_ns, now_ms = self._clock.monotonic_ns(), self._clock.wall_ms()
        rows = self._watch.look(subjects, now_ns=now_ns, now_ms=now_ms)
        return broker, sorted(rows, key=_KEYS[self._sort])

    def table(self) -> Table:
        broker, rows = self.again()
        return table(title(broker, self._clock.wall_ms()), rows, terminal.console().width)


def _print(look: _LiveView, interval_s: float, ending: Ending, *, is_once: bool, as_json: bool) -> None:
    out = terminal.console()
    look.again()
    while not ending.wait(interval_s):
        broker, rows = look.again()
        if as_json:
            document = {"broker": output.named(broker), "groups": rows}
            (output.write_json if is_once else output.write_json_line)(document)
        else:
            out.print(table(title(broker, RealClock().wall_ms()), rows, out.width))
        if is_once:
            return


def _live(look: _LiveView, interval_s: float, ending: Ending) -> None:
    from rich.live import Live

    with Live(look.table(), console=terminal.console(), auto_refresh=False, screen=False) as live:
        while not ending.wait(interval_s):
            try:
                live.update(look.table(), refresh=True)
            except TimeoutError as error:  # it may come back, and so do we
                live.console.print(f"{error}; still waiting", soft_wrap=True)


def title(broker: BrokerState, now_ms: int) -> str:
    """One line about the broker itself."""
    state = ", READ-ONLY" if broker.is_read_only else ""
    up = output.age(max(now_ms - broker.started_ms, 0) / 1_000)
    durability = f", {broker.durability}" if broker.durability else ""
    return f"{broker.server}: up {up}, {output.count(broker.connections, 'connection')}{durability}{state}"


def table(heading: str, rows: Iterable[GroupRow], width: int) -> Table:
    """The groups, as many as a screen holds. Where it is narrow, columns are left out, and names are cut only where
    that is not enough."""
    shown = list(rows)
    cells = [_cells(row) for row in shown[:_ROWS_MAX]]
    kept, name_chars = _fitting(cells, width)
    made = output.table(heading, *_NAMES, *(f"{each}>" for each in kept))
    made.padding = (0, 0, 0, 1)
    for column in made.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    for each in cells:
        made.add_row(*(_cut(each[name], name_chars) for name in _NAMES), *(each[name] for name in kept))
    remarks = []
    if len(shown) > _ROWS_MAX:
        remarks.append(f"{len(shown) - _ROWS_MAX:,} more: --json lists them all")
    if hidden := [name for name in _NUMBERS if name not in kept]:
        remarks.append(f"a wider terminal shows {', '.join(hidden)}")
    if not shown:
        remarks = ["no groups yet: nobody has consumed"]
    made.caption = "; ".join(remarks) or None
    return made


def _fitting(cells: Sequence[Mapping[str, str]], width: int) -> tuple[list[str], int]:
    """The columns of numbers that there is room for beside whole names, and how long a name may be."""
    kept = list(_NUMBERS)
    names = sum(_width(cells, name) for name in _NAMES)
    for dropped in _LEAST_FIRST:
        if names + _numbers_width(cells, kept) <= width:
            break
        kept.remove(dropped)
    left = width - _numbers_width(cells, kept)
    if names <= left:
        return kept, max(names, _NAME_CHARS_MIN)
    return kept, max(left // len(_NAMES), _NAME_CHARS_MIN)


def _numbers_width(cells: Sequence[Mapping[str, str]], kept: Sequence[str]) -> int:
    """With a space before each column, and one behind each that the table's border takes."""
    return sum(_width(cells, name) for name in kept) + 2 * (len(kept) + len(_NAMES))


def _width(cells: Sequence[Mapping[str, str]], name: str) -> int:
    return max(len(name), *(len(each[name]) for each in cells)) if cells else len(name)


def _cells(row: GroupRow) -> dict[str, str]:
    return {
        "subject": terminal.shown(row.subject),
        "group": terminal.shown(f"{row.group}{_state(row)}"),
        "in/s": f"{row.rate_in:,.0f}",
        "rate/s": f"{row.rate:,.0f}",
        "lag": f"{row.lag:,}",
        "held": f"{row.in_flight:,}",
        "wait": f"{row.waiting:,}",
        "oldest": "" if row.oldest_s is None else output.age(row.oldest_s),
        "dead": f"{row.dead:,}",
        "share": output.share(row.share),
        "cold": output.share(row.cold_share),
    }


def _cut(name: str, chars: int) -> str:
    return name if len(name) <= chars else f"{name[: chars - 1]}…"


def _state(row: GroupRow) -> str:
    if row.is_paused:
        return " (paused)"
    return "" if row.consumers else " (nobody)"
