"""The replica's side of replication: finds where two histories part, then takes records and confirms what is synced.

    FOLLOW      the replica introduces itself; the master states its logs and their ends
    COMPARE     which of the replica's last records the master has; by bisection: all below a shared record are shared
    REPLICATE   a few at a time: each lets the master send once, and states what the replica has synced

The replica acknowledges nothing under an epoch before the promise to serve none below it is on disk. Where the replica
has more records than it shares with its master, `Diverged` says where to cut. Where the master no longer has the next
records, `TooFarBehind` says that the copy has to start over. Both need a closed store, so the owner (`copy_lifecycle`)
carries them out.

For a copy whose logs are not all of its state, a `ReplicaRefill` first fetches what the copy starts over with, while
the copy is still open.

A replica also sends the master what is rotten there: the master's answers name what it wants (`repairs`).
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
from fairway.protocol import replication_messages as messages
from fairway.protocol.frames import stretch, stretched
from fairway.protocol.replication_messages import (
    ACTIONS,
    MESSAGES,
    Compare,
    Compared,
    Followed,
    Give,
    LogExtent,
    Mend,
    Replicate,
    Replicated,
    Want,
)
from fairway.protocol.replication_messages import Follow as FollowMaster
from fairway.replication.connection import ReplicaConnection
from fairway.replication.leadership import EpochPromise, FollowDecision
from fairway.replication.peers import LOGS, has
from fairway.runtime.clock import Clock
from fairway.runtime.disk import settles
from fairway.runtime.net import Net
from fairway.storage import record, segment
from fairway.storage.log import Damaged, Log
from fairway.storage.log_copies import ROTTEN_MARK
from fairway.storage.store import Store

BYTES_MAX = limits.MIB  # in one GIVE, unless a record is larger


def give(store: Store, epoch: int, want: Want) -> tuple[Give, list[Bytes]]:
    """The wanted bytes, or why this copy does not have them. The loop waits for the read: the master has lost these
    bytes, and that is rare."""
    if want.log not in (MESSAGES, ACTIONS):
        raise RemoteProtocolError(f"the master wants something of log {want.log}: there are two, 0 and 1")
    directory_id = store.identity.directory_id
    try:
        chunk = store.read_chunk(want.log, want.position, min(want.size, BYTES_MAX))
        sentence = "" if chunk is not None else "this copy does not reach so far"
    except Damaged as damaged:
        chunk, sentence = None, str(damaged)
    attached: list[Bytes] = [] if chunk is None else [stretch(chunk.data)]
    return Give(epoch, directory_id, want.log, want.position, sentence), attached


_COMPARED_AT_ONCE = 64


class Diverged(FairwayError):
    """This copy has records that its master does not have; they were never committed."""

    def __init__(self, messages_at: int, actions_at: int) -> None:
        super().__init__(f"the logs are to be cut at {messages_at} (messages) and {actions_at} (actions)")
        self.messages_at = messages_at
        self.actions_at = actions_at


class TooFarBehind(FairwayError):
    """There is a gap between this copy's end and the master's first records, or the two share nothing at all."""

    def __init__(self, first_bases: tuple[int, int], why: str) -> None:
        super().__init__(f"{why}: this copy begins anew, and what it had is kept aside")
        self.first_bases = first_bases
        # of the master whose snapshot was fetched; 0: none was fetched, for the logs are all of the state
        self.epoch = 0


class ActionsRepaired(FairwayError):
    """Rotten actions are repaired: the copy has to rebuild the groups from them."""

    def __init__(self) -> None:
        super().__init__("actions that had rotted were repaired: the directory is opened again")


Remedy: TypeAlias = Diverged | TooFarBehind | ActionsRepaired


class ReplicaRefill(Protocol):
    """The state with which a copy starts over, for a copy whose logs are not all of its state."""

    async def messages_end(self) -> int:
        """The end of the part of the message log whose effects cannot be undone: the log is not cut before it."""

    async def fetch(self, wire: ReplicaConnection, group: str, epoch: int, directory_id: int) -> None:
        """Return once everything is on this copy's disk, ready to replace the present state."""

    def discard(self) -> None:
        """Drop what was fetched: it is not needed."""


