"""Sends the batches of journals to one broker: each subject's batches in order, until the broker has stored them all.

A batch has its number (stream and first sequence) from the moment the journal writes it. However often and from
whichever process the batch is sent, the broker stores it once and answers with the first receipt. A batch is *doubtful*
if this process or an earlier one has sent it, and the answer is not known.

    outcome                            what follows
    stored now, or stored before       the batch is done
    the connection was lost            the batch is sent again on the next connection, and is doubtful from here on
    BUSY, READ_ONLY and the like       the batch is sent again after a wait that grows with each attempt
    a gap behind another failed batch  the batch is sent again, after that batch
    a gap at the first batch           the batch is certainly not stored (with the exception below). This batch and the
                                       rest of its stream go on under a new stream, which the journal records first
    UNKNOWN_PRODUCER                   a batch that was never sent before: as with a gap. A doubtful batch is set aside
                                       as unknown: nobody can tell any more whether it is stored
    SEQUENCE_CONFLICT                  the batch is done, if the broker names exactly this batch
    SEQUENCE_CONFLICT otherwise,       another batch has the place, from a sender whose past a restored backup has
    FOREIGN_STREAM                     undone, or from a stranger. The batch goes on alone under a new stream, which the
                                       journal records first. Its messages keep their ids, later batches their numbers
    TOO_LARGE, BAD_NAME, ...           the batch is set aside, with the reason

The exception: a batch of unknown fate was set aside, and a late request of an earlier connection may still store it.
Then the batches behind it in the stream may be stored the same way. So a gap proves nothing for a doubtful batch of
that stream, and the batch is set aside as unknown, too.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from fairway import batch, limits
from fairway.batch.layout import is_delayed
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_record import SpoolEntry
from fairway.errors import Code, Refused, StorageFault
from fairway.protocol.line import NS_PER_MS, Answer, Ask, ConnectionLost, RequestOutcome, RetryDelays
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.resend import SendOutcome, is_receipt, outcome_of
from fairway.protocol.spool_port import Handed
from fairway.runtime.rng import Rng

log = logging.getLogger("fairway.spool")

WINDOW: Final = 16  # batches of one subject in flight
LOADED_MAX: Final = 64  # batches in memory, of all subjects: so many may pass a batch that is refused for now
LOADED_BYTES_MAX: Final = 16 * limits.MIB
_FIRST_MS, _MOST_MS = 20, 5_000  # between attempts
AGAIN_MS = 2_000  # until the next attempt when the disk is full and the journal cannot record a decision

ELSEWHERE: Final = frozenset({Code.DRAINING, Code.NOT_MASTER})  # the line looks for another broker and does the waiting


class SpooledBatch:
    """One batch on its way from a journal to a broker."""

    __slots__ = ("data", "entry", "first", "flow", "is_doubtful", "journal", "producer_id", "secret", "trouble")

    def __init__(self, entry: SpoolEntry, flow: SubjectQueue, journal: Journal) -> None:
        self.entry = entry
        self.flow = flow
        self.journal = journal
        self.is_doubtful = entry.was_sent or entry.number < journal.sent_before
        self.trouble: Refused | ConnectionLost | None = None
        self.data = b""
        self.producer_id = self.first = 0
        self.restamp()

    def restamp(self) -> None:
        """Choose the number, the bytes and the stream's secret again."""
        self.stamp()
        self.secret = self.journal.secret(self.producer_id)

    def stamp(self) -> None:
        """Choose the number and the bytes to send."""
        header = batch.peek(self.entry.data)
        self.producer_id, self.first = self.journal.identity(header.producer_id, header.first_sequence)
        is_as_written = (self.producer_id, self.first) == (header.producer_id, header.first_sequence)
        # In journals without a key, a new number gave the messages new ids, and some may be in flight that way.
        anew = batch.reborn if self.journal.is_keyed else batch.restamp
        self.data = (
            self.entry.data
            if is_as_written
            else anew(self.entry.data, producer_id=self.producer_id, first_sequence=self.first)
        )


