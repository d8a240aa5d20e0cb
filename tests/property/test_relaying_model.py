"""Relays that overlap and die, transactions that are rolled back, brokers that are away for some streams, clocks that
jump: whatever disorder that leaves, each message is stored once. And the table is empty in about as many rounds as its
rows fill, whoever else cannot be served meanwhile."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from unittest import mock

import pytest
import sqlalchemy as sa
from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairway import batch
from fairway.protocol.resend import SendOutcome
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.sql import relay_rounds
from fairway.sql.database import make
from fairway.sql.outbox_encoding import Origin, OutboxRow, OutboxStream, Streams, new_message, sealed, unstamped
from fairway.sql.outbox_rows import OutboxRows
from fairway.sql.relay_rounds import RelayOptions, RelayRounds, StreamRepair, Work
from tests.support.outboxes import TABLE

STEPS = 60
POISON = b"poison"
AWAY = 5  # of so many streams one may be away
ROUND_MS = 20  # that a round takes
JUMPS_MS = (-60_000, -5_000, 30_000)


class RolledBack(Exception):
    """The database has chosen this transaction to end a deadlock."""


class Broker:
    """The dedupe law; a message that it never takes; and streams that it cannot take just now."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []
        self.away: set[int] = set()  # producer ids, by the remainder
        self._next: dict[int, int] = {}

    def produce(self, data: bytes) -> SendOutcome:
        found = batch.decode(data)
        header = found.header
        following = self._next.get(header.producer_id, 0)
        if header.producer_id % AWAY in self.away:
            return SendOutcome.LATER
        if header.first_sequence != following:
            return SendOutcome.GAP if header.first_sequence > following else SendOutcome.STORED
        if found.payloads[0] == POISON:
            return SendOutcome.REFUSED
        self._next[header.producer_id] = following + header.count
        self.stored += found.payloads
        return SendOutcome.STORED


@dataclass
class Hand:
    """A relay, and what it has under way."""

    relay: RelayRounds
    work: Work | None = None
    wake_ms: int = 0


