"""Registries by their URL; `RemoteRegistry`, the registry of a meta server over the wire; and single requests.

    sqlite:DIR                          a file in that directory, for one meta server
    zookeeper://HOST:PORT,…[/ROOT]      everything is kept below ROOT
    meta://HOST:PORT                    the registry of a meta server with SQLite, over the wire

`RemoteRegistry` serves brokers and careers that have no ZooKeeper. The meta server keeps the session; the client knows
until when the session certainly lives (`fairway.registry.sessions.Certainty`). The client repeats a read whose
answer was lost. A change whose answer was lost raises `AnswerLost`, as `fairway.registry.port` says. A watch is a long
poll, one per node. A new watch, and each watch after a failure, is called once without a change, so that no change is
missed.

`Inquirer` sends single requests to one of several servers, and waits for one outcome per request.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Self, TypeVar

from fairway.errors import Misuse, Refused, RemoteProtocolError, Unreachable
from fairway.protocol import ConnectionOptions
from fairway.protocol.connection_states import FEED
from fairway.protocol.line import Answer, ConnectionLost, Line, ReconnectOptions, RequestOutcome
from fairway.protocol.messages import ControlMessage
from fairway.protocol.request_queue import PendingRequest, RequestQueue
from fairway.protocol.route_messages import Act, Register, Registered
from fairway.redaction import without_password
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
    VersionMismatch,
    Watch,
)
from fairway.registry.sessions import QUESTIONS_PER_SESSION, SessionClient
from fairway.registry.tree import checked_path, checked_value, checked_version
from fairway.runtime.clock import Clock
from fairway.runtime.loop_link import LoopLink
from fairway.runtime.net import PORT_MAX, Address, Net
from fairway.runtime.rng import Rng

AnswerT = TypeVar("AnswerT", bound=ControlMessage)

_GOODBYE_S = 1.0


class Inquirer:
    """A line with a `RequestQueue`, and its link. Create it on the loop that it lives on.

    Each request is sent once. If its answer is lost, the caller decides.
    """

    def __init__(
        self,
        net: Net,
        clock: Clock,
        rng: Rng,
        addresses: Sequence[Address],
        *,
        name: str = "fairway",
        features: tuple[str, ...] = (),
        opened: Callable[[], None] | None = None,
        on_trouble: Callable[[str, int], None] | None = None,
    ) -> None:
        options = ReconnectOptions(hello=ConnectionOptions(name=name, features=features), backoff_most_ms=1_000)
        self.line = Line(rng, options, now_ns=clock.monotonic_ns(), on_trouble=on_trouble)
        self._requests = RequestQueue(on_open=opened)
        self.line.add(self._requests, clock.monotonic_ns())
        self._link = LoopLink(self.line, addresses, net, clock)

    async def connected(self, patience_s: float, first_s: float) -> bool:
        """Wait until the line is open, for at most `patience_s`. With 0, wait until the first attempt has failed."""
        line = self.line
        if patience_s:
            return await self._link.wait(lambda: line.is_open, patience_s)
        await self._link.wait(lambda: line.is_open or line.trouble is not None, first_s)
        return line.is_open

    async def outcome(self, message: ControlMessage, timeout_s: float) -> RequestOutcome:
        """How the request ended. `ConnectionLost` also if nobody answered in time."""
        settled = asyncio.Event()
        request = self._requests.put(PendingRequest(message, settled.set))
        self._link.stir()
        with contextlib.suppress(TimeoutError):
            try:
                async with asyncio.timeout(timeout_s):
                    await settled.wait()
            finally:
                request.is_abandoned = True
        return request.outcome or ConnectionLost(self.line.trouble or f"no answer within {timeout_s:g} s")

    def ask_first(self, message: ControlMessage) -> None:
        """Send this request before all that wait, and ignore the answer. For `opened`."""
        self._requests.put_first(PendingRequest(message))

    async def ask(self, message: ControlMessage, kind: type[AnswerT], timeout_s: float) -> AnswerT:
        """The answer. Raises `Refused`, or `Unreachable` if no answer came."""
        outcome = await self.outcome(message, timeout_s)
        if isinstance(outcome, Answer):
            if not isinstance(outcome.message, kind):
                raise RemoteProtocolError(f"{type(message).__name__} was answered with {outcome.message!r}")
            return outcome.message
        if isinstance(outcome, ConnectionLost):
            raise Unreachable(outcome.sentence)
        raise outcome

    async def close(self) -> None:
        await self._link.close(_GOODBYE_S)

    def abort(self) -> None:
        self._link.abort()


REMOTE_SESSION_MS = 6_000
FIRST_S = 10.0  # for the first session to open
_MS_NS = 1_000_000
_WATCH_MS = 30_000
_CLOSE_S = 1.0  # for the meta server to end a session
_PAUSE_S = 0.2  # before another try of a request that the meta server did not grant
_NO_FEED_S = 5.0  # between two checks of a tree, if the meta server is too old for feeds
_READS_MAX = 32  # of `get_many`, in flight at once

_TROUBLES: dict[str, type[RegistryError]] = {
    "exists": Exists, "missing": Missing, "stale": VersionMismatch, "over": SessionOver, "not allowed": NotAllowed,
    "moved": AnswerLost,  # to another connection of this registry
}  # fmt: skip


class RemoteRegistry(SessionClient):
    """One session at the registry of a meta server. `await RemoteRegistry.open(...)`, then `await close()`."""

    def __init__(
        self, net: Net, clock: Clock, rng: Rng, addresses: Sequence[Address], *, session_ms: int, name: str
    ) -> None:
        super().__init__(asyncio.get_running_loop())
        self._clock = clock
        self._addresses = tuple(addresses)
        self.session_ms = session_ms  # as requested; later as granted by the meta server
        self._name = name
        self._secret = b""  # moves the session to another connection
        self._state = SessionState.OVER
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._feeders: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(_READS_MAX)
        self._settled = asyncio.Event()  # there is a session
        self._nudged = asyncio.Event()  # there is a new connection: check the session
        self._is_closing = False
        self._refused: Refused | None = None
        self._inquirer = Inquirer(
            net,
            clock,
            rng,
            addresses,
            name=name,
            features=(FEED,),
            opened=self._opened,
            on_trouble=lambda *_: self._suspend(),
        )
        self._keeper = self._begin_task(self._keep(), "fairway-remote-registry")

    @classmethod
    async def open(
        cls,
        net: Net,
        clock: Clock,
        rng: Rng,
        addresses: Sequence[Address],
        *,
        session_ms: int = REMOTE_SESSION_MS,
        name: str = "fairway",
    ) -> Self:
        """Return with an open session; raises `Unreachable` or `Refused` if there is none within 10 s."""
        registry = cls(net, clock, rng, addresses, session_ms=session_ms, name=name)
        try:
            async with asyncio.timeout(FIRST_S):
                await registry._settled.wait()
        except TimeoutError:
            trouble = registry._refused or registry._unreachable()
            await registry.close()
            raise trouble from None
        except BaseException:
            await registry.close()
            raise
        if registry._refused is not None:
            await registry.close()
            raise registry._refused
        return registry

    def _unreachable(self) -> Unreachable:
        where = ",".join(f"{host}:{port}" for host, port in self._addresses)
        why = self._inquirer.line.trouble or "no answer yet"
        command = f"fairway meta --registry sqlite:meta --port {self._addresses[0][1]}"
        return Unreachable(f"no meta server at meta://{where}: {why}. Is it running there (`{command}`)?")

    def _begin_task(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Start one of the loops that end with the registry. A loop that fails reports the error at once."""
        task = self._loop.create_task(work, name=name)
        task.add_done_callback(self._note_end)
        return task

    def _note_end(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            message = f"{task.get_name()} has ended: what changes in the registry is not noticed any more"
            self._loop.call_exception_handler({"message": message, "exception": error, "task": task})

    # --- the port ----------------------------------------------------------------------------------------------------

    async def get(self, path: str, *, fresh: bool = False) -> Node | None:
        """Read a node. The answer is always fresh, because there is one meta server."""
        del fresh
        answer = await self._read(Register(Act.GET, self.session_id, checked_path(path)))
        return Node(path, answer.value, answer.version, answer.owner) if answer.exists else None

    async def get_many(self, paths: Sequence[str]) -> list[Node | None]:
        return [*await asyncio.gather(*map(self._get_in_turn, paths))]

    async def _get_in_turn(self, path: str) -> Node | None:
        async with self._room:
            return await self.get(path)

    async def children(self, path: str) -> list[str]:
        return (await self._read(Register(Act.CHILDREN, self.session_id, checked_path(path)))).children

    async def create(
        self, path: str, value: bytes = b"", *, is_ephemeral: bool = False, is_numbered: bool = False
    ) -> Node:
        checked_value(checked_path(path), value)
        asked = Register(Act.CREATE, self.session_id, path, value, is_ephemeral=is_ephemeral, is_numbered=is_numbered)
        answer = await self._ask(asked)
        return Node(answer.path, value, answer.version, answer.owner)

    async def put(self, path: str, value: bytes, version: int) -> Node:
        checked_value(checked_path(path), value)
        checked_version(path, version)
        answer = await self._ask(Register(Act.PUT, self.session_id, path, value, number=version + 1))
        return Node(path, value, answer.version, answer.owner)

    async def remove(self, path: str, version: int | None = None) -> None:
        checked_version(path, version)
        number = 0 if version is None else version + 1
        await self._ask(Register(Act.REMOVE, self.session_id, checked_path(path), number=number))

    def watch(self, path: str, changed: Callable[[], None]) -> Watch:
        watching = self._watches.add(checked_path(path), changed)
        if path not in self._watchers:
            self._watchers[path] = self._begin_task(self._watch(path), "fairway-remote-watch")
        return watching

    def watch_tree(self, path: str, changed: Callable[[str], None]) -> Watch:
        watching = self._watches.add_tree(checked_path(path), changed)
        if path in self._feeders:
            self._watches.tell_tree(path)
        else:
            self._feeders[path] = self._begin_task(self._feed(path), "fairway-remote-feed")
        return watching

    async def close(self) -> None:
        if self._is_closing:
            return
        self._is_closing = True
        tasks = [self._keeper, *self._watchers.values(), *self._feeders.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # all at once: a caller's cancellation is noticed here
        self._watches.clear()
        is_silent = False
        if self.session_id and self._inquirer.line.is_open:
            outcome = await self._inquirer.outcome(Register(Act.CLOSE, self.session_id), _CLOSE_S)
            is_silent = isinstance(outcome, ConnectionLost)
        self.session_id = 0
        self._certainty.end()
        if is_silent:
            self._inquirer.abort()  # nor will it answer earlier requests
        else:
            await self._inquirer.close()

    # --- questions ---------------------------------------------------------------------------------------------------

    async def _read(self, asked: Register) -> Registered:
        """Send a request that changes nothing, and repeat it once if its answer is lost."""
        try:
            return await self._ask(asked)
        except AnswerLost:
            return await self._ask(asked)

    async def _ask(self, asked: Register, within_ms: int = 0) -> Registered:
        if self._is_closing or (not asked.session and asked.act is not Act.OPEN):
            raise SessionOver("there is no registry session now: it was closed, or the meta server has ended it")
        sent_ns = self._clock.monotonic_ns()
        outcome = await self._inquirer.outcome(asked, (within_ms or self.session_ms + asked.wait_ms) / 1_000)
        if isinstance(outcome, ConnectionLost):
            raise AnswerLost(
                f"the meta server did not say what became of {asked.act.name} {asked.path}: {outcome.sentence}"
            )
        if isinstance(outcome, Refused):
            raise outcome
        answer = _registered(outcome)
        if asked.session and asked.session == self.session_id and answer.trouble != "over" and not asked.wait_ms:
            self._certainty.answered(sent_ns, self._clock.monotonic_ns())
        if answer.trouble:
            raise _TROUBLES.get(answer.trouble, RegistryError)(f"registry node {asked.path}: {answer.trouble}")
        return answer

    # --- the session -------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Open a session, and renew it six times in its time-out."""
        while True:
            if not self.session_id:
                await self._begin()
            else:
                await self._touch()
            is_open = self._state is SessionState.OPEN
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.session_ms / 1_000 / QUESTIONS_PER_SESSION if is_open else _PAUSE_S):
                    await self._nudged.wait()
            self._nudged.clear()

    async def _begin(self) -> None:
        sent_ns = self._clock.monotonic_ns()
        asked = Register(Act.OPEN, 0, value=self._name.encode(), number=self.session_ms)
        try:
            answer = await self._ask(asked)
        except Refused as refused:
            self._refused = refused
            self._settled.set()
            return
        except RegistryError:
            return
        self._refused = None
        self.session_id, self._secret = answer.number, answer.value
        self.session_ms = answer.version or self.session_ms
        self._certainty.begin(sent_ns, self.session_ms * _MS_NS)
        self._turn(SessionState.OPEN)
        self._settled.set()

    def _opened(self) -> None:
        """There is a new connection: move the session there before any other request. The meta server carries out no
        older request of the previous connection after that."""
        if self.session_id:
            self._inquirer.ask_first(Register(Act.TOUCH, self.session_id, value=self._secret))
        self._nudged.set()

    async def _touch(self) -> None:
        session = self.session_id
        try:
            await self._ask(Register(Act.TOUCH, session, value=self._secret), self.session_ms // 3)
        except SessionOver:
            self._over(session)
        except (RegistryError, Refused):
            self._suspend()
        else:
            self._turn(SessionState.OPEN)

    def _suspend(self) -> None:
        if self._state is SessionState.OPEN:
            self._turn(SessionState.SUSPENDED)

    def _over(self, session: int) -> None:
        if session and session == self.session_id:
            self.session_id = 0
            self._certainty.end()
            self._turn(SessionState.OVER)

    def _turn(self, state: SessionState) -> None:
        if state is self._state or self._is_closing:
            return
        self._state = state
        self.on_session(state)
        if state is SessionState.OPEN:
            self._watches.tell_all()

    # --- watches -----------------------------------------------------------------------------------------------------

    async def _watch(self, path: str) -> None:
        """Poll for changes of one node, until its last watch is cancelled."""
        seen = session = 0
        try:
            while path in self._watches:
                if session != self.session_id:
                    session, seen = self.session_id, 0
                answer = await self._poll(Act.WATCH, path, session, seen)
                if answer is None:
                    seen = 0
                elif answer.number != seen:
                    seen = answer.number
                    self._watches.tell([path])
        finally:
            self._watchers.pop(path, None)

    async def _feed(self, root: str) -> None:
        """Poll for changes in one tree, until its last watch is cancelled."""
        seen = session = 0
        try:
            while root in self._watches.trees:
                if session != self.session_id:
                    session, seen = self.session_id, 0
                line = self._inquirer.line
                if not session or not line.is_open:
                    await asyncio.sleep(_PAUSE_S)
                elif FEED not in line.features:
                    self._watches.tell_tree(root)
                    await asyncio.sleep(_NO_FEED_S)
                elif (answer := await self._poll(Act.FEED, root, session, seen)) is None:
                    seen = 0  # nothing is known, and the next answer says so
                else:
                    seen = answer.number
                    if answer.exists:
                        self._watches.tell_below(answer.children)
                    else:
                        self._watches.tell_tree(root)
        finally:
            self._feeders.pop(root, None)

    async def _poll(self, act: Act, path: str, session: int, seen: int) -> Registered | None:
        """Ask what has changed since; None, after a pause: the meta server did not say."""
        try:
            return await self._ask(Register(act, session, path, number=seen, wait_ms=_WATCH_MS if seen else 0))
        except SessionOver:
            self._over(session)
        except (RegistryError, Refused):
            pass
        await asyncio.sleep(_PAUSE_S)
        return None


def _registered(outcome: object) -> Registered:
    message: ControlMessage | None = outcome.message if isinstance(outcome, Answer) else None
    if not isinstance(message, Registered):
        raise AnswerLost(f"REGISTER was answered with {message!r}: what became of it is not known")
    return message


META = "meta://"
META_PORT = 20882
SESSION_MS = 10_000
_SQLITE = "sqlite:"
_ZOOKEEPER = "zookeeper://"
_SERVER = re.compile(r"(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})")
_FORMS = "write sqlite:DIR, or zookeeper://HOST:PORT,HOST:PORT"


async def open_registry(
    url: str, net: Net, clock: Clock, rng: Rng, *, session_ms: int = SESSION_MS, name: str = "fairway"
) -> Registry:
    """Open the registry at that URL, with an open session. `Misuse` says how URLs are written. The servers may grant
    more or less than `session_ms`."""
    if url.startswith(META):
        return await RemoteRegistry.open(net, clock, rng, parse_meta(url), session_ms=session_ms, name=name)
    if url.startswith(_ZOOKEEPER):
        hosts, root = parse_zookeeper(url)
        from fairway.registry.zookeeper import ZooKeeperRegistry

        return await ZooKeeperRegistry.open(hosts, root=root, session_ms=session_ms, clock=clock)
    if is_sqlite(url):
        directory = parse_sqlite(url)
        from fairway.registry.sqlite import SqliteRegistry

        return await SqliteRegistry.open(directory, clock=clock)
    raise Misuse(
        f"no registry at {without_password(url)!r}: write meta://HOST:PORT, zookeeper://HOST:PORT,... or sqlite:DIR"
    )


def is_sqlite(url: str) -> bool:
    return url.startswith(_SQLITE)


def parse_sqlite(url: str) -> str:
    """The directory."""
    directory = url.removeprefix(_SQLITE)
    if directory == url:
        raise Misuse(f"no registry at {without_password(url)!r}: {_FORMS}")
    if not directory or directory.startswith("//"):
        raise Misuse(f"no directory in {without_password(url)!r}: write sqlite:DIR, such as sqlite:data/meta")
    return directory


def parse_zookeeper(url: str) -> tuple[str, str]:
    """The servers, and the node below which everything is kept; "": the root."""
    servers, slash, root = url.removeprefix(_ZOOKEEPER).partition("/")
    for server in servers.split(","):
        found = _SERVER.fullmatch(server)
        if found is None or not 0 < int(found[1]) <= PORT_MAX:
            raise Misuse(f"bad server {without_password(server)!r} in {without_password(url)!r}: {_FORMS}")
    root = root.rstrip("/")
    return servers, f"{slash}{root}" if root else ""


def parse_meta(url: str) -> tuple[Address, ...]:
    """Parse `meta://HOST[:PORT],...`; also the places of a URL with another scheme."""
    places = url.partition("://")[2].partition("?")[0].rstrip("/")
    if not places:
        raise Misuse(
            f"no meta server in {without_password(url)!r}: write {META}HOST:PORT, several with commas between them"
        )
    return tuple(_address(place, url) for place in places.split(","))


def _address(raw: str, url: str) -> Address:
    host, _, port = raw.rpartition(":") if raw.count(":") == 1 or "]:" in raw else (raw, "", str(META_PORT))
    host = host.removeprefix("[").removesuffix("]")
    is_port = port.isascii() and port.isdigit() and 1 <= int(port) <= PORT_MAX
    if not host or not is_port or "@" in raw:
        what = f"bad place {without_password(raw)!r} in {without_password(url)!r}"
        raise Misuse(f"{what}: write HOST:PORT, for example {META}127.0.0.1:{META_PORT}")
    return host, int(port)
