"""Kazoo's client and its threads, seen from a loop: questions in, answers and news out, all of it on the loop.

Kazoo reconnects by itself, and opens a new session by itself when one has expired. What it does not do:

- it tells nobody what time-out the servers granted, nor when a connection was asked for: both are taken where it makes
  its connections;
- a client whose connection thread has ended (refused credentials, a bug) stays dead: `is_dead` says so;
- it takes its own requests for proof that the connection lives, so that whoever asks often never learns that nobody
  answers: `hang_up` breaks the connection, and kazoo makes another;
- it begins with any server, also with the one that was just lost, waits a whole session for one that does not even
  refuse, and twice as long after each round in vain, up to a minute. A session is certain for less than that: here the
  servers that failed last come last, each has a part of the session to accept, and the pauses stay short.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fairway.errors import Misuse
from fairway.registry.kazoo_requests import AddWatch, ReadMany
from fairway.registry.port import (
    AnswerLost,
    Exists,
    Missing,
    NotAllowed,
    RegistryError,
    SessionOver,
    Unsupported,
    VersionMismatch,
)
from fairway.registry.tree import is_below
from fairway.world.clock import Clock
from fairway.world.workers import Workers

_PAUSE_FIRST_S = 0.05
_PAUSE_MOST_S = 1.0
_PAUSES_PER_SESSION = 20  # at least: servers that elect a leader let nobody in for a second, and are dialed soon after
_STOP_S = 5.0  # for a client to say goodbye; kazoo may wait for a connection that never comes, and then does so alone
_BOTH_WAYS = 2  # SHUT_RDWR

_log = logging.getLogger("fairway.registry")
# What kazoo says of its connections, several times a second while no server answers; whoever wants it adds a handler.
_kazoo_log = logging.getLogger("fairway.registry.kazoo")
_kazoo_log.addHandler(logging.NullHandler())  # else Python prints its warnings on stderr: ours say it once
_kazoo_log.propagate = False


class ZooKeeperConnection:
    """One client of kazoo's. Its news: `on_connected(asked_ns, session, session_ms)`, `on_suspended`, `on_lost`."""

    def __init__(self, hosts: str, session_ms: int, options: Mapping[str, Any], clock: Clock) -> None:
        try:
            from kazoo.client import KazooClient
        except ImportError as error:
            raise Misuse("a registry on ZooKeeper needs kazoo: pip install 'fairway[zookeeper]'") from error
        self.on_connected: Callable[[int, int, float], None] = lambda *_: None
        self.on_suspended: Callable[[], None] = lambda: None
        self.on_lost: Callable[[], None] = lambda: None
        self.on_below: Callable[[str], None] = lambda _: None  # a node in a tree that is watched has changed
        self._trees: tuple[str, ...] = ()
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._is_dropped = False
        self.has_connected = False  # ever
        again = {"max_tries": -1, "delay": _PAUSE_FIRST_S, "backoff": 2, "max_delay": _pause_most_s(session_ms)}
        given = {"connection_retry": again, "command_retry": again, "logger": _kazoo_log, **options}
        try:
            self._client: Any = KazooClient(hosts, timeout=session_ms / 1e3, **given)
        except ValueError as error:
            raise Misuse(f"no ZooKeeper servers in {hosts!r}: write them like one:2181,two:2181") from error

    def start(self) -> None:
        client = self._client
        self._prefer_those_that_work()
        connect = client._connection._connect

        def connected(*where: Any) -> Any:
            asked_ns = self._clock.monotonic_ns()
            waits_ms, dials_ms = connect(*where)
            self.has_connected = True
            self._post(self.on_connected, asked_ns, client._session_id, waits_ms * 3 / 2)  # it waits two thirds of T
            return waits_ms, dials_ms

        client._connection._connect = connected
        self._hear_of_trees()
        client.add_listener(self._on_state)
        client.start_async()

    def _prefer_those_that_work(self) -> None:
        """Who was dialed last comes last: the one that was just lost, or that failed. And each has a part of the
        session to accept, where kazoo grants the whole of it. All of this is called on kazoo's thread."""
        client, connection = self._client, self._client._connection
        dial, places = client.handler.create_connection, connection._expand_client_hosts
        dialed_ns: dict[Any, int] = {}

        def dialed(*args: Any, timeout: float, **options: Any) -> Any:
            dialed_ns[options["address"]] = self._clock.monotonic_ns()
            return dial(*args, timeout=timeout / len(client.hosts), **options)

        def ordered() -> list[Any]:
            return sorted(places(), key=lambda place: dialed_ns.get(place[1:], 0))

        client.handler.create_connection = dialed
        connection._expand_client_hosts = ordered

    def _hear_of_trees(self) -> None:
        """Kazoo knows only watches that fire once. Look at each event before it does, on its thread."""
        from kazoo.protocol.serialization import Watch

        connection = self._client._connection
        read = connection._read_watch_event

        def read_event(data: bytes, offset: int) -> None:
            path = Watch.deserialize(data, offset)[0].path
            if any(is_below(path, root) for root in self._trees):
                self._post(self.on_below, path)
            read(data, offset)

        connection._read_watch_event = read_event

    def _on_state(self, state: str) -> None:
        from kazoo.protocol.states import KazooState

        if state == KazooState.SUSPENDED:
            self._post(self.on_suspended)
        elif state == KazooState.LOST:
            self._post(self.on_lost)

    @property
    def is_dead(self) -> bool:
        from kazoo.protocol.states import KeeperState

        return self._client.client_state in (KeeperState.CLOSED, KeeperState.AUTH_FAILED)

    @property
    def is_refused(self) -> bool:
        from kazoo.protocol.states import KeeperState

        return bool(self._client.client_state == KeeperState.AUTH_FAILED)

    def ask(self, request: str, *args: Any, **options: Any) -> asyncio.Future[Any]:
        """The answer, or an error of the port's families."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        self._link(getattr(self._client, f"{request}_async")(*args, **options), answer)
        return answer

    def watch_tree(self, path: str) -> asyncio.Future[Any]:
        """Hear of every change below a node on this connection (`on_below`); `Unsupported` by servers before 3.6."""
        if path not in self._trees:
            self._trees = (*self._trees, path)
        return self._call(AddWatch(path))

    def read_many(self, paths: Sequence[str]) -> asyncio.Future[Any]:
        """Of each node (value, stat), or an error of kazoo's; `Unsupported` by servers before 3.6."""
        return self._call(ReadMany(paths))

    def _call(self, request: AddWatch | ReadMany) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        result = self._client.handler.async_result()
        self._link(result, answer)
        self._client._call(request, result)
        return answer

    def ask_quorum(self, path: str) -> asyncio.Future[Any]:
        """A change that changes nothing, as only a majority of the servers can make it; whoever reads after it has all
        that was changed before. (A read proves nothing: a server that was cut off from the others still answers. Nor
        does `sync`: a leader that has lost its followers without knowing answers that one too.)"""
        answer: asyncio.Future[Any] = self._loop.create_future()
        change = self._client.transaction()
        change.check(path, -1)
        self._link(change.commit_async(), answer)
        return answer

    def _link(self, result: Any, answer: asyncio.Future[Any]) -> None:
        def done(result: Any) -> None:  # on a thread of kazoo's
            with contextlib.suppress(RuntimeError):  # a loop that has ended waits for nothing
                self._loop.call_soon_threadsafe(_settle, answer, result.exception, result.value)

        result.rawlink(done)

    def watcher(self, path: str, fired: Callable[[str], None]) -> Callable[[Any], None]:
        """What kazoo is to call when the node has changed. That watches are gone is known from the connection."""

        def call(event: Any) -> None:
            if event.type != "NONE":
                self._post(fired, path)

        return call

    def hang_up(self) -> None:
        """Break the connection; the session goes on if another is made in time."""
        held = self._client._connection._socket
        with contextlib.suppress(OSError, AttributeError):  # it is broken, or there is none
            held.shutdown(_BOTH_WAYS)

    def drop(self, stopped: asyncio.Future[None] | None = None) -> None:
        """Hear nothing more of it. It ends its session, if the servers can be told, and then itself."""
        self._is_dropped = True
        told = self._loop.create_future() if stopped is None else stopped

        def work() -> None:
            _stop(self._client)
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_settle, told, None, None)

        Workers().start("fairway-registry-stop", work)

    async def stop(self) -> None:
        """The same, and wait for it; for a while."""
        stopped: asyncio.Future[None] = self._loop.create_future()
        self.drop(stopped)
        await asyncio.wait([stopped], timeout=_STOP_S)

    def _post(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # a loop that has ended waits for nothing
            self._loop.call_soon_threadsafe(self._arrive, call, *args)

    def _arrive(self, call: Callable[..., object], *args: object) -> None:
        if not self._is_dropped:  # a client that is being stopped may still tell that it is
            call(*args)


def _pause_most_s(session_ms: int) -> float:
    """Between two rounds of dialing all servers."""
    return min(max(session_ms / 1e3 / _PAUSES_PER_SESSION, _PAUSE_FIRST_S), _PAUSE_MOST_S)


def _settle(answer: asyncio.Future[Any], error: Exception | None, value: Any) -> None:
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(value)


def _stop(client: Any) -> None:
    from kazoo.exceptions import KazooException

    try:
        client.stop()
        if client._connection.connection_stopped.wait(_STOP_S):  # of two at once the second is let go on too early
            client.close()
    except (KazooException, OSError) as error:  # what it holds ends with its session
        _log.debug("a client of ZooKeeper did not stop: %r", error)


def translated(error: Exception, path: str) -> RegistryError:
    """What an error of kazoo's means to a caller of the port. Whatever is not clear is `AnswerLost`."""
    from kazoo import exceptions as kazoo

    match error:
        case RegistryError():
            return error
        case kazoo.NodeExistsError():
            return Exists(f"there is a registry node {path} already")
        case kazoo.NoNodeError():
            return Missing(f"there is no registry node {path}")
        case kazoo.BadVersionError():
            return VersionMismatch(f"registry node {path} has another version")
        case kazoo.NotEmptyError() | kazoo.NoChildrenForEphemeralsError():
            is_full = isinstance(error, kazoo.NotEmptyError)
            why = "it has nodes below it: remove them first" if is_full else "what is above it goes with a session"
            return NotAllowed(f"registry node {path}: {why}")
        case kazoo.UnimplementedError():
            return Unsupported(f"registry node {path}: the servers of ZooKeeper are older than 3.6")
        case kazoo.ConnectionClosedError():  # kazoo says so also of a request that it may still send
            return AnswerLost(f"registry node {path}: the connection to ZooKeeper is closed")
        case kazoo.SessionExpiredError():
            return SessionOver(f"registry node {path}: the session at ZooKeeper has expired")
        case kazoo.NoAuthError() | kazoo.AuthFailedError() | kazoo.InvalidACLError() | kazoo.QuotaExceededError():
            return RegistryError(f"ZooKeeper refuses registry node {path}: {type(error).__name__}")
        case _:
            return AnswerLost(f"registry node {path}: no answer from ZooKeeper ({type(error).__name__} {error})")