class World:
    """One table in memory; programs that write into it, and die; relays."""

    def __init__(self, seed: int, rows_max: int | None = None) -> None:
        self.rng = SeededRng(seed)
        self.clock = ManualClock()
        self.broker = Broker()
        self.written: list[bytes] = []
        rows_max = rows_max or (1, 2, 10, 50)[self.rng.below(4)]
        self.options = RelayOptions(rows_max=rows_max, lease_s=20.0, retry_s=1.0, poll_s=1.0, grace_s=5.0)
        self.engine = sa.create_engine("sqlite://")
        make(self.engine, TABLE)
        self.table = OutboxRows(TABLE, self.engine.dialect)
        self._programs = [(Origin(self.rng), Streams(self.clock, self.rng)) for _ in range(3)]
        self._sending: list[tuple[OutboxRow, OutboxStream]] = []  # by the program that wrote them
        self.hands = [self.new_hand() for _ in range(1 + self.rng.below(3))]
        self.rounds = 0

    def new_hand(self) -> Hand:
        return Hand(RelayRounds(self.table, self.clock, self.rng, self.options))

    def waiting(self) -> int:
        with self.engine.connect() as connection:
            return self.table.state(connection, self.clock).pending

    # --- programs ----------------------------------------------------------------------------------------------------

    def write(self, count: int) -> None:
        """Some send their rows themselves, some only give them places, some leave that to relays."""
        for _ in range(count):
            number = self.rng.below(3)
            self.insert(number, self._payload())
            self.clock.advance(self.rng.below(3))

    def _payload(self) -> bytes:
        if self.rng.below(100) == 0:
            return POISON
        self.written.append(b"%d" % len(self.written))
        return self.written[-1]

    def insert(self, number: int, payload: bytes, *, has_place: bool = True) -> None:
        origin, streams = self._programs[number]
        made = new_message(origin.next_id(), self.clock, "s", payload, None, (), None, None, None)
        now_ms = self.clock.wall_ms()
        if number == 0 or not has_place:
            rows = unstamped([made], now_ms)
        else:
            [(row, stream)] = sealed([made], streams, now_ms, now_ms + int(self.options.grace_s * 1_000))
            rows = [row]
            streams.give_back(stream, 1)
            if number == 1:
                self._sending.append((row, stream))
        with self.engine.begin() as connection:
            self.table.insert(connection.connection.driver_connection, rows)

    def send_own(self) -> None:
        """The next ones, as far as the program gets. What is not stored is left to relays, and so is its stream."""
        count = self.rng.below(len(self._sending) + 1)
        some, self._sending = self._sending[:count], self._sending[count:]
        stored = []
        for row, stream in some:
            if self.rng.below(30) and self.broker.produce(row.stamped) is SendOutcome.STORED:
                stored.append(row.id)
            else:
                stream.is_left = True
        if stored and self.rng.below(5):  # else it dies before it deletes them
            with self.engine.begin() as connection:
                self.table.delete(connection, stored)

    def die(self) -> None:
        for _, stream in self._sending:
            stream.is_left = True
        self._sending = []

    # --- relays ------------------------------------------------------------------------------------------------------

    def take(self, hand: Hand, rolled_back_in: int = 0) -> None:
        try:
            with self.engine.begin() as connection:
                work = hand.relay.take(connection)
                if rolled_back_in and self.rng.below(rolled_back_in) == 0:
                    raise RolledBack
        except RolledBack:
            return
        hand.relay.taken()
        hand.work = work

    def send(self, hand: Hand, count: int | None = None) -> None:
        """The first of them; the others have no answer."""
        for outbox_batch in hand.work.outbox_batches[:count] if hand.work else []:
            outbox_batch.settle(self.broker.produce(outbox_batch.data), "as the broker says")

    def settle(self, hand: Hand, rolled_back_in: int = 0) -> None:
        work, hand.work = hand.work, None
        if work is None:
            return
        self.rounds += 1
        hand.wake_ms = self.clock.wall_ms() + (0 if work.is_full else int(self.options.poll_s * 1_000))
        try:
            with self.engine.begin() as connection:
                hand.relay.settle(connection, work)
                if rolled_back_in and self.rng.below(rolled_back_in) == 0:
                    raise RolledBack
        except RolledBack:
            return
        hand.relay.settled()

    def step(self) -> None:
        number = self.rng.below(len(self.hands))
        hand, kind = self.hands[number], self.rng.below(14)
        if kind < 3:
            self.write(self.rng.below(30))
        elif kind == 3:
            self.send_own()
        elif kind == 4:
            self.clock.advance(self.rng.below(8_000))
        elif kind == 5:
            self.clock.jump(JUMPS_MS[self.rng.below(3)] if self.rng.below(4) == 0 else 0)
        elif kind == 6:
            self.broker.away = {each for each in range(AWAY) if self.rng.below(3) == 0}
        elif kind == 7:
            self.send(hand, self.rng.below(20))
            self.hands[number] = self.new_hand()  # it dies, with what it has under way
        elif hand.work is None:
            self.take(hand, rolled_back_in=10)
        else:
            self.send(hand, None if self.rng.below(3) else self.rng.below(20))
            self.settle(hand, rolled_back_in=7)

    def drain(self, seconds: float) -> None:
        """Relays go on, each when its time comes, until the table is empty or so much time is over."""
        end_ms = self.clock.wall_ms() + seconds * 1_000
        while self.waiting() and self.clock.wall_ms() < end_ms:
            hand = min(self.hands, key=lambda each: each.wake_ms)
            self.clock.advance(max(hand.wake_ms - self.clock.wall_ms(), 0))
            self.take(hand)
            self.send(hand)
            self.clock.advance(ROUND_MS)
            self.settle(hand)


def judge(world: World) -> None:
    """Nothing is lost or stored twice."""
    assert Counter(world.broker.stored) == Counter(world.written)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([3, 30, 10_000]), st.sampled_from([1, 2, 1_000]))
