"""`fairway delay ...` and `fairway produce --after|--at`, as a user calls them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from fairway.batch import MessageId
from fairway.cli import arguments
from fairway.errors import Misuse
from fairway.runtime.clock import ManualClock
from tests.unit.cli.running import Cli

CLOCK = ManualClock(1_700_000_000_000)
NOW = datetime(2023, 11, 14, 22, 13, 20, tzinfo=UTC)


def test_what_is_produced_for_later_is_shown_and_taken_back(cli: Cli) -> None:
    said = cli.json("produce", "cli.remind", "one", "two", "--key", "o-1", "--after", "3d")
    assert (said["subject"], said["messages"]) == ("cli.remind", 2)
    shown = cli.json("delay", "list", "--subject", "cli.remind")
    assert [each["id"] for each in shown["messages"]] == [said["first_id"], said["last_id"]]
    assert not shown["has_more"]
    first = shown["messages"][0]
    assert (first["subject"], first["key"], first["size_bytes"]) == ("cli.remind", "o-1", 3)
    due_at = datetime.fromisoformat(first["due_at"])
    assert timedelta(days=2, hours=23) < due_at - datetime.now(UTC) <= timedelta(days=3)
    assert cli.json("delay", "count", "--subject", "cli.remind") == {"count": 2, "in_transit": []}
    assert cli.run("delay", "cancel", said["first_id"]) == "1 message cancelled\n"
    assert cli.run("delay", "cancel", "--subject", "cli.remind", "--key", "o-1") == "1 message cancelled\n"
    assert cli.run("delay", "count", "--subject", "cli.remind") == "0 messages pending\n"


def test_produce_says_the_ids_of_what_waits(cli: Cli) -> None:
    assert "1 message scheduled for cli.ids: " in cli.run("produce", "cli.ids", "one", "--after", "3d")
    assert " to " in cli.run("produce", "cli.ids", "one", "two", "--at", "2027-06-01T08:00:00+02:00")


def test_what_is_due_goes_out(cli: Cli) -> None:
    cli.run("produce", "cli.past", "late", "--at", "2020-01-01T00:00:00Z")
    assert cli.run("consume", "cli.past", "--group", "g", "--count", "1") == "late\n"


def test_a_cancel_that_comes_too_late_fails_with_a_sentence(cli: Cli) -> None:
    said = cli.json("produce", "cli.late", "late", "--after", "0s")
    cli.run("consume", "cli.late", "--group", "g", "--count", "1")
    assert "was sent before" in cli.fails("delay", "cancel", said["first_id"], status=1)
    assert "was sent before" in cli.fails("delay", "reschedule", said["first_id"], "--after", "1h", status=1)
    decisions = cli.json("delay", "cancel", said["first_id"], status=1)["decisions"]
    assert decisions == [
        {"id": said["first_id"], "subject": None, "key": None, "fate": "already_dispatched", "messages": 0}
    ]


def test_an_unknown_id_fails_and_the_others_are_cancelled(cli: Cli) -> None:
    said = cli.json("produce", "cli.unknown", "x", "--after", "1h")
    unknown = str(MessageId(1, 1))
    out, err = cli.both("delay", "cancel", unknown, said["first_id"], status=1)
    assert out == "1 message cancelled\n"
    assert err == f"fairway delay cancel: {unknown} is not known here: never scheduled, or sent long ago\n"
    assert "o-9 in cli.unknown" in cli.fails("delay", "cancel", "-s", "cli.unknown", "-k", "o-9", status=1)


def test_twice_cancelled_is_no_failure(cli: Cli) -> None:
    said = cli.json("produce", "cli.twice", "x", "--after", "1h")
    cli.run("delay", "cancel", said["first_id"])
    assert cli.run("delay", "cancel", said["first_id"]) == "0 messages cancelled: that was done before\n"
    assert "was cancelled before" in cli.fails("delay", "reschedule", said["first_id"], "--after", "2h", status=1)


def test_messages_are_put_off(cli: Cli) -> None:
    cli.run("produce", "cli.off", "x", "--after", "1h", "--key", "o-1")
    said = cli.run("delay", "reschedule", "-s", "cli.off", "-k", "o-1", "--at", "2027-01-01T00:00:00Z")
    assert said == "1 message rescheduled\n"
    shown = cli.json("delay", "list", "-s", "cli.off")["messages"]
    assert shown[0]["due_at"] == "2027-01-01T00:00:00Z"


def test_a_filter_by_time_and_key(cli: Cli) -> None:
    for days, key in ((1, "a-1"), (2, "a-2"), (3, "b-1")):
        cli.run("produce", "cli.when", "x", "--after", f"{days}d", "--key", key)
    for flags, count in (
        (("--to", "36h"), 1),
        (("--from", "36h"), 2),
        (("--from", "36h", "--to", "60h"), 1),
        (("--key-prefix", "a-"), 2),
        (("--key-prefix", "c-"), 0),
        (("--to", "2020-01-01T00:00Z"), 0),
    ):
        assert cli.json("delay", "count", "-s", "cli.when", *flags) == {"count": count, "in_transit": []}, flags


def test_a_histogram_has_bars_and_numbers(cli: Cli) -> None:
    cli.run("produce", "cli.bars", *("x" * 3), "--at", "2027-03-01T12:30:00Z")
    cli.run("produce", "cli.bars", "x", "--at", "2027-03-01T14:30:00Z")
    shown = cli.run("delay", "histogram", "-s", "cli.bars", "--width", "1h")
    assert "█" in shown
    assert "2027-03-01 12:00:00" in shown
    found = cli.json("delay", "histogram", "-s", "cli.bars", "--width", "1h")
    assert found == {
        "width_s": 3600.0,
        "stretches": [
            {"start_at": "2027-03-01T12:00:00Z", "count": 3},
            {"start_at": "2027-03-01T14:00:00Z", "count": 1},
        ],
    }


def test_a_list_for_people(cli: Cli) -> None:
    cli.run("produce", "cli.people", "x", "--after", "3d", "--key", "o-7", "--count", "3")
    shown = cli.run("delay", "list", "-s", "cli.people", "--limit", "2")
    assert shown.count("o-7") == 2
    assert "there are more: --limit 20" in shown
    assert "nothing waits" in cli.run("delay", "list", "-s", "cli.nobody")
    assert "nothing waits" in cli.run("delay", "histogram", "-s", "cli.nobody")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("produce", "s", "x", "--after", "soon"), "no stretch of time"),
        (("produce", "s", "x", "--after", "5"), "90s, 15m, 2h, 3d"),
        (("produce", "s", "x", "--at", "2027-01-01T00:00:00"), "no time zone"),
        (("produce", "s", "x", "--at", "tomorrow"), "2027-01-01T00:00:00Z"),
        (("produce", "s", "x", "--after", "1h", "--at", "2027-01-01T00:00:00Z"), "not both"),
        (("delay", "cancel"), "give message IDs"),
        (("delay", "cancel", "x", "--key", "k"), "give message IDs"),
        (("delay", "cancel", "--key", "k"), "subject="),
        (("delay", "cancel", "o-42"), "an id has 26"),
        (("delay", "reschedule", str(MessageId(1, 1))), "after= or by at="),
        (("delay", "list", "--from", "yesterday"), "not a time"),
        (("delay", "histogram", "--width", "0s"), "width of 0"),
    ],
)
def test_what_cannot_be_right_is_usage(cli: Cli, arguments: tuple[str, ...], said: str) -> None:
    assert said in cli.fails(*arguments, status=2)


def test_beyond_the_horizon_is_refused(cli: Cli) -> None:
    assert "731 days" in cli.fails("produce", "cli.far", "x", "--after", "800d", status=1)


def test_nobody_there_is_status_3(cli: Cli) -> None:
    said = cli.fails("delay", "count", "--url", f"{cli.url}?delay=127.0.0.1:1", status=3)
    assert "no delay server at fairway://127.0.0.1:1" in said


# --- how times are written --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "span"),
    [
        ("90s", timedelta(seconds=90)),
        ("1.5h", timedelta(minutes=90)),
        ("15m", timedelta(minutes=15)),
        ("3d", timedelta(days=3)),
    ],
)
def test_a_stretch_of_time(text: str, span: timedelta) -> None:
    assert arguments.span(text) == span
    assert arguments.ahead(text, CLOCK) == NOW + span
    assert arguments.parse(text, CLOCK) == NOW - span


def test_a_stretch_that_is_too_long_is_said() -> None:
    with pytest.raises(Misuse, match="longer than there is time"):
        arguments.span("99999999999999d")


def test_a_time() -> None:
    assert arguments.ahead("2027-01-01T00:00Z", CLOCK) == arguments.due("2027-01-01T02:00+02:00")
