"""A delay server in the registry of a cluster: a group of one, which registers itself.

The group's node says whose data directory it is, and the epoch grows with each start. The member's node lives as long
as the session; after one that was lost it is made again, and it says now and then how things stand. Nobody else takes
over: what is pending is in this one directory. So another directory under the same name is refused, and a process that
sees its epoch passed by ends, for somebody runs a copy of its directory.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Self

import msgspec

from fairway.errors import FairwayError, RemoteProtocolError, WrongDirectory
from fairway.protocol.backoff import Backoff
from fairway.registry import layout
from fairway.registry.layout import GroupRecord, Member
from fairway.registry.port import Exists, Missing, Node, Registry, RegistryError, SessionState, Stale
from fairway.replication.node import GroupNode
from fairway.storage.directory import Identity
from fairway.world.rng import Rng

KIND = "delay"
BEAT_S = 2.0
_ATTEMPTS_MAX = 20
_RETRY_FIRST_MS = 50
_RETRY_MOST_MS = 2_000
_NS = 1_000_000_000


class Membership:
    """`await Membership.begin(...)`, then `appear`, then `await stop()`."""

    def __init__(self, registry: Registry, rng: Rng, group: str, identity: Identity, epoch: int) -> None:
        self.epoch = epoch  # at least; as the registry has it once it has begun
        self.group = group
        self.directory = layout.hex_id(identity.directory_id)
        self._registry = registry
        self._identity = identity
        self._node = GroupNode(registry, group)
        self._path = layout.member_path(group, self.directory)
        self._backoff = Backoff(rng, first_ms=_RETRY_FIRST_MS, most_ms=_RETRY_MOST_MS)
        self._is_due = asyncio.Event()
        self._failed = asyncio.Event()
        self._fault: FairwayError | None = None
        self._shown: Member | None = None
        self._own: Node | None = None
        self._is_forgotten = False
        self._remark: Callable[[str], None] = lambda _: None
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def begin(cls, registry: Registry, rng: Rng, group: str, identity: Identity, epoch: int) -> Self:
        """Take the group's name for this directory; `WrongDirectory` where it is another's."""
        membership = cls(registry, rng, group, identity, epoch)
        trouble = "it changes all the time"
        for _ in range(_ATTEMPTS_MAX):
            try:
                record = await membership._node.read(fresh=True)
                if await membership._node.change(membership._next(record)):
                    membership._backoff.reset()
                    return membership
            except RegistryError as error:
                trouble = str(error)
            await asyncio.sleep(membership._backoff.next_ns() / _NS)
        raise RegistryError(f"group {group} cannot be registered: {trouble}")

    def _next(self, record: GroupRecord | None) -> GroupRecord:
        """The group's node, of this start."""
        if record is None:
            ids = self._identity.messages_id, self._identity.actions_id
            return GroupRecord(KIND, self.epoch, self.directory, [self.directory], 1, *ids, members=[self.directory])
        self._check(record)
        self.epoch = max(self.epoch, record.epoch + 1)
        return msgspec.structs.replace(record, epoch=self.epoch)

    def _check(self, record: GroupRecord) -> None:
        if record.kind != KIND:
            raise WrongDirectory(
                f"{self.group} is a group of {record.kind}s: choose another name for this delay server with --group"
            )
        if record.master != self.directory:
            raise WrongDirectory(
                f"{self.group} is the delay server with data directory {record.master}, and this one is "
                f"{self.directory}: give it a --group of its own; if the other is gone for ever, "
                f"`fairway cluster decommission {self.group} --force` frees the name"
            )

    # --- the member's node -------------------------------------------------------------------------------------------

    def appear(self, member: Callable[[], Member], remark: Callable[[str], None]) -> None:
        """Be there from now on, as `member` says each time. `remark` is told what people should know."""
        self._remark = remark
        self._is_due.set()
        self._task = asyncio.get_running_loop().create_task(self._live(member), name="fairway-delay-membership")
        self._registry.watch(layout.group_path(self.group), self._is_due.set)

    def session_is(self, _state: SessionState) -> None:
        self._is_due.set()

    async def _live(self, member: Callable[[], Member]) -> None:
        while self._fault is None:
            wait_s = BEAT_S
            self._is_due.clear()
            try:
                if await self._beat(member()):
                    self._backoff.reset()
                else:
                    wait_s = self._backoff.next_ns() / _NS
            except RegistryError:
                wait_s = self._backoff.next_ns() / _NS
            except (WrongDirectory, RemoteProtocolError) as fault:
                self._fault = fault
                self._failed.set()
                return
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._is_due.wait()

    async def _beat(self, shown: Member) -> bool:
        """Look at the group, and see to it that the own node is there and says what is true. False: not yet."""
        record = await self._node.read()
        if record is None:
            await self._withdraw()
            return True
        self._check(record)
        if record.epoch > self.epoch:
            raise WrongDirectory(
                f"another process runs with a copy of data directory {self.directory}, as epoch {record.epoch} of "
                f"group {self.group}, and this is epoch {self.epoch}: stop one of them, and delete its copy"
            )
        self._is_forgotten = False
        return await self._show(shown)

    async def _withdraw(self) -> None:
        """The group was decommissioned, or the registry is another one. What is pending is sent all the same."""
        if not self._is_forgotten:
            self._is_forgotten = True
            self._remark(
                f"group {self.group} is not in the registry any more: what is pending is sent, and clients of the "
                "cluster bring nothing new. Start it again to register it anew."
            )
        if self._own is not None:
            self._own = None
            with contextlib.suppress(Missing):
                await self._registry.remove(self._path)

    async def _show(self, shown: Member) -> bool:
        try:
            if self._own is None or self._own.owner != self._registry.session_id:
                self._own = await self._registry.create(self._path, layout.pack(shown), is_ephemeral=True)
            elif shown != self._shown:
                self._own = await self._registry.put(self._path, layout.pack(shown), self._own.version)
        except (Missing, Stale):
            self._own = None
            return False
        except Exists:
            await self._take_place()
            return False
        self._shown = shown
        return True

    async def _take_place(self) -> None:
        """Of ourselves: in the session or in the life before, for the directory is locked. Or by a request whose answer
        was lost, and then it stays."""
        node = await self._registry.get(self._path, fresh=True)
        if node is not None and node.owner == self._registry.session_id:
            self._own, self._shown = node, None
        elif node is not None:
            with contextlib.suppress(Missing, Stale):
                await self._registry.remove(self._path, node.version)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def failed(self) -> None:
        """Return when it cannot go on: then `stop` raises what happened."""
        await self._failed.wait()

    async def stop(self) -> None:
        """Be gone, so that clients go elsewhere at once. Raises what ended it, if that did."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._own is not None:
            with contextlib.suppress(RegistryError):
                await self._registry.remove(self._path, self._own.version)
        if self._fault is not None:
            raise self._fault
