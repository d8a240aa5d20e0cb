"""The transactional outbox: what a message costs a business transaction of five statements on PostgreSQL.

    python -m bench.outbox                    nine rounds of all ways, about six minutes
    python -m bench.outbox --quick            fewer and shorter, a minute
    python -m bench.outbox --workers 8        how many programs, each with one connection; default: 4
    python -m bench.outbox --json             the figures for a program

PostgreSQL with its own defaults (a commit waits for the disk), a broker, and programs that each run one transaction
after the other are processes of their own. Ways take turns, and before and after each comes the transaction without a
message: a way's ratio is that to the mean of the two, so that what the machine does meanwhile is not taken for it. A
turn begins with a second that does not count, after which messages are sent and rows deleted as fast as they come. The
bench waits for the rows that are left at its end, and shows how long: a way that falls behind takes long for it. Shown
are medians, with the interval in which the median of such turns lies with a probability of nine tenths.

    none      the five statements and COMMIT
    row       one INSERT more, as a user would write it; nothing is sent: what the row alone costs
    outbox    `Outbox.send`: the row, sent after the commit, deleted with others
    qmq       as QMQ does it: one INSERT, a send after the commit, one DELETE in a transaction of its own per message
"""

from __future__ import annotations

import argparse
import json
import queue
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import sqlalchemy as sa
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

import fairway
from bench import machine
from fairway.runtime.process import Child
from fairway.sql import Outbox
from tests.support.databases import postgresql

BAR = 0.85
REST_S_MAX = 1.0  # as long as rows that were sent wait for company before they are deleted
WORKERS = 4
ACCOUNTS = 1_000
PAYLOAD = b"x" * 200
SUBJECT = "order.changed"
START_S = 60.0
DRAIN_S = 60.0

METADATA = sa.MetaData()
ACCOUNT = sa.Table(
    "account", METADATA, sa.Column("id", sa.Integer, primary_key=True), sa.Column("balance", sa.BigInteger)
)
STOCK = sa.Table("stock", METADATA, sa.Column("id", sa.Integer, primary_key=True), sa.Column("left_over", sa.Integer))
ORDER = sa.Table(
    "purchase",
    METADATA,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=True),
    sa.Column("account_id", sa.Integer),
    sa.Column("note", sa.Text),
)
LINE = sa.Table(
    "purchase_line",
    METADATA,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=True),
    sa.Column("purchase_id", sa.BigInteger),
    sa.Column("stock_id", sa.Integer),
)
PLAIN = sa.Table(
    "plain_outbox",
    METADATA,
    sa.Column("id", sa.BigInteger, primary_key=True, autoincrement=True),
    sa.Column("subject", sa.Text),
    sa.Column("payload", sa.LargeBinary),
)


# --- a program --------------------------------------------------------------------------------------------------------


class Way(Protocol):
    """How a message belongs to a transaction."""

    def within(self, connection: sa.Connection) -> object:
        """Before the commit; what it returns is given to `after`."""

    def after(self, token: Any) -> None:
        """After the commit."""

    def drain(self) -> None:
        """Until everything is sent and deleted."""


class Nothing:
    def within(self, connection: sa.Connection) -> object:
        return None

    def after(self, token: Any) -> None:
        pass

    def drain(self) -> None:
        pass


class RowOnly(Nothing):
    def within(self, connection: sa.Connection) -> object:
        return connection.execute(PLAIN.insert().values(subject=SUBJECT, payload=PAYLOAD)).inserted_primary_key


class Ours(Nothing):
    def __init__(self, outbox: Outbox) -> None:
        self._outbox = outbox

    def within(self, connection: sa.Connection) -> object:
        return self._outbox.send(connection, SUBJECT, PAYLOAD, key="o-42")

    def drain(self) -> None:
        if not self._outbox.flush(DRAIN_S) or self._outbox.counts.left:
            raise RuntimeError(f"not everything was sent: {self._outbox.counts}, {self._outbox.trouble}")


