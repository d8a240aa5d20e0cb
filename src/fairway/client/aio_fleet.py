"""What `sync_fleet` is to threads, on a loop: what waits for room, for a place, and for answers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

from fairway.client import fleet_asking
from fairway.client.aio_delayed import AioAnswers
from fairway.client.aio_pending import AioBatch, AioPending
from fairway.client.aio_way import AioServerConnection
from fairway.client.asking import AnswerT, Command
from fairway.client.commands import SeekTarget
from fairway.client.core import ASK_S, Duration
from fairway.client.fleet import ClusterClient, nowhere
from fairway.client.fleet_asking import Dialog
from fairway.client.many import MessageSlice, shares_of
from fairway.client.merging import check_scannable
from fairway.client.spot import Partitioner
from fairway.errors import BufferFull, Refused
from fairway.protocol.messages import ControlMessage
from fairway.protocol.pending import Receipt
from fairway.protocol.producing import ProducerOptions

T = TypeVar("T")


class AioClusterClient:
    """All ways of one client."""

    def __init__(self, inner: ClusterClient[AioServerConnection], options: ProducerOptions) -> None:
        self.inner = inner
        self._block_s = options.block_ms / 1_000

    @property
    def ways(self) -> list[AioServerConnection]:
        return self.inner.ways

    # --- sending -----------------------------------------------------------------------------------------------------

    def put(self, subject: str, message: tuple[Any, ...], *, is_alone: bool) -> Awaitable[Receipt]:
        """One message, with all that belongs to it; its due time is the last of that. Awaiting it waits for room."""
        way, add = self._adding(subject, message, is_alone)
        try:
            return way.put_now(add)
        except BufferFull as full:
            return way.put_later(add, full)

    def put_now(self, subject: str, message: tuple[Any, ...], *, is_alone: bool) -> AioPending:
        """The same without a wait: `BufferFull`."""
        way, add = self._adding(subject, message, is_alone)
        return way.put_now(add)

    def _adding(
        self, subject: str, message: tuple[Any, ...], is_alone: bool
    ) -> tuple[AioServerConnection, Callable[[], AioPending]]:
        fleet, key = self.inner, message[1]
        spot = fleet.spot(subject, is_due=bool(message[-1]))
        way = spot.pick(key)
        if way is not fleet.meta:
            return way, partial(way.producing.add_alone if is_alone else way.producing.add, subject, *message)
        is_alone = is_alone or key is not None  # its key may have a place of its own
        add = partial(way.producing.add_alone if is_alone else way.producing.add, subject, *message)
        return way, partial(self._add_nowhere, spot, add)

    def _add_nowhere(self, spot: Partitioner[AioServerConnection], add: Callable[[], T]) -> T:
        """Until somebody says where its subject is; which may have been said while it waited for room."""
        added = add()
        self.inner.settle(spot)
        return added

    async def put_many(self, subject: str, part: MessageSlice, *, is_due: bool) -> list[AioBatch]:
        """Many messages; to one broker group, unless their keys have places of their own."""
        spot = self.inner.spot(subject, is_due=is_due)
        if part.columns.get("keys") is None:
            way = spot.pick(None)
            add = partial(way.producing.add_many, subject, part.payloads, **part.columns)
            return await self._put(way, partial(self._add_nowhere, spot, add) if way is self.inner.meta else add)
        if not spot.ways and not await self.inner.meta.link.wait(lambda: bool(spot.ways), self._block_s):
            raise nowhere(spot, self.inner)
        batches: list[AioBatch] = []
        for way, share in shares_of(spot, part).items():
            batches += await self._put(way, partial(way.producing.add_many, subject, share.payloads, **share.columns))
        return batches

    async def _put(self, way: AioServerConnection, add: Callable[[], list[AioBatch]]) -> list[AioBatch]:
        try:
            batches = add()
        except BufferFull as full:
            batches = await way.wait_and_put(add, full)
        way.link.pump()
        return batches

    # --- asking ------------------------------------------------------------------------------------------------------

    async def ask(self, command: Command[AnswerT], timeout: Duration) -> AnswerT:  # noqa: ASYNC109
        """Ask every group that it concerns; one answer from all."""
        return await self._drive(fleet_asking.ask_all(self.inner, command), timeout)

    async def to_scan(self, subject: str, start: SeekTarget, end: int | None) -> list[AioServerConnection]:
        """The ways to go one after the other, to read all of a subject."""
        ways = await self._drive(fleet_asking.groups_of(self.inner, subject), ASK_S)
        check_scannable(subject, start, end, sorted(ways))
        return [ways[name] for name in sorted(ways)]

    async def delay_askers(self) -> list[AioAnswers]:
        """One for each group of delay servers."""
        ways = await self._drive(fleet_asking.delay_groups(self.inner), ASK_S)
        return [partial(_answer, ways[name]) for name in sorted(ways)]

    async def _drive(self, dialog: Dialog[T], timeout: Duration) -> T:  # noqa: ASYNC109
        outcome: ControlMessage | Refused | None = None
        while True:
            try:
                asking = next(dialog) if outcome is None else dialog.send(outcome)
            except StopIteration as end:
                found: T = end.value
                return found
            try:
                outcome = (await asking.way.ask(asking.command, timeout))[0]
            except Refused as refused:
                outcome = refused
            except TimeoutError as error:
                raise asking.unanswered(error) from None


async def _answer(way: AioServerConnection, command: Command[AnswerT]) -> AnswerT:
    return (await way.ask(command, ASK_S))[0]
