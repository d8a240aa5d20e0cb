"""The face for programs without a loop: `connect` gives a `Client`, whose methods wait where they must.

The caller's own thread encodes and writes; one daemon thread reads (`world.link`). A client may be used from any number
of threads. After a fork the child's copy starts over by itself, with a connection and producer ids of its own: what the
parent had buffered is the parent's, and so are its consumers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, Unpack

from fairway.batch import MessageId
from fairway.client import commands, url
from fairway.client.asking import AnswerT, Command
from fairway.client.commands import SCAN_BYTES, Place, Scanning
from fairway.client.consumer import Consumer
from fairway.client.core import (
    ASK_S,
    CLOSE_S,
    ClientOptions,
    Core,
    Duration,
    failures,
    limit_of,
    no_answer,
    not_stored_yet,
    note_failures,
    seconds_of,
    unreachable,
)
from fairway.client.hand import LEAVE_S
from fairway.client.many import PendingMany, slices
from fairway.client.pending import SyncBatch, SyncPending
from fairway.client.settings import ConsumerSettings, id_of, options_of
from fairway.errors import BufferFull, Misuse
from fairway.protocol.admin import Configured, Depth, Described, Redriven, Sought, Switched
from fairway.protocol.consuming import Consuming
from fairway.protocol.delivery import Page
from fairway.protocol.frames import Bytes
from fairway.protocol.messages import Message
from fairway.world.clock import Clock, RealClock
from fairway.world.link import Link
from fairway.world.rng import RealRng, Rng

if TYPE_CHECKING:
    from fairway.groups import GroupConfig

T = TypeVar("T")

SEND_S = 60.0  # that `send` waits for room in the buffer, unless told otherwise
FIRST_S = 30.0  # for the first attempt to connect to succeed or fail: a host that is up answers much sooner
EXIT_S = 10.0  # for what is buffered to be stored when the program ends without `close`


def connect(url: str, *, patience: Duration = 0, options: ClientOptions | None = None) -> Client:
    """A client of the broker at `fairway://HOST:PORT` (several, with commas between them: the first that answers).

    Raises `Unreachable` if nobody answers, after trying again for `patience`. Later on a lost connection is found
    again for ever, whatever the patience.
    """
    client = Client(url, options)
    try:
        client.wait_connected(patience)
    except BaseException:
        client.abandon()
        raise
    return client


class Client:
    """A connection to a broker. Leaving its `with`, or `close`, waits until everything that was sent is stored."""

    def __init__(
        self, where: str, options: ClientOptions | None = None, *, clock: Clock | None = None, rng: Rng | None = None
    ) -> None:
        self._addresses = url.parse(where)
        self._options = options or ClientOptions()
        self._clock = clock or RealClock()
        self._rng = rng or RealRng()
        self._is_closed = False
        self._start()

    def _start(self) -> None:
        self._core: Core[SyncPending, SyncBatch] = Core(
            self._clock, self._rng, self._options, pending_type=SyncPending, batch_type=self._batch
        )
        self._producing = self._core.producing
        self._consumers: list[Consumer] = []
        self._link = Link(self._core.line, self._addresses, self._clock, at_exit=partial(self.close, EXIT_S))
        self._link.start()

    def _batch(self, subject: str, run_later: Any) -> SyncBatch:
        return SyncBatch(subject, run_later, self._link)

    def _live(self) -> Link:
        """The link; in a forked child a new one."""
        if self._is_closed:
            raise Misuse("this client is closed: connect again")
        link = self._link
        if link.is_orphan:
            with link.lock:
                if self._link is link:
                    self._start()
        self._link.check()
        return self._link

    def wait_connected(self, patience: Duration = 0) -> None:
        """Return when a connection has been made, now or before; `Unreachable` if that takes too long."""
        link, core, patience_s = self._live(), self._core, seconds_of(patience)
        link.wait(core.is_decided, FIRST_S)
        if patience_s and not core.is_connected():
            link.wait(core.is_connected, patience_s)
        if not core.is_connected():
            raise unreachable(self._addresses, core.line.trouble)

    # --- sending -----------------------------------------------------------------------------------------------------

    def send(
        self,
        subject: str,
        payload: bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        id: MessageId | str | None = None,
        *,
        timeout: Duration = SEND_S,
    ) -> SyncPending:
        """Put a message on its way; `.result()` waits until it is durable and gives its receipt.

        While the buffer is full it waits for room, up to `timeout`, then raises `BufferFull`.
        """
        link = self._link
        if self._is_closed or link.is_orphan:
            link = self._live()
        producing = self._producing
        born = None if id is None else id_of(id)
        try:
            with link.lock:
                pending = producing.add(subject, payload, key, tags, headers, born)
                is_stirred, producing.is_stirred = producing.is_stirred, False
        except BufferFull as full:
            add = partial(producing.add, subject, payload, key, tags, headers, born)
            pending = self._wait_and_add(add, full, timeout)
            is_stirred = True
        if is_stirred:
            link.pump()
        return pending

    def send_nowait(
        self,
        subject: str,
        payload: bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        id: MessageId | str | None = None,
    ) -> SyncPending:
        """`send` that never waits: `BufferFull` if there is no room now."""
        link, born = self._live(), None if id is None else id_of(id)
        with link.lock:
            pending = self._producing.add(subject, payload, key, tags, headers, born)
            is_stirred, self._producing.is_stirred = self._producing.is_stirred, False
        if is_stirred:
            link.pump()
        return pending

    def send_many(
        self,
        subject: str,
        payloads: Sequence[bytes],
        *,
        keys: Sequence[str | None] | None = None,
        tags: Sequence[Collection[str] | None] | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        ids: Sequence[MessageId | None] | None = None,
        timeout: Duration = SEND_S,
    ) -> PendingMany:
        """Many messages in their order, in as few batches as there can be; one receipt for each batch.

        Waits for room like `send`; each slice of a few thousand messages is added whole or not at all.
        """
        batches: list[SyncBatch] = []
        for part in slices(payloads, keys=keys, tags=tags, headers=headers, ids=ids):
            batches += self._send_part(subject, part.payloads, part.columns, timeout)
        return PendingMany(batches)

    def _send_part(
        self, subject: str, payloads: Sequence[bytes], columns: dict[str, Any], timeout: Duration
    ) -> list[SyncBatch]:
        link = self._live()
        add = partial(self._producing.add_many, subject, payloads, **columns)
        try:
            with link.lock:
                batches = add()
        except BufferFull as full:
            batches = self._wait_and_add(add, full, timeout)
        link.pump()
        return batches

    def _wait_and_add(self, add: Callable[[], T], full: BufferFull, timeout: Duration) -> T:
        """There was no room: wait for it, in turn, and try again."""
        link, producing = self._link, self._producing
        end_ns = self._clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)
        while not link.in_reader and self._clock.monotonic_ns() < end_ns:
            has_room: list[bool] = []
            with link.lock:
                cancel = producing.when_room(full.messages, full.size_bytes, partial(has_room.append, True))
            link.pump()
            try:
                link.wait(partial(bool, has_room), self._left_s(end_ns))
            finally:
                with link.lock:
                    cancel()
            try:
                with link.lock:
                    return add()
            except BufferFull as still:
                full = still
        raise full

    def flush(self, timeout: Duration | None = None) -> None:
        """Wait until everything sent so far is stored, or has failed; raises a group of the failures nobody saw."""
        link = self._live()
        with link.lock:
            flushing = self._producing.flush()
        link.pump()
        if not link.wait(lambda: flushing.is_done, limit_of(timeout)):
            raise not_stored_yet(self._producing.messages, timeout)
        self._raise_unseen()

    def _raise_unseen(self) -> None:
        with self._link.lock:
            unseen = self._producing.take_unseen()
        if unseen:
            raise failures(unseen)

    # --- consuming ---------------------------------------------------------------------------------------------------

    def consumer(self, subject: str, group: str, **settings: Unpack[ConsumerSettings]) -> Consumer:
        """Join a group on a subject. `fairway.ConsumingOptions` says what can be set."""
        link, core = self._live(), self._core
        session = Consuming(options_of(subject, group, settings), self._rng, on_change=link.stir)
        made = Consumer(session, core.line, link, self._clock, self._forget)
        with link.lock:
            core.line.add(session, self._clock.monotonic_ns())
            self._consumers.append(made)
        link.pump()
        return made

    def _forget(self, consumer: Consumer) -> None:
        with self._link.lock:
            self._consumers = [each for each in self._consumers if each is not consumer]

    # --- asking ------------------------------------------------------------------------------------------------------

    def ask(self, message: Message, timeout: Duration = ASK_S) -> Message:
        """Any request of `fairway.protocol`, and its answer; raises `Refused`, or `OutcomeUnknown` if that was lost."""
        return self._answer(commands.any_of(message), timeout)

    def _answer(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> AnswerT:
        return self._ask(command, timeout)[0]

    def _ask(self, command: Command[AnswerT], timeout: Duration = ASK_S) -> tuple[AnswerT, Sequence[Bytes]]:
        link = self._live()
        with link.lock:
            question = self._core.questions.put(command)
        link.pump()
        try:
            if not link.wait(question.is_answered, seconds_of(timeout)):
                raise no_answer(command.message, timeout, self._core.line.trouble)
        finally:
            question.is_abandoned = True
        return question.answer()

    def describe(
        self, subject: str | None = None, group: str | None = None, *, depth: Depth = Depth.GROUPS, after: str = ""
    ) -> Described:
        """The broker, its subjects and groups, one page; `next` of the answer is `after` of the next page."""
        return self._answer(commands.describe(subject, group, depth=depth, after=after))

    def seek(self, subject: str, group: str, to: Place) -> Sought:
        """Move a group: to 'earliest', 'latest', a sequence, or a time."""
        return self._answer(commands.seek(subject, group, to))

    def pause(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        """Hand nothing out to a group, or to one consumer of it, until `resume`."""
        return self._answer(commands.switch(subject, group, consumer, is_on=True))

    def resume(self, subject: str, group: str, consumer: str | None = None) -> Switched:
        return self._answer(commands.switch(subject, group, consumer, is_on=False))

    def read_only(self, subject: str, is_on: bool) -> Switched:
        """Take no more messages for a subject, or take them again."""
        return self._answer(commands.read_only(subject, is_on=is_on))

    def weight(self, subject: str, group: str, weight: float) -> None:
        """A group's share of the broker's time; 1 unless set."""
        self._answer(commands.weigh(subject, group, weight))

    def redrive(
        self, subject: str, group: str, ids: Sequence[str | MessageId] | None = None, *, rate_per_s: int = 0
    ) -> Redriven:
        """Dead letters of a group back to it: those with these ids, or all."""
        return self._answer(commands.redrive(subject, group, ids, rate_per_s))

    def configure(self, subject: str, group: str, config: GroupConfig | bytes, *, expected_version: int) -> Configured:
        """Compare and set a group's configuration; its own `version` is the next one. 0: there is no such group yet."""
        return self._answer(commands.configure(subject, group, config, expected_version))

    def scan(
        self, subject: str, start: Place = "earliest", end: int | None = None, *, bytes_max: int = SCAN_BYTES
    ) -> Iterator[Page]:
        """Stored batches without a group, up to `end` or what is committed when it begins."""
        scanning = Scanning(subject, start, end, bytes_max)
        while not scanning.is_done:
            yield from scanning.pages(*self._ask(scanning.command()))

    # --- ending ------------------------------------------------------------------------------------------------------

    def close(self, timeout: Duration = CLOSE_S) -> None:
        """Close the consumers, wait until everything sent is stored, say goodbye.

        Raises a group of the failures that nobody looked at; what is not stored by then is among them.
        """
        if self._is_closed:
            return
        link, end_ns = self._link, self._clock.monotonic_ns() + int(seconds_of(timeout) * 1e9)
        if link.is_orphan:
            self._is_closed = True
            return
        try:
            for consumer in tuple(self._consumers):
                consumer.close(min(LEAVE_S, self._left_s(end_ns)))
            with link.lock:
                flushing = self._producing.flush()
            link.pump()
            link.wait(lambda: flushing.is_done, self._left_s(end_ns))
        finally:
            self._hang_up(end_ns)
        self._raise_unseen()

    def abandon(self) -> None:
        """End at once: what is not stored by now fails, unless it is on its way."""
        if not self._is_closed and not self._link.is_orphan:
            self._hang_up(self._clock.monotonic_ns())

    def _left_s(self, end_ns: int) -> float:
        return max(end_ns - self._clock.monotonic_ns(), 0) / 1e9

    def _hang_up(self, end_ns: int) -> None:
        self._is_closed = True
        link, line = self._link, self._core.line
        with link.lock:
            self._producing.give_up("the client was closed before an answer came")
            line.close(self._clock.monotonic_ns())
            link.announce()
        link.pump()
        if not link.in_reader:
            link.wait(lambda: line.is_closed, min(1.0, self._left_s(end_ns)))
        link.close(1.0)
        for errand in line.errands():
            errand()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self.close()
        except ExceptionGroup as failed:
            if error is None:
                raise
            note_failures(error, failed)
