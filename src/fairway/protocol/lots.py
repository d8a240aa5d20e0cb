"""The lots that a consumer holds, each with one byte of state per message.

    WAITING ──► OPEN ──► ACK, RETRY, REJECT, RELEASE ──► SENT ──► DONE
    buffered    with the user     settled, not yet sent   in a request    confirmed by the broker

The user's thread sets a byte and, if the lot was clean, marks the lot dirty and puts it into the `dirty` queue of the
`SettlementQueue`. The line's thread clears the mark *before* it reads the bytes. So this look or the next sees every
outcome, and no thread needs a lock.

A message can arrive a second time while the user still holds the first copy. Either the broker lost its memory of a
handout in a crash, or the lease ended and no other consumer took the message. The user must not get the message twice.
The outcome must carry the name of the later lot, because the broker knows only that name. So the earlier lot gets an
*heir* for such messages: the later lot.

A message also arrives again rightly before the broker has confirmed its outcome: the user released or retried it, or an
operator moved the cursor back over an ack. If a crash then destroys both the outcome and the second handout, the broker
knows the message only by its earlier name. So after such a loss the outcome goes out under both names. The second
report is an *echo*: one name is right, and the other does no harm.
"""

from __future__ import annotations

import re
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from fairway import limits
from fairway.batch import MessageId
from fairway.errors import FairwayError, Misuse, RemoteProtocolError
from fairway.protocol.consumer_lease import Lease
from fairway.protocol.messages import SequenceRange, Settle, Settlement
from fairway.protocol.messages import WireLot as LotMessage
from fairway.runtime.clock import Clock

ABSENT: Final = 0  # not in the lot: another message of the same batch
WAITING: Final = 1
OPEN: Final = 2
ACK: Final = 3
RETRY: Final = 4
REJECT: Final = 5
RELEASE: Final = 6
SENT_ACK: Final = 7
SENT: Final = 8  # another outcome than ACK
DONE: Final = 9
LINKED: Final = 10  # an earlier lot holds the message, and this lot is its heir
GONE: Final = 11  # the consumer ended before the message had an outcome

_KINDS: Final = {
    ACK: Settlement.ACK,
    RETRY: Settlement.RETRY,
    REJECT: Settlement.REJECT,
    RELEASE: Settlement.RELEASE,
}
_WORDS: Final = {ACK: "acked", SENT_ACK: "acked", RETRY: "retried", REJECT: "rejected", RELEASE: "released"}
_FILL: Final = [bytes([code]) * limits.LOT_MESSAGES_MAX for code in range(GONE + 1)]
_RUNS: Final = [re.compile(re.escape(bytes([code])) + b"+") for code in range(GONE + 1)]
_IS_HERE: Final = bytes(int(code != ABSENT) for code in range(256))
_IS_OWED: Final = bytes(int(code not in (ABSENT, DONE, GONE)) for code in range(256))
_SAID: Final = re.compile(b"[\x04\x05\x06]")


class StaleSettlement(FairwayError):
    """The consumer no longer held the message when its outcome reached the broker, so the outcome did not count."""


class SettlementNote(NamedTuple):
    """The delay and reason of a RETRY or a REJECT."""

    after_ms: int | None
    reason: str


Hook = Callable[[FairwayError | None], None]


class SettlementQueue:
    """State that all lots of a consumer share: its subject, group and lease, and the lots with outcomes to send."""

    __slots__ = (
        "attempts_max",
        "broker_group",
        "clock",
        "dirty",
        "ended",
        "group",
        "is_called",
        "is_strict",
        "is_watched",
        "lease",
        "on_change",
        "stumbles",
        "subject",
        "unacked",
    )  # fmt: skip

    def __init__(
        self, subject: str, group: str, clock: Clock, on_change: Callable[[], None] | None, broker_group: str = ""
    ) -> None:
        self.subject = subject
        self.clock = clock
        self.lease = Lease()
        self.broker_group = broker_group  # that stores the lots; empty outside a cluster
        self.group = group
        self.on_change = on_change
        self.dirty: deque[ConsumerLot] = deque()
        self.is_called = False  # `on_change` was called, and `asks` was not called since
        self.ended: str = ""  # why no message can be settled any more
        self.unacked = UnackedLots()
        self.is_strict = False  # strict order: messages behind a failed one must not begin
        self.stumbles = 0  # how often a message failed in strict order
        self.attempts_max = 0  # of the group's configuration; 0: not known yet
        self.is_watched = False  # the consumer reports dead letters to a callback

    def stumble(self) -> None:
        """A message failed in a group of strict order: lapse every lot here, so that none of its messages begins before
        the failed one. For any thread."""
        self.stumbles += 1
        for lot in list(self.unacked):
            lot.is_lapsed = not lot.is_final

    def call(self) -> None:
        """Ask for a call of `asks` soon. For any thread."""
        if not self.is_called:
            self.is_called = True
            if self.on_change is not None:
                self.on_change()


