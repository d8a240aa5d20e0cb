"""Single requests: each is sent once the line is open, and settled once."""

from __future__ import annotations

import pytest

from fairway.errors import Code, InvariantViolated, Refused
from fairway.protocol.admin_messages import Depth, Describe
from fairway.protocol.line import Ask, ConnectionLost, RequestOutcome
from fairway.protocol.messages import ControlMessage
from fairway.protocol.request_queue import PendingRequest, RequestQueue

LOST = ConnectionLost("cut")


def described(subject: str) -> Describe:
    return Describe(Depth.GROUPS, subject)


def always(_message: ControlMessage, _outcome: Refused | ConnectionLost) -> bool:
    """Repeat every request."""
    return True


def asked(queue: RequestQueue, room: int = 8, now_ns: int = 0) -> list[Ask]:
    return list(queue.asks(room, now_ns))


@pytest.mark.parametrize("outcome", [LOST, Refused(Code.NOT_MASTER, "no"), Refused(Code.BUSY, "no", retry_after_ms=5)])
def test_a_request_that_is_not_repeated_ends_with_its_first_outcome(outcome: RequestOutcome) -> None:
    queue, told = RequestQueue(), list[str]()
    request = queue.put(PendingRequest(described("a"), lambda: told.append("settled")))
    (ask,) = asked(queue)
    queue.answered(ask.token, outcome, 0)
    assert request.is_answered()
    assert request.outcome is outcome
    assert told == ["settled"]
    assert not asked(queue, now_ns=1 << 60)


def test_requests_leave_in_order_and_no_more_than_there_is_room() -> None:
    queue = RequestQueue()
    one, two, first = (PendingRequest(described(name)) for name in ("one", "two", "first"))
    queue.put(one)
    queue.put(two)
    queue.put_first(first)
    assert [ask.token for ask in asked(queue, 2)] == [first, one]
    assert [ask.token for ask in asked(queue, 2)] == [two]


def test_nobody_asks_for_a_caller_who_waits_no_longer() -> None:
    queue = RequestQueue(always)
    waits, is_late = queue.put(PendingRequest(described("a"))), queue.put(PendingRequest(described("b")))
    is_late.is_abandoned = True
    (ask,) = asked(queue)
    assert ask.token is waits
    waits.is_abandoned = True
    queue.answered(ask.token, LOST, 0)
    assert queue.is_idle
    assert not asked(queue)
    assert not waits.is_answered()


def test_what_is_put_when_the_line_opens_leaves_first() -> None:
    queue = RequestQueue(on_open=lambda: queue.put_first(PendingRequest(described("hello"))))
    queue.put(PendingRequest(described("a")))
    queue.opened(0)
    assert [ask.message for ask in asked(queue)] == [described("hello"), described("a")]


def test_the_last_refusal_of_a_repeated_request_is_kept_for_its_caller() -> None:
    queue = RequestQueue(always)
    request = queue.put(PendingRequest(described("a")))
    (ask,) = asked(queue)
    busy = Refused(Code.BUSY, "reading", retry_after_ms=20)
    queue.answered(ask.token, busy, 1_000_000)
    assert request.refused is busy
    assert not request.is_answered()
    assert not queue.is_idle
    assert queue.next_deadline() == 21_000_000
    assert not asked(queue, now_ns=20_999_999)
    assert [each.token for each in asked(queue, now_ns=21_000_000)] == [request]


def test_an_answer_to_something_else_is_a_bug() -> None:
    with pytest.raises(InvariantViolated, match="no request of this queue"):
        RequestQueue().answered(object(), LOST, 0)
