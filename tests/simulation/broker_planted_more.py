"""More bugs that a broker might have: dead letters, redrive, retention, seek, pause, broadcast, at most once,
durability `memory`, and the picture of the groups in a checkpoint. As in `broker_planted`, which gathers them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager

import msgspec

from fairway.broker import dead_letters
from fairway.broker.dead_letters import DeadLetterWriter, _DeadLetterBatch, _DeadLetterQueue
from fairway.broker.group_coordinator import GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.maintenance import BrokerMaintenance
from fairway.broker.message_copies import CopiedRanges
from fairway.errors import FairwayError
from fairway.group_events import GroupEvent
from fairway.groups import GroupDecision, GroupOutcome, Range, membership, snapshot
from fairway.groups import GroupStateMachine as StateMachine
from fairway.groups.decisions import PullDecision
from fairway.groups.lots import Lot, UnheldLots, full
from fairway.groups.state import GroupState
from fairway.names import GroupName, Subject
from fairway.storage.flusher import Flusher
from fairway.storage.flusher import OnDurable as Told
from fairway.storage.message_log import MessageLog, StoredBatch
from fairway.storage.record import RecordHeader
from fairway.storage.subjects import SubjectState
from tests.simulation.planted import swapped

# --- dead letters ----------------------------------------------------------------------------------------------------


def dying_unwritten() -> AbstractContextManager[None]:
    right = GroupCoordinator.carry_out_all

    def carry_out_all(
        self: GroupCoordinator, decisions: Sequence[tuple[GroupHost, GroupDecision]]
    ) -> RecordHeader | None:
        written = []
        for host, decision in decisions:
            if decision.dying:
                host.state_machine.apply_all(decision.events, self.clock.monotonic_ns())
                written.append((host, msgspec.structs.replace(decision, events=())))
            else:
                written.append((host, decision))
        return right(self, written)

    return swapped(GroupCoordinator, "carry_out_all", carry_out_all)


def dead_before_copied() -> AbstractContextManager[None]:
    right = DeadLetterWriter._copy

    def copy(
        self: DeadLetterWriter,
        grave: _DeadLetterQueue,
        dead_letter_batch: _DeadLetterBatch,
        stored: StoredBatch,
        parts: tuple[Range, ...],
    ) -> None:
        right(self, grave, dead_letter_batch, stored, parts)
        self._settle(grave.host, dead_letter_batch, parts)

    return swapped(DeadLetterWriter, "_copy", copy)


def dead_and_gone() -> AbstractContextManager[None]:
    def copy(
        self: DeadLetterWriter,
        grave: _DeadLetterQueue,
        dead_letter_batch: _DeadLetterBatch,
        stored: StoredBatch,
        parts: tuple[Range, ...],
    ) -> None:
        self._settle(grave.host, dead_letter_batch, parts)

    return swapped(DeadLetterWriter, "_copy", copy)


def buried_twice() -> AbstractContextManager[None]:
    def missing(
        self: DeadLetterWriter,
        grave: _DeadLetterQueue,
        dead_letter_batch: _DeadLetterBatch,
        to: Subject,
        stream: int,
        parts: tuple[Range, ...],
    ) -> list[Range]:
        return list(parts)

    return swapped(DeadLetterWriter, "_missing", missing)


# --- redrive ---------------------------------------------------------------------------------------------------------


def redriven_to_another() -> AbstractContextManager[None]:
    def subject_of(self: Inboxes, host: GroupHost) -> Subject:
        return Subject.inbox(GroupName("g0"), self._coordinator.name_of(host.subject_id))

    return swapped(Inboxes, "subject_of", subject_of)


def redriven_again() -> AbstractContextManager[None]:
    def redriven(coordinator: GroupCoordinator, host: GroupHost, dead: Subject) -> CopiedRanges:
        return CopiedRanges(coordinator.store.messages, 0, 0)

    return swapped(dead_letters, "redriven", redriven)


def inbox_forgotten() -> AbstractContextManager[None]:
    def link_inbox(self: GroupCoordinator, host: GroupHost) -> None:
        """Whoever writes there next will find it."""

    return swapped(GroupCoordinator, "_link_inbox", link_inbox)


def inbox_opened_early() -> AbstractContextManager[None]:
    def when_open(self: Inboxes, host: GroupHost, told: Told) -> None:
        try:
            if not host.is_inbox_open:
                self._open(host, self._coordinator.store.ensure_subject(self.subject_of(host)).id)
            host.is_inbox_open = True
        except FairwayError as error:
            told(error)
        else:
            told(None)

    return swapped(Inboxes, "when_open", when_open)


# --- groups of other kinds, and what is done to them -----------------------------------------------------------------


def at_most_once_unwritten() -> AbstractContextManager[None]:
    right = StateMachine.pull

    def pull(self: StateMachine, name: str, **how: object) -> PullDecision:
        return msgspec.structs.replace(right(self, name, **how), is_durable_first=False)  # type: ignore[arg-type]

    return swapped(StateMachine, "pull", pull)


def broadcast_has_gaps() -> AbstractContextManager[None]:
    def is_gap(state: GroupState, arrived: int, now_ms: int) -> bool:
        return state.config.is_broadcast and not len(state.roster) and state.next_consumer_id > 1

    return swapped(membership, "_is_gap", is_gap)


def paused_in_vain() -> AbstractContextManager[None]:
    def pause(self: GroupState, event: GroupEvent, now_ns: int) -> None:
        """It is written down."""

    right = GroupState._HANDLERS
    kinds = {kind: pause if handler is GroupState._pause else handler for kind, handler in right.items()}
    return swapped(GroupState, "_HANDLERS", kinds)


def sought_forwards_only() -> AbstractContextManager[None]:
    right = GroupState._move

    def move(self: GroupState, event: GroupEvent, now_ns: int) -> None:
        right(self, event if event.ranges else event._replace(lot=max(event.lot, self.cursor)), now_ns)

    kinds = {kind: move if handler is right else handler for kind, handler in GroupState._HANDLERS.items()}
    return swapped(GroupState, "_HANDLERS", kinds)


def resent_whole() -> AbstractContextManager[None]:
    def open_in_response(self: Lot, number: int) -> int:
        return self.mask

    return swapped(Lot, "open_in_response", open_in_response)


def given_back_twice() -> AbstractContextManager[None]:
    """An ack of a second attempt leaves the first one in the stock, as a lease that ends twice would."""
    right = GroupState._ack

    def ack(self: GroupState, event: GroupEvent, now_ns: int) -> None:
        right(self, event, now_ns)
        if event.consumer_id and event.attempt > 1 and self.keys is None:
            earlier = full(*event.ranges[0], event.attempt - 1)
            if earlier.name not in self.unheld_lots:
                self.unheld_lots.add(earlier)

    kinds = {kind: ack if handler is right else handler for kind, handler in GroupState._HANDLERS.items()}
    return swapped(GroupState, "_HANDLERS", kinds)


# --- what is kept ----------------------------------------------------------------------------------------------------


def retention_owes_nothing() -> AbstractContextManager[None]:
    def owed_position(self: BrokerMaintenance, host: GroupHost) -> int | None:
        return None

    return swapped(BrokerMaintenance, "_owed_position", owed_position)


def sequences_used_again() -> AbstractContextManager[None]:
    def raise_ceiling(self: MessageLog, state: SubjectState) -> None:
        """They will be synced soon enough."""

    return swapped(MessageLog, "_raise_ceiling", raise_ceiling)


def answered_unwritten() -> AbstractContextManager[None]:
    """In memory: of this process, not of the kernel."""
    right = Flusher.when_durable

    def when_durable(self: Flusher, position: int, outcome: Told, undos: int | None = None) -> None:
        if self._is_lazy:
            outcome(None)
        else:
            right(self, position, outcome, undos)

    return swapped(Flusher, "when_durable", when_durable)


def held_for_ever() -> AbstractContextManager[None]:
    def doubt(self: StateMachine, *, now_ms: int) -> GroupDecision:
        return GroupDecision(GroupOutcome.DONE)

    return swapped(StateMachine, "doubt", doubt)


def pictured_without_unheld_lots() -> AbstractContextManager[None]:
    right = snapshot.write

    def write(state: GroupState) -> bytes:
        unheld_lots, state.unheld_lots = state.unheld_lots, UnheldLots()
        try:
            return right(state)
        finally:
            state.unheld_lots = unheld_lots

    return swapped(snapshot, "write", write)
