"""Rows that travel together, and relays that send them one by one: whatever is lost on the way, whoever comes first,
each message is stored once, and no row is deleted whose message is not."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import hypothesis.strategies as st
from hypothesis import example, given, settings

from fairway import batch
from fairway.errors import Code, Refused, StoredRange
from fairway.protocol.line import Answer, Ask, ConnectionLost
from fairway.protocol.messages import Produced
from fairway.protocol.resend import SendOutcome
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng
from fairway.sql.outbox_batches import BUNDLE_MAX, OutboxBatch, OutboxBatchSession
from fairway.sql.outbox_encoding import Lone, Origin, OutboxRow, OutboxStream, Streams, new_message, sealed, together
from fairway.sql.relay_rounds import SOME, TakenRows, judge_taken

ROOM = 8
CLOCK = ManualClock(1_800_000_000_000)


Told = Callable[[Produced | Refused], None]


class Record(NamedTuple):
    producer_id: int
    first: int
    end: int
    data: bytes


class Broker:
    """The dedupe law of a broker, for any number of streams. What rests on a record is said when that is committed."""

    def __init__(self) -> None:
        self._log: list[Record] = []
        self._committed = 0
        self._waiting: list[tuple[int, Told, Produced | Refused]] = []

    def produce(self, data: bytes, told: Told) -> None:
        header = batch.peek(data)
        first, end = header.first_sequence, header.first_sequence + header.count
        mine = [(at, each) for at, each in enumerate(self._log, 1) if each.producer_id == header.producer_id]
        following = max((each.end for _, each in mine), default=0)
        same = [at for at, each in mine if each.data == data]
        if same:
            self._say(same[0], told, Produced(0, header.count, 0, True, 1))
        elif first > following:
            told(Refused(Code.SEQUENCE_GAP if mine else Code.UNKNOWN_PRODUCER, "a gap"))
        elif first < following:
            newest = max(at for at, each in mine if each.first < end)
            there = tuple(_range_of(each) for _, each in mine if each.first < end and each.end > first)
            self._say(newest, told, Refused(Code.SEQUENCE_CONFLICT, "its place is taken", stored=there))
        else:
            self._log.append(Record(header.producer_id, first, end, data))
            self._say(len(self._log), told, Produced(0, header.count, 0, False, 1))

    def _say(self, stands_on: int, told: Told, answer: Produced | Refused) -> None:
        if stands_on <= self._committed:
            told(answer)
        else:
            self._waiting.append((stands_on, told, answer))

    def commit(self) -> None:
        self._committed = len(self._log)
        waiting, self._waiting = self._waiting, []
        for _, told, answer in waiting:
            told(answer)

    def lose_power(self) -> None:
        """What is not committed is gone, and nobody is told anything."""
        del self._log[self._committed :]
        self._waiting.clear()

    def payloads(self, *, committed: bool) -> list[bytes]:
        records = self._log[: self._committed] if committed else self._log
        return [payload for each in records for payload in batch.decode(each.data).payloads]


def _range_of(record: Record) -> StoredRange:
    header = batch.peek(record.data)
    return StoredRange(header.first_sequence, header.count, header.crc)


class Shop:
    """A process that commits and sends, its table, and relays elsewhere."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.table: dict[str, OutboxRow] = {}
        self.made: list[bytes] = []
        self._lives = 0
        self._posting = OutboxBatchSession()
        self._under_way: deque[Ask] = deque()
        self._heard: list[Ask] = []  # and not answered yet
        self._streams = Streams(CLOCK, SeededRng(1))
        self._origin = Origin(SeededRng(2))

    def commit(self, messages: int) -> None:
        """One message in a transaction, or several."""
        given = []
        for _ in range(messages):
            self.made.append(b"%d" % len(self.made))
            given.append(new_message(self._origin.next_id(), CLOCK, "s", self.made[-1], "k", (), None, None, None))
        for row, stream in sealed(given, self._streams, CLOCK.wall_ms(), 0):
            self.table[row.id] = row
            settled = partial(self._settled, row.id, stream)
            self._posting.put(OutboxBatch(row.subject, row.body, settled, is_resent=True, lone=row.lone))
            self._streams.give_back(stream, row.messages)
        CLOCK.advance(ms=1)

    def _settled(self, id: str, stream: OutboxStream, outbox_batch: OutboxBatch) -> None:
        if outbox_batch.fate is SendOutcome.STORED:
            self.table.pop(id, None)
        else:
            stream.is_left = True

    def leave(self) -> None:
        """What waits sets out."""
        self._under_way.extend(self._posting.asks(ROOM - len(self._under_way), 0))

    def arrive(self) -> None:
        """The first that is under way is heard."""
        if self._under_way:
            ask = self._under_way.popleft()
            self._heard.append(ask)
            self.broker.produce(bytes(ask.attachments[0]), partial(self._answer, ask, self._lives))

    def _answer(self, ask: Ask, life: int, said: Produced | Refused) -> None:
        if life == self._lives and ask in self._heard:
            self._heard.remove(ask)
            self._posting.answered(ask.token, Answer(said, ()) if isinstance(said, Produced) else said, 0)

    def break_connection(self, heard: int) -> None:
        """So many requests more had been heard, and no answer comes."""
        for _ in range(heard):
            self.arrive()
        asks, self._heard, self._under_way = [*self._heard, *self._under_way], [], deque()
        for ask in asks:
            self._posting.answered(ask.token, ConnectionLost("the connection broke"), 0)
        self._posting.opened(0)

    def relay(self, number: int) -> None:
        """Somebody else sends one row."""
        rows = sorted(self.table.values(), key=lambda row: (row.stream, row.place))
        if rows:
            row = rows[number % len(rows)]
            outbox_batch, other = OutboxBatch(row.subject, row.stamped), OutboxBatchSession()
            other.put(outbox_batch)
            [ask] = other.asks(1, 0)

            def told(said: Produced | Refused) -> None:
                other.answered(ask.token, Answer(said, ()) if isinstance(said, Produced) else said, 0)
                if outbox_batch.fate is SendOutcome.STORED:
                    self.table.pop(row.id, None)
                elif outbox_batch.fate is SendOutcome.TAKEN and row.id in self.table:
                    taken = judge_taken([(row, outbox_batch)], self._rows_at)
                    assert not taken.moved, "it is there, and the rows that were stored with it can prove it"
                    for each in taken.stored:
                        self.table.pop(each, None)

            self.broker.produce(bytes(ask.attachments[0]), told)

    def _rows_at(self, stream: int, first: int, end: int) -> list[OutboxRow]:
        found = [row for row in self.table.values() if row.stream == stream and first <= (row.place or 0) < end]
        return sorted(found, key=lambda row: row.place or 0)

    def sync(self) -> None:
        self.broker.commit()

    def lose_power(self) -> None:
        """The broker; its clients find another one."""
        self.broker.lose_power()
        self.break_connection(0)

    def die(self) -> None:
        """The process, with all that it had under way and in mind."""
        self._under_way.clear()
        self._heard.clear()
        self._posting = OutboxBatchSession()
        self._lives += 1
        self._streams = Streams(CLOCK, SeededRng(100 + self._lives))

    def check(self) -> None:
        stored = self.broker.payloads(committed=False)
        assert len(set(stored)) == len(stored), "stored twice"
        waiting = {payload for row in self.table.values() for payload in batch.decode(row.body).payloads}
        kept = waiting | set(self.broker.payloads(committed=True))
        assert set(self.made) == kept, "a row is gone, and its message is not stored"


