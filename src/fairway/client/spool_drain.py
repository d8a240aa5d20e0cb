"""What is in journals goes to the broker: each subject's batches in order, byte for byte, until every one is stored.

A batch has its number (stream and first sequence) from the moment it was written down, so however often it is sent, by
whichever process, the broker stores it once and answers with the first receipt. What becomes of a batch:

    stored, or stored before           done
    the connection was lost            again, when there is one; from here on it is doubtful: it may be stored
    BUSY, READ_ONLY and the like       again after a while, longer each time
    a gap behind another that          again, after that one
    came to grief
    a gap before the first one         it is certainly not stored (but see below). It and all that follows go out under
                                       a new stream, which is written down first
    UNKNOWN_PRODUCER                   the same if it was never sent before. If it was, nobody can tell any more
                                       whether it is stored: set aside, as unknown
    SEQUENCE_CONFLICT                  done, if the broker names exactly this batch
    the same with something else, or   it goes out alone under a new stream, which is written down first, with the ids
    with nothing that anybody knows;   that it has: another life of its sender, which a backup has undone, took the
    FOREIGN_STREAM                     place, or a stranger did. What follows it is asked about by itself
    TOO_LARGE, BAD_NAME, ...           set aside, with the reason

If one of unknown fate was set aside, and a late request of an earlier connection may still store it, then what came
right behind it may be stored so too: a doubtful one that finds a gap there is of unknown fate, too.

A batch is *doubtful* if it was sent before, in whichever life, and the answer is not known.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable
from typing import Final

from fairway import batch, limits
from fairway.batch.layout import is_delayed
from fairway.client.spool_journal import Journal
from fairway.client.spool_record import SpoolEntry
from fairway.errors import Code, Refused, StorageFault
from fairway.protocol.backoff import NS_PER_MS, RetryDelays
from fairway.protocol.conflict import TAKEN, is_receipt
from fairway.protocol.diversion import Handed
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.session import Answer, Ask, ConnectionLost, RequestOutcome
from fairway.world.rng import Rng

log = logging.getLogger("fairway.spool")

WINDOW: Final = 16  # batches of one subject in flight
LOADED_MAX: Final = 64  # batches in memory, of all subjects: one that is refused for now lets so many others pass
LOADED_BYTES_MAX: Final = 16 * limits.MIB
_FIRST_MS, _MOST_MS = 20, 5_000  # between attempts
AGAIN_MS = 2_000  # when the disk has no room for what is to be set aside

LATER: Final = frozenset(
    {Code.BUSY, Code.READ_ONLY, Code.NOT_MASTER, Code.EXPIRED, Code.DRAINING, Code.TOO_MANY_CONNECTIONS}
)
ELSEWHERE: Final = frozenset({Code.DRAINING, Code.NOT_MASTER})  # the line looks for another, and waits for that


class SpooledBatch:
    """One batch on its way."""

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
        """See which number it goes out under now, and with which secret."""
        self.stamp()
        self.secret = self.journal.secret(self.producer_id)

    def stamp(self) -> None:
        """The number that it goes out under."""
        header = batch.peek(self.entry.data)
        self.producer_id, self.first = self.journal.identity(header.producer_id, header.first_sequence)
        is_as_written = (self.producer_id, self.first) == (header.producer_id, header.first_sequence)
        # In journals of older versions messages had other ids then, and some of them may be under way so.
        anew = batch.reborn if self.journal.is_keyed else batch.restamp
        self.data = (
            self.entry.data
            if is_as_written
            else anew(self.entry.data, producer_id=self.producer_id, first_sequence=self.first)
        )


class SubjectQueue:
    """One subject's batches, in order."""

    __slots__ = (
        "_next", "backoff", "in_flight", "is_broken", "is_held", "key", "parcels", "refused", "retry_ns",
    )  # fmt: skip

    def __init__(self, key: tuple[str, bool], rng: Rng) -> None:
        self.key = key  # the subject, and whether they are due later
        self.parcels: deque[SpooledBatch] = deque()
        self.in_flight = 0
        self.retry_ns = 0
        self.is_broken = False
        self.is_held = False  # the journal is about to note something
        self.refused: Refused | None = None
        self.backoff = RetryDelays(rng, first_ms=_FIRST_MS, most_ms=_MOST_MS)
        self._next = 0  # in `parcels`: the first that is not in flight

    def take(self, now_ns: int) -> SpooledBatch | None:
        """The next one to send; None: not now. Those of a new stream wait for those of the one before."""
        if self.is_broken or self.is_held or now_ns < self.retry_ns or self.in_flight >= WINDOW:
            return None
        self.retry_ns = 0
        if self._next >= len(self.parcels):
            return None
        parcel = self.parcels[self._next]
        if self._next and parcel.producer_id != self.parcels[0].producer_id:
            return None
        self._next += 1
        self.in_flight += 1
        return parcel

    def ask(self, parcel: SpooledBatch) -> Ask:
        """The request that carries it."""
        return Ask(Produce(self.key[0], parcel.is_doubtful, parcel.secret), (parcel.data,), parcel)

    def arrived(self, parcel: SpooledBatch) -> None:
        self.in_flight -= 1
        self._next -= 1
        self.parcels.remove(parcel)
        if not self.is_broken:
            self.refused = None
            self.backoff.reset()

    def came_to_grief(self, parcel: SpooledBatch, trouble: Refused | ConnectionLost) -> None:
        self.in_flight -= 1
        parcel.trouble = trouble
        self.is_broken = True
        if isinstance(trouble, ConnectionLost):
            parcel.is_doubtful = True

    def remove(self, parcels: Iterable[SpooledBatch]) -> None:
        """They go another way, while nothing is under way."""
        gone = frozenset(parcels)
        self.parcels = deque(parcel for parcel in self.parcels if parcel not in gone)

    def begin_again(self) -> None:
        """All answers are there: from the first that is not stored."""
        self.is_broken = False
        self._next = 0
        for parcel in self.parcels:
            parcel.trouble = None


