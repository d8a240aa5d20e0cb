"""Consumers on call send what consumers send that the line asks at every `take`, and never later.

Two worlds get the same steps. Each has a broker, a line and three consumers: in one world on call, in the other not.
"""

from __future__ import annotations

from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from fairway.errors import Refused
from fairway.groups import GroupConfig
from fairway.protocol import Connection, Role
from fairway.protocol.connection_states import ConnectionOptions, RequestReceived
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import Message
from fairway.protocol.line import NEVER_NS, Answer, Line
from fairway.runtime.rng import SeededRng
from tests.support.mini_broker import MiniBroker

NAMES = ("ann", "ben", "cid")
LEASE_MS = 2_000
PREFETCH = 8


class World:
    """A broker, and three consumers on one line."""

    def __init__(self, *, is_on_call: bool, requests_max: int = 1_000) -> None:
        self.broker = MiniBroker(GroupConfig(lease_ms=LEASE_MS, lot_messages_max=5))
        self.line = Line(SeededRng("line"))
        self._options = ConnectionOptions(requests_max=requests_max, has_heartbeat=False)
        self._server: Connection | None = None
        self._requests: list[RequestReceived] = []  # without an answer
        self.sessions: dict[str, ConsumerSession] = {}
        self.held: dict[str, list[Message]] = {name: [] for name in NAMES}
        self.asked: list[str] = []  # in the last step
        for name in NAMES:
            options = ConsumerOptions("orders", "billing", name, prefetch_messages=PREFETCH)
            session = ConsumerSession(options, self.broker, SeededRng(name), call=self.line.call)
            session.set_take_count(PREFETCH)  # the target does not adapt: it depends on how often a session is asked
            self.sessions[name] = session
            self.line.add(session, 0, session.detach, is_on_call=is_on_call)
        self.connect()

    @property
    def now_ns(self) -> int:
        return self.broker.now_ns

    def connect(self) -> None:
        self.line.connected(self.now_ns)
        self._server = Connection(Role.SERVER, self.now_ns, self._options)
        self.turn()

    def cut(self) -> None:
        self._server, self._requests = None, []
        self.broker.bound.clear()
        self.line.lost("cut", self.now_ns)

    def turn(self) -> None:
        """Write what there is to write, until nothing more comes of it."""
        self.asked = []
        for _ in range(4):
            data = b"".join(map(bytes, self.line.take(self.now_ns)))
            if self._server is None:
                return
            for event in self._server.feed(data, self.now_ns):
                if isinstance(event, RequestReceived):
                    self._requests.append(event)
                    self.asked.append(repr(event.message))
            self.line.feed(b"".join(map(bytes, self._server.take())), self.now_ns)

    def answer(self, *, is_durable: bool = True) -> None:
        """Answer everything, in an order that does not depend on the line's."""
        requests, self._requests = self._requests, []
        assert self._server is not None
        for request in sorted(requests, key=lambda each: repr(each.message)):
            told = self.broker.handle(request.message, self._server)
            if isinstance(told, Answer):
                self._server.respond(request.correlation, told.message, told.attachments)
            elif isinstance(told, Refused):
                self._server.refuse(request.correlation, told)
        self.broker.sync(len(self.broker.events))
        self.line.feed(b"".join(map(bytes, self._server.take())), self.now_ns)

    def due_ns(self) -> int:
        due_ns = self.line.next_deadline()
        return NEVER_NS if due_ns is None else due_ns

    def step(self, what: str, name: str, number: int) -> None:
        session, held = self.sessions[name], self.held[name]
        match what:
            case "produce":
                self.broker.produce([b"x"] * number)
            case "take":
                held += session.take_messages(number)
            case "ack":
                session.ack(held[:number])
                del held[:number]
            case "retry" if held:
                held.pop(0).retry(after=number / 10)
            case "release" if held:
                held.pop().release()
            case "pause":
                session.pause()
            case "resume":
                session.resume()
            case "hand back":
                session.hand_back()
            case "answer" if self._server is not None:
                self.answer()
            case "cut" if self._server is not None:
                self.cut()
            case "connect" if self._server is None:
                self.connect()
        self.turn()

    def advance(self, ms: int) -> None:
        self.broker.advance(ms)
        self.turn()


STEPS = ("produce", "take", "take", "ack", "ack", "answer", "answer", "answer", "retry", "release", "pause", "resume")
steps = st.lists(
    st.tuples(
        st.sampled_from([*STEPS, "advance", "due", "cut", "connect", "connect", "hand back"]),
        st.sampled_from(NAMES),
        st.integers(1, 12),
    ),
    max_size=60,
)


def both(worlds: list[World], what: str, name: str, number: int) -> None:
    if what == "due":
        due_ns = min(world.due_ns() for world in worlds)
        what, number = "advance", max(-(-(due_ns - worlds[0].now_ns) // 1_000_000), 0)
        number = min(number, LEASE_MS // 4)
    for world in worlds:
        if what == "advance":
            world.advance(number)
        else:
            world.step(what, name, number)


# what a pull leaves free: nobody asks the session on call while that pull is in flight
FREE_SINCE_THE_PULL = [("produce", "ann", 5), ("answer", "ann", 1), ("advance", "ann", 5), ("answer", "ann", 1)]


@settings(max_examples=300)
@example(FREE_SINCE_THE_PULL)
@given(steps)
def test_sessions_on_call_send_the_same_and_never_later(taken: list[tuple[str, str, int]]) -> None:
    always, on_call = worlds = [World(is_on_call=False), World(is_on_call=True)]
    for what, name, number in taken:
        both(worlds, what, name, number)
        assert sorted(on_call.asked) == sorted(always.asked), (what, name, number)
        assert on_call.due_ns() <= always.due_ns(), "a deadline would be missed"


@settings(max_examples=100)
@given(steps, st.integers(1, 3))
def test_a_full_connection_starves_no_session_on_call(taken: list[tuple[str, str, int]], requests_max: int) -> None:
    world = World(is_on_call=True, requests_max=requests_max)
    for what, name, number in taken:
        both([world], what, name, number)
    both([world], "connect", "ann", 1)
    for name in NAMES:
        world.step("resume", name, 1)
    for _ in range(40):
        for name in NAMES:
            world.step("take", name, PREFETCH)
            world.step("ack", name, 100)
        world.step("answer", "ann", 1)
        world.advance(100)
    assert world.broker.is_all_done()


def test_the_checker_notices_a_session_that_is_not_called() -> None:
    """Planted: a session that does not call."""
    always, on_call = World(is_on_call=False), World(is_on_call=True)
    session: Any = on_call.sessions["ann"]
    session._call = lambda _: None
    differs = False
    for what in ("answer", "produce", "answer", "answer", "take", "ack", "answer"):
        both([always, on_call], what, "ann", PREFETCH)
        differs = differs or sorted(on_call.asked) != sorted(always.asked)
    assert differs
