"""Relays: what a crash has left is sent, once; what is refused is set aside, and holds nobody up."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa

import fairway
from fairway import batch
from fairway.cli.outbox import check_relay
from fairway.errors import FairwayError, Misuse
from fairway.protocol.resend import SendOutcome
from fairway.runtime.clock import ManualClock, RealClock
from fairway.runtime.rng import RealRng, SeededRng
from fairway.runtime.threaded_link import LinkFailed
from fairway.sql import Outbox, Relay, RelayOptions
from fairway.sql.outbox_rows import OutboxRows
from fairway.sql.outbox_sender import OutboxSender
from fairway.sql.relay_rounds import RelayRounds
from tests.support.outboxes import NIMBLE, TABLE, FailingRng, Up, arrived, eventually, numbered, payloads, put, rows
from tests.support.outboxes import up as running


def written(engine: sa.Engine) -> Outbox:
    """An outbox that sends nothing by itself: so a process that dies right after its commit leaves the table."""
    outbox = Outbox(engine)
    outbox.create()
    return outbox


def contents(engine: sa.Engine) -> list[sa.RowMapping]:
    with engine.connect() as connection:
        return list(connection.execute(sa.select(TABLE).order_by(TABLE.c.id)).mappings())


def test_a_relay_sends_what_was_left_in_its_order(engine: sa.Engine, up: Up, subject: str) -> None:
    outbox = written(engine)
    put(engine, outbox, subject, *numbered(30))
    assert (outbox.state().pending, outbox.state().overdue, outbox.state().subjects) == (30, 30, {subject: 30})
    with Relay(engine, up.url, options=NIMBLE) as relay:
        assert payloads(up.url, subject, 30) == numbered(30)
        eventually(lambda: rows(engine) == 0, "they are deleted")
    assert (relay.counts.sent, relay.counts.repeats, outbox.state().pending) == (30, 0, 0)


def test_several_relays_send_everything_once(engine: sa.Engine, up: Up, subject: str) -> None:
    outbox = written(engine)
    put(engine, outbox, subject, *numbered(120))
    few = RelayOptions(grace_s=0.2, poll_s=0.02, rows_max=7)
    with ExitStack() as running_together:
        relays = [running_together.enter_context(Relay(engine, up.url, options=few)) for _ in range(3)]
        found = payloads(up.url, subject, 120)
        eventually(lambda: rows(engine) == 0, "they are deleted")
    assert sorted(found) == sorted(numbered(120))
    assert sum(relay.counts.sent for relay in relays) == 120


def test_a_row_that_was_sent_and_not_deleted_is_recognised_by_the_broker(
    engine: sa.Engine, up: Up, subject: str
) -> None:
    with Outbox(engine, up.url, relays=False, options=RelayOptions(grace_s=0, delete_linger_s=60)) as outbox:
        outbox.create()
        put(engine, outbox, subject, *numbered(100))
        assert payloads(up.url, subject, 100) == numbered(100)
        left = contents(engine)
        assert len(left) == 100, "as if the process had died before it deleted them"
        with Relay(engine, up.url, options=NIMBLE) as relay:
            eventually(lambda: rows(engine) == 0, "a relay deletes them")
        assert payloads(up.url, subject, 100) == numbered(100), "and nothing was stored again"
        assert relay.counts.sent == 100
        assert relay.counts.repeats == 100


def test_a_relay_that_dies_after_sending_leaves_what_the_next_one_repeats_harmlessly(
    lite: sa.Engine, up: Up, subject: str
) -> None:
    outbox = written(lite)
    put(lite, outbox, subject, *numbered(5))
    rows_of = OutboxRows(TABLE, lite.dialect)
    with Relay(lite, up.url, options=NIMBLE) as relay:
        eventually(lambda: relay.counts.sent == 5, "sent")
    put(lite, outbox, subject, b"later")
    clock = ManualClock(int(datetime.now(UTC).timestamp() * 1_000))
    dying = RelayRounds(rows_of, clock, SeededRng(1), RelayOptions(lease_s=0))
    with lite.begin() as connection:
        work = dying.take(connection)  # it wrote down the stream, and died before or after it sent
    assert [(row.stream is not None, row.place) for row in work.rows] == [(True, 0)]
    with Relay(lite, up.url, options=NIMBLE):
        eventually(lambda: rows(lite) == 0, "another one goes on")
    [_, _, _, _, _, message] = arrived(up.url, subject, 6)
    assert message.payload == b"later"


def test_a_stream_in_disorder_is_sent_in_order(engine: sa.Engine, up: Up, subject: str) -> None:
    """A relay has given rows of several programs places in one stream, and died. Their times are in no order."""
    outboxes = [written(engine) for _ in range(3)]
    for number in range(120):
        put(engine, outboxes[number * 7 % 3], subject, b"%d" % number)
    dead = RelayRounds(OutboxRows(TABLE, engine.dialect), RealClock(), RealRng(), RelayOptions(lease_s=0))
    with engine.begin() as connection:
        work = dead.take(connection)
        for row in work.rows:
            wake_ms = row.wake_ms - (row.place or 0) * 37 % 5 * 1_000
            connection.execute(sa.update(TABLE).where(TABLE.c.id == row.id).values(wake_ms=wake_ms))
    few = RelayOptions(rows_max=20, poll_s=0.02, retry_s=0.1)
    with Relay(engine, up.url, options=few) as relay:
        eventually(lambda: rows(engine) == 0, "they are deleted")
    assert payloads(up.url, subject, 120) == [batch.decode(row.body).payloads[0] for row in work.rows]
    assert relay.counts.repeats == 0
    assert relay.counts.rounds <= 2 * 120 // 20 + 4, "every other round takes them in order"


def test_rows_that_somebody_holds_are_not_taken_for_being_first(lite: sa.Engine, subject: str) -> None:
    outbox = written(lite)
    put(lite, outbox, subject, *numbered(6))
    clock, of_table = ManualClock(int(datetime.now(UTC).timestamp() * 1_000)), OutboxRows(TABLE, lite.dialect)
    one, other = (RelayRounds(of_table, clock, SeededRng(seed), RelayOptions(rows_max=3)) for seed in (1, 2))
    with lite.begin() as connection:
        held = one.take(connection)
        one.taken()
        behind = one.take(connection)  # the same stream goes on
    with lite.begin() as connection:
        of_table.note(connection, [(row, clock.wall_ms(), "it was put off") for row in behind.rows])
    for _ in range(3):  # the other one sends what is behind
        assert meets_gaps(lite, other).isdisjoint(row.id for row in held.rows)
        clock.advance(1_100)
    with lite.begin() as connection:
        of_table.note(connection, [(row, clock.wall_ms() + 60_000, "no broker answers") for row in held.rows])
    meets_gaps(lite, other)
    assert meets_gaps(lite, other) >= {row.id for row in held.rows[:2]}, "nobody holds them now: before their time"


def meets_gaps(engine: sa.Engine, relay: RelayRounds) -> set[str]:
    """A round of which nothing is stored; the rows that were sent."""
    with engine.begin() as connection:
        work = relay.take(connection)
        for outbox_batch in work.outbox_batches:
            outbox_batch.settle(SendOutcome.GAP)
        relay.settle(connection, work)
    return {row.id for row in work.rows}


def test_a_relay_takes_no_more_bytes_than_it_has_room_for(lite: sa.Engine) -> None:
    outbox = written(lite)
    put(lite, outbox, "orders", *(b"x" * 1_000 for _ in range(10)))
    rows_of, now_ms = OutboxRows(TABLE, lite.dialect), int(datetime.now(UTC).timestamp() * 1_000)
    size_bytes = len(contents(lite)[0]["body"])
    with lite.begin() as connection:
        five = rows_of.claim(connection, now_ms, 60_000, 1_000, 6 * size_bytes - 1)
        assert (len(five.rows), five.is_cut) == (5, True)
        assert len(rows_of.claim(connection, now_ms, 60_000, 1_000, 10).rows) == 1, (
            "one at least, or it would never be sent"
        )
        assert len(rows_of.claim(connection, now_ms, 60_000, 2, 1 << 20).rows) == 2


def test_a_relay_leaves_a_stream_of_its_own_that_has_a_hole(lite: sa.Engine, up: Up, subject: str) -> None:
    """What it set aside left the hole. It would give what is behind another place in the same stream, for ever."""
    outbox = written(lite)
    put(lite, outbox, subject, *numbered(9))
    clock = ManualClock(int(datetime.now(UTC).timestamp() * 1_000))
    relay = RelayRounds(OutboxRows(TABLE, lite.dialect), clock, SeededRng(1), RelayOptions(rows_max=3))
    streams = []
    for fates in [
        (SendOutcome.STORED, SendOutcome.REFUSED, SendOutcome.GAP),
        (SendOutcome.STORED, SendOutcome.STORED, SendOutcome.STORED),
    ]:
        with lite.begin() as connection:
            work = relay.take(connection)
        relay.taken()
        streams.append({row.stream for row in work.rows})
        for outbox_batch, fate in zip(work.outbox_batches, fates, strict=True):
            outbox_batch.settle(fate, "as the test says")
        with lite.begin() as connection:
            relay.settle(connection, work)
    assert streams[0].isdisjoint(streams[1])


def test_what_a_slow_relay_says_of_a_stream_that_a_row_has_left_is_not_believed(lite: sa.Engine, subject: str) -> None:
    """Or its new stream were given up without a second look, and what is stored of it sent again."""
    put(lite, written(lite), subject, *numbered(3))
    clock, of_table = ManualClock(int(datetime.now(UTC).timestamp() * 1_000)), OutboxRows(TABLE, lite.dialect)
    slow, other, third = (RelayRounds(of_table, clock, SeededRng(seed), RelayOptions()) for seed in (1, 2, 3))
    with lite.begin() as connection:
        left = slow.take(connection)
        of_table.abandon(connection, left.rows[0].stream or 0, clock.wall_ms())
        work = other.take(connection)
        for outbox_batch in left.outbox_batches:
            outbox_batch.settle(SendOutcome.GAP)
        slow.settle(connection, left)
    clock.advance(1_100)
    assert meets_gaps(lite, third) == {row.id for row in work.rows}
    assert {row["stream"] for row in contents(lite)} == {work.rows[0].stream}
    clock.advance(1_100)
    meets_gaps(lite, third)
    assert {row["stream"] for row in contents(lite)} == {None}, "it was asked twice"


def test_slow_relay_leaves_the_new_stream_of_a_row_alone(engine: sa.Engine, subject: str) -> None:
    """The place of the row in its old stream is taken; another relay has moved the row and sends it meanwhile."""
    put(engine, written(engine), subject, *numbered(3))
    clock, of_table = ManualClock(int(datetime.now(UTC).timestamp() * 1_000)), OutboxRows(TABLE, engine.dialect)
    slow, other = (RelayRounds(of_table, clock, SeededRng(seed), RelayOptions()) for seed in (1, 2))
    with engine.begin() as connection:
        left = slow.take(connection)
    clock.advance(25_000)  # the lease is over
    with engine.begin() as connection:
        late = other.take(connection)
        for outbox_batch in late.outbox_batches[1:]:
            outbox_batch.settle(SendOutcome.TAKEN)
        other.settle(connection, late)
        anew = {row.id: (row.stream, row.place) for row in other.take(connection).rows}
    assert set(anew) == {row.id for row in late.rows[1:]}
    for outbox_batch in left.outbox_batches:
        outbox_batch.settle(SendOutcome.TAKEN)
    with engine.begin() as connection:
        slow.settle(connection, left)
    slow.settled()
    assert slow.counts.restarted == 1, "the row that nobody else has moved"
    found = {row["id"]: (row["stream"], row["place"]) for row in contents(engine)}
    assert found == anew | {left.rows[0].id: (None, None)}


def test_what_is_refused_is_set_aside_and_holds_nobody_up(engine: sa.Engine, up: Up, subject: str) -> None:
    far = datetime.now(UTC) + timedelta(days=5 * 365)
    with Outbox(engine, up.url, options=NIMBLE) as outbox:
        outbox.create()
        for number in range(3):
            with engine.begin() as connection:
                outbox.send(connection, subject, b"%d" % number, at=far if number == 1 else None)
        with engine.begin() as connection:
            outbox.send(connection, subject, b"soon", after=0.1)
        assert sorted(payloads(up.url, subject, 3)) == [b"0", b"2", b"soon"]
        eventually(lambda: outbox.state().set_aside == 1, "the one that is due in five years")
        [refused] = outbox.set_aside()
        assert (refused.subject, refused.messages) == (subject, 1)
        assert "BAD_REQUEST" in refused.error or "731" in refused.error, refused.error
        assert outbox.state().pending == 0
        assert outbox.discard([refused.id, "0" * 26]) == [refused.id]
        assert rows(engine) == 0


def test_a_delayed_message_can_be_cancelled_once_it_is_handed_over_and_not_before(
    lite: sa.Engine, up: Up, subject: str
) -> None:
    """As docs/how-to/outbox.md and docs/how-to/delayed-messages.md say."""
    outbox = written(lite)
    with lite.begin() as connection:
        sent = outbox.send(connection, subject, b"remind", key="o-1", after=3_600)
    with fairway.connect(up.url) as fw:
        before = (fw.delayed.cancel(sent), fw.delayed.cancel(subject=subject, key="o-1"))
        assert [(each.fate, each.messages) for each in before] == [("unknown", 0), ("unknown", 0)]
        assert fw.delayed.count(subject=subject) == 0
        with Relay(lite, up.url, options=NIMBLE):
            eventually(lambda: rows(lite) == 0, "it is handed over")
        assert fw.delayed.count(subject=subject) == 1, "the earlier cancels meant nothing"
        assert fw.delayed.cancel(sent).fate == "cancelled"


def test_what_was_set_aside_can_be_sent_again(lite: sa.Engine, up: Up, subject: str) -> None:
    outbox = written(lite)
    put(lite, outbox, subject, b"damaged", b"sound")
    [first, _] = contents(lite)
    with lite.begin() as connection:
        connection.execute(sa.update(TABLE).where(TABLE.c.id == first["id"]).values(body=b"not a batch"))
    with Relay(lite, up.url, options=NIMBLE) as relay:
        assert payloads(up.url, subject, 1) == [b"sound"]
        eventually(lambda: outbox.state().set_aside == 1, "the damaged one")
        assert "damaged" in outbox.set_aside()[0].error
        with lite.begin() as connection:
            connection.execute(sa.update(TABLE).where(TABLE.c.id == first["id"]).values(body=first["body"]))
        assert outbox.retry() == [first["id"]]
        assert payloads(up.url, subject, 2) == [b"sound", b"damaged"]
        eventually(lambda: rows(lite) == 0, "all of it")
    assert relay.counts.set_aside == 1


def test_rows_behind_one_that_was_set_aside_get_another_stream(
    lite: sa.Engine, up: Up, subject: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A process died and left five rows of one stream. One of them is bad: what is behind it finds a gap for ever."""
    with Outbox(lite, "fairway://127.0.0.1:1", relays=False, options=RelayOptions(grace_s=0)) as outbox:
        outbox.create()
        put(lite, outbox, subject, *numbered(5))
        left = contents(lite)
        assert len({row["stream"] for row in left}) == 1
        with lite.begin() as connection:
            connection.execute(sa.update(TABLE).where(TABLE.c.id == left[2]["id"]).values(body=b"not a batch"))
    with caplog.at_level(logging.WARNING), Relay(lite, up.url, options=NIMBLE) as relay:
        assert sorted(payloads(up.url, subject, 4)) == [b"0", b"1", b"3", b"4"]
        eventually(lambda: rows(lite) == 1, "all but the bad one")
    assert relay.counts.restarted == 2
    assert "another stream" in caplog.text
    found = arrived(up.url, subject, 4)
    assert {str(message.id) for message in found} == {row["id"] for row in left if row is not left[2]}, "the ids stay"


