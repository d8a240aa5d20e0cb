"""When a message is due, and how questions about delayed messages are put: what both faces share."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from fairway import limits
from fairway.batch import MessageId
from fairway.client import delayed_messages
from fairway.client.commands import CommandRequest, repeats
from fairway.errors import Code, Misuse, Refused
from fairway.protocol.delay_messages import Cancel, Decided, Fate, PendingMessage, PendingPage, Tallied, Which
from fairway.protocol.line import Answer, ConnectionLost
from fairway.protocol.request_queue import RequestQueue
from fairway.runtime.clock import ManualClock

NOW_MS = 1_700_000_000_000
NOW = datetime.fromtimestamp(NOW_MS / 1_000, UTC)
ID = str(MessageId(7, 9))


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(NOW_MS)


@pytest.mark.parametrize(
    ("after", "ms"),
    [
        (0, 0),
        (1, 1_000),
        (1.1, 1_100),  # although 1.1 * 1000 is a little more
        (0.0001, 1),  # rounded up: never early
        (timedelta(days=3), 3 * 86_400_000),
        (timedelta(microseconds=1), 1),
        (timedelta(days=10_000), 10_000 * 86_400_000),  # how far ahead is too far is for the delay server to say
    ],
)
def test_after_counts_from_the_call(clock: ManualClock, after: Any, ms: int) -> None:
    assert delayed_messages.due_of(after, None, clock) == NOW_MS + ms


@pytest.mark.parametrize(
    ("at", "ms"),
    [
        (NOW, NOW_MS),
        (NOW + timedelta(microseconds=1), NOW_MS + 1),
        (NOW.astimezone(timezone(timedelta(hours=2))) + timedelta(hours=1), NOW_MS + 3_600_000),
        (NOW - timedelta(days=1), NOW_MS - 86_400_000),  # past: at once
        (datetime(1969, 7, 20, tzinfo=UTC), 1),
    ],
)
def test_at_is_what_it_says(clock: ManualClock, at: datetime, ms: int) -> None:
    assert delayed_messages.due_of(None, at, clock) == ms


@pytest.mark.parametrize(
    ("after", "at", "said"),
    [
        (None, None, "by after= or by at="),
        (1, NOW, "not by both"),
        (-1, None, "0 or more"),
        (timedelta(seconds=-1), None, "0 or more"),
        (float("nan"), None, "0 or more"),
        ("soon", None, "seconds or a timedelta"),
        (None, datetime(2026, 1, 1), r"give it a time zone, such as datetime\.now\(timezone\.utc\)"),  # noqa: DTZ001
        (None, 1_700_000_000, "a time is a datetime, not int"),
        (float("inf"), None, "year 9999"),
        (timedelta(days=365 * 9_000), None, "year 9999"),
    ],
)
def test_what_can_never_be_right_is_said_at_once(clock: ManualClock, after: Any, at: Any, said: str) -> None:
    with pytest.raises(Misuse, match=said):
        delayed_messages.due_of(after, at, clock)


def test_what_is_due_later_than_most_delay_servers_allow_is_far(clock: ManualClock) -> None:
    assert not delayed_messages.is_far(NOW_MS + limits.DELAY_HORIZON_MS, clock)
    assert delayed_messages.is_far(NOW_MS + limits.DELAY_HORIZON_MS + 1, clock)


def test_one_time_for_all_or_one_for_each(clock: ManualClock) -> None:
    assert delayed_messages.dues_of(3, None, None, clock) is None
    assert list(delayed_messages.dues_of(3, 1, None, clock) or ()) == [NOW_MS + 1_000] * 3
    assert list(delayed_messages.dues_of(2, None, NOW, clock) or ()) == [NOW_MS] * 2
    assert delayed_messages.dues_of(2, [1, timedelta(seconds=2)], None, clock) == [NOW_MS + 1_000, NOW_MS + 2_000]
    assert delayed_messages.dues_of(1, None, (NOW,), clock) == [NOW_MS]


@pytest.mark.parametrize(
    ("after", "at", "said"),
    [([1], None, "1 times in after= for 2"), (None, [NOW] * 3, "3 times in at= for 2"), ([1, 2], [NOW, NOW], "both")],
)
def test_a_list_of_times_fits_the_messages(clock: ManualClock, after: Any, at: Any, said: str) -> None:
    with pytest.raises(Misuse, match=said):
        delayed_messages.dues_of(2, after, at, clock)


# --- questions --------------------------------------------------------------------------------------------------------


def test_messages_are_named_by_id_or_by_key() -> None:
    assert delayed_messages.cancel(ID, None, None).message == Cancel("", ID, None)
    assert delayed_messages.cancel(MessageId(7, 9), "orders", None).message == Cancel("orders", ID, None)
    assert delayed_messages.cancel(None, "orders", "o-42").message == Cancel("orders", None, "o-42")


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ((None, None, None), "by its id"),
        ((ID, "orders", "o-42"), "by its id"),
        ((None, "orders", None), "by its id"),
        ((None, None, "o-42"), "subject="),
        (("o-42", None, None), "an id has 26"),
    ],
)
def test_who_is_not_named_is_asked_for(named: tuple[Any, Any, Any], said: str) -> None:
    with pytest.raises(Misuse, match=said):
        delayed_messages.cancel(*named)


def test_a_filter_takes_aware_times() -> None:
    assert delayed_messages.which_of("orders", "o-", (NOW, None)) == Which("orders", "o-", NOW_MS, None)
    assert delayed_messages.which_of(None, None, None) == Which()
    with pytest.raises(Misuse, match="time zone"):
        delayed_messages.which_of(None, None, (datetime(2026, 1, 1), None))  # noqa: DTZ001


def test_a_histogram_has_a_width() -> None:
    with pytest.raises(Misuse, match="width"):
        delayed_messages.histogram(Which(), 0)


def test_a_listing_asks_page_by_page_and_no_more_than_wanted() -> None:
    listing = delayed_messages.Listing(Which(), 3)
    page = PendingPage([PendingMessage("orders", ID, None, NOW_MS, 4)] * 2, "cursor")
    assert listing.command().message.items_max == 3  # type: ignore[attr-defined]
    assert [each.due_at for each in listing.messages(page)] == [NOW, NOW]
    following = listing.command().message
    assert (following.after, following.items_max) == ("cursor", 1)  # type: ignore[attr-defined]
    assert len(list(listing.messages(PendingPage(page.messages[:1], "more")))) == 1
    assert listing.is_done


# --- a delay server that has just been started ------------------------------------------------------------------------


def test_a_delay_server_that_still_reads_is_asked_again_when_it_said() -> None:
    questions = RequestQueue(repeats)
    question = questions.put(CommandRequest(delayed_messages.count(Which())))
    (ask,) = questions.asks(8, 0)
    questions.answered(ask.token, Refused(Code.BUSY, "loading", retry_after_ms=500), 0)
    assert not question.is_answered()
    assert questions.next_deadline() == 500_000_000
    assert not list(questions.asks(8, 499_999_999))
    (again,) = questions.asks(8, 500_000_000)
    questions.answered(again.token, Answer(Tallied(7)), 500_000_000)
    assert question.answer()[0].count == 7
    assert questions.next_deadline() is None


def test_a_cancel_whose_answer_was_lost_is_asked_again() -> None:
    questions = RequestQueue(repeats)
    question = questions.put(CommandRequest(delayed_messages.cancel(ID, None, None)))
    (ask,) = questions.asks(8, 0)
    questions.answered(ask.token, ConnectionLost("cut"), 0)
    (again,) = questions.asks(8, 0)
    questions.answered(again.token, Answer(Decided(Fate.CANCELLED, 0)), 0)
    assert delayed_messages.decision_of(question.answer()[0]).fate == "cancelled"


def test_any_other_refusal_is_the_callers_to_judge() -> None:
    questions = RequestQueue(repeats)
    question = questions.put(CommandRequest(delayed_messages.count(Which())))
    (ask,) = questions.asks(8, 0)
    questions.answered(ask.token, Refused(Code.BAD_REQUEST, "no such verb"), 0)
    with pytest.raises(Refused, match="no such verb"):
        question.answer()
