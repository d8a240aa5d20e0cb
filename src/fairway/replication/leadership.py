"""Leadership: who leads a group, the group's node in the registry, and the promise of the highest epoch served.

`decide` is a pure function of the group's node and the live copies. `copy_lifecycle` acts on its decisions.

    no such group yet, and this copy is new here      Create, unless this copy is empty and others are not
    the node names this copy, under its epoch         Lead
    another copy leads, and lives                     FollowDecision
    no copy leads, and this copy is in sync           Stand: compare-and-set with the next epoch
    anything else                                     Wait, with the reason

A master that was restarted stands like every other copy: it has lost what it knew of its replicas.

`EpochPromise` keeps the highest epoch that this copy has promised to serve, in a small file of its data directory. The
copy writes the promise before its first acknowledgement under a new epoch, and before it leads one. A copy that has
promised an epoch follows no earlier one, also after a restart, and also where its logs were cut back below it.

`GroupNode` is the group's node: which copy leads, and which copies are in sync. Every change is a compare-and-set on
the last version read. After a lost answer, `change` reads the node back until the outcome is certain and final, and
only then returns. Meanwhile its caller must reckon with both outcomes.

`change_master` promotes another master by hand. A copy in sync takes over without a loss: the old master is deposed,
steps down, and follows. A copy that is not in sync may lack acknowledged messages; it takes over only if the operator
accepts that loss.
"""

from __future__ import annotations

