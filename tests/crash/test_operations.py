"""The procedures of docs/how-to/operations.md, "A cluster": its very commands, while programs send, take and ack."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

import fairway
from tests.crash.operations_shop import PATIENCE_S, Shop, shop
from tests.crash.operations_stage import Stage
from tests.support.zookeeper import ensemble

pytestmark = pytest.mark.xdist_group("operations")

EAST_A = "fairway broker --group east --data /var/lib/fairway/east-a --port 20880"
EAST_B = "fairway broker --group east --data /var/lib/fairway/east-b --port 20881"
WEST_A = "fairway broker --group west --data /var/lib/fairway/west-a --port 20884"
WEST_B = "fairway broker --group west --data /var/lib/fairway/west-b --port 20885"
DELAY_A = "fairway delay serve --group d1 --data /var/lib/fairway/d1-a --port 20886"
DELAY_B = "fairway delay serve --group d1 --data /var/lib/fairway/d1-b --port 20887"


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Stage, str]]:
    """The cluster, and what `fairway cluster` has shown of it at first."""
    with ExitStack() as stack:
        root = tmp_path_factory.mktemp("operations")
        zookeeper = stack.enter_context(ensemble(home=root / "zookeeper"))
        stage = Stage(root, zookeeper, stack)
        with stage.procedure("Start a cluster"):
            for line in ("fairway meta --port 20882", "fairway meta --port 20883", EAST_A, EAST_B):
                stage.run(line)
            stage.until_in_sync("east", 2)
            shown = stage.run("fairway cluster")
            stage.run("fairway cluster --check")
        yield stage, shown


@pytest.fixture
def stage(started: tuple[Stage, str]) -> Stage:
    """All copies live and are in sync, and east-a leads."""
    stage, _ = started
    stage.until_in_sync("east", 2)
    stage.lead("east", 20880)
    stage.until_in_sync("east", 2)
    return stage


def test_a_cluster_is_started(started: tuple[Stage, str]) -> None:
    stage, shown = started
    assert "2 of 1 needed" in shown
    assert stage.address(20880) in shown
    assert stage.address(20881) in shown
    found = stage.look()
    assert sorted(found["metas"]) == sorted(stage.address(port) for port in (20882, 20883))
    assert [(group["name"], group["is_writable"], group["why"]) for group in found["groups"]] == [("east", True, "")]


def test_brokers_are_restarted_one_by_one(stage: Stage) -> None:
    epoch = stage.group("east")["epoch"]
    with shop(stage.cli.url, "restarts") as orders, stage.procedure("Restart the brokers of a group"):
        stage.run("kill $(cat /var/lib/fairway/east-b/lock)")
        assert stage.ended("east-b") == 0
        stage.until_in_sync("east", 1)
        stage.run(EAST_B)
        stage.until_in_sync("east", 2)
        assert "2 of 1 needed" in stage.run("fairway cluster")
        stage.run("kill $(cat /var/lib/fairway/east-a/lock)")
        assert stage.ended("east-a") == 0
        orders.until_it_goes_on()
        assert stage.group("east")["master"] == stage.address(20881)
        stage.run(EAST_A)
        stage.until_in_sync("east", 2)
        stage.run("fairway cluster")
        orders.until_it_goes_on()
    assert stage.group("east")["epoch"] > epoch


def test_a_meta_server_is_restarted(stage: Stage) -> None:
    with shop(stage.cli.url, "routes") as orders:
        assert stage.end(20882) == 0
        orders.until_it_goes_on()
        with shop(stage.cli.url, "ways") as others:  # who comes now asks the other one
            others.until_it_goes_on()
        stage.run("fairway meta --port 20882")
        stage.until("both are there", lambda: len(stage.look()["metas"]) == 2)


def test_a_broker_is_lost_for_good(stage: Stage) -> None:
    stage.copies["5834220bcc3d3915"] = lost = stage.id_at("east", 20880)
    with shop(stage.cli.url, "losses") as orders:
        stage.run("kill -9 $(cat /var/lib/fairway/east-a/lock)")
        assert stage.ended("east-a") == -9
        stage.run("rm -r /var/lib/fairway/east-a")
        orders.until_it_goes_on()  # the other one leads
        with stage.procedure("A broker is lost"):
            stage.run(EAST_A)
            stage.until_in_sync("east", 2)
            assert lost in stage.run("fairway cluster")
            assert f"has forgotten {lost}" in stage.run("fairway cluster decommission east --copy 5834220bcc3d3915")
        assert lost not in stage.run("fairway cluster")
        stage.lead("east", 20880)  # it has everything, and can do what the lost one did
        orders.until_it_goes_on()


def test_another_copy_is_made_master(stage: Stage) -> None:
    with shop(stage.cli.url, "changes") as orders, stage.procedure("Choose another master"):
        assert "leads group east from now on" in stage.run("fairway broker promote east")
        stage.until("it leads", lambda: stage.group("east")["master"] == stage.address(20881))
        orders.until_it_goes_on()
        stage.run("fairway cluster")


def test_what_only_a_lost_copy_had_is_given_up(stage: Stage) -> None:
    stage.copies["6549ba9d510c2172"] = stage.id_at("east", 20881)
    with shop(stage.cli.url, "sacrifices") as orders:
        orders.until_quiet()
        orders.rest()
        stage.run("kill $(cat /var/lib/fairway/east-b/lock)")
        assert stage.ended("east-b") == 0
        before = orders.sent
        orders.is_sending = True
        orders.until("some are stored that only one copy has", lambda: len(orders.stored) > before)
        orders.until_quiet()
        lost = frozenset(range(before, orders.sent))
        stage.run("kill -9 $(cat /var/lib/fairway/east-a/lock)")
        stage.ended("east-a")
        kept = stage.aside("east-a")
        with stage.procedure("No copy in sync is left"):
            stage.run(EAST_B)
            stage.until("it waits", lambda: "no copy that has everything lives" in stage.words_of("east-b"))
            assert "lose what it lacks" in stage.run("fairway broker promote east", status=1)
            stage.run("fairway broker promote east --to 6549ba9d510c2172 --accept-data-loss")
            stage.until_in_sync("east", 1)
            stage.run("fairway cluster")
        orders.is_sending = orders.is_taking = True
        orders.until_it_goes_on()
        stage.run(EAST_A)
        stage.until_in_sync("east", 2)
        assert any(name.startswith("messages-") for name in stage.aside("east-a") - kept)
        orders.close(lost)
        assert not lost & orders.acked.keys()


def close_and_lower(stage: Stage, orders: Shop) -> None:
    """Group west has too few copies, until it is told to need fewer. Parcels are there alone, orders elsewhere, too."""
    stage.cli.run("subject", "create", "parcels", "--on", "west")
    with shop(stage.cli.url, "parcels") as parcels, stage.procedure("Fewer copies than are needed"):
        parcels.rest()
        before = parcels.sent
        parcels.until("there is something to consume", lambda: len(parcels.stored) > before)
        stage.run("kill $(cat /var/lib/fairway/west-b/lock)")
        stage.ended("west-b")
        stage.until_in_sync("west", 1)
        lacking = "group west has 1 copy in sync and needs 2"
        assert lacking in stage.run("fairway cluster --check", status=4)
        assert stage.group("west")["why"] == lacking
        parcels.is_taking = True
        parcels.until("consuming goes on", lambda: parcels.acked.keys() >= {*parcels.stored})
        orders.until_it_goes_on()
        assert len(parcels.stored) < parcels.sent
        stage.run("kill $(cat /var/lib/fairway/west-a/lock)")
        stage.ended("west-a")
        stage.run(f"{WEST_A} --min-in-sync 1")
        stage.until("it takes messages", lambda: stage.group("west")["is_writable"])
        assert "of group west is away: start it, or forget it" in stage.run("fairway cluster --check", status=4)
        parcels.until_it_goes_on()
        stage.run(f"{WEST_B} --min-in-sync 1")
        stage.until_in_sync("west", 2)


def test_a_group_is_added_closed_drained_and_given_up(stage: Stage) -> None:
    with shop(stage.cli.url, "orders") as orders:
        with stage.procedure("Add a broker group"):
            stage.run(f"{WEST_A} --min-in-sync 2")
            stage.run(f"{WEST_B} --min-in-sync 2")
            stage.until_in_sync("west", 2)
            stage.run("fairway cluster")
            assert "subject orders is on east, west" in stage.run("fairway subject extend orders --to west")
            assert "east west" in stage.run("fairway subject show orders")
        orders.until("both are used", lambda: {place[0] for place in [*orders.acked.values()]} == {"east", "west"})
        close_and_lower(stage, orders)
        with stage.procedure("Give up a broker group"):
            orders.rest()
            stored = len(orders.stored)
            orders.until("consumers are owed something", lambda: len(orders.stored) > stored + 100)
            assert "go elsewhere from now on" in stage.run("fairway cluster drain west")
            assert "owed to consumers" in stage.run("fairway cluster decommission west", status=1)
            orders.is_taking = True
            assert "stop its servers" in stage.insist("fairway cluster decommission west")
            for name in ("west-a", "west-b"):
                stage.run(f"kill $(cat /var/lib/fairway/{name}/lock)")
                assert stage.ended(name) == 0
            assert "group west is forgotten" in stage.run("fairway cluster decommission west")
        orders.until_it_goes_on()
        assert [group["name"] for group in stage.look()["groups"]] == ["east"]


@pytest.mark.slow
def test_delay_servers_are_started_restarted_and_led_by_another(stage: Stage) -> None:
    with fairway.connect(stage.cli.url) as client, stage.procedure("Delay servers"):
        stage.run(DELAY_A)
        stage.until_in_sync("d1", 1)
        stage.run(DELAY_B)
        stage.until_in_sync("d1", 2)
        stage.run("fairway cluster")
        for number in range(100):
            client.send("reminders", b"%d" % number, after=number / 5).result(PATIENCE_S)
        client.send("reminders", b"next year", key="far", after=3e7).result(PATIENCE_S)
        stage.run("kill $(cat /var/lib/fairway/d1-a/lock)")
        assert stage.ended("d1-a") == 0
        stage.until("the other one leads", lambda: stage.group("d1")["master"] == stage.address(20887))
        stage.run(DELAY_A)
        stage.until_in_sync("d1", 2)
        stage.run("fairway cluster")
        stage.run("fairway broker promote d1")
        stage.until("it leads again", lambda: stage.group("d1")["master"] == stage.address(20886))
        with client.consumer("reminders", group="g") as consumer:
            came: list[int] = []
            while len(came) < 100:
                message = consumer.poll(timeout=PATIENCE_S)
                assert message is not None
                came.append(int(message.payload))
                message.ack()
        assert sorted(came) == list(range(100))
        assert stage.run("fairway delay count").split()[0] == "1"
    stage.cli.run("cluster", "drain", "d1")
    assert "1 delayed messages are pending" in stage.cli.fails("cluster", "decommission", "d1", status=1)
    stage.cli.run("delay", "cancel", "--subject", "reminders", "--key", "far")
    stage.cli.run("cluster", "decommission", "d1")
    for name in ("d1-a", "d1-b"):
        stage.shut(name)
    assert "is forgotten" in stage.cli.run("cluster", "decommission", "d1")


def test_the_registry_is_away_for_a_while(stage: Stage) -> None:
    [zookeeper] = stage.zookeeper.servers
    with shop(stage.cli.url, "absences") as orders, stage.procedure("The registry is away"):
        said = "waits in group east: the registry"
        before = stage.words_of("east-a").count(said)
        zookeeper.kill()
        stage.until("the master has stepped down", lambda: stage.words_of("east-a").count(said) > before)
        stage.until("meta servers know", lambda: stage.look()["is_old"])
        assert "the registry cannot be reached: this is how it was" in stage.run("fairway cluster")
        zookeeper.start()
        zookeeper.await_serving()
        orders.until_it_goes_on()
        stage.until_in_sync("east", 2)


@pytest.mark.slow
def test_the_registry_has_lost_everything(stage: Stage) -> None:
    [zookeeper] = stage.zookeeper.servers
    stage.copies["5834220bcc3d3915"] = stage.id_at("east", 20880)
    with shop(stage.cli.url, "amnesia") as orders:
        zookeeper.kill()
        stage.wipe_zookeeper()
        zookeeper.start()
        zookeeper.await_serving()
        with stage.procedure("The registry has lost its data"):
            roles = 2 * ["waiting"]
            stage.until("both wait", lambda: [each["role"] for each in stage.group("east")["copies"]] == roles)
            assert "this copy was in one" in stage.words_of("east-a")
            assert "and its copies wait: `fairway broker promote east" in stage.group("east")["why"]
            stage.run("fairway cluster")
            stage.run("fairway broker promote east --to 5834220bcc3d3915 --accept-data-loss")
            stage.until_in_sync("east", 2)
            stage.run("fairway subject create orders --on east")
        orders.until_it_goes_on()
