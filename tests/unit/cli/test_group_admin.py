"""`configure`, and what `groups`, `lag`, `resume` and `trace` say of groups with policies."""

from __future__ import annotations

from tests.unit.cli.running import Cli


def test_a_group_is_made_shown_and_changed(cli: Cli) -> None:
    assert "NO_SUCH_GROUP" in cli.fails("configure", "made", "g", status=1)
    made = cli.json("configure", "made", "g", "order=key", "attempts_max=5")
    assert (made["order"], made["attempts_max"], made["version"]) == ("key", 5, 1)
    shown = cli.run("configure", "made", "g", "after_dead=halt", "max_handling_ms=60000")
    assert "was go on" in shown
    now = cli.json("configure", "made", "g")
    assert (now["after_dead"], now["max_handling_ms"], now["order"], now["version"]) == ("halt", 60_000, "key", 2)
    assert cli.json("configure", "made", "g", "max_handling_ms=none")["max_handling_ms"] is None
    [group] = cli.json("groups", "made")["groups"]
    assert group["config"]["order"] == "key"
    assert "by key" in cli.run("groups", "made")


def test_a_change_that_makes_no_sense_is_named(cli: Cli) -> None:
    assert "did you mean order=...?" in cli.fails("configure", "odd", "g", "ordr=key", status=2)
    assert "the settings are after_dead" in cli.fails("configure", "odd", "g", "colour", status=2)
    assert "this configuration is not valid" in cli.fails("configure", "odd", "g", "order=rank", status=2)
    assert "rate_per_key is for a group by key" in cli.fails("configure", "odd", "g", "rate_per_key=3", status=2)


def test_what_keeps_a_group_waiting_is_said(cli: Cli) -> None:
    cli.run("configure", "full", "g", "order=key", "parked_max=2", "after_dead=halt", "rate_per_s=1000")
    for number in range(5):
        cli.run("produce", "full", str(number), "--key", "k")
    with cli.client() as client, client.consumer("full", "g", order="key") as consumer:
        (message,) = consumer.take(1, timeout=30)
        while not (group := cli.json("groups", "full")["groups"][0])["is_full"]:
            consumer.take(1, timeout=0.1)
        assert (group["in_flight"], group["parked"], group["lag"]) == (3, 0, 2), "two went out behind the first"
        for verb in ("groups", "lag"):
            assert "waits: parked_max is reached" in " ".join(cli.run(verb, "full").split())
        assert "1000/s" in cli.run("groups", "full")
        [lag] = cli.json("lag", "full")["groups"]
        assert (lag["is_full"], lag["parked"], lag["waiting"]) == (True, 0, 0)
        message.reject("no")
        consumer.flush()
        while not cli.json("groups", "full")["groups"][0]["halted"]:
            consumer.take(1, timeout=0.1)
        assert "halted" in cli.run("groups", "full")
        assert "nothing had halted" in cli.run("resume", "full", "g", "--key", "another")
        assert "going on" in cli.run("resume", "full", "g", "--key", "k")
        assert cli.json("resume", "full", "g", "--halted") == {
            "subject": "full",
            "group": "g",
            "key": None,
            "was_halted": False,
        }


def test_the_life_of_a_message_that_waited_behind_another(cli: Cli) -> None:
    cli.run("configure", "merged", "g", "coalesce=decline")
    with cli.client() as client:
        ids = [str(client.send("merged", b"%d" % number, key="k").result().id) for number in range(4)]
        with client.consumer("merged", "g", coalesce="decline") as consumer:
            (message,) = consumer.take(1, timeout=30)
            while cli.json("groups", "merged")["groups"][0]["declined"] != 2:
                consumer.take(1, timeout=0.1)
            message.ack()
            (second,) = consumer.take(1, timeout=30)
            second.ack()
            consumer.flush()
    assert "2 declined" in cli.run("groups", "merged")
    events = [each["event"] for each in cli.json("trace", ids[1])["events"]]
    assert [each for each in events if each in ("parked", "pulled", "acked")] == ["parked", "pulled", "acked"]
    assert "declined" in [each["event"] for each in cli.json("trace", ids[3])["events"]]
