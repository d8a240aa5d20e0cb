"""Election at a meta server, for a cluster without ZooKeeper. The registry of the meta server keeps the queue.

    fairway.elect(Billing(), election=MetaElection("meta://127.0.0.1:20882", "billing"))

The queue is the same as on ZooKeeper (`zookeeper_election`): each candidate has an ephemeral, numbered node. The
smallest number leads, and each candidate watches only the node before its own.

The token is the node's number plus one. The queue's folder stays and keeps counting, also over restarts of the meta
server, and a leader always follows on a smaller number. So each term has a larger token than all terms before it.

Certainty is that of the registry session (`fairway.registry.port`): the node exists as long as the session, and before
the session ends nobody else can be elected.

`RegistryElection` is the election itself, on a loop and with any registry. `MetaElection` runs it in a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from fairway.career.election import FOLDER, ElectionListener, ElectionState, ElectionTask
from fairway.career.state_machine import Confirmation
from fairway.errors import FairwayError, Misuse, Refused
from fairway.lookup.registries import META, RemoteRegistry, parse_meta
from fairway.names import GroupName
from fairway.redaction import without_password
from fairway.registry.port import Missing, Registry, RegistryError, SessionState, Watch
from fairway.runtime.clock import RealClock
from fairway.runtime.net import RealNet
from fairway.runtime.rng import RealRng, Rng
from fairway.runtime.threads import Workers

SESSION_MS = 10_000
SESSION_MS_MIN = 1_000

_MARK = "-n_"
_CONFIRMED_PER_SESSION = 6
_RETRY_S = 0.2
_MS_NS = 1_000_000

_log = logging.getLogger("fairway.career")


class LeasedRegistry(Registry, Protocol):
    """A registry that knows the time-out of its session."""

    @property
    def session_ms(self) -> int: ...


class NoMetaElection(FairwayError):
    """The meta server cannot hold the election; the sentence says why."""


class RegistryElection(ElectionState):
    """One candidate's place in a queue in a registry. Any thread may call it; it lives on the loop of `run`."""

    def __init__(self, connect: Callable[[], Awaitable[LeasedRegistry]], path: str, rng: Rng) -> None:
        self._connect = connect
        self._path = path
        self._rng = rng
        self._notes: deque[ElectionTask] = deque()
        self._stirred = asyncio.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._registry: LeasedRegistry | None = None
        self._connecting: asyncio.Future[LeasedRegistry] | None = None
        self._watch: Watch | None = None
        self._watched = ""
        self._is_over = False  # the session ended, and its nodes with it
        self._word = ""
        self._node = ""

    # --- the port ----------------------------------------------------------------------------------------------------

    def open(self, listener: ElectionListener) -> None:
        """Begin on the loop that the election lives on."""
        self._task = asyncio.get_running_loop().create_task(self.run(listener), name="fairway-election")

    def campaign(self) -> None:
        self._post(ElectionTask.CAMPAIGN)

    def resign(self) -> None:
        self._post(ElectionTask.RESIGN)

    def close(self) -> None:
        self._post(ElectionTask.CLOSE)

    def _post(self, note: ElectionTask) -> None:
        self._notes.append(note)
        loop = self._loop
        if loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop has ended, and this election with it
                loop.call_soon_threadsafe(self._stirred.set)

    # --- the loop ----------------------------------------------------------------------------------------------------

    async def run(self, listener: ElectionListener) -> None:
        """Serve until closed."""
        self._loop = asyncio.get_running_loop()
        wait_s: float | None = None
        try:
            while (note := await self._next_note(wait_s)) is not ElectionTask.CLOSE:
                if note is ElectionTask.CAMPAIGN:
                    self._is_running = True
                elif note is ElectionTask.RESIGN:
                    self._is_running = False
                    await self._withdraw()
                    listener.resigned()
                wait_s = await self._attend(listener) if self._is_running else None
            self._is_running = False
            await self._withdraw()
            await self._drop()
        except Exception as error:  # a bug: otherwise nobody would ever be elected, silently
            listener.failed(error)
            raise
        finally:
            listener.closed()

    async def _next_note(self, wait_s: float | None) -> ElectionTask | None:
        if not self._notes:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._stirred.wait()
        self._stirred.clear()
        return self._notes.popleft() if self._notes else None

    async def _attend(self, listener: ElectionListener) -> float | None:
        """Do what is due now. Return how long to wait at most before the next call."""
        try:
            return await self._pursue(listener)
        except Refused as refused:
            await self._drop()
            self._fail(listener, NoMetaElection(f"no election at {self._path}: {refused.sentence}"), refused)
            return None
        except FairwayError as error:
            _log.debug("election %s: %r, asked again soon", self._path, error)
            self._suspend(listener)
            return _RETRY_S

    async def _pursue(self, listener: ElectionListener) -> float | None:
        registry = self._registry or self._connected()
        if registry is None:
            return None
        if self._is_over:
            self._is_over = False
            self._lose(listener)
            if not self._is_running:
                return None
        if self._is_elected:
            await self._confirm(registry, listener)
        elif self._node or await self._stand(registry):
            await self._look(registry, listener)
        return registry.session_ms / 1_000 / _CONFIRMED_PER_SESSION

    def _connected(self) -> LeasedRegistry | None:
        """The registry, once there is a session. Meanwhile the election goes on reading its notes."""
        if self._connecting is None:
            self._connecting = asyncio.ensure_future(self._connect())
            self._connecting.add_done_callback(lambda _: self._post(ElectionTask.LOOK))
        if not self._connecting.done():
            return None
        connecting, self._connecting = self._connecting, None
        self._registry = connecting.result()
        self._registry.on_session = self._session_is
        return self._registry

    def _session_is(self, state: SessionState) -> None:
        self._is_over = self._is_over or state is SessionState.OVER
        self._post(ElectionTask.LOOK)

    # --- campaign, look, confirm -------------------------------------------------------------------------------------

    async def _stand(self, registry: LeasedRegistry) -> bool:
        """Create a node in the queue. If the answer of an earlier request was lost, its node is found by the random
        word in its name."""
        self._word = self._word or f"{self._rng.bits(96):024x}"
        mine = [name for name in await registry.children(self._path) if name.startswith(self._word)]
        if mine:
            node = await registry.get(f"{self._path}/{mine[0]}", fresh=True)
            if node is None or node.owner != registry.session_id:
                self._word = ""
                self._post(ElectionTask.LOOK)
                return False
        else:
            prefix = f"{self._path}/{self._word}{_MARK}"
            node = await registry.create(prefix, is_ephemeral=True, is_numbered=True)
        self._node, self._token = node.path, _number_of(node.path) + 1
        return True

    async def _look(self, registry: LeasedRegistry, listener: ElectionListener) -> None:
        """Is the own node the first in the queue? If not, watch the node before it, and look again once the watch is
        set."""
        while True:
            line = sorted((name for name in await registry.children(self._path) if _MARK in name), key=_number_of)
            own = self._node.rpartition("/")[2]
            if own not in line:  # somebody removed it, or its session is over
                self._forget()
                self._post(ElectionTask.LOOK)
                return
            place = line.index(own)
            if place == 0:
                await self._confirm(registry, listener)
                return
            before = f"{self._path}/{line[place - 1]}"
            if before != self._watched:  # else a watch that is called without a change would loop
                self._unwatch()
                self._watched = before
                self._watch = registry.watch(before, lambda: self._post(ElectionTask.LOOK))
            if await registry.get(before) is not None:
                return

    async def _confirm(self, registry: LeasedRegistry, listener: ElectionListener) -> None:
        """The own node exists in this session, so the candidate leads for as long as that is certain."""
        session = registry.session_id
        node = await registry.get(self._node, fresh=True)
        if node is None or not session or node.owner != session or session != registry.session_id:
            self._lose(listener)
            return
        until_ns = registry.certain_until_ns()
        confirmation = Confirmation(self._token, until_ns, until_ns + registry.session_ms * _MS_NS // 3)
        was_elected, self._is_elected, self._is_suspended = self._is_elected, True, False
        (listener.confirmed if was_elected else listener.elected)(confirmation)

    # --- going -------------------------------------------------------------------------------------------------------

    def _lose(self, listener: ElectionListener) -> None:
        super()._lose(listener)
        self._post(ElectionTask.LOOK)  # a leader that has lost does not run, and ignores the note

    async def _withdraw(self) -> None:
        """Leave the queue. If the node cannot be removed, end the session, which removes the node."""
        if self._registry is not None and self._node:
            try:
                await self._registry.remove(self._node)
                self._word = ""
            except Missing:
                self._word = ""
            except RegistryError as error:
                _log.debug("election %s: the node cannot be removed, the session is given up: %r", self._path, error)
        if self._word:  # a node may exist, or its request may be under way
            await self._drop()
        self._forget()

    async def _drop(self) -> None:
        connecting, self._connecting = self._connecting, None
        if connecting is not None:
            connecting.cancel()
            with contextlib.suppress(asyncio.CancelledError, FairwayError):
                self._registry = await connecting
        registry, self._registry = self._registry, None
        if registry is not None:
            registry.on_session = lambda _: None
            await registry.close()

    def _forget(self) -> None:
        super()._forget()
        self._unwatch()
        self._word = self._node = ""
        self._is_over = False

    def _unwatch(self) -> None:
        watch, self._watch, self._watched = self._watch, None, ""
        if watch is not None:
            watch.cancel()


def _number_of(name: str) -> int:
    return int(name.rpartition(_MARK)[2])


class MetaElection:
    """One candidate's place in a queue at a meta server."""

    def __init__(self, url: str, career: str, *, session_ms: int = SESSION_MS) -> None:
        """`url` as "meta://HOST:PORT". A leader that vanishes is replaced after `session_ms`."""
        if not url.startswith(META):
            raise Misuse(f"no meta server in {without_password(url)!r}: write meta://HOST:PORT")
        if session_ms < SESSION_MS_MIN:
            raise Misuse(f"session_ms={session_ms}: at least {SESSION_MS_MIN}")
        self._addresses = parse_meta(url)
        self._session_ms = session_ms
        self._workers = Workers()
        self._is_open = False
        self._core = RegistryElection(self._open_registry, f"{FOLDER}/{GroupName.parse(career)}", RealRng())
        self.campaign = self._core.campaign
        self.resign = self._core.resign
        self.close = self._core.close

    def open(self, listener: ElectionListener) -> None:
        if self._is_open:
            raise Misuse("this election has its candidate: make another one")
        self._is_open = True
        self._workers.start_loop("fairway-election", lambda: self._core.run(listener))

    async def _open_registry(self) -> LeasedRegistry:
        return await RemoteRegistry.open(
            RealNet(), RealClock(), RealRng(), self._addresses, session_ms=self._session_ms, name="fairway career"
        )
