"""`dead list|show|redrive`: show and redrive messages that a group has given up."""

from __future__ import annotations

import json

from tests.unit.cli.running import Cli

WAIT_S = 60.0


def _reject(cli: Cli, subject: str, count: int) -> None:
    """So many dead letters of group `g`; another group `h` is done with all of it."""
    cli.run("produce", subject, stdin="\n".join(f"order {number}" for number in range(count)).encode())
    cli.run("consume", subject, "-g", "h", "-n", str(count))
    with cli.client() as client, client.consumer(subject, "g") as consumer:
        for number in range(count):
            message = consumer.poll(WAIT_S)
            assert message is not None
            message.reject(f"reason {number}")
        assert consumer.flush(WAIT_S)
    for _ in range(600):
        if cli.json("groups", subject, "--group", "g")["groups"][0]["dead"] == count:
            return
    raise AssertionError("the dead letters did not arrive")


def test_list_and_show(cli: Cli) -> None:
    _reject(cli, "died", 3)
    found = cli.json("dead", "list", "died", "g", "--limit", "2")
    assert found["has_more"] is True
    assert [each["payload"] for each in found["letters"]] == ["order 0", "order 1"]
    shown = cli.json("dead", "show", "died", "g", found["letters"][1]["id"])
    assert shown["headers"]["fairway.dead.reason"] == "reason 1"
    [attempt] = shown["history"]["attempts"]
    assert (attempt["attempt"], attempt["reason"], shown["history"]["left_out"]) == (1, "reason 1", 0)
    assert [each["history"]["attempts"][0]["reason"] for each in found["letters"]] == ["reason 0", "reason 1"]
    people = cli.run("dead", "show", "died", "g", found["letters"][1]["id"])
    assert "failed attempts" in people
    assert attempt["consumer"] in "".join(people.split())
    assert "fairway.dead.history" not in people
    table = cli.run("dead", "list", "died", "g")
    for words in ("reason 2", "order 2", found["letters"][0]["id"]):
        assert words in table
    assert "order 0" in cli.run("dead", "show", "died", "g", found["letters"][0]["id"].lower())


def test_redriven_letters_go_to_their_group_alone(cli: Cli) -> None:
    _reject(cli, "redriven", 3)
    first = cli.json("dead", "list", "redriven", "g")["letters"][0]["id"]
    assert cli.json("dead", "redrive", "redriven", "g", first) == {"count": 1, "unknown": []}
    assert cli.run("consume", "redriven", "-g", "g", "-n", "1") == "order 0\n"
    left = cli.json("dead", "list", "redriven", "g")["letters"]
    assert [each["payload"] for each in left] == ["order 1", "order 2"]
    assert len(cli.json("dead", "list", "redriven", "g", "--all")["letters"]) == 3
    assert "2 messages handed to g" in cli.run("dead", "redrive", "redriven", "g", "--all")
    assert cli.run("consume", "redriven", "-g", "g", "-n", "2") == "order 1\norder 2\n"
    assert "no dead letters of g" in cli.run("dead", "list", "redriven", "g")
    assert cli.run("consume", "redriven", "-g", "h", "--idle-s", "0.3") == ""


def test_what_is_not_there(cli: Cli) -> None:
    cli.run("produce", "clean", "x")
    cli.run("consume", "clean", "-g", "g", "-n", "1")
    unknown = "00000000000000000000000001"
    assert "no dead letters" in cli.run("dead", "list", "clean", "g")
    assert unknown in cli.fails("dead", "show", "clean", "g", unknown, status=1)
    out, said = cli.both("dead", "redrive", "clean", "g", unknown, status=1)
    assert "0 messages" in out
    assert unknown in said
    told = json.loads(cli.run("dead", "redrive", "clean", "g", unknown, "--json", status=1))
    assert told == {"count": 0, "unknown": [unknown]}
    assert "--all" in cli.fails("dead", "redrive", "clean", "g", status=2)
