"""`fairway meta`, `fairway cluster` and `fairway subject`: a real meta server, and records as brokers write them."""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fairway.cli.cluster import lag_bytes
from fairway.lookup.registries import open_registry
from fairway.protocol.route_messages import Copy
from fairway.registry.layout import GroupRecord, RegisteredCopy
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.process import Child
from fairway.runtime.rng import RealRng
from tests.support import copies
from tests.unit.cli.running import Cli

READY_S = 60.0
A1, A2, A3, B1, D1 = (f"{number:016x}" for number in (0xA1, 0xA2, 0xA3, 0xB1, 0xD1))
NOBODY = Cli("meta://127.0.0.1:1")


@pytest.fixture(scope="module")
def meta(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cli, str]]:
    """One that is ready, and the line that says so."""
    registry = tmp_path_factory.mktemp("meta") / "registry"
    arguments = ("meta", "--registry", f"sqlite:{registry}", "--port", "0", "--http-port", "0")
    with Child("fairway", *arguments) as child:
        ready = child.line(timeout_s=READY_S) or ""
        found = re.search(r"ready at (meta://127\.0\.0\.1:\d+)", ready)
        assert found, ready
        yield Cli(found[1]), ready
        child.terminate()
        assert child.wait(timeout_s=READY_S) == 0


def with_groups(cli: Cli, story: Callable[[], None]) -> None:
    """Two broker groups live while the story is told; one has a copy that is behind, and one that is away."""

    async def main() -> None:
        registry = await open_registry(cli.url, RealNet(), RealClock(), RealRng())
        living = [
            ("east", RegisteredCopy(A1, "127.0.0.1", 7001, "master", 3, [9_000, 500])),
            ("east", RegisteredCopy(A2, "127.0.0.1", 7002, "follower", 3, [8_000, 500])),
            ("west", RegisteredCopy(B1, "127.0.0.1", 7003, "master", 1, [0, 0])),
        ]
        for group, member in living:
            await copies.register(registry, group, member)
        away = await copies.register(registry, "east", RegisteredCopy(A3, "127.0.0.1", 7004))
        for in_sync, members in (([A1], [A1]), ([A1, A2, A3], [A1, A2, A3]), ([A1, A2], [A1, A2, A3])):
            await copies.put_record(registry, "east", GroupRecord("broker", 3, A1, in_sync, 2, members=members))
        await copies.put_record(registry, "west", GroupRecord("broker", 1, B1, [B1], members=[B1]))
        await registry.remove(away)
        await asyncio.to_thread(story)
        await registry.close()
        await asyncio.to_thread(forget, cli, "east", "west")

    asyncio.run(main())


def forget(cli: Cli, *groups: str) -> None:
    """Groups whose servers are stopped; the meta server sees that in its own time."""
    for group in groups:
        for _ in range(200):
            if "is forgotten" in cli.run("cluster", "decommission", group, "--force"):
                break
        else:
            raise AssertionError(f"{group} is still there")


def until(cli: Cli, holds: Callable[[Any], bool], *arguments: str) -> Any:
    """Look until it is so: the meta server learns of it in its own time."""
    found: Any = None
    for _ in range(200):
        found = cli.json(*arguments)
        if holds(found):
            return found
    raise AssertionError(f"it did not happen: {found}")


def test_the_cluster_is_shown_with_roles_epochs_and_lag(meta: tuple[Cli, str]) -> None:
    cli, _ = meta

    def story() -> None:
        found = until(cli, lambda each: [len(group["copies"]) for group in each["groups"]] == [3, 1], "cluster")
        east = found["groups"][0]
        assert (east["name"], east["epoch"], east["master"], east["min_in_sync"]) == ("east", 3, "127.0.0.1:7001", 2)
        assert [(copy["role"], copy["is_in_sync"], copy["lag_bytes"]) for copy in east["copies"]] == [
            ("master", True, 0),
            ("follower", True, 1_000),
            ("away", False, None),
        ]
        [away] = found["troubles"]
        assert away.startswith(f"copy {A3} of group east is away: start it")
        assert not found["is_well"]
        text = cli.run("cluster", "--check", status=4)
        assert away in text
        for words in ("east", "127.0.0.1:7002", "1000 B", "away", "meta servers: 127.0.0.1:"):
            assert words in text

    with_groups(cli, story)


