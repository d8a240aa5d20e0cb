"""A program that schedules, cancels, reschedules; or one that takes what arrives: `python -m tests.crash.delay_worker`.

What it is about to do and what it was told goes to standard output, one line of JSON and one `write` each:

    begun                                   it minds its signals
    sending SUBJECT [[NAME, KEY, DUE_MS]]   about to; the due time is not before that
    receipts [[NAME, ID]]                   durable
    asking NUMBER WHAT [NAME] DUE_MS        about to cancel or reschedule these; all pending of a key, or one by its id
    told NUMBER FATE MESSAGES               the answer
    seen [[SUBJECT, SEQUENCE, ID, NAME, KEY, APPENDED_MS]]

SIGUSR1: calm down, that is finish what was begun and end; a consumer goes on. SIGTERM: a consumer ends.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

import fairway
from fairway.errors import FairwayError
from tests.crash.clients_worker import PATIENCE_S, Mood

HANDFUL = 24
PACE_S = 0.05
SOON_MS = 3_000
FAR_MS = 40 * 86_400_000
FAR_ONE_IN = 6
AT_ONCE_ONE_IN = 8
TRIO_ONE_IN = 6  # keys
DECIDE_ONE_IN = 2  # handfuls
DECISIONS_MAX = 4
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Orders(msgspec.Struct, frozen=True):
    """What one process is to do."""

    name: str
    seed: str
    url: str
    subjects: tuple[str, ...]
    shift_path: str  # by how many ms the delay server's clock is ahead is written there
    is_consumer: bool = False
    has_far: bool = False  # schedules weeks ahead, too


class Born(NamedTuple):
    """A message, before it is sent."""

    name: str
    key: str
    due_ms: int
    after_s: float | None  # None: by `at`


def say(method: str, *arguments: Any) -> None:
    line = json.dumps([time.time_ns() // 1_000_000, method, arguments])
    os.write(sys.stdout.fileno(), line.encode() + b"\n")


def moment(at_ms: int) -> datetime:
    return _EPOCH + timedelta(milliseconds=at_ms)


class Producer:
    """Handfuls of delayed messages, and second thoughts about some of them."""

    def __init__(self, orders: Orders, mood: Mood) -> None:
        self._orders = orders
        self._mood = mood
        self._rng = random.Random(orders.seed)
        self._born = 0
        self._asked = 0
        self._decidable: list[tuple[str, str, list[tuple[str, str]]]] = []  # subject, key, its names and ids

    def run(self) -> None:
        with fairway.connect(self._orders.url, patience=PATIENCE_S) as client:
            while not self._mood.is_calm:
                subject = self._rng.choice(self._orders.subjects)
                self._send(client, subject, self._handful())
                if self._rng.randrange(DECIDE_ONE_IN) == 0:
                    self._decide(client)
                time.sleep(self._rng.random() * PACE_S)

    def _now_ms(self) -> int:
        return time.time_ns() // 1_000_000 + int(Path(self._orders.shift_path).read_text() or 0)

    def _wait_ms(self) -> int:
        if self._orders.has_far and self._rng.randrange(FAR_ONE_IN) == 0:
            return self._rng.randrange(FAR_MS)
        return 0 if self._rng.randrange(AT_ONCE_ONE_IN) == 0 else self._rng.randrange(SOON_MS)

    def _handful(self) -> list[Born]:
        found: list[Born] = []
        for _ in range(self._rng.randrange(1, HANDFUL)):
            key = f"{self._orders.name}-k{self._born}"
            for _ in range(3 if self._rng.randrange(TRIO_ONE_IN) == 0 else 1):
                self._born += 1
                wait_ms = self._wait_ms()
                # `after` counts by the machine's clock, so it is for those who have the same one
                after_s = wait_ms / 1_000 if not self._orders.has_far and self._rng.randrange(2) else None
                found.append(Born(f"{self._orders.name}/{self._born}", key, self._now_ms() + wait_ms, after_s))
        return found

    # --- sending -----------------------------------------------------------------------------------------------------

    def _send(self, client: fairway.Client, subject: str, handful: list[Born]) -> None:
        say("sending", subject, [each[:3] for each in handful])
        is_many = self._rng.randrange(2) == 0
        try:
            ids = self._send_many(client, subject, handful) if is_many else self._send_each(client, subject, handful)
        except fairway.OutcomeUnknown:
            if not self._orders.has_far:
                raise
            return  # more than a week has passed between two lives of the server: it has forgotten the stream
        receipts = list(zip([each.name for each in handful], ids, strict=True))
        say("receipts", receipts)
        by_key: dict[str, list[tuple[str, str]]] = {}
        for each, receipt in zip(handful, receipts, strict=True):
            by_key.setdefault(each.key, []).append(receipt)
        self._decidable += [(subject, key, named) for key, named in by_key.items()]

    def _send_each(self, client: fairway.Client, subject: str, handful: list[Born]) -> list[str]:
        pending = [
            client.send(subject, each.name.encode(), key=each.key, at=moment(each.due_ms))
            if each.after_s is None
            else client.send(subject, each.name.encode(), key=each.key, after=each.after_s)
            for each in handful
        ]
        unknown: fairway.OutcomeUnknown | None = None
        ids = []
        for each in pending:  # look at all of them: else closing the client says that nobody did
            try:
                ids.append(each.result().id)
            except fairway.OutcomeUnknown as error:
                unknown = error
        if unknown is not None:
            raise unknown
        return ids

    def _send_many(self, client: fairway.Client, subject: str, handful: list[Born]) -> list[str]:
        payloads, keys = [each.name.encode() for each in handful], [each.key for each in handful]
        many = client.send_many(subject, payloads, keys=keys, at=[moment(each.due_ms) for each in handful])
        return [receipt.id(index) for receipt in many.result() for index in range(receipt.count)]

    # --- second thoughts ---------------------------------------------------------------------------------------------

    def _decide(self, client: fairway.Client) -> None:
        """One for each key, about one that was sent lately."""
        self._decidable = self._decidable[-4 * HANDFUL :]
        for _ in range(min(self._rng.randrange(1, DECISIONS_MAX), len(self._decidable))):
            subject, key, named = self._decidable.pop(self._rng.randrange(len(self._decidable)))
            is_by_id = len(named) == 1 and self._rng.randrange(2) == 0
            new_ms = self._now_ms() + self._wait_ms() if self._rng.randrange(2) else None
            self._asked += 1
            number = f"{self._orders.name}/{self._asked}"
            what = "cancel" if new_ms is None else "reschedule"
            say("asking", number, what, [name for name, _ in named], new_ms or 0)
            try:
                found = self._ask(client, None if not is_by_id else named[0][1], subject, key, new_ms)
            except (FairwayError, TimeoutError) as error:  # it was away for too long
                say("unanswered", number, str(error))
            else:
                say("told", number, found.fate, found.messages)

    def _ask(
        self, client: fairway.Client, id: str | None, subject: str, key: str, new_ms: int | None
    ) -> fairway.DelayedOutcome:
        delayed = client.delayed
        if new_ms is None:
            return delayed.cancel(id) if id is not None else delayed.cancel(subject=subject, key=key)
        at = moment(new_ms)
        return delayed.reschedule(id, at=at) if id is not None else delayed.reschedule(subject=subject, key=key, at=at)


def consume(orders: Orders, mood: Mood) -> None:
    """All subjects of one group, in turns."""
    with fairway.connect(orders.url, patience=PATIENCE_S) as client:
        consumers = [client.consumer(subject, group="witness", consumer="w") for subject in orders.subjects]
        while not mood.is_over:
            for consumer in consumers:
                messages = consumer.take(500, timeout=0.1)
                if messages:
                    say("seen", [_told(each) for each in messages])
                    consumer.ack(messages)


def _told(message: fairway.Message) -> tuple[str, int, str, str, str | None, int]:
    appended_ms = (message.appended_at - _EPOCH) // timedelta(milliseconds=1)
    name = message.payload.decode()
    return message.subject, message.sequence, str(message.id), name, message.key, appended_ms


def main(raw: str) -> None:
    orders = msgspec.json.decode(raw, type=Orders)
    mood = Mood()
    mood.mind()
    say("begun")
    if orders.is_consumer:
        consume(orders, mood)
    else:
        Producer(orders, mood).run()


if __name__ == "__main__":
    main(sys.argv[1])
