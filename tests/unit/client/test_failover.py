"""Clients of a real cluster of processes: a master is killed under them, and nothing that they do fails."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import fairway
import fairway.aio
from fairway.lookup.registries import Inquirer
from fairway.protocol.route_messages import ClientRole, Govern, Governed, Route, RouteChange, Routed
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.process import Child
from fairway.runtime.rng import RealRng
from tests.support.ports import free_port
from tests.unit.client.broker import READY_S, WAIT_S

pytestmark = pytest.mark.slow

SUBJECT = "orders"


class Real:
    """A meta server, two copies of group a, one of group b."""

    def __init__(self, data: Path, stack: ExitStack) -> None:
        self._stack = stack
        port = free_port()
        self.address = ("127.0.0.1", port)
        self.url = f"meta://127.0.0.1:{port}"
        self._start("meta", "--registry", f"sqlite:{data / 'registry'}", "--port", str(port))
        self.copies = {
            (group, number): self._broker(data, group, number) for group, number in (("a", 1), ("a", 2), ("b", 1))
        }

    def _broker(self, data: Path, group: str, number: int) -> tuple[Child, int]:
        port = free_port()
        flags = ("--group", group, "--data", str(data / f"{group}{number}"), "--port", str(port))
        return self._start("broker", "--registry", self.url, "--session-ms", "2000", *flags), port

    def _start(self, *arguments: str) -> Child:
        child = self._stack.enter_context(Child("fairway", *arguments))
        assert child.line(timeout_s=READY_S)
        return child

    async def ask(self, message: Route | Govern) -> Routed | Governed:
        inquirer = Inquirer(RealNet(), RealClock(), RealRng(), [self.address], name="test")
        try:
            return await inquirer.ask(message, Routed if isinstance(message, Route) else Governed, WAIT_S)
        finally:
            await inquirer.close()

    async def prepare(self) -> None:
        """Both copies of a are in sync, and the subject is on both groups."""
        for _ in range(300):
            routed = await self.ask(Route(ClientRole.TOOL, []))
            assert isinstance(routed, Routed)
            if sum(copy.is_in_sync for group in routed.groups for copy in group.copies) == 3:
                break
            await asyncio.sleep(0.1)
        await self.ask(Govern(RouteChange.CREATE, SUBJECT, ["a", "b"]))

    def kill_master_of_a(self) -> None:
        routed = asyncio.run(self.ask(Route(ClientRole.TOOL, [])))
        assert isinstance(routed, Routed)
        [master] = [group.master for group in routed.groups if group.name == "a"]
        [child] = [child for child, port in self.copies.values() if master == f"127.0.0.1:{port}"]
        os.kill(child.pid, signal.SIGKILL)


@pytest.fixture
def real(tmp_path: Path) -> Iterator[Real]:
    with ExitStack() as stack:
        made = Real(tmp_path, stack)
        asyncio.run(made.prepare())
        yield made


def test_a_master_is_killed_and_nobody_notices(real: Real) -> None:
    sent: set[int] = set()
    got: Counter[int] = Counter()
    has_news, is_over = threading.Event(), threading.Event()

    def produce(client: fairway.Client) -> None:
        number = 0
        while not is_over.is_set():
            pendings = [client.send(SUBJECT, b"%d" % each) for each in range(number, number + 20)]
            for pending in pendings:
                pending.result(2 * WAIT_S)
            sent.update(range(number, number + 20))
            number += 20
            has_news.set()

    with fairway.connect(real.url) as client, fairway.connect(real.url) as other:
        producing = threading.Thread(target=produce, args=(client,))
        producing.start()
        with other.consumer(SUBJECT, "g") as consumer:
            groups: Counter[str] = Counter()
            killed_at = 0
            while not (is_over.is_set() and not producing.is_alive() and sent <= got.keys()):
                for message in consumer.take(100, WAIT_S):
                    got[int(message.payload)] += 1
                    groups[message.broker_group] += 1
                    message.ack()
                if not killed_at and len(got) > 500:
                    killed_at = len(got)
                    real.kill_master_of_a()
                    groups.clear()
                if killed_at and groups["a"] > 200:
                    is_over.set()  # the other copy leads, and has taken new messages
        producing.join(WAIT_S)
    assert sent <= got.keys(), "nothing that was acknowledged is lost"
    assert len(got) > 500


def test_a_client_on_a_loop_goes_on_too(real: Real) -> None:
    async def main() -> list[int]:
        async with fairway.aio.connect(real.url) as client, client.consumer(SUBJECT, "g") as consumer:
            numbers = []
            for number in range(40):
                if number == 20:
                    await asyncio.to_thread(real.kill_master_of_a)
                await client.send(SUBJECT, b"%d" % number)
                message = await consumer.poll(2 * WAIT_S)
                assert message is not None
                numbers.append(int(message.payload))
                message.ack()
            return numbers

    assert sorted(asyncio.run(main())) == list(range(40))
