"""The faults of a broker group, its ZooKeeper and the network between them. Each returns when its worst is over; what
is then still broken, dead or stopped is put right by `heal`."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from tests.crash.cluster_copies import Copies, Copy
from tests.support.wires import FORMS, LINKS, Wires
from tests.support.zookeeper import Ensemble, ZooKeeperServer

FLAPS = (4, 9)  # from, below


@dataclass
class Field:
    """Where it happens."""

    copies: Copies
    wires: Wires
    zookeeper: Ensemble
    rng: random.Random
    dead: list[ZooKeeperServer] = field(default_factory=list)  # of ZooKeeper

    def pause(self, from_s: float, to_s: float) -> None:
        time.sleep(self.rng.uniform(from_s, to_s))

    def heal(self) -> None:
        self.wires.mend()
        for server in self.dead:
            server.start()
        while self.dead:
            self.dead.pop().await_serving()
        for copy in self.copies.all:
            copy.resume()
            if not copy.is_alive:
                copy.check()
                copy.start()

    # --- copies ------------------------------------------------------------------------------------------------------

    def kill_master(self) -> None:
        self._succeed(lambda master: master.kill())

    def kill_master_briefly(self) -> None:
        """It is back before anybody has missed it, or just then."""
        self.copies.master().kill()
        self.pause(0.0, 0.3)

    def kill_replica(self) -> None:
        self.rng.choice(self.copies.replicas()).kill()
        self.pause(0.0, 2.0)

    def kill_in_turn(self) -> None:
        """The master, then its successor."""
        self.kill_master()
        self.pause(0.0, 1.0)
        self.copies.master().kill()
        self.pause(0.0, 1.0)

    def kill_all(self) -> None:
        for copy in self.copies.all:
            copy.kill()
        self.pause(0.0, 2.5)

    def stop_master(self) -> None:
        """SIGSTOP until another one leads, then SIGCONT: it goes on as if nothing had happened."""
        self._succeed(lambda master: master.suspend())
        self.pause(0.0, 1.0)

    def nap_master(self) -> None:
        self.copies.master().suspend()
        self.pause(0.05, self.copies.session_ms / 3_000)

    def wipe_replica(self) -> None:
        replica = self.rng.choice(self.copies.replicas())
        replica.kill()
        replica.wipe()

    def roll(self) -> None:
        """Every copy is stopped by SIGTERM and started again, the master last."""
        for copy in [*self.copies.replicas(), self.copies.master()]:
            copy.stop()
            copy.start()
            self.copies.await_whole()

    def _succeed(self, harm: Callable[[Copy], None]) -> None:
        epoch = self.copies.view.epoch
        harm(self.copies.master())
        self.copies.await_epoch(epoch)

    # --- ZooKeeper ---------------------------------------------------------------------------------------------------

    def kill_zookeeper(self) -> None:
        servers = self.zookeeper.servers
        server = self.zookeeper.leader() if self.rng.randrange(2) else self.rng.choice(servers)
        server.kill()
        self.dead.append(server)
        self.pause(0.0, 3.0)

    def restart_zookeeper(self) -> None:
        for server in self.zookeeper.servers:
            server.kill()
            self.dead.append(server)

    # --- links -------------------------------------------------------------------------------------------------------

    def fail_replication(self, form: str) -> None:
        """For a moment; until a replica is taken for gone; until it is taken for one that lags."""
        self.wires.fail("replication", self.copies.master().number, form)
        self.pause(*self.rng.choice(((0.05, 0.5), (1.0, 2.5), (5.5, 6.5))))

    def kill_beside_failed_replication(self) -> None:
        """What the master answers while nobody follows is what its successor does not have."""
        self.wires.fail("replication", self.copies.master().number, self.rng.choice(FORMS))
        self.pause(0.1, 0.6)
        self.kill_master()

    def fail_registry(self, form: str) -> None:
        self._succeed(lambda master: self.wires.fail("registry", master.number, form))
        self.pause(0.0, 0.5)

    def fail_replica_registry(self, form: str) -> None:
        self.wires.fail("registry", self.rng.choice(self.copies.replicas()).number, form)
        self.pause(0.5, 2 * self.copies.session_ms / 1_000)

    def fail_clients(self, form: str) -> None:
        self.wires.fail("clients", self.copies.master().number, form)
        self.pause(0.2, 3.0)

    def flap(self, link: str) -> None:
        master = self.copies.master().number
        for _ in range(self.rng.randrange(*FLAPS)):
            self.wires.fail(link, master, self.rng.choice(FORMS))
            self.pause(0.02, 0.4)
            self.wires.mend()
            self.pause(0.02, 0.4)


Deed = Callable[[Field], None]


def _flapping(link: str) -> Deed:
    return lambda field: field.flap(link)


def _one_way(rng: random.Random) -> str:
    return rng.choice(("there", "back"))


DEEDS: dict[str, Deed] = {
    "kill master": Field.kill_master,
    "kill master, back at once": Field.kill_master_briefly,
    "kill replica": Field.kill_replica,
    "kill master, replication failed": Field.kill_beside_failed_replication,
    "kill master, then successor": Field.kill_in_turn,
    "kill all": Field.kill_all,
    "stop master past its session": Field.stop_master,
    "stop master for a moment": Field.nap_master,
    "wipe replica": Field.wipe_replica,
    "rolling restart": Field.roll,
    "kill a ZooKeeper server": Field.kill_zookeeper,
    "restart ZooKeeper": Field.restart_zookeeper,
    "replication cut": lambda field: field.fail_replication("cut"),
    "replication frozen": lambda field: field.fail_replication("freeze"),
    "replication one way": lambda field: field.fail_replication(_one_way(field.rng)),
    "master's registry cut": lambda field: field.fail_registry("cut"),
    "master's registry frozen": lambda field: field.fail_registry("freeze"),
    "master's registry one way": lambda field: field.fail_registry(_one_way(field.rng)),
    "replica's registry": lambda field: field.fail_replica_registry(field.rng.choice(FORMS)),
    "clients cut": lambda field: field.fail_clients("cut"),
    "clients frozen": lambda field: field.fail_clients("freeze"),
    "clients one way": lambda field: field.fail_clients(_one_way(field.rng)),
    **{f"{link} flaps": _flapping(link) for link in LINKS},
}

# Somebody else takes over when the master's session has ended, which begins to run out at the latest with the deed.
ABRUPT = ("kill master", "stop master past its session", "master's registry cut", "master's registry frozen")
# These may come while the group has not yet recovered from what was done to it before.
HASTY = ("kill master, back at once", "kill replica", "kill all", "stop master for a moment", "kill a ZooKeeper server",
         "replication cut", "replication frozen", "replication one way", "clients cut", "replica's registry",
         *(f"{link} flaps" for link in LINKS))  # fmt: skip


def deeds(rng: random.Random) -> Iterator[str]:
    """Every kind in every round, for ever."""
    while True:
        yield from rng.sample(sorted(DEEDS), len(DEEDS))
