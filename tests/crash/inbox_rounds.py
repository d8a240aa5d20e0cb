"""Payments, programs that book them into databases and are killed, a broker that is killed too; and the books.

One broker, and for each database a subject with programs of every kind. Payments are sent all the while, some of them
twice under the same id, as a relay would. When all is drained, each payment must have been booked once, and each
balance be the sum of its payments: neither more nor less.
"""

from __future__ import annotations

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import sqlalchemy as sa

import fairway
from fairway.groups.config import encode
from tests.crash.broker_rounds import DRAIN_S_MAX, START_S_MAX, Counts, Process, Stage
from tests.crash.broker_worker import CONFIG
from tests.crash.inbox_worker import ACCOUNTS, BALANCES, BOOKED, DOOMS, Orders, Payment, engine_of, prepare
from tests.support.databases import fresh

GROUP = "ledger"
FACES = ("session", "batch", "aio", "connection", "once")
BURST = 60  # payments for each database, between two kills at most so many
TWICE_ONE_IN = 15  # payments
PAYMENTS_MIN = 100  # of a book, however slow the machine is: by then some have met their doom
LIFE_S_MAX = 0.5
CONSUMER_KILLS_ONE_IN = 2  # turns
BROKER_KILLS_ONE_IN = 4
DOOM_AT_MAX = 25  # commits of a program that is to kill itself
SEND_S = 90.0  # for the broker to come back


@dataclass
class InboxCounts(Counts):
    """What the runs came to."""

    payments: int = 0
    copies: int = 0  # sent a second time, with the same id
    booked: int = 0  # rows in the books
    twice: int = 0  # payments that were booked more than once
    twice_by_crash: int = 0  # of those that were sent once
    missing: int = 0
    unknown: int = 0
    wrong_balances: int = 0
    dooms: int = 0  # of the kills, those just before or just after a commit
    by_database: Counter[str] = field(default_factory=Counter)

    @property
    def clean(self) -> bool:
        return not (self.failures or self.twice or self.missing or self.unknown or self.wrong_balances)

    def figures(self) -> dict[str, Any]:
        return {
            "broker kills": self.kills,
            "clean stops": self.stops,
            "consumer kills": self.consumer_kills,
            "beside a commit": self.dooms,
            "payments": self.payments,
            "sent twice": self.copies,
            "booked": self.booked,
            **{f"on {name}": count for name, count in sorted(self.by_database.items())},
            "booked twice": self.twice,
            "by crashes": self.twice_by_crash,
            "missing": self.missing,
            "unknown": self.unknown,
            "wrong balances": self.wrong_balances,
            "failures": len(self.failures),
        }