def test_subjects_are_created_extended_and_steered(meta: tuple[Cli, str]) -> None:
    cli, _ = meta

    def story() -> None:
        until(cli, lambda found: sum(group["is_writable"] for group in found["groups"]) == 2, "cluster")
        assert cli.run("subject", "create", "orders", "--on", "east", "--ordered").startswith("subject orders")
        assert cli.json("subject", "create", "orders") == {"name": "orders", "changed": False, "groups": ["east"]}
        assert cli.run("subject", "extend", "orders") == "subject orders is on east, west\n"
        assert "read-only" in cli.run("subject", "read-only", "orders")
        assert "nothing to billing" in cli.run("subject", "pause", "orders", "billing")
        cli.run("subject", "set", "orders", "team=shop")
        [shown] = cli.json("subject", "show")["subjects"]
        assert (shown["writable"], shown["paused"], shown["options"]) == ([], ["billing"], {"team": "shop"})
        assert shown["is_ordered"]
        text = cli.run("subject", "show")
        assert "paused: billing" in text
        cli.run("subject", "read-only", "orders", "--off")
        assert "takes new messages on west" in cli.run("subject", "retreat", "orders", "--from", "east")
        cli.run("cluster", "drain", "east")
        assert "group east is being drained" in cli.json("cluster")["groups"][0]["why"]
        assert "drained" in cli.run("cluster")
        assert "does not say that it has closed" in cli.fails("cluster", "decommission", "east", status=1)
        assert "`fairway cluster drain west` first" in cli.fails("cluster", "decommission", "west", status=1)
        cli.run("cluster", "decommission", "east", "--force")
        cli.run("cluster", "drain", "west", "--force")

    with_groups(cli, story)


def test_a_cluster_that_is_not_well_is_exit_status_4(meta: tuple[Cli, str]) -> None:
    cli, _ = meta

    async def main() -> None:
        registry = await open_registry(cli.url, RealNet(), RealClock(), RealRng())
        away = await copies.register(registry, "dead", RegisteredCopy(D1, "127.0.0.1", 7005))
        await copies.put_record(registry, "dead", GroupRecord("broker", 1, D1, [D1], members=[D1]))
        await registry.remove(away)
        await asyncio.to_thread(until, cli, lambda found: bool(found["groups"]), "cluster")
        assert "has no master" in await asyncio.to_thread(cli.run, "cluster", "--check", status=4)
        await registry.close()
        await asyncio.to_thread(forget, cli, "dead")

    asyncio.run(main())


def test_probes_and_figures(meta: tuple[Cli, str]) -> None:
    _, ready = meta
    pages = re.search(r"http://127\.0\.0\.1:\d+", ready)
    assert pages
    for page, words in (("livez", "alive"), ("readyz", "ready"), ("metrics", "\nfairway_meta_is_old 0\n")):
        assert words in urllib.request.urlopen(f"{pages[0]}/{page}", timeout=READY_S).read().decode()


def test_a_second_owner_of_an_sqlite_registry_is_refused(meta: tuple[Cli, str]) -> None:
    _, ready = meta
    registry = ready.rpartition("registry ")[2].strip()
    assert "registry" in NOBODY.fails("meta", "--registry", registry, "--port", "0", status=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give --registry sqlite:DIR"),
        (("--registry", "meta://a:1"), "cannot be the registry of another"),
        (("--registry", "redis://a:1"), "zookeeper://"),
        (("--registry", "sqlite:x", "--host", "0.0.0.0"), "--allow-remote"),
        (("--registry", "sqlite:x", "--spread", "0"), "spread"),
    ],
)
def test_what_cannot_be_served_is_usage(arguments: tuple[str, ...], words: str) -> None:
    assert words in NOBODY.fails("meta", *arguments, status=2)


def test_nobody_there_is_exit_status_3() -> None:
    assert "no meta server at 127.0.0.1:1" in NOBODY.fails("cluster", status=3)
    assert "`fairway meta --registry sqlite:meta --port 1`" in NOBODY.fails("subject", "create", "orders", status=3)


def test_an_option_without_a_value_is_usage(meta: tuple[Cli, str]) -> None:
    assert "NAME=VALUE" in meta[0].fails("subject", "set", "orders", "team", status=2)


def test_a_broker_alone_is_a_cluster_of_one(cli: Cli) -> None:
    with cli.client() as client:
        client.send("cluster-of-one", b"a").result()
    found = cli.json("cluster")
    assert [(group["name"], group["is_writable"]) for group in found["groups"]] == [("here", True)]
    assert "cluster-of-one" in [subject["name"] for subject in found["subjects"]]
    assert "in a cluster ask a meta server" in cli.fails("subject", "create", "orders", status=1)


def test_how_far_a_copy_is_behind_is_known_only_if_it_lives() -> None:
    assert lag_bytes(Copy("a", "h:1", ends=[5, 9]), [7, 9]) == 2
    assert lag_bytes(Copy("a", "", ends=[5, 9]), [7, 9]) is None
    assert lag_bytes(Copy("a", "h:1"), [7, 9]) is None
