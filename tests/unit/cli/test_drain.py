"""Real processes: a broker group dies before it answers a delay server, is drained and given up. Nothing is lost."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import fairway
from fairway.runtime.process import Child
from tests.support.ports import free_port
from tests.unit.cli.running import Cli

pytestmark = pytest.mark.slow

READY_S = 60.0
SESSION_MS = "1500"
SUBJECTS = [f"order.remind{number}" for number in range(6)]  # each group is home to some of them


class Cluster:
    """A meta server, two broker groups of one copy each, a delay server."""

    def __init__(self, root: Path, stack: ExitStack) -> None:
        self._root = root
        self._stack = stack
        self._ports = {name: free_port() for name in ("meta", "east", "west", "d1")}
        self._children: dict[str, Child] = {}
        self.url = f"meta://127.0.0.1:{self._ports['meta']}"
        self.cli = Cli(self.url)
        for name in self._ports:
            self.start(name)

    def start(self, name: str) -> None:
        port = ("--port", str(self._ports[name]))
        verb = {"meta": ("meta",), "d1": ("delay", "serve")}.get(name, ("broker",))
        registry = f"sqlite:{self._root / 'registry'}" if name == "meta" else self.url
        member = (
            () if name == "meta" else ("--group", name, "--data", str(self._root / name), "--session-ms", SESSION_MS)
        )
        child = self._stack.enter_context(Child("fairway", *verb, "--registry", registry, *port, *member))
        ready = child.line(timeout_s=READY_S)
        assert ready
        assert re.search(r"ready at \S*:\d+", ready)
        self._children[name] = child

    def signal(self, name: str, number: signal.Signals) -> None:
        os.kill(self._children[name].pid, number)

    def stop(self, name: str) -> None:
        self._children[name].terminate()
        assert self._children[name].wait(timeout_s=READY_S) == 0

    def waiting(self, group: str) -> int:
        return sum(each["messages"] for each in self.cli.json("delay", "count")["in_transit"] if each["group"] == group)

    def stored(self, name: str) -> Counter[bytes]:
        """What one broker group has."""
        found: Counter[bytes] = Counter()
        with fairway.connect(f"fairway://127.0.0.1:{self._ports[name]}") as client:
            for subject in SUBJECTS:
                try:
                    found += Counter(each for page in client.scan(subject) for each in page.batch.payloads)
                except fairway.Refused as refused:
                    if refused.code is not fairway.Code.NO_SUCH_SUBJECT:
                        raise
        return found


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ExitStack() as stack:
        yield Cluster(tmp_path, stack)


def until(what: str, is_so: Callable[[], object]) -> None:
    for _ in range(600):
        if is_so():
            return
        time.sleep(0.1)
    raise AssertionError(what)


def doubtful(cluster: Cluster) -> list[bytes]:
    """Messages were made for `west`, which is killed before it could answer; it is being drained when it is back."""
    for subject in SUBJECTS:
        cluster.cli.run("subject", "create", subject, "--on", "east", "--on", "west")
    payloads = [f"{subject} {number}".encode() for subject in SUBJECTS for number in range(5)]
    with fairway.connect(cluster.url) as client:
        client.send_many(SUBJECTS[0], [b"warm"], after=0).result()
        for subject in SUBJECTS:  # so that the delay server is connected to both
            client.send_many(subject, [f"{subject} first".encode()], after=0).result()
        until("nothing arrives", lambda: len(cluster.stored("east") + cluster.stored("west")) == len(SUBJECTS) + 1)
        cluster.signal("west", signal.SIGSTOP)
        for subject in SUBJECTS:
            mine = [each for each in payloads if each.startswith(f"{subject} ".encode())]
            client.send_many(subject, mine, after=0).result()
        until("nothing waits for west", lambda: cluster.waiting("west"))
    cluster.signal("west", signal.SIGKILL)
    return [*payloads, b"warm", *(f"{subject} first".encode() for subject in SUBJECTS)]


def test_what_waits_for_a_group_that_is_drained_arrives_there(cluster: Cluster) -> None:
    payloads = doubtful(cluster)
    cluster.cli.run("cluster", "drain", "west")
    refused = cluster.cli.fails("cluster", "decommission", "west", status=1)
    assert re.search(r"\d+ delayed messages? waits? for it at delay servers \(d1 \d+\)", refused), refused
    until("it is not well", lambda: "for broker group west" in cluster.cli.both("cluster", "--check", status=4)[0])
    cluster.start("west")
    until("it never arrives", lambda: not cluster.waiting("west"))
    until("it is never given up", lambda: "stop its servers" in _decommissioned(cluster))
    kept = cluster.stored("west")
    cluster.stop("west")
    until("it is never forgotten", lambda: "is forgotten;" in _decommissioned(cluster))
    assert cluster.stored("east") + kept == Counter(payloads)


def test_what_waits_for_a_group_that_is_lost_goes_to_another_by_command(cluster: Cluster) -> None:
    payloads = doubtful(cluster)
    waiting = cluster.waiting("west")
    assert "--may-repeat" in cluster.cli.fails("delay", "retry", "--group", "west", status=2)
    known = cluster.cli.fails("delay", "retry", "--group", "west", "--may-repeat", status=1)
    assert "`fairway cluster decommission west --force`" in known
    until("it still lives", lambda: "is forgotten;" in cluster.cli.run("cluster", "decommission", "west", "--force"))
    until("it is well", lambda: "which is gone" in cluster.cli.both("cluster", "--check", status=4)[0])
    said = cluster.cli.run("delay", "retry", "--group", "west", "--may-repeat")
    assert f"{waiting} messages sent to other broker groups" in said
    until("it never arrives", lambda: not cluster.waiting("west"))
    assert "nothing waits" in cluster.cli.run("delay", "retry", "--group", "west", "--may-repeat")
    east = cluster.stored("east")
    assert not set(payloads) - set(east) - {b"warm", *(f"{subject} first".encode() for subject in SUBJECTS)}
    assert set(east.values()) == {1}


def _decommissioned(cluster: Cluster) -> str:
    try:
        return cluster.cli.run("cluster", "decommission", "west")
    except AssertionError as refused:  # exit status 1, with the sentence
        return str(refused)
