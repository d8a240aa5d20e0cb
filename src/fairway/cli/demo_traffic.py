"""Numbered orders through a cluster: sent, some of them for later, received, and compared in the end."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING, Self

from fairway.cli import output
from fairway.world.clock import RealClock

if TYPE_CHECKING:
    from fairway import Client, Consumer
    from fairway.protocol.pending import Pending

GROUP = "billing"
_ORDERS_PER_S = 200
_LATER_ONE_IN = 10  # orders that are sent for later
_LATER_S = 2.0
_TAKE_S = 0.2
_JOIN_S = 30.0


class Traffic:
    """One sender, called by whoever has the time; one consumer, on a thread of its own."""

    def __init__(self, client: Client, subject: str) -> None:
        from fairway.world.workers import Workers

        self._clock = RealClock()
        self._subject = subject
        self._client = client
        self._pending: dict[int, Pending] = {}
        self._workers = Workers()
        self._is_ending = False
        self.sent = 0
        self.failed = 0
        self.stored: set[int] = set()
        self.received: set[int] = set()
        self.repeated = 0
        self._worst_s = 0.0  # the longest time without an order, and when the last one came
        self._last_ns: int | None = None

    def __enter__(self) -> Self:
        consumer = self._client.consumer(self._subject, group=GROUP)
        self._workers.start("fairway-demo-consumer", lambda: self._consume(consumer))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_ending = True
        self._workers.join(_JOIN_S)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(self, client: Client, elapsed_s: float) -> None:
        """As many orders as are due by now; those that nobody takes now are sent when somebody does."""
        due = min(round(elapsed_s * _ORDERS_PER_S) - self.sent, _ORDERS_PER_S)
        for number in range(self.sent + 1, self.sent + 1 + max(due, 0)):
            after = _LATER_S if number % _LATER_ONE_IN == 0 else None
            self._pending[number] = client.send(self._subject, str(number).encode(), key=f"o-{number}", after=after)
            self.sent = number
        self._collect()

    def _collect(self) -> None:
        for number in [number for number, each in self._pending.items() if each.done()]:
            if self._pending.pop(number).exception() is None:
                self.stored.add(number)
            else:
                self.failed += 1

    # --- receiving ---------------------------------------------------------------------------------------------------

    def _consume(self, consumer: Consumer) -> None:
        with consumer:
            while not self._is_ending:
                for message in consumer.take(timeout=_TAKE_S):
                    self._note(int(message.payload))
                    message.ack()

    def _note(self, number: int) -> None:
        now_ns = self._clock.monotonic_ns()
        if self._last_ns is not None:
            self._worst_s = max(self._worst_s, (now_ns - self._last_ns) / 1e9)
        self._last_ns = now_ns
        self.repeated += number in self.received
        self.received.add(number)

    # --- what came of it ---------------------------------------------------------------------------------------------

    @property
    def lost(self) -> set[int]:
        """Stored, and never received."""
        return self.stored - self.received

    def is_complete(self) -> bool:
        """Whether everything sent has its answer, and everything stored was received."""
        self._collect()
        return not self._pending and not self.lost

    def sentence(self) -> str:
        waiting = len(self._pending)
        return (
            f"orders: {self.sent:,} sent, {len(self.stored):,} stored, {len(self.received):,} received; "
            f"{waiting:,} wait for an answer, {len(self.lost):,} are on their way or due later"
        )

    def sum_up(self) -> list[str]:
        later = sum(number % _LATER_ONE_IN == 0 for number in self.stored)
        refused = f", {self.failed:,} refused" if self.failed else ""
        unknown = f", {len(self._pending):,} without an answer" if self._pending else ""
        twice = f", {self.repeated:,} of them more than once" if self.repeated else ""
        return [
            f"{self.sent:,} orders sent, {len(self.stored):,} stored{refused}{unknown}; {later:,} were for later",
            f"{len(self.received):,} received{twice}; the longest pause was {output.age(self._worst_s)}",
            f"{len(self.lost):,} lost",
        ]
