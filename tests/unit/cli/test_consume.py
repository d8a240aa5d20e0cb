"""`produce`, `consume`, `tail`: messages in and out."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.unit.cli.running import Cli, spawn

WAIT_S = 60.0


def test_lines_of_stdin_are_messages(cli: Cli) -> None:
    assert cli.run("produce", "stdin", stdin=b"one\ntwo\n\nfour") == "4 messages stored in stdin, 0 to 3\n"
    assert cli.run("tail", "stdin", "--from", "earliest", "--no-follow") == "one\ntwo\n\nfour\n"


def test_bytes_stay_as_they_are(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "lines").write_bytes(b"\xff\xfe\r\nplain\n")
    assert cli.json("produce", "binary", "--file", str(tmp_path / "lines"))["messages"] == 2
    first, second = cli.lines("tail", "binary", "--from", "0", "--no-follow")
    assert ("payload" in first, first["payload_base64"]) == (False, "//4N")
    assert second["payload"] == "plain"


def test_payloads_on_the_command_line_again_and_again(cli: Cli) -> None:
    told = cli.json("produce", "again", "a", "b", "--count", "5", "--rate", "1000")
    assert told == {"subject": "again", "messages": 5, "first_sequence": 0, "last_sequence": 4}
    assert cli.run("consume", "again", "--group", "g", "--count", "5").split() == ["a", "b", "a", "b", "a"]


def test_key_tags_and_headers_travel(cli: Cli) -> None:
    cli.run("produce", "dressed", "x", "--key", "k-1", "--tag", "paid", "--tag", "eu", "--header", "from=till=2")
    [shown] = cli.lines("tail", "dressed", "--from", "earliest", "--no-follow")
    assert (shown["key"], shown["tags"], shown["headers"]) == ("k-1", ["paid", "eu"], {"from": "till=2"})
    [consumed] = cli.lines("consume", "dressed", "-g", "g", "-n", "1")
    assert (consumed["id"], consumed["group"], consumed["attempt"]) == (shown["id"], "g", 1)


def test_a_count_takes_no_more_lines_than_that(cli: Cli) -> None:
    assert cli.json("produce", "some", "--count", "2")["messages"] == 0
    assert "2 messages stored" in cli.run("produce", "some", "--count", "2", stdin=b"1\n2\n3\n")


def test_what_was_consumed_does_not_come_again(cli: Cli) -> None:
    cli.run("produce", "once", *"abc")
    assert cli.run("consume", "once", "-g", "g", "-n", "2") == "a\nb\n"
    assert cli.run("consume", "once", "-g", "g", "--idle-s", "0.5") == "c\n"
    assert cli.run("consume", "once", "-g", "g", "--idle-s", "0.2") == ""


def test_without_ack_everything_comes_again(cli: Cli) -> None:
    cli.run("produce", "peek", *"abc")
    assert cli.run("consume", "peek", "-g", "g", "--no-ack", "--idle-s", "0.5") == "a\nb\nc\n"
    assert [each["attempt"] for each in cli.lines("consume", "peek", "-g", "g", "-n", "3")] == [1, 1, 1]


def test_a_new_group_may_start_at_the_end(cli: Cli) -> None:
    cli.run("produce", "late", "old")
    assert cli.run("consume", "late", "-g", "g", "--start", "latest", "--idle-s", "0.5") == ""
    cli.run("produce", "late", "new")
    assert cli.run("consume", "late", "-g", "g", "-n", "1") == "new\n"


def test_tail_from_a_place_in_the_middle_of_a_batch(cli: Cli) -> None:
    cli.run("produce", "middle", stdin="\n".join(map(str, range(500))).encode())
    assert cli.run("tail", "middle", "--from", "497", "--no-follow") == "497\n498\n499\n"
    assert cli.run("tail", "middle", "--from", "10", "--count", "2") == "10\n11\n"
    assert cli.run("tail", "middle", "--from", "1h", "--count", "1") == "0\n"
    assert cli.run("tail", "middle", "--from", "latest", "--no-follow") == ""


def test_tail_follows_a_subject_that_is_not_there_yet(cli: Cli) -> None:
    with spawn(cli.url, "tail", "unborn", "--count", "2") as tail:
        assert tail.stderr is not None
        assert "waiting for it" in tail.stderr.readline()
        cli.run("produce", "unborn", "first", "second")
        out, _ = tail.communicate(timeout=WAIT_S)
    assert (tail.returncode, out) == (0, "first\nsecond\n")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_consume_with_what_it_printed_acked(cli: Cli, number: int) -> None:
    subject = f"signalled-{number}"
    cli.run("produce", subject, "one")
    with spawn(cli.url, "consume", subject, "-g", "g") as consume:
        assert consume.stdout is not None
        assert consume.stdout.readline() == "one\n"
        consume.send_signal(number)
        consume.communicate(timeout=WAIT_S)
    assert consume.returncode == 0
    [group] = cli.json("groups", subject)["groups"]
    assert (group["consumers_count"], group["lag"], group["in_flight"], group["returned"]) == (0, 0, 0, 0)


def test_a_line_that_somebody_types_leaves_at_once(cli: Cli) -> None:
    with spawn(cli.url, "produce", "typed") as produce:
        assert produce.stdin is not None
        produce.stdin.write("hello\n")
        produce.stdin.flush()
        assert cli.run("tail", "typed", "--count", "1", "--from", "earliest") == "hello\n"
        produce.communicate(timeout=WAIT_S)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("produce", "bad name", "x"), "bad subject name"),
        (("produce", "s", "x", "--file", "f"), "not both"),
        (("produce", "s", "--file", "no-such-file"), "No such file"),
        (("produce", "s", "x", "--header", "novalue"), "NAME=VALUE"),
        (("tail", "s", "--from", "yesterday"), "earliest, latest"),
        (("tail", "s", "--from", "2026-01-01T00:00"), "2026-01-01T00:00Z"),
        (("consume", "s", "-g", "bad group"), "bad group name"),
        (("consume", "s"), "--group"),
        (("produce", "s", "x", "--count", "0"), "--count"),
        (("nosuchverb",), "nosuchverb"),
    ],
)
def test_what_can_never_be_right_is_usage(cli: Cli, arguments: tuple[str, ...], words: str) -> None:
    assert words in cli.fails(*arguments, status=2)


def test_a_refusal_is_a_sentence_and_status_1(cli: Cli) -> None:
    said = cli.fails("tail", "never-sent", "--no-follow", status=1)
    assert said.startswith("fairway tail: NO_SUCH_SUBJECT")
    assert said.count("\n") == 1


def test_every_line_of_json_is_a_document(cli: Cli) -> None:
    cli.run("produce", "many", stdin=b"\n".join(b"%d" % number for number in range(1_000)))
    consumed = cli.run("consume", "many", "-g", "g", "-n", "1000", "--json").splitlines()
    assert [json.loads(line)["payload"] for line in consumed] == [str(number) for number in range(1_000)]
