"""Consumers' sessions against the real law of a group, with everything on the way that can go wrong.

Connections are cut with requests and answers under way, answers overtake one another, leases run out, the broker
crashes and forgets the handouts that nobody waited for, somebody moves the cursor back. Users settle as they like, and
late. Whatever happens:

- a message that a user holds is not handed to that user again, and neither is one whose ack was confirmed, unless the
  cursor was moved since the ack;
- what the group does not want is not handed out;
- when the trouble ends, everything is handed to somebody, and the group is owed nothing;
- after a drain nobody holds anything.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fairway.errors import FairwayError
from fairway.groups import Backoff, GroupConfig, TagFilter
from fairway.limits import DECODED_BYTES_MAX
from fairway.protocol.consumer_options import ConsumerOptions
from fairway.protocol.consumer_session import ConsumerSession
from fairway.protocol.delivery import Message
from fairway.protocol.lots import WAITING
from fairway.runtime.rng import SeededRng
from tests.support.mini_broker import MiniBroker, Wire

NAMES = ("ann", "ben")
LEASE_MS = 1_000
WANTED = "wanted"

names = st.sampled_from(NAMES)
picks = st.integers(0, 7)


class User:
    """Somebody with a consumer."""

    def __init__(
        self, kind: type[ConsumerSession], name: str, broker: MiniBroker, *, is_pushed: bool, prefetch: int
    ) -> None:
        budget = 1 if name == "ben" else DECODED_BYTES_MAX  # then he has one batch decoded at a time
        options = ConsumerOptions(
            "orders", "billing", name, prefetch_messages=prefetch, decoded_bytes_max=budget, linger_ms=2
        )
        on_messages = self.take if is_pushed else None
        self.session = kind(options, broker, SeededRng(name), on_messages=on_messages)
        self.wire = Wire(self.session, broker)
        self.held: dict[int, Message] = {}
        self.confirmed: set[int] = set()
        self.done: set[int] = set()  # by the confirmed acks of anybody
        self.seen: set[int] = set()

    def take(self, messages: list[Message]) -> None:
        for message in messages:
            assert message.sequence not in self.held, "handed out twice while held"
            assert message.sequence not in self.confirmed, "handed out after its ack was confirmed"
            assert message.sequence not in self.done, "handed out after somebody's ack was confirmed"
            assert message.tags == (WANTED,), "nobody wants it"
            assert message.payload == b"%d" % message.sequence
            self.held[message.sequence] = message
            self.seen.add(message.sequence)

    def pick(self, at: int, most: int = 1) -> list[Message]:
        """Some of the messages in hand, which are then no longer."""
        sequences = list(self.held)[at : at + most]
        return [self.held.pop(sequence) for sequence in sequences]

    def ack(self, messages: list[Message]) -> None:
        self.session.ack(messages)
        sequences = {message.sequence for message in messages}
        confirmed, done = self.confirmed, self.done

        def told(error: FairwayError | None) -> None:
            if error is None:
                confirmed.update(sequences)
                done.update(sequences)

        self.session.when_settled(messages, told)


class Consumers(RuleBasedStateMachine):
    kind: type[ConsumerSession] = ConsumerSession

    @initialize(prefetch=st.integers(1, 12), lot=st.integers(1, 5))
    def begin(self, prefetch: int, lot: int) -> None:
        config = GroupConfig(
            lease_ms=LEASE_MS,
            lot_messages_max=lot,
            attempts_max=1_000,
            backoff=Backoff(first_ms=50, cap_ms=200),
            tags=TagFilter((WANTED,)),
        )
        self.broker = MiniBroker(config)
        self.users = {
            name: User(self.kind, name, self.broker, is_pushed=name == "ann", prefetch=prefetch) for name in NAMES
        }
        self.wanted: set[int] = set()
        done: set[int] = set()
        for user in self.users.values():
            user.done = done
        for user in self.users.values():
            user.wire.open()

    @rule(wanted=st.lists(st.booleans(), min_size=1, max_size=8))
    def produce(self, wanted: list[bool]) -> None:
        first = self.broker.end
        payloads = [b"%d" % (first + number) for number in range(len(wanted))]
        self.broker.produce(payloads, tags=[[WANTED] if each else ["other"] for each in wanted])
        self.wanted |= {first + number for number, each in enumerate(wanted) if each}

    # --- the way

    @rule(name=names)
    def ask(self, name: str) -> None:
        self.users[name].wire.ask()

    @rule(name=names)
    def handle(self, name: str) -> None:
        self.users[name].wire.handle()

    @rule(name=names, at=picks)
    def hear(self, name: str, at: int) -> None:
        self.users[name].wire.hear(at)

    @rule(name=names)
    def talk(self, name: str) -> None:
        wire = self.users[name].wire
        if not wire.is_open:
            wire.open()
        wire.settle_down()

    @rule(name=names, handled=picks, heard=picks)
    def cut(self, name: str, handled: int, heard: int) -> None:
        """In the middle of a conversation: so many requests are carried out, and of so many the answer arrives."""
        self.break_off(name, handled, heard)

    def break_off(self, name: str, handled: int, heard: int) -> None:
        wire = self.users[name].wire
        if wire.is_open:
            wire.ask()
            for _ in range(handled):
                wire.handle()
            for _ in range(heard):
                wire.hear(heard)
            wire.cut()

    @rule(lost=st.integers(0, 4), handled=picks, heard=picks)
    def crash(self, lost: int, handled: int, heard: int) -> None:
        for name in NAMES:
            self.break_off(name, handled, heard)
        self.broker.crash(lost)

    @rule(ms=st.sampled_from([1, 5, 50, 400, LEASE_MS + 1]))
    def wait(self, ms: int) -> None:
        self.broker.advance(ms)

    @rule()
    def seek(self) -> None:
        """Everything again, whatever is on its way."""
        self.broker.seek(0)
        for user in self.users.values():
            user.confirmed = set()
            user.done = set()  # of each his own: what one holds from before, others have again

    # --- users

    @rule(name=names, most=st.integers(1, 8))
    def take(self, name: str, most: int) -> None:
        self.users[name].take(self.users[name].session.take_messages(most))

    @rule(name=names, most=st.integers(1, 8))
    def work(self, name: str, most: int) -> None:
        self.talk(name)
        self.take(name, most)
        self.talk(name)

    @rule(name=names, at=picks, most=st.integers(1, 8))
    def ack(self, name: str, at: int, most: int) -> None:
        self.users[name].ack(self.users[name].pick(at, most))

    @rule(name=names, at=picks, after=st.sampled_from([None, 0, 0.1]))
    def retry(self, name: str, at: int, after: float | None) -> None:
        for message in self.users[name].pick(at):
            message.retry(after, "again")

    @rule(name=names, at=picks)
    def release(self, name: str, at: int) -> None:
        for message in self.users[name].pick(at):
            message.release()

    @rule(name=names)
    def pause_or_resume(self, name: str) -> None:
        session = self.users[name].session
        if session.is_paused:
            session.resume()
        else:
            session.pause()

    # --- what must hold

    @invariant()
    def counts_agree(self) -> None:
        for user in getattr(self, "users", {}).values():
            assert user.session.error is None
            unacked = user.session._unacked
            assert unacked.owed == sum(lot.left for lot in unacked)
            assert unacked.held == sum(lot.held_count() for lot in unacked)
            assert all(lot.left for lot in unacked)
            waiting = sum(lot.state.count(WAITING) for lot in unacked)
            assert waiting == user.session.waiting_count + user.session._behind.count

    def teardown(self) -> None:
        if not hasattr(self, "users"):
            return
        self.recover()
        assert self.broker.is_all_done(), "a message is stuck"
        seen = set().union(*(user.seen for user in self.users.values()))
        assert seen == self.wanted, "a message was never handed out"
        for user in self.users.values():
            assert user.session.unconfirmed_count == 0
        self.drain()

    def recover(self) -> None:
        """No more trouble: everybody acks whatever comes."""
        for user in self.users.values():
            if not user.wire.is_open:
                user.wire.open()
            user.session.resume()
        for _ in range(300):
            for user in self.users.values():
                user.wire.settle_down()
                user.take(user.session.take_messages())
                user.ack(user.pick(0, 1_000))
                user.wire.settle_down()
            if self.broker.is_all_done() and not any(user.session.unconfirmed_count for user in self.users.values()):
                return
            self.broker.advance(100)

    def drain(self) -> None:
        self.produce([True] * 10)
        for user in self.users.values():
            user.wire.settle_down()
            user.take(user.session.take_messages(3))
            user.session.drain(self.broker.now_ns)
            user.wire.settle_down()
            user.ack(user.pick(0, 1_000))
        for _ in range(40):
            for user in self.users.values():
                user.wire.settle_down()
            self.broker.advance(20)  # some requests may have been put off
        for user in self.users.values():
            assert user.session.is_finished
        assert self.broker.held() == 0, "a drain leaves nothing behind"


Consumers.TestCase.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
TestConsumers = Consumers.TestCase
