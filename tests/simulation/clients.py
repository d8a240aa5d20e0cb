"""Those who use the store in a simulated history: producers, an actor, a reader.

They outlive the store: after a crash a producer sends again, byte for byte, what it has no answer for. Now and then it
sends what a confused one would, and holds the store to the one right answer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from fairway import batch, limits
from fairway.errors import Code, Refused, StorageFault
from fairway.group_events import ActionKind, GroupEvent
from fairway.names import Subject
from fairway.runtime.rng import SeededRng
from fairway.storage.action_log import Action
from fairway.storage.message_log import AppendReceipt
from fairway.storage.store import Store
from tests.simulation.truth import Invariant, Sent, Truth, place

NOW_MS = 1_700_000_000_000
REPEATED_FROM = limits.STREAM_BATCHES_MAX - 16  # of a stream's last batches: safely inside the window, pending included
WAIT_AND_RETRY = (Code.BUSY, Code.READ_ONLY)

Probe: TypeAlias = Callable[[Store], None]


class Producer:
    """One stream: a producer id, a subject, and sequences without gaps."""

    def __init__(self, truth: Truth, rng: SeededRng, producer_id: int, subjects: list[Subject]) -> None:
        self.id = producer_id
        self.subject = subjects[rng.below(len(subjects))]
        self._subjects = subjects
        self._truth = truth
        self._rng = rng
        self._next = 0
        self._epoch = 0
        self._pending: deque[Sent] = deque()
        self._acked: deque[Sent] = deque(maxlen=REPEATED_FROM)

    async def run(self, store: Store) -> None:
        """Go on until cancelled, or until the store has failed."""
        while store.fault is None:
            await asyncio.sleep(self._rng.below(4_000) / 1_000_000)
            draw = self._rng.below(100)
            if draw < 80:
                await self._send(store)
            elif draw < 88 and self._acked:
                await self._repeat(store, self._acked[self._rng.below(len(self._acked))])
            else:
                self._confuse(store)

    # --- as it should be ---------------------------------------------------------------------------------------------

    async def _send(self, store: Store) -> None:
        """Up to four batches at once, those without an answer first; then wait for all of them."""
        wanted = 1 + self._rng.below(4)
        while len(self._pending) < wanted:
            self._pending.append(self._new_batch())
        given: list[tuple[Sent, AppendReceipt]] = []
        for sent in list(self._pending):
            receipt = self._offer(store, sent)
            if receipt is None:
                break
            given.append((sent, receipt))
        for sent, receipt in given:
            if not await self._answered(store, sent, receipt):
                break

    def _new_batch(self) -> Sent:
        if self._rng.below(60) == 0:
            self._epoch += 1
        count = 1 + self._rng.below(1 + self._rng.below(24))
        size = 1 + self._rng.below(120)
        payloads = [self._rng.bits(8 * size).to_bytes(size, "little") for _ in range(count)]
        data = self._encode(payloads, self._next)
        sent = Sent(self.subject, self.id, self._next, count, data)
        self._next += count
        self._truth.note_sent(sent)
        return sent

    def _encode(self, payloads: list[bytes], first_sequence: int) -> bytes:
        return batch.encode(
            payloads,
            producer_id=self.id,
            first_sequence=first_sequence,
            created_ms=NOW_MS,
            producer_epoch=self._epoch,
        )

    def _offer(self, store: Store, sent: Sent) -> AppendReceipt | None:
        """Give it to the store, sometimes twice; None if it was refused."""
        try:
            sent.refused = False
            receipt = store.produce(sent.subject, sent.data)
        except Refused as refusal:
            self._note_refusal(sent, refusal)
            return None
        except StorageFault as fault:
            self._expect_fault(store, fault)
            return None
        sent.unknown = True
        if self._rng.below(16) == 0:
            again = store.produce(sent.subject, sent.data)
            if not again.is_duplicate or place(again) != place(receipt):
                self._blame(f"{sent}, sent twice at once: {receipt}, then {again}")
            return again
        return receipt

    def _note_refusal(self, sent: Sent, refusal: Refused) -> None:
        sent.refused = not sent.unknown  # an earlier attempt may have come through
        if refusal.code not in WAIT_AND_RETRY:
            self._blame(f"{sent}, which is next in its stream, was refused: {refusal}")

    def _expect_fault(self, store: Store, fault: StorageFault) -> None:
        if store.fault is None:
            self._truth.blame(Invariant.BROKE, f"{fault!r}, and the store goes on")

    async def _answered(self, store: Store, sent: Sent, receipt: AppendReceipt) -> bool:
        synced_end = store.messages.log.flusher.synced_end if store.fault is not None else receipt.end
        try:
            await store.durable(receipt)
        except Refused as refusal:
            sent.unknown = False
            self._note_refusal(sent, refusal)
            return False
        except StorageFault as fault:
            self._expect_fault(store, fault)
            return False
        if receipt.end > synced_end:
            self._truth.blame(Invariant.ANSWERED, f"{sent} was answered after {store.fault!r}")
        self._truth.note_acknowledged(sent, receipt)
        self._pending.popleft()
        self._acked.append(sent)
        return True

    async def _repeat(self, store: Store, sent: Sent) -> None:
        """What was acknowledged is sent again: the same receipt, whatever happened in between."""
        try:
            again = store.produce(sent.subject, sent.data)
            if not again.is_duplicate:
                self._blame(f"{sent} was acknowledged; sent again it was stored again")
            await store.durable(again)
            self._truth.note_acknowledged(sent, again)
        except Refused as refusal:
            if refusal.code is not Code.READ_ONLY:
                self._blame(f"{sent} was acknowledged; sent again it was refused: {refusal}")
        except StorageFault as fault:
            self._expect_fault(store, fault)

    # --- as it should not be -----------------------------------------------------------------------------------------

    def _confuse(self, store: Store) -> None:
        probes: tuple[Probe, ...] = (self._conflict, self._overlap, self._skip, self._arrive_unknown, self._stray)
        if self._acked:
            probes[self._rng.below(len(probes))](store)

    def _conflict(self, store: Store) -> None:
        """Other bytes under numbers that are taken."""
        old = self._acked[self._rng.below(len(self._acked))]
        self._expect(store, old.subject, [b"other"] * old.count, old.producer_sequence, Code.SEQUENCE_CONFLICT)

    def _overlap(self, store: Store) -> None:
        """Partly old, partly new numbers."""
        old = self._acked[-1]
        first = old.producer_sequence + old.count - 1
        self._expect(store, old.subject, [b"overlap"] * (2 + self._rng.below(3)), first, Code.SEQUENCE_CONFLICT)

    def _skip(self, store: Store) -> None:
        """Numbers that come too early."""
        self._expect(store, self.subject, [b"early"], self._next + 1 + self._rng.below(50), Code.SEQUENCE_GAP)

    def _arrive_unknown(self, store: Store) -> None:
        """A stream that resumes, and that nobody has heard of."""
        data = batch.encode([b"?"], producer_id=self._rng.bits(63) | 1 << 63, first_sequence=7, created_ms=NOW_MS)
        self._expect_refusal(store, self.subject, data, Code.UNKNOWN_PRODUCER)

    def _stray(self, store: Store) -> None:
        """The stream goes on in another subject."""
        other = self._subjects[self._rng.below(len(self._subjects))]
        if other != self.subject:
            self._expect(store, other, [b"stray"], self._next, Code.SEQUENCE_CONFLICT)

    def _expect(self, store: Store, subject: Subject, payloads: list[bytes], first: int, code: Code) -> None:
        self._expect_refusal(store, subject, self._encode(payloads, first), code)

    def _expect_refusal(self, store: Store, subject: Subject, data: bytes, code: Code) -> None:
        try:
            answer: object = store.produce(subject, data)
        except Refused as refusal:
            if refusal.code in (code, Code.READ_ONLY):
                return
            answer = refusal
        except StorageFault as fault:
            self._expect_fault(store, fault)
            return
        self._blame(f"stream {self.id:x} should be told {code.name}, and was answered {answer}")

    def _blame(self, sentence: str) -> None:
        self._truth.blame(Invariant.DEDUPE, sentence)


class Actor:
    """Writes actions, numbered in `lot`."""

    def __init__(self, truth: Truth, rng: SeededRng) -> None:
        self._truth = truth
        self._rng = rng
        self._next = 0

    async def run(self, store: Store) -> None:
        while store.fault is None:
            await asyncio.sleep(self._rng.below(8_000) / 1_000_000)
            await self._act(store)

    async def _act(self, store: Store) -> None:
        numbers = range(self._next, self._next + 1 + self._rng.below(5))
        self._next = numbers.stop
        for number in numbers:
            self._truth.actions[number] = False
        try:
            header = store.act([self._action(number) for number in numbers])
            await store.actions.log.flusher.durable(header.end)
        except Refused as refusal:
            if refusal.code not in WAIT_AND_RETRY:
                self._truth.blame(Invariant.ACTIONS, f"refused: {refusal}")
            return
        except StorageFault as fault:
            if store.fault is None:
                self._truth.blame(Invariant.BROKE, f"{fault!r}, and the store goes on")
            return
        for number in numbers:
            self._truth.actions[number] = True

    def _action(self, number: int) -> Action:
        ranges = tuple((first, 1) for first in range(self._rng.below(4)))
        return Action(
            1, 1, GroupEvent(ActionKind.ACK, NOW_MS, lot=number, ranges=ranges, detail=b"d" * self._rng.below(20))
        )


async def read_about(store: Store, truth: Truth, rng: SeededRng) -> None:
    """Read here and there, as consumers do; what is seen once must stay."""
    while store.fault is None:
        await asyncio.sleep(rng.below(10_000) / 1_000_000)
        subjects = list(store.messages.views.subjects)
        if subjects:
            subject = subjects[rng.below(len(subjects))]
            sequence = rng.below(subject.next_sequence + 1)
            for stored in store.messages.read(subject.id, sequence, messages_max=50, bytes_max=8_192):
                truth.see(subject.name, stored)
