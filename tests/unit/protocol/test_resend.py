"""The window of batches in flight: what leaves, what comes back, and what leaves again."""

from __future__ import annotations

import pytest

from fairway import batch
from fairway.errors import Code, InvariantViolated, Refused, StoredRange
from fairway.protocol.line import Answer, ConnectionLost, RetryDelays
from fairway.protocol.messages import Produced
from fairway.protocol.resend import BacklogBatch, BacklogWindow, SendWindow, is_repeat, receipt_of
from fairway.runtime.rng import SeededRng

STORED = Answer(Produced(0, 1, 0, is_duplicate=False, epoch=1))
LOST = ConnectionLost("cut")
BUSY = Refused(Code.BUSY, "later")


def delays() -> RetryDelays:
    return RetryDelays(SeededRng(1), first_ms=20, most_ms=500)


def window(batches: str, batches_max: int = 3) -> SendWindow[str]:
    made: SendWindow[str] = SendWindow(delays(), batches_max)
    made.waiting.extend(batches)
    return made


def backlog(count: int) -> tuple[BacklogWindow[BacklogBatch], list[BacklogBatch]]:
    data = [batch.encode([b"x"], producer_id=7, first_sequence=number, created_ms=1) for number in range(count)]
    batches = [BacklogBatch(each) for each in data]
    made: BacklogWindow[BacklogBatch] = BacklogWindow(delays(), 16)
    made.waiting.extend(batches)
    return made, batches


def test_batches_leave_in_order_as_far_as_room_and_bound_allow() -> None:
    sending = window("abcde")
    assert sending.take(2, 0) == ["a", "b"]
    assert sending.take(8, 0) == ["c"], "three at a time"
    sending.note_stored("b")
    assert sending.take(8, 0) == ["d"]
    assert (list(sending.batches()), sending.in_flight) == (["a", "c", "d", "e"], 3)


def test_what_is_not_stored_leaves_again_in_its_order_once_all_is_back() -> None:
    sending = window("abcd")
    sending.take(8, 0)
    sending.note_failed("b")
    assert sending.take(8, 0) == [], "a and c may still arrive"
    sending.note_stored("a")
    sending.note_failed("c")
    assert not sending.is_in_flight("c")
    assert sending.take(8, 0) == ["b", "c", "d"]
    for each in "bcd":
        sending.note_stored(each)
    assert sending.is_empty


def test_nothing_leaves_before_its_time() -> None:
    sending = window("a")
    sending.retry_ns = 10
    assert sending.take(8, 9) == []
    assert sending.take(8, 10) == ["a"]


def test_a_backlog_is_judged_by_its_oldest_batch_when_all_is_back() -> None:
    sending, (first, second, third) = backlog(3)
    sending.take(8, 0)
    assert not sending.answered(second, Refused(Code.SEQUENCE_GAP, "behind"))
    was_asked = sending.must_decide
    assert sending.answered(third, STORED)
    assert not sending.answered(first, BUSY)
    assert (was_asked, sending.must_decide) == (False, True)
    assert sending.begin_again() == (first, BUSY)
    assert sending.take(8, 0) == [first, second]


def test_a_conflict_that_names_the_batch_is_a_receipt_and_another_is_not() -> None:
    sending, (first, second) = backlog(2)
    sending.take(8, 0)
    header = batch.peek(first.data)
    mine = Refused(Code.SEQUENCE_CONFLICT, "taken", stored=(StoredRange(0, 1, header.crc),))
    assert sending.answered(first, mine)
    assert (receipt_of(mine), is_repeat(mine), is_repeat(STORED)) == (None, True, False)
    assert not sending.answered(second, mine)
    assert sending.begin_again() == (second, mine)


def test_a_refusal_is_forgotten_by_the_next_receipt_and_not_while_the_window_recovers() -> None:
    sending, (first, second) = backlog(2)
    sending.refused = BUSY
    sending.take(8, 0)
    sending.answered(first, LOST)
    sending.answered(second, STORED)
    assert sending.refused is BUSY
    assert sending.begin_again() == (first, LOST)
    sending.take(8, 0)
    sending.answered(first, STORED)
    assert sending.refused is None


def test_a_window_does_not_begin_again_while_a_batch_is_in_flight() -> None:
    sending, (first, _) = backlog(2)
    sending.take(8, 0)
    sending.answered(first, LOST)
    with pytest.raises(InvariantViolated):
        sending.begin_again()
