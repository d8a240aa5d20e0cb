"""`fairway top`: a live table of consumer groups with rates and shares.

`RateMeter` compares two descriptions of a broker; the clock's readings are arguments. The broker's actors count the
time that they used. The broker removes an actor that was idle for long, and a new actor counts from 0: a count that
has fallen counts from 0.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from fairway import Client
from fairway.cli import output
from fairway.cli.arguments import Interval, OnlySubject
from fairway.cli.connections import CommonOptions, common_options, describe
from fairway.protocol.admin_messages import BrokerState, Depth, GroupDescription, SubjectDescription
from fairway.runtime import host, terminal
from fairway.runtime.clock import RealClock
from fairway.runtime.host import Ending

if TYPE_CHECKING:
    from rich.table import Table


class GroupRow(msgspec.Struct, frozen=True):
    """A group between two looks. Rates are messages a second."""

    subject: str
    group: str
    consumers: int
    rate_in: float  # stored in the subject
    rate: float  # finished by the group
    lag: int  # not delivered yet
    in_flight: int
    waiting: int  # returned, or before their next attempt
    dead: int
    oldest_s: float | None  # age of the oldest message that the group is not done with; None: done with all
    share: float  # of the time of the broker's loop
    cold_share: float  # of the group's own time: reads that missed the page cache
    weight: float
    is_paused: bool


class _SeenGroup(msgspec.Struct, frozen=True):
    end: int
    done: int
    served_ns: int
    cold_ns: int


class RateMeter:
    """Computes rates from two looks; remembers the last one."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str], _SeenGroup] = {}
        self._at_ns: int | None = None

    def look(self, subjects: Iterable[SubjectDescription], *, now_ns: int, now_ms: int) -> list[GroupRow]:
        """The groups, with rates since the look before; on the first look all rates are 0."""
        elapsed_s = 0.0 if self._at_ns is None else (now_ns - self._at_ns) / 1e9
        seen: dict[tuple[str, str], _SeenGroup] = {}
        rows = []
        for subject in subjects:
            for group in subject.groups:
                key = (subject.name, group.name)
                seen[key] = _seen(subject, group)
                rows.append(_row(subject, group, self._seen.get(key), seen[key], elapsed_s, now_ms))
        self._seen, self._at_ns = seen, now_ns
        return rows


def _seen(subject: SubjectDescription, group: GroupDescription) -> _SeenGroup:
    begun = group.in_flight + group.returned + group.retrying + group.dying
    actor = group.actor
    served_ns, cold_ns = (0, 0) if actor is None else (actor.served_ns, actor.cold_ns)
    return _SeenGroup(subject.committed_end, group.cursor - begun, served_ns, cold_ns)


def _row(
    subject: SubjectDescription,
    group: GroupDescription,
    before: _SeenGroup | None,
    now: _SeenGroup,
    elapsed_s: float,
    now_ms: int,
) -> GroupRow:
    served_ns = cold_ns = 0
    rate_in = rate = share = 0.0
    if before is not None and elapsed_s > 0:
        served_ns = _grown(before.served_ns, now.served_ns)
        cold_ns = _grown(before.cold_ns, now.cold_ns)
        rate_in = max(now.end - before.end, 0) / elapsed_s
        rate = max(now.done - before.done, 0) / elapsed_s  # a seek back makes the count fall: that is no rate
        share = served_ns / 1e9 / elapsed_s
    return GroupRow(
        subject=subject.name,
        group=group.name,
        consumers=group.consumers_count,
        rate_in=rate_in,
        rate=rate,
        lag=group.lag,
        in_flight=group.in_flight,
        waiting=group.returned + group.retrying + group.dying + group.inbox,
        dead=group.dead,
        oldest_s=None if group.oldest_ms is None else max(now_ms - group.oldest_ms, 0) / 1_000,
        share=share,
        cold_share=cold_ns / (served_ns + cold_ns) if cold_ns else 0.0,
        weight=group.weight,
        is_paused=group.is_paused,
    )