class SubjectQueue:
    """One subject's batches, in order."""

    __slots__ = (
        "_next",
        "backoff",
        "in_flight",
        "is_broken",
        "is_held",
        "key",
        "refused",
        "retry_ns",
        "spooled_batches",
    )  # fmt: skip

    def __init__(self, key: tuple[str, bool], rng: Rng) -> None:
        self.key = key  # the subject, and whether the messages are due later
        self.spooled_batches: deque[SpooledBatch] = deque()
        self.in_flight = 0
        self.retry_ns = 0
        self.is_broken = False
        self.is_held = False  # waits for a journal write
        self.refused: Refused | None = None
        self.backoff = RetryDelays(rng, first_ms=_FIRST_MS, most_ms=_MOST_MS)
        self._next = 0  # index in `spooled_batches` of the first batch that is not in flight

    def take(self, now_ns: int) -> SpooledBatch | None:
        """The next batch to send; None: not now. Batches of a new stream wait for those of the stream before."""
        if self.is_broken or self.is_held or now_ns < self.retry_ns or self.in_flight >= WINDOW:
            return None
        self.retry_ns = 0
        if self._next >= len(self.spooled_batches):
            return None
        spooled = self.spooled_batches[self._next]
        if self._next and spooled.producer_id != self.spooled_batches[0].producer_id:
            return None
        self._next += 1
        self.in_flight += 1
        return spooled

    def ask(self, spooled: SpooledBatch) -> Ask:
        """The request that carries the batch."""
        return Ask(Produce(self.key[0], spooled.is_doubtful, spooled.secret), (spooled.data,), spooled)

    def arrived(self, spooled: SpooledBatch) -> None:
        self.in_flight -= 1
        self._next -= 1
        self.spooled_batches.remove(spooled)
        if not self.is_broken:
            self.refused = None
            self.backoff.reset()

    def came_to_grief(self, spooled: SpooledBatch, trouble: Refused | ConnectionLost) -> None:
        self.in_flight -= 1
        spooled.trouble = trouble
        self.is_broken = True
        if isinstance(trouble, ConnectionLost):
            spooled.is_doubtful = True

    def remove(self, spooled_batches: Iterable[SpooledBatch]) -> None:
        """Take these batches out of the queue. Nothing may be in flight."""
        gone = frozenset(spooled_batches)
        self.spooled_batches = deque(spooled for spooled in self.spooled_batches if spooled not in gone)

    def begin_again(self) -> None:
        """Begin again with the first batch that is not stored. Every request must be answered."""
        self.is_broken = False
        self._next = 0
        for spooled in self.spooled_batches:
            spooled.trouble = None


