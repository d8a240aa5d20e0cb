"""Links that are told to go elsewhere: by who answers and is of no use, and by whoever knows better."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager

import pytest

from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import RealClock
from fairway.runtime.loop_link import LoopLink
from fairway.runtime.net import RealNet
from fairway.runtime.threaded_link import NOBODY, Link

WAIT_S = 30.0
HOST = "127.0.0.1"


class Caller:
    """A core that says what it is told to, and counts its connections."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.connections = 0
        self.losses = 0
        self.failures: list[str] = []
        self.is_of_no_use = False
        self.is_closed = False
        self._is_over = False
        self._dial_ns: int | None = 0

    def dial_due(self) -> int | None:
        return self._dial_ns

    def moves_on(self) -> bool:
        moves_on, self.is_of_no_use = self.is_of_no_use, False
        return moves_on

    def move(self, now_ns: int) -> None:
        if self._dial_ns is None:
            self._is_over = True
        else:
            self._dial_ns = now_ns

    def give_up(self) -> None:
        """Whoever answers is of no use."""
        self.is_of_no_use = self._is_over = True

    def connected(self, now_ns: int) -> None:
        self._dial_ns = None
        self.connections += 1

    def unreachable(self, sentence: str, now_ns: int) -> None:
        self.failures.append(sentence)
        self._dial_ns = now_ns + int(WAIT_S * 1e9)  # only somebody who knows better makes it sooner

    def lost(self, sentence: str, now_ns: int) -> None:
        self.losses += 1
        self._is_over = False
        self._dial_ns = now_ns

    def feed(self, data: bytes, now_ns: int) -> None:
        """Nothing is ever heard."""

    def take(self, now_ns: int) -> Sequence[Bytes]:
        said, self.said = self.said, []
        return said

    def is_over(self) -> bool:
        return self._is_over

    def next_deadline(self) -> int | None:
        return None

    def callbacks(self) -> Sequence[Callable[[], None]]:
        return ()

    def close(self, now_ns: int) -> None:
        self.is_closed = True
        self._dial_ns = None


@pytest.fixture
def servers() -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        made = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(2)]
        for each in made:
            each.settimeout(WAIT_S)
        yield made


def places(servers: Sequence[socket.socket]) -> list[tuple[str, int]]:
    return [(HOST, server.getsockname()[1]) for server in servers]


@contextmanager
def linked(core: Caller, addresses: Sequence[tuple[str, int]]) -> Iterator[Link]:
    link = Link(core, addresses, RealClock(), at_exit=lambda: None)
    link.start()
    try:
        yield link
    finally:
        link.close(WAIT_S)


def test_who_is_of_no_use_is_followed_by_the_next(servers: list[socket.socket]) -> None:
    core = Caller()
    with linked(core, places(servers)) as link, closing(servers[0].accept()[0]):
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        with link.lock:
            core.give_up()
        link.stir()
        with closing(servers[1].accept()[0]):
            assert link.wait(lambda: core.connections == 2, WAIT_S)


def test_another_leader_is_dialed_though_the_old_one_reads_nothing(servers: list[socket.socket]) -> None:
    core = Caller()
    old, new = places(servers)
    with linked(core, [old]) as link, closing(servers[0].accept()[0]):
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        with link.lock:
            core.said.append(bytes(32 << 20))  # more than any socket takes
        link.pump()
        link.redirect([new, old], new)
        with closing(servers[1].accept()[0]):
            assert link.wait(lambda: core.connections == 2, WAIT_S)


def test_the_same_leader_is_not_left(servers: list[socket.socket]) -> None:
    core = Caller()
    old, new = places(servers)
    with linked(core, [old]) as link, closing(servers[0].accept()[0]):
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        link.redirect([old, new], old)
        link.redirect([new, old], None)
        assert not link.wait(lambda: core.losses > 0, 0.1)


def test_who_waits_to_dial_is_sent_on_at_once(servers: list[socket.socket]) -> None:
    core = Caller()
    with linked(core, []) as link:
        assert link.wait(lambda: bool(core.failures), WAIT_S)
        assert core.failures == [NOBODY]
        link.redirect(places(servers), places(servers)[0])
        with closing(servers[0].accept()[0]):
            assert link.wait(lambda: core.connections == 1, WAIT_S)


def test_an_attempt_that_nobody_answers_is_called_off(servers: list[socket.socket]) -> None:
    with socket.create_server((HOST, 0), backlog=1) as full, ExitStack() as stack:
        deaf = full.getsockname()
        for _ in range(4):  # who comes now gets no answer, as from a host that is gone
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(deaf)
        core = Caller()
        with linked(core, [deaf]) as link:
            link.redirect(places(servers), places(servers)[0])
            with closing(servers[0].accept()[0]):
                assert link.wait(lambda: core.connections == 1, WAIT_S)


def test_on_a_loop_it_is_the_same(servers: list[socket.socket]) -> None:
    old, new = places(servers)

    async def main() -> tuple[int, int]:
        core = Caller()
        link = LoopLink(core, [old], RealNet(), RealClock())
        assert await link.wait(lambda: core.connections == 1, WAIT_S)
        core.said.append(bytes(32 << 20))
        link.pump()
        link.redirect([new, old], new)
        assert await link.wait(lambda: core.connections == 2, WAIT_S)
        core.give_up()
        link.pump()
        assert await link.wait(lambda: core.connections == 3, WAIT_S)
        link.abort()
        return core.connections, core.losses

    assert asyncio.run(main()) == (3, 2)


def test_on_a_loop_who_waits_to_dial_is_sent_on_at_once(servers: list[socket.socket]) -> None:
    async def main() -> list[str]:
        core = Caller()
        link = LoopLink(core, [], RealNet(), RealClock())
        assert await link.wait(lambda: bool(core.failures), WAIT_S)
        link.redirect(places(servers), places(servers)[0])
        assert await link.wait(lambda: core.connections == 1, WAIT_S)
        link.abort()
        return core.failures

    assert asyncio.run(main()) == [NOBODY]
