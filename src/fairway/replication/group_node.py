"""The group's node in the registry: which copy leads, and which copies are in sync.

Every change is a compare-and-set on the last version read. After a lost answer, `change` reads the node back until the
outcome is certain and final, and only then returns. Meanwhile its caller must reckon with both outcomes.

`change_master` promotes another master by hand. A copy in sync takes over without a loss: the old master is deposed,
steps down, and follows. A copy that is not in sync may lack acknowledged messages; it takes over only if the operator
accepts that loss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress

from fairway.errors import FairwayError, Refused, RemoteProtocolError
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
from fairway.replication import leadership

_AGAIN_S = 0.05  # between two attempts to read back


class GroupNode:
    """A group's node, as last read or changed here."""

    def __init__(self, registry: Registry, group: str) -> None:
        self.group = group
        self.path = group_path(group)
        self.record: GroupRecord | None = None
        self.version: int | None = None  # None: there is no node. An empty node has a version, and no record
        self._registry = registry

    def twin(self) -> GroupNode:
        """A copy of this object for another task: each task makes its compare-and-set on what it has read itself."""
        other = GroupNode(self._registry, self.group)
        other.record, other.version = self.record, self.version
        return other

    async def read(self, *, fresh: bool = False) -> GroupRecord | None:
        node = await self._registry.get(self.path, fresh=fresh)
        self.version = None if node is None else node.version
        self.record = None if node is None or not node.value else unpack(GroupRecord, self.path, node.value)
        return self.record

    async def change(self, to: GroupRecord) -> bool:
        """Write the record. Returns whether the node has it now. False: another writer was faster, or the session was
        over; `record` is what the node has."""
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
        """Resolve a change of unknown outcome. While the node is unchanged, write its old contents once more: that
        changes the version, and so the lost change can no longer succeed."""
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
        """Read the node, as often as it takes: nothing is certain before."""
        while True:
            try:
                await self.read(fresh=True)
                return
            except (AnswerLost, SessionOver, Refused):
                await asyncio.sleep(_AGAIN_S)


async def living(registry: Registry, group: str) -> dict[str, RegisteredCopy]:
    """The live copies, by directory id. Leaves out a copy whose node is unreadable."""
    found: list[RegisteredCopy] = []
    for name in sorted(await registry.children(members_path(group))):
        path = member_path(group, name)
        node = await registry.get(path)
        if node is None or not node.value:
            continue
        with suppress(RemoteProtocolError):
            found.append(unpack(RegisteredCopy, path, node.value))
    return by_directory(found)


_TRIES = 10


class NotPromoted(FairwayError):
    """The promotion is impossible, or not possible without a loss; the sentence says what to do instead."""


async def change_master(registry: Registry, group: str, to: str | None, *, accepts_data_loss: bool = False) -> str:
    """Write the new master into the group's node. Returns a sentence about what was done."""
    node = GroupNode(registry, group)
    for _ in range(_TRIES):
        record = await node.read(fresh=True)
        alive = await living(registry, group)
        if record is None:
            record = _made_anew(group, alive, to, accepts_data_loss=accepts_data_loss)
            chosen = record.master
        else:
            chosen = choose(group, record, alive, to, accepts_data_loss=accepts_data_loss)
            record = leadership.promoted(record, alive, chosen, accepts_data_loss=accepts_data_loss)
        if await node.change(record):
            return f"{chosen} leads group {group} from now on, under epoch {record.epoch} or a later one"
    raise NotPromoted(f"the node of group {group} changes all the time: try again")


def choose(
    group: str, record: GroupRecord, alive: Mapping[str, RegisteredCopy], to: str | None, *, accepts_data_loss: bool
) -> str:
    """The copy that is to lead."""
    fit = [each for each in record.in_sync if each in alive and each != record.master]
    if to is None and not fit:
        if not accepts_data_loss:
            raise NotPromoted(
                f"no copy of group {group} that lives and does not lead is in sync (in sync: "
                f"{', '.join(record.in_sync)}; alive: {', '.join(sorted(alive)) or 'none'}): start one of them, or "
                "take another with --accept-data-loss and lose what it lacks"
            )
        fit = sorted((each for each in alive if each != record.master), key=lambda each: sum(alive[each].ends))[-1:]
    chosen = to or (fit[0] if fit else "")
    if chosen not in alive:
        raise NotPromoted(f"copy {chosen or 'to take'} of group {group} does not live: start it first")
    if chosen == record.master and chosen in record.in_sync and not accepts_data_loss:
        raise NotPromoted(f"{chosen} leads group {group} already")
    if chosen not in record.in_sync and not accepts_data_loss:
        raise NotPromoted(
            f"{chosen} is not in sync, and may lack what was acknowledged: wait until it has caught up, or lose that "
            "with --accept-data-loss"
        )
    return chosen


def _made_anew(
    group: str, alive: Mapping[str, RegisteredCopy], to: str | None, *, accepts_data_loss: bool
) -> GroupRecord:
    """The record for a registry that has lost the group: the group starts again with one copy, whose logs become its
    own."""
    if to is None or not accepts_data_loss:
        raise NotPromoted(
            f"the registry knows no group {group}; to make it anew from one copy, name that with --to DIR-ID and "
            "--accept-data-loss"
        )
    if to not in alive:
        raise NotPromoted(f"copy {to} of group {group} does not live: start it first")
    epoch = max((each.epoch for each in alive.values()), default=0) + 1
    return GroupRecord(alive[to].kind, epoch, to, [to], members=[to])