def _grown(before: int, now: int) -> int:
    return now - before if now >= before else now


_ROWS_MAX = 40  # on a screen; --json has all
_NAMES = ("subject", "group")
_NUMBERS = ("in/s", "rate/s", "lag", "held", "wait", "oldest", "dead", "share", "cold")
# Dropped in this order on a narrow terminal.
_LEAST_FIRST = ("cold", "share", "in/s", "wait", "held", "dead", "oldest", "rate/s")
_NAME_CHARS_MIN = 8


class Sort(enum.Enum):
    """The sort order of groups."""

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

Once = Annotated[bool, typer.Option("--once", help="Measure one interval, print, exit.")]
SortBy = Annotated[
    Sort, typer.Option("--sort", metavar="ORDER", help="Sort groups by share, rate, lag, oldest or name.")
]


@common_options
def top(
    subject: OnlySubject = None,
    once: Once = False,
    interval_s: Interval = 1.0,
    sort: SortBy = Sort.SHARE,
    *,
    common: CommonOptions,
) -> None:
    """Show a live table of consumer groups, until q or Ctrl-C.

    in/s: messages stored a second. rate/s: messages finished a second. oldest:
    age of the oldest unfinished message. share: of the time of the broker's
    loop. cold: of the group's own time, for reads that missed the page cache.

    A narrow terminal shows fewer columns. With --json: one line a refresh.
    """
    with common.connected("top") as client:
        look = _LiveView(client, subject, sort)
        with host.asked_to_end() as ending:
            if once or common.json:
                _print(look, interval_s, ending, is_once=once, as_json=common.json)
            else:
                with host.ended_by_key(ending, "q"):
                    _live(look, interval_s, ending)


class _LiveView:
    """Looks at a broker again and again."""

    def __init__(self, client: Client, subject: str | None, sort: Sort) -> None:
        self._client = client
        self._subject = subject
        self._sort = sort
        self._watch = RateMeter()
        self._clock = RealClock()

    def again(self) -> tuple[BrokerState, list[GroupRow]]:
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
            except TimeoutError as error:  # the broker may come back: try again
                live.console.print(f"{error}; still waiting", soft_wrap=True)


def title(broker: BrokerState, now_ms: int) -> str:
    """One line about the broker itself."""
    state = ", READ-ONLY" if broker.is_read_only else ""
    up = output.age(max(now_ms - broker.started_ms, 0) / 1_000)
    durability = f", {broker.durability}" if broker.durability else ""
    return f"{broker.server}: up {up}, {output.count(broker.connections, 'connection')}{durability}{state}"


def table(heading: str, rows: Iterable[GroupRow], width: int) -> Table:
    """The groups, as many as fit a screen. A narrow table drops columns first, and then cuts names."""
    shown = list(rows)
    cells = [_cells(row) for row in shown[:_ROWS_MAX]]
    kept, name_chars = _fitting(cells, width)
    made = output.table(heading, *_NAMES, *(f"{each}>" for each in kept))
    made.padding = (0, 0, 0, 1)
    for column in made.columns:
        column.no_wrap, column.overflow = True, "ellipsis"
    for each in cells:
        names = (each[name] if len(each[name]) <= name_chars else f"{each[name][: name_chars - 1]}…" for name in _NAMES)
        made.add_row(*names, *(each[name] for name in kept))
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
    """The columns of numbers that fit beside whole names, and the length of a name."""
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
    """The width of the columns: each has a space before, and one behind for the border of the table."""
    return sum(_width(cells, name) for name in kept) + 2 * (len(kept) + len(_NAMES))


def _width(cells: Sequence[Mapping[str, str]], name: str) -> int:
    return max(len(name), *(len(each[name]) for each in cells)) if cells else len(name)


def _cells(row: GroupRow) -> dict[str, str]:
    state = " (paused)" if row.is_paused else "" if row.consumers else " (nobody)"
    return {
        "subject": terminal.shown(row.subject),
        "group": terminal.shown(f"{row.group}{state}"),
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
