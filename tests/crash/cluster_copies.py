"""The copies of one broker group as processes: started, killed, stopped; who of them leads, as the registry says."""

from __future__ import annotations

import secrets
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from fairway.errors import FairwayError
from fairway.registry.layout import RegisteredCopy
from tests.crash.broker_rounds import START_S_MAX, Process
from tests.crash.cluster_server import Orders
from tests.crash.cluster_view import View
from tests.support.wires import Wires

PATIENCE_S = 60.0  # for the group to be whole again


class Copy:
    """One place among the copies, through as many lives as it takes."""

    def __init__(self, folder: Path, number: int, wires: Wires, orders: Orders) -> None:
        self.number = number
        self.root = folder / f"copy-{number}"
        self.address = wires.advertised(number)
        self.process: Process | None = None
        self.failures: list[str] = []
        self._folder = folder
        self._under = wires.under(number)
        self._lives = 0
        self._orders = msgspec.structs.replace(
            orders,
            root=str(self.root),
            listens=wires.listens(number),
            advertised=self.address,
            registry=f"zookeeper://{wires.registry_hosts(number)}",
            is_small=number != 0,  # the first one writes large segments while it leads: others must take them as well
        )

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.is_alive

    def start(self) -> None:
        """And wait until it listens."""
        self._lives += 1
        text = msgspec.json.encode(self._orders).decode()
        name = f"copy-{self.number}.{self._lives}"
        process = Process(self._folder, name, "tests.crash.cluster_server", text, under=self._under)
        self.process = process
        deadline = time.monotonic() + START_S_MAX
        while " ready at " not in process.said.read_text() and process.is_alive and time.monotonic() < deadline:
            time.sleep(0.01)
        if " ready at " not in process.said.read_text():
            raise FairwayError(f"copy {self.number} does not start: {process.failure or 'it says nothing'}")

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self._look_back(self.process)
            self.process = None

    def stop(self) -> None:
        """SIGTERM, and wait until it has ended in order."""
        process = self.process
        if process is None:
            return
        process.send(signal.SIGTERM)
        if not process.wait(START_S_MAX):
            self.failures.append(f"{process.name} does not stop")
            process.kill()
        self._look_back(process)
        self.process = None

    def _look_back(self, process: Process) -> None:
        if process.failure:
            self.failures.append(process.failure)

    def suspend(self) -> None:
        if self.process is not None:
            self.process.send(signal.SIGSTOP)

    def resume(self) -> None:
        if self.process is not None:
            self.process.send(signal.SIGCONT)

    def wipe(self) -> None:
        """What a new disk is."""
        shutil.rmtree(self.root)

    def check(self) -> None:
        """`FairwayError` if it has ended by itself."""
        process = self.process
        if process is not None and not process.is_alive:
            raise FairwayError(f"copy {self.number} has ended: {process.failure or 'with status 0, unasked'}")


class Copies:
    """All of one group, whose name no other one has: many may share a ZooKeeper."""

    def __init__(
        self, folder: Path, count: int, wires: Wires, hosts: str, *, session_ms: int, min_in_sync: int, flaw: str = ""
    ) -> None:
        self.session_ms = session_ms
        orders = Orders("", f"g{secrets.token_hex(4)}", ("", 0), ("", 0), "", session_ms, min_in_sync, flaw=flaw)
        self.all = [Copy(folder, number, wires, orders) for number in range(count)]
        self._wires = wires
        self.view = View(hosts, orders.group)

    def start(self) -> None:
        for copy in self.all:
            copy.start()

    def close(self) -> None:
        for copy in self.all:
            if copy.process is not None and copy.process.is_alive:
                copy.process.kill()
        self.view.close()

    @property
    def failures(self) -> list[str]:
        return [sentence for copy in self.all for sentence in copy.failures]

    # --- who is who --------------------------------------------------------------------------------------------------

    @property
    def url(self) -> str:
        """For clients that know all of them."""
        places = ("{}:{}".format(*self._wires.client_address(copy.number)) for copy in self.all)
        return f"fairway://{','.join(places)}"

    def of(self, member: RegisteredCopy) -> Copy:
        return next(copy for copy in self.all if copy.address == (member.host, member.port))

    def master(self) -> Copy:
        """The one that leads; waits until there is one."""
        found: list[Copy] = []

        def is_led() -> bool:
            record, members = self.view.record, self.view.members()
            if record is not None and record.master in members:
                found.append(self.of(members[record.master]))
            return bool(found)

        self.wait("a master", is_led)
        return found[-1]

    def replicas(self) -> list[Copy]:
        master = self.master()
        return [copy for copy in self.all if copy is not master]

    # --- waiting -----------------------------------------------------------------------------------------------------

    def wait(self, what: str, is_so: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            if time.monotonic() > deadline:
                raise FairwayError(f"in vain for {PATIENCE_S:g} s: {what}; {self.told()}")
            for copy in self.all:
                copy.check()
            time.sleep(0.02)

    def await_epoch(self, above: int) -> None:
        self.wait(f"an epoch above {above}", lambda: self.view.epoch > above)

    def await_whole(self) -> None:
        """Until every copy lives and is in sync."""
        self.wait("all copies in sync", self._is_whole)

    def _is_whole(self) -> bool:
        record, members = self.view.record, self.view.members()
        if record is None or record.master not in members:
            return False
        in_sync = {self.of(members[each]).number for each in record.in_sync if each in members}
        return len(in_sync) == len(self.all) == len(record.in_sync)

    def told(self) -> str:
        """What the registry says, for a sentence."""
        return f"the registry says {self.view.record}, {sorted(self.view.members().items())}"

    def master_ends(self) -> tuple[int, int]:
        """The synced ends that the master shows in the registry."""
        record, members = self.view.record, self.view.members()
        if record is None or record.master not in members:
            return 0, 0
        messages, actions = members[record.master].ends or [0, 0]
        return messages, actions
