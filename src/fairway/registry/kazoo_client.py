"""Client of ZooKeeper: kazoo and its threads as seen from an event loop. Requests, answers and events are on the loop.

Kazoo reconnects by itself, and opens a new session by itself when one has expired. This module adds the rest:

- Kazoo does not say which time-out the servers granted, nor when it asked for a connection. The module takes both where
  kazoo connects.
- A client stays dead once its connection thread has ended (refused credentials, a bug). `is_dead` reports that.
- Kazoo counts its own requests as proof that the connection lives, so a busy client never learns that nobody answers.
  `hang_up` breaks the connection, and kazoo makes another.
- Kazoo may begin with the server that was just lost. It waits a whole session for a silent server, and twice as long
  after each failed round, up to a minute. A session is certain for less than that. Here the servers that failed last
  come last, each gets a part of the session to accept, and pauses stay short.

The module also adds two requests of ZooKeeper 3.6 that kazoo lacks: a watch on a whole tree, and many reads in one.
Kazoo serializes a request by its `serialize`, and reads the answer by its `deserialize`. A server before 3.6 answers
both with `UnimplementedError`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from fairway.errors import Misuse
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
from fairway.runtime.clock import Clock
from fairway.runtime.threads import Workers

PERSISTENT_RECURSIVE = 1
_GET_DATA = 4
_ERROR = -1


@dataclass(frozen=True, slots=True)
class AddWatch:
    """Request: report every change at or below a node from now on, on this connection."""

    path: str
    mode: int = PERSISTENT_RECURSIVE

    type: ClassVar = 106

    def serialize(self) -> bytearray:
        from kazoo.protocol.serialization import int_struct, write_string

        return bytearray(write_string(self.path) + int_struct.pack(self.mode))

    @classmethod
    def deserialize(cls, _data: bytes, _offset: int) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class ReadMany:
    """Request: read many nodes. Each answer is (value, stat), or an error of kazoo's."""

    paths: Sequence[str]

    type: ClassVar = 22

    def serialize(self) -> bytearray:
        from kazoo.protocol.serialization import multiheader_struct, write_string

        parts = bytearray()
        for path in self.paths:
            parts += multiheader_struct.pack(_GET_DATA, False, _ERROR)
            parts += write_string(path)
            parts.append(0)  # no watch
        parts += multiheader_struct.pack(_ERROR, True, _ERROR)
        return parts

    @classmethod
    def deserialize(cls, data: bytes, offset: int) -> list[Any]:
        from kazoo.exceptions import EXCEPTIONS
        from kazoo.protocol.serialization import int_struct, multiheader_struct, read_buffer, stat_struct
        from kazoo.protocol.states import ZnodeStat

        found: list[Any] = []
        while True:
            kind, is_done, _ = multiheader_struct.unpack_from(data, offset)
            offset += multiheader_struct.size
            if is_done:
                return found
            if kind == _ERROR:
                found.append(EXCEPTIONS[int_struct.unpack_from(data, offset)[0]]())
                offset += int_struct.size
            else:
                value, offset = read_buffer(data, offset)
                found.append((value, ZnodeStat._make(stat_struct.unpack_from(data, offset))))
                offset += stat_struct.size


_PAUSE_FIRST_S = 0.05
_PAUSE_MOST_S = 1.0
_PAUSES_PER_SESSION = 20  # at least: during an election servers accept nobody for a second; dial soon after
_STOP_S = 5.0  # for a client to close its session; kazoo may wait longer, in its own thread
_BOTH_WAYS = 2  # SHUT_RDWR

_log = logging.getLogger("fairway.registry")
# Kazoo logs its connections several times a second while no server answers. Add a handler to see them.
_kazoo_log = logging.getLogger("fairway.registry.kazoo")
_kazoo_log.addHandler(logging.NullHandler())  # else Python prints its warnings on stderr: ours say it once
_kazoo_log.propagate = False