STEPS = st.one_of(
    st.tuples(st.just(Shop.commit), st.integers(1, 3)),
    st.tuples(st.just(Shop.commit), st.just(1)),
    st.tuples(st.just(Shop.leave)),
    st.tuples(st.just(Shop.arrive)),
    st.tuples(st.just(Shop.break_connection), st.integers(0, 4)),
    st.tuples(st.just(Shop.relay), st.integers(0, 20)),
    st.tuples(st.just(Shop.sync)),
    st.tuples(st.just(Shop.lose_power)),
    st.tuples(st.just(Shop.die)),
)


@given(st.lists(STEPS, max_size=60))
@example([(Shop.commit, 1), (Shop.commit, 1), (Shop.leave,), (Shop.relay, 0), (Shop.arrive,), (Shop.sync,)])
@example([(Shop.commit, 1), (Shop.commit, 1), (Shop.leave,), (Shop.arrive,), (Shop.relay, 1), (Shop.lose_power,)])
@settings(max_examples=1_500, deadline=None)
def test_each_message_is_stored_once_and_no_row_goes_before(steps: list[tuple[object, ...]]) -> None:
    shop = Shop()
    for step, *values in steps:
        step(shop, *values)  # type: ignore[operator]
        shop.check()
    shop.die()
    shop.sync()
    while shop.table:  # relays take rows in the order of their streams
        before = len(shop.table)
        shop.relay(0)
        shop.sync()
        assert len(shop.table) < before, "a relay can store the first of a stream, or is told that it is stored"
        shop.check()
    assert sorted(shop.broker.payloads(committed=True)) == sorted(shop.made)


