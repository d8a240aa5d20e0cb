"""Servers on loopback that say what a test tells them to: a copy that follows, and a meta server without a registry."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from fairway.errors import Code, Refused
from fairway.protocol import Connection, ControlMessage, RequestReceived, Role
from fairway.protocol.route_messages import ClientRole, GroupRoute, Route, Routed, SubjectRoute
from fairway.runtime.clock import RealClock

Reply = Callable[[ControlMessage | Refused], None]


class _Talk(asyncio.Protocol):
    """One connection."""

    def __init__(self, server: StubServer) -> None:
        self._server = server
        self._clock = RealClock()
        self._connection = Connection(Role.SERVER, self._clock.monotonic_ns())
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._server.talks.add(self)

    def data_received(self, data: bytes) -> None:
        for event in self._connection.feed(data, self._clock.monotonic_ns()):
            if isinstance(event, RequestReceived):
                self._server.heard.append(event.message)
                self._server.asked.set()
                self._server.handle(event.message, lambda told, event=event: self._reply(event, told))  # type: ignore[misc]
        self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connection.lost()
        self._server.talks.discard(self)

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _reply(self, event: RequestReceived, told: ControlMessage | Refused) -> None:
        if isinstance(told, Refused):
            self._connection.refuse(event.correlation, told)
        else:
            self._connection.respond(event.correlation, told)
        self._flush()

    def _flush(self) -> None:
        if self._transport is None:
            return
        self._transport.writelines(self._connection.take())
        if self._connection.closed is not None:
            self._transport.close()


class StubServer:
    """Listens in a thread of its own, at a port of its own."""

    def __init__(self, port: int = 0) -> None:
        self.heard: list[ControlMessage] = []
        self.asked = threading.Event()  # something was heard
        self.talks: set[_Talk] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._listening = self._run(self._listen(port))
        self.port: int = self._listening.sockets[0].getsockname()[1]

    def handle(self, message: ControlMessage, reply: Reply) -> None:
        """Called on the server's loop; answer now, later, or not at all."""
        raise NotImplementedError

    async def _listen(self, port: int) -> asyncio.Server:
        return await self._loop.create_server(lambda: _Talk(self), "127.0.0.1", port)

    def _run(self, coroutine: object) -> asyncio.Server:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)  # type: ignore[arg-type]

    def call(self, call: Callable[[], None]) -> None:
        """On the server's loop; returns when it is done."""
        done = threading.Event()

        def run() -> None:
            call()
            done.set()

        self._loop.call_soon_threadsafe(run)
        assert done.wait(30)

    def close(self) -> None:
        def end() -> None:
            self._listening.close()
            for talk in tuple(self.talks):
                talk.abort()
            self._loop.call_soon(self._loop.stop)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(end)
            self._thread.join(30)
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class Follower(StubServer):
    """A copy that does not lead."""

    retry_after_ms: int | None = None

    def handle(self, message: ControlMessage, reply: Reply) -> None:
        reply(Refused(Code.NOT_MASTER, "this copy follows another", retry_after_ms=self.retry_after_ms))


class FakeMeta(StubServer):
    """Knows what it is told, and tells whoever asks, at once or when something has changed."""

    def __init__(self) -> None:
        self.subjects: dict[str, SubjectRoute] = {}
        self.groups: dict[str, GroupRoute] = {}
        self.new_subject: Callable[[str], SubjectRoute] | None = None  # makes one on first use
        self.is_mute = False
        self._version = 1
        self._waiting: list[tuple[Route, Reply]] = []
        super().__init__()

    @property
    def url(self) -> str:
        return f"meta://127.0.0.1:{self.port}"

    def tell(self, *news: SubjectRoute | GroupRoute) -> None:
        """From now on things are so; from any thread."""

        def apply() -> None:
            for each in news:
                if isinstance(each, GroupRoute):
                    self.groups[each.name] = each
                else:
                    self.subjects[each.name] = each
            self._changed()

        self.call(apply)

    def _changed(self) -> None:
        self._version += 1
        waiting, self._waiting = self._waiting, []
        for route, reply in waiting:
            reply(self._answer(route))

    def handle(self, message: ControlMessage, reply: Reply) -> None:
        if not isinstance(message, Route):
            reply(Refused(Code.UNSUPPORTED, "this is a meta server"))
        elif self.is_mute or (message.known == self._version and message.wait_ms):
            self._waiting.append((message, reply))
        else:
            reply(self._answer(message))

    def _answer(self, route: Route) -> Routed:
        return Routed(self._version, [self._subject(name, route) for name in route.subjects], [*self.groups.values()])

    def _subject(self, name: str, route: Route) -> SubjectRoute:
        base = name.rpartition(":")[2]
        if base not in self.subjects and route.may_create and self.new_subject is not None:
            self.subjects[base] = self.new_subject(base)
            self._loop.call_soon(self._changed)
        found = self.subjects.get(base)
        if found is not None and route.asker is ClientRole.SCHEDULER:
            delays = [each.name for each in self.groups.values() if each.kind == "delay"]
            return SubjectRoute(name, delays, delays)
        if found is None:
            return SubjectRoute(name, [], [], why=f"there is no subject {name}")
        return SubjectRoute(
            name, found.groups, found.writable, found.is_read_only, found.is_ordered, found.paused, found.why
        )


def group(name: str, master: int | None, *replicas: int, epoch: int = 1, kind: str = "broker") -> GroupRoute:
    """A group of servers on loopback, by their ports."""
    return GroupRoute(
        name,
        kind,
        epoch,
        "" if master is None else f"127.0.0.1:{master}",
        [f"127.0.0.1:{port}" for port in replicas],
        is_writable=master is not None,
    )
