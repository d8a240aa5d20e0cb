"""Order by key, whatever happens: keys that fail, consumers that come, go and die, a broker that restarts or is killed.

The real clients on the broker in memory, which are handed runs of one key and keep them apart. The promise is checked
where it matters, at the handler: of each key the messages are finished in the order in which they were stored, and none
is begun while an earlier one is unfinished.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fairway.client.sync.client import Client
from fairway.client.sync.consumer import Consumer
from fairway.errors import FairwayError
from fairway.groups import Backoff, GroupConfig, Order
from fairway.protocol.delivery import Message
from fairway.testing import MemoryBroker

SUBJECT = "order.changed"
KEYS = "abcde"
CONFIG = GroupConfig(order=Order.KEY, lease_ms=2_000, attempts_max=100, backoff=Backoff(first_ms=200, cap_ms=1_000))

steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.text(KEYS, min_size=1, max_size=12) | st.text("ab", min_size=8, max_size=40)),
        st.tuples(st.just("join"), st.just("")),
        st.tuples(st.sampled_from(["work", "hurry", "leave", "die", "fail", "sit"]), st.sampled_from("0123")),
        st.tuples(st.sampled_from(["restart", "kill", "wait"]), st.just("")),
    ),
    min_size=5,
    max_size=30,
)


@dataclass
class Shop:
    """What was sent, begun and finished."""

    broker: MemoryBroker
    fw: Client
    sent: dict[str, list[int]] = field(default_factory=lambda: {key: [] for key in KEYS})
    finished: dict[str, list[int]] = field(default_factory=lambda: {key: [] for key in KEYS})
    number: int = 0
    members: list[tuple[Client, Consumer]] = field(default_factory=list)
    sitting: list[Message] = field(default_factory=list)

    def send(self, keys: str) -> None:
        numbers = range(self.number, self.number + len(keys))
        self.number += len(keys)
        for key, number in zip(keys, numbers, strict=True):
            self.sent[key].append(number)
        self.fw.send_many(SUBJECT, [b"%d" % each for each in numbers], keys=list(keys)).result(60)

    def join(self) -> None:
        if len(self.members) < 4:
            client = self.broker.connect()
            self.members.append((client, client.consumer(SUBJECT, "ledger", order="key")))

    def member(self, which: str) -> tuple[Client, Consumer] | None:
        return self.members[int(which) % len(self.members)] if self.members else None

    def take(self, consumer: Consumer) -> list[Message]:
        found = consumer.take(3, 0.3)
        for message in found:
            key, number = str(message.key), int(message.payload)
            before = [each for each in self.sent[key] if each < number]
            done = set(self.finished[key])
            assert set(before) <= done, f"{number} of {key} is begun, and {set(before) - done} are not finished"
        assert len({message.key for message in found}) == len(found), "two of one key in one pair of hands"
        return found

    def finish(self, message: Message) -> None:
        """It is done when the broker says so; a second time after a crash is no harm, but never a step back."""
        key, number = str(message.key), int(message.payload)
        message.ack()
        if number not in self.finished[key]:
            self.finished[key].append(number)

    def settle_sitting(self) -> None:
        for message in self.sitting:
            if not message.is_settled:
                message.release()
        self.sitting.clear()


def play(shop: Shop, what: str, argument: str) -> None:
    match what:
        case "send":
            shop.send(argument)
        case "join":
            shop.join()
        case "restart":
            shop.broker.restart()
        case "kill":
            shop.broker.kill()
        case "wait":
            shop.broker.clock.advance(2.5)
        case _:
            meet(shop, what, argument)


def meet(shop: Shop, what: str, which: str) -> None:
    """Something that a member does."""
    member = shop.member(which)
    if member is None:
        return
    client, consumer = member
    if what in ("leave", "die"):
        shop.members.remove(member)
        shop.settle_sitting()
        if what == "leave":
            consumer.close()
        client.close()
        return
    for _ in range(6 if what == "hurry" else 0):  # without a word from the broker in between
        for message in shop.take(consumer):
            shop.finish(message)
    found = shop.take(consumer)
    for message in found:
        if what in ("work", "hurry"):
            shop.finish(message)
        elif what == "fail":
            message.retry()
        else:
            shop.sitting.append(message)
    if what == "sit":
        return
    consumer.flush(30)


def drain(shop: Shop) -> None:
    shop.settle_sitting()
    shop.join()
    for _ in range(400):
        if all(shop.finished[key] == shop.sent[key] for key in KEYS):
            return
        for _, consumer in shop.members:
            for message in shop.take(consumer):
                shop.finish(message)
            consumer.flush(30)
    raise AssertionError(f"not all is done: {shop.sent} and {shop.finished}")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(steps=steps)
def test_every_key_is_finished_in_order(steps: list[tuple[str, str]]) -> None:
    with MemoryBroker() as broker:
        fw = broker.connect()
        fw.configure(SUBJECT, "ledger", CONFIG, expected_version=0)
        shop = Shop(broker, fw)
        shop.join()
        for what, argument in steps:
            play(shop, what, argument)
        drain(shop)
        for _, consumer in shop.members:
            with suppress(FairwayError):
                consumer.close()
