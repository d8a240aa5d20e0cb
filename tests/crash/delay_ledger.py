"""The answers to programs about their delayed messages, the messages that arrived, and the judgement. Knows nothing of
the server.

A due time is a bound from below, as good as the program knows it. A reschedule whose answer is not known may have been
done or not. A cancel of three messages, one of which was on its way, says how many it stopped, not which. A client
repeats a question whose answer was lost. If days have passed on the server's clock by then, the server has carried out
the first one and forgotten the message: then "unknown" is true, and the message may be cancelled.
"""

from __future__ import annotations

import enum
import json
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from fairway.delay.maintenance import KEEP_MS


class Promise(enum.Enum):
    """What is not to happen."""

    LOST = "has a receipt, is not cancelled, and did not arrive"
    REPEATED = "arrived twice"
    EARLY = "arrived before it was due"
    UNSTOPPED = "was answered with cancelled, and arrived"
    UNTRUE = "was answered with what is not so"
    PHANTOM = "was never sent"
    CHANGED = "is not what was sent"


@dataclass(frozen=True, slots=True)
class Breach:
    """One thing that happened all the same."""

    promise: Promise
    sentence: str

    def __str__(self) -> str:
        return f"{self.promise.name}: {self.sentence} {self.promise.value}"


@dataclass(slots=True)
class Letter:
    """One message as its sender knows it."""

    subject: str
    key: str
    due_ms: int  # not before
    id: str = ""  # of its receipt
    is_cancelled: bool = False  # for sure
    may_be_cancelled: bool = False


@dataclass(slots=True)
class Question:
    """A cancel or a reschedule."""

    what: str
    names: list[str]
    due_ms: int
    asked_ms: int
    fate: str = ""  # of its answer
    messages: int = 0
    told_ms: int = 0

    @property
    def may_be_the_second(self) -> bool:
        """The client may have asked before, and the answer was lost: "one of the three is cancelled". Then this one
        speaks of the others."""
        return self.what == "cancel" and self.fate == "already_dispatched" and len(self.names) > 1


@dataclass
class Shifts:
    """By how much the delay server's clock was ahead, life by life."""

    from_ms: list[int] = field(default_factory=list)
    by_ms: list[int] = field(default_factory=list)

    def note(self, at_ms: int, shift_ms: int) -> None:
        self.from_ms.append(at_ms)
        self.by_ms.append(shift_ms)

    def at(self, real_ms: int) -> int:
        """That clock, when the machine's says so."""
        life = bisect_right(self.from_ms, real_ms) - 1
        return real_ms + (self.by_ms[life] if life >= 0 else 0)