class AsQmq(RowOnly):
    """The row's key comes back with the INSERT, and each receipt is followed by one DELETE."""

    def __init__(self, engine: sa.Engine, client: fairway.Client) -> None:
        self._engine = engine
        self._client = client
        self._receipts: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._undeleted = 0
        self._deleted = 0
        threading.Thread(target=self._delete, daemon=True).start()

    def after(self, token: Any) -> None:
        self._undeleted += 1
        pending = self._client.send(SUBJECT, PAYLOAD, key="o-42")
        pending.add_done_callback(lambda _: self._receipts.put(token[0]))

    def _delete(self) -> None:
        while True:
            row = self._receipts.get()
            with self._engine.begin() as connection:
                connection.execute(PLAIN.delete().where(PLAIN.c.id == row))
            self._deleted += 1

    def drain(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while self._deleted < self._undeleted and time.monotonic() < deadline:
            time.sleep(0.002)


def transaction(engine: sa.Engine, number: int, way: Way) -> None:
    """Five statements, and what the way adds."""
    account, stock = number * 7 % ACCOUNTS + 1, number * 13 % ACCOUNTS + 1
    with engine.begin() as connection:
        balance = connection.execute(sa.select(ACCOUNT.c.balance).where(ACCOUNT.c.id == account)).scalar_one()
        connection.execute(ACCOUNT.update().where(ACCOUNT.c.id == account).values(balance=balance - 1))
        made = connection.execute(ORDER.insert().values(account_id=account, note="a purchase"))
        [purchase] = made.inserted_primary_key or (0,)
        connection.execute(LINE.insert().values(purchase_id=purchase, stock_id=stock))
        connection.execute(STOCK.update().where(STOCK.c.id == stock).values(left_over=STOCK.c.left_over - 1))
        token = way.within(connection)
    way.after(token)


def go_on(engine: sa.Engine, way: Way, number: int, seconds: float) -> tuple[int, float]:
    """For so long; how many transactions, and how long it was."""
    done, worked_s, begun = 0, 0.0, time.monotonic()
    while worked_s < seconds:
        transaction(engine, number + done, way)
        done += 1
        worked_s = time.monotonic() - begun
    return done, worked_s


def work(database: str, url: str, first: int) -> None:
    """Reads `way lead seconds` from stdin, does it, and prints transactions, and the seconds of work and of the rest;
    what is done in the seconds of the lead does not count."""
    engine = sa.create_engine(database)
    bare = sa.create_engine(database)  # without the outbox's hooks
    with fairway.connect(url) as client, Outbox(engine, url, relays=False) as outbox:
        ways: dict[str, tuple[sa.Engine, Way]] = {
            "none": (bare, Nothing()),
            "row": (bare, RowOnly()),
            "outbox": (engine, Ours(outbox)),
            "qmq": (bare, AsQmq(bare, client)),
        }
        print("ready", flush=True)
        number = first
        for line in sys.stdin:
            name, lead_s, seconds = line.split()
            on, way = ways[name]
            lead, _ = go_on(on, way, number, float(lead_s))
            done, worked_s = go_on(on, way, number + lead, float(seconds))
            number += lead + done
            ended = time.monotonic()
            way.drain()
            print(json.dumps([done, worked_s, time.monotonic() - ended]), flush=True)


# --- the bench --------------------------------------------------------------------------------------------------------

WAYS = ("none", "row", "outbox", "qmq")
TURNS = ("outbox", "row", "outbox", "qmq", "outbox")  # of a round; it is the outbox that is to be judged


@dataclass(frozen=True, slots=True)
class Sizes:
    rounds: int
    lead_s: float  # before it counts: as long as rows that were sent wait for company before they are deleted
    seconds: float


FULL = Sizes(9, 1.0, 2.5)
QUICK = Sizes(2, 1.0, 2.0)
TINY = Sizes(1, 0.0, 0.2)


class Worker:
    """One program."""

    def __init__(self, database: str, url: str, number: int) -> None:
        command = [sys.executable, "-m", "bench.outbox", "--work", database, url, str(number * 1_000_003)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        said = self._process.stdout.readline() if self._process.stdout else ""
        if not said:
            raise RuntimeError("a program of the bench has ended: see its error above")
        return said.strip()

    def go(self, way: str, sizes: Sizes) -> None:
        if self._process.stdin:
            self._process.stdin.write(f"{way} {sizes.lead_s} {sizes.seconds}\n")
            self._process.stdin.flush()

    def end(self) -> None:
        if self._process.stdin:
            self._process.stdin.close()
        try:
            self._process.wait(START_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout:
            self._process.stdout.close()


def prepare(database: str) -> None:
    engine = sa.create_engine(database)
    METADATA.create_all(engine)
    Outbox(engine).create()
    with engine.begin() as connection:
        numbers = range(1, ACCOUNTS + 1)
        connection.execute(ACCOUNT.insert(), [{"id": each, "balance": 1_000_000} for each in numbers])
        connection.execute(STOCK.insert(), [{"id": each, "left_over": 1_000_000} for each in numbers])
    engine.dispose()


@contextmanager
def broker(folder: Path) -> Iterator[str]:
    with Child("fairway", "up", "--data", str(folder / "data"), "--port", "0") as child:
        ready = re.search(r"fairway://[\d.]+:\d+", child.line(timeout_s=START_S) or "")
        if not ready:
            raise RuntimeError("the broker did not start")
        yield ready[0]


class Figure(NamedTuple):
    """Of one way in one turn."""

    per_s: float  # transactions of all programs together
    ratio: float  # to that without a message, right before and after
    rest_s: float  # until the slowest of them had sent and deleted what was left


def rate(workers: Sequence[Worker], way: str, sizes: Sizes) -> tuple[float, float]:
    """Transactions in a second, and the seconds of the rest."""
    for worker in workers:
        worker.go(way, sizes)
    found = [json.loads(worker.line()) for worker in workers]
    return sum(done / worked_s for done, worked_s, _ in found), max(rest_s for _, _, rest_s in found)


def measure(sizes: Sizes, workers: int, folder: Path, progress: Progress) -> dict[str, list[Figure]]:
    rates: dict[str, list[Figure]] = {way: [] for way in WAYS}
    turns = TURNS * sizes.rounds
    task = progress.add_task("turns", total=len(turns))
    with ExitStack() as running:
        database = running.enter_context(postgresql(folder))
        prepare(database)
        url = running.enter_context(broker(folder))
        programs = []
        for number in range(workers):
            programs.append(Worker(database, url, number))
            running.callback(programs[-1].end)
        for program in programs:
            program.line()
        for way in WAYS:
            rate(programs, way, sizes)
        before, _ = rate(programs, "none", sizes)
        for way in turns:
            per_s, rest_s = rate(programs, way, sizes)
            after, _ = rate(programs, "none", sizes)
            rates[way].append(Figure(per_s, 2 * per_s / (before + after), rest_s))
            rates["none"].append(Figure(after, 1.0, 0.0))
            before = after
            progress.advance(task)
    return rates


def interval(values: Sequence[float], misses: float = 0.1) -> tuple[float, float]:
    """Where the median of what these were drawn from lies, but for so many cases, whatever it is like. Of fewer than
    five: the least and the most, and that is all that can be said."""
    ordered, n = sorted(values), len(values)
    below, rank = 0.5**n, 0  # the chance that no more than `rank` of them lie below that median
    while rank + 1 < n // 2 and below + comb(n, rank + 1) * 0.5**n <= misses / 2:
        rank += 1
        below += comb(n, rank) * 0.5**n
    return ordered[rank], ordered[n - 1 - rank]


def summarise(rates: dict[str, list[Figure]]) -> dict[str, dict[str, float]]:
    """By way: the median rate, the longest rest, and the median ratio with its interval."""
    told = {}
    for way, found in rates.items():
        ratios = [each.ratio for each in found]
        least, most = interval(ratios)
        told[way] = {
            "per_s": statistics.median(each.per_s for each in found),
            "rest_s": max(each.rest_s for each in found),
            "ratio": statistics.median(ratios),
            "ratio_from": least,
            "ratio_to": most,
            "turns": len(found),
        }
    return told


def is_met(row: dict[str, float]) -> bool:
    """Fast enough, and not by falling behind."""
    return row["ratio"] >= BAR and row["rest_s"] <= REST_S_MAX


def show(told: dict[str, dict[str, float]], console: Console) -> None:
    table = Table("", title="transactions of five statements, PostgreSQL, synced commits", title_justify="left")
    for head in ("transactions/s", "of none", "from", "to", "turns", "longest rest, s", ""):
        table.add_column(head, justify="right")
    for way, row in told.items():
        verdict = ("met" if is_met(row) else "not met") if way == "outbox" else ""
        shares = (f"{row[name]:.1%}" for name in ("ratio", "ratio_from", "ratio_to"))
        table.add_row(way, f"{row['per_s']:,.0f}", *shares, f"{row['turns']:.0f}", f"{row['rest_s']:.2f}", verdict)
    console.print(table)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.outbox", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds: a minute")
    parser.add_argument("--tiny", action="store_true", help="only to see that it runs")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--workers", type=int, default=WORKERS, help="programs with a connection each; %(default)s")
    parser.add_argument("--data", type=Path, default=Path(tempfile.gettempdir()), help="where; default: %(default)s")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--work", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.work:
        work(options.work[0], options.work[1], int(options.work[2]))
        return 0
    sizes = TINY if options.tiny else QUICK if options.quick else FULL
    if options.rounds:
        sizes = replace(sizes, rounds=options.rounds)
    folder = tempfile.TemporaryDirectory(prefix="fairway-outbox-", dir=options.data)
    try:
        with folder as name, Progress(console=Console(stderr=True), transient=True) as progress:
            rates = measure(sizes, options.workers, Path(name), progress)
    except RuntimeError as why:
        print(f"skipped: {why}", file=sys.stderr)
        return 0
    told = summarise(rates)
    summary: dict[str, Any] = {"ways": told, "rates": rates, "bar": BAR, "met": is_met(told["outbox"])}
    summary |= {"workers": options.workers, "machine": machine.describe(options.data)}
    if options.json:
        print(json.dumps(summary))
    else:
        show(told, Console(width=max(110, Console().width)))
        print(f"{options.workers} programs; {summary['machine']}")
    return 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are stopped then too
    sys.exit(main())
