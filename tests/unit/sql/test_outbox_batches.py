"""When what waits to be sent wants to be looked at again: never too late, and never over and over."""

from __future__ import annotations

from fairway.protocol.line import Answer
from fairway.protocol.messages import Produced
from fairway.protocol.resend import SendOutcome
from fairway.sql.outbox_batches import OutboxBatch, OutboxBatchSession

MS = 1_000_000
LINGER_NS = 100 * MS


def outbox_batches(posting: OutboxBatchSession, room: int, now_ns: int) -> list[object]:
    return [ask.token for ask in posting.asks(room, now_ns)]


def test_what_waits_for_a_connection_waits_for_no_time() -> None:
    """A deadline that has passed, and nothing that could be done about it, would keep a thread busy for as long as no
    broker is there."""
    posting = OutboxBatchSession(LINGER_NS)
    outbox_batch = OutboxBatch("s", b"x", is_resent=True)
    posting.put(outbox_batch)
    assert outbox_batches(posting, 0, 5 * MS) == []
    assert posting.next_deadline() is None
    posting.opened(10 * MS)
    assert outbox_batches(posting, 8, 10 * MS) == [outbox_batch]


def test_what_comes_after_a_rest_leaves_at_once_and_what_follows_it_in_time() -> None:
    posting = OutboxBatchSession(LINGER_NS)
    first, second = OutboxBatch("s", b"1"), OutboxBatch("s", b"2")
    posting.put(first)
    assert posting.is_due(1_000 * MS)
    assert outbox_batches(posting, 8, 1_000 * MS) == [first]
    assert posting.next_deadline() == 1_100 * MS  # so that nobody needs to be told of the second
    posting.put(second)
    assert not posting.is_due(1_050 * MS)
    assert outbox_batches(posting, 8, 1_050 * MS) == []
    assert outbox_batches(posting, 8, 1_100 * MS) == [second]


def test_a_post_at_rest_wants_nothing() -> None:
    posting = OutboxBatchSession(LINGER_NS)
    outbox_batch = OutboxBatch("s", b"x")
    posting.put(outbox_batch)
    assert outbox_batches(posting, 8, 0) == [outbox_batch]
    posting.answered(outbox_batch, Answer(Produced(0, 1, 1, False, 0), ()), 3 * MS)
    assert outbox_batch.fate is SendOutcome.STORED
    assert outbox_batches(posting, 8, 100 * MS) == []
    assert posting.next_deadline() is None


def test_without_linger_nothing_is_counted() -> None:
    posting = OutboxBatchSession()
    posting.put(OutboxBatch("s", b"x"))
    assert len(outbox_batches(posting, 8, 7 * MS)) == 1
    assert posting.next_deadline() is None
