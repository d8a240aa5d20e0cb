"""`make cluster`, `fairway demo cluster`: a cluster on this machine, with numbered orders and a live table.

`Cluster` has the servers, each a process of its own:

    zookeeper       from the jars that pyspark ships
    m1, m2          meta servers
    g1-a, g1-b      a broker group, two copies
    g2-a, g2-b      another
    d1-a, d1-b      a group of delay servers, two copies

A killed server stays away for a while, so that the user sees a failover. Then it restarts on its directory.

`Traffic` sends orders to a subject that both broker groups carry, some of them through the delay servers. A consumer in
this process receives all. Each order has a number, so the demo knows at the end whether each stored order arrived.

Without `--seconds` the demo runs until Ctrl-C, and restarts servers that somebody kills. With `--seconds` it kills two
masters at half time: of a broker group and of the delay servers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

import typer

import fairway
from fairway import Client, Consumer
from fairway.cli import cluster as cluster_verb
from fairway.cli import connections, output
from fairway.cli.arguments import KeptDirectory, Seconds
from fairway.cli.settings import CliOptions
from fairway.demo import TICK_S, directory, rounds, say_tries, screen
from fairway.errors import FairwayError
from fairway.protocol.receipts import Pending
from fairway.protocol.route_messages import Govern, Governed, GroupRoute, RouteChange, Routed
from fairway.runtime import host, terminal
from fairway.runtime.clock import RealClock
from fairway.runtime.host import Ending, free_port
from fairway.runtime.threads import Workers

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from fairway.runtime.process import Child, Ensemble


# --- the servers ------------------------------------------------------------------------------------------------------

HOST = "127.0.0.1"
AWAY_S = 15.0  # longer than the others need to notice
SESSION_MS = 4_000
_TICK_MS = 400  # ZooKeeper grants sessions of 2 to 20 of these
_START_S = 60.0  # a machine that swaps is slow, not broken
_END_S = 20.0
_PORT = re.compile(r"ready at \S*?:(\d+)")


class ServerFailed(FairwayError):
    """One of the servers did not start."""


class _Absence:
    """How long a process has been dead."""

    def __init__(self, away_s: float = AWAY_S) -> None:
        self._clock = RealClock()
        self._away_s = away_s
        self._since_ns: int | None = None

    def is_over(self, *, is_alive: bool) -> bool:
        """Whether it is time to restart the server."""
        now_ns = self._clock.monotonic_ns()
        if is_alive:
            self._since_ns = None
        elif self._since_ns is None:
            self._since_ns = now_ns
        return self._since_ns is not None and now_ns - self._since_ns >= self._away_s * 1e9


class DemoServer:
    """`fairway ...` in a process of its own; its port and its directory stay through all its lives."""

    def __init__(self, name: str, group: str, logs: Path | None, *arguments: str, away_s: float = AWAY_S) -> None:
        """`logs`: the directory for its stderr; None: that of this process. `away_s`: how long it stays dead."""
        self.name = name
        self.group = group  # the server group; empty for a server in none
        self.port = free_port()
        self.lives = 0
        self._log = None if logs is None else logs / f"{name}.log"
        self._arguments = (*arguments, "--port", str(self.port))
        self._absence = _Absence(away_s)
        self._child: Child | None = None

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def pid(self) -> int | None:
        """The process ID; None while the server is dead."""
        return self._child.pid if self._child is not None and self._child.is_alive else None

    def start(self) -> None:
        """Start the process; `await_ready` waits until it is ready."""
        from fairway.runtime.process import Child

        self._child = Child("fairway", *self._arguments, errors_to=self._log)
        self.lives += 1

    def await_ready(self) -> None:
        ready = None if self._child is None else self._child.line(timeout_s=_START_S)
        if ready is None or _PORT.search(ready) is None:
            raise ServerFailed(f"{self.name} did not start: {self.last_words()}")

    def revive(self) -> bool:
        """Restart the server if it has been dead for a while; returns whether it was."""
        if not self._absence.is_over(is_alive=self.pid is not None):
            return False
        self._close()
        self.start()
        return True

    def kill(self) -> None:
        """Kill the process with SIGKILL."""
        if self._child is not None:
            self._child.kill()

    def ask_to_end(self) -> None:
        if self._child is not None:
            self._child.terminate()

    def stop(self) -> None:
        """Wait until the process has ended; kill it if that takes too long."""
        from fairway.runtime.process import ChildSilent

        if self._child is not None:
            try:
                self._child.wait(timeout_s=_END_S)
            except ChildSilent:
                pass
            finally:
                self._close()

    def _close(self) -> None:
        if self._child is not None:
            self._child.__exit__(None, None, None)
            self._child = None

    def last_words(self) -> str:
        """The last lines of its stderr."""
        if self._log is None:
            return "see its message above"
        lines = self._log.read_text(errors="replace").splitlines() if self._log.is_file() else []
        return lines[-1] if lines else "it said nothing"


class Cluster:
    """All servers of the cluster."""

    def __init__(self, root: Path, zookeeper: Ensemble) -> None:
        self.zookeeper = zookeeper
        self._absence = _Absence()
        self._root = root
        registry = f"zookeeper://{zookeeper.hosts}"
        member = ("--registry", registry, "--session-ms", str(SESSION_MS))
        metas = [DemoServer(name, "", root, "meta", *member) for name in ("m1", "m2")]
        brokers = [
            DemoServer(
                f"{group}-{copy}", group, root, "broker", *self._data(f"{group}-{copy}"), *member, "--group", group
            )
            for group in ("g1", "g2")
            for copy in "ab"
        ]
        delays = [
            DemoServer(name, "d1", root, "delay", "serve", *self._data(name), *member, "--group", "d1")
            for name in ("d1-a", "d1-b")
        ]
        self.servers = [*metas, *brokers, *delays]
        self.url = "meta://" + ",".join(meta.address for meta in metas)

    def _data(self, name: str) -> tuple[str, str]:
        return "--data", str(self._root / name)

    def at(self, address: str) -> DemoServer | None:
        """The server that listens at the address."""
        return next((each for each in self.servers if each.address == address), None)

    def start(self) -> None:
        for server in self.servers:
            server.start()
        for server in self.servers:
            server.await_ready()

    def revive(self) -> list[str]:
        """Restart servers that have been dead for a while; returns their names."""
        back = [server.name for server in self.servers if server.revive()]
        return back + (["zookeeper"] if self._revive_zookeeper() else [])

    def _revive_zookeeper(self) -> bool:
        [server] = self.zookeeper.servers
        if not self._absence.is_over(is_alive=server.is_alive):
            return False
        server.kill()
        server.start()
        return True

    def stop(self) -> None:
        """Stop all servers; the meta servers last, because the others deregister there."""
        for server in reversed(self.servers):
            server.ask_to_end()
        for server in reversed(self.servers):
            server.stop()


@contextmanager
def running(root: Path) -> Iterator[Cluster]:
    """A ready cluster, with all its data in the directory."""
    from fairway.runtime.file_system import make_private
    from fairway.runtime.process import ensemble

    make_private(str(root.absolute()))
    with ensemble(tick_ms=_TICK_MS, home=root / "zookeeper") as zookeeper:
        cluster = Cluster(root, zookeeper)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()


# --- the orders -------------------------------------------------------------------------------------------------------

GROUP = "billing"
_ORDERS_PER_S = 200
_LATER_ONE_IN = 10  # one order in ten is delayed
_LATER_S = 2.0
_TAKE_S = 0.2
_JOIN_S = 30.0


class Traffic:
    """Sends orders when its owner calls; receives them on a thread of its own."""

    def __init__(self, client: Client, subject: str) -> None:
        self._clock = RealClock()
        self._subject = subject
        self._client = client
        self._pending: dict[int, Pending] = {}
        self._workers = Workers()
        self._is_ending = False
        self.sent = 0
        self.failed = 0
        self.stored: set[int] = set()
        self.received: set[int] = set()
        self.repeated = 0
        self._worst_s = 0.0  # the longest time without an order, and when the last one came
        self._last_ns: int | None = None

    def __enter__(self) -> Self:
        consumer = self._client.consumer(self._subject, group=GROUP)
        self._workers.start("fairway-demo-consumer", lambda: self._consume(consumer))
        return self

    def __exit__(self, *_: object) -> None:
        self._is_ending = True
        self._workers.join(_JOIN_S)

    def send(self, client: Client, elapsed_s: float) -> None:
        """Send the orders that are due by now; those that no broker takes now are sent later."""
        due = min(round(elapsed_s * _ORDERS_PER_S) - self.sent, _ORDERS_PER_S)
        for number in range(self.sent + 1, self.sent + 1 + max(due, 0)):
            after = _LATER_S if number % _LATER_ONE_IN == 0 else None
            self._pending[number] = client.send(self._subject, str(number).encode(), key=f"o-{number}", after=after)
            self.sent = number
        self._collect()

    def _collect(self) -> None:
        for number in [number for number, each in self._pending.items() if each.done()]:
            if self._pending.pop(number).exception() is None:
                self.stored.add(number)
            else:
                self.failed += 1

    def _consume(self, consumer: Consumer) -> None:
        with consumer:
            while not self._is_ending:
                for message in consumer.take(timeout=_TAKE_S):
                    self._note(int(message.payload))
                    message.ack()

    def _note(self, number: int) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._last_ns is not None:
            self._worst_s = max(self._worst_s, (now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        self.repeated += number in self.received
        self.received.add(number)

    # --- what came of it ---------------------------------------------------------------------------------------------

    @property
    def lost(self) -> set[int]:
        """Orders that were stored and never received."""
        return self.stored - self.received

    def is_complete(self) -> bool:
        """Whether every order sent has its receipt, and every order stored was received."""
        self._collect()
        return not self._pending and not self.lost

    def sentence(self) -> str:
        waiting = len(self._pending)
        return (
            f"orders: {self.sent:,} sent, {len(self.stored):,} stored, {len(self.received):,} received; "
            f"{waiting:,} wait for an answer, {len(self.lost):,} are on their way or due later"
        )

    def sum_up(self) -> list[str]:
        later = sum(number % _LATER_ONE_IN == 0 for number in self.stored)
        refused = f", {self.failed:,} refused" if self.failed else ""
        unknown = f", {len(self._pending):,} without an answer" if self._pending else ""
        twice = f", {self.repeated:,} of them more than once" if self.repeated else ""
        return [
            f"{self.sent:,} orders sent, {len(self.stored):,} stored{refused}{unknown}; {later:,} were for later",
            f"{len(self.received):,} received{twice}; the longest pause was {output.age(self._worst_s)}",
            f"{len(self.lost):,} lost",
        ]


# --- the show ---------------------------------------------------------------------------------------------------------

SUBJECT = "order.changed"
_LOOK_S = 0.5
_SETTLE_S = 60.0  # until all groups have a master, and their copies are in sync
_DRAIN_S = 30.0  # for what was stored to be consumed
_KILL_FROM_S = 12.0  # a shorter demo has no time for a failover
_COPIES = 2
_KILLED = ("g1", "d1")  # the groups whose masters the demo kills


def cluster(seconds: Seconds = None, data: KeptDirectory = None) -> None:
    """Run a demo cluster on this machine, with a stream of orders and a live table.

    It has ZooKeeper, two meta servers, two broker groups of two copies and a
    delay pair, and is gone at the end. With --seconds the demo kills two masters
    halfway: of a broker group and of the delay pair.

    Exit status 0: every order that was stored was received. Needs Java and
    pyspark, whose jars have a ZooKeeper.
    """
    with output.failures("demo cluster"), directory(data) as root, host.asked_to_end() as ending:
        out = terminal.console()
        out.print("starting ZooKeeper, two meta servers, four brokers and two delay servers ...")
        with running(root) as servers:
            is_whole = _ClusterDemo(out, servers, ending).run(seconds)
    if not is_whole:
        raise typer.Exit(output.Exit.DAMAGE)


class _ClusterDemo:
    """Runs the orders and the live view, and sums up at the end."""

    def __init__(self, out: Console, servers: Cluster, ending: Ending) -> None:
        self._out = out
        self._servers = servers
        self._ending = ending
        self._clock = RealClock()
        self._options = CliOptions(url=servers.url)
        self._killed: dict[str, _Killing] = {}  # masters, by group

    def run(self, seconds: float | None) -> bool:
        """Run the demo; returns whether every stored order was received."""
        found = self._await_settled()
        connections.ask(self._options, Govern(RouteChange.CREATE, SUBJECT, ["g1", "g2"]), Governed)
        with fairway.Client(self._servers.url) as client:
            with Traffic(client, SUBJECT) as traffic:
                self._say_what_to_try(found)
                self._show(client, traffic, seconds)
                self._out.print("no more orders: waiting for what is on its way ...")
                self._drain(traffic)
            return self._sum_up(traffic)

    def _await_settled(self) -> Routed:
        """Wait until every group has a master and its copies are in sync."""
        end_ns = self._clock.monotonic_ns() + int(_SETTLE_S * 1e9)
        while True:
            found = self._look()
            in_sync = [] if found is None else [sum(copy.is_in_sync for copy in each.copies) for each in found.groups]
            if found is not None and in_sync == [_COPIES] * 3 and all(each.is_writable for each in found.groups):
                return found
            if self._clock.monotonic_ns() > end_ns:
                if found is not None:
                    self._out.print(cluster_verb.shown(found))
                words = "; ".join(f"{each.name}: {each.last_words()}" for each in self._servers.servers)
                raise ServerFailed(f"the cluster is not in order after {_SETTLE_S:g} s: {words}")
            host.sleep(_LOOK_S)

    def _look(self) -> Routed | None:
        """The routes; None if no meta server answers."""
        try:
            return connections.everything(self._options)
        except (FairwayError, TimeoutError):
            return None

    # --- live --------------------------------------------------------------------------------------------------------

    def _show(self, client: Client, traffic: Traffic, seconds: float | None) -> None:
        with screen(self._out) as update:
            for elapsed_s, is_look, is_due in rounds(self._ending, seconds, _LOOK_S):
                traffic.send(client, elapsed_s)
                for name in self._servers.revive():
                    self._out.print(f"{name} was away; it is back")
                if not is_look:
                    continue
                found = self._look()
                update(self._view(found, traffic), is_due)
                if seconds is not None and seconds >= _KILL_FROM_S and elapsed_s >= seconds / 2:
                    self._follow_killings(found)

    def _view(self, found: Routed | None, traffic: Traffic) -> RenderableType:
        from rich.console import Group as RichGroup
        from rich.text import Text

        servers = [(each.name, each.pid) for each in self._servers.servers]  # suggests what to kill
        known = [("zookeeper", self._servers.zookeeper.servers[0].pid), *servers]
        processes = "processes: " + ", ".join(f"{name} {pid or 'away'}" for name, pid in known)
        shown = Text("no meta server answers") if found is None else cluster_verb.shown(found)
        return RichGroup(shown, Text(traffic.sentence()), Text(processes))

    def _follow_killings(self, found: Routed | None) -> None:
        """Kill the masters of two groups once, and measure the time until others lead."""
        for name in _KILLED:
            group = _group(found, name)
            if group is not None:
                self._follow_killing(group)

    def _follow_killing(self, group: GroupRoute) -> None:
        killed, name = self._killed.get(group.name), group.name
        if killed is None:
            master = self._servers.at(group.master)
            if master is not None:
                self._killed[name] = _Killing(group.epoch, self._clock.monotonic_ns())
                self._out.print(f"kill -9 {master.pid}: {master.name}, which leads {name} under epoch {group.epoch}")
                master.kill()
        elif killed.took_s is None and group.epoch > killed.epoch and group.master:
            killed.took_s = (self._clock.monotonic_ns() - killed.at_ns) / 1e9
            heir = self._servers.at(group.master)
            self._out.print(
                f"{heir.name if heir is not None else group.master} leads {name} under epoch {group.epoch}, "
                f"{killed.took_s:.1f} s later, of which a session takes {SESSION_MS / 1_000:g} s to end"
            )

    def _is_awaiting(self) -> bool:
        """Whether a killed master has no successor yet."""
        return any(each.took_s is None for each in self._killed.values())

    # --- the end -----------------------------------------------------------------------------------------------------

    def _drain(self, traffic: Traffic) -> None:
        """Wait until all stored orders are received and every group has a master, or until a timeout."""
        end_ns = self._clock.monotonic_ns() + int(_DRAIN_S * 1e9)
        while self._clock.monotonic_ns() < end_ns:
            if self._is_awaiting():
                self._follow_killings(self._look())
            elif traffic.is_complete():
                return
            self._servers.revive()
            host.sleep(TICK_S)

    def _sum_up(self, traffic: Traffic) -> bool:
        *counts, verdict = traffic.sum_up()
        for sentence in counts:
            self._out.print(sentence, soft_wrap=True)
        self._out.print(verdict, style="bold", soft_wrap=True)
        if self._is_awaiting():
            self._out.print("nobody took over from a master that was killed: see the logs with --data DIR")
            return False
        return not traffic.lost

    def _say_what_to_try(self, found: Routed) -> None:
        groups = [_group(found, name) for name in _KILLED]
        masters = [None if group is None else self._servers.at(group.master) for group in groups]
        pid, delay_pid = ("PID" if master is None else str(master.pid) for master in masters)
        tries = {
            f"export FAIRWAY_URL={self._servers.url} PATH=.venv/bin:$PATH": "",
            "fairway cluster --watch": "who leads, who follows, who is behind",
            f"kill -9 {pid}": "the master of g1: the other copy takes over in seconds",
            f"kill -STOP {pid}": "the same for one that only hangs; -CONT wakes it up",
            f"kill -9 {delay_pid}": "the master of d1: what waits there is sent by the other copy",
            f"fairway subject show {SUBJECT}": "which broker groups carry it",
            "fairway cluster drain g2": "no new messages to g2; undone with --off",
            f"fairway tail {SUBJECT} --json": "what is sent",
            "fairway delay count": "what waits at the delay servers",
        }
        say_tries(self._out, f"Everything is up. Whoever is killed comes back after {AWAY_S:g} s.", tries)


@dataclass
class _Killing:
    """Of a master, by the show itself."""

    epoch: int
    at_ns: int
    took_s: float | None = None  # until another copy led


def _group(found: Routed | None, name: str) -> GroupRoute | None:
    return None if found is None else next((each for each in found.groups if each.name == name), None)
