"""The state of one group on one subject, and `apply`, which changes the state by events.

Every message is in exactly one place:

    fresh ── PULL ──► held ── ACK ──► done
      ▲                │ ▲
      │                │ └─ PULL ─┐
      │                ├─ RETRY, LEAVE, EXPIRE ──► unheld (handed back, or waiting for its next attempt)
      │                └─ RETRY, EXPIRE after the last attempt, or rejected ──► dying ── DEAD ──► done
      └── at and above the cursor

In a group ordered by key a fresh message may be parked instead, behind another of its key (`keys`). A parked message
becomes unheld when the one before it is done, or goes out behind that one, to the same consumer. If a message that went
out behind another comes back, it is parked again.

The same events give the same state, in operation and in a replay. `now_ns` only sets when leases begin: a replay passes
none, and `begin_life` grants fresh leases.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import ClassVar

from fairway import group_events, limits
from fairway.errors import InvariantViolated, invariant
from fairway.group_events import ActionKind, GroupEvent
from fairway.groups import attempts as histories
from fairway.groups import config as configs
from fairway.groups.config import AfterDead, GroupConfig, Mode, Order
from fairway.groups.keys import Keys
from fairway.groups.lots import Lot, LotTable, UnheldLots, full, gathered, mask_of, open_in
from fairway.groups.members import Member, Roster
from fairway.names import ConsumerName


class GroupState:
    """The state of a group. Only `apply` changes what the log must know; requests renew leases and note arrivals."""

    def __init__(self) -> None:
        self.set_config(GroupConfig(version=0))  # 0: not configured yet
        self.cursor = 0
        self.is_paused = False
        self.paused: set[ConsumerName] = set()
        self.roster = Roster()
        self.unheld_lots = UnheldLots()
        self.dying = LotTable()
        self.held_count = 0  # lots, over all members
        self.held_beside_bytes = 0  # of these lots (`Lot.beside_bytes`)
        self.next_consumer_id = 1
        self.absent_since_ms = 0  # since when there has been no member
        self.lost_count = 0  # messages that retention or rot took before the group had handled them
        self.has_gap = False  # its broadcast consumer has missed messages, and may not know
        self.keys: Keys | None = None  # of a group by key
        self.is_mixed = False  # its messages in flight are from before it was ordered
        self.is_halted = False  # a group of strict order, behind a dead letter
        self.declined_count = 0  # messages, by a coalescing group
        self.number = 0  # of an ordered group's last response to any member: the source of fences
        # Not in the snapshot: these do not survive a restart.
        self.handling: OrderedDict[Lot, Member] = OrderedDict()  # in the order handed out; empty without max_handling
        self.recovered_end = 0  # below this, a PULL from before the restart may be missing
        self.has_holes = False  # events have rotted: the messages that they handed out come again

    @property
    def in_flight(self) -> int:
        """Unacked lots: the number that the group's bound limits."""
        return self.held_count + len(self.unheld_lots) + len(self.dying)

    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        if event.kind not in self._HANDLERS:
            raise InvariantViolated(f"{event.kind.name} is no event of this kind of group")
        self._HANDLERS[event.kind](self, event, now_ns)

    def begin_life(self, end: int, now_ns: int) -> None:
        """After a replay: grant full leases to all, and believe acks of earlier handouts up to `end`."""
        self.recovered_end = end
        self.has_holes = False
        self.roster.renew_all(now_ns)
        for member in self.roster:
            member.recall(0)
        for _, lot in self.roster.held():
            lot.handed_ns = now_ns
        self._watch_handling()
        self.unheld_lots.rebuild_heap()

    # --- configuration and membership

    def set_config(self, config: GroupConfig) -> None:
        self.config = config
        self.is_ordered = config.is_ordered  # cached, because every lot asks

    def _configure(self, event: GroupEvent, now_ns: int) -> None:
        before = self.config
        self.set_config(configs.decode(event.detail))
        self._order(before, event.time_ms)
        if not len(self.roster) and not self.absent_since_ms:
            self.absent_since_ms = event.time_ms
        self._watch_handling()

    def _order(self, before: GroupConfig, time_ms: int) -> None:
        """Apply a new order: no fresh messages while messages are out that went out under another order."""
        if (self.config.order, self.config.is_keyed) != (before.order, before.is_keyed):
            self.is_mixed = self.config.is_ordered and self.in_flight > 0
        self.is_halted = self.is_halted and self._halts
        keys = self.keys
        if self.config.is_keyed and keys is None:
            self.keys = Keys()
        elif keys is not None and not self.config.is_keyed:
            self.keys = None
            self._free(keys.parked(), time_ms)
            return
        if keys is not None and not self.config.rate_per_key:
            keys.resting.clear()
        if keys is not None and self.config.after_dead is AfterDead.GO_ON:
            self._free(keys.go_on(0), time_ms)

    def _join(self, event: GroupEvent, now_ns: int) -> None:
        name = ConsumerName(event.detail.decode())
        member = self.roster.get(name)
        if member is None:
            self.roster.add(Member(event.consumer_id, name, event.lot), now_ns)
            self.next_consumer_id = event.consumer_id + 1
            self.has_gap = self.has_gap or bool(event.attempt)
        else:
            member.version = event.lot

    def _verify(self, event: GroupEvent, now_ns: int) -> None:
        """Store the verifier of a member's session secret."""
        self.roster.of_id(event.consumer_id).verifier = event.detail

    def _leave(self, event: GroupEvent, now_ns: int) -> None:
        self._part(event, attempts=0)

    def _expire(self, event: GroupEvent, now_ns: int) -> None:
        if not event.attempt:
            self._part(event, attempts=1)
            return
        taken = self._take(event)
        reason = group_events.HELD_TOO_LONG.encode()
        self._note(taken, event.time_ms, self.roster.name_of(event.consumer_id), reason)
        self._fail(taken, taken.attempt, attempts=1, due_ms=0, reason=reason)

    def _part(self, event: GroupEvent, attempts: int) -> None:
        """Remove a member; its lots are unheld at once."""
        member = self.roster.remove(event.consumer_id)
        reason = group_events.LEASE_ENDED.encode()
        for lot in member.lots.values():
            self.held_count -= 1
            self.held_beside_bytes -= lot.beside_bytes
            self.handling.pop(lot, None)
            if attempts:
                self._note(lot, event.time_ms, member.name, reason)
            self._fail(lot, lot.attempt, attempts, due_ms=0, reason=reason)
        if not len(self.roster):
            self.absent_since_ms = event.time_ms

    # --- handing out and settling

    def _pull(self, event: GroupEvent, now_ns: int) -> None:
        first, count = event.ranges[0]
        if self.has_holes and self.keys is None:
            self._take_back(first)
        if first >= self.cursor:
            if self.keys is None:
                invariant(first == self.cursor and len(event.ranges) == 1, "a fresh lot begins at the cursor")
                lot = full(first, count, event.attempt)
                self.cursor = first + count
            else:
                lot = self._pull_by_key(self.keys, event)
            self.is_mixed = False
        elif self.keys is None or (first, event.attempt) in self.unheld_lots:
            lot = self.unheld_lots.take((first, event.attempt), event.ranges)
        else:
            self.keys.follow(event.ranges)
            lot = Lot(first, mask_of(event.ranges, first), event.attempt)
        if self.has_holes and self.roster.name_of(event.consumer_id) is None:
            if self.config.mode is not Mode.AT_MOST_ONCE:
                self._fail(lot, lot.attempt, attempts=0, due_ms=0)  # its holder is unknown, so any member may get it
            return
        member = self.roster.of_id(event.consumer_id)
        self.has_gap = False  # a member that pulls has received the answer to its JOIN
        lot.number = group_events.number_of(event)
        if self.is_ordered:
            self.number = max(self.number, lot.number)
            if self.config.rate_per_key and self.keys is not None:
                until_ms = event.time_ms + self.config.key_rest_ms
                self.keys.rest(sorted(self.keys.keys_of(event.ranges)), until_ms, event.time_ms)
        if self.config.mode is Mode.AT_MOST_ONCE:
            member.number = max(member.number, lot.number)
            return
        lot.handed_ns = now_ns
        rest = member.hold(lot)
        if rest is None:
            self.held_count += 1
        else:
            self.held_beside_bytes -= rest.beside_bytes
            self.handling.pop(rest, None)
        self.held_beside_bytes += lot.beside_bytes
        if self.config.max_handling_ms is not None:
            self.handling[lot] = member

    def _take_back(self, end: int) -> None:
        """Make lots of the messages up to `end`: their PULL has rotted."""
        while self.cursor < end:
            count = min(end - self.cursor, self.config.lot_messages_max)
            self.unheld_lots.add(full(self.cursor, count, 1))
            self.cursor += count

    def _pull_by_key(self, keys: Keys, event: GroupEvent) -> Lot:
        """Hand out fresh messages, of which some before and in between may have been parked."""
        keys.hand_out(event.ranges, group_events.keys_of(event))
        last, count = event.ranges[-1]
        self.cursor = last + count
        return Lot(event.lot, mask_of(event.ranges, event.lot), event.attempt)

    def _park(self, event: GroupEvent, now_ns: int) -> None:
        """Park messages behind others of their keys, some of which just went out."""
        invariant(self.keys is not None, "only a group by key parks messages")
        if self.keys is not None:
            self._free(self.keys.park(event.ranges, group_events.keys_of(event)), event.time_ms)
        self.cursor = max(self.cursor, event.lot)

    def _decline(self, event: GroupEvent, now_ns: int) -> None:
        """Decline messages: other messages of their keys do what they ask for."""
        invariant(self.keys is not None, "only a group by key declines messages")
        if self.keys is not None:
            self.keys.unpark(event.ranges)
        self.declined_count += sum(count for _, count in event.ranges)
        self.cursor = max(self.cursor, event.lot)

    def _go_on(self, event: GroupEvent, now_ns: int) -> None:
        self.is_halted = False
        if self.keys is not None:
            self._free(self.keys.go_on(event.lot), event.time_ms)

    def _ack(self, event: GroupEvent, now_ns: int) -> None:
        if not event.consumer_id:
            self.unheld_lots.take((event.lot, event.attempt), event.ranges)
        elif (event.lot, event.attempt) in self.roster.of_id(event.consumer_id).lots:
            self._close(event)
        else:
            self._believe(event)
        self._count_lost(event)
        if self.keys is not None:
            self._free(self.keys.done(event.ranges), event.time_ms)

    def _retry(self, event: GroupEvent, now_ns: int) -> None:
        taken = self._take(event)
        if event.due_ms == group_events.REJECTED:
            self._note(taken, event.time_ms, self.roster.name_of(event.consumer_id), event.detail)
            self._kill(taken, event.detail)
        elif event.due_ms == group_events.RELEASED or event.detail == group_events.UNSURE:
            self._fail(taken, event.attempt, attempts=0, due_ms=event.due_ms)
        else:
            self._note(taken, event.time_ms, self.roster.name_of(event.consumer_id), event.detail)
            self._fail(taken, event.attempt, attempts=1, due_ms=event.due_ms, reason=event.detail, is_said=True)

    def _dead(self, event: GroupEvent, now_ns: int) -> None:
        """Harmless when repeated: messages that are not dying any more (a seek, a second DEAD) are left alone."""
        name = event.lot, event.attempt
        if name in self.dying:
            self.dying.take(name, event.ranges)
            self._count_lost(event)
            if self.keys is not None:
                halts = self.config.after_dead is AfterDead.HALT
                self._free(self.keys.done(event.ranges, halts=halts), event.time_ms)
            self.is_halted = self.is_halted or self._halts

    @property
    def _halts(self) -> bool:
        """Whether a dead letter halts the whole group."""
        return self.config.order is Order.STRICT and self.config.after_dead is AfterDead.HALT

    # --- the cursor

    def _move(self, event: GroupEvent, now_ns: int) -> None:
        if event.ranges:
            first, count = event.ranges[0]
            if first < self.cursor:
                self._lose_parked(event)
                return
            invariant(first == self.cursor and first + count == event.lot, "a skip begins at the cursor")
            self._count_lost(event)
        else:
            self._forget_all()
        self.cursor = event.lot

    def _lose_parked(self, event: GroupEvent) -> None:
        """Retention takes messages that were never handed out."""
        invariant(self.keys is not None, "only a group by key has parked messages")
        if self.keys is not None:
            self.keys.unpark(event.ranges)
        self._count_lost(event)

    def _count_lost(self, event: GroupEvent) -> None:
        if event.detail == group_events.LOST:
            self.lost_count += sum(count for _, count in event.ranges)

    def _forget_all(self) -> None:
        for member in self.roster:
            member.forget()
        self.unheld_lots.clear()
        self.dying.clear()
        self.handling.clear()
        self.held_count = self.held_beside_bytes = 0
        self.recovered_end = 0  # acks from before the seek must not move the cursor
        self.is_mixed = self.is_halted = False
        if self.keys is not None:
            self.keys.clear()

    def _pause(self, event: GroupEvent, now_ns: int) -> None:
        is_paused = bool(event.lot)
        if not event.detail:
            self.is_paused = is_paused
        elif is_paused:
            self.paused.add(ConsumerName(event.detail.decode()))
        else:
            self.paused.discard(ConsumerName(event.detail.decode()))

    # --- parts

    def _close(self, event: GroupEvent) -> tuple[Lot, int]:
        """Close messages in the lot that a member holds; returns that lot, and their bits in it."""
        member = self.roster.of_id(event.consumer_id)
        lot = member.lots[event.lot, event.attempt]
        mask = mask_of(event.ranges, lot.base)
        self.held_beside_bytes -= lot.beside_bytes
        member.close(lot, mask)
        if lot.mask:
            self.held_beside_bytes += lot.beside_bytes
        else:
            self.held_count -= 1
            self.handling.pop(lot, None)
        return lot, mask

    def _take(self, event: GroupEvent) -> Lot:
        """Take messages from their holder, or from the unheld lots, as a lot of their own."""
        if not event.consumer_id:
            return self.unheld_lots.take((event.lot, event.attempt), event.ranges)
        lot, mask = self._close(event)
        return lot.part(mask, lot.attempt)

    def _free(self, sequences: Iterable[int], time_ms: int) -> None:
        """Parked messages become the first of their keys. Those whose keys rest wait on."""
        keys = self.keys
        ready = sequences
        if keys is not None and keys.resting:
            ready = []
            for sequence in sequences:
                due_ms = keys.rests_until(keys.key_of(sequence), time_ms)
                if due_ms:
                    self.unheld_lots.add(Lot(sequence, 1, 1, due_ms))
                else:
                    ready.append(sequence)
        for lot in gathered(ready):
            self.unheld_lots.gather(lot)

    def begun(self, lot: Lot) -> int:
        """The bits of messages that the lot's holder may have begun: not of messages that follow others there."""
        mask = lot.mask
        if self.keys is not None and lot.attempt == 1:
            for sequence in self.keys.followers(lot.ranges):
                mask ^= 1 << sequence - lot.base
        return mask

    def _note(self, lot: Lot, time_ms: int, consumer: ConsumerName | None, reason: bytes) -> None:
        """Keep a failed attempt with its lot. Only lots in flight have a history, and the parts of a lot share one. So
        a group never has more histories than `HISTORY_LOTS_MAX`."""
        if self.in_flight < limits.HISTORY_LOTS_MAX:
            failed = histories.failed(lot.attempt, time_ms, consumer or "", reason)
            lot.history = histories.added(lot.history, failed)

    def _fail(
        self, lot: Lot, attempt: int, attempts: int, due_ms: int, reason: bytes = b"", *, is_said: bool = False
    ) -> None:
        """A lot has failed: it waits for its next attempt, or has had its last. Unbegun messages are parked again,
        unless their consumer has settled them itself (`is_said`)."""
        mask = lot.mask if is_said else self.begun(lot)
        if self.keys is not None and mask != lot.mask:
            self.keys.park_again(self.keys.followers(lot.ranges))
        if not mask:
            return
        if attempts and attempt >= self.config.attempts_max:
            self._kill(lot.part(mask, attempt), reason)
            return
        part = lot.part(mask, attempt + attempts, due_ms)
        self.unheld_lots.add(part)
        if self.keys is not None:
            self.keys.hold_back(part.ranges)

    def _kill(self, lot: Lot, reason: bytes) -> None:
        """Keep the reason with the lot, because a later process may have to write it."""
        lot.reason = reason
        self.dying.add(lot)

    def _believe(self, event: GroupEvent) -> None:
        """Apply an ack for messages of a lost PULL: as far as is known, nobody holds them.

        The cursor moves behind the highest sequence of the ack. Messages below it may be with consumers too, so they
        are handed out after one lease.
        """
        due_ms = event.time_ms + self.config.lease_ms
        for first, count in event.ranges:
            for lot in self.unheld_lots.touching(first, count):
                if lot.attempt == event.attempt:
                    part = lot.part(open_in(lot, first, count), lot.attempt)
                    self.unheld_lots.take(lot.name, part.ranges)
            if first + count > self.cursor:
                for orphan in range(self.cursor, first, limits.LOT_MESSAGES_MAX):
                    lot = full(orphan, min(limits.LOT_MESSAGES_MAX, first - orphan), attempt=1)
                    self.unheld_lots.add(lot.part(lot.mask, 1, due_ms))
                self.cursor = first + count

    def _watch_handling(self) -> None:
        self.handling.clear()
        if self.config.max_handling_ms is not None:
            held = sorted(self.roster.held(), key=lambda pair: pair[1].handed_ns)
            self.handling.update((lot, member) for member, lot in held)

    _HANDLERS: ClassVar[dict[ActionKind, Callable[[GroupState, GroupEvent, int], None]]] = {
        ActionKind.GROUP_CONFIG: _configure,
        ActionKind.JOIN: _join,
        ActionKind.VERIFIER: _verify,
        ActionKind.LEAVE: _leave,
        ActionKind.EXPIRE: _expire,
        ActionKind.PULL: _pull,
        ActionKind.ACK: _ack,
        ActionKind.RETRY: _retry,
        ActionKind.DEAD: _dead,
        ActionKind.CURSOR: _move,
        ActionKind.PAUSE: _pause,
        ActionKind.PARK: _park,
        ActionKind.DECLINE: _decline,
        ActionKind.GO_ON: _go_on,
    }