def test_a_broker_that_has_forgotten_everything_gets_what_is_left(
    lite: sa.Engine, subject: str, tmp_path: Path
) -> None:
    with running(tmp_path / "data") as broker:
        with Outbox(lite, broker.url, relays=False, options=RelayOptions(grace_s=0)) as outbox:
            outbox.create()
            put(lite, outbox, subject, b"lost with the broker's disk")
            assert outbox.flush()
            broker.kill()
            put(lite, outbox, subject, b"left")
            assert [row["place"] for row in contents(lite)] == [1]
        broker.forget()
        with Relay(lite, broker.url, options=NIMBLE):
            assert payloads(broker.url, subject, 1) == [b"left"]


def test_a_relay_waits_for_its_broker_and_leaves_the_table_alone(lite: sa.Engine) -> None:
    outbox = written(lite)
    put(lite, outbox, "s", b"x")
    before = contents(lite)
    with Relay(lite, "fairway://127.0.0.1:1", options=NIMBLE) as relay:
        eventually(lambda: relay.trouble is not None, "it says why")
    assert contents(lite) == before
    assert relay.counts.rounds == 0


def test_a_relay_survives_its_database(lite: sa.Engine, up: Up, subject: str) -> None:
    outbox = written(lite)
    with Relay(lite, up.url, options=NIMBLE) as relay:
        TABLE.drop(lite)
        eventually(lambda: "the database" in (relay.trouble or ""), "it says so")
        outbox.create()
        put(lite, outbox, subject, b"x")
        assert payloads(up.url, subject, 1) == [b"x"]


