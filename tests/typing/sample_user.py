"""A program as a user would write it, with every part of the public surface that a type checker has an opinion on.

`test_sample.py` has mypy and pyright judge it strictly, with none of our own settings, and `fairway` as an installed
package. It is not run: the blocks of the documentation are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import fairway
import fairway.aio
from fairway.groups import Backoff, GroupConfig, Mode, TagFilter
from fairway.testing import MemoryBroker

URL = "fairway://127.0.0.1:20880"

options = fairway.ClientOptions(
    producer=fairway.ProducerOptions(linger_ms=2, fails_fast=True),
    line=fairway.ReconnectOptions(backoff_most_ms=1_000),
)

# --- sending and consuming, without a loop ----------------------------------------------------------------------------


def send(fw: fairway.Client) -> fairway.Receipt:
    pending: fairway.Pending = fw.send(
        "order.changed", b"{}", key="o-42", tags=("paid",), headers={"source": "pos"}, timeout=timedelta(seconds=5)
    )
    pending.add_done_callback(lambda done: print(done.exception()))
    many = fw.send_many("order.changed", [b"1", b"2"], keys=["a", None], tags=[("paid",), None])
    receipts: list[fairway.BatchReceipt] = many.result(timeout=10)
    print(sum(each.count for each in receipts))
    return pending.result(timeout=10)


def send_later(fw: fairway.Client) -> fairway.DelayedOutcome:
    receipt: fairway.Receipt = fw.send("order.remind", b"{}", key="o-42", after=timedelta(days=3)).result()
    fw.send("order.remind", b"{}", at=datetime(2027, 1, 1, tzinfo=UTC))
    fw.send_nowait("order.remind", b"{}", after=90)
    first: str = fw.send_many("order.remind", [b"1", b"2"], after=3_600).result()[0].id(0)
    fw.delayed.cancel(first)
    fw.send_many("order.remind", [b"1", b"2"], at=[datetime.now(UTC), datetime.now(UTC)]).result()
    tomorrow = datetime.now(UTC) + timedelta(days=1)
    for message in fw.delayed.list("order.remind", key_prefix="o-", between=(None, tomorrow), limit=10):
        due_at: datetime = message.due_at
        key: str | None = message.key
        print(message.subject, message.id, key, due_at, message.size_bytes)
    pending: int = fw.delayed.count(subject="order.remind")
    stretches: dict[datetime, int] = fw.delayed.histogram(timedelta(hours=1), between=(tomorrow, None))
    decision: fairway.DelayedOutcome = fw.delayed.reschedule(receipt.id, after=timedelta(days=7))
    if decision.fate == "already_dispatched":
        print("too late", pending, stretches, decision.messages)
    fw.delayed.cancel(receipt.message_id)
    return fw.delayed.cancel(subject="order.remind", key="o-42")


def send_carefully(fw: fairway.Client, payload: bytes) -> fairway.MessageId | None:
    try:
        return fw.send_nowait("order.changed", payload).result().message_id
    except fairway.BufferFull as full:
        print(full.messages, full.size_bytes)
    except (fairway.NotSent, fairway.OutcomeUnknown, fairway.CircuitOpen) as failed:
        print(failed)
    except fairway.Refused as refused:
        if refused.code is fairway.Code.TOO_LARGE:
            print(refused.sentence, refused.retry_after_ms)
    return None


def consume(fw: fairway.Client) -> None:
    with fw.consumer("order.changed", group="hotel", start="latest", prefetch_messages=100) as consumer:
        for message in consumer:
            settle(message)
            break
        first: fairway.Message | None = consumer.poll(timeout=1)
        if first is not None:
            first.ack()
        rest: list[fairway.Message] = consumer.take(100, timeout=timedelta(milliseconds=10))
        consumer.ack(rest)
        print(consumer.name, consumer.counts.settled, consumer.flush())


def settle(message: fairway.Message) -> None:
    payload: bytes = message.payload
    key: str | None = message.key
    tags: tuple[str, ...] = message.tags
    headers: dict[str, str] = message.headers
    age: timedelta = datetime.now(UTC) - message.created_at
    if message.attempt > 3:
        message.reject("three times is enough")
    elif age > timedelta(days=1):
        message.retry(after=timedelta(minutes=5), reason="too old to be handled by day")
    elif message.is_redelivered:
        message.retry(after=30)
    elif not payload:
        message.release()
    else:
        print(message.subject, message.group, message.sequence, str(message.id), key, tags, headers)
        message.ack()


def steer(fw: fairway.Client) -> None:
    config = GroupConfig(mode=Mode.AT_LEAST_ONCE, backoff=Backoff(first_ms=100), tags=TagFilter(("paid",)))
    version: int = fw.configure("order.changed", "hotel", config, expected_version=0).version
    moved: int = fw.seek("order.changed", "hotel", datetime(2026, 1, 1, tzinfo=UTC)).sequence
    was_on: bool = fw.pause("order.changed", "hotel").was_on
    dead: list[int] = [group.dead for subject in fw.describe().subjects for group in subject.groups]
    print(version, moved, was_on, dead)
    fw.redrive("order.changed", "hotel", rate_per_s=10)


# --- handlers ---------------------------------------------------------------------------------------------------------

app = fairway.App(URL, options=options, drain=20)


@app.listener("order.changed", group="hotel", concurrency=8, start="latest")
def on_change(message: fairway.Message) -> None:
    if message.payload == b"later":
        raise fairway.Retry("not yet", after=60)
    raise fairway.Reject("never")


@app.listener("order.changed", group="search", batch=True, batch_max=500)
async def on_changes(messages: Sequence[fairway.Message]) -> None:
    await asyncio.sleep(len(messages) / 1_000)


def handlers_keep_their_types(message: fairway.Message) -> None:
    on_change(message)


# --- on a loop --------------------------------------------------------------------------------------------------------


async def converse() -> None:
    async with fairway.aio.connect(URL, patience=30, options=options) as fw:
        receipt: fairway.Receipt = await fw.send("order.changed", b"{}")
        receipts: list[fairway.BatchReceipt] = await fw.send_many("order.changed", [b"1", b"2"])
        both: tuple[fairway.Receipt, fairway.Receipt] = await asyncio.gather(fw.send("a", b"1"), fw.send("b", b"2"))
        print(receipt.id, receipts, both)
        async with fw.consumer("order.changed", group="hotel") as consumer:
            async for message in consumer:
                settle(message)
                break
            first: fairway.Message | None = await consumer.poll(timeout=1)
            print(first)
        later: fairway.Receipt = await fw.send("order.remind", b"{}", after=timedelta(days=3))
        await fw.send_many("order.remind", [b"1", b"2"], after=[1, 2])
        cancelled: fairway.DelayedOutcome = await fw.delayed.cancel(later.id)
        print(cancelled.fate, await fw.delayed.count(), await fw.delayed.histogram(3_600))
        async for waiting in fw.delayed.list(limit=10):
            message_waiting: fairway.DelayedMessage = waiting
            print(message_waiting.due_at)
        async for page in fw.scan("order.changed", start="earliest"):
            print(page.first_sequence, len(page.batch))


# --- tests ------------------------------------------------------------------------------------------------------------


def test_orders(fairway_broker: MemoryBroker) -> None:
    fw: fairway.Client = fairway_broker.connect()
    fw.send("order.changed", b"{}").result()
    assert fairway_broker.handle(app) == 2
    fairway_broker.clock.advance(days=3)
    fairway_broker.run(converse())


def main() -> None:
    with fairway.connect(URL) as fw:
        print(send(fw), send_later(fw), send_carefully(fw, b"{}"))
        consume(fw)
        steer(fw)
    app.run()