class ZooKeeperConnection:
    """One client of kazoo's. `on_connected(asked_ns, session, session_ms)`; `on_below(path)`: a node in a watched tree
    has changed."""

    def __init__(
        self,
        hosts: str,
        session_ms: int,
        clock: Clock,
        *,
        on_connected: Callable[[int, int, float], None],
        on_suspended: Callable[[], None],
        on_lost: Callable[[], None],
        on_below: Callable[[str], None],
    ) -> None:
        try:
            from kazoo.client import KazooClient
        except ImportError as error:
            raise Misuse("a registry on ZooKeeper needs kazoo: pip install 'fairway[zookeeper]'") from error
        self._on_connected = on_connected
        self._on_suspended = on_suspended
        self._on_lost = on_lost
        self._on_below = on_below
        self._trees: tuple[str, ...] = ()
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._is_dropped = False
        self.has_connected = False  # ever
        again = {"max_tries": -1, "delay": _PAUSE_FIRST_S, "backoff": 2, "max_delay": _pause_most_s(session_ms)}
        try:
            self._client: Any = KazooClient(
                hosts, timeout=session_ms / 1e3, connection_retry=again, command_retry=again, logger=_kazoo_log
            )
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
            session_ms = waits_ms * 3 / 2  # kazoo waits two thirds of T
            self._post(self._on_connected, asked_ns, client._session_id, session_ms)
            return waits_ms, dials_ms

        client._connection._connect = connected
        self._hear_of_trees()
        client.add_listener(self._on_state)
        client.start_async()

    def _prefer_those_that_work(self) -> None:
        """Dial the server that was dialed last after the others: it was just lost, or failed. Give each server a part
        of the session to accept; kazoo grants the whole. All of this runs on kazoo's thread."""
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
        """Read each watch event before kazoo does, on its thread: kazoo knows only watches that fire once."""
        from kazoo.protocol.serialization import Watch

        connection = self._client._connection
        read = connection._read_watch_event

        def read_event(data: bytes, offset: int) -> None:
            path = Watch.deserialize(data, offset)[0].path
            if any(is_below(path, root) for root in self._trees):
                self._post(self._on_below, path)
            read(data, offset)

        connection._read_watch_event = read_event

    def _on_state(self, state: str) -> None:
        from kazoo.protocol.states import KazooState

        if state == KazooState.SUSPENDED:
            self._post(self._on_suspended)
        elif state == KazooState.LOST:
            self._post(self._on_lost)

    @property
    def is_dead(self) -> bool:
        from kazoo.protocol.states import KeeperState

        return self._client.client_state in (KeeperState.CLOSED, KeeperState.AUTH_FAILED)

    @property
    def is_refused(self) -> bool:
        from kazoo.protocol.states import KeeperState

        return bool(self._client.client_state == KeeperState.AUTH_FAILED)

    def ask(self, request: str, *args: Any, **options: Any) -> asyncio.Future[Any]:
        """The answer, or an error of the port's classes."""
        return self._linked(getattr(self._client, f"{request}_async")(*args, **options))

    def watch_tree(self, path: str) -> asyncio.Future[Any]:
        """Report every change below a node on this connection (`on_below`). `Unsupported` by servers before 3.6."""
        if path not in self._trees:
            self._trees = (*self._trees, path)
        return self._call(AddWatch(path))

    def read_many(self, paths: Sequence[str]) -> asyncio.Future[Any]:
        """Of each node (value, stat), or an error of kazoo's. `Unsupported` by servers before 3.6."""
        return self._call(ReadMany(paths))

    def _call(self, request: AddWatch | ReadMany) -> asyncio.Future[Any]:
        result = self._client.handler.async_result()
        answer = self._linked(result)
        self._client._call(request, result)
        return answer

    def ask_quorum(self, path: str) -> asyncio.Future[Any]:
        """Commit a transaction that changes nothing, which only a majority of the servers can do. A read after it sees
        everything that was changed before. (A plain read proves nothing: a server that is cut off from the others still
        answers. Nor does `sync`: a leader that has lost its followers without knowing still answers.)"""
        change = self._client.transaction()
        change.check(path, -1)
        return self._linked(change.commit_async())

    def _linked(self, result: Any) -> asyncio.Future[Any]:
        """The outcome of a call of kazoo's, on the loop."""
        answer: asyncio.Future[Any] = self._loop.create_future()

        def done(result: Any) -> None:  # on a thread of kazoo's
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
                self._loop.call_soon_threadsafe(_settle, answer, result.exception, result.value)

        result.rawlink(done)
        return answer

    def watcher(self, path: str, fired: Callable[[str], None]) -> Callable[[Any], None]:
        """The watch function for kazoo: reports that the node has changed. The connection tells when watches are
        gone."""

        def call(event: Any) -> None:
            if event.type != "NONE":
                self._post(fired, path)

        return call

    def hang_up(self) -> None:
        """Break the connection. The session goes on if kazoo connects again in time."""
        held = self._client._connection._socket
        with contextlib.suppress(OSError, AttributeError):  # the connection is broken, or there is none
            held.shutdown(_BOTH_WAYS)

    def drop(self, stopped: asyncio.Future[None] | None = None) -> None:
        """Ignore this client from now on. It ends its session if it can reach a server, and then its threads."""
        self._is_dropped = True
        told = self._loop.create_future() if stopped is None else stopped

        def work() -> None:
            _stop(self._client)
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(_settle, told, None, None)

        Workers().start("fairway-registry-stop", work)

    async def stop(self) -> None:
        """Drop the client, and wait for its end, for at most 5 s."""
        stopped: asyncio.Future[None] = self._loop.create_future()
        self.drop(stopped)
        await asyncio.wait([stopped], timeout=_STOP_S)

    def _post(self, call: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(self._arrive, call, *args)

    def _arrive(self, call: Callable[..., object], *args: object) -> None:
        if not self._is_dropped:  # a client that is being stopped may still report it
            call(*args)


def _pause_most_s(session_ms: int) -> float:
    """The longest pause between two rounds of dialing all servers."""
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
        if client._connection.connection_stopped.wait(_STOP_S):  # of two at once, kazoo lets the second go on too early
            client.close()
    except (KazooException, OSError) as error:  # its nodes end with its session
        _log.debug("a client of ZooKeeper did not stop: %r", error)


def translated(error: Exception, path: str) -> RegistryError:
    """Translate an error of kazoo's into one of the port. An unclear error becomes `AnswerLost`."""
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
        case kazoo.ConnectionClosedError():  # kazoo raises this also for a request that it may still send
            return AnswerLost(f"registry node {path}: the connection to ZooKeeper is closed")
        case kazoo.SessionExpiredError():
            return SessionOver(f"registry node {path}: the session at ZooKeeper has expired")
        case kazoo.NoAuthError() | kazoo.AuthFailedError() | kazoo.InvalidACLError() | kazoo.QuotaExceededError():
            return RegistryError(f"ZooKeeper refuses registry node {path}: {type(error).__name__}")
        case _:
            return AnswerLost(f"registry node {path}: no answer from ZooKeeper ({type(error).__name__} {error})")
