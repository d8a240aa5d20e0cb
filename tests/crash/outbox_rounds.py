"""Sales in three databases, and messages about them: programs, relays and the broker are killed at any instant.

When all of that is over, relays empty the outboxes. Then the messages that the broker has stored must be those that the
databases have rows for: each of them, no others, and under the ids that the programs were told. A message that is
stored twice is counted, and not forgiven: the broker is to recognise it.
"""

from __future__ import annotations

import random
import re
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import sqlalchemy as sa

import fairway
from fairway.errors import Code, FairwayError, Refused
from tests.crash.broker_rounds import START_S_MAX, Counts, Process, Stage
from tests.crash.outbox_worker import FACES, SALES, Orders, engine_of, prepare
from tests.support.databases import fresh
from tests.support.outboxes import TABLE

SELLERS = 3  # of five kinds, for each database
LIFE_S_MAX = 0.6
AWAY_S_MAX = 0.6  # for which there is no broker, unless it is to stay away for longer
BROKER_KILLS_ONE_IN = 4  # turns
RELAY_KILLS_ONE_IN = 3
DRAIN_S_MAX = 120.0
ARRIVAL_S_MAX = 30.0


@dataclass
class OutboxCounts(Counts):
    """What the runs came to."""

    seller_kills: int = 0
    relay_kills: int = 0
    sold: int = 0  # messages whose transaction has committed
    stored: int = 0  # by the broker, repeats included
    missing: int = 0
    phantom: int = 0  # stored, and no transaction committed it
    repeated: int = 0
    renamed: int = 0  # under another id than its sender was told
    late_s: float = 0.0  # for which the last message was on its way from the delay server, when that had it no more
    by_database: Counter[str] = field(default_factory=Counter)
    details: list[str] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not (self.failures or self.missing or self.phantom or self.repeated or self.renamed)

    def figures(self) -> dict[str, Any]:
        return {
            "broker kills": self.kills,
            "clean stops": self.stops,
            "program kills": self.seller_kills,
            "relay kills": self.relay_kills,
            "messages committed": self.sold,
            **{f"on {name}": count for name, count in sorted(self.by_database.items())},
            "stored": self.stored,
            "missing": self.missing,
            "phantom": self.phantom,
            "stored twice": self.repeated,
            "renamed": self.renamed,
            "late s": round(self.late_s, 1),
        }


class Copy(NamedTuple):
    """Of a message, in the broker's log."""

    id: str
    place: str