class Book:
    """One database, what it is told, and what it must hold in the end."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.subject = f"payments.{name}"
        self.due: list[Payment] = []
        self.again: set[int] = set()  # sent twice

    def judge(self, counts: InboxCounts) -> None:
        engine = engine_of(self.url)
        with engine.connect() as connection:
            booked = Counter(connection.execute(sa.select(BOOKED.c.payment)).scalars())
            balances = {row.account: row.cents for row in connection.execute(sa.select(BALANCES))}
        engine.dispose()
        sums = Counter[int]()
        for payment in self.due:
            sums[payment.account] += payment.cents
        numbers = {payment.number for payment in self.due}
        twice = {number for number, times in booked.items() if times > 1}
        counts.payments += len(self.due)
        counts.copies += len(self.again)
        counts.booked += booked.total()
        counts.by_database[self.name] += booked.total()
        counts.twice += len(twice)
        counts.twice_by_crash += len(twice - self.again)
        counts.missing += len(numbers - booked.keys())
        counts.unknown += len(booked.keys() - numbers)
        counts.wrong_balances += sum(balances[account] != sums[account] for account in range(ACCOUNTS))


class InboxStage(Stage):
    """The processes of one run in one folder."""

    def __init__(
        self, folder: Path, seed: int, counts: InboxCounts, books: Sequence[Book], *, faces: int, is_idempotent: bool
    ) -> None:
        super().__init__(folder, seed, counts)
        self._rng = random.Random(f"inbox/{seed}")
        self._books = books
        self._faces = faces
        self._is_idempotent = is_idempotent
        self._tellers: dict[str, Orders] = {}
        self._started = 0
        self._is_calm = False
        self._doomed: set[str] = set()
        self._inbox_counts = counts

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_clients(self) -> None:
        with fairway.connect(self._url) as client:
            config = encode(msgspec.structs.replace(CONFIG, version=1))
            for book in self._books:
                client.configure(book.subject, GROUP, config, expected_version=0)
        first = self._rng.randrange(len(FACES))
        for book in self._books:
            for number in range(self._faces):
                self._start_teller(book, FACES[(first + number) % len(FACES)])
            first += 1
        self._await_begun()

    @property
    def _url(self) -> str:
        return f"fairway://127.0.0.1:{self._port}"

    def _start_teller(self, book: Book, face: str) -> None:
        orders = Orders(face, self._url, book.url, book.subject, GROUP, "", self._is_idempotent)
        self._start(f"{book.name}-{face}", orders)

    def _start(self, name: str, orders: Orders) -> None:
        """Every other one is to kill itself beside a commit, soon."""
        self._started += 1
        self._tellers[name] = orders
        doom = DOOMS[self._started // 2 % len(DOOMS)] if self._started % 2 and not self._is_calm else ""
        self._doomed = self._doomed | {name} if doom else self._doomed - {name}
        seed, doom_at = f"{self._seed}/{self._started}", self._rng.randrange(3, DOOM_AT_MAX)
        text = msgspec.json.encode(msgspec.structs.replace(orders, seed=seed, doom=doom, doom_at=doom_at)).decode()
        self._consumers[name] = Process(self._folder, f"{name}.{self._started}", "tests.crash.inbox_worker", text)

    def _await_begun(self) -> None:
        deadline = time.monotonic() + START_S_MAX
        for process in self._consumers.values():
            while not process.said.stat().st_size and process.is_alive and time.monotonic() < deadline:
                time.sleep(0.01)

    def kill_consumer(self) -> None:
        """Another takes its place, and remembers nothing. One that has hardly begun is left alone, and one that is to
        kill itself: it will."""
        begun = [
            name for name, each in self._consumers.items() if each.said.stat().st_size and name not in self._doomed
        ]
        if begun:
            name = self._rng.choice(begun)
            self._consumers[name].kill()
            self._counts.consumer_kills += 1
            self._replace(name)

    def replace_doomed(self) -> None:
        """Those that have met their doom."""
        for name, process in list(self._consumers.items()):
            if not process.is_alive:
                self._counts.consumer_kills += 1
                self._inbox_counts.dooms += 1
                self._replace(name)

    def _replace(self, name: str) -> None:
        if failure := self._consumers[name].failure:
            self._counts.failures.append(failure)
        self._start(name, self._tellers[name])

    # --- the run -----------------------------------------------------------------------------------------------------

    def play(self, seconds: float, tick: Callable[[], object]) -> None:
        self.start_broker()
        self.start_clients()
        deadline = time.monotonic() + seconds
        with fairway.connect(self._url) as client:
            while time.monotonic() < deadline or len(self._books[0].due) < PAYMENTS_MIN:
                self._pay(client)
                time.sleep(self._rng.random() * LIFE_S_MAX)
                self.replace_doomed()
                if self._rng.randrange(CONSUMER_KILLS_ONE_IN) == 0:
                    self.kill_consumer()
                if self._rng.randrange(BROKER_KILLS_ONE_IN) == 0:
                    self.end_life()
                    self.start_broker()
                tick()
            client.flush(SEND_S)

    def _pay(self, client: fairway.Client) -> None:
        """Some payments to each of the books; a few that were sent before once more."""
        for book in self._books:
            for _ in range(self._rng.randrange(BURST)):
                account, cents = self._rng.randrange(ACCOUNTS), self._rng.randrange(1, 10_000)
                payment = Payment(len(book.due), account, cents)
                book.due.append(payment)
                self._send(client, book, payment)
                if self._rng.randrange(TWICE_ONE_IN) == 0:
                    again = self._rng.choice(book.due)
                    book.again.add(again.number)
                    self._send(client, book, again)

    def _send(self, client: fairway.Client, book: Book, payment: Payment) -> None:
        name = fairway.MessageId(self._seed + 1, payment.number)
        client.send(book.subject, msgspec.json.encode(payment), id=name, timeout=SEND_S)

    def drain(self) -> None:
        self._is_calm = True
        deadline = time.monotonic() + DRAIN_S_MAX
        with fairway.connect(self._url) as client:
            while (left := self._left(client)) and time.monotonic() < deadline:
                self.replace_doomed()
                time.sleep(0.1)
        if left:
            self._counts.failures.append(f"not drained after {DRAIN_S_MAX} s: {left}")
        if self._broker is not None and not self._broker.is_alive:
            self._counts.failures.append(f"the broker has ended by itself: {self._broker.failure}")
        self.send_home()

    def _left(self, client: fairway.Client) -> str:
        """What the groups still have to do; empty if nothing."""
        states = {book.name: client.describe(book.subject, GROUP).subjects[0].groups[0] for book in self._books}
        return ", ".join(
            f"{name}: {each.lag} and {each.lots}" for name, each in states.items() if each.lag or each.lots
        )

    def judge(self) -> None:
        for book in self._books:
            book.judge(self._inbox_counts)


def run(
    seconds: float,
    seed: int,
    counts: InboxCounts,
    servers: Sequence[tuple[str, str]],
    *,
    faces: int = len(FACES),
    is_idempotent: bool = True,
    tick: Callable[[], object] = lambda: None,
) -> InboxCounts:
    """One run of so many seconds on SQLite and on these servers, drained and judged."""
    with tempfile.TemporaryDirectory(prefix="fairway-inbox-") as name:
        books = [Book("sqlite", f"sqlite:///{name}/books.db"), *(Book(each, fresh(url)) for each, url in servers)]
        for book in books:
            prepare(book.url)
        stage = InboxStage(Path(name), seed, counts, books, faces=faces, is_idempotent=is_idempotent)
        stage.run(seconds, tick)
    return counts
