"""PRODUCE for one group alone: to `inbox:<group>:<subject>`, by clients that have asked for the feature.

The group must exist. Its inbox is made with the first batch, and is a subject like any other from then on: batches keep
what they carry, streams have their place in the dedupe window, an answer means durable. Only the group itself drains
it, so nobody else ever sees what lies there.
"""

from __future__ import annotations

from fairway import batch
from fairway.broker.copies import stream_of
from fairway.broker.desk import GroupCoordinator
from fairway.broker.groups import GroupHost
from fairway.broker.inbox import Inboxes
from fairway.broker.produce import ProduceProcessor
from fairway.errors import Code, FairwayError, Refused, RemoteProtocolError
from fairway.names import Subject
from fairway.protocol import Bytes
from fairway.protocol.messages import Produce
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.requests import ServedRequest

_RETRY_MS = 50


class InboxProduceProcessor:
    """Handles PRODUCE to an inbox; the batch itself is the other processor's affair."""

    def __init__(self, desk: GroupCoordinator, inboxes: Inboxes, produce: ProduceProcessor) -> None:
        self._desk = desk
        self._inboxes = inboxes
        self._produce = produce

    def host_of(self, message: Produce) -> GroupHost:
        """The group that is meant; `Refused` or `BadName` where there is none."""
        group, subject = Subject.parse_inbox(message.subject)
        return self._desk.host(subject, group)

    def begin(self, request: ServedRequest[Produce], host: GroupHost) -> None:
        """To the inbox's own actor, once there is an inbox."""

        def opened(outcome: FairwayError | None) -> None:
            try:
                if outcome is not None:
                    raise outcome
                key = ("produce", self._inboxes.subject_of(host))
                self._desk.scheduler.dispatch(key, request, self)
            except FairwayError as error:
                request.fail(error)

        self._inboxes.when_open(host, opened)

    def process(self, request: ServedRequest[Produce], actor: Actor) -> TurnResult:
        host = self.host_of(request.message)  # which may have gone since
        if not host.is_inbox_open:
            raise Refused(Code.BUSY, f"group {host.name} is being made anew", retry_after_ms=_RETRY_MS)
        subject = self._desk.name_of(host.subject_id)
        if host.subject_id in self._desk.groups.read_only:
            raise Refused(Code.READ_ONLY, f"subject {subject} takes no messages, by command: resume it first")
        own = stream_of(Subject.dead_letters(host.name, subject), host.name)
        if _stream(request.attachments[0]) == own:
            # By this id it is known which dead letters were redriven: a stranger's batch would pass for one of them.
            raise Refused(Code.SEQUENCE_CONFLICT, f"stream {own:016x} is the broker's own: choose another producer id")
        return self._produce.process(request, actor)

    def expire(self, request: ServedRequest[Produce], expiry: Expiry) -> None:
        self._produce.expire(request, expiry)

    def fail(self, request: ServedRequest[Produce], error: Exception) -> None:
        self._produce.fail(request, error)


def _stream(data: Bytes) -> int:
    """The producer id of a batch; 0, which nobody has, where there is something wrong with it, which is found next."""
    try:
        return batch.peek(data).producer_id
    except RemoteProtocolError:
        return 0
