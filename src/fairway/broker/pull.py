"""PULL: hands messages to a consumer, from the subject and from the group's inbox in turns.

A pull asks the group's state machine for a range, reads the range, and only then carries the decision out. If the bytes
turn out to be missing, nothing has been handed out. The broker answers before the PULL event is durable, unless the
state machine demands durability first. After a crash the group accepts acks of lots whose PULL event is lost.

A group that keeps the order of keys needs the keys of fresh messages. A batch stores key hashes in a section that is
never compressed, so the broker does not decompress the batch. But the broker has to read the batch before it knows
whether a message may go out. `KeyFinder` keeps the keys it has read until the cursor has passed them. A pull looks at a
few messages, and the next pull goes on from there.

`GroupRates` bounds how fast a group gets messages, with a token bucket per group and one token per message. A pull that
finds the bucket empty waits like a pull that finds no message, and the scheduler wakes it when the next token is due.
After a restart a bucket is empty, so a group never exceeds its rate, however often the broker restarts.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import NamedTuple

from fairway import limits
from fairway.batch import layout
from fairway.broker import response_bounds
from fairway.broker.group_coordinator import GroupCoordinator, refusal
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.message_reader import SKIPPED_BATCHES_MAX, MessageReader
from fairway.group_events import ActionKind
from fairway.groups import GroupOutcome, GroupStateMachine, Handout, Mode, PullDecision, Range
from fairway.groups import SettleVerdict as Settlement
from fairway.names import ConsumerName
from fairway.protocol import ControlMessage, messages
from fairway.protocol.messages import Pull
from fairway.replication.copies import CopyStatus
from fairway.scheduling import Actor, TurnResult
from fairway.serving.rates import TokenBucket
from fairway.serving.requests import ServedRequest
from fairway.storage.message_log import StoredBatch

EMPTY = messages.Pulled(0, [], [])
# a group passes over so many messages without an event; no more than one read passes over
SKIPPED_MESSAGES_MAX = SKIPPED_BATCHES_MAX
# tries of one pull: it decides again when its choice is unreadable or too large; each try leaves some out
_TRIES_MAX = 8
_RUN_CUT = 4  # small enough that runs end before the tries do: the heads of the runs alone are the choice that fits
_PASSED = frozenset({ActionKind.PARK, ActionKind.DECLINE})
_ROOMY_FRAME_BYTES = 128 * limits.KIB  # a frame of this size has room beside the batches that were chosen by their size


WINDOW_MESSAGES = 4_096  # read together: the largest batch; 32 KB in memory for each such group
LOOK_MESSAGES = 512  # a pull looks at least at so many, and at four times as many as it asks for: some cannot go out
_WINDOW_BYTES = 512  # beside the keys
_KEY_TRIES_MAX = 4  # where a try meets damage, the next try steps over it

_NS = 1_000_000_000
_SLACK_S = 0.001  # uvloop rounds to milliseconds: without the slack a timer would fire early


class _KeyWindow(NamedTuple):
    """The keys of consecutive messages."""

    first: int
    keys: array[int]
    config_version: int  # the configuration whose filter chose the messages

    @property
    def held_bytes(self) -> int:
        return _WINDOW_BYTES + self.keys.itemsize * len(self.keys)


class _Fresh(NamedTuple):
    """The messages that may be handed out for the first time, and their keys. No range: nothing."""

    range: Range | None
    keys: Sequence[int] = ()


class KeyFinder:
    """Looks up keys for all groups of a broker."""

    def __init__(self, reader: MessageReader) -> None:
        self._reader = reader
        self.bytes_max = limits.KEY_WINDOWS_BYTES_MAX  # of all windows; beyond it the least recently used window goes
        self.held_bytes = 0
        self._windows: OrderedDict[int, _KeyWindow] = OrderedDict()  # by the group's number; least recently used first

    def fresh(self, actor: Actor, source: GroupHost, messages_max: int, bytes_max: int, look_max: int) -> _Fresh | None:
        """The group's next fresh messages, at most `look_max`. None: a fetch is under way."""
        look = min(max(4 * messages_max, LOOK_MESSAGES), look_max)
        found = _within(self._windows.get(source.id), source, look)
        if found is not None:
            self._windows.move_to_end(source.id)
        for _ in range(_KEY_TRIES_MAX if found is None else 0):
            first, state_machine = source.next_fresh, source.state_machine
            fresh = self._reader.fresh(source.subject_id, first, state_machine.config, WINDOW_MESSAGES, bytes_max)
            if fresh is None or not fresh[1]:
                return _Fresh(fresh)
            lot = Handout(fresh[0], 1, (fresh,))
            batches = self._reader.batches(actor, source.subject_id, [lot])
            if batches is None:
                return None
            if not response_bounds.missing([lot], batches):
                window = _KeyWindow(fresh[0], _keys_of(batches, fresh), state_machine.config.version)
                self._keep(source.id, window)
                keys = window.keys[:look].tolist()
                return _Fresh((fresh[0], len(keys)), keys)
        return found or _Fresh(None)

    def forget(self, group_id: int) -> None:
        """Drop the group's window, which may be wrong."""
        window = self._windows.pop(group_id, None)
        if window is not None:
            self.held_bytes -= window.held_bytes

    def _keep(self, group_id: int, window: _KeyWindow) -> None:
        self.forget(group_id)
        self._windows[group_id] = window
        self.held_bytes += window.held_bytes
        while self.held_bytes > self.bytes_max:
            self.forget(next(iter(self._windows)))


