"""Relays that die, brokers that go away, and rows in whatever disorder that leaves: when it is over, one relay empties
the table in about as many rounds as its rows fill, each message is stored once, and streams in their order."""

from __future__ import annotations

from collections import Counter

import pytest
import sqlalchemy as sa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairway import batch
from fairway.sql.letters import Letter, Origin, letter, sealed, unstamped
from fairway.sql.making import make
from fairway.sql.posting import Fate
from fairway.sql.relaying import Relaying, RelayOptions, Work
from fairway.sql.rows import OutboxRows
from fairway.sql.streams import Streams
from fairway.sql.untangling import Untangling
from fairway.world.clock import ManualClock
from fairway.world.rng import SeededRng
from tests.support.outboxes import TABLE

STEPS = 40
POISON = b"poison"
OPTIONS = RelayOptions(rows_max=10, lease_s=20.0, retry_s=1.0, poll_s=1.0, grace_s=5.0)


class Broker:
    """The dedupe law, and one message that it never takes."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self._next: dict[int, int] = {}

    def produce(self, data: bytes) -> Fate:
        found = batch.decode(data)
        header = found.header
        following = self._next.get(header.producer_id, 0)
        if header.first_sequence != following:
            return Fate.GAP if header.first_sequence > following else Fate.STORED
        if found.payloads[0] == POISON:
            return Fate.REFUSED
        self._next[header.producer_id] = following + header.count
        self.stored += found.payloads
        return Fate.STORED


class World:
    """One table in memory; programs that write into it, and die; relays."""

    def __init__(self, seed: int) -> None:
        self.rng = SeededRng(seed)
        self.clock = ManualClock()
        self.broker = Broker()
        self.written: list[bytes] = []
        self.poisoned = 0
        self.engine = sa.create_engine("sqlite://")
        make(self.engine, TABLE)
        self._rows = OutboxRows(TABLE, self.engine.dialect)
        self._programs = [(Origin(self.rng), Streams(self.clock, self.rng)) for _ in range(3)]
        self.relays = [self.new_relay() for _ in range(2)]

    def new_relay(self) -> Relaying:
        return Relaying(self._rows, self.clock, self.rng, OPTIONS)

    def waiting(self) -> int:
        with self.engine.connect() as connection:
            return self._rows.state(connection, self.clock).pending

    # --- what happens ------------------------------------------------------------------------------------------------

    def write(self, count: int) -> None:
        """By programs that send nothing themselves: some give their rows places, some leave that to relays."""
        for _ in range(count):
            number = self.rng.below(3)
            origin, streams = self._programs[number]
            made = letter(origin.next_id(), self.clock, "s", self._payload(), None, (), None, None, None)
            self.insert(made, streams if number else None)
            self.clock.advance(self.rng.below(3))

    def _payload(self) -> bytes:
        if self.rng.below(100) == 0:
            self.poisoned += 1
            return POISON
        self.written.append(b"%d" % len(self.written))
        return self.written[-1]

    def insert(self, made: Letter, streams: Streams | None) -> None:
        now_ms = self.clock.wall_ms()
        if streams is None:
            rows = unstamped([made], now_ms)
        else:
            [(row, stream)] = sealed([made], streams, now_ms, now_ms + int(OPTIONS.grace_s * 1_000))
            streams.give_back(stream, 1)
            rows = [row]
        with self.engine.begin() as connection:
            self._rows.insert(connection.connection.driver_connection, rows)

    def take(self, relay: Relaying) -> Work:
        with self.engine.begin() as connection:
            work = relay.take(connection)
        relay.taken()
        return work

    def send(self, work: Work, count: int) -> None:
        """The first of them; the others have no answer."""
        for parcel in work.parcels[:count]:
            parcel.settle(self.broker.produce(parcel.data), "as the broker says")

    def settle(self, relay: Relaying, work: Work) -> None:
        with self.engine.begin() as connection:
            relay.settle(connection, work)

    def step(self) -> None:
        number = self.rng.below(len(self.relays))
        relay, kind = self.relays[number], self.rng.below(8)
        if kind < 2:
            self.write(self.rng.below(30))
        elif kind == 2:
            self.clock.advance(self.rng.below(8_000))
        else:
            work = self.take(relay)
            self.send(work, self.rng.below(len(work.parcels) + 1) if kind < 6 else len(work.parcels))
            if kind == 3:  # it dies, and another takes its place
                self.relays[number] = self.new_relay()
            else:
                self.settle(relay, work)

    def drain(self, rounds_max: int) -> int:
        """By one relay; how many rounds it takes."""
        relay = self.new_relay()
        self.clock.advance((OPTIONS.lease_s + OPTIONS.grace_s) * 1_000)  # what was held is so no more
        for rounds in range(rounds_max):
            if not self.waiting():
                return rounds
            work = self.take(relay)
            self.send(work, len(work.parcels))
            self.settle(relay, work)
            self.clock.advance(20 if work.is_full else OPTIONS.poll_s * 1_000)
        return rounds_max


def rounds_for(rows: int) -> int:
    """Half of a round may be rows that are put off; then each of a few streams may end in less than a round, and a
    stream that ends in a hole is left after two."""
    return 2 * (2 * rows // OPTIONS.rows_max) + 40


def judge(world: World) -> None:
    """Nothing is lost or stored twice."""
    assert Counter(world.broker.stored) == Counter(world.written)


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 1 << 32))
@example(1)
def test_whatever_disorder_is_left_is_sent_in_a_few_rounds(seed: int) -> None:
    world = World(seed)
    for _ in range(STEPS):
        world.step()
    rounds_max = rounds_for(world.waiting())
    rounds = world.drain(rounds_max)
    assert rounds < rounds_max, f"{world.waiting()} rows are left"
    judge(world)


def tangled(seed: int, rows: int) -> World:
    """Programs wrote into one stream in turn; the times of its rows are in no order."""
    world = World(seed)
    relay = world.new_relay()
    origins = [Origin(world.rng) for _ in range(3)]
    for number in range(rows):
        payload = b"%d" % number
        origin = origins[world.rng.below(3)]
        made = letter(origin.next_id(), world.clock, "s", payload, None, (), None, None, None)
        world.written.append(payload)
        world.insert(made, None)
        world.clock.advance(1)
    while world.take(relay).is_full:  # it gives them places, and dies
        pass
    with world.engine.begin() as connection:
        for row_id in connection.execute(sa.select(TABLE.c.id)).scalars().all():
            wake_ms = world.clock.wall_ms() + world.rng.below(5) * 1_000
            connection.execute(sa.update(TABLE).where(TABLE.c.id == row_id).values(wake_ms=wake_ms))
    return world


def test_a_stream_in_disorder_is_taken_in_order() -> None:
    world = tangled(seed=7, rows=200)
    assert world.drain(rounds_max=60) <= 200 // 5 + 5, "half of each round, as others may wait too"
    judge(world)
    assert world.broker.stored == world.written, "in the order in which they were given places"


def test_a_relay_that_goes_by_the_clock_alone_hardly_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the bound above is one: this is what it was like."""
    monkeypatch.setattr(Untangling, "add", lambda *_: None)
    world = tangled(seed=7, rows=200)
    assert world.drain(rounds_max=100) == 100
    assert world.waiting() > 50