class Heir(NamedTuple):
    """The outcome of this message goes out under the name of `lot`, instead (`heirs`) or as well (`echoes`)."""

    sequence: int
    lot: ConsumerLot


class ConsumerLot:
    """Messages that were handed out under one name. Index i of the state belongs to the message at `first + i`."""

    __slots__ = (
        "attempt",
        "bytes_each",
        "echoes",
        "failed",
        "fence",
        "first",
        "heirs",
        "hooks",
        "is_dirty",
        "is_final",
        "is_inbox",
        "is_lapsed",
        "is_unsure",
        "last_ids",
        "left",
        "notes",
        "number",
        "serial",
        "settlements",
        "state",
    )

    def __init__(
        self,
        settlements: SettlementQueue,
        told: LotMessage,
        *,
        is_inbox: bool,
        is_final: bool,
        serial: int = 0,
        number: int = 0,
    ) -> None:
        self.settlements = settlements
        self.first = told.first
        self.attempt = told.attempt
        self.fence = told.fence
        self.is_inbox = is_inbox
        self.is_final = is_final  # delivery settles the messages: nothing is sent
        self.is_lapsed = False
        self.is_unsure = False  # the broker may have forgotten the handout
        self.is_dirty = False
        self.serial = serial
        self.number = number  # of the response that brought the lot
        self.bytes_each = 0
        self.state = _state_of(told)
        self.left = len(self.state) - self.state.count(ABSENT)  # not DONE; only the line's thread counts
        self.notes: dict[int, SettlementNote] = {}
        self.last_ids: dict[int, MessageId] = {}  # by index: ids of future dead letters, if the consumer reports them
        self.failed: set[int] = set()  # indices of messages settled otherwise than by ACK
        self.heirs: list[Heir] = []
        self.echoes: list[Heir] = []
        self.hooks: dict[int, list[Hook]] = {}

    @property
    def end(self) -> int:
        return self.first + len(self.state)

    # --- any thread

    def touch(self) -> None:
        """Queue the lot: an outcome is waiting to be sent."""
        self.is_dirty = True
        self.settlements.dirty.append(self)
        if not self.settlements.is_called:
            self.settlements.call()

    def settle(self, sequence: int, code: int, note: SettlementNote | None) -> None:
        index = sequence - self.first
        if self.state[index] != OPEN:
            raise self.complaint(sequence)
        if self.is_final and code in (RETRY, REJECT):
            raise Misuse(
                f"group {self.settlements.group} is at most once: message {sequence} was settled by being handed out"
            )
        if note is not None:
            self.notes[index] = note
        if code != ACK:
            self.failed.add(index)  # before the byte: whoever sees the outcome also sees the failure
        self.state[index] = code
        if self.settlements.is_strict and code != ACK and not self.is_lapsed:
            self.settlements.stumble()
        if not self.is_dirty:
            self.touch()

    def is_last(self, code: int) -> bool:
        """Whether this outcome makes a dead letter, by the configuration that the consumer knows."""
        return code == REJECT or (code == RETRY and 0 < self.settlements.attempts_max <= self.attempt)

    def complaint(self, sequence: int) -> Misuse:
        """The error that says why this message cannot be settled now."""
        code = self.state[sequence - self.first]
        name = f"message {sequence} of {self.settlements.subject}"
        if code == GONE:
            return Misuse(f"{name} cannot be settled any more: {self.settlements.ended}")
        return Misuse(f"{name} was {_WORDS.get(code, 'settled')} before: settle each message once")

    def has_lapsed(self, sequence: int) -> bool:
        """Whether other consumers may have the message by now."""
        if self.heirs and (heir := self._heir_of(sequence)) is not None:
            return heir.has_lapsed(sequence)
        return self.is_lapsed or self.is_over(self.settlements.clock.monotonic_ns())

    def may_begin(self, sequence: int) -> bool:
        """Whether certainly no other consumer has the message, even if another copy of the broker leads by now."""
        if self.heirs:
            return not (self.has_lapsed(sequence) or self.is_detached)
        return self.may_all_begin()

    def may_all_begin(self) -> bool:
        """Whether that is so for every message of the lot. False also if the messages must be looked at one by one."""
        if self.heirs or self.is_lapsed:
            return False
        if self.is_final:
            return True
        lease, now_ns = self.settlements.lease, self.settlements.clock.monotonic_ns()
        return now_ns < lease.end_ns if self.fence else lease.is_attached and now_ns < lease.sure_ns

    @property
    def is_durable(self) -> bool:
        """Whether the handout survives every crash and every change of masters."""
        return self.is_final or self.fence > 0

    @property
    def is_detached(self) -> bool:
        """Whether the broker may have forgotten the handout while there is no connection to ask."""
        return not (self.settlements.lease.is_attached or self.is_durable)

    def is_over(self, now_ns: int) -> bool:
        """Whether the lease may have run out, or another copy of the broker may lead that does not know of the
        handout."""
        if self.is_final:
            return False
        lease = self.settlements.lease
        return now_ns >= (lease.end_ns if self.fence else lease.sure_ns)

    # --- the line's thread

    def runs(self, code: int, first: int = 0, end: int = limits.LOT_MESSAGES_MAX) -> Iterator[tuple[int, int]]:
        """The runs of messages in state `code`, as (start, end) of indices."""
        return (found.span() for found in _RUNS[code].finditer(bytes(self.state), first, end))

    def held_count(self) -> int:
        """Messages whose outcome has not been sent. A LINKED message counts in the lot that holds it."""
        count = self.state.count
        return sum(count(code) for code in range(WAITING, RELEASE + 1))

    def fill(self, start: int, end: int, code: int) -> None:
        self.state[start:end] = _FILL[code][: end - start]

    def say(self, first: int, end: int, code: int) -> None:
        """Settle messages for the consumer itself, by sequence."""
        if code != ACK:
            self.failed.update(range(first - self.first, end - self.first))
        self.fill(first - self.first, end - self.first, code)
        if not self.is_dirty:
            self.touch()

    def gather(self) -> list[PendingSettlement]:
        """Take all outcomes that were not sent, and mark them SENT. Outcomes with an heir move to the heir."""
        self.is_dirty = False
        if self.echoes:
            self._echo()
        if self.heirs:
            self._pass_on()
        pieces = []
        if spans := list(self.runs(ACK)):
            for start, end in spans:
                self.fill(start, end, SENT_ACK)
            pieces.append(PendingSettlement(self, ACK, None, spans))
        if _SAID.search(self.state) is not None:
            pieces += self._gather_others()
        return pieces

    def _gather_others(self) -> list[PendingSettlement]:
        by_note: dict[tuple[int, SettlementNote | None], list[tuple[int, int]]] = {}
        for code in (RETRY, REJECT, RELEASE):
            for start, end in self.runs(code):
                for index in range(start, end):
                    spans = by_note.setdefault((code, self.notes.pop(index, None)), [])
                    if spans and spans[-1][1] == index:
                        spans[-1] = (spans[-1][0], index + 1)
                    else:
                        spans.append((index, index + 1))
                self.fill(start, end, SENT)
        return [PendingSettlement(self, code, note, spans) for (code, note), spans in by_note.items()]

    def finish(self, start: int, end: int) -> int:
        """Mark the SENT messages in a range DONE, and count them. The caller runs their hooks."""
        if end - start == 1:
            count = int(self.state[start] in (SENT_ACK, SENT))
        else:
            count = self.state.count(SENT_ACK, start, end) + self.state.count(SENT, start, end)
        if count == end - start:
            self.fill(start, end, DONE)
        else:
            for index in range(start, end):
                if self.state[index] in (SENT_ACK, SENT):
                    self.state[index] = DONE
        self.left -= count
        return count

    def end_all(self) -> None:
        """Nobody can settle messages here any more: WAITING and OPEN become GONE."""
        for code in (WAITING, OPEN):
            for start, end in self.runs(code):
                self.fill(start, end, GONE)

    def hooks_of(self, start: int, end: int) -> list[Hook]:
        """Take out the hooks that wait for these messages."""
        if not self.hooks:
            return []
        return [hook for index in range(start, end) for hook in self.hooks.pop(index, ())]

    # --- heirs

    def inherit(self, older: ConsumerLot) -> None:
        """Take over unfinished messages of an older lot that are also here; they are not delivered from this lot."""
        first, end = max(self.first, older.first), min(self.end, older.end)
        ours = self.state[first - self.first : end - self.first].translate(_IS_HERE)
        theirs = older.state[first - older.first : end - older.first].translate(_IS_OWED)
        shared = int.from_bytes(ours, "little") & int.from_bytes(theirs, "little")
        for sequence in range(first, end) if shared else ():
            here, there = sequence - self.first, sequence - older.first
            code = older.state[there]
            if self.state[here] == ABSENT or code in (ABSENT, DONE, GONE):
                continue
            if code in (WAITING, OPEN):
                self.state[here] = LINKED
                older.heirs.append(Heir(sequence, self))
            elif code == SENT_ACK and (older.is_unsure or self.attempt > older.attempt):
                self.state[here] = ACK  # the broker may not know the older name
            elif code == SENT_ACK or (code == SENT and (self.first, self.attempt) != (older.first, older.attempt)):
                older.heirs.append(Heir(sequence, self))  # as far as we know, the broker handed the message out anew
            else:
                if code not in (LINKED, SENT):
                    self._take_over(older, sequence, code)
                older.forget(there)

    def lose(self, index: int) -> None:
        """The connection was lost before the outcome was confirmed. If the message has come again, do not send it
        again."""
        heir = self._heir_of(self.first + index)
        if heir is None:
            return
        code = heir.state[self.first + index - heir.first]
        if code == DONE:  # the heir's outcome was written after this one, and is durable
            self.forget(index)
            for hook in self.hooks_of(index, index + 1):
                hook(None)
        elif code in (SENT_ACK, SENT):
            self.say(self.first + index, self.first + index + 1, ACK if code == SENT_ACK else RELEASE)
        else:
            self.state[index] = LINKED
            heir.echoes.append(Heir(self.first + index, self))

    def _echo(self) -> None:
        echoes, self.echoes = self.echoes, []
        for echo in echoes:
            sequence, older = echo
            code = self.state[sequence - self.first]
            if older.state[sequence - older.first] != LINKED:
                continue
            if ACK <= code <= RELEASE:
                older.repeat(sequence, code, self.notes.get(sequence - self.first))
            else:
                self.echoes.append(echo)

    def repeat(self, sequence: int, code: int, note: SettlementNote | None) -> None:
        """Send the heir's outcome under this lot's name too."""
        if note is not None:
            self.notes[sequence - self.first] = note
        self.say(sequence, sequence + 1, code)

    def forget(self, index: int) -> None:
        """Count the message as finished here: another lot, or none, reports its outcome."""
        self.state[index] = DONE
        self.left -= 1

    def _heir_of(self, sequence: int) -> ConsumerLot | None:
        return next((heir.lot for heir in reversed(self.heirs) if heir.sequence == sequence), None)

    def _pass_on(self) -> None:
        for index, code in enumerate(self.state):
            if not ACK <= code <= RELEASE:
                continue
            heir = self._heir_of(self.first + index)
            if heir is not None and heir.state[self.first + index - heir.first] == LINKED:
                heir._take_over(self, self.first + index, code)
                self.forget(index)

    def _take_over(self, older: ConsumerLot, sequence: int, code: int) -> None:
        here, there = sequence - self.first, sequence - older.first
        if there in older.notes:
            self.notes[here] = older.notes.pop(there)
        if there in older.last_ids:
            self.last_ids[here] = older.last_ids.pop(there)
        if there in older.hooks:
            self.hooks.setdefault(here, []).extend(older.hooks.pop(there))
        if code != ACK:
            self.failed.add(here)
        self.state[here] = code
        if not self.is_dirty:
            self.is_dirty = True
            self.settlements.dirty.append(self)