class SpoolDrain:
    """The session on the line. One journal after the other: when one is empty, the first that is not."""

    def __init__(self, rng: Rng, *, on_change: Callable[[], None], on_success: Callable[[], None]) -> None:
        """`on_change`: something is loaded or noted, `asks` would have more to say."""
        self.messages = 0  # delivered
        self.duplicates = 0  # of them, stored before
        self.asides = 0  # messages
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
        """One more to drain, behind the others."""
        self._journals.append(journal)

    def remove(self, journal: Journal) -> None:
        """It is empty, and not needed any more."""
        self._journals.remove(journal)

    @property
    def trouble(self) -> Refused | None:
        """Why a subject waits."""
        return next((flow.refused for flow in self._flows.values() if flow.refused is not None), None)

    @property
    def is_nearly_done(self) -> bool:
        """Whether all that is left is on its way."""
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
            while len(asks) < room and (parcel := flow.take(now_ns)) is not None:
                asks.append(flow.ask(parcel))
        return asks

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        parcel: SpooledBatch = token  # type: ignore[assignment]
        flow = parcel.flow
        if isinstance(outcome, Answer):
            receipt: Produced = outcome.message  # type: ignore[assignment]  # PRODUCE has no other answer
            self.duplicates += parcel.entry.messages if receipt.is_duplicate else 0
            self._arrived(parcel)
            self._on_success()
        elif isinstance(outcome, Refused) and is_receipt(outcome, parcel.data):
            self.duplicates += parcel.entry.messages
            self._arrived(parcel)
        else:
            flow.came_to_grief(parcel, outcome)
        if flow.is_broken and not flow.in_flight:
            self._mend(flow, now_ns)

    def next_deadline(self) -> int | None:
        return min((flow.retry_ns for flow in self._flows.values() if flow.parcels and flow.retry_ns), default=None)

    # --- within ------------------------------------------------------------------------------------------------------

    def _load(self) -> None:
        """Keep some in memory, of one journal."""
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
        flow.parcels.append(SpooledBatch(entry, flow, journal))
        self._loaded += 1
        self._loaded_bytes += len(entry.data)

    def _arrived(self, parcel: SpooledBatch) -> None:
        parcel.flow.arrived(parcel)
        self.messages += parcel.entry.messages
        self._let_go(parcel)
        parcel.journal.note_done(parcel.entry.number)

    def _let_go(self, parcel: SpooledBatch) -> None:
        self._loaded -= 1
        self._loaded_bytes -= len(parcel.entry.data)
        if not parcel.flow.parcels:
            del self._flows[parcel.flow.key]

    def _mend(self, flow: SubjectQueue, now_ns: int) -> None:
        """Everything that was under way has come back: what to do about the first that is not stored."""
        head = flow.parcels[0]
        trouble = head.trouble
        flow.begin_again()
        if isinstance(trouble, Refused):
            flow.refused = trouble
            self._judge(flow, head, trouble, now_ns)

    def _judge(self, flow: SubjectQueue, head: SpooledBatch, refused: Refused, now_ns: int) -> None:
        journal, code = head.journal, refused.code
        if code in LATER:
            wait_ns = 0 if code in ELSEWHERE else flow.backoff.next_ns(refused.retry_after_ms)
            flow.retry_ns = now_ns + wait_ns
        elif code in TAKEN:
            self._begin_anew(journal, flow, head, refused, now_ns)
        elif is_clean(head, code):
            self._restream(journal, flow, head)
        else:
            self._set_aside(journal, flow, head, refused, now_ns)

    def _restream(self, journal: Journal, flow: SubjectQueue, head: SpooledBatch) -> None:
        """The head and all behind it in its stream go on as another stream: written down, then sent."""
        old_id, first = head.producer_id, head.first
        flow.is_held = True

        def noted(fault: StorageFault | None) -> None:
            flow.is_held = fault is not None
            for parcel in flow.parcels:
                if parcel.producer_id == old_id:
                    parcel.is_doubtful = False
                parcel.restamp()
            self._on_change()

        journal.restream(old_id, first, self._rng.bits(64) or 1, noted)

    def _begin_anew(
        self, journal: Journal, flow: SubjectQueue, head: SpooledBatch, refused: Refused, now_ns: int
    ) -> None:
        """The head alone goes on as another stream. It is written down behind what is in the journal, in place of
        itself; what follows it keeps its number, under which it may be stored."""
        log_taken(head, refused)
        entry = head.entry
        data = batch.reborn(head.data, producer_id=self._rng.bits(64) or 1, first_sequence=0)
        flow.is_held = True

        def noted(fault: StorageFault | None) -> None:
            flow.is_held = False
            if fault is None:
                flow.refused = None
                flow.parcels.remove(head)
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
                flow.parcels.remove(head)
                self._let_go(head)
            else:
                flow.retry_ns = now_ns + AGAIN_MS * NS_PER_MS
            self._on_change()

        journal.set_aside(head.entry, reason, head.producer_id, is_unknown, kept)


def log_taken(head: SpooledBatch, refused: Refused) -> None:
    """Tell people that a place was not free that should have been."""
    log.warning(
        "%d messages to %s go out under a new stream, because their place %016x+%d in the old one is taken (%s): was "
        "the spool, or a broker, restored from a backup?",
        head.entry.messages, head.entry.subject, head.producer_id, head.first, refused,
    )  # fmt: skip


def is_clean(head: SpooledBatch, code: Code) -> bool:
    """Whether it is certainly not stored under its number, and may have another one."""
    if code is Code.SEQUENCE_GAP:
        return not head.is_doubtful or head.producer_id not in head.journal.murky
    return code is Code.UNKNOWN_PRODUCER and not head.is_doubtful
