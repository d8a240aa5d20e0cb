"""Bugs that a broker might have, one at a time, so that the campaign can show that it would find them.

Each swaps one piece of the product for a wrong one while its `with` lasts, and names the promise that must catch it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from fairway.broker.group_coordinator import GroupCoordinator
from fairway.broker.produce import ProduceProcessor
from fairway.group_events import GroupEvent
from fairway.groups import membership, pull
from fairway.groups.decisions import JoinClaim, PullDecision
from fairway.groups.members import Member
from fairway.groups.state import GroupState
from fairway.names import ConsumerName, Subject
from fairway.runtime.disk import File, Part
from fairway.scheduling import Actor, TurnResult
from fairway.serving.requests import ProduceRequest
from fairway.storage.consume_log import ConsumeLogEntry
from fairway.storage.flusher import Flusher
from fairway.storage.flusher import OnDurable as Told
from fairway.storage.log import Log
from fairway.storage.message_log import MessageLog
from fairway.storage.record import RecordHeader
from tests.simulation import broker_planted_more as more
from tests.simulation import broker_planted_order as order
from tests.simulation.broker_truth import Promise
from tests.simulation.planted import swapped


@dataclass(frozen=True)
class Bug:
    """How to plant it, and which promise must find it, whatever else does."""

    sentence: str
    plant: Callable[[], AbstractContextManager[None]]
    caught_by: frozenset[Promise]
    seeds: range = range(20)  # one of these shows it
    has_policies: bool = False  # in a history with groups that keep an order, or coalesce


def ack_before_durable() -> AbstractContextManager[None]:
    def when_durable(self: GroupCoordinator, written: RecordHeader | None, told: Told) -> None:
        told(None)

    return swapped(GroupCoordinator, "when_durable", when_durable)


def expiry_acks() -> AbstractContextManager[None]:
    """What a consumer held when its lease ended counts as done: the fault of the design that this one follows."""

    def part(self: GroupState, event: GroupEvent, attempts: int) -> None:
        member = self.roster.remove(event.consumer_id)
        self.held_count -= len(member.lots)
        if not len(self.roster):
            self.absent_since_ms = event.time_ms

    return swapped(GroupState, "_part", part)


def unarrived_is_forgotten() -> AbstractContextManager[None]:
    def unarrived(state: GroupState, member: Member, now_ms: int) -> PullDecision | None:
        return None

    return swapped(pull, "_unarrived", unarrived)


def arrived_is_not_heard() -> AbstractContextManager[None]:
    def hear(self: Member, arrived: int) -> None:
        """It will say so again."""

    return swapped(Member, "hear", hear)


def wake_up_lost() -> AbstractContextManager[None]:
    def wake_subject(self: GroupCoordinator, subject_id: int) -> None:
        """Whoever waits will ask again."""

    return swapped(GroupCoordinator, "wake_subject", wake_subject)


@contextmanager
def visible_before_committed() -> Iterator[None]:
    """As soon as it is appended, out of memory; and whoever waits is told."""
    memory: WeakKeyDictionary[Flusher, dict[int, bytes]] = WeakKeyDictionary()
    right_add, right_read, right_process = Flusher.add, Log.read, ProduceProcessor.process

    def process(self: ProduceProcessor, request: ProduceRequest, actor: Actor) -> TurnResult:
        verdict = right_process(self, request, actor)
        appended = self._store.messages.views.subjects.find(Subject.parse(request.message.subject))
        if appended is not None:
            self._on_committed(appended.id)
        return verdict

    def add(self: Flusher, file: File, part: Part, body: Part = b"", must_sync: bool = False) -> None:
        start = self.gathered_end
        right_add(self, file, part, body, must_sync)
        memory.setdefault(self, {})[start] = bytes(part) + bytes(body)

    def read(self: Log, position: int, size: int) -> bytes:
        stored = max(0, min(size, self.committed_end - position))
        data = right_read(self, position, stored) if stored else b""
        while len(data) < size:
            data += memory[self.flusher][position + len(data)]
        return data

    def readable(self: MessageLog, subject_id: int, sequence: int) -> Iterator[ConsumeLogEntry]:
        yield from self.views.entries.entries(subject_id, sequence, self.log.end)

    with (
        swapped(ProduceProcessor, "process", process),
        swapped(Flusher, "add", add),
        swapped(Log, "read", read),
        swapped(Log, "read_cached", read),
        swapped(Log, "read_recent", read),
        swapped(MessageLog, "readable", readable),
    ):
        yield


def lease_too_short() -> AbstractContextManager[None]:
    right = membership.decide_expire

    def decide_expire(state: GroupState, now_ns: int, now_ms: int) -> object:
        return right(state, now_ns + state.config.lease_ms * membership.MS_NS // 2, now_ms)

    return swapped(membership, "decide_expire", decide_expire)


def lease_never_ends() -> AbstractContextManager[None]:
    def next_deadline_ns(state: GroupState, now_ns: int, now_ms: int) -> int | None:
        return None

    return swapped(membership, "next_deadline_ns", next_deadline_ns)


def anybody_may_join_twice() -> AbstractContextManager[None]:
    """A consumer that comes back and remembers nothing keeps what it held, and is not given it again."""
    right = membership.decide_join

    def decide_join(
        state: GroupState, name: ConsumerName, version: int, arrived: int, claim: JoinClaim, **times: int
    ) -> object:
        member = state.roster.get(name)
        return right(state, name, version, arrived or (member.number if member is not None else 0), claim, **times)

    return swapped(membership, "decide_join", decide_join)


_P = Promise
BUGS: dict[str, Bug] = {
    "ack-before-durable": Bug("an ack is answered when it is noted", ack_before_durable, frozenset({_P.ACKED_AGAIN})),
    "expiry-acks": Bug("a lease that ends settles what was held", expiry_acks, frozenset({_P.LOST, _P.STUCK})),
    "unarrived-is-forgotten": Bug(
        "the cursor is past a response that did not arrive", unarrived_is_forgotten, frozenset({_P.LOST, _P.STUCK})
    ),
    "arrived-is-not-heard": Bug("every response is sent again", arrived_is_not_heard, frozenset({_P.DUPLICATE})),
    "wake-up-lost": Bug("a new message wakes nobody", wake_up_lost, frozenset({_P.STUCK})),
    "visible-before-committed": Bug(
        "messages are handed out before they are durable",
        visible_before_committed,
        frozenset({_P.RENAMED, _P.LOST, _P.REPEATED}),
        seeds=range(60),
    ),
    "lease-too-short": Bug("a lease ends at half its time", lease_too_short, frozenset({_P.EVICTED, _P.DUPLICATE})),
    "lease-never-ends": Bug("nobody sets the timer", lease_never_ends, frozenset({_P.LOST, _P.STUCK})),
    "returns-empty-handed": Bug(
        "who forgot what it held is not given it again", anybody_may_join_twice, frozenset({_P.LOST, _P.STUCK})
    ),
    "resent-whole": Bug("a part comes again with the rest of its lot", more.resent_whole, frozenset({_P.DUPLICATE})),
    "given-back-twice": Bug(
        "an earlier attempt comes after another was acked", more.given_back_twice, frozenset({_P.ACKED_AGAIN})
    ),
    "keys-not-in-the-picture": Bug(
        "a checkpoint has no keys",
        order.keys_forgotten_in_the_picture,
        frozenset({_P.ORDER}),
        seeds=range(22, 30),
        has_policies=True,
    ),
    "retry-frees-its-key": Bug(
        "the next of a key comes before one that failed",
        order.retry_frees_its_key,
        frozenset({_P.ORDER}),
        seeds=range(3, 9),
        has_policies=True,
    ),
    "run-comes-back-loose": Bug(
        "what followed others of its key goes out beside them when it has come back",
        order.run_comes_back_loose,
        frozenset({_P.ORDER}),
        seeds=range(3, 9),
        has_policies=True,
    ),
    "key-sees-no-one": Bug(
        "a fresh message goes out beside another of its key",
        order.key_sees_no_one_before_it,
        frozenset({_P.ORDER}),
        seeds=range(3, 9),
        has_policies=True,
    ),
    "youngest-is-active": Bug(
        "who comes last is active, whatever others hold",
        order.youngest_is_active,
        frozenset({_P.ORDER}),
        seeds=range(4, 13),
        has_policies=True,
    ),
    "dying-unwritten": Bug(
        "that a message dies is not written down", more.dying_unwritten, frozenset({_P.BURIED, _P.RISEN})
    ),
    "dead-before-copied": Bug(
        "DEAD is written before the copy is durable",
        more.dead_before_copied,
        frozenset({_P.BURIED, _P.LOST}),
        seeds=range(3, 40),
    ),
    "dead-and-gone": Bug(
        "nothing is copied to dead letter", more.dead_and_gone, frozenset({_P.BURIED, _P.LOST}), seeds=range(1, 20)
    ),
    "buried-twice": Bug(
        "what a life before has copied is copied again", more.buried_twice, frozenset({_P.BURIED}), seeds=range(3, 60)
    ),
    "redriven-to-another": Bug(
        "redrive goes to one group's inbox, whoever asked",
        more.redriven_to_another,
        frozenset({_P.REDRIVEN}),
        seeds=range(1, 20),
    ),
    "redriven-again": Bug(
        "every redrive repeats the ones before", more.redriven_again, frozenset({_P.REDRIVEN}), seeds=range(1, 20)
    ),
    "inbox-forgotten": Bug(
        "the next life does not look into a group's inbox",
        more.inbox_forgotten,
        frozenset({_P.STUCK, _P.REDRIVEN}),
        seeds=range(3, 40),
    ),
    "inbox-opened-early": Bug(
        "something lies in an inbox before the inbox is durable",
        more.inbox_opened_early,
        frozenset({_P.LOST, _P.REDRIVEN, _P.BROKE}),
        seeds=range(3, 40),
    ),
    "at-most-once-unwritten": Bug(
        "an at-most-once PULL is not awaited", more.at_most_once_unwritten, frozenset({_P.TWICE}), seeds=range(10, 50)
    ),
    "broadcast-has-gaps": Bug(
        "a broadcast consumer that comes back begins at the end",
        more.broadcast_has_gaps,
        frozenset({_P.LOST}),
        seeds=range(40),
    ),
    "paused-in-vain": Bug("a pause changes nothing", more.paused_in_vain, frozenset({_P.PAUSED}), seeds=range(11, 60)),
    "sought-forwards-only": Bug(
        "a seek backwards forgets, and stays where it is",
        more.sought_forwards_only,
        frozenset({_P.LOST, _P.STUCK}),
        seeds=range(3, 40),
    ),
    "retention-owes-nothing": Bug(
        "retention does not ask the groups",
        more.retention_owes_nothing,
        frozenset({_P.LOST, _P.STUCK}),
        seeds=range(7, 60),
    ),
    "sequences-used-again": Bug(
        "after a power cut sequences are given out again",
        more.sequences_used_again,
        frozenset({_P.RENAMED}),
        seeds=range(2, 60),
    ),
    "answered-unwritten": Bug(
        "in memory means in the memory of the process",
        more.answered_unwritten,
        frozenset({_P.LOST, _P.RENAMED}),
        seeds=range(40),
    ),
    "held-for-ever": Bug(
        "who was told that a message is done is taken to hold it",
        more.held_for_ever,
        frozenset({_P.STUCK}),
        seeds=range(6, 80),
    ),
    "pictured-without-stock": Bug(
        "a checkpoint leaves out what was handed back",
        more.pictured_without_unheld_lots,
        frozenset({_P.LOST, _P.STUCK, _P.BROKE}),
        seeds=range(40),
    ),
}