@dataclass(frozen=True, slots=True)
class FollowerOptions:
    credits: int = 8  # answers that may be under way
    wait_ms: int = 1_000
    # further behind than this, the store syncs less often than the master did (`fairway.storage.replica_directory`)
    catch_up_bytes: int = 8 * limits.MIB
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
        """`secret`: shown to masters; the copy's node has its verifier."""
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
        self._owed: deque[tuple[int, int]] = deque()  # for each answer that came: the log ends after it
        self._held_ends: tuple[int, int] | None = None  # while catching up: the copy confirms no more than this
        self._goal: tuple[int, int] = (0, 0)
        self._first_bases: tuple[int, int] = (0, 0)
        self.is_catching_up = False
        self.is_streaming = False

    async def run(self, master: FollowDecision) -> None:
        """Follow until the connection ends. Raises the reason."""
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
        self._store.on_synced = lambda: None
        self._owed.clear()
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.abort()

    async def end_catch_up(self) -> None:
        """Wait until everything that came is synced, and a restart may rely on it. Returns at once without a
        catch-up."""
        ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._store.end_catch_up(settles(ended))
        await ended

    # --- repair ------------------------------------------------------------------------------------------------------

    async def _mend(self, wire: ReplicaConnection, followed: Followed) -> None:
        """Ask for what is rotten here, as far as the master has it committed. Spans that the master cannot give stay
        rotten."""
        for span in self._store.rotten_spans():
            at = span.start
            with suppress(Refused, RemoteProtocolError):
                while at < min(span.end, followed.logs[span.log].committed_end):
                    _, attached = await wire.ask(Mend(span.log, at, span.end - at), messages.Mended)
                    at = self._put_back(span.log, at, stretched(attached[0]), followed)
        if self._store.is_view_stale:
            raise ActionsRepaired

    def _put_back(self, log: int, position: int, data: bytes, followed: Followed) -> int:
        """Put repaired bytes in place. Where these alone do not help, raise `TooFarBehind` to fetch everything, if
        possible."""
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
        """Wait until the records of the connection before are on disk, or never will be."""
        for log in LOGS:
            await self._log(log).flusher.synced(self._log(log).end)

    async def _agree(self, wire: ReplicaConnection, master: FollowDecision, followed: Followed) -> None:
        """Return if this copy's logs are a prefix of the master's. Raise a `Remedy` otherwise."""
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
        """The end of the last record that both have. Of old segments this compares only the first record, until it is
        clear in which segment the histories part."""
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
        if end < own_end and end < await self._settled_end(log):  # committed once: data loss was accepted
            raise TooFarBehind(first_bases, f"log {log} differs from the master's where it was committed, at {end}")
        return end

    async def _last_shared(self, wire: ReplicaConnection, log: int, positions: Sequence[int]) -> int | None:
        """The last shared position: below a shared record, all are shared. Passes over records that are rotten on
        either side. `Refused` where a rotten record above may have been shared."""
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
        """Check that the master has a record of its own where the histories part, perhaps behind a segment's header, or
        ends there. Otherwise the master has rotted there unnoticed: this copy's records may be the last, and must not
        be cut off."""
        places = [end, end + segment.HEADER_BYTES]
        if master_end > places[-1]:
            compared, _ = await wire.ask(Compare(log, places, knows_rot=True), Compared)
            if not any(mark.epoch for mark in compared.marks):
                raise Refused(Code.DAMAGED, f"the master has no record at {end} of log {log}: it has rotted there")

    async def _are_shared(self, wire: ReplicaConnection, log: int, places: Sequence[int]) -> list[bool | None]:
        """Whether the master has the same records. None: a record is rotten, here or there."""
        compared, _ = await wire.ask(Compare(log, list(places), knows_rot=True), Compared)
        if len(compared.marks) != len(places):
            raise RemoteProtocolError("the master has not compared every record that it was asked for")
        theirs = [(mark.epoch, mark.crc) for mark in compared.marks]
        own = self._store.marks(log, places)
        return [None if ROTTEN_MARK in pair else pair[0] == pair[1] for pair in zip(theirs, own, strict=True)]

    async def _settled_end(self, log: int) -> int:
        """The end of what was committed and what other files refer to."""
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
        except FairwayError as error:  # the connection is about to end
            wire.fail(error)

    def _came(self, message: ControlMessage, attachments: Sequence[Bytes]) -> None:
        """Take an answer: gather its records for the disk. Its credit goes back when they are synced."""
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
            given, attached = give(self._store, self._epoch, want)
            wire.send(given, lambda *_: None, attached)  # if the master wants more, it asks
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
        """Confirm everything that is synced from now on."""
        if fault is None:
            self._held_ends = None


def _first_bases(followed: Followed) -> tuple[int, int]:
    return followed.logs[MESSAGES].first_base, followed.logs[ACTIONS].first_base