def _within(window: _KeyWindow | None, source: GroupHost, look: int) -> _Fresh | None:
    """The rest of the window; None: nothing is left, or the window is for another place or another filter."""
    if window is None or window.config_version != source.state_machine.config.version:
        return None
    offset = source.next_fresh - window.first
    if not 0 <= offset < len(window.keys):
        return None
    left = window.keys[offset : offset + look].tolist()
    return _Fresh((window.first + offset, len(left)), left)


def _keys_of(batches: Sequence[StoredBatch], wanted: Range) -> array[int]:
    """The keys of the messages in that range, which the batches hold without a gap."""
    found = array("Q")
    first, end = wanted[0], wanted[0] + wanted[1]
    for stored in batches:
        header = layout.peek(stored.data)
        begin = stored.entry.first_sequence
        low, high = max(first - begin, 0), min(end - begin, header.count)
        hashes = layout.key_hashes(stored.data, header)
        found.frombytes(bytes(8 * (high - low)) if hashes is None else hashes[low:high].tobytes())
    return found


class GroupRates:
    """The token buckets of all groups of a broker. A message from a group's inbox takes a token of the group, too."""

    def __init__(self, coordinator: GroupCoordinator) -> None:
        self._coordinator = coordinator

    def messages_max(self, host: GroupHost) -> int | None:
        """How many messages the group may get now; None: no limit. With no token left, sets a timer that wakes the
        group's pulls when the next token is due."""
        bucket = self._bucket(host)
        if bucket is None:
            return None
        now_ns = self._coordinator.clock.monotonic_ns()
        tokens = bucket.tokens(now_ns)
        if tokens < 1 and bucket.alarm_ns <= now_ns:
            wait_ns = bucket.wait_ns()
            bucket.alarm_ns = now_ns + wait_ns
            self._coordinator.call_later(wait_ns / _NS + _SLACK_S, self._coordinator.scheduler.wake, host.key)
        return tokens

    def note_handed_out(self, host: GroupHost, count: int) -> None:
        bucket = self._bucket(host)
        if bucket is not None:
            bucket.take(count)

    def _bucket(self, host: GroupHost) -> TokenBucket | None:
        config = host.state_machine.config
        bucket = host.bucket
        if not config.rate_per_s:
            host.bucket = None
            return None
        if bucket is None or (bucket.rate_per_s, bucket.most) != (config.rate_per_s, config.burst_max):
            is_full = bucket is None and not host.is_revived
            now_ns = self._coordinator.clock.monotonic_ns()
            bucket = host.bucket = TokenBucket(config.rate_per_s, config.burst_max, now_ns, is_full=is_full)
        return bucket


