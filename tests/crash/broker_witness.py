"""Observations of clients in other processes, written down line by line, and given to the model in the order of time.

A line is `[time, method, arguments]` in JSON, written with one `write`, so that what was said before a kill has been
said. The times are those of the monotonic clock, which all processes of a machine share.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fairway.runtime.clock import Clock, RealClock
from tests.simulation.broker_truth import Holder, Owner, Promise, Truth


class Scribe:
    """The witness of one client process: writes it all to standard output, or to the given stream."""

    def __init__(self, clock: Clock | None = None, write: Callable[[bytes], object] | None = None) -> None:
        self._now_ns = (clock or RealClock()).monotonic_ns
        self._write_out = write or (lambda line: os.write(sys.stdout.fileno(), line))

    def _write(self, method: str, *arguments: Any) -> None:
        line = json.dumps([self._now_ns(), method, arguments])
        self._write_out(line.encode() + b"\n")

    def blame(self, promise: Promise, sentence: str) -> None:
        self._write("blame", promise.name, sentence)

    def note_answer(self, what: str, asked_ns: int) -> None:
        """Nobody outside knows when a store fails."""

    def note_sent(self, subject: str, payloads: Sequence[bytes], now_ns: int) -> None:
        self._write("sent", subject, _texts(payloads), now_ns)

    def note_receipt(self, subject: str, first: int, payloads: Sequence[bytes]) -> None:
        self._write("receipt", subject, first, _texts(payloads))

    def note_member(self, owner: Owner, now_ns: int) -> None:
        self._write("member", owner.group, owner.subject, now_ns)

    def note_contact(self, owner: Owner, holder: Holder, *, asked_ns: int, now_ns: int) -> None:
        self._write("contact", owner.group, owner.subject, holder.name, asked_ns, now_ns)

    def note_delivery(
        self, owner: Owner, holder: Holder, found: Mapping[int, bytes], *, asked_ns: int, now_ns: int
    ) -> None:
        messages = list(zip(found, _texts(list(found.values())), strict=True))
        self._write("delivery", owner.group, owner.subject, holder.name, messages, asked_ns, now_ns)

    def note_asked(self, owner: Owner, holder: Holder, sequences: Sequence[int] | None, reason: str) -> None:
        self._write("asked", owner.group, owner.subject, holder.name, sequences, reason)

    def note_acking(self, owner: Owner, sequences: Sequence[int]) -> None:
        self._write("acking", owner.group, owner.subject, sequences)

    def note_lost(self, holder: Holder, now_ns: int) -> None:
        self._write("lost", holder.name, now_ns)

    def note_acked(self, owner: Owner, sequences: Sequence[int], *, stale: int = 0) -> None:
        self._write("acked", owner.group, owner.subject, sequences, stale)

    def note_eviction(self, owner: Owner, holder: Holder, now_ns: int) -> None:
        self._write("eviction", owner.group, owner.subject, holder.name, now_ns)

    def note_rejecting(self, owner: Owner, sequences: Sequence[int]) -> None:
        """Nobody rejects anything here."""

    def note_rejected(self, owner: Owner, sequences: Sequence[int], *, stale: int = 0) -> None:
        """Nor is told so."""


def _texts(payloads: Sequence[bytes]) -> list[str]:
    return [payload.decode("latin-1") for payload in payloads]


class Reading:
    """Tells the model what all scribes have written."""

    def __init__(self, truth: Truth, lease_ms: int) -> None:
        self._truth = truth
        self._lease_ms = lease_ms
        self._holders: dict[str, Holder] = {}
        self._tell: dict[str, Callable[..., None]] = {
            "blame": lambda name, sentence: truth.blame(Promise[name], sentence),
            "crash": truth.note_crash,
            "sent": lambda subject, texts, now_ns: truth.note_sent(subject, _payloads(texts), now_ns),
            "receipt": lambda subject, first, texts: truth.note_receipt(subject, first, _payloads(texts)),
            "member": lambda group, subject, now_ns: truth.note_member(self._owner(group, subject), now_ns),
            "contact": self._contact,
            "delivery": self._delivery,
            "asked": self._asked,
            "acking": lambda group, subject, sequences: truth.note_acking(self._owner(group, subject), sequences),
            "lost": lambda name, now_ns: truth.note_lost(self._holder(name), now_ns),
            "acked": lambda group, subject, sequences, stale: truth.note_acked(
                self._owner(group, subject), sequences, stale=stale
            ),
            "eviction": lambda group, subject, name, now_ns: truth.note_eviction(
                self._owner(group, subject), self._holder(name), now_ns
            ),
        }

    def read(self, paths: Iterable[Path], own: Iterable[list[Any]]) -> int:
        """All lines of all processes, and the reader's own; how many they were."""
        lines = [*own]
        for path in paths:
            whole = path.read_bytes().split(b"\n")[:-1]
            lines += [json.loads(line) for line in whole]
        for _, method, arguments in sorted(lines, key=lambda line: line[0]):
            self._tell[method](*arguments)
        return len(lines)

    def _owner(self, group: str, subject: str) -> Owner:
        return self._truth.owner(group, subject, self._lease_ms)

    def _holder(self, name: str) -> Holder:
        return self._holders.setdefault(name, Holder(name))

    def _contact(self, group: str, subject: str, name: str, asked_ns: int, now_ns: int) -> None:
        owner = self._owner(group, subject)
        self._truth.note_contact(owner, self._holder(name), asked_ns=asked_ns, now_ns=now_ns)

    def _delivery(
        self, group: str, subject: str, name: str, messages: list[tuple[int, str]], asked_ns: int, now_ns: int
    ) -> None:
        found = {sequence: text.encode("latin-1") for sequence, text in messages}
        owner = self._owner(group, subject)
        self._truth.note_delivery(owner, self._holder(name), found, asked_ns=asked_ns, now_ns=now_ns)

    def _asked(self, group: str, subject: str, name: str, sequences: list[int] | None, reason: str) -> None:
        self._truth.note_asked(self._owner(group, subject), self._holder(name), sequences, reason)


def _payloads(texts: list[str]) -> list[bytes]:
    return [text.encode("latin-1") for text in texts]
