"""Produce: check the batch, append it, answer when it is durable. One actor per subject, so that none crowds out
others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fairway.errors import Code, FairwayError, Refused, RemoteProtocolError
from fairway.names import Subject
from fairway.protocol.messages import Produce
from fairway.scheduling import Actor, Expiry, Verdict
from fairway.serving.produce_answer import checked_secret, produced
from fairway.serving.requests import ServedRequest
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.message_log import Receipt
from fairway.storage.store import Store

if TYPE_CHECKING:
    from fairway.serving.session import Session


class ProduceProcessor:
    """Handles PRODUCE. `on_committed` is told each subject that has something new to show."""

    def __init__(
        self, store: Store, is_read_only: Callable[[Subject], bool], on_committed: Callable[[int], None]
    ) -> None:
        self._store = store
        self._is_read_only = is_read_only
        self._on_committed = on_committed
        self.batches = 0  # committed, and so on; one that came twice counts twice
        self.messages = 0
        self.bytes = 0

    def process(self, request: ServedRequest[Produce], actor: Actor) -> Verdict:
        subject = Subject(request.message.subject)  # parsed before it became an actor's name
        if self._is_read_only(subject):
            raise Refused(
                Code.READ_ONLY, f"subject {subject} takes no messages, by command: resume it, or send elsewhere"
            )
        data = bytes(request.attachments[0])
        try:
            receipt = self._store.produce(subject, data, secret=checked_secret(request.message))
        except RemoteProtocolError as error:
            session: Session = request.session  # type: ignore[assignment]
            session.fail(error)
            request.end()
            return Verdict.DONE
        except PlaceTaken as taken:
            self._store.when_taken(taken, partial(self._conflicted, request))
            return Verdict.DONE
        actor.charge(size_bytes=len(data))
        answer = produced(receipt, self._store)

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self.batches += 1
                self.messages += receipt.count
                self.bytes += len(data)
                self._on_committed(receipt.subject_id)
            request.settle(outcome, answer)

        self._store.messages.log.flusher.when_durable(receipt.end, durable, receipt.undos)
        return Verdict.DONE

    def _conflicted(
        self, request: ServedRequest[Produce], outcome: FairwayError | None, answer: Receipt | PlaceTaken
    ) -> None:
        request.settle(outcome, answer if isinstance(answer, PlaceTaken) else produced(answer, self._store))

    def expire(self, request: ServedRequest[Produce], expiry: Expiry) -> None:
        request.expire(expiry)

    def fail(self, request: ServedRequest[Produce], error: Exception) -> None:
        request.fail(error)
