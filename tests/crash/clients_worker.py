"""A program that uses the public clients, in a process of its own: `python -m tests.crash.clients_worker ORDERS`.

SIGUSR1: calm down, that is a producer ends when everything it sent is stored, a consumer acks whatever comes. SIGTERM:
finish what is in hand and leave. Any error that reaches the program ends it, and its status tells.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

import msgspec

import fairway
import fairway.aio
from fairway.runtime.clock import RealClock
from tests.crash.broker_worker import LEASE_MS
from tests.crash.clients_diary import PREFETCH, ClientScribe, Diary
from tests.simulation.broker_truth import Owner

PATIENCE_S = 90.0  # of the first connection: the broker may just be away
HANDFUL = 24  # messages sent or taken at a time, at most
PACE_S = 0.03  # at most, between two handfuls
FLUSH_S = 5.0
RETRY_ONE_IN = 40  # messages
LEAVE_ONE_IN = 60  # handfuls


class Orders(msgspec.Struct, frozen=True):
    """What one process is to do."""

    name: str
    face: str  # sync, many or aio; of a consumer sync, aio, app or aio-app
    seed: str
    port: int
    subject: str
    group: str = ""  # of a consumer
    life: int = 0  # others of that name were killed before
    is_named: bool = True  # a consumer that takes the place of the one before; otherwise it is somebody new each time
    flaw: str = ""  # planted: see `tests/crash/test_clients_crash.py`
    place: str = ""  # the URL, where it is not one broker at that port

    @property
    def url(self) -> str:
        return self.place or f"fairway://127.0.0.1:{self.port}"

    @property
    def member(self) -> str:
        """The name of the consumer in the eyes of the model."""
        return self.name if self.is_named else f"{self.name}.{self.life}"


class Mood:
    """What the signals have asked for."""

    def __init__(self) -> None:
        self.is_calm = False
        self.is_over = False

    def mind(self) -> None:
        signal.signal(signal.SIGUSR1, self._calm)
        signal.signal(signal.SIGTERM, self._end)

    def _calm(self, _: int, __: FrameType | None) -> None:
        self.is_calm = True

    def _end(self, _: int, __: FrameType | None) -> None:
        self.is_over = True


class Worker:
    """What all of them have."""

    def __init__(self, orders: Orders, mood: Mood) -> None:
        self.orders = orders
        self.mood = mood
        self.rng = random.Random(f"{orders.seed}/{orders.life}")
        self.scribe = ClientScribe()

    def pause_s(self) -> float:
        return self.rng.random() * PACE_S


# --- producers -------------------------------------------------------------------------------------------------------


class Producer(Worker):
    """Sends handfuls, each message once; the payload says who it is, and so do key, tags and headers."""

    def __init__(self, orders: Orders, mood: Mood) -> None:
        super().__init__(orders, mood)
        self._now_ns = RealClock().monotonic_ns
        self._sent = 0

    def run(self) -> None:
        if self.orders.face == "aio":
            asyncio.run(self._send_on_loop())
            return
        with fairway.connect(self.orders.url, patience=PATIENCE_S) as client:
            send = self._send_many if self.orders.face == "many" else self._send
            while not self.mood.is_calm:
                send(client, self._born())
                time.sleep(self.pause_s())

    def _born(self) -> list[bytes]:
        """The next handful, written down."""
        payloads = []
        for _ in range(self.rng.randrange(1, HANDFUL)):
            self._sent += 1
            name = f"{self.orders.name}.{self.orders.life}/{self._sent}:"
            payloads.append(name.encode() + self.rng.randbytes(self.rng.randrange(80)))
        self.scribe.note_sent(self.orders.subject, payloads, self._now_ns())
        return payloads

    def _columns(self, payload: bytes) -> tuple[str, tuple[str, ...], dict[str, str]]:
        name = payload.partition(b":")[0].decode()
        return name, (name.partition("/")[0],), {"name": name}

    def _send(self, client: fairway.Client, payloads: list[bytes]) -> None:
        subject = self.orders.subject
        pending = [(payload, client.send(subject, payload, *self._columns(payload))) for payload in payloads]
        if self.orders.flaw:  # it tells of receipts that it does not have
            self.scribe.note_claim(payloads)
            return
        for payload, each in pending:
            self.scribe.note_receipt(subject, each.result().sequence, [payload])

    def _send_many(self, client: fairway.Client, payloads: list[bytes]) -> None:
        keys, tags, headers = zip(*map(self._columns, payloads), strict=True)
        many = client.send_many(self.orders.subject, payloads, keys=keys, tags=tags, headers=headers)
        self._note_receipts(many.result(), payloads)

    def _note_receipts(self, receipts: Sequence[fairway.BatchReceipt], payloads: list[bytes]) -> None:
        done = 0
        for receipt in receipts:
            stored = payloads[done : done + receipt.count]
            self.scribe.note_receipt(self.orders.subject, receipt.first_sequence, stored)
            done += receipt.count

    async def _send_on_loop(self) -> None:
        subject = self.orders.subject
        async with fairway.aio.connect(self.orders.url, patience=PATIENCE_S) as client:
            while not self.mood.is_calm:
                payloads = self._born()
                if self.rng.randrange(2):
                    sending = (client.send(subject, payload, *self._columns(payload)) for payload in payloads)
                    receipts = await asyncio.gather(*sending)
                    for payload, receipt in zip(payloads, receipts, strict=True):
                        self.scribe.note_receipt(subject, receipt.sequence, [payload])
                else:
                    keys, tags, headers = zip(*map(self._columns, payloads), strict=True)
                    many = await client.send_many(subject, payloads, keys=keys, tags=tags, headers=headers)
                    self._note_receipts(many, payloads)
                await asyncio.sleep(self.pause_s())


# --- consumers -------------------------------------------------------------------------------------------------------


class Member(Worker):
    """A consumer: takes handfuls, acks most, asks for a few again, leaves and comes back now and then."""

    def __init__(self, orders: Orders, mood: Mood) -> None:
        super().__init__(orders, mood)
        owner = Owner(orders.group, orders.subject, LEASE_MS * 1_000_000, 0)
        self.diary = Diary(owner, orders.member, is_back=orders.life > 0)
        self.diary.pulse.start()
        self.consumer_name = orders.name if orders.is_named else ""
        self._stale = 0  # as far as it is known

    def run(self) -> None:
        if self.orders.face == "aio":
            asyncio.run(self._take_on_loop())
            return
        with fairway.connect(self.orders.url, patience=PATIENCE_S) as client:
            while not self.mood.is_over:
                self._begin()
                with client.consumer(
                    self.orders.subject, self.orders.group, consumer=self.consumer_name, prefetch_messages=PREFETCH
                ) as consumer:
                    self._take(consumer)
                    self.diary.note_handing_back(None, "left")

    def _begin(self) -> None:
        self.diary.begin()
        self._stale = 0

    @property
    def _is_staying(self) -> bool:
        return not self.mood.is_over and (self.mood.is_calm or self.rng.randrange(LEAVE_ONE_IN) > 0)

    def _handful(self) -> int:
        return self.rng.randrange(1, HANDFUL)

    def _take(self, consumer: fairway.Consumer) -> None:
        while self._is_staying:
            messages = consumer.take(self._handful(), timeout=0.2)
            if self.orders.flaw:
                self._misbehave(consumer, messages)
                continue
            self.note(messages)
            self.settle(consumer, messages)
            time.sleep(self.pause_s())
            if self.diary.is_owed and self._is_flushing and consumer.flush(FLUSH_S):
                self._note_confirmed(consumer)

    async def _take_on_loop(self) -> None:
        async with fairway.aio.connect(self.orders.url, patience=PATIENCE_S) as client:
            while not self.mood.is_over:
                self._begin()
                async with client.consumer(
                    self.orders.subject, self.orders.group, consumer=self.consumer_name, prefetch_messages=PREFETCH
                ) as consumer:
                    await self._take_some_on_loop(consumer)
                    self.diary.note_handing_back(None, "left")

    async def _take_some_on_loop(self, consumer: fairway.aio.Consumer) -> None:
        while self._is_staying:
            messages = await consumer.take(self._handful(), timeout=0.2)
            self.note(messages)
            self.settle(consumer, messages)
            await asyncio.sleep(self.pause_s())
            if self.diary.is_owed and self._is_flushing and await consumer.flush(FLUSH_S):
                self._note_confirmed(consumer)

    @property
    def _is_flushing(self) -> bool:
        return self.mood.is_calm or self.rng.randrange(2) > 0

    def _note_confirmed(self, consumer: fairway.Consumer | fairway.aio.Consumer) -> None:
        before, self._stale = self._stale, consumer.counts.stale
        self.diary.note_confirmed(is_stale=self._stale > before)

    def note(self, messages: Sequence[fairway.Message]) -> None:
        if messages:
            self.diary.note_messages(messages)
        else:
            self.diary.note_nothing()

    def settle(self, consumer: fairway.Consumer | fairway.aio.Consumer, messages: Sequence[fairway.Message]) -> None:
        again = [] if self.mood.is_calm else [each for each in messages if not self.rng.randrange(RETRY_ONE_IN)]
        done = [each for each in messages if each not in again]
        self.diary.note_handing_back(again, "retry")
        for message in again:
            message.retry(after=self.rng.random() / 5)
        self.diary.note_acking(done)
        consumer.ack(done)

    def _misbehave(self, consumer: fairway.Consumer, messages: Sequence[fairway.Message]) -> None:
        """Acks before it looks; or takes its own ack for the broker's word. Slowly, so that it is caught in the act."""
        if self.orders.flaw == "acks first":
            consumer.ack(messages)
            consumer.flush(FLUSH_S)
            time.sleep(0 if self.mood.is_calm else 1.0)
            self.note(messages)
            self.diary.note_acking(messages)
        else:
            self.note(messages)
            self.diary.note_acking(messages)
            consumer.ack(messages)
            self.diary.note_confirmed()
            time.sleep(0 if self.mood.is_calm else 0.1)