def relay_of(shop: Shop, stored: tuple[StoredRange, ...] | None) -> TakenRows:
    """What a relay makes of it when the broker says that this is at the place of the first row."""
    row = next(iter(shop.table.values()))
    outbox_batch = OutboxBatch(row.subject, row.stamped)
    outbox_batch.stored = stored
    return judge_taken([(row, outbox_batch)], shop._rows_at)


def test_nothing_is_dropped_that_is_not_proven_to_be_there() -> None:
    shop = Shop()
    shop.commit(1)
    shop.commit(1)
    first, second = shop.table.values()
    assert first.lone is not None
    assert second.lone is not None
    proof = _range_of(Record(0, 0, 2, together([first.lone, second.lone])))
    assert relay_of(shop, (proof,)).stored == [first.id, second.id]
    for stored in (None, (), (proof._replace(crc=proof.crc ^ 1),), (StoredRange(0, 1, proof.crc),)):
        taken = relay_of(shop, stored)
        assert (taken.stored, [row.id for row, _ in taken.moved]) == ([], [first.id])
    del shop.table[second.id]  # whoever has stored them is about to delete the other one
    assert relay_of(shop, (proof,)) == ([], [(first, SOME)], [])
    first.error = SOME  # and has not done so
    assert [row.id for row, _ in relay_of(shop, (proof,)).moved] == [first.id]


def test_rows_of_one_stream_travel_together_and_those_of_two_do_not() -> None:
    posting, rng = OutboxBatchSession(), SeededRng(3)
    one, other = Streams(CLOCK, rng), Streams(CLOCK, rng)
    origin = Origin(rng)
    for streams in (one, one, other, one, one, one):
        made = new_message(origin.next_id(), CLOCK, "s", b"x", None, (), None, None, None)
        [(row, stream)] = sealed([made], streams, CLOCK.wall_ms(), 0)
        posting.put(OutboxBatch(row.subject, row.body, lone=row.lone))
        streams.give_back(stream, 1)
    asks = [*posting.asks(ROOM, 0)]
    assert [batch.peek(bytes(ask.attachments[0])).count for ask in asks] == [2, 1, 3], "in the order of their commits"
    assert posting.unsettled == 6
    posting.give_up("it is closed")
    assert posting.unsettled == 0


def test_what_was_sent_by_itself_and_lost_is_sent_by_itself_again() -> None:
    """It may be stored: together with others it would be refused, and all of them wait for a relay."""
    shop = Shop()
    shop.commit(1)
    shop.leave()
    shop.commit(1)
    shop.commit(1)
    shop.break_connection(heard=1)
    shop.sync()
    for _ in range(3):
        shop.leave()
        shop.arrive()
        shop.sync()
    assert not shop.table
    assert shop.broker.payloads(committed=True) == shop.made


def test_what_travels_together_is_what_the_rows_hold() -> None:
    origin, lone = Origin(SeededRng(4)), list[Lone]()
    streams = Streams(CLOCK, SeededRng(5))
    for number in range(BUNDLE_MAX):
        tags = ("t",) if number % 3 else ()
        key = None if number % 2 else f"k{number}"
        headers = {"n": str(number)} if number % 5 else None
        made = new_message(origin.next_id(), CLOCK, "s", b"%d" % number, key, tags, headers, None, None)
        [(row, stream)] = sealed([made], streams, CLOCK.wall_ms() + 7 * number, 0)
        streams.give_back(stream, 1)
        assert row.lone is not None
        lone.append(row.lone)
        single, found = batch.decode(row.body), batch.decode(together(lone))
        for index in (0, number):
            ids = (lone[index].message.id, found.id(index))
            assert ids[0] == ids[1]
        last = (found.payloads[number], found.key(number), [*found.tags(number)], found.headers(number))
        assert last == (single.payloads[0], single.key(0), [*single.tags(0)], single.headers(0))
        assert found.created_ms(number) == single.created_ms(0)
