"""A copy's place in the registry: the ephemeral node that says that it lives, where, and what it does.

The node is named after the data directory, the session, and how often the place was given up, so that no life has the
name of another: whoever led under a node that is gone must no longer lead, and a request to remove the node of the life
before may be carried out late, when its sender has long made another one. Under the same name it would take that one
away, and with it the right to lead.

Two processes with copies of one directory cannot both have a place: a copy that was in sync once would otherwise lend
its good name to one that is not. So whoever has made a node looks for others of its directory, and goes if it finds
one. All sessions see all changes in one order, so of two nodes the later one's owner sees the earlier.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fairway.errors import FairwayError, Refused, RemoteProtocolError, WrongDirectory
from fairway.registry.layout import NAME_SEPARATOR, RegisteredCopy, member_path, members_path, pack, place_name, unpack
from fairway.registry.port import Exists, Missing, Node, Registry, VersionMismatch
from fairway.world.clock import Clock

_NS_PER_MS = 1_000_000
_LEAVE_S = 1.0  # for a registry to answer who leaves; its session ends by itself
_SESSIONS = 3  # that another one is waited for: what a process leaves behind is gone after one


class CopyRegistration:
    """Of one copy. It is made anew whenever a session has ended."""

    def __init__(self, registry: Registry, clock: Clock, group: str, session_ms: int) -> None:
        self.shown: RegisteredCopy | None = None  # what the node says
        self.why = ""  # why it cannot be had
        self._registry = registry
        self._clock = clock
        self._group = group
        self._patience_ns = _SESSIONS * session_ms * _NS_PER_MS
        self._node: Node | None = None
        self._taken_since_ns: int | None = None
        self._left = 0  # how often it was given up

    @property
    def session(self) -> int:
        """The one that the node goes with; 0: there is no node."""
        return 0 if self._node is None else self._node.owner

    async def take(self, shown: RegisteredCopy) -> bool:
        """See to it that the node is there and says this; False: not yet, another one has it. `WrongDirectory` where
        that one lives."""
        known = self._node
        if known is None or known.owner != self._registry.session_id or known.path != self._path(shown):
            return await self._enter(shown)
        if shown != self.shown:
            try:
                self._node = await self._registry.put(known.path, pack(shown), known.version)
            except (Missing, VersionMismatch):
                self._node = None
                return False
            self.shown = shown
        return True

    async def leave(self) -> None:
        """The others see at once that this copy is gone."""
        node, self._node, self.shown = self._node, None, None
        self._left += node is not None
        if node is not None and node.owner == self._registry.session_id:
            await self._remove(node)

    async def _remove(self, node: Node) -> None:
        with suppress(FairwayError, TimeoutError):
            async with asyncio.timeout(_LEAVE_S):
                await self._registry.remove(node.path)

    def _path(self, shown: RegisteredCopy) -> str:
        return member_path(self._group, place_name(shown.directory, self._registry.session_id, self._left))

    async def _enter(self, shown: RegisteredCopy) -> bool:
        if not await self._is_vacant(shown) or not self._registry.session_id:
            return False
        path = self._path(shown)
        try:
            node = await self._registry.create(path, pack(shown), is_ephemeral=True)
        except Exists:  # by a request whose answer was lost
            found = await self._registry.get(path, fresh=True)
            if found is None or found.owner != self._registry.session_id:
                return False
            node = found
        is_ours = (node.path, node.owner) == (self._path(shown), self._registry.session_id)  # no other session began
        if not is_ours or not await self._is_vacant(shown):
            await self._remove(node)
            return False
        self._node, self._taken_since_ns, self.why = node, None, ""
        self.shown = shown if node.value == pack(shown) else None
        return True

    async def _is_vacant(self, shown: RegisteredCopy) -> bool:
        """Whether no other node is there for the directory. What we have left there ourselves, in the life before or
        under another name, is removed."""
        registry, own_path = self._registry, self._path(shown)
        for name in await registry.children(members_path(self._group)):
            path = member_path(self._group, name)
            if path == own_path or name.partition(NAME_SEPARATOR)[0] != shown.directory:
                continue
            node = await registry.get(path)
            if node is None:
                continue
            other = _read(path, node.value)
            is_ours = other is None or (other.host, other.port) == (shown.host, shown.port)  # nobody else listens there
            if not is_ours and other is not None:
                self._wait_for(other)
                return False
            try:
                await registry.remove(path)
            except Missing:
                continue
            except Refused:  # the connection of the life before is not known to be gone yet
                if other is not None:
                    self._wait_for(other)
                return False
        return True

    def _wait_for(self, other: RegisteredCopy) -> None:
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


def _read(path: str, value: bytes) -> RegisteredCopy | None:
    """What a node says, if it can be read."""
    try:
        return unpack(RegisteredCopy, path, value)
    except RemoteProtocolError:
        return None
