"""The state of one group on one subject, and the only way in which it changes.

Every message is in exactly one place:

    fresh ── PULL ──► held ── ACK ──► done
      ▲                │ ▲
      │                │ └─ PULL ─┐
      │                ├─ RETRY, LEAVE, EXPIRE ──► stock (handed back, or waiting for its next attempt)
      │                └─ RETRY, EXPIRE after the last attempt, or rejected ──► dying ── DEAD ──► done
      └── at and above the cursor

In a group that is ordered by key a fresh message may be parked instead, behind another of its key (`keys`): it goes to
the stock when that one is done, or goes out behind it, to the same hands. What so followed comes back to where it was.

The same events give the same state, whether they happen or are read again. `now_ns` only sets when leases begin: a
replay passes none, and `begin_life` grants fresh ones.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import ClassVar

from fairway import limits
from fairway.errors import InvariantViolated, invariant
from fairway.groups import attempts as histories
from fairway.groups import config as configs
from fairway.groups import events
from fairway.groups.config import AfterDead, GroupConfig, Mode, Order
from fairway.groups.events import GroupEvent, GroupEventKind
from fairway.groups.keys import Keys
from fairway.groups.lot import Lot, full, gathered, mask_of
from fairway.groups.member import Member, Roster
from fairway.groups.stock import LotTable, UnheldLots, open_in
from fairway.names import ConsumerName


class GroupState:
    """What is known about the group. Read by everyone in this package, changed by `apply`."""

    def __init__(self) -> None:
        self.set_config(GroupConfig(version=0))  # 0: nobody has configured it yet
        self.cursor = 0
        self.is_paused = False
        self.paused: set[ConsumerName] = set()
        self.roster = Roster()
        self.stock = UnheldLots()
        self.dying = LotTable()
        self.held_count = 0  # lots, over all members
        self.held_beside_bytes = 0  # of these lots (`Lot.beside_bytes`)
        self.next_consumer_id = 1
        self.absent_since_ms = 0  # since when there has been no member
        self.lost_count = 0  # messages that retention or rot took before this group was done with them
        self.has_gap = False  # its broadcast consumer has missed messages, and may not have heard of it
        self.keys: Keys | None = None  # of a group by key
        self.is_mixed = False  # what it has in flight is from before it was ordered
        self.is_halted = False  # a group of strict order, behind a dead letter
        self.declined_count = 0  # messages, by a coalescing group
        self.number = 0  # of an ordered group's last response, to whomever: what fences are made of
        # Not events: they belong to this life.
        self.handling: OrderedDict[Lot, Member] = OrderedDict()  # in the order handed out; empty without max_handling
        self.recovered_end = 0  # below it, a PULL of the previous life may be missing
        self.has_holes = False  # events are missing that have rotted: what was handed out there comes again

    @property
    def in_flight(self) -> int:
        """Un-acked ranges: what the group's bound is about."""
        return self.held_count + len(self.stock) + len(self.dying)

    def apply(self, event: GroupEvent, now_ns: int = 0) -> None:
        if event.kind not in self._HANDLERS:
            raise InvariantViolated(f"{event.kind.name} is no event of this kind of group")
        self._HANDLERS[event.kind](self, event, now_ns)

    def begin_life(self, end: int, now_ns: int) -> None:
        """After a replay: fresh full leases for all, and acks from before are believed up to `end`."""
        self.recovered_end = end
        self.has_holes = False
        self.roster.renew_all(now_ns)
        for member in self.roster:
            member.recall(0)
        for _, lot in self.roster.held():
            lot.handed_ns = now_ns
        self._watch_handling()
        self.stock.rebuild_heap()

    # --- configuration and membership

    def set_config(self, config: GroupConfig) -> None:
        self.config = config
        self.is_ordered = config.is_ordered  # asked for every lot

    def _configure(self, event: GroupEvent, now_ns: int) -> None:
        before = self.config
        self.set_config(configs.decode(event.detail))
        self._order(before, event.time_ms)
        if not len(self.roster) and not self.absent_since_ms:
            self.absent_since_ms = event.time_ms
        self._watch_handling()

    def _order(self, before: GroupConfig, time_ms: int) -> None:
        """What a new configuration does to the order: nothing fresh beside what went out by another one."""
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
        """The session of a member has a secret from now on."""
        self.roster.of_id(event.consumer_id).verifier = event.detail

    def _leave(self, event: GroupEvent, now_ns: int) -> None:
        self._part(event, attempts=0)

    def _expire(self, event: GroupEvent, now_ns: int) -> None:
        if not event.attempt:
            self._part(event, attempts=1)
            return
        taken = self._take(event)
        reason = events.HELD_TOO_LONG.encode()
        self._note(taken, event.time_ms, self.roster.name_of(event.consumer_id), reason)
        self._fail(taken, taken.attempt, attempts=1, due_ms=0, reason=reason)

    def _part(self, event: GroupEvent, attempts: int) -> None:
        """A member goes; what it holds is anybody's at once."""
        member = self.roster.remove(event.consumer_id)
        reason = events.LEASE_ENDED.encode()
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
        elif self.keys is None or (first, event.attempt) in self.stock:
            lot = self.stock.take((first, event.attempt), event.ranges)
        else:
            self.keys.follow(event.ranges)
            lot = Lot(first, mask_of(event.ranges, first), event.attempt)
        if self.has_holes and self.roster.name_of(event.consumer_id) is None:
            if self.config.mode is not Mode.AT_MOST_ONCE:
                self._fail(lot, lot.attempt, attempts=0, due_ms=0)  # nobody knows who has it, so anybody may
            return
        member = self.roster.of_id(event.consumer_id)
        self.has_gap = False  # whoever pulls has had the answer to its JOIN
        lot.number = events.number_of(event)
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
        """What was handed out up to there, as a PULL said that has rotted."""
        while self.cursor < end:
            count = min(end - self.cursor, self.config.lot_messages_max)
            self.stock.add(full(self.cursor, count, 1))
            self.cursor += count

    def _pull_by_key(self, keys: Keys, event: GroupEvent) -> Lot:
        """Some may have been parked before it, and in between."""
        keys.hand_out(event.ranges, events.keys_of(event))
        last, count = event.ranges[-1]
        self.cursor = last + count
        return Lot(event.lot, mask_of(event.ranges, event.lot), event.attempt)

    def _park(self, event: GroupEvent, now_ns: int) -> None:
        """Behind others of their keys, some of which went out just now."""
        invariant(self.keys is not None, "only a group by key parks messages")
        if self.keys is not None:
            self._free(self.keys.park(event.ranges, events.keys_of(event)), event.time_ms)
        self.cursor = max(self.cursor, event.lot)

    def _decline(self, event: GroupEvent, now_ns: int) -> None:
        """Others of their keys do what they ask for."""
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
            self.stock.take((event.lot, event.attempt), event.ranges)
        elif (event.lot, event.attempt) in self.roster.of_id(event.consumer_id).lots:
            self._close(event)
        else:
            self._believe(event)
        self._count_lost(event)
        if self.keys is not None:
            self._free(self.keys.done(event.ranges), event.time_ms)

    def _retry(self, event: GroupEvent, now_ns: int) -> None:
        taken = self._take(event)
        if event.due_ms == events.REJECTED:
            self._note(taken, event.time_ms, self.roster.name_of(event.consumer_id), event.detail)
            self._kill(taken, event.detail)
        elif event.due_ms == events.RELEASED or event.detail == events.UNSURE:
            self._fail(taken, event.attempt, attempts=0, due_ms=event.due_ms)
        else:
            self._note(taken, event.time_ms, self.roster.name_of(event.consumer_id), event.detail)
            self._fail(taken, event.attempt, attempts=1, due_ms=event.due_ms, reason=event.detail, is_said=True)

    def _dead(self, event: GroupEvent, now_ns: int) -> None:
        """Harmless when repeated: what is not dying any more (a seek, a second DEAD) is left alone."""
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
        """Whether a dead letter halts all of it."""
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
        """Retention takes what was never handed out."""
        invariant(self.keys is not None, "only a group by key has parked messages")
        if self.keys is not None:
            self.keys.unpark(event.ranges)
        self._count_lost(event)

    def _count_lost(self, event: GroupEvent) -> None:
        if event.detail == events.LOST:
            self.lost_count += sum(count for _, count in event.ranges)

    def _forget_all(self) -> None:
        for member in self.roster:
            member.forget()
        self.stock.clear()
        self.dying.clear()
        self.handling.clear()
        self.held_count = self.held_beside_bytes = 0
        self.recovered_end = 0  # what is acked from before the seek must not move the cursor
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
        """Messages leave the lot that a member holds: that lot, and their bits in it."""
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
        """Messages leave whoever holds them, or the stock, as a lot of their own."""
        if not event.consumer_id:
            return self.stock.take((event.lot, event.attempt), event.ranges)
        lot, mask = self._close(event)
        return lot.part(mask, lot.attempt)

    def _free(self, sequences: Iterable[int], time_ms: int) -> None:
        """They were parked, and are the first of their keys now. Those whose keys rest wait on."""
        keys = self.keys
        ready = sequences
        if keys is not None and keys.resting:
            ready = []
            for sequence in sequences:
                due_ms = keys.rests_until(keys.key_of(sequence), time_ms)
                if due_ms:
                    self.stock.add(Lot(sequence, 1, 1, due_ms))
                else:
                    ready.append(sequence)
        for lot in gathered(ready):
            self.stock.gather(lot)

    def begun(self, lot: Lot) -> int:
        """The bits of messages that whoever holds the lot may have begun: not of those that follow others there."""
        mask = lot.mask
        if self.keys is not None and lot.attempt == 1:
            for sequence in self.keys.followers(lot.ranges):
                mask ^= 1 << sequence - lot.base
        return mask

    def _note(self, lot: Lot, time_ms: int, consumer: ConsumerName | None, reason: bytes) -> None:
        """Keep a failed attempt with its lot. Only lots in flight have a history, and the parts of a lot share one:
        so a group never has more histories than `HISTORY_LOTS_MAX`."""
        if self.in_flight < limits.HISTORY_LOTS_MAX:
            failed = histories.failed(lot.attempt, time_ms, consumer or "", reason)
            lot.history = histories.added(lot.history, failed)

    def _fail(
        self, lot: Lot, attempt: int, attempts: int, due_ms: int, reason: bytes = b"", *, is_said: bool = False
    ) -> None:
        """Nobody holds it now: it waits for its next attempt, or has had its last. What was not begun is parked again,
        unless its consumer has said that it was."""
        mask = lot.mask if is_said else self.begun(lot)
        if self.keys is not None and mask != lot.mask:
            self.keys.park_again(self.keys.followers(lot.ranges))
        if not mask:
            return
        if attempts and attempt >= self.config.attempts_max:
            self._kill(lot.part(mask, attempt), reason)
            return
        part = lot.part(mask, attempt + attempts, due_ms)
        self.stock.add(part)
        if self.keys is not None:
            self.keys.hold_back(part.ranges)

    def _kill(self, lot: Lot, reason: bytes) -> None:
        """The next life may have to say why."""
        lot.reason = reason
        self.dying.add(lot)

    def _believe(self, event: GroupEvent) -> None:
        """An ack for what went out in a PULL that a crash took: nobody holds it, so far as is known.

        The cursor moves to the highest sequence heard of. What lies below it may be with somebody, as this was: it is
        handed out after one lease.
        """
        due_ms = event.time_ms + self.config.lease_ms
        for first, count in event.ranges:
            for lot in self.stock.touching(first, count):
                if lot.attempt == event.attempt:
                    part = lot.part(open_in(lot, first, count), lot.attempt)
                    self.stock.take(lot.name, part.ranges)
            if first + count > self.cursor:
                for orphan in range(self.cursor, first, limits.LOT_MESSAGES_MAX):
                    lot = full(orphan, min(limits.LOT_MESSAGES_MAX, first - orphan), attempt=1)
                    self.stock.add(lot.part(lot.mask, 1, due_ms))
                self.cursor = first + count

    def _watch_handling(self) -> None:
        self.handling.clear()
        if self.config.max_handling_ms is not None:
            held = sorted(self.roster.held(), key=lambda pair: pair[1].handed_ns)
            self.handling.update((lot, member) for member, lot in held)

    _HANDLERS: ClassVar[dict[GroupEventKind, Callable[[GroupState, GroupEvent, int], None]]] = {
        GroupEventKind.GROUP_CONFIG: _configure,
        GroupEventKind.JOIN: _join,
        GroupEventKind.VERIFIER: _verify,
        GroupEventKind.LEAVE: _leave,
        GroupEventKind.EXPIRE: _expire,
        GroupEventKind.PULL: _pull,
        GroupEventKind.ACK: _ack,
        GroupEventKind.RETRY: _retry,
        GroupEventKind.DEAD: _dead,
        GroupEventKind.CURSOR: _move,
        GroupEventKind.PAUSE: _pause,
        GroupEventKind.PARK: _park,
        GroupEventKind.DECLINE: _decline,
        GroupEventKind.GO_ON: _go_on,
    }
