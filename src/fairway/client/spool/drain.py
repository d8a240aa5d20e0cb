"""Sends the batches of journals to one broker: each subject's batches in order, until the broker has stored them all.

A batch has its number (stream and first sequence) from the moment the journal writes it. However often and from
whichever process the batch is sent, the broker stores it once and answers with the first receipt. A batch is *doubtful*
if this process or an earlier one has sent it, and the answer is not known. A subject's batches are a `BacklogWindow`.

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
from collections.abc import Callable, Iterable
from typing import Final

from fairway import batch, limits
from fairway.batch.layout import is_delayed
from fairway.client.spool.journal import Journal
from fairway.client.spool.journal_files import SpoolEntry
from fairway.errors import Code, Refused, StorageFault
from fairway.protocol.line import ELSEWHERE, NS_PER_MS, Answer, Ask, ConnectionLost, RequestOutcome, RetryDelays
from fairway.protocol.messages import Produce
from fairway.protocol.resend import BacklogBatch, BacklogWindow, SendOutcome, is_repeat, outcome_of
from fairway.protocol.spool_port import Handed
from fairway.runtime.disk import Completion
from fairway.runtime.rng import Rng

log = logging.getLogger("fairway.spool")

WINDOW: Final = 16  # batches of one subject in flight
LOADED_MAX: Final = 64  # batches in memory, of all subjects: so many may pass a batch that is refused for now
LOADED_BYTES_MAX: Final = 16 * limits.MIB
_FIRST_MS, _MOST_MS = 20, 5_000  # between attempts
AGAIN_MS = 2_000  # until the next attempt when the disk is full and the journal cannot record a decision


class SpooledBatch(BacklogBatch):
    """One batch on its way from a journal to a broker."""

    __slots__ = ("entry", "first", "flow", "is_doubtful", "journal", "producer_id", "secret")

    def __init__(self, entry: SpoolEntry, flow: SubjectQueue, journal: Journal) -> None:
        super().__init__(b"")
        self.entry = entry
        self.flow = flow
        self.journal = journal
        self.is_doubtful = entry.was_sent or entry.number < journal.sent_before
        self.producer_id = self.first = 0
        self.restamp()

    def restamp(self) -> None:
        """Choose the number, the bytes and the stream's secret again."""
        journal, data, header = self.journal, self.entry.data, batch.peek(self.entry.data)
        self.producer_id, self.first = self.identity(header.producer_id, header.first_sequence)
        if (self.producer_id, self.first) != (header.producer_id, header.first_sequence):
            # In journals of a client with one broker and without a key, a new number gave the messages new ids, and
            # some may be in flight that way.
            anew = batch.reborn if journal.is_keyed or journal.is_cluster else batch.restamp
            data = anew(data, producer_id=self.producer_id, first_sequence=self.first)
        self.data = data
        self.secret = journal.secret(self.producer_id)

    def identity(self, producer_id: int, first: int) -> tuple[int, int]:
        """The number to send a batch under that was written under this one."""
        return self.journal.identity(producer_id, first)

    def is_clean(self, code: Code) -> bool:
        """Whether the batch is certainly not stored under its number, and so may get another."""
        if code is Code.SEQUENCE_GAP:
            return not self.is_doubtful or self.producer_id not in self.journal.murky
        return code is Code.UNKNOWN_PRODUCER and not self.is_doubtful

    def set_aside(self, refused: Refused, done: Completion) -> None:
        """Move the batch to a file of its own, with the reason."""
        reason = f"it may be stored, nobody can tell: {refused}" if self.is_doubtful else str(refused)
        self.journal.set_aside(self.entry, reason, self.producer_id, self.is_doubtful, done)

    def warn_taken(self, refused: Refused) -> None:
        """Warn people that another batch has the place of this one."""
        log.warning(
            "%d messages to %s go out under a new stream, because their place %016x+%d in the old one is taken (%s): "
            "was the spool, or a broker, restored from a backup?",
            self.entry.messages, self.entry.subject, self.producer_id, self.first, refused,
        )  # fmt: skip


class SubjectQueue(BacklogWindow[SpooledBatch]):
    """The batches of one subject, in order."""

    def __init__(self, key: tuple[str, bool], rng: Rng) -> None:
        super().__init__(RetryDelays(rng, first_ms=_FIRST_MS, most_ms=_MOST_MS), WINDOW)
        self.key = key  # the subject, and whether the messages are due later
        self.is_held = False  # waits for a journal write

    def asks(self, room: int, now_ns: int) -> list[Ask]:
        """The requests that carry the next batches."""
        if self.is_held or not room:
            return []
        return [
            Ask(Produce(self.key[0], spooled.is_doubtful, spooled.secret), (spooled.data,), spooled)
            for spooled in self.take(room, now_ns)
        ]

    def may_leave(self, spooled: SpooledBatch, /) -> bool:
        """Whether the batch is of the stream in flight: batches of a new stream wait for those of the stream before."""
        return not self.sent or next(iter(self.sent)).producer_id == spooled.producer_id

    def answered(self, spooled: SpooledBatch, outcome: RequestOutcome) -> bool:
        if isinstance(outcome, ConnectionLost):
            spooled.is_doubtful = True
        return super().answered(spooled, outcome)

    def set_retry(self, refused: Refused, now_ns: int) -> None:
        """Wait after a refusal that passes."""
        wait_ns = 0 if refused.code in ELSEWHERE else self.backoff.next_ns(refused.retry_after_ms)
        self.retry_ns = now_ns + wait_ns


