"""The parts of a session that registries share: how long it lives, and its watches.

`Certainty` and `SessionClient` are for the client of a session, `SessionLeases` for the server, `SessionWatches` for
either.

A client must know until when its session certainly lives. The ensemble ends a session after a time-out, T, without news
of its client. The client knows when it sent a question, and that an answer came. That proves little, because the
answering server may not have informed the other servers yet. Servers inform each other twice per tick, and a session
lasts at least two ticks, so the others know after T/4 at the latest. Therefore:

- A new connection, of a new or an old session, is news to the whole ensemble, not older than the client's request for
  it.
- The whole ensemble knows of a question once a later question on the same connection was answered. The client must have
  sent the later question at least T/4 after the first answer.
- The session lives for T after the client sent the latest question that the whole ensemble knows of. The session counts
  as certain for at most 2 T/3 after the latest question of all. So small errors of clocks and late messages between
  servers do no harm.

With six questions in T, the last bound decides, unless the client itself stood still for a while.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from typing import TypeAlias

from fairway.registry.port import SessionOver, SessionState
from fairway.registry.tree import is_below

_WatchTable: TypeAlias = "dict[str, list[Watching]]"

QUESTIONS_PER_SESSION = 6
SILENCES_PER_SESSION = 3  # a question without an answer for this part of a session breaks the connection


class Certainty:
    """Until when one session certainly lives, on the client's monotonic clock."""

    def __init__(self) -> None:
        self.until_ns = 0
        self._session_ns = 0
        self._known_ns = 0  # the whole ensemble has newer news of the session
        self._answered: deque[tuple[int, int]] = deque()  # when sent, when answered: maybe not passed on

    def begin(self, asked_ns: int, session_ns: int) -> None:
        """A connection was made, requested at `asked_ns`; the session lasts so long."""
        self._session_ns = session_ns
        self._known_ns = asked_ns
        self._answered.clear()
        self._believe(asked_ns)

    def answered(self, sent_ns: int, now_ns: int) -> None:
        """A question sent at `sent_ns` was answered now, on the latest connection."""
        while self._answered and self._answered[0][1] + self._session_ns // 4 <= sent_ns:
            self._known_ns = max(self._known_ns, self._answered.popleft()[0])
        self._answered.append((sent_ns, now_ns))
        self._believe(sent_ns)

    def end(self) -> None:
        """The session is over, or is about to be."""
        self.until_ns = 0
        self._session_ns = 0
        self._answered.clear()

    def _believe(self, sent_ns: int) -> None:
        if self._session_ns:
            until_ns = min(sent_ns + self._session_ns * 2 // 3, self._known_ns + self._session_ns)
            self.until_ns = max(self.until_ns, until_ns)


class SessionClient:
    """What a client keeps of its session, whatever the registry: until when it is certain, and its watches."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.on_session: Callable[[SessionState], None] = lambda _: None
        self._loop = loop
        self.session_id = 0  # 0: there is none now
        self._certainty = Certainty()
        self._watches = SessionWatches(loop)

    def certain_until_ns(self) -> int:
        return self._certainty.until_ns


class SessionLeases:
    """The open sessions, and when each ends without news of its client. The clock is an argument."""

    def __init__(self) -> None:
        self._timeout_ns: dict[int, int] = {}
        self._due_ns: dict[int, int] = {}

    def open(self, session: int, timeout_ns: int, now_ns: int) -> None:
        self._timeout_ns[session] = timeout_ns
        self._due_ns[session] = now_ns + timeout_ns

    def __contains__(self, session: int) -> bool:
        return session in self._due_ns

    def __len__(self) -> int:
        return len(self._due_ns)

    @property
    def sessions(self) -> list[int]:
        return list(self._due_ns)

    def due_ns(self, session: int) -> int:
        """When the session ends without news of its client; 0: it has ended."""
        return self._due_ns.get(session, 0)

    def check(self, session: int) -> None:
        if session not in self._due_ns:
            raise SessionOver(f"registry session {session:x} is over: its nodes are gone, open another")

    def touch(self, session: int, now_ns: int) -> None:
        self.check(session)
        self._due_ns[session] = max(self._due_ns[session], now_ns + self._timeout_ns[session])

    def close(self, session: int) -> None:
        self._due_ns.pop(session, None)
        self._timeout_ns.pop(session, None)

    def expire(self, now_ns: int) -> list[int]:
        """Close the sessions whose time is up, and return them."""
        over = [session for session, due_ns in self._due_ns.items() if due_ns <= now_ns]
        for session in over:
            self.close(session)
        return over

    def forgive(self, away_ns: int) -> None:
        """The server stood still for so long, and received nothing: prolong all sessions."""
        for session in self._due_ns:
            self._due_ns[session] += away_ns


class Watching:
    """One watch."""

    def __init__(self, table: _WatchTable, path: str, changed: Callable[..., None]) -> None:
        self._table = table
        self._path = path
        self._changed = changed
        self._is_cancelled = False
        table.setdefault(path, []).append(self)

    def cancel(self) -> None:
        self._is_cancelled = True
        left = [each for each in self._table.get(self._path, ()) if each is not self]
        if left:
            self._table[self._path] = left
        else:
            self._table.pop(self._path, None)

    def call(self, *below: str) -> None:
        if not self._is_cancelled:
            self._changed(*below)


class SessionWatches:
    """The watches of one session. The loop calls them one by one, never from within a call to the registry."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._at: _WatchTable = {}
        self._below: _WatchTable = {}

    def add(self, path: str, changed: Callable[[], None]) -> Watching:
        return Watching(self._at, path, changed)

    def add_tree(self, path: str, changed: Callable[[str], None]) -> Watching:
        return Watching(self._below, path, changed)

    @property
    def paths(self) -> list[str]:
        return list(self._at)

    @property
    def trees(self) -> list[str]:
        """The nodes below which everything is watched."""
        return list(self._below)

    def __contains__(self, path: str) -> bool:
        return path in self._at

    def tell(self, paths: Iterable[str]) -> None:
        """Call the watches of these nodes, which have changed or may have changed."""
        for path in paths:
            for watching in self._at.get(path, ()):
                self._loop.call_soon(watching.call)

    def tell_below(self, paths: Iterable[str]) -> None:
        """Call the tree watches that these nodes are below of."""
        for path in paths:
            for root, watchings in self._below.items():
                if is_below(path, root):
                    for watching in watchings:
                        self._loop.call_soon(watching.call, path)

    def tell_tree(self, root: str) -> None:
        """Call the tree watches of a node: anything below it may have changed."""
        for watching in self._below.get(root, ()):
            self._loop.call_soon(watching.call, root)

    def tell_all(self) -> None:
        self.tell(self.paths)
        for root in self.trees:
            self.tell_tree(root)

    def clear(self) -> None:
        for table in (self._at, self._below):
            for watchings in list(table.values()):
                for watching in watchings:
                    watching.cancel()
