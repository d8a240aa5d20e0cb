"""A copy's place in the registry: the ephemeral node that says that it lives, where, and what it does.

The node is named after the data directory, so that two processes with copies of one directory cannot both be there: a
copy that was in sync once would otherwise lend its good name to one that is not.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fairway.errors import FairwayError, RemoteProtocolError, WrongDirectory
from fairway.registry.layout import Member, member_path, pack, unpack
from fairway.registry.port import Exists, Missing, Node, Registry, Stale
from fairway.world.clock import Clock

_NS_PER_MS = 1_000_000
_LEAVE_S = 1.0  # for a registry to answer who leaves; its session ends by itself
_SESSIONS = 3  # that another one is waited for: what a process leaves behind is gone after one


class Place:
    """Of one copy. It is made anew whenever a session has ended."""

    def __init__(self, registry: Registry, clock: Clock, group: str, session_ms: int) -> None:
        self.shown: Member | None = None  # what the node says
        self.why = ""  # why it cannot be had
        self._registry = registry
        self._clock = clock
        self._group = group
        self._patience_ns = _SESSIONS * session_ms * _NS_PER_MS
        self._node: Node | None = None
        self._taken_since_ns: int | None = None

    @property
    def session(self) -> int:
        """The one that the node goes with; 0: there is no node."""
        return 0 if self._node is None else self._node.owner

    async def take(self, shown: Member) -> bool:
        """See to it that the node is there and says this; False: not yet, another one has it. `WrongDirectory` where
        that one lives."""
        path = member_path(self._group, shown.directory)
        registry, known = self._registry, self._node
        try:
            if known is None or known.owner != registry.session_id or known.path != path:
                self._node = await registry.create(path, pack(shown), is_ephemeral=True)
            elif shown != self.shown:
                self._node = await registry.put(path, pack(shown), known.version)
        except (Missing, Stale):
            self._node = None
            return False
        except Exists:
            return await self._contend(path, shown)
        self.shown, self._taken_since_ns, self.why = shown, None, ""
        return True

    async def leave(self) -> None:
        """The others see at once that this copy is gone."""
        node, self._node, self.shown = self._node, None, None
        if node is not None and node.owner == self._registry.session_id:
            with suppress(FairwayError, TimeoutError):
                async with asyncio.timeout(_LEAVE_S):
                    await self._registry.remove(node.path)

    async def _contend(self, path: str, shown: Member) -> bool:
        """Somebody is there: we ourselves, by a request whose answer was lost or in the life before; or another."""
        node = await self._registry.get(path, fresh=True)
        if node is None:
            return False
        if node.owner == self._registry.session_id:
            self._node, self.shown = node, None
            return True
        try:
            other = unpack(Member, path, node.value)
        except RemoteProtocolError:
            other = shown
        if (other.host, other.port) == (shown.host, shown.port):  # nobody else can listen there: we do
            with suppress(Missing, Stale):
                await self._registry.remove(path, node.version)
            return False
        self._wait_for(other)
        return False

    def _wait_for(self, other: Member) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._taken_since_ns is None:
            self._taken_since_ns = now_ns
        where = f"{other.host}:{other.port}"
        self.why = f"the one who is registered with this data directory, at {where}, is waited out"
        if now_ns - self._taken_since_ns > self._patience_ns:
            raise WrongDirectory(
                f"another process, at {where}, lives with the same data directory id {other.directory}: this directory "
                "is a copy of that one's. A replica begins with an empty directory, and is filled by its master"
            )