def test_mistakes(lite: sa.Engine) -> None:
    with pytest.raises(Misuse, match=r"outbox\.create"):
        Relay(lite, "fairway://127.0.0.1:1").start()
    with pytest.raises(Misuse, match="AioRelay on an AsyncEngine"):
        Relay("sqlite://", "fairway://127.0.0.1:1")  # type: ignore[arg-type]
    with pytest.raises(Misuse, match="rows_max is 0"):
        RelayOptions(rows_max=0)
    with pytest.raises(Misuse, match="grace_s is -1"):
        RelayOptions(grace_s=-1)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_relay_that_ends_by_surprise_says_so(lite: sa.Engine, up: Up) -> None:
    """A process that lives and relays nothing would be restarted by nobody."""
    written(lite)
    with Relay(lite, up.url, options=NIMBLE, rng=FailingRng(1)) as relay:
        eventually(lambda: relay.has_failed, "the relay ends")
        assert relay.trouble is not None
        assert "a surprise" in relay.trouble
        with pytest.raises(FairwayError, match="start another relay"):
            check_relay(relay)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_relay_without_a_reader_ends(lite: sa.Engine, up: Up, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing would ever be sent over that connection again."""

    def fail(*_: object) -> bool:
        raise LinkFailed("the thread that reads from the broker has failed")

    written(lite)
    monkeypatch.setattr(OutboxSender, "wait_open", fail)
    with Relay(lite, up.url, options=NIMBLE) as relay:
        eventually(lambda: relay.has_failed, "the relay ends")
