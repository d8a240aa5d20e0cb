"""Rows that travel together, and relays that send them one by one: whatever is lost on the way, whoever comes first,
each message is stored once, and no row is deleted whose message is not."""

from __future__ import annotations

from collections import deque

import hypothesis.strategies as st
from hypothesis import given, settings

from fairway import batch
from fairway.errors import Code, Refused
from fairway.protocol.messages import Produced
from fairway.protocol.session import Answer, Ask, Lost
from fairway.sql.letters import Lone, Origin, Row, letter, sealed, together
from fairway.sql.posting import BUNDLE_MAX, Fate, Parcel, Posting
from fairway.sql.streams import Streams
from fairway.world.clock import ManualClock
from fairway.world.rng import SeededRng

ROOM = 8
CLOCK = ManualClock(1_800_000_000_000)


class Broker:
    """The dedupe law of a broker, for any number of streams."""

    def __init__(self) -> None:
        self.stored: list[bytes] = []  # payloads
        self._streams: dict[int, tuple[int, dict[int, bytes]]] = {}

    def produce(self, data: bytes) -> Produced | Refused:
        found = batch.decode(data)
        header = found.header
        following, known = self._streams.get(header.producer_id, (0, {}))
        first = header.first_sequence
        if known.get(first) == data:
            return Produced(0, header.count, 0, True, 1)
        if first > following:
            return Refused(Code.SEQUENCE_GAP if known else Code.UNKNOWN_PRODUCER, "a gap")
        if first < following:
            return Refused(Code.SEQUENCE_CONFLICT, "its place is taken")
        self.stored += found.payloads
        self._streams[header.producer_id] = following + header.count, known | {first: data}
        return Produced(0, header.count, 0, False, 1)


class Shop:
    """A process that commits and sends, its table, and relays elsewhere."""

    def __init__(self) -> None:
        self.broker = Broker()
        self.table: dict[str, Row] = {}
        self.made: list[bytes] = []
        self._lives = 0
        self._posting = Posting()
        self._under_way: deque[Ask] = deque()
        self._streams = Streams(CLOCK, SeededRng(1))
        self._origin = Origin(SeededRng(2))

    def commit(self, messages: int) -> None:
        """One message in a transaction, or several."""
        letters = []
        for _ in range(messages):
            self.made.append(b"%d" % len(self.made))
            letters.append(letter(self._origin.next_id(), CLOCK, "s", self.made[-1], "k", (), None, None, None))
        for row, stream in sealed(letters, self._streams, CLOCK.wall_ms(), 0):
            self.table[row.id] = row

            def settled(parcel: Parcel, id: str = row.id, of: object = stream) -> None:
                if parcel.fate is Fate.STORED:
                    self.table.pop(id, None)
                else:
                    of.is_left = True  # type: ignore[attr-defined]

            self._posting.put(Parcel(row.subject, row.body, settled, is_resent=True, lone=row.lone))
            self._streams.give_back(stream, row.messages)
        CLOCK.advance(ms=1)

    def leave(self) -> None:
        """What waits sets out."""
        self._under_way.extend(self._posting.asks(ROOM - len(self._under_way), 0))

    def arrive(self) -> None:
        """The first that is under way is stored or refused, and answered."""
        if self._under_way:
            ask = self._under_way.popleft()
            self._answer(ask, self.broker.produce(bytes(ask.attachments[0])))

    def break_connection(self, heard: int) -> None:
        """So many requests had been heard, and no answer comes."""
        asks, self._under_way = [*self._under_way], deque()
        for ask in asks[:heard]:
            self.broker.produce(bytes(ask.attachments[0]))
        for ask in asks:
            self._posting.answered(ask.token, Lost("the connection broke"), 0)
        self._posting.opened(0)

    def relay(self, number: int) -> None:
        """Somebody else sends one row."""
        rows = sorted(self.table.values(), key=lambda row: (row.stream, row.place))
        if rows:
            row = rows[number % len(rows)]
            parcel = Parcel(row.subject, row.stamped)
            other = Posting()
            other.put(parcel)
            [ask] = other.asks(1, 0)
            self._answer(ask, self.broker.produce(bytes(ask.attachments[0])), other)
            if parcel.fate is Fate.STORED:
                del self.table[row.id]

    def die(self) -> None:
        """The process, with all that it had under way and in mind."""
        self._under_way.clear()
        self._posting = Posting()
        self._lives += 1
        self._streams = Streams(CLOCK, SeededRng(100 + self._lives))

    def _answer(self, ask: Ask, said: Produced | Refused, posting: Posting | None = None) -> None:
        outcome = Answer(said, ()) if isinstance(said, Produced) else said
        (posting or self._posting).answered(ask.token, outcome, 0)

    def check(self) -> None:
        stored = self.broker.stored
        assert len(set(stored)) == len(stored), "stored twice"
        waiting = {payload for row in self.table.values() for payload in batch.decode(row.body).payloads}
        assert set(self.made) == waiting | set(stored), "a row is gone, and its message is not stored"


