"""Produce: check the batch, append it, answer when it is durable. One actor per subject, so that none crowds out
others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from fairway.broker.batch_checks import BatchChecks
from fairway.errors import Code, FairwayError, Refused, RemoteProtocolError
from fairway.names import Subject
from fairway.protocol.messages import Produce
from fairway.scheduling import Actor, Expiry, TurnResult
from fairway.serving.creation_rate import CreationRate
from fairway.serving.produce_answer import checked_secret, produced
from fairway.serving.requests import ServedRequest
from fairway.storage.dedupe import PlaceTaken
from fairway.storage.message_log import AppendReceipt
from fairway.storage.store import Store
from fairway.storage.subjects import SubjectTable

if TYPE_CHECKING:
    from fairway.serving.session import ServerSession


class ProduceProcessor:
    """Handles PRODUCE. `on_committed` is told each subject that has something new to show."""

    def __init__(
        self,
        store: Store,
        checks: BatchChecks,
        is_read_only: Callable[[Subject], bool],
        on_committed: Callable[[int], None],
    ) -> None:
        self._store = store
        self._checks = checks
        self._is_read_only = is_read_only
        self._on_committed = on_committed
        self.batches = 0  # committed, and so on; one that came twice counts twice
        self.messages = 0
        self.bytes = 0

    def process(self, request: ServedRequest[Produce], actor: Actor) -> TurnResult:
        subject = Subject(request.message.subject)  # parsed before it became an actor's name
        if self._is_read_only(subject):
            raise Refused(
                Code.READ_ONLY, f"subject {subject} takes no messages, by command: resume it, or send elsewhere"
            )
        data, header, crc = request.attachments[0], None, -1
        try:
            if self._checks.is_large(data):
                checked = self._checks.result(request, actor)
                if checked is None:
                    return TurnResult.AGAIN
                header, crc = checked.header, checked.crc
            receipt = self._store.produce(subject, data, header, checked_secret(request.message), crc)
        except RemoteProtocolError as error:
            session: ServerSession = request.session  # type: ignore[assignment]
            session.fail(error)
            request.end()
            return TurnResult.DONE
        except PlaceTaken as taken:
            self._store.when_taken(taken, partial(self._conflicted, request))
            return TurnResult.DONE
        size = len(data)  # what waits for the log does not keep the batch in memory
        actor.charge(size_bytes=size)
        answer = produced(receipt, self._store)

        def durable(outcome: FairwayError | None) -> None:
            if outcome is None:
                self.batches += 1
                self.messages += receipt.count
                self.bytes += size
                self._on_committed(receipt.subject_id)
            request.settle(outcome, answer)

        self._store.messages.log.flusher.when_durable(receipt.end, durable, receipt.undos)
        return TurnResult.DONE

    def _conflicted(
        self, request: ServedRequest[Produce], outcome: FairwayError | None, answer: AppendReceipt | PlaceTaken
    ) -> None:
        request.settle(outcome, answer if isinstance(answer, PlaceTaken) else produced(answer, self._store))

    def expire(self, request: ServedRequest[Produce], expiry: Expiry) -> None:
        self._checks.forget(request)
        request.expire(expiry)

    def fail(self, request: ServedRequest[Produce], error: Exception) -> None:
        self._checks.forget(request)
        request.fail(error)


class NewNames:
    """Handles PRODUCE to subjects that do not exist yet, all in one actor: names are free, and an actor for each would
    give whoever thinks of many the time of many.

    A request of a connection must not overtake an earlier one to the same subject. So a subject that has requests here
    is new until they are handled, although the first of them makes it.
    """

    KEY = ("produce", None)

    def __init__(self, produce: ProduceProcessor, subjects: SubjectTable, rate: CreationRate) -> None:
        self._produce = produce
        self._subjects = subjects
        self._rate = rate
        self._pending: dict[str, int] = {}  # requests by subject

    def is_new(self, subject: Subject) -> bool:
        return str(subject) in self._pending or self._subjects.find(subject) is None

    def add(self, request: ServedRequest[Produce]) -> None:
        """It is in the mailbox."""
        name = request.message.subject
        self._pending[name] = self._pending.get(name, 0) + 1

    def process(self, request: ServedRequest[Produce], actor: Actor) -> TurnResult:
        subject = Subject(request.message.subject)
        is_new = self._subjects.find(subject) is None
        if is_new:
            self._rate.check(request.session)
        verdict = self._produce.process(request, actor)
        if is_new and self._subjects.find(subject) is not None:
            self._rate.note(request.session)
        if verdict is not TurnResult.AGAIN:  # it stays, until a worker has checked its batch
            self._remove(request)
        return verdict

    def expire(self, request: ServedRequest[Produce], expiry: Expiry) -> None:
        self._remove(request)
        self._produce.expire(request, expiry)

    def fail(self, request: ServedRequest[Produce], error: Exception) -> None:
        self._remove(request)
        self._produce.fail(request, error)

    def _remove(self, request: ServedRequest[Produce]) -> None:
        name = request.message.subject
        left = self._pending.pop(name, 1) - 1
        if left:
            self._pending[name] = left
