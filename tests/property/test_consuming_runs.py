"""Consumers' sessions that are handed runs of one key, with all that can go wrong on the way (`test_consuming_model`).

Beside what holds for all, two rules hold. No user is handed a message while an earlier one of its key, which the group
wants, is not done by anybody. No user has two of one key in hand, unless the lease of the earlier had run out.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from fairway.groups import Backoff, GroupConfig, Order, TagFilter
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import Message
from tests.property.test_consuming_model import LEASE_MS, NAMES, WANTED, Consumers, User
from tests.support.mini_broker import MiniBroker

KEYS = (None, "a", "a", "a", "b", "b", "c")


class KeyedUser(User):
    """Somebody who counts on the order."""

    def __init__(self, kind: type[ConsumerSession], name: str, machine: KeyedConsumers, prefetch: int) -> None:
        super().__init__(kind, name, machine.broker, is_pushed=name == "ann", prefetch=prefetch)
        self.machine = machine

    def take(self, messages: list[Message]) -> None:
        machine = self.machine
        for message in messages:
            key = machine.keys[message.sequence]
            if key is None:
                continue
            before = {at for at in machine.wanted if at < message.sequence and machine.keys[at] == key}
            assert before <= machine.done, f"{message.sequence} is begun before {before - machine.done}"
            beside = [each for each in self.held.values() if each.key == key and not each.is_lapsed]
            assert not beside, f"{message.sequence} is begun beside {beside}"
        super().take(messages)

    def ack(self, messages: list[Message]) -> None:
        self.machine.done |= {message.sequence for message in messages}
        super().ack(messages)


class KeyedConsumers(Consumers):
    @initialize(prefetch=st.integers(1, 30), lot=st.integers(1, 5))
    def begin(self, prefetch: int, lot: int) -> None:
        config = GroupConfig(
            lease_ms=LEASE_MS,
            lot_messages_max=lot,
            attempts_max=1_000,
            backoff=Backoff(first_ms=50, cap_ms=200),
            tags=TagFilter((WANTED,)),
            order=Order.KEY,
        )
        self.broker = MiniBroker(config)
        self.keys: dict[int, str | None] = {}
        self.done: set[int] = set()  # somebody has said so
        self.users = {name: KeyedUser(self.kind, name, self, prefetch) for name in NAMES}
        self.wanted: set[int] = set()
        for user in self.users.values():
            user.wire.open()

    @rule(wanted=st.lists(st.booleans(), min_size=1, max_size=8))
    def produce(self, wanted: list[bool]) -> None:
        """Which keys they have follows from their places."""
        first = self.broker.end
        keys = {first + number: KEYS[(first + number) * 5 % 7] for number in range(len(wanted))}
        self.keys.update(keys)
        tags = [[WANTED] if each else ["other"] for each in wanted]
        self.broker.produce([b"%d" % at for at in keys], tags=tags, keys=list(keys.values()))
        self.wanted |= {first + number for number, each in enumerate(wanted) if each}

    def seek(self) -> None:
        """Not here: who moves the cursor of such a group lets its members finish first."""


KeyedConsumers.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestKeyedConsumers = KeyedConsumers.TestCase


def test_what_is_behind_a_failed_message_is_not_sent_to_and_fro() -> None:
    """The broker has lost in a crash that the first message of the key is not with the consumer any more."""
    story = KeyedConsumers()
    story.begin(prefetch=2, lot=1)
    story.produce(wanted=[False, False, True, True])
    story.work(most=1, name="ann")
    story.wait(ms=1_001)
    story.crash(handled=0, heard=0, lost=1)
    story.work(most=1, name="ann")
    story.teardown()
