"""What lies between the copies of a broker group, ZooKeeper and clients, and how it is cut.

A link is of one copy, and has one of three kinds:

    replication   from the other copies to this one
    registry      from this copy to every server of ZooKeeper
    clients       from all clients to this copy

and four ways to fail:

    cut           connections break, and none are made
    freeze        they stay, and nothing gets through: either side only notices by waiting
    there, back   the same in one direction: from who dials to who listens, or back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tests.support.cable import Cable
from tests.support.ports import free_port

LINKS = ("replication", "registry", "clients")
FORMS = ("cut", "freeze", "there", "back")


class Wires(Protocol):
    """Of one broker group; copies are counted from 0."""

    name: str

    def under(self, copy: int) -> Sequence[str]:
        """The command that a copy's process is started by, if not itself."""

    def listens(self, copy: int) -> tuple[str, int]:
        """Where a copy listens."""

    def advertised(self, copy: int) -> tuple[str, int]:
        """Where other copies reach it."""

    def client_address(self, copy: int) -> tuple[str, int]:
        """Where clients reach it."""

    def registry_hosts(self, copy: int) -> str:
        """Where it finds ZooKeeper."""

    def fail(self, link: str, copy: int, form: str) -> None: ...

    def mend(self) -> None:
        """Everything."""

    def close(self) -> None: ...


class ProxyWires:
    """A proxy on every link, for wherever the machine allows nothing better."""

    name = "proxies"

    def __init__(self, copies: int, zookeeper_ports: Sequence[int]) -> None:
        self._ports = [free_port() for _ in range(copies)]
        self._cables: dict[tuple[str, int], list[Cable]] = {}
        for copy, port in enumerate(self._ports):
            self._cables["replication", copy] = [Cable(port)]
            self._cables["clients", copy] = [Cable(port)]
            self._cables["registry", copy] = [Cable(each) for each in zookeeper_ports]

    def under(self, copy: int) -> Sequence[str]:
        return ()

    def listens(self, copy: int) -> tuple[str, int]:
        return "127.0.0.1", self._ports[copy]

    def advertised(self, copy: int) -> tuple[str, int]:
        return "127.0.0.1", self._cables["replication", copy][0].port

    def client_address(self, copy: int) -> tuple[str, int]:
        return "127.0.0.1", self._cables["clients", copy][0].port

    def registry_hosts(self, copy: int) -> str:
        return ",".join(f"127.0.0.1:{cable.port}" for cable in self._cables["registry", copy])

    def fail(self, link: str, copy: int, form: str) -> None:
        for cable in self._cables[link, copy]:
            if form == "cut":
                cable.cut()
            else:
                cable.freeze(there=form != "back", back=form != "there")

    def mend(self) -> None:
        for cables in self._cables.values():
            for cable in cables:
                cable.mend()

    def close(self) -> None:
        for cables in self._cables.values():
            for cable in cables:
                cable.close()