class Shop:
    """One database and its subject."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self.subject = f"sales.{name}"

    def waiting(self) -> int:
        engine = engine_of(self.url)
        with engine.connect() as connection:
            found: int = connection.execute(sa.select(sa.func.count()).select_from(TABLE)).scalar_one()
        engine.dispose()
        return found

    def left(self) -> str:
        """How things stand with rows that nobody sends: by stream, where it stands, when it is to be looked at, and
        what was said of it."""
        engine, columns = engine_of(self.url), TABLE.c
        place, wake_ms = sa.func.min(columns.place), sa.func.min(columns.wake_ms)
        query = sa.select(columns.stream, columns.error, sa.func.count(), place, sa.func.max(columns.place), wake_ms)
        with engine.connect() as connection:
            found = connection.execute(query.group_by(columns.stream, columns.error)).all()
        engine.dispose()
        return f"at {int(time.time() * 1_000)}: " + "; ".join(str(tuple(each)) for each in found[:10])

    def judge(self, client: fairway.Client, counts: OutboxCounts, *, is_flawed: bool) -> None:
        """What was due is on its way for a moment after the delay server has it no more: it is waited for."""
        sold, stored = self._sold(), self._stored(client)
        began_s = time.monotonic()
        while not is_flawed and sold.keys() - stored.keys() and time.monotonic() < began_s + ARRIVAL_S_MAX:
            time.sleep(0.2)
            stored = self._stored(client)
            counts.late_s = max(counts.late_s, time.monotonic() - began_s)
        missing, copies = sold.keys() - stored.keys(), sum(map(len, stored.values()))
        counts.sold += len(sold)
        counts.by_database[self.name] += len(sold)
        counts.stored += copies
        counts.missing += len(missing)
        counts.phantom += len(stored.keys() - sold.keys())
        counts.repeated += copies - len(stored)
        if not is_flawed:
            counts.renamed += sum(
                sold.get(name, each.id) != each.id for name, found in stored.items() for each in found
            )
        counts.details += [f"{name} is not stored" for name in sorted(missing)]
        counts.details += [f"{name} is stored as {found}" for name, found in stored.items() if len(found) > 1]

    def _sold(self) -> dict[str, str]:
        """Names, and the ids of their messages."""
        engine = engine_of(self.url)
        with engine.connect() as connection:
            sold = {row.name: row.id for row in connection.execute(sa.select(SALES.c.name, SALES.c.id))}
        engine.dispose()
        return sold

    def _stored(self, client: fairway.Client) -> dict[str, list[Copy]]:
        found: dict[str, list[Copy]] = {}
        try:
            for page in client.scan(self.subject):
                header = page.batch.header
                for number, payload in enumerate(page.batch.payloads):
                    copy = Copy(str(page.batch.id(number)), f"{header.producer_id:x}+{header.first_sequence}")
                    found.setdefault(payload.decode(), []).append(copy)
        except Refused as refused:
            if refused.code is not Code.NO_SUCH_SUBJECT:
                raise
        return found


class OutboxStage(Stage):
    """The processes of one run in one folder."""

    def __init__(
        self,
        folder: Path,
        seed: int,
        counts: OutboxCounts,
        shops: Sequence[Shop],
        *,
        faces: Sequence[str],
        sellers: int,
        is_flawed: bool,
        away_s_max: float,
    ) -> None:
        super().__init__(folder, seed, counts)
        self._away_s_max = away_s_max
        self._sellers = sellers
        self._rng = random.Random(f"outbox/{seed}")
        self._shops = shops
        self._faces = faces
        self._is_flawed = is_flawed
        self._outbox_counts = counts
        self._selling: dict[str, tuple[Orders, Process]] = {}
        self._relays: dict[str, tuple[Shop, Process]] = {}
        self._started = 0

    @property
    def _url(self) -> str:
        return f"fairway://127.0.0.1:{self._port}"

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_broker(self) -> None:
        """With a delay server behind the same port."""
        self._lives += 1
        data, port = str(self._folder / "data"), str(self._port)
        broker = Process(self._folder, f"broker-{self._lives}", "fairway", "up", "--data", data, "--port", port)
        self._broker = broker
        deadline = time.monotonic() + START_S_MAX
        while time.monotonic() < deadline and broker.is_alive:
            ready = re.search(r"fairway://[\d.]+:(\d+)", broker.said.read_text())
            if ready:
                self._port = int(ready[1])
                return
            time.sleep(0.005)
        self._counts.failures.append(f"the broker does not start: {broker.failure}")
        raise FairwayError("no broker")

    def start_clients(self) -> None:
        for shop in self._shops:
            for face in self._rng.sample(self._faces, min(self._sellers, len(self._faces))):
                orders = Orders(face, self._url, shop.url, shop.subject, "", self._is_flawed)
                self._start_seller(f"{shop.name}-{face}", orders)
            if not self._is_flawed:
                self._start_relay(f"relay-{shop.name}", shop)
        deadline = time.monotonic() + START_S_MAX
        for _, process in self._selling.values():
            while not process.said.stat().st_size and process.is_alive and time.monotonic() < deadline:
                time.sleep(0.01)

    def _start_seller(self, name: str, orders: Orders) -> None:
        self._started += 1
        orders = msgspec.structs.replace(orders, name=f"{self._seed}.{name}.{self._started}")
        text = msgspec.json.encode(orders).decode()
        process = Process(self._folder, f"{name}.{self._started}", "tests.crash.outbox_worker", text)
        self._selling[name] = orders, process

    def _start_relay(self, name: str, shop: Shop) -> None:
        self._started += 1
        process = Process(
            self._folder, f"{name}.{self._started}", "fairway",
            "outbox", "relay", "--database", shop.url, "--url", self._url, "--lease-s", "4",
        )  # fmt: skip
        self._relays[name] = shop, process

    def kill_seller(self) -> None:
        """Another takes its place, and remembers nothing. One that has hardly begun is left alone."""
        begun = [name for name, (_, process) in self._selling.items() if process.said.stat().st_size]
        if not begun:
            return
        name = self._rng.choice(begun)
        orders, process = self._selling[name]
        self._kill(process)
        self._outbox_counts.seller_kills += 1
        self._start_seller(name, orders)

    def kill_relay(self) -> None:
        if self._relays:
            name = self._rng.choice(sorted(self._relays))
            shop, process = self._relays[name]
            self._kill(process)
            self._outbox_counts.relay_kills += 1
            self._start_relay(name, shop)

    def _kill(self, process: Process) -> None:
        process.kill()
        if process.failure:
            self._counts.failures.append(process.failure)

    def close(self) -> None:
        for _, process in [*self._selling.values(), *self._relays.values()]:
            if process.is_alive:
                process.kill()
        super().close()

    # --- the run -----------------------------------------------------------------------------------------------------

    def play(self, seconds: float, tick: Callable[[], object]) -> None:
        self.start_broker()
        self.start_clients()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            time.sleep(self._rng.random() * LIFE_S_MAX)
            self.kill_seller()
            if self._rng.randrange(RELAY_KILLS_ONE_IN) == 0:
                self.kill_relay()
            if self._rng.randrange(BROKER_KILLS_ONE_IN) == 0:
                self.end_life()
                time.sleep(self._rng.random() * self._away_s_max)
                self.start_broker()
            tick()

    def drain(self) -> None:
        """The programs leave, some of them by force; relays send what they leave."""
        for _, process in self._selling.values():
            if not self._is_flawed and self._rng.randrange(2) and process.said.stat().st_size:
                process.send(signal.SIGTERM)
                if not process.wait(START_S_MAX):
                    self._counts.failures.append(f"{process.name} does not end")
            self._kill(process)
        deadline = time.monotonic() + DRAIN_S_MAX
        for shop in self._shops:
            while not self._is_flawed and shop.waiting() and time.monotonic() < deadline:
                time.sleep(0.1)
            if not self._is_flawed and shop.waiting():
                self._counts.failures.append(f"{shop.waiting()} rows are left in {shop.name}: {shop.left()}")
                self._counts.failures += [
                    f"{name} said: {process.complaints}" for name, (_, process) in self._relays.items()
                ]
        self._await_due(deadline)
        for _, process in self._relays.values():
            process.send(signal.SIGTERM)
        for _, process in self._relays.values():
            if not process.wait(START_S_MAX):
                self._counts.failures.append(f"{process.name} does not end")
            self._kill(process)

    def _await_due(self, deadline: float) -> None:
        with fairway.connect(self._url, patience=START_S_MAX) as client:
            while client.delayed.count() and time.monotonic() < deadline:
                time.sleep(0.1)
        time.sleep(0.5)  # for what was due a moment ago

    def judge(self) -> None:
        with fairway.connect(self._url, patience=START_S_MAX) as client:
            for shop in self._shops:
                shop.judge(client, self._outbox_counts, is_flawed=self._is_flawed)


def run(
    seconds: float,
    seed: int,
    counts: OutboxCounts,
    servers: Sequence[tuple[str, str]],
    *,
    faces: Sequence[str] = FACES,
    sellers: int = SELLERS,
    is_flawed: bool = False,
    away_s_max: float = AWAY_S_MAX,
    tick: Callable[[], object] = lambda: None,
) -> OutboxCounts:
    """One run of so many seconds on SQLite and on these servers, drained and judged."""
    with tempfile.TemporaryDirectory(prefix="fairway-outbox-") as name:
        shops = [Shop("sqlite", f"sqlite:///{name}/sales.db"), *(Shop(each, fresh(url)) for each, url in servers)]
        for shop in shops:
            prepare(shop.url)
        stage = OutboxStage(
            Path(name), seed, counts, shops, faces=faces, sellers=sellers, is_flawed=is_flawed, away_s_max=away_s_max
        )
        stage.run(seconds, tick)
    return counts
