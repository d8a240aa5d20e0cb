"""Client of the simulated registry: one session after the other, over connections that break.

The client behaves like the real one. It asks six times per session whether all is well. It gives up a connection that
leaves a question unanswered for a third of a session. It reconnects with its session, and opens another when that one
is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fairway.registry.port import AnswerLost, Node, RegistryError, SessionOver, SessionState
from fairway.registry.sessions import QUESTIONS_PER_SESSION, SILENCES_PER_SESSION, SessionClient, Watching
from fairway.registry.tree import NodeChange, Tree, checked_path, checked_value, checked_version
from fairway.runtime.clock import Clock
from fairway.simulation.loop import SimLoop
from fairway.simulation.wire import SimulatedWire

if TYPE_CHECKING:
    from fairway.simulation.registry import SimEnsemble

T = TypeVar("T")

_REDIAL_S = 0.1  # after a failed connection
_NO_ANSWER = -1


class SimulatedConnection:
    """One connection, as client and ensemble know it."""

    there: SimulatedWire
    back: SimulatedWire

    def __init__(self, client: SimRegistry) -> None:
        self.client = client
        self.session = 0
        self.is_closed = False
        self.is_heard = False  # the ensemble's other servers do not know it yet
        self.floor = 0  # reads on this connection see at least so many changes
        self.watched: dict[str, None] = {}
        self.trees: dict[str, None] = {}
        self.waiting: dict[asyncio.Future[Any], Callable[[], Any] | None] = {}  # by answer: requests not received yet

    def close(self) -> None:
        """Close both ends. Nothing arrives any more."""
        self.is_closed = True
        self.is_heard = False
        self.there.close()
        self.back.close()


class SimRegistry(SessionClient):
    """A `Registry`. Create it with `SimEnsemble.client`."""

    def __init__(self, ensemble: SimEnsemble, name: str, session_ns: int, clock: Clock, loop: SimLoop) -> None:
        super().__init__(loop)
        self.name = name
        self.session_ms = session_ns // 1_000_000
        self.connection: SimulatedConnection | None = None  # with an open session
        self.is_gone = False
        self._ensemble = ensemble
        self._session_ns = session_ns
        self._clock = clock
        self._dialled: SimulatedConnection | None = None
        self._welcome: asyncio.Future[int] | None = None
        self._connected = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._held: list[Callable[[], None]] = []  # events that arrived while the client was paused
        self._keeping = loop.create_task(self._keep(), name=f"registry-{name}")

    # --- the port ----------------------------------------------------------------------------------------------------

    async def get(self, path: str, *, fresh: bool = False) -> Node | None:
        checked_path(path)
        return await self._ask(path, lambda connection: self._ensemble.seen(connection, fresh).get(path))

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        wanted = [checked_path(path) for path in paths]
        if not wanted:
            return []
        return await self._ask(wanted[0], lambda connection: [*map(self._ensemble.seen(connection).get, wanted)])

    async def children(self, path: str) -> list[str]:
        checked_path(path)
        return await self._ask(path, lambda connection: self._ensemble.seen(connection).children(path))

    async def create(
        self, path: str, value: bytes = b"", *, is_ephemeral: bool = False, is_numbered: bool = False
    ) -> Node:
        checked_value(checked_path(path), value)

        def changes(tree: Tree, connection: SimulatedConnection) -> list[NodeChange]:
            return tree.create(path, value, owner=connection.session if is_ephemeral else 0, is_numbered=is_numbered)

        made: Node = await self._change(path, changes)
        return made

    async def put(self, path: str, value: bytes, version: int) -> Node:
        checked_version(path, version)
        checked_value(checked_path(path), value)
        changed: Node = await self._change(path, lambda tree, _: tree.put(path, value, version))
        return changed

    async def remove(self, path: str, version: int | None = None) -> None:
        checked_version(checked_path(path), version)
        await self._change(path, lambda tree, _: tree.remove(path, version))

    async def _change(self, path: str, changes: Callable[[Tree, SimulatedConnection], list[NodeChange]]) -> Any:
        ensemble = self._ensemble
        return await self._ask(path, lambda connection: ensemble.change(connection, changes(ensemble.tree, connection)))

    def watch(self, path: str, changed: Callable[[], None]) -> Watching:
        watching = self._watches.add(checked_path(path), changed)
        if self.connection is not None:
            self._arm(self.connection, path)
        return watching

    def watch_tree(self, path: str, changed: Callable[[str], None]) -> Watching:
        watching = self._watches.add_tree(checked_path(path), changed)
        if self.connection is not None:
            self._arm(self.connection, path, is_tree=True)
        return watching

    async def close(self) -> None:
        if self.is_gone:
            return
        self._certainty.end()
        connection = self.connection
        if connection is not None and not connection.is_closed:
            answer = self._send(connection, partial(self._ensemble.end_session, connection))
            await asyncio.wait([answer], timeout=self._session_ns / 1e9)
            if answer.done() and not answer.cancelled():
                answer.exception()  # an error changes nothing: the session expires by itself
            self._give_up(connection)
        self.crash()

    # --- faults of the whole process ---------------------------------------------------------------------------------

    def pause(self) -> None:
        self._awake.clear()

    def resume(self) -> None:
        held, self._held = self._held, []
        self._awake.set()
        for arrival in held:
            arrival()

    def crash(self) -> None:
        self.is_gone = True
        self.session_id = 0
        self._certainty.end()
        self._watches.clear()
        self._keeping.cancel()
        if self.connection is not None:
            self.connection.close()
            self.connection = None

    def _arrive(self, arrival: Callable[[], None]) -> None:
        """Deliver an event. A paused process gets it later; a process that is gone never does."""
        if not self.is_gone:
            if self._awake.is_set():
                arrival()
            else:
                self._held.append(arrival)

    # --- events of the ensemble --------------------------------------------------------------------------------------

    def welcomed(self, connection: SimulatedConnection, session: int) -> None:
        self._arrive(lambda: self._enter(connection, session))

    def _enter(self, connection: SimulatedConnection, session: int) -> None:
        if connection is self._dialled and self._welcome is not None and not self._welcome.done():
            self._welcome.set_result(session)

    def answered(self, connection: SimulatedConnection, answer: asyncio.Future[Any], outcome: Any) -> None:
        def arrive() -> None:
            connection.waiting.pop(answer, None)
            if isinstance(outcome, SessionOver):
                self._over(connection)
            if answer.done():
                return
            if isinstance(outcome, RegistryError):
                answer.set_exception(outcome)
            else:
                answer.set_result(outcome)

        self._arrive(arrive)

    def changed(self, connection: SimulatedConnection, path: str, is_tree: bool) -> None:
        tell = self._watches.tell_below if is_tree else self._watches.tell
        self._arrive(lambda: tell([path]) if connection is self.connection else None)

    def told_over(self, connection: SimulatedConnection) -> None:
        self._arrive(lambda: self._over(connection))

    def noticed(self, connection: SimulatedConnection) -> None:
        """The connection broke."""

        def arrive() -> None:
            self._enter(connection, _NO_ANSWER)
            self._give_up(connection)

        self._arrive(arrive)

    # --- asking ------------------------------------------------------------------------------------------------------

    async def _ask(self, path: str, act: Callable[[SimulatedConnection], T]) -> T:
        """Send a request. The ensemble may carry it out or not, and its answer may be lost."""
        deadline_s = self._loop.time() + self._session_ns / 1e9
        while self.is_gone or not self._awake.is_set() or not self._connected.is_set():
            if self.is_gone:
                raise SessionOver(f"registry node {path}: this client is closed")
            if self._loop.time() >= deadline_s:
                raise AnswerLost(f"registry node {path}: no connection to the registry")
            await self._await_connection(deadline_s)
        connection = self.connection
        if connection is None:
            raise AnswerLost(f"registry node {path}: the connection broke")
        answer = self._send(connection, partial(act, connection))
        try:
            outcome: T = await answer
            return outcome
        except AnswerLost as error:
            raise AnswerLost(f"registry node {path}: {error}") from error

    async def _await_connection(self, deadline_s: float) -> None:
        await self._awake.wait()
        try:
            async with asyncio.timeout_at(deadline_s):
                await self._connected.wait()
        except TimeoutError:
            pass

    def _send(self, connection: SimulatedConnection, act: Callable[[], Any]) -> asyncio.Future[Any]:
        answer: asyncio.Future[Any] = self._loop.create_future()
        connection.waiting[answer] = act
        connection.there.send(self._ensemble.hear, connection, act, answer)
        return answer

    def _arm(self, connection: SimulatedConnection, path: str, *, is_tree: bool = False) -> None:
        """Set a watch. Once it is set, call it, because the node may have changed meanwhile."""
        answer = self._send(connection, partial(self._ensemble.watch, connection, path, is_tree))

        def armed(_: object) -> None:
            if answer.cancelled() or answer.exception() is not None:
                return  # on the next connection
            if is_tree:
                self._watches.tell_tree(path)
            else:
                self._watches.tell([path])

        answer.add_done_callback(armed)

    # --- the session -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        while True:
            await self._awake.wait()
            if self.connection is None:
                await self._connect()
            else:
                await self._question(self.connection)

    async def _connect(self) -> None:
        """Dial, and ask for the current session. The session is open only when the answer arrives."""
        asked_ns = self._clock.monotonic_ns()
        connection = self._dialled = self._ensemble.dial(self)
        self._welcome = self._loop.create_future()
        connection.there.send(self._ensemble.welcome, connection, self.session_id, self._session_ns)
        try:
            async with asyncio.timeout(self._session_ns / 3e9):
                session = await self._welcome
        except TimeoutError:
            connection.close()
        else:
            await self._awake.wait()
            self._connect_done(connection, session, asked_ns)
        finally:
            self._dialled = self._welcome = None
        if self.connection is None:
            await asyncio.sleep(_REDIAL_S)

    def _connect_done(self, connection: SimulatedConnection, session: int, asked_ns: int) -> None:
        if connection.is_closed or session == _NO_ANSWER:
            return
        if session == 0:
            connection.close()
            self._end_session()
            return
        self.session_id = session
        self._certainty.begin(asked_ns, self._session_ns)
        self.connection = connection
        self._connected.set()
        self._tell(SessionState.OPEN)
        for path in self._watches.paths:
            self._arm(connection, path)
        for root in self._watches.trees:
            self._arm(connection, root, is_tree=True)

    async def _question(self, connection: SimulatedConnection) -> None:
        """Ask whether all is well, and wait until the next question is due."""
        asked_ns = self._clock.monotonic_ns()
        next_s = self._loop.time() + self._session_ns / 1e9 / QUESTIONS_PER_SESSION
        answer = self._send(connection, lambda: None)
        await asyncio.wait([answer], timeout=self._session_ns / 1e9 / SILENCES_PER_SESSION)
        await self._awake.wait()
        if not answer.done():
            answer.cancel()
            self._give_up(connection)
        elif answer.exception() is None and connection is self.connection:
            self._certainty.answered(asked_ns, self._clock.monotonic_ns())
        await asyncio.sleep(max(next_s - self._loop.time(), 0.0))

    def _give_up(self, connection: SimulatedConnection) -> None:
        """Close the connection. Nobody knows whether its open requests were or will be carried out."""
        connection.close()
        for answer in connection.waiting:
            if not answer.done():
                answer.set_exception(AnswerLost("no answer came before the connection broke"))
                answer.exception()  # the caller may be gone: mark the exception as seen
        connection.waiting.clear()
        if connection is self.connection:
            self.connection = None
            self._connected.clear()
            self._tell(SessionState.SUSPENDED)

    def _over(self, connection: SimulatedConnection) -> None:
        if connection is self.connection:
            self._give_up(connection)
            self._end_session()

    def _end_session(self) -> None:
        if self.session_id:
            self.session_id = 0
            self._certainty.end()
            self._tell(SessionState.OVER)

    def _tell(self, state: SessionState) -> None:
        self._loop.call_soon(lambda: self.on_session(state))
