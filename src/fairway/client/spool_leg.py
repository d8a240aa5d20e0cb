"""What of a spool goes to one group of brokers: the session on the way there.

Who decides (`spool_sorting`) has a lock of its own, which may be taken before that of a way and never after it. So what
happens here is gathered, and told by an errand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Generic, NamedTuple, TypeAlias

from fairway import batch
from fairway.client.spool_drain import SpooledBatch, SubjectQueue
from fairway.client.spool_journal import Journal
from fairway.client.spool_record import SpoolEntry
from fairway.client.ways import WayT
from fairway.errors import Refused
from fairway.protocol.conflict import is_receipt
from fairway.protocol.messages import Produced
from fairway.protocol.session import Answer, Ask, RequestOutcome
from fairway.world.rng import Rng

StreamKey: TypeAlias = tuple[str, bool]  # a subject, and whether its messages are due later


class PlacedBatch(SpooledBatch):
    """A batch that is on its way to where its journal says."""

    __slots__ = ("group",)

    def __init__(self, entry: SpoolEntry, flow: SubjectQueue, journal: Journal, group: str) -> None:
        super().__init__(entry, flow, journal)
        self.group = group
        self.is_doubtful = journal.may_be_stored(entry)

    def stamp(self) -> None:
        """As it was written, or elsewhere under another number: then its messages keep the ids of their receipts."""
        header, data = batch.peek(self.entry.data), self.entry.data
        placed = self.journal.placed.get(self.entry.number)
        self.producer_id, self.first = header.producer_id, header.first_sequence
        if placed is not None:
            self.producer_id, self.first = placed.stream, placed.first
        is_as_written = (self.producer_id, self.first) == (header.producer_id, header.first_sequence)
        self.data = (
            data if is_as_written else batch.reborn(data, producer_id=self.producer_id, first_sequence=self.first)
        )


class Report(NamedTuple):
    """What has happened since the last one."""

    is_open: bool
    stored: list[tuple[PlacedBatch, bool]]  # and whether it had been before
    broken: list[
        SubjectQueue
    ]  # nothing of them is under way, and something has come back: held until it is decided what next


class SpoolSender(Generic[WayT]):
    """Called under the lock of the way, but for `told`, which is called without any."""

    def __init__(self, name: str, way: WayT, rng: Rng, told: Callable[[SpoolSender[WayT]], None]) -> None:
        self.name = name
        self.way = way
        self.flows: dict[StreamKey, SubjectQueue] = {}
        self._rng = rng
        self._told = told
        self._is_telling = False
        self._is_open = False
        self._stored: list[tuple[PlacedBatch, bool]] = []
        self._broken: list[SubjectQueue] = []

    @property
    def lock(self) -> AbstractContextManager[Any]:
        return self.way.link.lock

    def flow(self, key: StreamKey) -> SubjectQueue:
        return self.flows.get(key) or self.flows.setdefault(key, SubjectQueue(key, self._rng))

    def report(self) -> Report:
        """What is new, told once."""
        report = Report(self._is_open, self._stored, self._broken)
        self._stored, self._broken, self._is_telling = [], [], False
        return report

    def let_go(self, flow: SubjectQueue) -> None:
        """Forget it if nothing is in it; but for one that was refused, whose subject is not to be tried again soon."""
        if not flow.parcels and flow.refused is None:
            self.flows.pop(flow.key, None)

    # --- Session -----------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        self._look()

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        self._look()
        asks: list[Ask] = []
        for flow in self.flows.values():
            while len(asks) < room and (parcel := flow.take(now_ns)) is not None:
                asks.append(flow.ask(parcel))
        return asks

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        parcel: PlacedBatch = token  # type: ignore[assignment]
        flow = parcel.flow
        if isinstance(outcome, Answer):
            receipt: Produced = outcome.message  # type: ignore[assignment]  # PRODUCE has no other answer
            self._arrived(parcel, receipt.is_duplicate)
            self.way.producing.note_success()
        elif isinstance(outcome, Refused) and is_receipt(outcome, parcel.data):
            self._arrived(parcel, True)
        else:
            flow.came_to_grief(parcel, outcome)
        if flow.is_broken and not flow.in_flight:
            flow.is_held = True
            self._broken.append(flow)
        self._tell()

    def _arrived(self, parcel: PlacedBatch, is_duplicate: bool) -> None:
        parcel.flow.arrived(parcel)
        self._stored.append((parcel, is_duplicate))
        self.let_go(parcel.flow)

    def next_deadline(self) -> int | None:
        waits = (flow for flow in self.flows.values() if flow.parcels and flow.retry_ns and not flow.is_held)
        return min((flow.retry_ns for flow in waits), default=None)

    def _look(self) -> None:
        is_open = self.way.core.line.is_open
        if is_open is not self._is_open:
            self._is_open = is_open
            self._tell()

    def _tell(self) -> None:
        if not self._is_telling:
            self._is_telling = True
            self.way.core.line.run_later(self._errand)

    def _errand(self) -> None:
        self._told(self)
