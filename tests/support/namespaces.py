"""Every copy of a broker group on a machine of its own, as far as its network is concerned: a namespace of Linux.

    copy i ──── copy j      a pair of devices for every two of them
      │  └───── clients     who stay where the tests run, as ZooKeeper does
      └──────── registry    where a proxy leads on to ZooKeeper, which listens on loopback alone

Packets of a link that fails are sent to a hardware address that nobody has, so they vanish without an error, in the
given direction. Where the link is cut, there is no route at all, and a connection attempt fails at once. Everything
ends with the processes that hold the namespaces, and those end with the one that started them.
"""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import NamedTuple

from tests.support.cable import Cable

PORT = 20880
NOBODY = "02:00:00:00:00:99"
HERE = ""  # the namespace that the tests run in
NEEDED = ("ip", "nsenter", "setpriv", "unshare")
_START_S = 10.0


class NotAllowed(Exception):
    """This machine makes no namespaces for us."""


class Way(NamedTuple):
    """From one namespace to an address, and by which device and under which own address."""

    space: str  # the id of a process in it
    to: str
    device: str
    own: str


class NamespaceWires:
    """`Wires` (see `wires`) of real networks. `NotAllowed` where the machine has none to give."""

    name = "namespaces"

    def __init__(self, copies: int, zookeeper_ports: Sequence[int]) -> None:
        missing = [tool for tool in NEEDED if shutil.which(tool) is None]
        if missing:
            raise NotAllowed(f"there is no {', '.join(missing)}")
        chance = random.SystemRandom()
        self._net = f"10.{chance.randrange(64, 255)}.{chance.randrange(255)}"
        self._tag = f"fw{chance.randrange(1 << 16):04x}"
        self._holders: list[subprocess.Popen[bytes]] = []
        self._ways: dict[tuple[str, int], tuple[list[Way], list[Way]]] = {}  # by link: there, back
        self._failed: list[tuple[Way, bool]] = []
        self._cables: list[Cable] = []
        try:
            self._build(copies)
            self._cables = [Cable(port, self._registry) for port in zookeeper_ports]
        except BaseException:
            self.close()
            raise

    def _build(self, copies: int) -> None:
        for _ in range(copies):
            self._hold()
        for copy in range(copies):
            clients = self._join(HERE, copy, f"{self._tag}c{copy}", self._clients, self._address(copy))
            registry = self._join(HERE, copy, f"{self._tag}z{copy}", self._registry, self._address(copy + 100))
            self._ways["clients", copy] = ([clients[0]], [clients[1]])
            self._ways["registry", copy] = ([registry[1]], [registry[0]])
            self._ways["replication", copy] = ([], [])
        for one in range(copies):
            for other in range(one + 1, copies):
                there, back = self._join(
                    self._space(one), other, f"{self._tag}p{one}{other}", self._address(one), self._address(other)
                )
                for copy, to, away in ((other, there, back), (one, back, there)):
                    self._ways["replication", copy][0].append(to)
                    self._ways["replication", copy][1].append(away)

    @property
    def _clients(self) -> str:
        return f"{self._net}.254"

    @property
    def _registry(self) -> str:
        return f"{self._net}.253"

    def _address(self, copy: int) -> str:
        return f"{self._net}.{copy + 1}"

    def _space(self, copy: int) -> str:
        return str(self._holders[copy].pid)

    def _hold(self) -> None:
        """A namespace, and a process that keeps it."""
        command = ["setpriv", "--pdeathsig", "KILL", "--", "unshare", "-n", "--", "sleep", "infinity"]
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._holders.append(holder)
        deadline = time.monotonic() + _START_S
        while _inode(str(holder.pid)) == _inode("self"):
            if holder.poll() is not None or time.monotonic() > deadline:
                raise NotAllowed("`unshare -n` is refused")
            time.sleep(0.005)
        self._ip(str(holder.pid), "link", "set", "lo", "up")

    def _join(self, near: str, copy: int, device: str, near_address: str, far_address: str) -> tuple[Way, Way]:
        """A pair of devices from a namespace to a copy's; the ways there and back."""
        far, peer = self._space(copy), f"{device}x"
        self._ip(near, "link", "add", device, "type", "veth", "peer", "name", peer)
        self._ip(near, "link", "set", peer, "netns", far)
        there = Way(near, far_address, device, near_address)
        back = Way(far, near_address, peer, far_address)
        for way in (there, back):
            self._ip(way.space, "link", "set", way.device, "up")
            self._ip(way.space, "address", "replace", f"{way.own}/32", "dev", way.device)
        for way in (there, back):
            self._route(way)
        return there, back

    def _route(self, way: Way) -> None:
        self._ip(way.space, "route", "replace", way.to, "dev", way.device, "src", way.own)

    def _ip(self, space: str, *words: str) -> None:
        command = ["ip", *words] if space == HERE else ["nsenter", "-t", space, "-n", "ip", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise NotAllowed(f"`{' '.join(command)}`: {done.stderr.strip()}")

    # --- as a form of `Wires` ----------------------------------------------------------------------------------------

    def under(self, copy: int) -> Sequence[str]:
        return (shutil.which("nsenter") or "nsenter", "-t", self._space(copy), "-n", "--")

    def listens(self, copy: int) -> tuple[str, int]:
        return self._address(copy), PORT

    def advertised(self, copy: int) -> tuple[str, int]:
        return self.listens(copy)

    def client_address(self, copy: int) -> tuple[str, int]:
        return self.listens(copy)

    def registry_hosts(self, copy: int) -> str:
        return ",".join(f"{self._registry}:{cable.port}" for cable in self._cables)

    def fail(self, link: str, copy: int, form: str) -> None:
        there, back = self._ways[link, copy]
        for way in [*(there if form != "back" else []), *(back if form != "there" else [])]:
            if form == "cut":
                self._ip(way.space, "route", "replace", "unreachable", way.to)
            else:
                self._ip(way.space, "neighbour", "replace", way.to, "lladdr", NOBODY, "dev", way.device, "nud",
                         "permanent")  # fmt: skip
            self._failed.append((way, form == "cut"))

    def mend(self) -> None:
        while self._failed:
            way, is_cut = self._failed.pop()
            if is_cut:
                self._route(way)
            else:
                self._ip(way.space, "neighbour", "delete", way.to, "dev", way.device)

    def close(self) -> None:
        for cable in self._cables:
            cable.close()
        for holder in self._holders:
            holder.kill()
            holder.wait()


def _inode(process: str) -> str:
    """What names a process's network namespace."""
    done = subprocess.run(["readlink", f"/proc/{process}/ns/net"], capture_output=True, text=True, check=False)
    return done.stdout