class DelayLedger:
    """All lines of all programs of one run."""

    def __init__(self, shifts: Shifts | None = None) -> None:
        self._shifts = shifts or Shifts()
        self.letters: dict[str, Letter] = {}
        self.questions: dict[str, Question] = {}
        self.seen: dict[str, dict[tuple[str, int], tuple[str, str | None, int]]] = defaultdict(dict)
        self.breaches: list[Breach] = []

    def read(self, paths: Iterable[Path]) -> None:
        """Each program has its own messages, so their order among each other is of no matter."""
        for path in paths:
            for line in path.read_bytes().split(b"\n")[:-1]:
                at_ms, method, arguments = json.loads(line)
                getattr(self, f"_{method}")(at_ms, *arguments)

    def _begun(self, at_ms: int) -> None:
        """Nothing to be learnt from."""

    def _sending(self, at_ms: int, subject: str, letters: list[tuple[str, str, int]]) -> None:
        for name, key, due_ms in letters:
            self.letters[name] = Letter(subject, key, due_ms)

    def _receipts(self, at_ms: int, receipts: list[tuple[str, str]]) -> None:
        for name, text in receipts:
            self.letters[name].id = text

    def _asking(self, at_ms: int, number: str, what: str, names: list[str], due_ms: int) -> None:
        self.questions[number] = Question(what, names, due_ms, at_ms)

    def _unanswered(self, at_ms: int, number: str, why: str) -> None:
        """As if nobody had been there to hear it."""

    def _told(self, at_ms: int, number: str, fate: str, messages: int) -> None:
        question = self.questions[number]
        question.fate, question.messages, question.told_ms = fate, messages, at_ms

    def _seen(self, at_ms: int, messages: list[tuple[str, int, str, str, str | None, int]]) -> None:
        for subject, sequence, message_id, name, key, appended_ms in messages:
            self.seen[name][subject, sequence] = message_id, key, appended_ms

    def _may_be_forgotten(self, question: Question) -> bool:
        """Whether the server may have carried it out, and have forgotten its messages when it was asked again."""
        elapsed_ms = self._shifts.at(question.told_ms) - self._shifts.at(question.asked_ms)
        return question.fate == "unknown" and elapsed_ms > KEEP_MS

    # --- what is still awaited ---------------------------------------------------------------------------------------

    def missing(self) -> list[str]:
        """Who has a receipt, is not cancelled as far as anybody knows, and is not here."""
        self._settle()
        return [
            name
            for name, letter in self.letters.items()
            if letter.id and not letter.is_cancelled and not letter.may_be_cancelled and name not in self.seen
        ]

    def _settle(self) -> None:
        """What the answers mean for each message."""
        for question in self.questions.values():
            is_whole = bool(question.fate) and (question.messages == len(question.names) or len(question.names) == 1)
            is_second = question.may_be_the_second and any(name in self.seen for name in question.names)
            is_second = is_second or self._may_be_forgotten(question)
            for letter in (self.letters[name] for name in question.names):
                if question.what == "cancel":
                    letter.is_cancelled |= question.fate == "cancelled" and is_whole
                    letter.may_be_cancelled |= question.fate in ("", "cancelled") or is_second
                elif question.fate == "rescheduled" and is_whole:
                    letter.due_ms = question.due_ms
                elif question.fate in ("", "rescheduled", "already_dispatched"):  # by an ask whose answer was lost
                    letter.due_ms = min(letter.due_ms, question.due_ms)

    # --- the judgement -----------------------------------------------------------------------------------------------

    def judge(self) -> list[Breach]:
        for name in self.missing():
            self._blame(Promise.LOST, name)
        for name, places in self.seen.items():
            letter = self.letters.get(name)
            if letter is None:
                self._blame(Promise.PHANTOM, name)
            else:
                self._judge_arrival(name, letter, places)
        for question in self.questions.values():
            self._judge_answer(question)
        return self.breaches

    def _judge_arrival(
        self, name: str, letter: Letter, places: dict[tuple[str, int], tuple[str, str | None, int]]
    ) -> None:
        if len(places) > 1:
            self._blame(Promise.REPEATED, f"{name} at {sorted(places)}")
        if letter.is_cancelled:
            self._blame(Promise.UNSTOPPED, name)
        for (subject, _), (message_id, key, appended_ms) in places.items():
            if (subject, key) != (letter.subject, letter.key) or (letter.id and message_id != letter.id):
                self._blame(Promise.CHANGED, f"{name} with {subject}, {key}, {message_id}")
            early_ms = letter.due_ms - self._shifts.at(appended_ms)
            if early_ms > 0:
                self._blame(Promise.EARLY, f"{name}, by {early_ms} ms,")

    def _judge_answer(self, question: Question) -> None:
        arrived = [name for name in question.names if name in self.seen]
        least = 0 if self._may_be_forgotten(question) else 1 if question.may_be_the_second else len(question.names)
        who = ", ".join(question.names)
        match question.fate:
            case "cancelled" if len(arrived) + question.messages > len(question.names):
                self._blame(Promise.UNSTOPPED, f"{question.messages} of {who}")
            case "already_dispatched" | "unknown" if len(arrived) < least:
                self._blame(Promise.UNTRUE, f"{who}, of which {len(arrived)} arrived, with {question.fate},")
            case "already_dispatched":
                due_ms = min(self.letters[name].due_ms for name in question.names)
                if self._shifts.at(question.told_ms) < due_ms:
                    self._blame(Promise.UNTRUE, f"{who}, not yet due, with already_dispatched,")

    def _blame(self, promise: Promise, sentence: str) -> None:
        self.breaches.append(Breach(promise, sentence))

    def figures(self) -> Counter[str]:
        """What it was all about."""
        fates = Counter(question.fate or "not answered" for question in self.questions.values())
        found: Counter[str] = Counter({"scheduled": len(self.letters), "delivered": len(self.seen)})
        found["acknowledged"] = sum(bool(letter.id) for letter in self.letters.values())
        for fate in ("cancelled", "rescheduled", "already_dispatched", "unknown", "not answered"):
            found[fate.replace("_", " ")] = fates[fate]
        return found
