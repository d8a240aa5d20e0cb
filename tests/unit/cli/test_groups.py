"""`subjects`, `groups`, `lag`, `seek`, `weight`, `pause`, `resume`, `top`: look at groups, and steer them."""

from __future__ import annotations

import json
import signal

import pytest

from tests.unit.cli.running import Cli, spawn

WAIT_S = 60.0


def _behind(cli: Cli, subject: str, *, sent: int = 10, consumed: int = 4) -> None:
    """A subject with a group `g` that has taken some of it. What its consumer fetched beyond that is given up."""
    cli.run("produce", subject, "x", "--count", str(sent))
    cli.run("consume", subject, "-g", "g", "-n", str(consumed))
    cli.run("seek", subject, "g", str(consumed))


def test_subjects(cli: Cli) -> None:
    _behind(cli, "listed")
    found = {each["name"]: each for each in cli.json("subjects")["subjects"]}
    assert found["listed"] == {
        "name": "listed",
        "first_sequence": 0,
        "committed_end": 10,
        "is_read_only": False,
        "groups_count": 1,
    }
    assert "listed" in cli.run("subjects")


def test_groups_and_lag(cli: Cli) -> None:
    _behind(cli, "lagging")
    [group] = cli.json("groups", "lagging")["groups"]
    assert (group["subject"], group["name"], group["cursor"], group["lag"]) == ("lagging", "g", 4, 6)
    [lag] = cli.json("lag", "lagging", "--group", "g")["groups"]
    assert (lag["lag"], lag["consumers"]) == (6, 0)
    assert lag["oldest_s"] >= 0
    for verb in ("groups", "lag"):
        assert "lagging" in cli.run(verb)


def test_lag_beyond_what_is_allowed_is_status_4(cli: Cli) -> None:
    _behind(cli, "watched")
    cli.run("lag", "watched", "--above", "6")
    cli.run("lag", "watched", "--above", "5", status=4)
    cli.run("lag", "watched", "--older-s", "3600")
    cli.run("lag", "watched", "--older-s", "0", status=4)
    cli.run("seek", "watched", "g", "latest")
    [caught_up] = cli.json("lag", "watched", "--older-s", "0")["groups"]
    assert (caught_up["lag"], caught_up["oldest_s"]) == (0, None)


def test_a_subject_or_group_that_is_not_there(cli: Cli) -> None:
    cli.run("produce", "alone", "x")
    assert "NO_SUCH_SUBJECT" in cli.fails("groups", "nowhere", status=1)
    assert "NO_SUCH_GROUP" in cli.fails("lag", "alone", "--group", "nobody", status=1)
    assert "no groups yet" in cli.run("groups", "alone")


@pytest.mark.parametrize(
    ("to", "sequence"), [("earliest", 0), ("latest", 10), ("7", 7), ("1h", 0), ("2001-01-01T00:00Z", 0)]
)
def test_seek(cli: Cli, to: str, sequence: int) -> None:
    subject = f"sought-{sequence}-{len(to)}"
    _behind(cli, subject)
    told = cli.json("seek", subject, "g", to)
    assert (told["was"], told["sequence"]) == (4, sequence)
    left = cli.run("consume", subject, "-g", "g", "--idle-s", "0.5").split()
    assert len(left) == 10 - sequence
    assert "which ends at 10 here" in cli.fails("seek", subject, "g", "11", status=1)


def test_weight(cli: Cli) -> None:
    _behind(cli, "weighed")
    assert cli.run("weight", "weighed", "g", "2.5") == "g on weighed: weight 2.5\n"
    assert cli.json("groups", "weighed")["groups"][0]["weight"] == 2.5
    assert "above 0" in cli.fails("weight", "weighed", "g", "0", status=2)


def test_a_paused_group_gets_nothing_until_it_is_resumed(cli: Cli) -> None:
    _behind(cli, "paused")
    assert cli.json("pause", "paused", "g")["was_paused"] is False
    assert cli.run("consume", "paused", "-g", "g", "--idle-s", "0.5") == ""
    assert cli.run("pause", "paused", "g") == "g on paused: paused, as before\n"
    assert cli.json("resume", "paused", "g") == {
        "subject": "paused",
        "group": "g",
        "consumer": None,
        "was_paused": True,
        "is_paused": False,
    }
    assert cli.run("consume", "paused", "-g", "g", "-n", "6") == "x\n" * 6


def test_one_consumer_is_paused(cli: Cli) -> None:
    cli.run("produce", "one-paused", "x")
    with cli.client() as client, client.consumer("one-paused", "g", consumer="worker-1") as consumer:
        message = consumer.poll(WAIT_S)
        assert message is not None
        assert cli.json("pause", "one-paused", "g", "--consumer", "worker-1")["is_paused"] is True
        [group] = cli.json("groups", "one-paused")["groups"]
        assert [(each["name"], each["is_paused"]) for each in group["consumers"]] == [("worker-1", True)]
        assert group["is_paused"] is False
        assert "worker-1 of g on one-paused: running" in cli.run("resume", "one-paused", "g", "--consumer", "worker-1")


def test_top_once(cli: Cli) -> None:
    _behind(cli, "topped")
    seen = cli.json("top", "topped", "--once", "--interval-s", "0.1")
    assert seen["broker"]["durability"] == "sync"
    [row] = seen["groups"]
    assert (row["subject"], row["group"], row["lag"], row["consumers"]) == ("topped", "g", 6, 0)
    assert {"rate", "rate_in", "oldest_s", "share", "cold_share"} <= row.keys()
    shown = cli.run("top", "topped", "--once", "--interval-s", "0.1", "--sort", "lag")
    assert "topped" in shown
    assert "g (nobody)" in shown


def test_top_goes_on_until_a_signal(cli: Cli) -> None:
    _behind(cli, "live")
    with spawn(cli.url, "top", "--json", "--interval-s", "0.1") as top:
        assert top.stdout is not None
        for _ in range(3):
            assert "groups" in json.loads(top.stdout.readline())
        top.send_signal(signal.SIGTERM)
        top.communicate(timeout=WAIT_S)
    assert top.returncode == 0