class JournalDrain:
    """What all drains share: the journals, and the counts."""

    def __init__(self) -> None:
        self.messages = 0  # delivered
        self.duplicates = 0  # of the delivered: stored before
        self.asides = 0  # messages set aside
        self._journals: list[Journal] = []

    def add(self, journal: Journal) -> None:
        """Drain one more journal, after the others."""
        self._journals.append(journal)

    def remove(self, journal: Journal) -> None:
        """Forget an empty journal."""
        self._journals.remove(journal)

    @property
    def trouble(self) -> str:
        """Why batches wait, for people; empty if nothing is known to be wrong."""
        raise NotImplementedError

    def note_stored(self, spooled: SpooledBatch, *, is_duplicate: bool) -> None:
        """Count a batch that the broker has, and note its end in the journal."""
        self.messages += spooled.entry.messages
        self.duplicates += spooled.entry.messages if is_duplicate else 0
        spooled.journal.note_done(spooled.entry.number)


class SpoolDrain(JournalDrain):
    """The session on the line that drains the journals one after the other."""

    def __init__(self, rng: Rng, *, on_change: Callable[[], None], on_success: Callable[[], None]) -> None:
        """`on_change` is called after a read or a journal write: `asks` may have more requests."""
        super().__init__()
        self._rng = rng
        self._on_change = on_change
        self._on_success = on_success
        self._current: Journal | None = None
        self._flows: dict[tuple[str, bool], SubjectQueue] = {}
        self._loaded = 0
        self._loaded_bytes = 0
        self._is_loading = False
        self._is_open = False

    # --- for the spool -----------------------------------------------------------------------------------------------

    @property
    def trouble(self) -> str:
        return next((str(flow.refused) for flow in self._flows.values() if flow.refused is not None), "")

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
            asks += flow.asks(room - len(asks), now_ns)
        return asks

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        spooled: SpooledBatch = token  # type: ignore[assignment]
        flow = spooled.flow
        if flow.answered(spooled, outcome):
            self._let_go(spooled)
            self.note_stored(spooled, is_duplicate=is_repeat(outcome))
            if isinstance(outcome, Answer):
                self._on_success()
        if flow.must_decide:
            self._mend(flow, now_ns)

    def next_deadline(self) -> int | None:
        return min((flow.retry_ns for flow in self._flows.values() if flow.waiting and flow.retry_ns), default=None)

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
        flow.waiting.append(SpooledBatch(entry, flow, journal))
        self._loaded += 1
        self._loaded_bytes += len(entry.data)

    def _let_go(self, spooled: SpooledBatch) -> None:
        self._loaded -= 1
        self._loaded_bytes -= len(spooled.entry.data)
        if spooled.flow.is_empty:
            del self._flows[spooled.flow.key]

    def _mend(self, flow: SubjectQueue, now_ns: int) -> None:
        """Decide about the first batch that is not stored, once every batch in flight is answered."""
        head, trouble = flow.begin_again()
        if isinstance(trouble, Refused):
            flow.refused = trouble
            self._judge(flow, head, trouble, now_ns)

    def _judge(self, flow: SubjectQueue, head: SpooledBatch, refused: Refused, now_ns: int) -> None:
        outcome = outcome_of(refused.code)
        if outcome is SendOutcome.LATER:
            flow.set_retry(refused, now_ns)
        elif outcome is SendOutcome.TAKEN:
            self._begin_anew(flow, head, refused, now_ns)
        elif head.is_clean(refused.code):
            self._restream(flow, head)
        else:
            self._set_aside(flow, head, refused, now_ns)

    def _restream(self, flow: SubjectQueue, head: SpooledBatch) -> None:
        """Move the head and all later batches of its stream to a new stream. The journal records the stream first."""
        old_id, first = head.producer_id, head.first
        flow.is_held = True

        def noted(fault: StorageFault | None) -> None:
            flow.is_held = fault is not None
            for spooled in flow.waiting:
                if spooled.producer_id == old_id:
                    spooled.is_doubtful = False
                spooled.restamp()
            self._on_change()

        head.journal.restream(old_id, first, self._rng.bits(64) or 1, noted)

    def _begin_anew(self, flow: SubjectQueue, head: SpooledBatch, refused: Refused, now_ns: int) -> None:
        """Move the head alone to a new stream.

        The journal appends the head again, as a new entry that replaces the old one. Later batches keep their numbers,
        because they may be stored under them.
        """
        head.warn_taken(refused)
        entry = head.entry
        data = batch.reborn(head.data, producer_id=self._rng.bits(64) or 1, first_sequence=0)

        def replaced() -> None:
            flow.refused = None

        done = self._when_gone(flow, head, now_ns, replaced)
        head.journal.put_back(Handed(entry.subject, entry.messages, False, data), entry.number, done)

    def _set_aside(self, flow: SubjectQueue, head: SpooledBatch, refused: Refused, now_ns: int) -> None:
        def kept() -> None:
            self.asides += head.entry.messages

        head.set_aside(refused, self._when_gone(flow, head, now_ns, kept))

    def _when_gone(self, flow: SubjectQueue, head: SpooledBatch, now_ns: int, then: Callable[[], None]) -> Completion:
        """Hold the queue until the journal has taken its head away. A full disk: try again later."""
        flow.is_held = True

        def done(fault: StorageFault | None) -> None:
            flow.is_held = False
            if fault is None:
                then()
                flow.remove(head)
                self._let_go(head)
            else:
                flow.retry_ns = now_ns + AGAIN_MS * NS_PER_MS
            self._on_change()

        return done
