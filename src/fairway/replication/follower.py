"""The replica's side of replication: find where two histories part, then take what comes and say what is synced.

    FOLLOW      who I am; the master says which logs it has, and how far
    COMPARE     which of my last records does it have? By bisection, for where one record is the same, all below are
    REPLICATE   a few at a time: each gives leave to send, and says what is synced here by now

Nothing is acknowledged under an epoch before the promise to serve none below it is on disk. Where this copy has more
than it shares with its master, `Diverged` says where to cut; where the master no longer has what should come next,
`TooFarBehind` says that the copy has to begin anew. Both need the store closed, so they are its owner's to carry out.

Where the logs are not all there is to a copy, what it begins anew with is fetched first (`ReplicaRefill`), while it is
still open.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from fairway import limits
from fairway.errors import Code, FairwayError, Refused, RemoteProtocolError, WrongDirectory, invariant
from fairway.protocol import Bytes, ConnectionOptions, ControlMessage
from fairway.protocol import replicating as messages
from fairway.protocol.frames import stretched
from fairway.protocol.replicating import (
    ACTIONS,
    MESSAGES,
    Compare,
    Compared,
    Followed,
    LogExtent,
    Mend,
    Replicate,
    Replicated,
)
from fairway.protocol.replicating import Follow as FollowMaster
from fairway.replication import giving
from fairway.replication.law import FollowDecision
from fairway.replication.peer import has
from fairway.replication.promise import EpochPromise
from fairway.replication.wire import ReplicaConnection
from fairway.storage import record, segment
from fairway.storage.copying import ROTTEN_MARK
from fairway.storage.log import Log
from fairway.storage.store import Store
from fairway.world.clock import Clock
from fairway.world.net import Net

_COMPARED_AT_ONCE = 64
LOGS = (MESSAGES, ACTIONS)


class Diverged(FairwayError):
    """This copy has records that its master does not have; they were never committed."""

    def __init__(self, messages_at: int, actions_at: int) -> None:
        super().__init__(f"the logs are to be cut at {messages_at} (messages) and {actions_at} (actions)")
        self.messages_at = messages_at
        self.actions_at = actions_at


class TooFarBehind(FairwayError):
    """Between this copy's end and what the master has kept there is a gap, or they share nothing at all."""

    def __init__(self, first_bases: tuple[int, int], why: str) -> None:
        super().__init__(f"{why}: this copy begins anew, and what it had is kept aside")
        self.first_bases = first_bases
        self.epoch = 0  # of the master whose snapshot was fetched; 0: none was, for the logs are all there is


class ActionsRepaired(FairwayError):
    """Actions that had rotted are whole again: the groups have to be made again from them."""

    def __init__(self) -> None:
        super().__init__("actions that had rotted were repaired: the directory is opened again")


Remedy: TypeAlias = Diverged | TooFarBehind | ActionsRepaired


class ReplicaRefill(Protocol):
    """What a copy begins anew with whose logs are not all there is to it."""

    async def messages_end(self) -> int:
        """Up to here what was made of the message log cannot be undone: a log is not cut before it."""

    async def fetch(self, wire: ReplicaConnection, group: str, epoch: int, directory_id: int) -> None:
        """Return once everything is on this copy's disk, ready to take the place of what it has."""

    def discard(self) -> None:
        """It is not needed."""


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    credits: int = 8  # answers that may be under way
    wait_ms: int = 1_000
    catch_up_bytes: int = 8 * limits.MIB  # further behind than this, the careful rounds of a follower are left aside
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)


