"""Request handler for REGISTER: serves the registry of this meta server to brokers and careers without ZooKeeper.

The registry keeps the sessions. The handler only knows which connection each session is on. A connection takes a
session over when it opens the session, or touches it with the session's secret. From then on, requests of that session
over other connections are not carried out. So a client that lost an answer and reads back over a new connection sees
the final state. Changes of one session are carried out in the order of their arrival.

The number of a session is no secret: it is in the names and the owner field of its nodes. Only the opener learns the
secret. The handler computes the secret from the number, with a key in the registry's file, so the secret is valid after
a restart.

`RegistryAccess` says what may be read and written. No other write comes between a check and its write.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
from collections import deque
from itertools import islice

from fairway import limits
from fairway.errors import Code, Misuse, Refused
from fairway.meta.registry_access import RegistryAccess
from fairway.protocol.route_messages import Act, Register, Registered
from fairway.registry.port import Exists, Missing, Node, NotAllowed, RegistryError, SessionOver, VersionMismatch, Watch
from fairway.registry.sqlite import SqliteRegistry, SqliteSession
from fairway.registry.tree import checked_path, node_bytes
from fairway.runtime.service import cancel
from fairway.serving.memory_plan import SharedMemory
from fairway.serving.requests import Requester as Connection
from fairway.serving.requests import ServedRequest

SESSION_MS_MIN = 1_000
SESSION_MS_MAX = 120_000
SESSIONS_MAX = 10_000
WATCHES_MAX = 1_000  # of one session
WAIT_MS_MAX = 60_000
FEEDS_MAX = 16  # trees that clients watch
FEED_KEPT = 10_000  # changes kept per tree; a client farther behind reads the whole tree again
FEED_PAGE = 1_000  # changes in one answer: with the longest names a control message holds them
_SECRET_BYTES = 16
QUESTIONS = frozenset({Act.WATCH, Act.FEED})  # may wait for news
_WRITES = frozenset({Act.CREATE, Act.PUT, Act.REMOVE})
_LAST_S = 1.0  # for changes under way when the server stops
_FEED_BITS = 20  # a million changes a millisecond, and the number fits the wire until the year 2200

_TROUBLES: dict[type[RegistryError], str] = {
    Exists: "exists", Missing: "missing", VersionMismatch: "stale", SessionOver: "over", NotAllowed: "not allowed",
}  # fmt: skip
_ELSEWHERE = Refused(
    Code.UNSUPPORTED,
    "the registry of this cluster is ZooKeeper: give --registry zookeeper://HOST:PORT, as its meta servers have it",
)

_NO_MEMORY = Refused(
    Code.BUSY,
    "the memory for sessions of this registry is full: end those that are not needed, or give the meta server more "
    "(--memory-mib)",
    retry_after_ms=1_000,
)

RegisterRequest = ServedRequest[Register]


class _News:
    """How often one node has changed for its session, and an event for the next change."""

    def __init__(self) -> None:
        self.number = 1
        self.changed = asyncio.Event()
        self.watch: Watch | None = None

    def count(self) -> None:
        self.number += 1
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


class _Feed:
    """The latest changes in one tree, numbered. Numbers from before a restart are never used again."""

    def __init__(self, root: str, first: int) -> None:
        self.changed = asyncio.Event()
        self.watch: Watch | None = None
        self._root = root
        self._end = first
        self._paths: deque[str] = deque(maxlen=FEED_KEPT)

    def note(self, path: str) -> None:
        if path == self._root:
            self._paths.clear()  # anything may have changed: a client with an older number reads everything again
        else:
            self._paths.append(path)
        self._end += 1
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()

    def is_news_since(self, number: int) -> bool:
        return number != self._end

    def since(self, number: int) -> Registered:
        start = self._end - len(self._paths)
        if not start <= number <= self._end:
            return Registered(path=self._root, number=self._end)
        page = list(islice(self._paths, number - start, number - start + FEED_PAGE))
        return Registered(path=self._root, children=[*dict.fromkeys(page)], number=number + len(page), exists=True)


class _Guest:
    """One session, and the connection that it is on."""

    def __init__(self, session: SqliteSession, home: Connection) -> None:
        self.session = session
        self.home = home
        self.order = asyncio.Lock()  # of the session's changes
        self.news: dict[str, _News] = {}
        self.nodes: dict[str, int] = {}  # bytes of the session's ephemeral nodes, as far as created since the start

    @property
    def held_bytes(self) -> int:
        """Memory of the session, as an estimate."""
        return limits.SESSION_BYTES + len(self.news) * limits.WATCH_BYTES + sum(self.nodes.values())

    def news_of(self, path: str, room: int) -> _News:
        news = self.news.get(path)
        if news is None:
            if len(self.news) >= WATCHES_MAX:
                raise Refused(Code.BUSY, f"a session watches {WATCHES_MAX} nodes at most")
            if room < limits.WATCH_BYTES:
                raise _NO_MEMORY
            news = self.news[path] = _News()
            news.watch = self.session.watch(path, news.count)
        return news

    def forget(self) -> None:
        """The session is over, or about to be: answer its waiting watches."""
        for news in self.news.values():
            if news.watch is not None:
                news.watch.cancel()
            news.count()


class RegistryRequestHandler:
    """All sessions of clients. Without a `maker` there are none, and the refusal names the cluster's registry."""

    def __init__(
        self, maker: SqliteRegistry | None, started_ms: int = 0, bytes_max: int = limits.REGISTRY_BYTES_MAX
    ) -> None:
        """`started_ms`: the server's start, from which the numbers of feeds begin. `bytes_max`: bound for all nodes,
        and for all sessions with their ephemeral nodes."""
        self._maker = maker
        if maker is not None:
            maker.bound(bytes_max)
        self.memory: SharedMemory[int, Connection] = SharedMemory(bytes_max // 2, 0)  # half: for clients' sessions
        self._feeds: dict[str, _Feed] = {}
        self._first = (started_ms << _FEED_BITS) + 1
        self._guests: dict[int, _Guest] = {}
        self._tasks: dict[asyncio.Task[None], None] = {}
        self._key = b""
        self._writing = asyncio.Lock()
        self.access = RegistryAccess(self._is_held)

    async def start(self) -> None:
        """Prepare, before the first request."""
        if self._maker is not None:
            self._key = await self._maker.session_key()

    def __len__(self) -> int:
        return len(self._guests)

    def check(self, message: Register) -> None:
        """Raise `Refused` if the request can never be granted."""
        if self._maker is None:
            raise _ELSEWHERE
        if message.act is Act.OPEN and len(self._guests) >= SESSIONS_MAX:
            raise Refused(Code.BUSY, f"this registry has {SESSIONS_MAX} sessions", retry_after_ms=1_000)

    @property
    def held_bytes(self) -> int:
        """Memory of the registry's nodes, if this server keeps the registry."""
        return 0 if self._maker is None else self._maker.held_bytes

    def take(self, request: RegisterRequest) -> None:
        task = asyncio.get_running_loop().create_task(self._serve(request), name="fairway-meta-register")
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        if request.wait_until_ns:
            request.wait_at(task.cancel)  # only a read waits: no change is cancelled

    async def stop(self) -> None:
        """Answer the waiting watches and feeds. Give changes under way one second to finish and be answered."""
        for guest in self._guests.values():
            guest.forget()
        for root, feed in self._feeds.items():
            if feed.watch is not None:
                feed.watch.cancel()
            feed.note(root)
        if self._tasks:
            await asyncio.wait([*self._tasks], timeout=_LAST_S)
        await cancel(self._tasks)

    # --- internals ---------------------------------------------------------------------------------------------------

    async def _serve(self, request: RegisterRequest) -> None:
        asked = request.message
        try:
            request.respond(await self._do(request))
        except RegistryError as error:
            trouble = _TROUBLES.get(type(error))
            if trouble == "over":
                self._drop(asked.session)
            if trouble is None:  # the result is unknown, so no answer is sent
                request.end()
            else:
                request.respond(Registered(trouble))
        except (Refused, Misuse) as error:
            request.fail(error)
        finally:
            request.end()

    def _drop(self, session: int) -> None:
        guest = self._guests.pop(session, None)
        self.memory.forget(session)
        if guest is not None:
            guest.forget()

    async def _do(self, request: RegisterRequest) -> Registered:
        asked = request.message
        if asked.act is Act.OPEN:
            return await self._open(request)
        guest = self._guest(asked, request.session)
        if guest is None or guest.home is not request.session:
            return Registered("moved")
        guest.session.touch()
        if asked.act in QUESTIONS:
            await self.access.check(guest.session, asked)
            return await (self._watch(guest, asked) if asked.act is Act.WATCH else self._feed(asked))
        async with guest.order:
            if asked.act not in _WRITES:
                return await self._carry_out(guest, request)
            async with self._writing:
                return await self._carry_out(guest, request)

    async def _open(self, request: RegisterRequest) -> Registered:
        timeout_ms = min(max(request.message.number, SESSION_MS_MIN), SESSION_MS_MAX)
        if self.memory.room(0, request.session, is_small=True) < limits.SESSION_BYTES:
            raise _NO_MEMORY
        session = await self._own.open_session(timeout_ms)
        self._admit(session.session_id, session, request.session)
        secret = self._secret_of(session.session_id)
        return Registered(number=session.session_id, version=timeout_ms, value=secret)

    def _guest(self, asked: Register, home: Connection) -> _Guest | None:
        """The session of a request; None if no connection has touched it since a restart; raises `SessionOver`. A touch
        with the secret moves the session to this connection."""
        number, guest = asked.session, self._guests.get(asked.session)
        session = self._own.session(number) if guest is None else guest.session
        if asked.act is not Act.TOUCH or (guest is not None and guest.home is home):
            return guest
        if not hmac.compare_digest(asked.value, self._secret_of(number)):
            raise Refused(Code.BAD_REQUEST, f"session {number:x} was opened by somebody else: show its secret")
        guest = guest or self._admit(number, session, home)
        guest.home = home
        self.memory.charge(number, home)
        return guest

    def _secret_of(self, session: int) -> bytes:
        return hashlib.blake2b(session.to_bytes(8, "little"), key=self._key, digest_size=_SECRET_BYTES).digest()

    def _is_held(self, session: int) -> bool:
        """Whether a live connection may have the session. A session that nobody has touched since a restart may have
        one."""
        guest = self._guests.get(session)
        return guest is None or not guest.home.is_gone

    def _admit(self, number: int, session: SqliteSession, home: Connection) -> _Guest:
        guest = self._guests[number] = _Guest(session, home)
        self.memory.note(number, guest.held_bytes)
        self.memory.charge(number, home)
        session.on_session = lambda _: self._drop(number)  # a lent session reports nothing but its end
        return guest

    @property
    def _own(self) -> SqliteRegistry:
        if self._maker is None:
            raise _ELSEWHERE
        return self._maker

    async def _carry_out(self, guest: _Guest, request: RegisterRequest) -> Registered:
        session, asked = guest.session, request.message
        if guest.home is not request.session:
            return Registered("moved")
        await self.access.check(session, asked)
        match asked.act:
            case Act.GET:
                node = await session.get(asked.path)
                if node is None:
                    return Registered(path=asked.path)
                return Registered("", node.path, node.value, node.version, node.owner, exists=True)
            case Act.CHILDREN:
                return Registered(path=asked.path, children=await session.children(asked.path))
            case Act.CREATE:
                self._check_room(guest, request)
                node = await session.create(
                    asked.path, asked.value, is_ephemeral=asked.is_ephemeral, is_numbered=asked.is_numbered
                )
                self._note_node(guest, asked, node)
                return Registered("", node.path, b"", node.version, node.owner, exists=True)
            case Act.PUT:
                if not asked.number:
                    raise Refused(Code.BAD_REQUEST, "a PUT names the version that it expects, plus one")
                self._check_room(guest, request)
                node = await session.put(asked.path, asked.value, asked.number - 1)
                self._note_node(guest, asked, node)
                return Registered("", node.path, b"", node.version, node.owner, exists=True)
            case Act.REMOVE:
                await session.remove(asked.path, asked.number - 1 if asked.number else None)
                if guest.nodes.pop(asked.path, 0):
                    self.memory.note(asked.session, guest.held_bytes)
            case Act.CLOSE:
                self._drop(asked.session)
                await session.close()
        return Registered(path=asked.path)

    def _check_room(self, guest: _Guest, request: RegisterRequest) -> None:
        """Raise `Refused` if the connection would take more memory than is left for it."""
        asked = request.message
        size = limits.NODE_BYTES + len(asked.path) + len(asked.value) - guest.nodes.get(asked.path, 0)
        if self.memory.room(asked.session, request.session) < size:
            raise _NO_MEMORY

    def _note_node(self, guest: _Guest, asked: Register, node: Node) -> None:
        if node.owner == asked.session:
            guest.nodes[node.path] = node_bytes(node.path, node)
            self.memory.note(asked.session, guest.held_bytes)

    async def _watch(self, guest: _Guest, asked: Register) -> Registered:
        """Register the watch first, compare again, then wait."""
        news = guest.news_of(asked.path, self.memory.room(asked.session, guest.home))
        self.memory.note(asked.session, guest.held_bytes)
        if asked.number == news.number and asked.wait_ms:
            await _wait(news.changed, asked.wait_ms)
        return Registered(path=asked.path, number=news.number)

    async def _feed(self, asked: Register) -> Registered:
        """In the same order: register the feed first, compare again, then wait."""
        feed = self._feed_of(asked.path)
        if not feed.is_news_since(asked.number) and asked.wait_ms:
            await _wait(feed.changed, asked.wait_ms)
        return feed.since(asked.number)

    def _feed_of(self, root: str) -> _Feed:
        feed = self._feeds.get(root)
        if feed is None:
            if len(self._feeds) >= FEEDS_MAX:
                raise Refused(Code.BUSY, f"{FEEDS_MAX} trees of this registry are watched: no more")
            feed = _Feed(checked_path(root), self._first)
            feed.watch = self._own.watch_tree(root, feed.note)
            self._feeds[root] = feed
        return feed


async def _wait(changed: asyncio.Event, wait_ms: int) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(min(wait_ms, WAIT_MS_MAX) / 1_000):
            await changed.wait()
