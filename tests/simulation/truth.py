"""What must be true of a store, whatever happened to it: the model that every history is compared with.

A batch that was sent is, for the model, in one of three states: acknowledged (it must be there), refused (it must not)
or unknown (it may be there or not, until somebody has seen it). Everything that is read passes through `see`; what was
acknowledged or seen once is in `names` for ever, and a complete reading must find all of it again.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from fairway.names import Subject
from fairway.storage.message_log import AppendReceipt, StoredBatch


class Invariant(enum.Enum):
    """The names by which a failure is reported."""

    LOST = "what was acknowledged is there"
    GONE = "what was readable once stays readable"
    PHANTOM = "nothing is there that was never sent"
    CORRUPT = "what is there is what was sent, bit for bit"
    MISFILED = "a batch is in the subject that it was sent to"
    RENAMED = "a sequence names one payload for ever"
    REPEATED = "a batch is stored once"
    GAP = "sequences have no gaps"
    REAPPEARED = "what was refused is not there"
    DEDUPE = "every re-sent batch gets the one right answer of the dedupe window"
    ACTIONS = "acknowledged actions are there, in order"
    ROTTEN = "a crash leaves nothing that looks like rot"
    UNREPORTED = "damage is reported"
    UNCLEAN = "after a clean close there is nothing to recover"
    UNSTABLE = "recovery arrives at the same state, however often it runs"
    VIEWS = "the views are what the log alone would make of them"
    ANSWERED = "after a fault nothing is answered"
    BROKE = "nothing raises what it should not"


# What no user would notice by itself: the history goes on, to see what comes of it.
INTERNAL = frozenset({Invariant.UNSTABLE, Invariant.VIEWS})


@dataclass(frozen=True)
class Violation:
    invariant: Invariant
    sentence: str

    def __str__(self) -> str:
        return f"{self.invariant.name} ({self.invariant.value}): {self.sentence}"


@dataclass(slots=True, eq=False)
class Sent:
    """A batch that some producer means to have stored."""

    subject: Subject
    producer_id: int
    producer_sequence: int
    count: int
    data: bytes
    receipt: AppendReceipt | None = None  # the acknowledged one
    unknown: bool = False  # it was appended once, and nobody has heard since
    refused: bool = False  # the last answer was that nothing is stored, and there is no doubt about it
    sequence: int | None = None  # where it is, once acknowledged or seen
    end: int = 0  # its record's end, once acknowledged or seen

    def __str__(self) -> str:
        return f"{self.producer_id:x}/{self.producer_sequence}+{self.count} of {self.subject}"


@dataclass
class Truth:
    """The model, and what was found to contradict it."""

    sent: dict[tuple[int, int], Sent] = field(default_factory=dict)
    names: dict[tuple[Subject, int], Sent] = field(default_factory=dict)
    actions: dict[int, bool] = field(default_factory=dict)  # by number, in the order of sending: acknowledged?
    floor: int = 0  # retention may have taken what ends at or below this position
    acknowledged: int = 0
    violations: list[Violation] = field(default_factory=list)

    def blame(self, invariant: Invariant, sentence: str) -> None:
        self.violations.append(Violation(invariant, sentence))

    @property
    def is_refuted(self) -> bool:
        """Whether it makes no sense to go on."""
        return any(each.invariant not in INTERNAL for each in self.violations)

    # --- sending -----------------------------------------------------------------------------------------------------

    def note_sent(self, sent: Sent) -> None:
        self.sent[sent.producer_id, sent.producer_sequence] = sent

    def note_acknowledged(self, sent: Sent, receipt: AppendReceipt) -> None:
        if sent.receipt is None:
            self.acknowledged += 1
            sent.receipt = receipt
        elif place(sent.receipt) != place(receipt):
            self.blame(Invariant.DEDUPE, f"{sent}: {place(sent.receipt)} was answered first, then {place(receipt)}")
        self._name(sent, receipt.first_sequence, receipt.end)

    def _name(self, sent: Sent, sequence: int, end: int) -> None:
        """The batch is at `sequence`: it stays there, and nobody else ever was."""
        if sent.sequence not in (None, sequence):
            self.blame(Invariant.REPEATED, f"{sent} was at sequence {sent.sequence}, now it is at {sequence}")
        holder = self.names.setdefault((sent.subject, sequence), sent)
        if holder is not sent:
            self.blame(Invariant.RENAMED, f"sequence {sequence} named {holder}, now {sent}")
        sent.sequence, sent.end = sequence, end

    # --- reading -----------------------------------------------------------------------------------------------------

    def see(self, subject: Subject, stored: StoredBatch) -> Sent | None:
        """Somebody read this batch."""
        entry, data = stored.entry, stored.data
        sent = self.sent.get((entry.producer_id, entry.producer_sequence))
        if sent is None:
            what = f"{entry.producer_id:x}/{entry.producer_sequence} at sequence {entry.first_sequence} of {subject}"
            self.blame(Invariant.PHANTOM, f"{what} was never sent")
            return None
        if data != sent.data or entry.count != sent.count:
            self.blame(Invariant.CORRUPT, f"{sent} reads differently, at sequence {entry.first_sequence} of {subject}")
            return None
        if subject != sent.subject:
            self.blame(Invariant.MISFILED, f"{sent} is at sequence {entry.first_sequence} of {subject}")
            return None
        if sent.refused:
            self.blame(Invariant.REAPPEARED, f"{sent} was refused, and is at sequence {entry.first_sequence}")
        self._name(sent, entry.first_sequence, entry.position + entry.size)
        return sent

    def see_all(self, found: dict[Subject, list[StoredBatch]]) -> None:
        """Everything that can be read, all of it."""
        present: set[int] = set()
        for subject, batches in found.items():
            self._check_no_gaps(subject, batches)
            for stored in batches:
                sent = self.see(subject, stored)
                if sent is not None:
                    present.add(id(sent))
        for sent in self.names.values():
            if id(sent) not in present and sent.end > self.floor:
                self._miss(sent)

    def _check_no_gaps(self, subject: Subject, batches: list[StoredBatch]) -> None:
        for before, after in pairwise(batches):
            if after.entry.first_sequence != before.entry.end_sequence:
                there = f"{after.entry.first_sequence} follows on {before.entry.end_sequence}"
                self.blame(Invariant.GAP, f"{subject}: {there}")

    def _miss(self, sent: Sent) -> None:
        if sent.receipt is not None:
            self.blame(Invariant.LOST, f"{sent} was acknowledged at sequence {sent.sequence}")
        else:
            self.blame(Invariant.GONE, f"{sent} was read at sequence {sent.sequence}")

    def see_actions(self, numbers: Iterable[int]) -> None:
        """The numbers of all actions in the log, in its order."""
        found = list(numbers)
        if found != sorted(set(found)):
            self.blame(Invariant.ACTIONS, "actions are out of order, or there twice")
        strangers = [number for number in found if number not in self.actions]
        if strangers:
            self.blame(Invariant.ACTIONS, f"actions that nobody sent: {strangers}")
        missing = {number for number, acknowledged in self.actions.items() if acknowledged}.difference(found)
        if missing:
            self.blame(Invariant.ACTIONS, f"acknowledged actions are lost: {sorted(missing)}")


def place(receipt: AppendReceipt) -> tuple[int, int, int, int, int]:
    """What a receipt says, but for whether it was given before."""
    return (receipt.subject_id, receipt.first_sequence, receipt.count, receipt.end, receipt.appended_ms)