@example(1, 10_000, 1_000)
def test_whatever_disorder_is_left_is_sent(seed: int, ids_max: int, streams_max: int) -> None:
    world = World(seed)
    with mock.patch.multiple(relay_rounds, IDS_MAX=ids_max, STREAMS_MAX=streams_max):
        for _ in range(STEPS):
            world.step()
        world.die()
        world.broker.away = set()
        world.clock.advance(400_000)  # more than clocks went back: what was held is so no more
        rounds = world.waiting() / min(world.options.rows_max, ids_max)
        world.drain(30 + 4 * rounds * ROUND_MS / 1_000 + rounds)
    assert world.waiting() == 0
    judge(world)


def tangled(world: World, rows: int) -> None:
    """Programs wrote in turn, and a relay that is dead now gave their rows places in one stream. The times of the rows
    are in no order, as after a few more deaths."""
    first = len(world.written)
    for number in range(rows):
        world.written.append(b"%d" % (first + number))
        world.insert(world.rng.below(3), world.written[-1], has_place=False)
        world.clock.advance(1)
    hand = world.new_hand()
    ids = []
    for _ in range(-(-rows // world.options.rows_max)):
        world.take(hand)
        ids += [row.id for row in hand.work.rows] if hand.work else []
    with world.engine.begin() as connection:
        for row_id in ids:
            wake_ms = world.clock.wall_ms() + (1 + world.rng.below(5)) * 1_000
            connection.execute(sa.update(TABLE).where(TABLE.c.id == row_id).values(wake_ms=wake_ms))


def test_a_stream_in_disorder_is_taken_in_order() -> None:
    world = World(seed=7, rows_max=10)
    world.hands = [world.new_hand()]
    tangled(world, 200)
    world.clock.advance(6_000)
    world.drain(60)
    assert world.broker.stored == world.written, "in the order in which they were given places"
    assert world.rounds <= 2 * 200 // 10 + 3, "every other round"


def test_a_relay_that_goes_by_the_clock_alone_hardly_gets_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """That the bound above is one: this is what it was like."""
    monkeypatch.setattr(StreamRepair, "add", lambda *_: None)
    world = World(seed=7, rows_max=10)
    world.hands = [world.new_hand()]
    tangled(world, 200)
    world.clock.advance(6_000)
    world.drain(60)
    assert world.waiting() > 50


@pytest.mark.parametrize("rows_max", [1, 10, 100])
@pytest.mark.parametrize("away", [0, 1])
def test_a_stream_that_cannot_be_stored_now_neither_holds_up_others_nor_is_asked_about_all_the_time(
    rows_max: int, away: int
) -> None:
    world = World(seed=11, rows_max=rows_max)
    world.hands = [world.new_hand()]
    for _ in range(2):
        tangled(world, 100)
    with world.engine.connect() as connection:
        streams = sorted(connection.execute(sa.select(TABLE.c.stream).distinct()).scalars())
    world.clock.advance(6_000)
    world.drain(0.1)  # so that both are known to be tangled
    world.broker.away = {streams[away] % AWAY}
    assert streams[0] % AWAY != streams[1] % AWAY, "choose another seed"
    world.rounds = 0
    world.drain(60)
    assert world.waiting() <= 100, "the other one is stored"
    assert world.rounds < 60 * (5 + 100 / rows_max) + 4 * 100 / rows_max, "in a second each row once, and five rounds"
    world.broker.away = set()
    world.drain(60)
    judge(world)


def test_several_relays_leave_each_others_rows_alone() -> None:
    world = World(seed=13, rows_max=20)
    world.hands = [world.new_hand() for _ in range(3)]
    tangled(world, 400)
    world.clock.advance(6_000)
    for _ in range(200):
        for hand in world.hands:
            if hand.wake_ms <= world.clock.wall_ms():
                world.take(hand)
                world.clock.advance(1)
        in_hand = [row.id for hand in world.hands if hand.work for row in hand.work.rows]
        assert len(in_hand) == len(set(in_hand)), "two have the same"
        for hand in world.hands:
            world.send(hand)
            world.settle(hand)
        world.clock.advance(ROUND_MS)
    judge(world)