import asyncio
import enum
import struct
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from fairway.batch import checksum
from fairway.errors import FairwayError, NoSuchFile, Refused, RemoteProtocolError, StorageFault, WrongDirectory
from fairway.registry.layout import (
    MASTER,
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
from fairway.runtime.disk import Disk, contents, settles

FILE = "promise"
MAGIC = b"FWYPRM\r\n"
_COVERED = struct.Struct("<8sQ")
_CRC = struct.Struct("<I")


class EpochPromise:
    """The promise of one data directory; `epoch` is 0 before the first promise."""

    def __init__(self, disk: Disk) -> None:
        self._disk = disk
        self.epoch = _read(disk)

    async def keep(self, epoch: int) -> None:
        """Promise to serve this epoch, and none below. Returns once the promise is on disk."""
        if epoch <= self.epoch:
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        covered = _COVERED.pack(MAGIC, epoch)
        self._disk.publish_later(FILE, [covered, _CRC.pack(checksum(covered))], settles(future))
        await future
        self.epoch = max(self.epoch, epoch)


def _read(disk: Disk) -> int:
    try:
        data = contents(disk, FILE)
    except NoSuchFile:
        return 0
    covered, crc = data[: _COVERED.size], data[_COVERED.size :]
    if not covered.startswith(MAGIC) or crc != _CRC.pack(checksum(covered)):
        raise StorageFault(
            f"the file {FILE} is damaged, and so it is not known which masters this copy may follow: start with an "
            "empty directory, which is filled from the master"
        )
    return int(_COVERED.unpack(covered)[1])


BROKER = "broker"
DELAY = "delay"


@dataclass(frozen=True, slots=True)
class Me:
    """This copy."""

    directory: str  # hex
    messages_id: int
    actions_id: int
    epoch: int  # the highest epoch that its logs have reached, or that it has promised
    has_promised: bool = False  # it has been a copy of a group before
    leads: int = 0  # the epoch that it leads under now; 0: it does not lead


class OwnStep(enum.Enum):
    """A decision about this copy alone."""

    CREATE = "create"  # create the group, and lead it
    LEAD = "lead"  # go on leading
    STAND = "stand"  # take over


@dataclass(frozen=True, slots=True)
class FollowDecision:
    master: str
    host: str
    port: int
    epoch: int

    @property
    def address(self) -> str:
        return f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Wait:
    why: str


LeadershipDecision: TypeAlias = OwnStep | FollowDecision | Wait


def decide(
    group: str, record: GroupRecord | None, living: Mapping[str, RegisteredCopy], me: Me, *, is_patient: bool = True
) -> LeadershipDecision:
    """What this copy does now. `is_patient`: wait for a deposed master that lives to step down first."""
    if record is None:
        return _without_record(group, living, me)
    if me.leads and record.master == me.directory and record.epoch == me.leads:
        return OwnStep.LEAD
    master = living.get(record.master)
    if record.master != me.directory and master is not None:
        if record.epoch < me.epoch:
            return Wait(
                f"the registry says that {record.master} leads group {group} under epoch {record.epoch}, and this copy "
                f"has seen epoch {me.epoch}: is it the registry of another cluster?"
            )
        return FollowDecision(record.master, master.host, master.port, record.epoch)
    if me.directory not in record.in_sync:
        return Wait(_nobody(group, record, living))
    ruling = [each for each in living.values() if each.role == MASTER and each.directory != me.directory]
    if ruling and is_patient:
        return Wait(f"{ruling[0].directory} has been deposed and has not stepped down yet")
    return OwnStep.STAND


def _without_record(group: str, living: Mapping[str, RegisteredCopy], me: Me) -> LeadershipDecision:
    if me.has_promised:
        return Wait(
            f"the registry knows no group {group}, and this copy was in one: give it back what it had, or make the "
            f"group anew from this copy with `fairway broker promote {group} --to {me.directory} --accept-data-loss`"
        )
    filled = {
        each.directory: each.ends for each in living.values() if each.directory != me.directory and any(each.ends)
    }
    if filled and not me.epoch:
        fullest = max(sorted(filled), key=filled.__getitem__)
        return Wait(
            f"the registry knows no group {group}, and {' and '.join(sorted(filled))} hold messages where this copy is "
            f"empty: make the group anew with `fairway broker promote {group} --to {fullest} --accept-data-loss`"
        )
    return OwnStep.CREATE


def _nobody(group: str, record: GroupRecord, living: Mapping[str, RegisteredCopy]) -> str:
    able = [each for each in record.in_sync if each in living]
    if able:
        return f"group {group} has no master, and {' or '.join(able)} is about to take over"
    return (
        f"group {group} has no master, and no copy that has everything lives ({', '.join(record.in_sync)}): start one "
        f"of them, or take this one with `fairway broker promote {group} --accept-data-loss`"
    )


def foreign(group: str, record: GroupRecord, me: Me) -> str | None:
    """Why this copy's logs are not the group's; None: they are. A group that was made by hand does not know its log
    ids."""
    is_ours = (record.messages_id in (0, me.messages_id)) and (record.actions_id in (0, me.actions_id))
    if is_ours:
        return None
    return (
        f"this data directory holds other logs than those of group {group} (messages {me.messages_id:016x}, the "
        f"group's are {record.messages_id:016x}): start with an empty directory, or name the group it belongs to"
    )


def check_kind(group: str, record: GroupRecord | None, kind: str) -> None:
    """`WrongDirectory` where a group of another kind has the name."""
    if record is not None and record.kind != kind:
        theirs, ours = _SERVERS.get(record.kind, record.kind), _SERVERS[kind]
        raise WrongDirectory(f"{group} is a group of {theirs}, and this is one of {ours}: give it another --group")


_SERVERS = {BROKER: "brokers", DELAY: "delay servers"}


def next_epoch(record: GroupRecord | None, me: Me) -> int:
    return max(me.epoch, 0 if record is None else record.epoch) + 1


def founded(me: Me, *, kind: str = BROKER, min_in_sync: int | None = None) -> GroupRecord:
    """The record of a group that begins with this copy."""
    return GroupRecord(
        kind,
        next_epoch(None, me),
        me.directory,
        [me.directory],
        min_in_sync or 1,
        me.messages_id,
        me.actions_id,
        members=[me.directory],
    )


def succeeded(
    record: GroupRecord, living: Mapping[str, RegisteredCopy], me: Me, *, min_in_sync: int | None = None
) -> GroupRecord:
    """The record after this copy has taken over. The set keeps the other copies in sync that live."""
    others = [each for each in record.in_sync if each != me.directory and each in living]
    return msgspec.structs.replace(
        record,
        epoch=next_epoch(record, me),
        master=me.directory,
        in_sync=[me.directory, *others],
        min_in_sync=min_in_sync or record.min_in_sync,
        messages_id=me.messages_id,
        actions_id=me.actions_id,
        members=with_member(record.members, me.directory),
    )


def promoted(
    record: GroupRecord, living: Mapping[str, RegisteredCopy], to: str, *, accepts_data_loss: bool = False
) -> GroupRecord:
    """The record that names another master by hand. A copy outside the set is alone in the new set: the others may
    differ."""
    is_in_sync = to in record.in_sync
    if not is_in_sync and not accepts_data_loss:
        raise ValueError("a copy outside the in-sync set is promoted only where data loss is accepted")
    kept = [each for each in record.in_sync if each == to or each in living] if is_in_sync else [to]
    return msgspec.structs.replace(
        record, epoch=record.epoch + 1, master=to, in_sync=kept, members=with_member(record.members, to)
    )


def with_member(members: list[str], directory: str) -> list[str]:
    return members if directory in members else [*members, directory]


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
            record = promoted(record, alive, chosen, accepts_data_loss=accepts_data_loss)
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