class PullProcessor:
    """Handles PULL for the consumers of all groups."""

    def __init__(
        self,
        coordinator: GroupCoordinator,
        inboxes: Inboxes,
        reader: MessageReader,
        copy_status: CopyStatus | None = None,
    ) -> None:
        """`copy_status`: of one copy of several."""
        self._coordinator = coordinator
        self._copy_status = copy_status
        self._inboxes = inboxes
        self._reader = reader
        self.keys = KeyFinder(reader)
        self._pace = GroupRates(coordinator)
        self.pulled_messages = 0

    def pull(
        self, request: ServedRequest[ControlMessage], message: Pull, host: GroupHost, name: ConsumerName, actor: Actor
    ) -> TurnResult:
        """Answer the pull. WAIT: there is nothing now, or the group's rate allows nothing."""
        verdict = TurnResult.WAIT
        paced_max = self._pace.messages_max(host) if host.state_machine.config.rate_per_s else None
        is_shut = paced_max == 0 or self._coordinator.is_switched_off(host)
        if is_shut and self._may_wait(host, name, message.arrived):
            return verdict
        for source in self._inboxes.sources(host, name, message.arrived):
            verdict = self._pull_from(source, request, message, name, actor, paced_max)
            if verdict is not TurnResult.WAIT:
                break
        return verdict

    def _may_wait(self, host: GroupHost, name: ConsumerName, arrived: int) -> bool:
        """Renew the lease. Whether the consumer may wait: it is a member, and every response has arrived."""
        beat = host.state_machine.heartbeat(name, arrived=arrived, now_ns=self._coordinator.clock.monotonic_ns())
        if beat.outcome is not GroupOutcome.DONE:
            return False
        self._inboxes.renew(host, name, arrived)
        return not any(each.state_machine.has_unarrived(name) for each in host.with_inbox)

    def _pull_from(
        self,
        source: GroupHost,
        request: ServedRequest[ControlMessage],
        message: Pull,
        name: ConsumerName,
        actor: Actor,
        paced_max: int | None,
    ) -> TurnResult:
        if not self._reader.is_indexed(actor, source.subject_id, source.next_fresh):
            return TurnResult.AGAIN
        frame_bytes_max = request.session.frame_bytes_max
        # at most a second's worth, where a redrive has a rate
        messages_max = min(message.messages_max, source.rate_per_s or message.messages_max)
        if paced_max is not None:
            # where the rate allows none, the broker still repeats a response
            messages_max = min(messages_max, max(paced_max, 1))
        bytes_left = self._coordinator.memory.room(source, request.session)
        asked_max, run_max = messages_max, message.run_max
        for _ in range(_TRIES_MAX):
            pulled = self._decide(source, message, name, messages_max, actor, run_max, bytes_left)
            if pulled is None:
                return TurnResult.AGAIN
            refused = refusal(pulled)
            if refused is not None:
                self._coordinator.refuse(request, refused)
                return TurnResult.DONE
            if not pulled.lots and any(event.kind in _PASSED for event in pulled.events):
                self._coordinator.carry_out(source, pulled)  # and look behind those that cannot go out
                continue
            if not pulled.lots:
                return self._skip(source, request, pulled)
            fitting_count = self._fitting(source, pulled, message.bytes_max, frame_bytes_max)
            if fitting_count is not None:
                run_max = _shorter(run_max, messages_max, asked_max)
                messages_max = fitting_count
                if pulled.is_again:  # the frame is smaller than the first time: release the rest for other consumers
                    rest = response_bounds.beyond(pulled.lots, fitting_count)
                    self._settle(source, name, Settlement.RELEASE, rest)
                continue
            batches = self._reader.batches(actor, source.subject_id, pulled.lots)
            if batches is None:
                return TurnResult.AGAIN
            absent = response_bounds.missing(pulled.lots, batches)
            is_roomy = frame_bytes_max >= limits.FRAME_BYTES_MAX
            large = [] if absent or is_roomy else response_bounds.too_large(pulled.lots, batches, frame_bytes_max)
            if (absent or large) and self._breaks_runs(source, name, pulled):
                run_max = 1
            elif absent:
                self._leave_out(source, name, absent, pulled)
            elif large:
                messages_max = self._keep_back(source, name, large, pulled, frame_bytes_max) or messages_max
            elif (
                not pulled.is_again  # a repeated response comes as it was: the first time bounded it
                and (raw_count := response_bounds.fitting_raw(pulled.lots, batches, message.bytes_max)) is not None
            ):
                run_max = _shorter(run_max, messages_max, asked_max)
                messages_max = raw_count
            else:
                self._hand_out(request, source, pulled, batches, actor)
                self._reader.rest(actor)
                return TurnResult.DONE
        return TurnResult.AGAIN

    def _breaks_runs(self, source: GroupHost, name: ConsumerName, pulled: PullDecision) -> bool:
        """Whether the choice has runs: several messages of one key. Later messages of a key must not pass one that
        cannot go out, so they stay."""
        behind = [lot for lot in pulled.lots if lot.is_behind]
        if pulled.is_again:
            self._settle(source, name, Settlement.RELEASE, behind)
        return bool(behind)

    def _decide(
        self,
        source: GroupHost,
        message: Pull,
        name: ConsumerName,
        messages_max: int,
        actor: Actor,
        run_max: int,
        bytes_left: int,
    ) -> PullDecision | None:
        """The decision of the state machine. None: the broker is still fetching what the decision needs."""
        state_machine = source.state_machine
        found = self._fresh(source, message, messages_max, actor, bytes_left)
        if found is None:
            return None
        fresh = found.range
        if fresh is not None and fresh[0] > state_machine.cursor:
            self._coordinator.count_lost(source, fresh[0])
        if fresh is not None and not fresh[1] and fresh[0] - state_machine.cursor < SKIPPED_MESSAGES_MAX:
            source.note_skipped(fresh[0])
            fresh = None
        other = source.main or source.inbox
        return state_machine.pull(
            name,
            arrived=message.arrived,
            messages_max=messages_max,
            fresh=fresh,
            now_ns=self._coordinator.clock.monotonic_ns(),
            now_ms=self._coordinator.clock.wall_ms(),
            number_after=0 if other is None else other.state_machine.last_number(name),
            keys=found.keys,
            beside=() if other is None else self._beside(state_machine, other.state_machine, fresh),
            run_max=run_max,
            extends_runs=message.extends_runs,
            bytes_left=bytes_left,
        )

    def _beside(
        self, state_machine: GroupStateMachine, other: GroupStateMachine, fresh: Range | None
    ) -> Collection[int]:
        """Keys that consumers hold from the group's other source: the inbox for the subject, the subject for the
        inbox."""
        if not state_machine.is_ordered or (
            fresh is None and not state_machine.has_ready(self._coordinator.clock.wall_ms())
        ):
            return ()
        return other.keys_in_hand()

    def _fresh(
        self, source: GroupHost, message: Pull, messages_max: int, actor: Actor, bytes_left: int
    ) -> _Fresh | None:
        config = source.state_machine.config
        bytes_max = self._reader.response_bytes(actor, message.bytes_max)
        if config.is_keyed:
            look_max = max(bytes_left // source.state_machine.bytes_per_fresh, limits.GROUP_KEYED_MIN)
            return self.keys.fresh(actor, source, messages_max, bytes_max, look_max)
        return _Fresh(self._reader.fresh(source.subject_id, source.next_fresh, config, max(messages_max, 1), bytes_max))

    def _skip(self, source: GroupHost, request: ServedRequest[ControlMessage], pulled: PullDecision) -> TurnResult:
        """Answer a pull without messages; the choice may have skipped batches, a slice's worth. The rest comes
        later."""
        if not pulled.events:
            return TurnResult.WAIT
        self._coordinator.carry_out(source, pulled)
        if pulled.outcome is not GroupOutcome.EMPTY:
            return TurnResult.WAIT
        if request.wait_until_ns:
            return TurnResult.AGAIN
        request.respond(EMPTY)
        return TurnResult.DONE

    def _fitting(self, source: GroupHost, pulled: PullDecision, bytes_max: int, frame_bytes_max: int) -> int | None:
        """How many messages to ask for instead, where the choice has too many bytes: retries lie far apart."""
        is_fresh = all(lot.first >= source.state_machine.cursor for lot in pulled.lots)  # and so chosen by its size
        if is_fresh and frame_bytes_max >= _ROOMY_FRAME_BYTES and not source.state_machine.config.is_keyed:
            return None
        # a repeated response was within `bytes_max` the first time
        wanted = frame_bytes_max if pulled.is_again else bytes_max
        entries = self._reader.entries(source.subject_id, pulled.lots)
        return response_bounds.fitting(pulled.lots, entries, wanted, frame_bytes_max)

    def _leave_out(self, source: GroupHost, name: ConsumerName, absent: list[Handout], pulled: PullDecision) -> None:
        """Drop the messages that cannot be read: the broker can never hand them out. The next try steps over the fresh
        ones, because their damage is known by then."""
        self.keys.forget(source.id)
        if pulled.is_again:  # readable the first time, but that response has not arrived
            for lot in absent:
                self._coordinator.lose(
                    source, source.state_machine.lose(name, lot, now_ms=self._coordinator.clock.wall_ms())
                )
            return
        for lot in absent:
            hole = self._reader.hole(source.subject_id, *lot.ranges[0])
            whole = lot._replace(ranges=(hole, *lot.ranges[1:]))  # a hole may reach beyond the choice
            lost = [
                part for at, count in whole.ranges for part in self._coordinator.lost_ranges(source, at, at + count)
            ]
            if lost:  # the next try drops the rest of the hole: dropping a part may rename the lot
                whole = whole._replace(ranges=tuple(lost))
            dropped = source.state_machine.drop(whole, is_lost=bool(lost), now_ms=self._coordinator.clock.wall_ms())
            self._coordinator.lose(source, dropped)

    def _keep_back(
        self, source: GroupHost, name: ConsumerName, large: list[Handout], pulled: PullDecision, frame_bytes_max: int
    ) -> int | None:
        """Fail the attempt of messages too large for this consumer's frames: others may try, and dead letter comes
        last. The rest of the choice goes out as a response that has not arrived yet."""
        reason = f"too large for a frame of {frame_bytes_max} bytes"
        if source.state_machine.config.mode is Mode.AT_MOST_ONCE and not pulled.is_again:
            return self._lose(source, large[0], pulled, reason)
        if not pulled.is_again:
            self._coordinator.carry_out(source, pulled)
        self._settle(source, name, Settlement.RETRY, large, reason)
        return None

    def _lose(self, source: GroupHost, large: Handout, pulled: PullDecision, reason: str) -> int | None:
        """Count as lost a message that is too large, in at-most-once mode: a handout settles it, so no attempt could
        fail. Returns how many messages to ask for instead, where others come before it."""
        state_machine, now_ms = source.state_machine, self._coordinator.clock.wall_ms()
        first, count = large.ranges[0]
        before = sum(max(min(first - at, messages), 0) for lot in pulled.lots for at, messages in lot.ranges)
        if first < state_machine.cursor:  # handed out before, under another mode
            self._coordinator.carry_out(source, state_machine.reject(large, reason, now_ms=now_ms))
        elif before:
            return before
        else:
            self._coordinator.carry_out(source, state_machine.skip(first, first + count, is_lost=True, now_ms=now_ms))
        return None

    def _settle(
        self, source: GroupHost, name: ConsumerName, verdict: Settlement, lots: list[Handout], reason: str = ""
    ) -> None:
        """Settle lots in the consumer's name; `Refused` where a bound is reached."""
        for lot in lots:
            now_ms = self._coordinator.clock.wall_ms()
            decision = source.state_machine.settle(
                name, verdict, lot.first, lot.attempt, lot.ranges, now_ms=now_ms, reason=reason
            )
            refused = refusal(decision)
            if refused is not None:
                raise refused
            self._coordinator.carry_out(source, decision)

    def _hand_out(
        self,
        request: ServedRequest[ControlMessage],
        source: GroupHost,
        pulled: PullDecision,
        batches: list[StoredBatch],
        actor: Actor,
    ) -> None:
        self._coordinator.memory.charge(source, request.session)
        written = self._coordinator.carry_out_all([(source, pulled)])
        fence = pulled.number if source.state_machine.is_ordered else 0
        lots = [
            messages.WireLot(
                lot.first, lot.attempt, [messages.SequenceRange(*each) for each in lot.ranges], fence, lot.is_behind
            )
            for lot in pulled.lots
        ]
        attached = [messages.AttachedBatch(each.entry.first_sequence, each.entry.appended_ms) for each in batches]
        leads_ms = None if self._copy_status is None else self._copy_status.leads_ms(request.received_ns)
        answer = messages.Pulled(pulled.number, lots, attached, source.main is not None, leads_ms)
        attachments = [each.data for each in batches]
        count = sum(count for lot in pulled.lots for _, count in lot.ranges)
        actor.charge(size_bytes=sum(map(len, attachments)))
        self.pulled_messages += count
        self._inboxes.note_handed_out(source, count)
        if not pulled.is_again and source.state_machine.config.rate_per_s:
            self._pace.note_handed_out(source.main or source, count)
        if pulled.is_durable_first:
            self._coordinator.when_durable(written, lambda outcome: request.settle(outcome, answer, attachments))
        else:
            request.respond(answer, attachments)


def _shorter(run_max: int, messages_max: int, asked_max: int) -> int:
    """The next bound on runs after a choice was too large. Shorter runs make room for other messages, which may be too
    large again, so runs are cut from the second time on."""
    return run_max // _RUN_CUT if messages_max < asked_max else run_max
