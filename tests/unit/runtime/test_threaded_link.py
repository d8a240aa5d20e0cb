"""The threaded link with a core that echoes lines: it dials, writes, reads, keeps time, and never waits in a write."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager

import pytest

from fairway.errors import Misuse
from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import RealClock
from fairway.runtime.threaded_link import NEVER_NS, Link, LinkFailed

WAIT_S = 30.0
NS_PER_MS = 1_000_000


class Lines:
    """A core whose conversation is lines: what is said is written, what is heard is kept."""

    def __init__(self) -> None:
        self.said: list[bytes] = []
        self.heard = b""
        self.connections = 0
        self.losses: list[str] = []
        self.failures: list[str] = []
        self.rung = 0  # deadlines that came
        self.threads: set[str] = set()
        self.deadline_ns: int | None = None
        self.is_ending = False
        self.is_of_no_use = False  # whoever answered last
        self.bug: Exception | None = None
        self.later: list[Callable[[], None]] = []
        self._dial_ns: int | None = 0

    def dial_due(self) -> int | None:
        return self._dial_ns

    def moves_on(self) -> bool:
        moves_on, self.is_of_no_use = self.is_of_no_use, False
        return moves_on

    def move(self, now_ns: int) -> None:
        self._dial_ns = now_ns

    def connected(self, now_ns: int) -> None:
        self._dial_ns = None
        self.connections += 1

    def unreachable(self, sentence: str, now_ns: int) -> None:
        self.failures.append(sentence)
        self._dial_ns = now_ns + 5 * NS_PER_MS

    def lost(self, sentence: str, now_ns: int) -> None:
        self.losses.append(sentence)
        self._dial_ns = None if self.is_ending else now_ns

    def feed(self, data: bytes, now_ns: int) -> None:
        if self.bug is not None:
            raise self.bug
        self.heard += data

    def take(self, now_ns: int) -> Sequence[Bytes]:
        self.threads.add(threading.current_thread().name)
        if self.deadline_ns is not None and now_ns >= self.deadline_ns:
            self.deadline_ns = None
            self.rung += 1
        said, self.said = self.said, []
        return said

    def is_over(self) -> bool:
        return self.is_ending

    def next_deadline(self) -> int | None:
        return self.deadline_ns

    def callbacks(self) -> Sequence[Callable[[], None]]:
        later, self.later = self.later, []
        return later


@contextmanager
def linked(core: Lines, *ports: int) -> Iterator[Link]:
    link = Link(core, [("127.0.0.1", port) for port in ports], RealClock(), at_exit=lambda: None)
    link.start()
    try:
        yield link
    finally:
        link.close(WAIT_S)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(WAIT_S)
        yield listening


def port_of(server: socket.socket) -> int:
    port: int = server.getsockname()[1]
    return port


def accepted(server: socket.socket) -> socket.socket:
    connection, _ = server.accept()
    connection.settimeout(WAIT_S)
    return connection


def say(link: Link, core: Lines, data: bytes) -> None:
    with link.lock:
        core.said.append(data)
    link.pump()


def test_the_caller_writes_and_the_reader_reads(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)) as far:
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        core.threads.clear()
        say(link, core, b"hello\n")
        assert far.recv(100) == b"hello\n"
        assert threading.current_thread().name in core.threads
        far.sendall(b"and you\n")
        assert link.wait(lambda: core.heard == b"and you\n", WAIT_S)


def test_a_wait_that_takes_too_long_is_false(server: socket.socket) -> None:
    with linked(Lines(), port_of(server)) as link:
        assert not link.wait(lambda: False, 0.01)


def test_the_reader_wakes_up_for_a_deadline_that_was_set_later(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)):
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        for rung in (1, 2, 3):
            with link.lock:
                core.deadline_ns = RealClock().monotonic_ns() + 20 * NS_PER_MS
                link.schedule()
            assert link.wait(lambda rung=rung: core.rung == rung, WAIT_S)  # type: ignore[misc]


def test_stirring_has_the_core_asked_soon(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)) as far:
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        for number in range(200):  # in a row, too, when the reader naps
            core.said.append(b"%03d\n" % number)
            link.stir()
            if number % 50 == 0:
                assert far.recv(10_000)


def test_a_lost_connection_is_found_again(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link:
        for number in range(1, 4):
            accepted(server).close()
            assert link.wait(lambda number=number: len(core.losses) == number, WAIT_S)  # type: ignore[misc]
        with closing(accepted(server)) as far:
            assert link.wait(lambda: core.connections == 4, WAIT_S)
            say(link, core, b"still here\n")
            assert far.recv(100) == b"still here\n"


class Interrupted(Lines):
    """Ctrl-C comes when bytes have left it and have not reached the socket."""

    is_interrupted = False

    def connected(self, now_ns: int) -> None:
        super().connected(now_ns)
        self.threads.clear()

    def take(self, now_ns: int) -> Sequence[Bytes]:
        said = super().take(now_ns)
        if said and not self.is_interrupted:
            self.is_interrupted = True
            raise KeyboardInterrupt
        return said


def test_an_interrupt_between_taking_and_writing_ends_the_connection(server: socket.socket) -> None:
    """Otherwise what was taken would be missing for ever in a conversation that goes on."""
    core = Interrupted()
    with linked(core, port_of(server)) as link, closing(accepted(server)):
        assert link.wait(lambda: core.connections == 1 and bool(core.threads), WAIT_S)  # the reader has looked
        with pytest.raises(KeyboardInterrupt):
            say(link, core, b"lost\n")
        assert link.wait(lambda: core.connections == 2, WAIT_S)
        with closing(accepted(server)) as far:
            say(link, core, b"again\n")
            assert far.recv(100) == b"again\n"


def test_addresses_are_tried_in_turn(server: socket.socket) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and does not listen
        core = Lines()
        with linked(core, port_of(nobody), port_of(server)) as link, closing(accepted(server)):
            assert link.wait(lambda: core.connections == 1, WAIT_S)
        lonely = Lines()
        with linked(lonely, port_of(nobody)) as link:
            assert link.wait(lambda: len(lonely.failures) >= 3, WAIT_S)
        assert "cannot connect to 127.0.0.1" in lonely.failures[0]


def test_what_the_socket_does_not_take_waits_and_nobody_with_it(server: socket.socket) -> None:
    core, chunk = Lines(), bytes(range(256)) * 4_096
    with linked(core, port_of(server)) as link, closing(accepted(server)) as far:
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        for _ in range(64):  # 64 MiB: more than any socket holds
            say(link, core, chunk)
        far.sendall(b"I read later\n")
        assert link.wait(lambda: core.heard == b"I read later\n", WAIT_S)
        for _ in range(64):
            received = bytearray()
            while len(received) < len(chunk):
                received += far.recv(len(chunk) - len(received))
            assert received == chunk


def test_many_threads_write_in_the_order_in_which_the_core_was_told(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)) as far:
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        order: list[bytes] = []

        def talk(name: int) -> None:
            for number in range(500):
                with link.lock:
                    line = b"%d-%d\n" % (name, number)
                    order.append(line)
                    core.said.append(line)
                link.pump()

        threads = [threading.Thread(target=talk, args=[name]) for name in range(4)]
        for thread in threads:
            thread.start()
        received = b""
        while received.count(b"\n") < 2_000:
            received += far.recv(1 << 16)
        for thread in threads:
            thread.join()
        assert received == b"".join(order)


def test_what_is_left_to_the_reader_is_written_soon_and_whole(server: socket.socket) -> None:
    """Nobody pumps after the last of them; small and large parts keep their order."""
    core = Lines()
    lines = [b"%d " % number * (1 + 5_000 * (number % 100 == 0)) for number in range(2_000)]
    with linked(core, port_of(server)) as link, closing(accepted(server)) as there:
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        for line in lines:
            with link.lock:
                core.said.append(line)
            link.pump_soon()
        heard = b""
        while len(heard) < len(b"".join(lines)):
            heard += there.recv(1 << 16)
    assert heard == b"".join(lines)


def test_a_caller_writes_itself_while_the_reader_sleeps_for_long(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)) as there:
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        while link._asleep_until_ns != NEVER_NS:
            time.sleep(0.001)
        core.threads.clear()
        with link.lock:
            core.said.append(b"now")
        link.pump_soon()
        assert core.threads == {threading.current_thread().name}
        assert there.recv(100) == b"now"


def test_callbacks_run_in_the_reader_without_the_lock_and_must_not_wait(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)):
        found: list[object] = []

        def callback() -> None:
            found.append(link.in_reader)
            with link.lock:
                found.append("free")
            try:
                link.wait(lambda: True)
            except Misuse as problem:
                found.append(problem)

        with link.lock:
            core.later.append(callback)
        link.stir()
        assert link.wait(lambda: len(found) == 3, WAIT_S)
        assert found[:2] == [True, "free"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_that_fails_is_reported_and_the_link_lives_on(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)) as far:
        with link.lock:
            core.later.append(lambda: 1 / 0)  # type: ignore[arg-type]
        link.stir()
        far.sendall(b"still here\n")
        assert link.wait(lambda: core.heard == b"still here\n", WAIT_S)


def test_a_bug_in_the_core_reaches_whoever_waits(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)) as far:
        core.bug = RuntimeError("planted")
        far.sendall(b"x")
        with pytest.raises(LinkFailed) as raised:
            link.wait(lambda: False, WAIT_S)
        assert raised.value.__cause__ is core.bug
        with pytest.raises(LinkFailed):
            link.check()


def test_who_waits_to_be_told_hears_of_it_and_of_a_bug(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)) as far:

        def later(told: Callable[[], None]) -> None:
            core.later.append(told)
            link.stir()

        assert link.wait_told(lambda told: told(), WAIT_S)
        assert link.wait_told(later, WAIT_S)
        assert not link.wait_told(lambda _: None, 0.01)

        def break_down(_: object) -> None:
            core.bug = RuntimeError("planted")
            far.sendall(b"x")

        with pytest.raises(LinkFailed):
            link.wait_told(break_down, WAIT_S)


def test_a_conversation_that_is_over_is_closed_when_all_is_written(server: socket.socket) -> None:
    core = Lines()
    with linked(core, port_of(server)) as link, closing(accepted(server)) as far:
        assert link.wait(lambda: core.connections == 1, WAIT_S)
        with link.lock:
            core.is_ending = True
            core.said.append(b"goodbye\n")
        link.pump()
        link.stir()
        assert far.recv(100) == b"goodbye\n"
        assert far.recv(100) == b""
        assert link.wait(lambda: core.losses == ["the conversation is over"], WAIT_S)


def test_closing_ends_the_thread_also_while_it_dials() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf:
        fillers = [socket.socket() for _ in range(4)]  # its backlog is full: dialing hangs
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(deaf.getsockname())
        with linked(Lines(), port_of(deaf)) as link:
            pass
        assert not link._reader.is_alive()
        for filler in fillers:
            filler.close()
