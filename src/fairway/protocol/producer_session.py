"""The producer half of a client, without a socket: a buffer, batches, a window in flight, and each message stored once.

    producer = ProducerSession(clock, rng, options, run_later=line.run_later)
    line.add(producer, now)
    pending = producer.add("orders", b"...", key="o-42")
    batches = producer.add_many("orders", payloads)
    if producer.is_stirred:            clear it, write `line.take(now)`, look at `line.next_deadline()` again

With nothing in flight for its subject a batch leaves at once. While another batch is in flight, a batch waits up to
`linger_ms` for more messages. Whoever adds the last message that fits seals the batch and encodes it at once. The
sealed batch then goes through its `ProducerStream`, which holds the rules of resending. A batch is sealed after a
second in any case, so that all its messages can share the deadline of the first.

The delay server stores messages with a due time, in a log of its own. So these messages have producer streams and
batches of their own: either all messages of a batch have a due time, or none has.

A session is not thread-safe: the owner calls every method under one lock, or from one loop. The session reads the clock
once per batch, not once per message.

With a spool (`SpoolPort`), batches can also go to files on this machine. In a cluster, one session can lend batches to
another, which sends them to another broker.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain, count
from typing import Final, Generic, Literal, TypeVar, cast

from fairway import batch, limits
from fairway.batch import Codec, MessageId
from fairway.batch.identity import new_secret
from fairway.errors import BufferFull, CircuitOpen, DiskFull, FairwayError, Misuse, OutcomeUnknown, Refused, invariant
from fairway.names import Subject
from fairway.protocol.batch_builder import BatchBuilder, Extras, MessageColumns, check_extras, check_size
from fairway.protocol.line import NS_PER_MS, Answer, Ask, Callback, CircuitBreaker, RequestOutcome, RetryDelays
from fairway.protocol.messages import Produced
from fairway.protocol.producer_stream import NEVER_NS, ProducerStream, SealedBatch, not_sent, request_of
from fairway.protocol.receipts import BatchReceipt, Flush, Pending, PendingBatch, RoomQueue
from fairway.protocol.spool_port import Borrowed, Handed, Repay, SendPath, SpoolPort
from fairway.runtime.buffers import Bytes
from fairway.runtime.clock import Clock
from fairway.runtime.rng import Rng

PendingT = TypeVar("PendingT", bound=Pending)
BatchT = TypeVar("BatchT", bound=PendingBatch)

FILLING_MS_MAX: Final = 1_000  # how much younger than its batch a message can be
HANDED_BYTES_MAX: Final = 8 * limits.MIB  # at a time, to the spool: one sync
FAILURES_KEPT: Final = 1_000  # the newest failed batches whose outcome nobody has read


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """The settings of a producer."""

    batch_messages_max: int = limits.LOT_MESSAGES_MAX  # the broker sends a larger batch again for each lot cut from it
    batch_bytes_max: int = 1 * limits.MIB  # a larger message has a batch of its own
    linger_ms: float = 5.0  # how long a batch waits for more messages while another is in flight; never otherwise
    window: int = 16  # batches in flight per subject
    buffer_messages_max: int = 1_000_000  # added and not yet settled
    buffer_bytes_max: int = 64 * limits.MIB  # the same in bytes of payloads, keys, tags and headers
    delivery_timeout_ms: int = 120_000  # then a message fails: NotSent, or OutcomeUnknown if it was in flight
    backoff_first_ms: int = 20  # a few group commits
    backoff_most_ms: int = 5_000
    codec: Codec = Codec.NONE
    fails_fast: bool = False  # `add` raises CircuitOpen while the broker fails again and again
    breaker_failures: int = 5  # in a row
    breaker_ms: int = 5_000  # until one message may try
    when_full: Literal["block", "raise", "spool"] = "block"  # what `send` does when the buffer has no room
    block_ms: int = 60_000  # the longest wait for room, unless `send` gives another; then BufferFull

    def __post_init__(self) -> None:
        for name, most in (
            ("batch_messages_max", limits.BATCH_MESSAGES_MAX),
            ("batch_bytes_max", limits.BATCH_RAW_BYTES_MAX // 2),
            ("window", limits.STREAM_BATCHES_MAX),
            ("buffer_messages_max", NEVER_NS),
            ("buffer_bytes_max", NEVER_NS),
            ("delivery_timeout_ms", limits.STREAM_IDLE_MS_MAX // 2),  # the broker must still know the batch
            ("breaker_failures", NEVER_NS),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise Misuse(f"{name} is {getattr(self, name)}: 1 to {most} is allowed")
        if self.linger_ms < 0 or self.breaker_ms < 0 or not 1 <= self.backoff_first_ms <= self.backoff_most_ms:
            raise Misuse("linger_ms and breaker_ms are not negative, and backoff_first_ms is 1 to backoff_most_ms")
        if self.when_full not in ("block", "raise", "spool") or self.block_ms < 0:
            raise Misuse(f"when_full={self.when_full!r} is 'block', 'raise' or 'spool', and block_ms is 0 or more")


class ProducerSession(Generic[PendingT, BatchT]):
    """The producer's session on a line. Threaded and asyncio producers pass types that can be awaited."""

    def __init__(
        self,
        clock: Clock,
        rng: Rng,
        options: ProducerOptions | None = None,
        *,
        run_later: Callable[[Callback], None],
        pending_type: type[PendingT] = Pending,  # type: ignore[assignment]
        batch_type: type[BatchT] = PendingBatch,  # type: ignore[assignment]
    ) -> None:
        self.options = options or ProducerOptions()
        self.is_stirred = False  # a batch should leave, or a deadline is new; the owner clears this
        self.messages = 0  # added and not yet settled
        self.size_bytes = 0
        self._clock = clock
        self._rng = rng
        self._stream_key = new_secret(rng)
        self._run_later = run_later
        self._pending_type = pending_type
        self._batch_type = batch_type
        self._messages_max = self.options.buffer_messages_max
        self._bytes_max = self.options.buffer_bytes_max
        self._batch_messages_max = self.options.batch_messages_max
        self._batch_bytes_max = self.options.batch_bytes_max
        self._timeout_ns = self.options.delivery_timeout_ms * NS_PER_MS
        self._filling_ns_max = min(FILLING_MS_MAX * NS_PER_MS, self._timeout_ns)
        self._linger_ns = round(self.options.linger_ms * NS_PER_MS)
        self._breaker = CircuitBreaker(failures_max=self.options.breaker_failures, open_ms=self.options.breaker_ms)
        self._is_guarded = False  # the circuit is open, and `add` must raise
        self._streams: dict[str, ProducerStream] = {}
        self._due_streams: dict[str, ProducerStream] = {}  # streams of messages with a due time
        self._ready: dict[ProducerStream, None] = {}  # streams that may have work now
        self._in_use: dict[ProducerStream, None] = {}  # streams that may hold unsettled batches
        self._alarms: list[tuple[int, int, ProducerStream]] = []  # a heap; some alarms are outdated and do nothing
        self._alarm_numbers = count()
        self._waiters = RoomQueue(self._fits, self.room_for)
        self._failed: dict[PendingBatch, None] = {}  # batches whose failure nobody has read, as far as is known
        self._diversion: SpoolPort | None = None
        self._handed: list[tuple[SealedBatch, bool]] = []  # on their way to the spool; and whether sent before
        self._lent: dict[SealedBatch, None] = {}  # batches that another session sends to another broker
        self.broker_group = ""  # for receipts, in a cluster
        self.on_failure: Callback | None = None  # called each time the broker fails
        self.is_crammed = False  # the buffer was full, and the spool is to take the overflow

    def divert(self, diversion: SpoolPort) -> None:
        """Use a spool from now on. Call this before adding anything: the spool must know the stream secrets too."""
        self._diversion = diversion
        self._stream_key = diversion.stream_key

    # --- adding ------------------------------------------------------------------------------------------------------

    def add(
        self,
        subject: str,
        payload: Bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        id: MessageId | None = None,
        due_ms: int = 0,
    ) -> PendingT:
        """Add one message. Raises BadName, TypeError, Misuse, BufferFull or CircuitOpen, and has then added nothing."""
        streams = self._due_streams if due_ms else self._streams
        stream = streams.get(subject) or self._new_stream(streams, subject)
        data = payload if type(payload) is bytes else batch.as_bytes(payload)
        size_bytes = len(data)
        extras: Extras | None = None
        if key is not None or tags or headers or id is not None or due_ms:
            extras = (key, tuple(tags), dict(headers) if headers else None, id, due_ms)  # copies: nobody changes them
            size_bytes += check_extras(extras, tags)
        if self._is_guarded or self.messages >= self._messages_max or self.size_bytes + size_bytes > self._bytes_max:
            self._admit(1, size_bytes)
        filling = stream.filling
        if filling is None or filling.size_bytes + size_bytes > self._batch_bytes_max:
            filling = self._begin(stream, size_bytes)
        index = len(filling.payloads)
        filling.payloads.append(data)
        if extras is not None or filling.extras is not None:
            filling.enrich(extras)
        filling.size_bytes += size_bytes
        self.messages += 1
        self.size_bytes += size_bytes
        if index + 1 >= self._batch_messages_max:
            self._cut(stream)
        return self._pending_type(filling.pending, index)

    def add_alone(
        self,
        subject: str,
        payload: Bytes,
        key: str | None = None,
        tags: Collection[str] = (),
        headers: Mapping[str, str] | None = None,
        id: MessageId | None = None,
        due_ms: int = 0,
    ) -> PendingT:
        """Add one message in a batch of its own: if the broker refuses it, no other message is refused with it."""
        streams = self._streams_of(bool(due_ms))
        self._cut(streams.get(subject) or self._new_stream(streams, subject))
        pending = self.add(subject, payload, key, tags, headers, id, due_ms)
        self._cut(streams[subject])
        return pending

    def add_many(
        self,
        subject: str,
        payloads: Sequence[Bytes],
        *,
        keys: Sequence[str | None] | None = None,
        tags: Sequence[Collection[str] | None] | None = None,
        headers: Sequence[Mapping[str, str] | None] | None = None,
        ids: Sequence[MessageId | None] | None = None,
        due_ms: Sequence[int] | None = None,
    ) -> list[BatchT]:
        """Add many messages in order, in as few batches as the bounds allow. All are added, or none.

        Raises BufferFull if they do not all fit. An empty buffer takes them, however many there are.
        """
        if due_ms is not None and not all(due_ms):
            raise Misuse("due_ms: every message has a time, 1 or later, or the whole column is left out")
        streams = self._streams if due_ms is None else self._due_streams
        stream = streams.get(subject) or self._new_stream(streams, subject)
        is_plain = set(map(type, payloads)) <= {bytes}
        plain = cast(Sequence[bytes], payloads) if is_plain else list(map(batch.as_bytes, payloads))
        columns = MessageColumns(plain, keys, tags, headers, ids, due_ms)
        self._admit(len(payloads), columns.size_bytes)
        self._cut(stream)
        deadline_ns, created_ms = self._clock.monotonic_ns() + self._timeout_ns, self._clock.wall_ms()
        producer_id, first = stream.stamp
        cut_parts: list[tuple[SealedBatch, bytes, MessageId]] = []
        batches: list[BatchT] = []
        for part in columns.parts(self._batch_messages_max, self._batch_bytes_max):
            pending = self._batch_type(stream.subject, self._run_later)
            pending.count = len(part.payloads)
            pending.ids = part.ids
            data = part.encode(producer_id, first, created_ms, self.options.codec)
            sealed = SealedBatch(stream, pending, part.size_bytes, deadline_ns)
            cut_parts.append((sealed, data, MessageId(producer_id, first)))
            batches.append(pending)
            first += pending.count
        for sealed, data, stamp in cut_parts:  # from here on nothing raises
            stream.put(sealed, data, stamp)
            self.messages += sealed.pending.count
            self.size_bytes += sealed.size_bytes
        self._stir(stream)
        return batches

    def room_for(self, messages: int, size_bytes: int) -> bool:
        """Whether this much more can be added now. An empty buffer takes anything."""
        return self.messages == 0 or self._fits(messages, size_bytes)

    def _fits(self, messages: int, size_bytes: int) -> bool:
        return self.messages + messages <= self._messages_max and self.size_bytes + size_bytes <= self._bytes_max

    def when_room(self, messages: int, size_bytes: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback()` called once there is room, in order of asking, under the owner's lock; returns a cancel.

        `BufferFull` says how much room was missing. Room is not reserved: add, and wait again if the room is gone. A
        caller that then adds nothing must cancel, so that the next waiter is called.
        """
        return self._waiters.join(messages, size_bytes, callback)

    # --- the end -----------------------------------------------------------------------------------------------------

    def flush(self) -> Flush:
        """Send everything without linger. The result reports when all messages added so far are settled."""
        flush = Flush()
        for stream in self._all_streams():
            self._cut(stream)
            for sealed in stream.batches():
                flush.watch(sealed.pending)
        for sealed in chain((sealed for sealed, _ in self._handed), self._lent):
            flush.watch(sealed.pending)
        flush.count_down()
        return flush

    def give_up(self, sentence: str) -> None:
        """Fail everything that is not settled: NotSent if certainly not stored, OutcomeUnknown otherwise. Lent batches
        stay with their borrower, which reports their outcome."""
        for stream in self._all_streams():
            self._cut(stream)
            for sealed in [*stream.batches()]:
                stream.give_up(sealed, sentence)
        handed, self._handed = self._handed, []
        for sealed, _ in handed:
            self._settled(sealed, OutcomeUnknown(f"whether the spool has kept it is not known: {sentence}"))

    def take_unseen(self) -> list[Exception]:
        """The errors of failed batches that nobody has read, each once: for the ExceptionGroup of flush() and
        close()."""
        failed, self._failed = self._failed, {}
        errors = [pending.exception() for pending in failed if not pending.is_seen]
        return [error for error in errors if error is not None]

    def trouble(self, sentence: str, now_ns: int) -> None:
        """For `Line(on_trouble=...)`: a connection failed or was lost."""
        self._fail_once(sentence, now_ns)

    # --- ClientSession -----------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        """The line is connected, for the first time or again: look at every stream."""
        self._ready.update(dict.fromkeys(self._all_streams()))

    def asks(self, room: int, now_ns: int) -> list[Ask]:
        """Return the batches to send now, and fail the ones past their deadline. With room 0 (not connected), only
        fail."""
        alarms = self._alarms
        while alarms and alarms[0][0] <= now_ns:
            due_ns, _, stream = heapq.heappop(alarms)
            stream.forget_alarm(due_ns)
            self._ready[stream] = None
        asks: list[Ask] = []
        if self._diversion is not None:
            room = self._choose_way(self._diversion, room, now_ns)
        for stream in tuple(self._ready):
            leaving = self._work(stream, room - len(asks), now_ns)
            asks += [Ask(request_of(sealed), (sealed.data,), sealed) for sealed in leaving]
            if len(asks) < room or stream.is_empty:
                del self._ready[stream]
            self._set_alarm(stream, now_ns)
        return asks

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        """Take the outcome of a batch."""
        invariant(isinstance(token, SealedBatch), "a producer is answered what it asked")
        if not isinstance(token, SealedBatch):
            return
        stream = token.stream
        self._ready[stream] = None
        if isinstance(outcome, Answer):
            message = outcome.message
            if isinstance(message, Produced):
                stream.stored(token, message)
                self._breaker.succeeded()
                self._is_guarded = False
        elif isinstance(outcome, Refused):
            if stream.refused(token, outcome, now_ns):
                self._fail_once(outcome.sentence, now_ns)
        else:
            stream.lost(token, outcome)  # `trouble` counts the failure, once for all batches in flight

    def next_deadline(self) -> int | None:
        """When a linger ends, a batch may be tried again, a deadline passes, or the spool wants a look."""
        due_ns = self._alarms[0][0] if self._alarms else None
        if self._diversion is None:
            return due_ns
        look_ns = self._diversion.next_look_ns()
        return look_ns if due_ns is None else due_ns if look_ns is None else min(due_ns, look_ns)

    # --- the spool ---------------------------------------------------------------------------------------------------

    def oldest_ns(self) -> int | None:
        """When the oldest unsettled message was added."""
        found: list[int] = []
        for stream in self._all_streams():
            oldest = next((sealed for sealed in stream.batches() if not sealed.is_abandoned), None)
            if oldest is not None:
                found.append(oldest.deadline_ns - self._timeout_ns)
            elif stream.filling is not None:
                found.append(stream.filling.opened_ns)
        return min(found, default=None)

    @property
    def is_failing(self) -> bool:
        return self._breaker.is_open

    def note_success(self) -> None:
        """A spooled batch has arrived: the broker is well."""
        self._breaker.succeeded()

    def _spool_trouble(self) -> str:
        """Why waiting messages do not go to the spool, in brackets; empty where they do."""
        diversion = self._diversion
        if (
            diversion is None
            or diversion.send_path is not SendPath.DIVERT
            or diversion.room_for(self.messages, self.size_bytes)
        ):
            return ""
        return f" ({diversion.trouble})"

    def _choose_way(self, diversion: SpoolPort, room: int, now_ns: int) -> int:
        """Choose between broker and spool; returns how many batches may leave for the broker now."""
        before = diversion.send_path
        self.is_crammed = self.is_crammed and not self.room_for(1, 1)
        diversion.look(self, now_ns)
        send_path = diversion.send_path
        if diversion.fault is not None:
            self._is_guarded = True  # `add` raises the fault
            self.give_up(str(diversion.fault))
        if before is SendPath.DIRECT and send_path is not SendPath.DIRECT:
            for streams in (self._streams, self._due_streams):
                streams.update({name: stream.succeed() for name, stream in streams.items()})
            self._in_use = dict.fromkeys(self._all_streams())
        elif before is not SendPath.DIRECT and send_path is SendPath.DIRECT:
            for stream in self._all_streams():
                stream.restart()
        if before is not send_path:
            self._ready.update(dict.fromkeys(self._all_streams()))
        if send_path is SendPath.DIVERT and not self._handed:
            self._hand_over(diversion)
        return room if send_path is SendPath.DIRECT else 0

    def _hand_over(self, diversion: SpoolPort) -> None:
        """Hand batches to the spool in one go, as many as there is room for. The next go follows when these are
        kept."""
        handed: list[Handed] = []
        messages = size_bytes = 0
        for stream in self._all_streams():
            self._cut(stream)
            while stream.waiting and size_bytes < HANDED_BYTES_MAX:
                sealed = stream.waiting[0]
                messages += sealed.pending.count
                size_bytes += len(sealed.data)
                if not diversion.room_for(messages, size_bytes):
                    break
                was_sent = stream.hand_over()
                self._handed.append((sealed, was_sent))
                handed.append(Handed(stream.subject, sealed.pending.count, was_sent, sealed.data, self.broker_group))
        if handed:
            diversion.keep(handed, partial(self._on_kept, diversion))

    def _on_kept(self, diversion: SpoolPort, fault: FairwayError | None) -> None:
        handed, self._handed = self._handed, []
        if isinstance(fault, DiskFull):
            for sealed, was_sent in reversed(handed):
                sealed.stream.take_back(sealed, was_sent=was_sent)
                self._in_use[sealed.stream] = None
            return
        for sealed, _ in handed:
            if fault is None:
                receipt = diversion.receipt(sealed.stream.subject, sealed.pending.count, sealed.stamp)
                self._settled(sealed, receipt)
            else:
                self._settled(sealed, OutcomeUnknown(f"whether the spool has kept it is not known: {fault}"))

    # --- another broker ----------------------------------------------------------------------------------------------

    def is_filling(self, subject: str, is_due: bool) -> bool:
        """Whether a batch is being filled for the subject, and nothing of its stream has come back."""
        stream = (self._due_streams if is_due else self._streams).get(subject)
        return stream is not None and stream.filling is not None and not stream.is_recovering

    def is_flowing(self, subject: str, *, is_due: bool = False) -> bool:
        """Whether no batch of the subject has come back to be resent."""
        stream = self._streams_of(is_due).get(subject)
        return stream is None or not stream.is_recovering

    def unsettled(self) -> list[tuple[str, bool]]:
        """The subjects with unsettled messages, and whether these have a due time."""
        self._in_use = {stream: None for stream in self._in_use if not stream.is_empty}
        return [(stream.subject, self._due_streams.get(stream.subject) is stream) for stream in self._in_use]

    def lend(self, subject: str, *, is_due: bool) -> list[SealedBatch]:
        """Give away all sealed batches of a subject that are certainly not stored, in order. Another session sends them
        to another broker. They count in the buffer here until `repaid`."""
        stream = self._streams_of(is_due).get(subject)
        if stream is None:
            return []
        self._cut(stream)
        lent = stream.lend()
        self._lent.update(dict.fromkeys(lent))
        self._stir(stream)
        return lent

    def borrow(self, subject: str, sealed_batches: Sequence[SealedBatch], repay: Repay, *, is_due: bool) -> None:
        """Send batches that another session has lent, as if added here; `repay(lent, outcome)` reports each outcome."""
        streams = self._streams_of(is_due)
        stream = streams.get(subject) or self._new_stream(streams, subject)
        self._cut(stream)
        for lent in sealed_batches:
            pending = Borrowed(lent, repay)
            stream.put(SealedBatch(stream, pending, lent.size_bytes, lent.deadline_ns), lent.data, lent.stamp)
            self.messages += pending.count
            self.size_bytes += lent.size_bytes
        self._stir(stream)

    def repaid(self, sealed: SealedBatch, outcome: BatchReceipt | FairwayError) -> None:
        """Take the outcome of a lent batch."""
        del self._lent[sealed]
        self._settled(sealed, outcome)

    # --- within ------------------------------------------------------------------------------------------------------

    def _streams_of(self, is_due: bool) -> dict[str, ProducerStream]:
        return self._due_streams if is_due else self._streams

    def _all_streams(self) -> Iterator[ProducerStream]:
        return chain(self._streams.values(), self._due_streams.values())

    def _new_stream(self, streams: dict[str, ProducerStream], subject: str) -> ProducerStream:
        name = str(Subject.parse(subject))  # normalized, as messages and receipts carry the name
        backoff = RetryDelays(self._rng, first_ms=self.options.backoff_first_ms, most_ms=self.options.backoff_most_ms)
        stream = streams[name] = ProducerStream(
            name, self._rng, backoff, self.options.window, self._settled, self._stream_key
        )
        stream.broker_group = self.broker_group
        return stream

    def _admit(self, messages: int, size_bytes: int) -> None:
        """Raise if this much must not be added now."""
        diversion = self._diversion
        if self._is_guarded and diversion is None and not self._breaker.admits(self._clock.monotonic_ns()):
            raise CircuitOpen(f"the broker fails again and again, the last time so: {self._breaker.sentence}")
        if diversion is not None and diversion.fault is not None:
            raise diversion.fault
        if not self.room_for(messages, size_bytes):
            if self.options.when_full == "spool":
                self.is_crammed = self.is_stirred = True
            raise BufferFull(
                f"{self.messages} messages of {self.size_bytes} bytes wait for the broker{self._spool_trouble()}: no "
                f"room for {messages} more of {size_bytes} bytes in a buffer of {self._messages_max} messages and "
                f"{self._bytes_max} bytes; wait for room, choose a larger buffer (buffer_messages_max, "
                f"buffer_bytes_max), or give the client {'a larger' if diversion is not None else 'a'} spool",
                messages,
                size_bytes,
            )

    def _begin(self, stream: ProducerStream, size_bytes: int) -> BatchBuilder:
        """Begin a batch for a message of that size."""
        check_size(size_bytes)
        self._cut(stream)
        pending = self._batch_type(stream.subject, self._run_later)
        filling = stream.filling = BatchBuilder(pending, self._clock.monotonic_ns(), self._clock.wall_ms())
        self._stir(stream)
        return filling

    def _cut(self, stream: ProducerStream) -> None:
        """Seal the batch that is being filled."""
        filling, stream.filling = stream.filling, None
        if filling is None:
            return
        stamp = stream.stamp
        sealed = SealedBatch(stream, filling.pending, filling.size_bytes, filling.opened_ns + self._timeout_ns)
        try:
            data = filling.encode(*stamp, self.options.codec)
        except (FairwayError, TypeError) as error:  # every message was checked: what is left is their sum
            self._settled(sealed, not_sent(filling.pending, str(error)))
            return
        stream.put(sealed, data, stamp)
        self._stir(stream)

    def _stir(self, stream: ProducerStream) -> None:
        self._ready[stream] = self._in_use[stream] = None
        self.is_stirred = True

    def _work(self, stream: ProducerStream, room: int, now_ns: int) -> list[SealedBatch]:
        """Do the work that is due in one stream; returns the batches that leave."""
        filling = stream.filling
        if filling is not None and self._is_due(stream, filling, room, now_ns):
            self._cut(stream)
        if stream.is_late(now_ns):
            stream.expire(now_ns, self._too_late())
        return stream.take(room, now_ns) if stream.waiting or stream.is_recovering else []

    def _too_late(self) -> str:
        sentence = f"there was no answer within {self.options.delivery_timeout_ms / 1_000:g} s"
        return f"{sentence} ({self._breaker.sentence})" if self._breaker.sentence else sentence

    def _is_due(self, stream: ProducerStream, filling: BatchBuilder, room: int, now_ns: int) -> bool:
        """Whether to seal the batch that is being filled now."""
        age_ns = now_ns - filling.opened_ns
        if room > 0 and stream.has_room and (stream.in_flight == 0 or age_ns >= self._linger_ns):
            return True
        return age_ns >= self._filling_ns_max

    def _set_alarm(self, stream: ProducerStream, now_ns: int) -> None:
        """Set the time of the next look at this stream if nothing happens before."""
        oldest = next((sealed for sealed in stream.batches() if not sealed.is_abandoned), None)
        if oldest is not None and oldest.deadline_ns < stream.late_ns:
            stream.late_ns = oldest.deadline_ns
            self._ring(oldest.deadline_ns, stream)
        due_ns = NEVER_NS
        filling = stream.filling
        if filling is not None:
            lingers = stream.has_room and stream.in_flight > 0
            due_ns = filling.opened_ns + (self._linger_ns if lingers else self._filling_ns_max)
        if stream.is_recovering and not stream.in_flight and stream.retry_ns > now_ns:
            due_ns = min(due_ns, stream.retry_ns)
        if due_ns < stream.wake_ns:
            stream.wake_ns = due_ns
            self._ring(due_ns, stream)

    def _ring(self, due_ns: int, stream: ProducerStream) -> None:
        heapq.heappush(self._alarms, (due_ns, next(self._alarm_numbers), stream))

    def _settled(self, sealed: SealedBatch, outcome: BatchReceipt | FairwayError) -> None:
        pending = sealed.pending
        self.messages -= pending.count
        self.size_bytes -= sealed.size_bytes
        if not isinstance(outcome, BatchReceipt):
            self._failed[pending] = None
            if len(self._failed) > FAILURES_KEPT:
                del self._failed[next(iter(self._failed))]
        pending.settle(outcome)
        if self._waiters:
            self._waiters.offer()

    def _fail_once(self, sentence: str, now_ns: int) -> None:
        self._breaker.failed(sentence, now_ns)
        self._is_guarded = self.options.fails_fast and self._breaker.is_open
        if self.on_failure is not None:
            self._run_later(self.on_failure)