STEPS = st.one_of(
    st.tuples(st.just(Shop.commit), st.integers(1, 3)),
    st.tuples(st.just(Shop.commit), st.just(1)),
    st.tuples(st.just(Shop.leave)),
    st.tuples(st.just(Shop.arrive)),
    st.tuples(st.just(Shop.break_connection), st.integers(0, 4)),
    st.tuples(st.just(Shop.relay), st.integers(0, 20)),
    st.tuples(st.just(Shop.die)),
)


@given(st.lists(STEPS, max_size=60))
@settings(max_examples=400, deadline=None)
def test_each_message_is_stored_once_and_no_row_goes_before(steps: list[tuple[object, ...]]) -> None:
    shop = Shop()
    for step, *values in steps:
        step(shop, *values)  # type: ignore[operator]
        shop.check()
    shop.die()
    while shop.table:  # relays take rows in the order of their streams
        before = len(shop.table)
        shop.relay(0)
        assert len(shop.table) < before, "a relay can store the first of a stream, or is told that it is stored"
        shop.check()
    assert sorted(shop.broker.stored) == sorted(shop.made)


def test_rows_of_one_stream_travel_together_and_those_of_two_do_not() -> None:
    posting, rng = Posting(), SeededRng(3)
    one, other = Streams(CLOCK, rng), Streams(CLOCK, rng)
    origin = Origin(rng)
    for streams in (one, one, other, one, one, one):
        made = letter(origin.next_id(), CLOCK, "s", b"x", None, (), None, None, None)
        [(row, stream)] = sealed([made], streams, CLOCK.wall_ms(), 0)
        posting.put(Parcel(row.subject, row.body, lone=row.lone))
        streams.give_back(stream, 1)
    asks = [*posting.asks(ROOM, 0)]
    assert [batch.peek(bytes(ask.attachments[0])).count for ask in asks] == [2, 1, 3], "in the order of their commits"
    assert posting.unsettled == 6
    posting.give_up("it is closed")
    assert posting.unsettled == 0


def test_what_travels_together_is_what_the_rows_hold() -> None:
    origin, lone = Origin(SeededRng(4)), list[Lone]()
    streams = Streams(CLOCK, SeededRng(5))
    for number in range(BUNDLE_MAX):
        tags = ("t",) if number % 3 else ()
        key = None if number % 2 else f"k{number}"
        headers = {"n": str(number)} if number % 5 else None
        made = letter(origin.next_id(), CLOCK, "s", b"%d" % number, key, tags, headers, None, None)
        [(row, stream)] = sealed([made], streams, CLOCK.wall_ms() + 7 * number, 0)
        streams.give_back(stream, 1)
        assert row.lone is not None
        lone.append(row.lone)
        single, found = batch.decode(row.body), batch.decode(together(lone))
        for index in (0, number):
            ids = (lone[index].letter.id, found.id(index))
            assert ids[0] == ids[1]
        last = (found.payloads[number], found.key(number), [*found.tags(number)], found.headers(number))
        assert last == (single.payloads[0], single.key(0), [*single.tags(0)], single.headers(0))
        assert found.created_ms(number) == single.created_ms(0)
