"""A group's private inbox: what only this group is to get, redriven or sent to it alone.

An inbox is a subject of the broker's own with a law of its own, which has the group's configuration (but for tags: what
was redriven had been wanted, and what is sent to one group is meant for it) and its members. The group's actor drains
it beside the main subject, one response from the one, the next from the other. Responses of both carry numbers of one
row, so that a consumer says once what arrived.
"""

from __future__ import annotations

import msgspec

from fairway.broker.desk import GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.errors import Code, FairwayError, Refused
from fairway.groups import GroupConfig, GroupDecision, GroupOutcome, JoinClaim, Order, TagFilter
from fairway.names import ConsumerName, Subject
from fairway.storage.flusher import OnDurable as Told

_NS = 1_000_000_000


class Inboxes:
    """The inboxes of all groups of a broker."""

    def __init__(self, desk: GroupCoordinator) -> None:
        self._desk = desk
        self._opening: dict[int, list[Told]] = {}  # by the group's number: who waits, in order

    def subject_of(self, host: GroupHost) -> Subject:
        return Subject.inbox(host.name, self._desk.name_of(host.subject_id))

    def when_open(self, host: GroupHost, told: Told) -> None:
        """Call `told(None)` once the group has an inbox, made if need be, that something may lie in; at once where it
        has. Those who wait are told in the order in which they came.

        A subject that is new is committed before any group's action speaks of its number. An inbox that is new is
        durable before anything lies in it: made again, it would begin behind that.
        """
        if host.is_inbox_open:
            told(None)
            return
        waiting = self._opening.setdefault(host.id, [])
        waiting.append(told)
        if len(waiting) > 1:
            return

        def opened(outcome: FairwayError | None) -> None:
            host.is_inbox_open = outcome is None
            for each in self._opening.pop(host.id):
                each(outcome)

        def named(outcome: FairwayError | None) -> None:
            try:
                if outcome is not None:
                    raise outcome
                self._open(host, subject.id)
            except FairwayError as error:
                opened(error)
            else:
                self._desk.when_durable(None, opened)

        try:
            subject = self._desk.store.ensure_subject(self.subject_of(host))
        except FairwayError as error:
            opened(error)
            return
        log = self._desk.store.messages.log
        log.flusher.when_durable(log.end if subject.born_at >= log.committed_end else 0, named)

    def _open(self, host: GroupHost, subject_id: int) -> None:
        """The group's inbox, on a subject that is committed."""
        if host.inbox is not None:
            return
        if not self._desk.groups.has(host):
            raise Refused(Code.NO_SUCH_GROUP, f"group {host.name} is gone: nobody had used it for too long")
        config = _config_for(host.law.config, version=1)
        start = self._desk.store.messages.end_sequence(subject_id)  # what lies below was another group's of that name
        host.take_inbox(self._desk.ensure(subject_id, host.name, config, start))

    def reconfigured(self, host: GroupHost, config: GroupConfig) -> list[tuple[GroupHost, GroupDecision]]:
        """What follows for the inbox from a new configuration of the group."""
        if host.inbox is None:
            return []
        version = host.inbox.law.config.version
        adapted = _config_for(config, version + 1)
        return [(host.inbox, host.inbox.law.configure(version, adapted, now_ms=self._desk.clock.wall_ms()))]

    # --- members -----------------------------------------------------------------------------------------------------

    def join(
        self, host: GroupHost, name: ConsumerName, arrived: int, verifier: bytes
    ) -> list[tuple[GroupHost, GroupDecision]]:
        """A consumer has joined the group: so it joins the inbox. A member of the inbox with another secret, under the
        same id, expires."""
        if host.inbox is None:
            return []
        clock = self._desk.clock
        joined = host.inbox.law.join(
            name,
            version=0,
            arrived=arrived,
            resume_at=0,
            now_ns=clock.monotonic_ns(),
            now_ms=clock.wall_ms(),
            claim=JoinClaim(verifier, is_granted=True),
        )
        return [(host.inbox, joined)]

    def renew(self, host: GroupHost, name: ConsumerName, arrived: int) -> None:
        """A member of the group has spoken: it lives here, too, also where the inbox is younger than its JOIN."""
        if host.inbox is None:
            return
        beat = host.inbox.law.heartbeat(name, arrived=arrived, now_ns=self._desk.clock.monotonic_ns())
        if beat.outcome is GroupOutcome.NOT_A_MEMBER:
            self._desk.carry_out_all(self.join(host, name, arrived, host.law.verifier_of(name)))
            if host.law.has_lasting_lease(name):
                host.inbox.law.stop_lease(name)

    def leave(self, host: GroupHost, name: ConsumerName) -> list[tuple[GroupHost, GroupDecision]]:
        if host.inbox is None:
            return []
        return [(host.inbox, host.inbox.law.leave(name, now_ms=self._desk.store.time.ages_from_ms()))]

    # --- pulling -----------------------------------------------------------------------------------------------------

    def sources(self, host: GroupHost, name: ConsumerName, arrived: int) -> tuple[GroupHost, ...]:
        """Where a pull looks, in this order: first where a response of its own did not arrive."""
        inbox = host.inbox
        if inbox is None:
            return (host,)
        beat = host.law.heartbeat(name, arrived=arrived, now_ns=self._desk.clock.monotonic_ns())
        if beat.outcome is not GroupOutcome.DONE:
            return (host,)  # which says why not
        self.renew(host, name, arrived)
        unarrived = [
            (number, source) for source in (host, inbox) if (number := source.law.first_unarrived(name)) is not None
        ]
        if unarrived:  # the oldest: to have the later one says that the earlier one arrived
            return (min(unarrived, key=lambda pair: pair[0])[1],)
        is_out = host.law.is_paused() or host.law.is_paused(name) or host.law.stands_by(name)
        if is_out or not self._may_hand_out(inbox):
            return (host,)
        return (inbox, host) if host.is_inbox_next else (host, inbox)

    def messages_max(self, source: GroupHost, asked: int) -> int:
        """At most a second's worth of what is redriven at a rate."""
        return min(asked, source.rate_per_s) if source.rate_per_s else asked

    def note_handed_out(self, source: GroupHost, count: int) -> None:
        main = source.main or source
        main.is_inbox_next = source is main
        if source.rate_per_s:
            now_ns = self._desk.clock.monotonic_ns()
            source.next_handout_ns = max(source.next_handout_ns, now_ns) + count * _NS // source.rate_per_s
            wait_s = (source.next_handout_ns - now_ns) / _NS + 0.001
            self._desk.call_later(wait_s, self._desk.scheduler.wake, source.key)

    def _may_hand_out(self, inbox: GroupHost) -> bool:
        return not inbox.rate_per_s or self._desk.clock.monotonic_ns() >= inbox.next_handout_ns


def _config_for(config: GroupConfig, version: int) -> GroupConfig:
    # In strict order the group's active member is the only one that looks here.
    order = Order.NONE if config.order is Order.STRICT else config.order
    return msgspec.structs.replace(config, version=version, tags=TagFilter(), order=order)