class Application(Member):
    """A consumer by way of `fairway.App`: handlers that return, and now and then raise."""

    def run(self) -> None:
        app = fairway.App(self.orders.url)
        listen = app.listener(
            self.orders.subject,
            group=self.orders.group,
            concurrency=3,
            consumer=self.consumer_name,
            prefetch_messages=PREFETCH,
        )
        listen(self._handle_on_loop if self.orders.face == "aio-app" else self._handle)
        app.run()
        self.diary.note_handing_back(None, "left")

    def _handle(self, message: fairway.Message) -> None:
        self.diary.note_messages([message])
        time.sleep(self.pause_s() / 10)
        self._end(message)

    async def _handle_on_loop(self, message: fairway.Message) -> None:
        self.diary.note_messages([message])
        await asyncio.sleep(self.pause_s() / 10)
        self._end(message)

    def _end(self, message: fairway.Message) -> None:
        if not self.mood.is_calm and self.rng.randrange(RETRY_ONE_IN) == 0:
            self.diary.note_handing_back([message], "retry")
            if self.rng.randrange(2):
                raise fairway.Retry("not now", after=0.1)
            raise LookupError("what a handler raises")
        self.diary.note_acking([message])


def main(raw: str) -> None:
    orders = msgspec.json.decode(raw, type=Orders)
    mood = Mood()
    mood.mind()
    kind = Producer if not orders.group else Application if "app" in orders.face else Member
    worker = kind(orders, mood)
    worker.scribe.note_begun()
    worker.run()


if __name__ == "__main__":
    main(sys.argv[1])
