"""The group's node in the registry: the one place that says who leads and whose copies count.

Every change is compare-and-set on what was read last. Where no answer comes the node is read back until it is known
what holds and will go on to hold, and only then does `change` return; meanwhile its caller must reckon with both.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from fairway.errors import Refused, RemoteProtocolError
from fairway.registry.layout import (
    GroupRecord,
    RegisteredCopy,
    by_directory,
    group_path,
    member_path,
    members_path,
    pack,
    unpack,
)
from fairway.registry.port import AnswerLost, Exists, Missing, Node, Registry, SessionOver, VersionMismatch

_AGAIN_S = 0.05  # between two attempts to read back


class GroupNode:
    """A group's node, as it was when it was last read or changed here."""

    def __init__(self, registry: Registry, group: str) -> None:
        self.group = group
        self.path = group_path(group)
        self.record: GroupRecord | None = None
        self.version: int | None = None  # None: there is no node. One that is empty has a version, and no record
        self._registry = registry

    def twin(self) -> GroupNode:
        """What was read here, for somebody else: a compare-and-set is worth what was read by whoever makes it."""
        other = GroupNode(self._registry, self.group)
        other.record, other.version = self.record, self.version
        return other

    async def read(self, *, fresh: bool = False) -> GroupRecord | None:
        node = await self._registry.get(self.path, fresh=fresh)
        self.version = None if node is None else node.version
        self.record = None if node is None or not node.value else unpack(GroupRecord, self.path, node.value)
        return self.record

    async def change(self, to: GroupRecord) -> bool:
        """Whether the node says so now. False: somebody else was faster, or the session was over; `record` is news."""
        before, version = self.record, self.version
        try:
            node = await self._write(pack(to), version)
        except (VersionMismatch, Exists, Missing, SessionOver):
            await self._read_back()
        except AnswerLost:
            await self._settle(before, version, to)
        else:
            self.version, self.record = node.version, to
        return self.record == to

    async def _write(self, value: bytes, version: int | None) -> Node:
        if version is None:
            return await self._registry.create(self.path, value)
        return await self._registry.put(self.path, value, version)

    async def _settle(self, before: GroupRecord | None, version: int | None, to: GroupRecord) -> None:
        """Nobody knows whether the change was made, or is still on its way. As long as the node is as it was, write the
        same once more: then its version is another one, and the change can no longer be made."""
        old = b"" if before is None else pack(before)
        while True:
            await self._read_back()
            if self.record == to or self.version != version:
                return
            with suppress(AnswerLost, VersionMismatch, Exists, Missing, SessionOver, Refused):
                node = await self._write(old, version)
                self.version, self.record = node.version, before
                return

    async def _read_back(self) -> None:
        """As often as it takes: nothing can be concluded before."""
        while True:
            try:
                await self.read(fresh=True)
                return
            except (AnswerLost, SessionOver, Refused):
                await asyncio.sleep(_AGAIN_S)


async def living(registry: Registry, group: str) -> dict[str, RegisteredCopy]:
    """The copies that live, by directory id; one whose node cannot be read is left out."""
    found: list[RegisteredCopy] = []
    for name in sorted(await registry.children(members_path(group))):
        path = member_path(group, name)
        node = await registry.get(path)
        if node is None or not node.value:
            continue
        with suppress(RemoteProtocolError):
            found.append(unpack(RegisteredCopy, path, node.value))
    return by_directory(found)
