"""Pulling: from the subject and from the group's private inbox, in turns.

A pull asks the law for a range, reads it, and only then lets it happen: if the bytes turn out not to be there,
nothing has been handed out. The answer does not wait for the PULL to be durable, except where the law says so: after
a crash the group believes the acks of what it forgot that it had handed out."""

from __future__ import annotations

from fairway import limits
from fairway.broker.desk import Desk, refusal
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.reading import Reader, missing
from fairway.broker.requests import BrokerRequest
from fairway.errors import FairwayError, Refused
from fairway.groups import Handout, Outcome, Pulled
from fairway.groups import Verdict as Settlement
from fairway.names import Consumer
from fairway.protocol import Message, messages
from fairway.protocol.messages import Pull
from fairway.scheduling import Actor, Verdict
from fairway.storage.message_log import StoredBatch

EMPTY = messages.Pulled(0, [], [])
_TRIES_MAX = 8  # a pull decides again when what it chose cannot be read or is too much; each try leaves some out


class Puller:
    """Handles PULL for the consumers of all groups."""

    def __init__(self, desk: Desk, inboxes: Inboxes, reader: Reader) -> None:
        self._desk = desk
        self._inboxes = inboxes
        self._reader = reader
        self.pulled_messages = 0

    def pull(
        self, request: BrokerRequest[Message], message: Pull, host: GroupHost, name: Consumer, actor: Actor
    ) -> Verdict:
        """WAIT: there is nothing now."""
        verdict = Verdict.WAIT
        for source in self._inboxes.sources(host, name, message.arrived):
            verdict = self._pull_from(source, request, message, name, actor)
            if verdict is not Verdict.WAIT:
                break
        return verdict

    def _pull_from(
        self, source: GroupHost, request: BrokerRequest[Message], message: Pull, name: Consumer, actor: Actor
    ) -> Verdict:
        if not self._reader.is_indexed(actor, source.subject_id, source.law.cursor):
            return Verdict.AGAIN
        messages_max = self._inboxes.messages_max(source, message.messages_max)
        for _ in range(_TRIES_MAX):
            pulled = self._decide(source, message, name, messages_max, actor)
            refused = refusal(pulled)
            if refused is not None:
                request.refuse(refused)
                return Verdict.DONE
            if not pulled.lots:
                return self._skip(source, request, pulled)
            fewer = self._fewer(source, pulled, message.bytes_max)
            if fewer is not None:
                messages_max = fewer
                continue
            batches = self._reader.batches(actor, source.subject_id, pulled.lots)
            if batches is None:
                return Verdict.AGAIN
            absent = missing(pulled.lots, batches)
            if not absent:
                self._hand_out(request, source, pulled, batches, actor)
                return Verdict.DONE
            for lot in absent:
                self._leave_out(source, name, lot, pulled)
        return Verdict.AGAIN

    def _decide(self, source: GroupHost, message: Pull, name: Consumer, messages_max: int, actor: Actor) -> Pulled:
        law = source.law
        bytes_max = self._reader.response_bytes(actor, message.bytes_max)
        fresh = self._reader.fresh(source.subject_id, law.cursor, law.config, max(messages_max, 1), bytes_max)
        other = source.main or source.inbox
        return law.pull(
            name,
            arrived=message.arrived,
            messages_max=messages_max,
            fresh=fresh,
            now_ns=self._desk.clock.monotonic_ns(),
            now_ms=self._desk.clock.wall_ms(),
            number_after=0 if other is None else other.law.last_number(name),
        )

    def _skip(self, source: GroupHost, request: BrokerRequest[Message], pulled: Pulled) -> Verdict:
        """Nothing to hand out; batches may have been skipped. A slice's worth of them: the rest comes later."""
        self._desk.carry_out(source, pulled)
        if not pulled.events or pulled.outcome is not Outcome.EMPTY:
            return Verdict.WAIT
        if request.wait_until_ns:
            return Verdict.AGAIN
        request.respond(EMPTY)
        return Verdict.DONE

    def _fewer(self, source: GroupHost, pulled: Pulled, bytes_max: int) -> int | None:
        """How many messages to ask for instead, where these are too many bytes: retries lie far apart."""
        count = sum(count for lot in pulled.lots for _, count in lot.ranges)
        if count == 1 or pulled.is_again or all(lot.first >= source.law.cursor for lot in pulled.lots):
            return None  # what is fresh was chosen by its size
        size = self._reader.size_bytes(source.subject_id, pulled.lots)
        return max(count // 2, 1) if size > min(bytes_max, limits.BATCH_RAW_BYTES_MAX) else None

    def _leave_out(self, source: GroupHost, name: Consumer, lot: Handout, pulled: Pulled) -> None:
        """Nothing of the lot can be read: there is nothing to hand out, now or later."""
        now_ms = self._desk.clock.wall_ms()
        law = source.law
        if pulled.is_again:  # it was there when it went out the first time, and its consumer holds it
            decision = law.settle(name, Settlement.ACK, lot.first, lot.attempt, lot.ranges, now_ms=now_ms)
            self._desk.carry_out(source, decision)
        else:
            self._desk.carry_out(source, law.drop(lot, now_ms=now_ms))

    def _hand_out(
        self,
        request: BrokerRequest[Message],
        source: GroupHost,
        pulled: Pulled,
        batches: list[StoredBatch],
        actor: Actor,
    ) -> None:
        written = self._desk.carry_out(source, pulled)
        lots = [
            messages.Lot(lot.first, lot.attempt, [messages.Span(first, count) for first, count in lot.ranges])
            for lot in pulled.lots
        ]
        attached = [messages.AttachedBatch(each.entry.first_sequence, each.entry.appended_ms) for each in batches]
        answer = messages.Pulled(pulled.number, lots, attached, source.main is not None)
        attachments = [each.data for each in batches]
        count = sum(count for lot in pulled.lots for _, count in lot.ranges)
        actor.charge(size_bytes=sum(map(len, attachments)))
        self.pulled_messages += count
        self._inboxes.note_handed_out(source, count)
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
