"""Pulling: from the subject and from the group's private inbox, in turns.

A pull asks the law for a range, reads it, and only then lets it happen: if the bytes turn out not to be there,
nothing has been handed out. The answer does not wait for the PULL to be durable, except where the law says so: after
a crash the group believes the acks of what it forgot that it had handed out."""

from __future__ import annotations

from collections.abc import Collection

from fairway import limits
from fairway.broker import fitting
from fairway.broker.desk import GroupCoordinator, refusal
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.keying import Fresh, KeyFinder
from fairway.broker.pacing import GroupRates
from fairway.broker.reading import SKIPPED_BATCHES_MAX, MessageReader
from fairway.errors import FairwayError, Refused
from fairway.groups import GroupEventKind, GroupOutcome, GroupStateMachine, Handout, Mode, PullDecision, Range
from fairway.groups import SettleVerdict as Settlement
from fairway.names import ConsumerName
from fairway.protocol import ControlMessage, messages
from fairway.protocol.messages import Pull
from fairway.replication.standing import CopyStatus
from fairway.scheduling import Actor, TurnResult
from fairway.serving.requests import ServedRequest
from fairway.storage.message_log import StoredBatch

EMPTY = messages.Pulled(0, [], [])
SKIPPED_MESSAGES_MAX = SKIPPED_BATCHES_MAX  # passed over and not noted; no more than what one look passes over
_TRIES_MAX = 8  # a pull decides again when what it chose cannot be read or is too much; each try leaves some out
_RUN_CUT = 4  # and so a try is not the last before there are no runs: what fits of the heads alone is what is chosen
_PASSED = frozenset({GroupEventKind.PARK, GroupEventKind.DECLINE})
_ROOMY_FRAME_BYTES = 128 * limits.KIB  # beside the batches that were chosen by their size there is room in it


