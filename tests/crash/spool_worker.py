"""A producer with a spool, in a process of its own, to be killed: `python -m tests.crash.spool_worker ORDERS`.

Writes down what it is about to send, and each receipt, in lines that are whole or not there: `["sent", first, count]`,
`["kept", first, count, "broker" or "spool"]`. On SIGTERM it closes its client and says `["left"]`.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
import time
from collections import deque

import msgspec

import fairway
import fairway.aio

IN_HAND = 40  # bursts whose receipts are awaited


class Orders(msgspec.Struct, frozen=True):
    """What one life of a producer does."""

    name: str  # with the life: what its payloads begin with
    face: str  # sync, many or aio
    url: str
    spool: str
    subject: str
    seed: str


def write(*fields: object) -> None:
    os.write(1, msgspec.json.encode(fields) + b"\n")


def options(orders: Orders) -> fairway.ClientOptions:
    return fairway.ClientOptions(
        producer=fairway.ProducerOptions(buffer_messages_max=2_000, when_full="spool"),
        line=fairway.ReconnectOptions(backoff_first_ms=10, backoff_most_ms=100),
        spool=fairway.SpoolOptions(orders.spool, after_ms=100, buffer_messages=500, adopt_ms=200),
    )


class Worker:
    def __init__(self, orders: Orders) -> None:
        self.orders = orders
        self.rng = random.Random(orders.seed)
        self.is_told_to_leave = False
        self._next = 0
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, *_: object) -> None:
        self.is_told_to_leave = True

    def burst(self) -> tuple[int, list[bytes]]:
        first, count = self._next, self.rng.randrange(1, 30)
        self._next += count
        write("sent", first, count)
        fill = b"." * self.rng.choice((0, 10, 300))
        return first, [b"%s:%d:%s" % (self.orders.name.encode(), first + index, fill) for index in range(count)]

    def note(self, first: int, count: int, receipt: object) -> None:
        is_spooled = isinstance(receipt, fairway.SpoolReceipt | fairway.SpoolBatchReceipt)
        write("kept", first, count, "spool" if is_spooled else "broker")

    def run(self) -> None:
        orders = self.orders
        in_hand: deque[tuple[int, list[fairway.Pending]]] = deque()
        with fairway.connect(orders.url, options=options(orders)) as client:
            while not self.is_told_to_leave:
                first, payloads = self.burst()
                if orders.face == "many":
                    at = first
                    for each in client.send_many(orders.subject, payloads).result(60):
                        self.note(at, each.count, each)
                        at += each.count
                else:
                    in_hand.append((first, [client.send(orders.subject, each) for each in payloads]))
                while in_hand and (len(in_hand) > IN_HAND or in_hand[0][1][-1].done()):
                    self._collect(*in_hand.popleft())
                time.sleep(self.rng.random() * 0.004)
            while in_hand:
                self._collect(*in_hand.popleft())
        write("left")

    def _collect(self, first: int, pendings: list[fairway.Pending]) -> None:
        for index, pending in enumerate(pendings):
            self.note(first + index, 1, pending.result(60))

    async def run_aio(self) -> None:
        orders = self.orders
        async with fairway.aio.connect(orders.url, options=options(orders)) as client:
            while not self.is_told_to_leave:
                first, payloads = self.burst()
                receipts = await asyncio.gather(*(client.send(orders.subject, each) for each in payloads))
                for index, receipt in enumerate(receipts):
                    self.note(first + index, 1, receipt)
                await asyncio.sleep(self.rng.random() * 0.004)
        write("left")


def main(raw: str) -> None:
    worker = Worker(msgspec.json.decode(raw, type=Orders))
    if worker.orders.face == "aio":
        asyncio.run(worker.run_aio())
    else:
        worker.run()


if __name__ == "__main__":
    main(sys.argv[1])
