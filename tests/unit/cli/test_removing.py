"""`fairway subject remove` and `fairway group remove`."""

from __future__ import annotations

import fairway
from tests.unit.cli.running import Cli


def send(cli: Cli, subject: str, count: int) -> None:
    with fairway.connect(cli.url) as fw:
        fw.send_many(subject, [b"x"] * count).result(30)


def test_a_subject_with_messages_is_kept_unless_forced(cli: Cli) -> None:
    send(cli, "remove.me", 3)
    told = cli.fails("subject", "remove", "remove.me", status=1)
    assert "3 messages that no group consumes" in told
    assert "--force" in told
    assert cli.run("subject", "remove", "remove.me", "--force") == "subject remove.me is removed, with 3 messages\n"
    assert cli.run("subject", "remove", "remove.me") == "there is no subject remove.me: nothing was removed\n"
    assert "remove.me" not in cli.run("subjects")


def test_a_group_is_removed(cli: Cli) -> None:
    send(cli, "remove.group", 2)
    with fairway.connect(cli.url) as fw, fw.consumer("remove.group", group="g") as consumer:
        message = consumer.poll(30)
        assert message is not None
        assert "1 consumer" in cli.fails("group", "remove", "remove.group", "g", status=1)
        message.ack()
    assert "not handled (g 1)" in cli.fails("group", "remove", "remove.group", "g", status=1)
    found = cli.json("group", "remove", "remove.group", "g", "--force", "--dead-letters")
    assert found == {
        "subject": "remove.group", "group": "g", "existed": True, "groups": 1, "messages": 1, "dead": 0,
    }  # fmt: skip
    assert "nothing was removed" in cli.run("group", "remove", "remove.group", "g")
    assert cli.json("subject", "remove", "remove.group", "--force")["existed"]


def test_a_bad_name_is_usage_and_nobody_is_3(cli: Cli) -> None:
    assert "bad subject name" in cli.fails("subject", "remove", "no such/name", status=2)
    assert Cli("fairway://127.0.0.1:1").fails("subject", "remove", "x", status=3)


def test_a_broker_alone_removes_under_a_meta_url_too(cli: Cli) -> None:
    send(cli, "remove.alone", 1)
    alone = Cli(cli.url.replace("fairway://", "meta://"))
    assert "is removed" in alone.run("subject", "remove", "remove.alone", "--force")


def test_help_fits_a_narrow_terminal(cli: Cli) -> None:
    for verb in (("subject", "remove"), ("group", "remove")):
        told, _ = cli.both(*verb, "--help", COLUMNS="80")
        assert max(map(len, told.splitlines())) <= 80
        assert "--force" in told