class PendingSettlement(NamedTuple):
    """Messages of one lot with the same outcome, on the way to the broker."""

    lot: ConsumerLot
    code: int
    note: SettlementNote | None
    runs: list[tuple[int, int]]  # (start, end) of indices

    @property
    def size(self) -> int:
        return sum(end - start for start, end in self.runs)

    def settle(self) -> Settle:
        lot = self.lot
        spans = [SequenceRange(lot.first + start, end - start) for start, end in self.runs]
        after_ms, reason = (None, "") if self.note is None else (self.note.after_ms, _cut(self.note.reason))
        return Settle(_KINDS[self.code], lot.first, lot.attempt, spans, after_ms, reason, lot.is_inbox, lot.fence)

    def still_sent(self) -> PendingSettlement | None:
        """The part that must be sent again after a lost connection; None: no part."""
        code = SENT_ACK if self.code == ACK else SENT
        if self.lot.heirs:
            for start, end in self.runs:
                for index in range(start, end):
                    if self.lot.state[index] == code:
                        self.lot.lose(index)
        runs = [run for start, end in self.runs for run in self.lot.runs(code, start, end)]
        return self._replace(runs=runs) if runs else None


class UnackedLots:
    """All lots of a consumer that the broker has not confirmed completely."""

    def __init__(self) -> None:
        self._lots: dict[int, ConsumerLot] = {}
        self._order: tuple[list[tuple[int, int]], ...] = ([], [])  # (first, serial); for the subject, for the inbox
        self._serial = 0
        self.owed = 0  # messages of which the broker has not confirmed the outcome
        self.held = 0  # messages whose outcome has not been sent
        self.held_bytes = 0

    def __iter__(self) -> Iterator[ConsumerLot]:
        return iter(self._lots.values())

    def __len__(self) -> int:
        return len(self._lots)

    def add(self, lot: ConsumerLot) -> None:
        self._serial += 1
        lot.serial = self._serial
        self._lots[lot.serial] = lot
        insort(self._order[lot.is_inbox], (lot.first, lot.serial))
        self.owed += lot.left
        self.held += lot.left
        self.held_bytes += lot.left * lot.bytes_each

    def remove(self, lot: ConsumerLot) -> None:
        del self._lots[lot.serial]
        order = self._order[lot.is_inbox]
        del order[bisect_left(order, (lot.first, lot.serial))]

    def overlapping(self, lot: ConsumerLot) -> list[ConsumerLot]:
        """Lots that may hold some of the same messages, the oldest first."""
        order = self._order[lot.is_inbox]
        if not order or order[-1][0] + limits.LOT_MESSAGES_MAX <= lot.first:
            return []
        found = []
        for first, serial in order[bisect_left(order, (lot.first - limits.LOT_MESSAGES_MAX + 1, 0)) :]:
            if first >= lot.end:
                break
            if self._lots[serial].end > lot.first:
                found.append(serial)
        return [self._lots[serial] for serial in sorted(found)]

    def doubt(self) -> None:
        """Mark all lots unsure: the new connection may lead to a broker that crashed and forgot its handouts."""
        for lot in self:
            lot.is_unsure = True

    def sent(self, piece: PendingSettlement) -> None:
        """Count the outcome as sent."""
        count = piece.size
        self.held -= count
        self.held_bytes -= count * piece.lot.bytes_each

    def confirm(self, piece: PendingSettlement) -> None:
        """Count the outcome as confirmed by the broker."""
        lot = piece.lot
        for start, end in piece.runs:
            self.owed -= lot.finish(start, end)
        if not lot.left and lot.serial in self._lots:
            self.remove(lot)

    def recount(self) -> None:
        """Count anew after messages moved from one lot to another. This is rare, so from scratch."""
        for lot in [lot for lot in self if not lot.left]:
            self.remove(lot)
        self.owed = sum(lot.left for lot in self)
        counted = [(lot, lot.held_count()) for lot in self]
        self.held = sum(count for _, count in counted)
        self.held_bytes = sum(count * lot.bytes_each for lot, count in counted)

    def clear(self) -> None:
        self._lots.clear()
        self._order = ([], [])
        self.owed = self.held = self.held_bytes = 0


def _cut(reason: str) -> str:
    """The part of the reason that the broker keeps."""
    return reason.encode(errors="replace")[: limits.REASON_BYTES_MAX].decode(errors="ignore")


def _state_of(told: LotMessage) -> bytearray:
    """The state of a new lot: WAITING in its spans, ABSENT between them."""
    spans = told.spans
    if not spans:
        raise RemoteProtocolError("a lot without messages")
    size = max(span.first + span.count for span in spans) - told.first
    if min(span.first for span in spans) < told.first or not 0 < size <= limits.LOT_MESSAGES_MAX:
        raise RemoteProtocolError(f"a lot of {size} messages: it has 1 to {limits.LOT_MESSAGES_MAX}")
    state = bytearray(size)
    for span in spans:
        start = span.first - told.first
        state[start : start + span.count] = _FILL[WAITING][: span.count]
    return state
