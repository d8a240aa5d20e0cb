"""The producer half of a client, without a socket: buffer, batches, a window in flight, and each message stored once.

    producing = Producing(clock, rng, options, run_later=line.run_later)
    line.add(producing, now)
    pending = producing.add("orders", b"...", key="o-42")
    batches = producing.add_many("orders", payloads)
    if producing.is_stirred:            clear it, write `line.take(now)`, look at `line.next_deadline()` again

With nothing in flight for its subject a batch leaves at once; `linger_ms` is how long it waits for company while
another one is under way. A batch is cut when it is full, encoded there and then by whoever added its last message, and
goes through its `lane`, which has the law of sending again. After a second it is cut in any case, so that all its
messages may have the deadline of the first.

Messages with a due time are stored elsewhere than those without, by the delay server in its own log. So they have lanes
of their own, and with them streams and batches: all messages of a batch are due some time, or none is.

Not safe for threads by itself: the owner calls everything here under one lock, or from one loop. The clock is looked at
once per batch, not per message.
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
from fairway.batch.secret import new_secret
from fairway.errors import BufferFull, CircuitOpen, DiskFull, FairwayError, Misuse, OutcomeUnknown, Refused, invariant
from fairway.names import Subject
from fairway.protocol.backoff import NS_PER_MS, RetryDelays
from fairway.protocol.breaker import CircuitBreaker
from fairway.protocol.diversion import Handed, SendPath, SpoolPort
from fairway.protocol.filling import BatchBuilder, Extras, MessageColumns, check_extras, check_size
from fairway.protocol.lane import NEVER_NS, ProducerStream, SealedBatch, not_sent, request_of
from fairway.protocol.lending import Borrowed, Repay
from fairway.protocol.line import Errand
from fairway.protocol.messages import Produced
from fairway.protocol.pending import BatchReceipt, Pending, PendingBatch
from fairway.protocol.session import Answer, Ask, RequestOutcome
from fairway.protocol.waiters import Flush, RoomQueue
from fairway.world.buffers import Bytes
from fairway.world.clock import Clock
from fairway.world.rng import Rng

PendingT = TypeVar("PendingT", bound=Pending)
BatchT = TypeVar("BatchT", bound=PendingBatch)

FILLING_MS_MAX: Final = 1_000  # how much younger than its batch a message can be
HANDED_BYTES_MAX: Final = 8 * limits.MIB  # at a time, to be kept elsewhere: one sync
FAILURES_KEPT: Final = 1_000  # that nobody has looked at: one per batch, the newest


@dataclass(frozen=True, slots=True)
class ProducerOptions:
    """How a producer behaves."""

    batch_messages_max: int = limits.LOT_MESSAGES_MAX  # a larger one is sent again for each lot that is cut from it
    batch_bytes_max: int = 1 * limits.MIB  # a message that is larger has a batch of its own
    linger_ms: float = 5.0  # how long a batch waits for company while another is in flight; never otherwise
    window: int = 16  # batches in flight per subject
    buffer_messages_max: int = 1_000_000  # added and not yet settled
    buffer_bytes_max: int = 64 * limits.MIB  # the same in bytes of payloads, keys, tags and headers
    delivery_timeout_ms: int = 120_000  # after which a message fails: NotSent, or OutcomeUnknown if it was under way
    backoff_first_ms: int = 20  # a few group commits
    backoff_most_ms: int = 5_000
    codec: Codec = Codec.NONE
    fails_fast: bool = False  # `add` raises CircuitOpen while the broker fails again and again
    breaker_failures: int = 5  # in a row
    breaker_ms: int = 5_000  # until one message may try
    when_full: Literal["block", "raise", "spool"] = "block"  # what `send` does when the buffer has no room
    block_ms: int = 60_000  # how long it waits for room, unless it is told; then BufferFull

    def __post_init__(self) -> None:
        for name, most in (
            ("batch_messages_max", limits.BATCH_MESSAGES_MAX),
            ("batch_bytes_max", limits.BATCH_RAW_BYTES_MAX // 2),
            ("window", limits.STREAM_BATCHES_MAX),
            ("buffer_messages_max", NEVER_NS),
            ("buffer_bytes_max", NEVER_NS),
            ("delivery_timeout_ms", limits.STREAM_IDLE_MS_MAX // 2),  # the broker must still know what it has stored
            ("breaker_failures", NEVER_NS),
        ):
            if not 1 <= getattr(self, name) <= most:
                raise Misuse(f"{name} is {getattr(self, name)}: 1 to {most} is allowed")
        if self.linger_ms < 0 or self.breaker_ms < 0 or not 1 <= self.backoff_first_ms <= self.backoff_most_ms:
            raise Misuse("linger_ms and breaker_ms are not negative, and backoff_first_ms is 1 to backoff_most_ms")
        if self.when_full not in ("block", "raise", "spool") or self.block_ms < 0:
            raise Misuse(f"when_full={self.when_full!r} is 'block', 'raise' or 'spool', and block_ms is 0 or more")


class ProducerSession(Generic[PendingT, BatchT]):
    """The producer's session on a line. Faces give `pending_type` and `batch_type` of their own, to be waited for."""

    def __init__(
        self,
        clock: Clock,
        rng: Rng,
        options: ProducerOptions | None = None,
        *,
        run_later: Callable[[Errand], None],
        pending_type: type[PendingT] = Pending,  # type: ignore[assignment]
        batch_type: type[BatchT] = PendingBatch,  # type: ignore[assignment]
    ) -> None:
        self.options = options or ProducerOptions()
        self.is_stirred = False  # something should leave, or a deadline is new; the owner clears it
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
        self._is_guarded = False  # the circuit is open, and that is to be felt
        self._lanes: dict[str, ProducerStream] = {}
        self._due_lanes: dict[str, ProducerStream] = {}  # of messages that wait for their time elsewhere
        self._ready: dict[ProducerStream, None] = {}  # may have something to do now
        self._in_use: dict[ProducerStream, None] = {}  # those that may hold something unsettled
        self._alarms: list[tuple[int, int, ProducerStream]] = []  # a heap; some ring for nothing
        self._alarm_numbers = count()
        self._waiters = RoomQueue(self._fits, self.room_for)
        self._failed: dict[PendingBatch, None] = {}  # nobody has looked at them yet, as far as is known
        self._diversion: SpoolPort | None = None
        self._handed: list[tuple[SealedBatch, bool]] = []  # under way to the other side; and whether sent before
        self._lent: dict[SealedBatch, None] = {}  # that another producer brings to another broker
        self.broker_group = ""  # for receipts, in a cluster
        self.on_failure: Errand | None = None  # called as an errand each time the broker has failed
        self.is_crammed = False  # the buffer was found full, and the other way is the answer to that

    def divert(self, diversion: SpoolPort) -> None:
        """From now on there is another way than the one to the broker. To be called before anything is added: whoever
        goes that way shows the secrets of streams, too."""
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
        """One message. Raises BadName, TypeError, Misuse, BufferFull or CircuitOpen, and has then added nothing."""
        lanes = self._due_lanes if due_ms else self._lanes
        lane = lanes.get(subject) or self._new_lane(lanes, subject)
        data = payload if type(payload) is bytes else batch.as_bytes(payload)
        size_bytes = len(data)
        extras: Extras | None = None
        if key is not None or tags or headers or id is not None or due_ms:
            extras = (key, tuple(tags), dict(headers) if headers else None, id, due_ms)  # copies: nobody writes to them
            size_bytes += check_extras(extras, tags)
        if self._is_guarded or self.messages >= self._messages_max or self.size_bytes + size_bytes > self._bytes_max:
            self._admit(1, size_bytes)
        filling = lane.filling
        if filling is None or filling.size_bytes + size_bytes > self._batch_bytes_max:
            filling = self._begin(lane, size_bytes)
        index = len(filling.payloads)
        filling.payloads.append(data)
        if extras is not None or filling.extras is not None:
            filling.enrich(extras)
        filling.size_bytes += size_bytes
        self.messages += 1
        self.size_bytes += size_bytes
        if index + 1 >= self._batch_messages_max:
            self._cut(lane)
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
        """One message in a batch of its own: for what may be refused, so that nobody else is refused with it."""
        lanes = self._lanes_of(bool(due_ms))
        self._cut(lanes.get(subject) or self._new_lane(lanes, subject))
        pending = self.add(subject, payload, key, tags, headers, id, due_ms)
        self._cut(lanes[subject])
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
        """Many messages in their order, in as few batches as bounds allow. All of them are added, or none.

        BufferFull if they do not all fit, unless nothing is buffered: then they are taken, however many they are.
        """
        if due_ms is not None and not all(due_ms):
            raise Misuse("due_ms: every message has a time, 1 or later, or the whole column is left out")
        lanes = self._lanes if due_ms is None else self._due_lanes
        lane = lanes.get(subject) or self._new_lane(lanes, subject)
        is_plain = set(map(type, payloads)) <= {bytes}
        plain = cast(Sequence[bytes], payloads) if is_plain else list(map(batch.as_bytes, payloads))
        columns = MessageColumns(plain, keys, tags, headers, ids, due_ms)
        self._admit(len(payloads), columns.size_bytes)
        self._cut(lane)
        deadline_ns, created_ms = self._clock.monotonic_ns() + self._timeout_ns, self._clock.wall_ms()
        producer_id, first = lane.stamp
        sealed: list[tuple[SealedBatch, bytes, tuple[int, int]]] = []
        batches: list[BatchT] = []
        for part in columns.parts(self._batch_messages_max, self._batch_bytes_max):
            pending = self._batch_type(lane.subject, self._run_later)
            pending.count = len(part.payloads)
            pending.ids = part.ids
            data = part.encode(producer_id, first, created_ms, self.options.codec)
            sealed.append((SealedBatch(lane, pending, part.size_bytes, deadline_ns), data, (producer_id, first)))
            batches.append(pending)
            first += pending.count
        for parcel, data, stamp in sealed:  # from here on nothing raises
            lane.put(parcel, data, stamp)
            self.messages += parcel.pending.count
            self.size_bytes += parcel.size_bytes
        self._stir(lane)
        return batches

    def room_for(self, messages: int, size_bytes: int) -> bool:
        """Whether so much more can be added now. An empty buffer takes anything."""
        return self.messages == 0 or self._fits(messages, size_bytes)

    def _fits(self, messages: int, size_bytes: int) -> bool:
        return self.messages + messages <= self._messages_max and self.size_bytes + size_bytes <= self._bytes_max

    def when_room(self, messages: int, size_bytes: int, callback: Callable[[], None]) -> Callable[[], None]:
        """Have `callback()` called once there is room, in order of asking, under the owner's lock; returns a cancel.

        `BufferFull` says how much room was missing. Room is not kept for anybody: add, and wait again if it is gone.
        Whoever was called and adds nothing after all cancels too, so that the next one is called.
        """
        return self._waiters.join(messages, size_bytes, callback)

    # --- the end -----------------------------------------------------------------------------------------------------

    def flush(self) -> Flush:
        """Let everything leave without linger; the result says when all that was added so far is settled."""
        flush = Flush()
        for lane in self._all_lanes():
            self._cut(lane)
            for parcel in lane.parcels():
                flush.watch(parcel.pending)
        for parcel in chain((parcel for parcel, _ in self._handed), self._lent):
            flush.watch(parcel.pending)
        flush.count_down()
        return flush

    def give_up(self, sentence: str) -> None:
        """What is not settled fails now: NotSent where it certainly is not stored, OutcomeUnknown otherwise. What is
        lent is with another, who says what becomes of it."""
        for lane in self._all_lanes():
            self._cut(lane)
            for parcel in [*lane.parcels()]:
                lane.give_up(parcel, sentence)
        handed, self._handed = self._handed, []
        for parcel, _ in handed:
            self._settled(parcel, OutcomeUnknown(f"whether the spool has kept it is not known: {sentence}"))

    def take_unseen(self) -> list[Exception]:
        """Why batches failed that nobody has looked at, each once: for the ExceptionGroup of flush() and close()."""
        failed, self._failed = self._failed, {}
        errors = [pending.exception() for pending in failed if not pending.is_seen]
        return [error for error in errors if error is not None]

    def trouble(self, sentence: str, now_ns: int) -> None:
        """For `Line(on_trouble=...)`: no connection can be had, or it was lost."""
        self._fail_once(sentence, now_ns)

    # --- Session -----------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        """Connected, or again: what came back leaves once more."""
        self._ready.update(dict.fromkeys(self._all_lanes()))

    def asks(self, room: int, now_ns: int) -> list[Ask]:
        """What leaves now; gives up what has had its time. With room 0 (not connected) only the latter."""
        alarms = self._alarms
        while alarms and alarms[0][0] <= now_ns:
            due_ns, _, lane = heapq.heappop(alarms)
            lane.forget_alarm(due_ns)
            self._ready[lane] = None
        asks: list[Ask] = []
        if self._diversion is not None:
            room = self._choose_way(self._diversion, room, now_ns)
        for lane in tuple(self._ready):
            leaving = self._work(lane, room - len(asks), now_ns)
            asks += [Ask(request_of(parcel), (parcel.data,), parcel) for parcel in leaving]
            if len(asks) < room or lane.is_empty:
                del self._ready[lane]
            self._set_alarm(lane, now_ns)
        return asks

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        """How a batch fared."""
        invariant(isinstance(token, SealedBatch), "a producer is answered what it asked")
        if not isinstance(token, SealedBatch):
            return
        lane = token.lane
        self._ready[lane] = None
        if isinstance(outcome, Answer):
            message = outcome.message
            if isinstance(message, Produced):
                lane.stored(token, message)
                self._breaker.succeeded()
                self._is_guarded = False
        elif isinstance(outcome, Refused):
            if lane.refused(token, outcome, now_ns):
                self._fail_once(outcome.sentence, now_ns)
        else:
            lane.lost(token, outcome)  # `trouble` counts it, once for all that was under way

    def next_deadline(self) -> int | None:
        """When a batch has lingered long enough, is to be tried again, or has had its time."""
        due_ns = self._alarms[0][0] if self._alarms else None
        if self._diversion is None:
            return due_ns
        look_ns = self._diversion.next_look_ns()
        return look_ns if due_ns is None else due_ns if look_ns is None else min(due_ns, look_ns)

    # --- the other way -----------------------------------------------------------------------------------------------

    def oldest_ns(self) -> int | None:
        """When the oldest message that is not settled was added."""
        found: list[int] = []
        for lane in self._all_lanes():
            oldest = next((parcel for parcel in lane.parcels() if not parcel.is_abandoned), None)
            if oldest is not None:
                found.append(oldest.deadline_ns - self._timeout_ns)
            elif lane.filling is not None:
                found.append(lane.filling.opened_ns)
        return min(found, default=None)

    @property
    def is_failing(self) -> bool:
        return self._breaker.is_open

    def note_success(self) -> None:
        """What went the other way has arrived: the broker is well."""
        self._breaker.succeeded()

    def _spool_trouble(self) -> str:
        """Why what waits does not go the other way, in brackets; empty where it does."""
        diversion = self._diversion
        if (
            diversion is None
            or diversion.way is not SendPath.DIVERT
            or diversion.room_for(self.messages, self.size_bytes)
        ):
            return ""
        return f" ({diversion.trouble})"

    def _choose_way(self, diversion: SpoolPort, room: int, now_ns: int) -> int:
        """How many batches may leave for the broker now."""
        before = diversion.way
        self.is_crammed = self.is_crammed and not self.room_for(1, 1)
        diversion.look(self, now_ns)
        way = diversion.way
        if diversion.fault is not None:
            self._is_guarded = True  # `add` raises it
            self.give_up(str(diversion.fault))
        if before is SendPath.DIRECT and way is not SendPath.DIRECT:
            for lanes in (self._lanes, self._due_lanes):
                lanes.update({name: lane.succeed() for name, lane in lanes.items()})
            self._in_use = dict.fromkeys(self._all_lanes())
        elif before is not SendPath.DIRECT and way is SendPath.DIRECT:
            for lane in self._all_lanes():
                lane.restart()
        if before is not way:
            self._ready.update(dict.fromkeys(self._all_lanes()))
        if way is SendPath.DIVERT and not self._handed:
            self._hand_over(diversion)
        return room if way is SendPath.DIRECT else 0

    def _hand_over(self, diversion: SpoolPort) -> None:
        """All that there is room for, in one go; the next follows when it is kept."""
        handed: list[Handed] = []
        messages = size_bytes = 0
        for lane in self._all_lanes():
            self._cut(lane)
            while lane.waiting and size_bytes < HANDED_BYTES_MAX:
                parcel = lane.waiting[0]
                messages += parcel.pending.count
                size_bytes += len(parcel.data)
                if not diversion.room_for(messages, size_bytes):
                    break
                was_sent = lane.hand_over()
                self._handed.append((parcel, was_sent))
                handed.append(Handed(lane.subject, parcel.pending.count, was_sent, parcel.data, self.broker_group))
        if handed:
            diversion.keep(handed, partial(self._on_kept, diversion))

    def _on_kept(self, diversion: SpoolPort, fault: FairwayError | None) -> None:
        handed, self._handed = self._handed, []
        if isinstance(fault, DiskFull):
            for parcel, was_sent in reversed(handed):
                parcel.lane.take_back(parcel, was_sent=was_sent)
                self._in_use[parcel.lane] = None
            return
        for parcel, _ in handed:
            if fault is None:
                receipt = diversion.receipt(parcel.lane.subject, parcel.pending.count, MessageId(*parcel.stamp))
                self._settled(parcel, receipt)
            else:
                self._settled(parcel, OutcomeUnknown(f"whether the spool has kept it is not known: {fault}"))

    # --- another broker ----------------------------------------------------------------------------------------------

    def is_filling(self, subject: str, is_due: bool) -> bool:
        """Whether one more message to it would have company, and nothing of it has come back."""
        lane = (self._due_lanes if is_due else self._lanes).get(subject)
        return lane is not None and lane.filling is not None and not lane.is_recovering

    def is_flowing(self, subject: str, *, is_due: bool = False) -> bool:
        """Whether nothing of it has come back that would have to leave again first."""
        lane = self._lanes_of(is_due).get(subject)
        return lane is None or not lane.is_recovering

    def unsettled(self) -> list[tuple[str, bool]]:
        """The subjects that something is buffered for, and whether it is due later."""
        self._in_use = {lane: None for lane in self._in_use if not lane.is_empty}
        return [(lane.subject, self._due_lanes.get(lane.subject) is lane) for lane in self._in_use]

    def lend(self, subject: str, *, is_due: bool) -> list[SealedBatch]:
        """All of a subject that is certainly not stored, in order, for another producer to bring to another broker. It
        stays on the books here until it is `repaid`."""
        lane = self._lanes_of(is_due).get(subject)
        if lane is None:
            return []
        self._cut(lane)
        lent = lane.lend()
        self._lent.update(dict.fromkeys(lent))
        self._stir(lane)
        return lent

    def borrow(self, subject: str, parcels: Sequence[SealedBatch], repay: Repay, *, is_due: bool) -> None:
        """Send what another has lent, as if it had been added here; `repay(parcel, outcome)` when its fate is known."""
        lanes = self._lanes_of(is_due)
        lane = lanes.get(subject) or self._new_lane(lanes, subject)
        self._cut(lane)
        for lent in parcels:
            pending = Borrowed(lent, repay)
            lane.put(SealedBatch(lane, pending, lent.size_bytes, lent.deadline_ns), lent.data, lent.stamp)
            self.messages += pending.count
            self.size_bytes += lent.size_bytes
        self._stir(lane)

    def repaid(self, parcel: SealedBatch, outcome: BatchReceipt | FairwayError) -> None:
        """What became of something that was lent."""
        del self._lent[parcel]
        self._settled(parcel, outcome)

    # --- within ------------------------------------------------------------------------------------------------------

    def _lanes_of(self, is_due: bool) -> dict[str, ProducerStream]:
        return self._due_lanes if is_due else self._lanes

    def _all_lanes(self) -> Iterator[ProducerStream]:
        return chain(self._lanes.values(), self._due_lanes.values())

    def _new_lane(self, lanes: dict[str, ProducerStream], subject: str) -> ProducerStream:
        name = str(Subject.parse(subject))  # plain, as messages and receipts carry it
        backoff = RetryDelays(self._rng, first_ms=self.options.backoff_first_ms, most_ms=self.options.backoff_most_ms)
        lane = lanes[name] = ProducerStream(
            name, self._rng, backoff, self.options.window, self._settled, self._stream_key
        )
        lane.broker_group = self.broker_group
        return lane

    def _admit(self, messages: int, size_bytes: int) -> None:
        """Raises if so much must not be added now."""
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

    def _begin(self, lane: ProducerStream, size_bytes: int) -> BatchBuilder:
        """A new batch for a message of that size."""
        check_size(size_bytes)
        self._cut(lane)
        pending = self._batch_type(lane.subject, self._run_later)
        filling = lane.filling = BatchBuilder(pending, self._clock.monotonic_ns(), self._clock.wall_ms())
        self._stir(lane)
        return filling

    def _cut(self, lane: ProducerStream) -> None:
        """Seal what is being filled."""
        filling, lane.filling = lane.filling, None
        if filling is None:
            return
        stamp = lane.stamp
        parcel = SealedBatch(lane, filling.pending, filling.size_bytes, filling.opened_ns + self._timeout_ns)
        try:
            data = filling.encode(*stamp, self.options.codec)
        except (FairwayError, TypeError) as error:  # every message was checked: what is left is their sum
            self._settled(parcel, not_sent(filling.pending, str(error)))
            return
        lane.put(parcel, data, stamp)
        self._stir(lane)

    def _stir(self, lane: ProducerStream) -> None:
        self._ready[lane] = self._in_use[lane] = None
        self.is_stirred = True

    def _work(self, lane: ProducerStream, room: int, now_ns: int) -> list[SealedBatch]:
        """Do what is due in one lane; what leaves it."""
        filling = lane.filling
        if filling is not None and self._is_due(lane, filling, room, now_ns):
            self._cut(lane)
        if lane.is_late(now_ns):
            lane.expire(now_ns, self._too_late())
        return lane.take(room, now_ns) if lane.waiting or lane.is_recovering else []

    def _too_late(self) -> str:
        sentence = f"there was no answer within {self.options.delivery_timeout_ms / 1_000:g} s"
        return f"{sentence} ({self._breaker.sentence})" if self._breaker.sentence else sentence

    def _is_due(self, lane: ProducerStream, filling: BatchBuilder, room: int, now_ns: int) -> bool:
        """Whether the batch that is being filled is to be sealed as it is."""
        age_ns = now_ns - filling.opened_ns
        if room > 0 and lane.has_room and (lane.in_flight == 0 or age_ns >= self._linger_ns):
            return True
        return age_ns >= self._filling_ns_max

    def _set_alarm(self, lane: ProducerStream, now_ns: int) -> None:
        """When to look at this lane again if nothing happens."""
        oldest = next((parcel for parcel in lane.parcels() if not parcel.is_abandoned), None)
        if oldest is not None and oldest.deadline_ns < lane.late_ns:
            lane.late_ns = oldest.deadline_ns
            self._ring(oldest.deadline_ns, lane)
        due_ns = NEVER_NS
        filling = lane.filling
        if filling is not None:
            lingers = lane.has_room and lane.in_flight > 0
            due_ns = filling.opened_ns + (self._linger_ns if lingers else self._filling_ns_max)
        if lane.is_recovering and not lane.in_flight and lane.retry_at_ns > now_ns:
            due_ns = min(due_ns, lane.retry_at_ns)
        if due_ns < lane.wake_ns:
            lane.wake_ns = due_ns
            self._ring(due_ns, lane)

    def _ring(self, due_ns: int, lane: ProducerStream) -> None:
        heapq.heappush(self._alarms, (due_ns, next(self._alarm_numbers), lane))

    def _settled(self, parcel: SealedBatch, outcome: BatchReceipt | FairwayError) -> None:
        pending = parcel.pending
        self.messages -= pending.count
        self.size_bytes -= parcel.size_bytes
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
