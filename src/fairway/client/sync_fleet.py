"""What `fleet` does not do for threads: wait, for room, for a place, and for answers."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar

from fairway.client import fleet_asking
from fairway.client.asking import AnswerT, Command
from fairway.client.commands import SeekTarget
from fairway.client.core import ASK_S, Duration, limit_of
from fairway.client.delayed import AskDelayServer
from fairway.client.fleet import ClusterClient, nowhere
from fairway.client.fleet_asking import Dialog
from fairway.client.many import MessageSlice, shares_of
from fairway.client.merging import check_scannable
from fairway.client.pending import SyncBatch, SyncPending
from fairway.client.spot import Partitioner
from fairway.client.sync_way import SyncServerConnection
from fairway.errors import BufferFull, Refused
from fairway.protocol.messages import ControlMessage
from fairway.protocol.producing import ProducerOptions

T = TypeVar("T")


class SyncClusterClient:
    """All ways of one client."""

    def __init__(self, inner: ClusterClient[SyncServerConnection], options: ProducerOptions) -> None:
        self.inner = inner
        self._block_s = options.block_ms / 1_000

    @property
    def ways(self) -> list[SyncServerConnection]:
        return self.inner.ways

    # --- sending -----------------------------------------------------------------------------------------------------

    def put(self, subject: str, message: tuple[Any, ...], timeout: Duration | None, *, is_alone: bool) -> SyncPending:
        """One message, with all that belongs to it; its due time is the last of that. Where one group has no room,
        another may."""
        fleet, key = self.inner, message[1]
        spot = fleet.spot(subject, is_due=bool(message[-1]))
        way = spot.pick(key)
        if way is fleet.meta:  # until somebody says where its subject is, whose keys may have places of their own
            return self._put_nowhere(spot, message, timeout, is_alone=is_alone or key is not None)
        add = partial(way.producing.add_alone if is_alone else way.producing.add, subject, *message)
        try:
            return way.put_now(add)
        except BufferFull as full:
            other = spot.another(way)
            if other is None:
                return way.wait_and_put(add, full, timeout)
        return other.put(partial(other.producing.add, subject, *message), timeout)

    def _put_nowhere(
        self,
        spot: Partitioner[SyncServerConnection],
        message: tuple[Any, ...],
        timeout: Duration | None,
        *,
        is_alone: bool,
    ) -> SyncPending:
        way = self.inner.meta
        pending = way.put(
            partial(way.producing.add_alone if is_alone else way.producing.add, spot.subject, *message), timeout
        )
        self.inner.settle(spot)
        return pending

    def put_many(self, subject: str, part: MessageSlice, timeout: Duration | None, *, is_due: bool) -> list[SyncBatch]:
        """Many messages; to one broker group, unless their keys have places of their own."""
        spot, keys = self.inner.spot(subject, is_due=is_due), part.columns.get("keys")
        if keys is None:
            way = spot.pick(None)
            batches = way.put(partial(way.producing.add_many, subject, part.payloads, **part.columns), timeout)
            if way is self.inner.meta:
                self.inner.settle(spot)
            return batches
        limit_s = limit_of(timeout)
        if not spot.ways and not self.inner.meta.link.wait(
            lambda: bool(spot.ways), self._block_s if limit_s is None else limit_s
        ):
            raise nowhere(spot, self.inner)
        batches = []
        for way, share in shares_of(spot, part).items():
            batches += way.put(partial(way.producing.add_many, subject, share.payloads, **share.columns), timeout)
        return batches

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, command: Command[AnswerT], timeout: Duration) -> AnswerT:
        """Ask every group that it concerns; one answer from all."""
        return self._drive(fleet_asking.ask_all(self.inner, command), timeout)

    def to_scan(self, subject: str, start: SeekTarget, end: int | None) -> list[SyncServerConnection]:
        """The ways to go one after the other, to read all of a subject."""
        ways = self._drive(fleet_asking.groups_of(self.inner, subject), ASK_S)
        check_scannable(subject, start, end, sorted(ways))
        return [ways[name] for name in sorted(ways)]

    def delay_askers(self) -> list[AskDelayServer]:
        """One for each group of delay servers."""
        ways = self._drive(fleet_asking.delay_groups(self.inner), ASK_S)
        return [partial(_answer, ways[name]) for name in sorted(ways)]

    def _drive(self, dialog: Dialog[T], timeout: Duration) -> T:
        outcome: ControlMessage | Refused | None = None
        while True:
            try:
                asking = next(dialog) if outcome is None else dialog.send(outcome)
            except StopIteration as end:
                found: T = end.value
                return found
            try:
                outcome = asking.way.ask(asking.command, timeout)[0]
            except Refused as refused:
                outcome = refused
            except TimeoutError as error:
                raise asking.unanswered(error) from None


def _answer(way: SyncServerConnection, command: Command[AnswerT]) -> AnswerT:
    return way.ask(command, ASK_S)[0]