class SpoolDrain:
    """The session on the line that drains the journals one after the other."""

    def __init__(self, rng: Rng, *, on_change: Callable[[], None], on_success: Callable[[], None]) -> None:
        """`on_change` is called after a read or a journal write: `asks` may have more requests."""
        self.messages = 0  # delivered
        self.duplicates = 0  # of the delivered: stored before
        self.asides = 0  # messages set aside
        self._rng = rng
        self._on_change = on_change
        self._on_success = on_success
        self._journals: list[Journal] = []
        self._current: Journal | None = None
        self._flows: dict[tuple[str, bool], SubjectQueue] = {}
        self._loaded = 0
        self._loaded_bytes = 0
        self._is_loading = False
        self._is_open = False

    # --- for the spool -----------------------------------------------------------------------------------------------

    def add(self, journal: Journal) -> None:
        """Drain one more journal, after the others."""
        self._journals.append(journal)

    def remove(self, journal: Journal) -> None:
        """Forget an empty journal."""
        self._journals.remove(journal)

    @property
    def trouble(self) -> Refused | None:
        """The last refusal of a subject that waits."""
        return next((flow.refused for flow in self._flows.values() if flow.refused is not None), None)

    @property
    def is_nearly_done(self) -> bool:
        """Whether the line is open, every batch that is left is in memory, and the broker refuses none."""
        return self._is_open and all(not each.has_more for each in self._journals) and not self.trouble

    # --- Session -----------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        self._is_open = True

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        if not room:
            self._is_open = False
            return []
        self._is_open = True
        self._load()
        asks: list[Ask] = []
        for flow in self._flows.values():
            while len(asks) < room and (spooled := flow.take(now_ns)) is not None:
                asks.append(flow.ask(spooled))
        return asks

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        spooled: SpooledBatch = token  # type: ignore[assignment]
        flow = spooled.flow
        if isinstance(outcome, Answer):
            receipt: Produced = outcome.message  # type: ignore[assignment]  # PRODUCE has no other answer
            self.duplicates += spooled.entry.messages if receipt.is_duplicate else 0
            self._arrived(spooled)
            self._on_success()
        elif isinstance(outcome, Refused) and is_receipt(outcome, spooled.data):
            self.duplicates += spooled.entry.messages
            self._arrived(spooled)
        else:
            flow.came_to_grief(spooled, outcome)
        if flow.is_broken and not flow.in_flight:
            self._mend(flow, now_ns)

    def next_deadline(self) -> int | None:
        return min(
            (flow.retry_ns for flow in self._flows.values() if flow.spooled_batches and flow.retry_ns), default=None
        )

    # --- loading -----------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Load the next batches of the current journal, if there is room in memory."""
        if self._current is None or self._current.is_empty or self._current.fault is not None:
            sound = (each for each in self._journals if not each.is_empty and each.fault is None)
            self._current = next(sound, None)
        journal = self._current
        if self._is_loading or journal is None:
            return
        is_room = self._loaded <= LOADED_MAX // 2 and self._loaded_bytes < LOADED_BYTES_MAX
        if is_room and journal.has_more:
            self._is_loading = True
            journal.load(lambda entries: self._on_loaded(journal, entries))

    def _on_loaded(self, journal: Journal, entries: list[SpoolEntry]) -> None:
        if not entries:
            self._is_loading = False
            self._on_change()
            return

        def marked(fault: StorageFault | None) -> None:
            self._is_loading = False
            if fault is None:
                for entry in entries:
                    self._put(journal, entry)
            self._on_change()

        journal.mark_sent(entries[-1].number + 1, marked)

    def _put(self, journal: Journal, entry: SpoolEntry) -> None:
        key = (entry.subject, is_delayed(entry.data))
        flow = self._flows.get(key)
        if flow is None:
            flow = self._flows[key] = SubjectQueue(key, self._rng)
        flow.spooled_batches.append(SpooledBatch(entry, flow, journal))
        self._loaded += 1
        self._loaded_bytes += len(entry.data)

    def _arrived(self, spooled: SpooledBatch) -> None:
        spooled.flow.arrived(spooled)
        self.messages += spooled.entry.messages
        self._let_go(spooled)
        spooled.journal.note_done(spooled.entry.number)

    def _let_go(self, spooled: SpooledBatch) -> None:
        self._loaded -= 1
        self._loaded_bytes -= len(spooled.entry.data)
        if not spooled.flow.spooled_batches:
            del self._flows[spooled.flow.key]

    def _mend(self, flow: SubjectQueue, now_ns: int) -> None:
        """Decide about the first batch that is not stored, once every batch in flight is answered."""
        head = flow.spooled_batches[0]
        trouble = head.trouble
        flow.begin_again()
        if isinstance(trouble, Refused):
            flow.refused = trouble
            self._judge(flow, head, trouble, now_ns)

    def _judge(self, flow: SubjectQueue, head: SpooledBatch, refused: Refused, now_ns: int) -> None:
        journal, outcome = head.journal, outcome_of(refused.code)
        if outcome is SendOutcome.LATER:
            wait_ns = 0 if refused.code in ELSEWHERE else flow.backoff.next_ns(refused.retry_after_ms)
            flow.retry_ns = now_ns + wait_ns
        elif outcome is SendOutcome.TAKEN:
            self._begin_anew(journal, flow, head, refused, now_ns)
        elif is_clean(head, refused.code):
            self._restream(journal, flow, head)
        else:
            self._set_aside(journal, flow, head, refused, now_ns)

    def _restream(self, journal: Journal, flow: SubjectQueue, head: SpooledBatch) -> None:
        """Move the head and all later batches of its stream to a new stream. The journal records the stream first."""
        old_id, first = head.producer_id, head.first
        flow.is_held = True

        def noted(fault: StorageFault | None) -> None:
            flow.is_held = fault is not None
            for spooled in flow.spooled_batches:
                if spooled.producer_id == old_id:
                    spooled.is_doubtful = False
                spooled.restamp()
            self._on_change()

        journal.restream(old_id, first, self._rng.bits(64) or 1, noted)

    def _begin_anew(
        self, journal: Journal, flow: SubjectQueue, head: SpooledBatch, refused: Refused, now_ns: int
    ) -> None:
        """Move the head alone to a new stream.

        The journal appends the head again, as a new entry that replaces the old one. Later batches keep their numbers,
        because they may be stored under them.
        """
        log_taken(head, refused)
        entry = head.entry
        data = batch.reborn(head.data, producer_id=self._rng.bits(64) or 1, first_sequence=0)
        flow.is_held = True

        def noted(fault: StorageFault | None) -> None:
            flow.is_held = False
            if fault is None:
                flow.refused = None
                flow.spooled_batches.remove(head)
                self._let_go(head)
            else:
                flow.retry_ns = now_ns + AGAIN_MS * NS_PER_MS
            self._on_change()

        journal.put_back(Handed(entry.subject, entry.messages, False, data), entry.number, noted)

    def _set_aside(
        self, journal: Journal, flow: SubjectQueue, head: SpooledBatch, refused: Refused, now_ns: int
    ) -> None:
        is_unknown = head.is_doubtful
        reason = f"it may be stored, nobody can tell: {refused}" if is_unknown else str(refused)
        flow.is_held = True

        def kept(fault: StorageFault | None) -> None:
            flow.is_held = False
            if fault is None:
                self.asides += head.entry.messages
                flow.spooled_batches.remove(head)
                self._let_go(head)
            else:
                flow.retry_ns = now_ns + AGAIN_MS * NS_PER_MS
            self._on_change()

        journal.set_aside(head.entry, reason, head.producer_id, is_unknown, kept)


def log_taken(head: SpooledBatch, refused: Refused) -> None:
    """Warn people that another batch has the place of this one."""
    log.warning(
        "%d messages to %s go out under a new stream, because their place %016x+%d in the old one is taken (%s): was "
        "the spool, or a broker, restored from a backup?",
        head.entry.messages, head.entry.subject, head.producer_id, head.first, refused,
    )  # fmt: skip


def is_clean(head: SpooledBatch, code: Code) -> bool:
    """Whether the batch is certainly not stored under its number, and so may get another."""
    if code is Code.SEQUENCE_GAP:
        return not head.is_doubtful or head.producer_id not in head.journal.murky
    return code is Code.UNKNOWN_PRODUCER and not head.is_doubtful