class Follower:
    """Follows one master after another, one at a time. Lives on the loop of its store."""

    def __init__(
        self,
        store: Store,
        promise: EpochPromise,
        net: Net,
        clock: Clock,
        group: str,
        on_committed: Callable[[], None],
        options: FollowerOptions | None = None,
        refill: ReplicaRefill | None = None,
        *,
        secret: bytes = b"",
    ) -> None:
        """`secret`: it is shown to masters; its verifier stands in the copy's node."""
        self._store = store
        self._promise = promise
        self._net = net
        self._clock = clock
        self._group = group
        self._on_committed = on_committed
        self._options = options or FollowerOptions()
        self._refill = refill
        self._secret = secret
        self._wire: ReplicaConnection | None = None
        self._epoch = 0
        self._number = 0
        self._owed: deque[tuple[int, int]] = deque()  # for each answer that came: the ends that it brings
        self._held_ends: tuple[int, int] | None = None  # catching up: no more than this is claimed
        self._goal: tuple[int, int] = (0, 0)
        self._first_bases: tuple[int, int] = (0, 0)
        self.is_catching_up = False
        self.is_streaming = False

    async def run(self, master: FollowDecision) -> None:
        """Follow until the connection ends; raises why it did."""
        wire = await ReplicaConnection.dial(self._net, self._clock, master.host, master.port, self._options.connection)
        try:
            followed = await self._introduce(wire, master)
            await self._settled()
            await self.end_catch_up()
            await self._agree(wire, master, followed)
            await self._promise.keep(master.epoch)
            self._begin(wire, master.epoch, followed)
            await wire.over
            wire.check()
        finally:
            self.stop()
            wire.abort()

    def stop(self) -> None:
        """Acknowledge nothing any more, from this moment on."""
        self.is_streaming = self.is_catching_up = False
        self._store.on_synced = _nothing
        self._owed.clear()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.abort()

    async def end_catch_up(self) -> None:
        """Everything that came is synced, and a restart may rely on it; at once where nothing was to be caught up."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def done(fault: FairwayError | None) -> None:
            if ended.done():
                return
            if fault is None:
                ended.set_result(None)
            else:
                ended.set_exception(fault)

        self._store.end_catch_up(done)
        await ended

    # --- repair ------------------------------------------------------------------------------------------------------

    async def _mend(self, wire: ReplicaConnection, followed: Followed) -> None:
        """Ask for what has rotted here, as far as the master has it committed. What it cannot give either stays."""
        for span in self._store.rotten_spans():
            at = span.start
            with suppress(Refused, RemoteProtocolError):
                while at < min(span.end, followed.logs[span.log].committed_end):
                    _, attached = await wire.ask(Mend(span.log, at, span.end - at), messages.Mended)
                    at = self._put_back(span.log, at, stretched(attached[0]), followed)
        if self._store.is_view_stale:
            raise ActionsRepaired

    def _put_back(self, log: int, position: int, data: bytes, followed: Followed) -> int:
        """What has rotted. Where its bytes alone do not help, everything is fetched, if that can be."""
        try:
            return self._store.mend(log, position, data)
        except Refused as refused:
            if self._refill is None or refused.code is not Code.DAMAGED:
                raise
            raise TooFarBehind(_first_bases(followed), f"log {log} has rotted at {position}") from refused

    # --- where histories part ----------------------------------------------------------------------------------------

    async def _introduce(self, wire: ReplicaConnection, master: FollowDecision) -> Followed:
        if master.epoch < self._promise.epoch:
            raise Refused(Code.FENCED, f"epoch {self._promise.epoch} was promised, and {master.epoch} is before it")
        directory_id = self._store.identity.directory_id
        followed, _ = await wire.ask(FollowMaster(self._group, master.epoch, directory_id, self._secret), Followed)
        if followed.epoch != master.epoch or len(followed.logs) != len(LOGS):
            raise RemoteProtocolError(f"the master of epoch {master.epoch} says that it leads under {followed.epoch}")
        for log in LOGS:
            if followed.logs[log].log_id != self._log(log).log_id:
                raise WrongDirectory(
                    f"this data directory holds other logs than those of group {self._group}: start with an empty "
                    "directory, or name the group that it belongs to"
                )
        return followed

    async def _settled(self) -> None:
        """What came over the connection before is on disk, or never will be."""
        for log in LOGS:
            await self._log(log).flusher.synced(self._log(log).end)

    async def _agree(self, wire: ReplicaConnection, master: FollowDecision, followed: Followed) -> None:
        """Return if what is here is a prefix of what the master has; raise what is to be done if not."""
        try:
            await self._mend(wire, followed)
            await self._compare(wire, followed)
        except TooFarBehind as behind:
            if self._refill is not None:
                directory_id = self._store.identity.directory_id
                await self._refill.fetch(wire, self._group, master.epoch, directory_id)
                behind.epoch = master.epoch
            raise
        if self._refill is not None:
            self._refill.discard()

    async def _compare(self, wire: ReplicaConnection, followed: Followed) -> None:
        ends = self._store.ends()
        first_bases = _first_bases(followed)
        for log in LOGS:
            if ends[log] < first_bases[log]:
                raise TooFarBehind(first_bases, f"the master has nothing left before {first_bases[log]}")
        shared = [await self._shared_end(wire, log, followed.logs[log], first_bases) for log in LOGS]
        if (shared[MESSAGES], shared[ACTIONS]) != ends:
            raise Diverged(shared[MESSAGES], shared[ACTIONS])

    async def _shared_end(
        self, wire: ReplicaConnection, log: int, extent: LogExtent, first_bases: tuple[int, int]
    ) -> int:
        """Where the last record ends that both have. Of segments long past only the first record is looked at, until
        it is clear in which of them histories part."""
        store = self._store
        own_end = store.ends()[log]
        positions = [each for each in store.tail_positions(log) if each >= extent.first_base]
        if not positions:
            if own_end > extent.end:
                raise TooFarBehind(first_bases, f"the master's log {log} ends at {extent.end}, this one at {own_end}")
            return own_end  # it is empty, or ends where the master's begins
        last = await self._last_shared(wire, log, positions)
        if last is None:
            raise TooFarBehind(first_bases, f"nothing of log {log} is shared with the master")
        following = positions.index(last) + 1
        if following < len(positions):
            closer = store.positions(log, last, positions[following])
            found = await self._last_shared(wire, log, closer)
            last = last if found is None else found
        end = self._end_of(log, last)
        if end < own_end:
            await self._check_parting(wire, log, end, extent.end)
        if end < own_end and end < await self._settled_end(log):  # it was committed once: data loss was accepted
            raise TooFarBehind(first_bases, f"log {log} differs from the master's where it was committed, at {end}")
        return end

    async def _last_shared(self, wire: ReplicaConnection, log: int, positions: Sequence[int]) -> int | None:
        """Where one is shared, all below are: what has rotted there, on either side, is passed over. `Refused` where
        nobody can tell whether what was lost above it was shared."""
        places, lost = list(positions), list[int]()
        below, above = -1, len(places)  # shared; not shared
        while above - below > 1:
            step = max((above - below) // (_COMPARED_AT_ONCE + 1), 1)
            asked = list(range(below + 1, above, step))
            told = await self._are_shared(wire, log, [places[index] for index in asked])
            found = dict(zip(asked, told, strict=True))
            below = max((index for index in asked if found[index]), default=below)
            above = min((index for index in asked if index > below and found[index] is False), default=above)
            unknown = [index for index in asked if found[index] is None]
            lost += [places[index] for index in unknown]
            places = [each for index, each in enumerate(places) if index not in unknown]
            below -= sum(index < below for index in unknown)
            above -= sum(index < above for index in unknown)
        last = places[below] if below >= 0 else -1
        end = places[above] if above < len(places) else positions[-1] + 1
        if any(last < each < end for each in lost):
            raise Refused(Code.DAMAGED, f"of log {log} the last record that both copies had has rotted")
        return last if below >= 0 else None

    async def _check_parting(self, wire: ReplicaConnection, log: int, end: int, master_end: int) -> None:
        """Where two histories part the master has a record of its own, perhaps behind a segment's header, or ends. Else
        it has rotted, unnoticed: what this copy has there may be the last of it, and is not to be cut off."""
        places = [end, end + segment.HEADER_BYTES]
        if master_end > places[-1]:
            compared, _ = await wire.ask(Compare(log, places, knows_rot=True), Compared)
            if not any(mark.epoch for mark in compared.marks):
                raise Refused(Code.DAMAGED, f"the master has no record at {end} of log {log}: it has rotted there")

    async def _are_shared(self, wire: ReplicaConnection, log: int, places: Sequence[int]) -> list[bool | None]:
        """None: it has rotted, here or there."""
        compared, _ = await wire.ask(Compare(log, list(places), knows_rot=True), Compared)
        if len(compared.marks) != len(places):
            raise RemoteProtocolError("the master has not compared every record that it was asked for")
        theirs = [(mark.epoch, mark.crc) for mark in compared.marks]
        own = self._store.marks(log, places)
        return [None if ROTTEN_MARK in pair else pair[0] == pair[1] for pair in zip(theirs, own, strict=True)]

    async def _settled_end(self, log: int) -> int:
        """What lies below was committed, and other files speak of it."""
        checkpointed_end = self._store.checkpointed_ends()[log]
        if self._refill is None or log != MESSAGES:
            return checkpointed_end
        return max(checkpointed_end, await self._refill.messages_end())

    def _end_of(self, log: int, position: int) -> int:
        of = self._log(log)
        header = record.parse_header(of.read(position, record.HEADER_BYTES), 0, position, of.log_id)
        return header.end

    def _log(self, log: int) -> Log:
        return self._store.messages.log if log == MESSAGES else self._store.actions.log

    # --- the stream --------------------------------------------------------------------------------------------------

    def _begin(self, wire: ReplicaConnection, epoch: int, followed: Followed) -> None:
        invariant(epoch <= self._promise.epoch, "nothing is acknowledged before it is promised")
        self._wire, self._epoch, self._number = wire, epoch, 0
        self._goal = (followed.logs[MESSAGES].end, followed.logs[ACTIONS].end)
        ends = self._store.ends()
        behind = sum(goal - end for goal, end in zip(self._goal, ends, strict=True))
        self._held_ends = None
        if behind > self._options.catch_up_bytes:
            self._held_ends = ends
            self._store.begin_catch_up()
        self.is_catching_up = not has(ends, self._goal)
        self.is_streaming = True
        self._store.on_synced = self._synced
        self._give_credit(starts=list(ends))
        for _ in range(self._options.credits - 1):
            self._give_credit()

    def _give_credit(self, starts: list[int] | None = None) -> None:
        wire = self._wire
        if wire is None or wire.is_over:
            return
        self._number += 1
        ends = self._held_ends or self._store.ends()
        directory_id = self._store.identity.directory_id
        wait_ms = self._options.wait_ms
        message = Replicate(self._group, self._epoch, directory_id, self._number, list(ends), starts or [], wait_ms)
        try:
            wire.send(message, self._came)
        except FairwayError as error:  # it is about to end
            wire.fail(error)

    def _came(self, message: ControlMessage, attachments: Sequence[Bytes]) -> None:
        """An answer: what it brings is gathered for the disk, and its credit goes back when that is synced."""
        wire = self._wire
        if wire is None:
            return
        try:
            self._take(wire, message, attachments)
        except FairwayError as error:
            wire.fail(error)
            return
        self._owed.append((self._log(MESSAGES).end, self._log(ACTIONS).end))
        self._return_credits()

    def _take(self, wire: ReplicaConnection, message: ControlMessage, attachments: Sequence[Bytes]) -> None:
        if not isinstance(message, Replicated) or message.epoch != self._epoch:
            raise RemoteProtocolError("the master answers for another epoch than its own")
        if len(message.committed_ends) != len(LOGS) or len(message.first_bases) != len(LOGS):
            raise RemoteProtocolError("the master does not speak of both logs")
        for chunk, data in zip(message.chunks, attachments, strict=True):
            self._store.follow(chunk.log, chunk.base, chunk.position, stretched(data))
        self._store.confirm(message.committed_ends[MESSAGES], message.committed_ends[ACTIONS])
        first_bases = (message.first_bases[MESSAGES], message.first_bases[ACTIONS])
        if first_bases != self._first_bases:
            self._first_bases = first_bases
            self._store.retain_from(*first_bases)
        for want in message.wanted:
            giving.give(self._store, wire, self._epoch, want)
        self._on_committed()

    def _synced(self) -> None:
        self._on_committed()
        self._return_credits()

    def _return_credits(self) -> None:
        ends = self._store.ends()
        if self.is_catching_up and has(ends, self._goal):
            self.is_catching_up = False
            if self._held_ends is not None:
                self._store.end_catch_up(self._caught_up)
        while self._owed and has(ends, self._owed[0]):
            self._owed.popleft()
            self._give_credit()

    def _caught_up(self, fault: FairwayError | None) -> None:
        """From now on every claim counts."""
        if fault is None:
            self._held_ends = None


def _first_bases(followed: Followed) -> tuple[int, int]:
    return followed.logs[MESSAGES].first_base, followed.logs[ACTIONS].first_base


def _nothing() -> None:
    """Nobody wants to know."""
