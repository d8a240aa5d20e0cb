"""Registry on ZooKeeper. Ephemeral nodes, versions and sessions are ZooKeeper's own; this module adds the rest.

Watches. A watch of ZooKeeper fires once, and is lost with its connection. A watch of this registry lasts: after it
fired, and on every new connection, the module sets it again in ZooKeeper and then calls it. So a caller that reads when
called misses nothing. At most 64 watches are being set at a time: otherwise the question that keeps the session alive
would wait behind them, and the connection would be given up. A tree watch is one persistent, recursive watch of
ZooKeeper 3.6, for a tree of any size. Older servers need one watch per node instead (`TreeEmulation`).

Certainty (`fairway.registry.sessions.Certainty`). The module asks a question every T/6, which a majority must
answer. If an answer takes longer than T/3, the module breaks the connection; then T/6 is left to find another server
before certainty ends at 2 T/3. A lost connection ends nothing by itself, but no question is answered any more.

Lost answers. A change raises `AnswerLost` if no answer comes within T, or the connection breaks before. Kazoo sends
requests in order, and ZooKeeper carries out nothing of a session's old connection once the session has a new one. So a
fresh read after `AnswerLost` sees the change, or the change is never made.

Sessions. A new session follows on an expired one: kazoo opens it, or else this module makes a new client. The module
also makes a new client after 3 T without a connection. Servers refuse a client that has seen more changes than they
have, so they would refuse a client for ever if ZooKeeper has lost its data. A new client may find less than the old one
had seen; it has another session, so its owner reads everything again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from fairway.errors import Misuse, Unreachable
from fairway.registry.kazoo_client import ZooKeeperConnection, translated
from fairway.registry.port import (
    AnswerLost,
    Exists,
    Missing,
    Node,
    NotAllowed,
    Registry,
    RegistryError,
    SessionOver,
    SessionState,
    Unsupported,
    Watch,
)
from fairway.registry.sessions import QUESTIONS_PER_SESSION, SILENCES_PER_SESSION, SessionClient, Watching
from fairway.registry.tree import ROOT_PATH, checked_path, checked_value, checked_version
from fairway.runtime.clock import Clock, RealClock

_RETRY_S = 0.5


class TreeEmulation:
    """Tree watch made of ordinary watches, for ZooKeeper before 3.6; two levels deep. It calls `told` with the path of
    a child that was created, changed or removed, and with the root's path after a failure.

    It sets one watch on the node and one on each child, at the start and after each connection. It finds new and
    removed children by comparing lists."""

    def __init__(self, registry: Registry, root: str, told: Callable[[str], None]) -> None:
        self._registry = registry
        self._root = root
        self._told = told
        self._watches: dict[str, Watch] = {}
        self._changed = asyncio.Event()
        self._changed.set()
        self._watch = registry.watch(root, self._changed.set)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="registry-tree")

    def cancel(self) -> None:
        self._task.cancel()
        self._watch.cancel()
        for watch in self._watches.values():
            watch.cancel()

    async def _run(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                names = dict.fromkeys(await self._registry.children(self._root))
            except RegistryError:
                self._changed.set()
                await asyncio.sleep(_RETRY_S)
                continue
            for name in [each for each in self._watches if each not in names]:
                self._watches.pop(name).cancel()
                self._told(f"{self._root}/{name}")
            for name in names:
                if name not in self._watches:  # a watch is called once it is set
                    path = f"{self._root}/{name}"
                    self._watches[name] = self._registry.watch(path, partial(self._told, path))


SESSION_MS = 10_000  # short enough for a quick takeover, long enough for a GC pause or a server's failover
SESSION_MS_MIN = 100
OPEN_S = 15.0

READ_MANY = 100  # nodes in one request: about 30 kB of answer
ARMING_MAX = 64  # watches being set, or single reads of `get_many`: about 10 ms of the servers' time

_PATIENCE = 3  # sessions without a connection, before another client is made

_log = logging.getLogger("fairway.registry")


class ZooKeeperRegistry(SessionClient):
    """A `Registry`. Lives on the loop that opened it."""

    line_class = ZooKeeperConnection

    def __init__(self, hosts: str, root: str, session_ms: int, clock: Clock) -> None:
        super().__init__(asyncio.get_running_loop())
        self.session_ms = float(session_ms)  # as requested; later as granted by the servers
        self._hosts = hosts
        self._root = root
        self._asked_ms = session_ms
        self._clock = clock
        self._line = self._make_line()
        self._watchers: dict[str, Callable[[Any], None]] = {}  # kazoo's: the same function for the same path
        self._arming: dict[str, asyncio.Task[None]] = {}
        self._fired: set[str] = set()  # while they were being set
        self._arming_trees: dict[str, asyncio.Task[None]] = {}
        self._emulations: dict[str, TreeEmulation] = {}
        self._room = asyncio.Semaphore(ARMING_MAX)
        self._is_old = False  # whether the servers are known to be older than 3.6
        self._connected = asyncio.Event()
        self._is_closed = False
        self._keeping: asyncio.Task[None] | None = None
        self._renewing: asyncio.Task[None] | None = None

    @classmethod
    async def open(
        cls,
        hosts: str,
        *,
        root: str = "",
        session_ms: int = SESSION_MS,
        open_s: float = OPEN_S,
        clock: Clock | None = None,
    ) -> ZooKeeperRegistry:
        """`hosts` as "one:2181,two:2181". Everything is kept below `root`, which is created if necessary."""
        if session_ms < SESSION_MS_MIN:
            raise Misuse(f"session_ms={session_ms}: at least {SESSION_MS_MIN}")
        if root:
            checked_path(root)
        registry = cls(hosts, root, session_ms, clock or RealClock())
        try:
            await registry._begin(open_s)
        except BaseException:
            await registry.close()
            raise
        return registry

    async def _begin(self, open_s: float) -> None:
        self._line.start()
        try:
            async with asyncio.timeout(open_s):
                await self._served()
        except TimeoutError:
            if self._line.is_refused:
                raise RegistryError(f"ZooKeeper at {self._hosts} refuses the credentials") from None
            raise Unreachable(f"no ZooKeeper answers at {self._hosts} in {open_s:g} s: is it running?") from None
        self._keeping = self._loop.create_task(self._keep(), name="registry-questions")

    async def _served(self) -> None:
        """Return when a majority has answered. A server that is busy, or about to lose the others, is asked again."""
        while True:
            await self._connected.wait()
            try:
                if self._root:
                    await self._ask(ROOT_PATH, "ensure_path", self._root)
                await self._ask_quorum(ROOT_PATH)
            except (AnswerLost, SessionOver):
                await asyncio.sleep(_RETRY_S)
            else:
                return

    # --- the port ----------------------------------------------------------------------------------------------------

    async def get(self, path: str, *, fresh: bool = False) -> Node | None:
        if fresh:
            await self._ask_quorum(checked_path(path))
        try:
            return _node(path, await self._ask(path, "get", self._at(path)))
        except Missing:
            return None

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        found: list[Node | None] = []
        for first in range(0, len(paths), READ_MANY):
            found += await self._get_some(paths[first : first + READ_MANY])
        return found

    async def _get_some(self, paths: Sequence[str]) -> list[Node | None]:
        places = [self._at(path) for path in paths]
        if not self._is_old:
            try:
                answers = await self._answer(paths[0], lambda: self._line.read_many(places))
            except Unsupported:
                self._is_old = True
            else:
                return [_node(path, answer) for path, answer in zip(paths, answers, strict=True)]
        return [*await asyncio.gather(*(self._get_in_turn(path) for path in paths))]

    async def _get_in_turn(self, path: str) -> Node | None:
        async with self._room:
            return await self.get(path)

    async def children(self, path: str) -> list[str]:
        try:
            return sorted(await self._ask(path, "get_children", self._at(path)))
        except Missing:
            return []

    async def create(
        self, path: str, value: bytes = b"", *, is_ephemeral: bool = False, is_numbered: bool = False
    ) -> Node:
        if path == ROOT_PATH:
            raise Exists("the root of the registry is always there")
        flags = {"ephemeral": is_ephemeral, "sequence": is_numbered, "makepath": True, "include_data": True}
        made, stat = await self._ask(path, "create", self._at(path), checked_value(path, value), **flags)
        return Node(made[len(self._root) :], value, stat.version, stat.ephemeralOwner)

    async def put(self, path: str, value: bytes, version: int) -> Node:
        checked_version(path, version)  # for ZooKeeper, -1 would mean any
        stat = await self._ask(path, "set", self._at(path), checked_value(path, value), version)
        return Node(path, value, stat.version, stat.ephemeralOwner)

    async def remove(self, path: str, version: int | None = None) -> None:
        checked_version(path, version)
        if path == ROOT_PATH:
            raise NotAllowed("the root of the registry stays")
        await self._ask(path, "delete", self._at(path), -1 if version is None else version)

    def watch(self, path: str, changed: Callable[[], None]) -> Watching:
        watching = self._watches.add(checked_path(path), changed)
        if self._connected.is_set():
            self._arm(path)
        return watching

    def watch_tree(self, path: str, changed: Callable[[str], None]) -> Watching:
        watching = self._watches.add_tree(checked_path(path), changed)
        if path in self._emulations:
            self._watches.tell_tree(path)
        elif self._connected.is_set():
            self._arm_tree(path)
        return watching

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self.session_id = 0
        self._certainty.end()
        self._watches.clear()
        for emulation in self._emulations.values():
            emulation.cancel()
        for task in (self._keeping, self._renewing, *self._arming.values(), *self._arming_trees.values()):
            if task is not None:
                task.cancel()
        await self._line.stop()

    # --- requests ----------------------------------------------------------------------------------------------------

    def _at(self, path: str) -> str:
        return f"{self._root}{checked_path(path)}" if path != ROOT_PATH else self._root or ROOT_PATH

    async def _ask(self, path: str, request: str, *args: Any, **options: Any) -> Any:
        return await self._answer(path, lambda: self._line.ask(request, *args, **options))

    async def _ask_quorum(self, path: str) -> None:
        """Ask a question that a majority must answer. An answer also proves that the session lives, for any caller."""
        session, asked_ns = self.session_id, self._clock.monotonic_ns()
        for outcome in await self._answer(path, lambda: self._line.ask_quorum(self._root or ROOT_PATH)):
            if isinstance(outcome, Exception):
                raise translated(outcome, self._root or ROOT_PATH)
        if session and session == self.session_id:
            self._certainty.answered(asked_ns, self._clock.monotonic_ns())

    async def _answer(self, path: str, ask: Callable[[], asyncio.Future[Any]]) -> Any:
        if self._is_closed:
            raise SessionOver(f"registry node {path}: the registry is closed")
        try:
            async with asyncio.timeout(self.session_ms / 1e3):
                await self._connected.wait()
                return await ask()
        except TimeoutError:
            raise AnswerLost(f"registry node {path}: no answer from ZooKeeper in {self.session_ms / 1e3:g} s") from None
        except RegistryError:
            raise
        except Exception as error:
            raise translated(error, path) from error

    # --- the session -------------------------------------------------------------------------------------------------

    def _make_line(self) -> ZooKeeperConnection:
        return self.line_class(
            self._hosts,
            self._asked_ms,
            self._clock,
            on_connected=self._on_connected,
            on_suspended=self._on_suspended,
            on_lost=self._on_lost,
            on_below=self._on_below,
        )

    def _on_connected(self, asked_ns: int, session: int, session_ms: float) -> None:
        if self.session_id not in (0, session):
            self._on_lost()
        self.session_id = session
        self.session_ms = session_ms
        self._certainty.begin(asked_ns, int(session_ms * 1e6))
        self._connected.set()
        self._tell(SessionState.OPEN)
        for path in self._watches.paths:
            self._arm(path)
        for root in self._watches.trees:
            if root not in self._emulations:
                self._arm_tree(root)

    def _on_suspended(self) -> None:
        self._connected.clear()
        if self.session_id:
            self._tell(SessionState.SUSPENDED)

    def _on_lost(self) -> None:
        self._connected.clear()
        if self.session_id:
            self.session_id = 0
            self._certainty.end()
            self._tell(SessionState.OVER)
        if self._line.is_dead and self._renewing is None:
            self._renewing = self._loop.create_task(self._renew(), name="registry-renewal")

    async def _renew(self) -> None:
        """Replace kazoo's client, which is dead."""
        _log.warning("the client of ZooKeeper at %s has ended: another is made", self._hosts)
        await self._line.stop()
        await asyncio.sleep(_RETRY_S)
        self._renewing = None
        self._replace()

    def _replace(self) -> None:
        self._line = self._make_line()
        self._watchers.clear()
        self._line.start()

    async def _reconnected(self) -> None:
        """Return when there is a connection. After 3 sessions without one, try with a new client."""
        while not self._connected.is_set():
            patience_s = _PATIENCE * self.session_ms / 1e3
            try:
                async with asyncio.timeout(patience_s):
                    await self._connected.wait()
            except TimeoutError:
                if self._line.has_connected and self._renewing is None:
                    _log.warning("no ZooKeeper at %s in %g s: another client is made", self._hosts, patience_s)
                    self._on_lost()  # first: a dropped line may look dead, and must not be renewed
                    self._line.drop()
                    self._replace()

    def _tell(self, state: SessionState) -> None:
        self._loop.call_soon(lambda: None if self._is_closed else self.on_session(state))

    async def _keep(self) -> None:
        """Ask question after question, as long as there is a connection."""
        while True:
            await self._reconnected()
            next_s = self._loop.time() + self.session_ms / 1e3 / QUESTIONS_PER_SESSION
            try:
                async with asyncio.timeout(self.session_ms / 1e3 / SILENCES_PER_SESSION):
                    await self._ask_quorum(ROOT_PATH)
            except TimeoutError:
                self._line.hang_up()
            except (AnswerLost, SessionOver):
                pass  # a broken connection: the next one is reported
            except RegistryError as error:
                _log.warning("no certainty about the session at ZooKeeper: %s", error)
            await asyncio.sleep(max(next_s - self._loop.time(), 0.0))

    # --- watches -----------------------------------------------------------------------------------------------------

    def _arm(self, path: str) -> None:
        """Set the ZooKeeper watch of a path once more, even if it is being set already."""
        if path in self._arming:
            self._fired.add(path)
        elif path in self._watches:
            self._arming[path] = self._loop.create_task(self._arm_until_done(path), name="registry-watch")

    async def _arm_until_done(self, path: str) -> None:
        try:
            while path in self._watches:
                async with self._room:
                    self._fired.discard(path)
                    is_armed = await self._arm_once(path)
                self._watches.tell([path])
                if path in self._fired:
                    continue
                if is_armed or not self._connected.is_set():  # the next connection sets it
                    return
                await asyncio.sleep(_RETRY_S)
        finally:
            self._fired.discard(path)
            del self._arming[path]

    async def _arm_once(self, path: str) -> bool:
        watcher = self._watchers.setdefault(path, self._line.watcher(path, self._arm))
        try:
            await self._ask(path, "exists", self._at(path), watch=watcher)
            with contextlib.suppress(Missing):  # when the node is created, the watch above fires
                await self._ask(path, "get_children", self._at(path), watch=watcher)
        except RegistryError as error:
            _log.debug("no watch on registry node %s: %s", path, error)
            return False
        return True

    def _arm_tree(self, root: str) -> None:
        """Set the tree watch on this connection."""
        before = self._arming_trees.pop(root, None)
        if before is not None:
            before.cancel()
        self._arming_trees[root] = self._loop.create_task(self._arm_tree_until_done(root), name="registry-tree")

    async def _arm_tree_until_done(self, root: str) -> None:
        while root in self._watches.trees and self._connected.is_set():  # else the next connection sets it
            try:
                await self._answer(root, lambda: self._line.watch_tree(self._at(root)))
            except Unsupported as error:
                _log.warning("%s: one watch per node is armed", error)
                self._is_old = True
                self._emulations[root] = TreeEmulation(self, root, lambda path: self._watches.tell_below([path]))
                self._watches.tell_tree(root)
                return
            except RegistryError as error:
                _log.debug("no watch below registry node %s: %s", root, error)
                await asyncio.sleep(_RETRY_S)
            else:
                self._watches.tell_tree(root)
                return

    def _on_below(self, path: str) -> None:
        self._watches.tell_below([path[len(self._root) :]])


def _node(path: str, answer: Any) -> Node | None:
    if isinstance(answer, Exception):
        error = translated(answer, path)
        if isinstance(error, Missing):
            return None
        raise error
    value, stat = answer
    return Node(path, value or b"", stat.version, stat.ephemeralOwner)