class PullProcessor:
    """Handles PULL for the consumers of all groups."""

    def __init__(
        self, desk: GroupCoordinator, inboxes: Inboxes, reader: MessageReader, standing: CopyStatus | None = None
    ) -> None:
        """`standing`: of one copy of several."""
        self._desk = desk
        self._standing = standing
        self._inboxes = inboxes
        self._reader = reader
        self.keys = KeyFinder(reader)
        self._pace = GroupRates(desk.clock, desk.scheduler, desk.call_later)
        self.pulled_messages = 0

    def pull(
        self, request: ServedRequest[ControlMessage], message: Pull, host: GroupHost, name: ConsumerName, actor: Actor
    ) -> TurnResult:
        """WAIT: there is nothing now, or the group's rate allows nothing."""
        verdict = TurnResult.WAIT
        paced_max = self._pace.messages_max(host) if host.law.config.rate_per_s else None
        is_shut = paced_max == 0 or self._desk.is_switched_off(host)
        if is_shut and self._may_wait(host, name, message.arrived):
            return verdict
        for source in self._inboxes.sources(host, name, message.arrived):
            verdict = self._pull_from(source, request, message, name, actor, paced_max)
            if verdict is not TurnResult.WAIT:
                break
        return verdict

    def _may_wait(self, host: GroupHost, name: ConsumerName, arrived: int) -> bool:
        """Whether there is nothing to tell it: neither that it is no member, nor what did not arrive. It has spoken."""
        beat = host.law.heartbeat(name, arrived=arrived, now_ns=self._desk.clock.monotonic_ns())
        if beat.outcome is not GroupOutcome.DONE:
            return False
        self._inboxes.renew(host, name, arrived)
        sources = (host,) if host.inbox is None else (host, host.inbox)
        return not any(each.law.has_unarrived(name) for each in sources)

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
        messages_max = self._inboxes.messages_max(source, message.messages_max)
        if paced_max is not None:
            messages_max = min(messages_max, max(paced_max, 1))  # where there are none, something is sent again
        bytes_left = self._desk.memory.room(source, request.session)
        asked_max, run_max = messages_max, message.run_max
        for _ in range(_TRIES_MAX):
            pulled = self._decide(source, message, name, messages_max, actor, run_max, bytes_left)
            if pulled is None:
                return TurnResult.AGAIN
            refused = refusal(pulled)
            if refused is not None:
                self._desk.refuse(request, refused)
                return TurnResult.DONE
            if not pulled.lots and any(event.kind in _PASSED for event in pulled.events):
                self._desk.carry_out(source, pulled)  # and look behind those that cannot go out
                continue
            if not pulled.lots:
                return self._skip(source, request, pulled)
            fitting_count = self._fitting(source, pulled, message.bytes_max, frame_bytes_max)
            if fitting_count is not None:
                run_max = _shorter(run_max, messages_max, asked_max)
                messages_max = fitting_count
                if pulled.is_again:  # to a smaller frame than the first time: the rest is anybody's
                    rest = fitting.beyond(pulled.lots, fitting_count)
                    self._settle(source, name, Settlement.RELEASE, rest)
                continue
            batches = self._reader.batches(actor, source.subject_id, pulled.lots)
            if batches is None:
                return TurnResult.AGAIN
            absent = fitting.missing(pulled.lots, batches)
            is_roomy = frame_bytes_max >= limits.FRAME_BYTES_MAX
            large = [] if absent or is_roomy else fitting.too_large(pulled.lots, batches, frame_bytes_max)
            if (absent or large) and self._breaks_runs(source, name, pulled):
                run_max = 1
            elif absent:
                self._leave_out(source, name, absent, pulled)
            elif large:
                messages_max = self._keep_back(source, name, large, pulled, frame_bytes_max) or messages_max
            elif (raw_count := self._fitting_raw(pulled, batches, message.bytes_max)) is not None:
                run_max = _shorter(run_max, messages_max, asked_max)
                messages_max = raw_count
            else:
                self._hand_out(request, source, pulled, batches, actor)
                self._reader.rest(actor)
                return TurnResult.DONE
        return TurnResult.AGAIN

    def _breaks_runs(self, source: GroupHost, name: ConsumerName, pulled: PullDecision) -> bool:
        """Whether messages of one key are in it that come one after another: what cannot go out must not be passed by
        those behind it, so they stay."""
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
        """None: what the law must know is being fetched."""
        law = source.law
        found = self._fresh(source, message, messages_max, actor, bytes_left)
        if found is None:
            return None
        fresh = found.range
        if fresh is not None and fresh[0] > law.cursor:
            self._desk.count_lost(source, fresh[0])
        if fresh is not None and not fresh[1] and fresh[0] - law.cursor < SKIPPED_MESSAGES_MAX:
            source.note_skipped(fresh[0])
            fresh = None
        other = source.main or source.inbox
        return law.pull(
            name,
            arrived=message.arrived,
            messages_max=messages_max,
            fresh=fresh,
            now_ns=self._desk.clock.monotonic_ns(),
            now_ms=self._desk.clock.wall_ms(),
            number_after=0 if other is None else other.law.last_number(name),
            keys=found.keys,
            beside=() if other is None else self._beside(law, other.law, fresh),
            run_max=run_max,
            bytes_left=bytes_left,
        )

    def _beside(self, law: GroupStateMachine, other: GroupStateMachine, fresh: Range | None) -> Collection[int]:
        """Keys that consumers have in hand from the group's inbox, or from the subject where the inbox asks."""
        if not law.is_ordered or (fresh is None and not law.has_ready(self._desk.clock.wall_ms())):
            return ()
        return other.keys_in_hand()

    def _fresh(
        self, source: GroupHost, message: Pull, messages_max: int, actor: Actor, bytes_left: int
    ) -> Fresh | None:
        law = source.law
        bytes_max = self._reader.response_bytes(actor, message.bytes_max)
        if law.config.is_keyed:
            look_max = max(bytes_left // law.bytes_per_fresh, limits.GROUP_KEYED_MIN)
            return self.keys.fresh(actor, source, messages_max, bytes_max, look_max)
        return Fresh(
            self._reader.fresh(source.subject_id, source.next_fresh, law.config, max(messages_max, 1), bytes_max)
        )

    def _skip(self, source: GroupHost, request: ServedRequest[ControlMessage], pulled: PullDecision) -> TurnResult:
        """Nothing to hand out; batches may have been skipped. A slice's worth of them: the rest comes later."""
        if not pulled.events:
            return TurnResult.WAIT
        self._desk.carry_out(source, pulled)
        if pulled.outcome is not GroupOutcome.EMPTY:
            return TurnResult.WAIT
        if request.wait_until_ns:
            return TurnResult.AGAIN
        request.respond(EMPTY)
        return TurnResult.DONE

    def _fitting(self, source: GroupHost, pulled: PullDecision, bytes_max: int, frame_bytes_max: int) -> int | None:
        """How many messages to ask for instead, where these are too many bytes: retries lie far apart."""
        is_fresh = all(lot.first >= source.law.cursor for lot in pulled.lots)  # and so chosen by its size
        if is_fresh and frame_bytes_max >= _ROOMY_FRAME_BYTES and not source.law.config.is_keyed:
            return None
        wanted = frame_bytes_max if pulled.is_again else bytes_max  # the first time it was what was wanted
        entries = self._reader.entries(source.subject_id, pulled.lots)
        return fitting.fitting(pulled.lots, entries, wanted, frame_bytes_max)

    def _fitting_raw(self, pulled: PullDecision, batches: list[StoredBatch], bytes_max: int) -> int | None:
        """How many messages to ask for instead, where these are too many bytes before compression. A response that did
        not arrive comes as it was: it was bounded the first time."""
        return None if pulled.is_again else fitting.fitting_raw(pulled.lots, batches, bytes_max)

    def _leave_out(self, source: GroupHost, name: ConsumerName, absent: list[Handout], pulled: PullDecision) -> None:
        """These cannot be read: there is nothing to hand out, now or later. What is fresh of them is stepped over the
        next time, for it is known to be damaged by then."""
        self.keys.forget(source.id)
        if pulled.is_again:  # it was there when it went out the first time, but that response has not arrived
            for lot in absent:
                self._desk.lose(source, source.law.lose(name, lot, now_ms=self._desk.clock.wall_ms()))
            return
        for lot in absent:
            hole = self._reader.hole(source.subject_id, *lot.ranges[0])
            whole = lot._replace(ranges=(hole, *lot.ranges[1:]))  # beyond what was chosen, too: a hole may be long
            lost = [part for at, count in whole.ranges for part in self._desk.lost_ranges(source, at, at + count)]
            if lost:  # what else is in the hole is dropped at the next try: to drop a part may rename the lot
                whole = whole._replace(ranges=tuple(lost))
            dropped = source.law.drop(whole, is_lost=bool(lost), now_ms=self._desk.clock.wall_ms())
            self._desk.lose(source, dropped)

    def _keep_back(
        self, source: GroupHost, name: ConsumerName, large: list[Handout], pulled: PullDecision, frame_bytes_max: int
    ) -> int | None:
        """Too large for this consumer's frames: a failed attempt, so that others may try, and dead letter in the end.
        What else was chosen goes out as a response that has not arrived yet."""
        reason = f"too large for a frame of {frame_bytes_max} bytes"
        if source.law.config.mode is Mode.AT_MOST_ONCE and not pulled.is_again:
            return self._lose(source, large[0], pulled, reason)
        if not pulled.is_again:
            self._desk.carry_out(source, pulled)
        self._settle(source, name, Settlement.RETRY, large, reason)
        return None

    def _lose(self, source: GroupHost, large: Handout, pulled: PullDecision, reason: str) -> int | None:
        """To hand it out is to settle it, so there is no attempt that could fail: it is counted as lost. How many
        messages to ask for instead, where others come before it."""
        law, now_ms = source.law, self._desk.clock.wall_ms()
        first, count = large.ranges[0]
        before = sum(max(min(first - at, messages), 0) for lot in pulled.lots for at, messages in lot.ranges)
        if first < law.cursor:  # from a time when the group's mode was another
            self._desk.carry_out(source, law.reject(large, reason, now_ms=now_ms))
        elif before:
            return before
        else:
            self._desk.carry_out(source, law.skip(first, first + count, is_lost=True, now_ms=now_ms))
        return None

    def _settle(
        self, source: GroupHost, name: ConsumerName, verdict: Settlement, lots: list[Handout], reason: str = ""
    ) -> None:
        """In the consumer's name; `Refused` where a bound stands in the way."""
        for lot in lots:
            now_ms = self._desk.clock.wall_ms()
            decision = source.law.settle(
                name, verdict, lot.first, lot.attempt, lot.ranges, now_ms=now_ms, reason=reason
            )
            refused = refusal(decision)
            if refused is not None:
                raise refused
            self._desk.carry_out(source, decision)

    def _hand_out(
        self,
        request: ServedRequest[ControlMessage],
        source: GroupHost,
        pulled: PullDecision,
        batches: list[StoredBatch],
        actor: Actor,
    ) -> None:
        self._desk.memory.charge(source, request.session)
        written = self._desk.carry_out(source, pulled)
        fence = pulled.number if source.law.is_ordered else 0
        lots = [
            messages.WireLot(
                lot.first, lot.attempt, [messages.SequenceRange(*each) for each in lot.ranges], fence, lot.is_behind
            )
            for lot in pulled.lots
        ]
        attached = [messages.AttachedBatch(each.entry.first_sequence, each.entry.appended_ms) for each in batches]
        leads_ms = None if self._standing is None else self._standing.leads_ms(request.received_ns)
        answer = messages.Pulled(pulled.number, lots, attached, source.main is not None, leads_ms)
        attachments = [each.data for each in batches]
        count = sum(count for lot in pulled.lots for _, count in lot.ranges)
        actor.charge(size_bytes=sum(map(len, attachments)))
        self.pulled_messages += count
        self._inboxes.note_handed_out(source, count)
        if not pulled.is_again and source.law.config.rate_per_s:
            self._pace.note_handed_out(source.main or source, count)
        if not pulled.is_durable_first:
            request.respond(answer, attachments)
            return

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                request.respond(answer, attachments)
            elif isinstance(outcome, Refused):
                request.refuse(outcome)
            else:
                request.end()

        self._desk.when_durable(written, durable)


def _shorter(run_max: int, messages_max: int, asked_max: int) -> int:
    """The next bound on runs after a choice was too much. Shorter runs leave room for others, which may be too much
    again, so runs are cut from the second time on."""
    return run_max // _RUN_CUT if messages_max < asked_max else run_max
