"""A producer on a line, a broker that keeps the rules of the dedupe window, and a wire on which everything goes wrong.

Connections are cut in the middle of frames; what was under way on them may still be carried out much later. The broker
refuses for passing and for final reasons, answers late and out of order, forgets streams, crashes and loses what it had
not yet answered. All of it is drawn from one seed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from fairway import batch, limits
from fairway.errors import Code, Refused
from fairway.protocol import Connection, RequestReceived, Role
from fairway.protocol.line import Line
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.producer_session import ProducerOptions, ProducerSession
from fairway.protocol.receipts import Pending, PendingBatch
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng

PASSING = (Code.BUSY, Code.READ_ONLY, Code.EXPIRED, Code.NOT_MASTER)
FINAL = (Code.TOO_LARGE, Code.BAD_REQUEST)


@dataclass
class Slot:
    """One message in the broker's log."""

    subject: str
    sequence: int
    payload: bytes


@dataclass
class Stored:
    """One batch in the broker's log."""

    producer_sequence: int
    crc: int
    answer: Produced
    end: int


class ModelBroker:
    """Stores batches by the rules of the dedupe window. A position is a number of messages in the log."""

    def __init__(self, rng: SeededRng) -> None:
        self.rng = rng
        self.log: list[Slot] = []
        self.durable = 0
        self.streams: dict[int, list[Stored]] = {}
        self.is_moody = True
        self.is_away = False
        self.settled_starts: set[int] = set()  # streams whose first batch's answer has reached the producer
        self._next: dict[str, int] = {}

    def produce(self, subject: str, data: bytes) -> tuple[Produced, int]:
        """The answer, and the position at which it is durable."""
        if self.is_moody and self.rng.below(12) == 0:
            raise Refused(PASSING[self.rng.below(len(PASSING))], "not now", retry_after_ms=self.rng.below(50))
        if self.is_moody and self.rng.below(60) == 0:
            raise Refused(FINAL[self.rng.below(len(FINAL))], "never")
        header = batch.check(data)
        known = self.judge(header)
        if known is not None:
            first = known.answer.first_sequence
            return Produced(first, header.count, 1, True, 1), known.end
        first = self._next.get(subject, 0)
        self._next[subject] = first + header.count
        for index, payload in enumerate(batch.decode(data).payloads):
            self.log.append(Slot(subject, first + index, bytes(payload)))
        answer, end = Produced(first, header.count, 1, False, 1), len(self.log)
        stored = Stored(header.first_sequence, header.crc, answer, end)
        self.streams.setdefault(header.producer_id, []).append(stored)
        return answer, end

    def judge(self, header: batch.BatchHeader) -> Stored | None:
        """None: the batch is new. Else the original."""
        stream = self.streams.get(header.producer_id)
        first = header.first_sequence
        if stream is None:
            if first:
                raise Refused(Code.UNKNOWN_PRODUCER, "not remembered")
            return None
        for stored in stream[-limits.STREAM_BATCHES_MAX :]:
            if (stored.producer_sequence, stored.crc, stored.answer.count) == (first, header.crc, header.count):
                return stored
        expected = stream[-1].producer_sequence + stream[-1].answer.count
        if first != expected:
            raise Refused(Code.SEQUENCE_GAP if first > expected else Code.SEQUENCE_CONFLICT, f"not at {expected}")
        return None

    def crash(self) -> None:
        """Bytes that were not durable are gone, and answered to nobody."""
        for slot in reversed(self.log[self.durable :]):
            self._next[slot.subject] = slot.sequence
        del self.log[self.durable :]
        kept = {each: [one for one in stream if one.end <= self.durable] for each, stream in self.streams.items()}
        self.streams = {each: stream for each, stream in kept.items() if stream}

    def forget(self) -> None:
        """As after a week: some streams are no longer remembered (never one that may still begin again at 0)."""
        self.streams = {each: kept for each, kept in self.streams.items() if each not in self.settled_starts}


@dataclass
class Request:
    """What the broker has heard and not yet begun, or done and not yet answered."""

    correlation: int
    subject: str
    data: bytes


class Wire:
    """One connection, both directions, until the broker's side has nothing left of it."""

    def __init__(self, now_ns: int) -> None:
        self.server = Connection(Role.SERVER, now_ns)
        self.up = bytearray()
        self.down = bytearray()
        self.heard: list[Request] = []
        self.done: list[tuple[Request, Produced | Refused, int]] = []


@dataclass
class Sent:
    """What the producer was told to send, in order."""

    payload: bytes
    subject: str
    batch: PendingBatch
    index: int


@dataclass
class World:
    """Producer, wire, broker, and the hand of fate."""

    seed: int
    sent: list[Sent] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rng = SeededRng(self.seed)
        self.clock = ManualClock()
        self.line = Line(self.rng.child("line"), on_trouble=self._trouble)
        options = ProducerOptions(
            batch_messages_max=1 + self.rng.below(6),
            window=1 + self.rng.below(8),
            delivery_timeout_ms=(300, 2_000, 60_000)[self.rng.below(3)],
            buffer_messages_max=200,
        )
        self.producing: ProducerSession[Pending, PendingBatch] = ProducerSession(
            self.clock, self.rng.child("producer"), options, run_later=self.line.run_later
        )
        self.line.add(self.producing, self.now_ns)
        self.broker = ModelBroker(self.rng.child("broker"))
        self.wire: Wire | None = None
        self.ghosts: list[Wire] = []  # cut, but the broker has not heard the end of it
        self._payloads = 0

    @property
    def now_ns(self) -> int:
        return self.clock.monotonic_ns()

    def _trouble(self, sentence: str, now_ns: int) -> None:
        self.producing.trouble(sentence, now_ns)

    # --- what the user does

    def send(self) -> None:
        subject = ("red", "red", "blue")[self.rng.below(3)]
        if self.producing.room_for(10, 1_000):
            if self.rng.below(4):
                for payload in self._fresh(1 + self.rng.below(3)):
                    pending = self.producing.add(subject, payload)
                    self.sent.append(Sent(payload, subject, pending.batch, pending.index))
            else:
                payloads = self._fresh(1 + self.rng.below(10))
                places = [
                    (each, index) for each in self.producing.add_many(subject, payloads) for index in range(each.count)
                ]
                for payload, (each, index) in zip(payloads, places, strict=True):
                    self.sent.append(Sent(payload, subject, each, index))

    def _fresh(self, count: int) -> list[bytes]:
        self._payloads += count
        return [str(number).encode() for number in range(self._payloads - count, self._payloads)]

    # --- what happens

    def step(self) -> None:
        """One thing happens."""
        chance = self.rng.below(100)
        if chance < 25:
            self.send()
        elif chance < 45:
            self.clock.advance(self.rng.below(40))
        elif chance < 49:
            self.cut()
        elif chance < 50:
            self.crash()
        elif chance < 51 and not self.ghosts:
            self.broker.forget()
        elif chance < 52:
            self.broker.is_away = not self.broker.is_away
        elif chance < 53 and self.rng.below(4) == 0:
            self.clock.advance(500)
        self.move()

    def heal(self) -> None:
        """From here on all goes well; everything is settled in bounded time."""
        self.broker.is_moody = self.broker.is_away = False
        for _ in range(3_000):
            if not self.producing.messages:
                break
            self.clock.advance(50)
            self.move(is_whole=True)
        while self.ghosts:
            self.haunt(self.ghosts[0])

    def move(self, *, is_whole: bool = False) -> None:
        """Bytes move a little, in both directions; the broker works a little."""
        due = self.line.dial_due()
        if due is not None and due <= self.now_ns:
            if self.broker.is_away:
                self.line.unreachable("nobody is there", self.now_ns)
            else:
                self.line.connected(self.now_ns)
                self.wire = Wire(self.now_ns)
        wire = self.wire
        written = b"".join(self.line.take(self.now_ns))
        if wire is not None:
            wire.up += written
            self.serve(wire, is_whole=is_whole)
            self._feed(wire, len(wire.down) if is_whole else self.rng.below(len(wire.down) + 1))
            if self.line.is_over():
                self.cut()
        if self.ghosts and self.rng.below(3) == 0:
            self.haunt(self.ghosts[self.rng.below(len(self.ghosts))])

    def _feed(self, wire: Wire, count: int) -> None:
        """Some of the answers arrive."""
        self.line.feed(bytes(wire.down[:count]), self.now_ns)
        del wire.down[:count]
        self._learn()

    def _learn(self) -> None:
        for each in self.sent:
            if each.batch.done() and each.batch.exception() is None:
                first = each.batch.receipt().first_id
                if first.sequence == 0:
                    self.broker.settled_starts.add(first.producer_id)

    def serve(self, wire: Wire, *, is_whole: bool = False) -> None:
        """The broker hears, works and answers, some of each."""
        count = len(wire.up) if is_whole else self.rng.below(len(wire.up) + 1)
        for event in wire.server.feed(bytes(wire.up[:count]), self.now_ns):
            if isinstance(event, RequestReceived) and isinstance(event.message, Produce):
                data = bytes(event.attachments[0])
                wire.heard.append(Request(event.correlation, event.message.subject, data))
        del wire.up[:count]
        while wire.heard and (is_whole or self.rng.below(3)):
            self.work(wire)
        while wire.done and (is_whole or self.rng.below(3)):
            request, answer, end = wire.done.pop(self.rng.below(len(wire.done)))
            self.broker.durable = max(self.broker.durable, end)
            if isinstance(answer, Refused):
                wire.server.refuse(request.correlation, answer)
            else:
                wire.server.respond(request.correlation, answer)
        wire.down += b"".join(wire.server.take())

    def work(self, wire: Wire) -> None:
        """One request is carried out."""
        request = wire.heard.pop(0)
        try:
            answer, end = self.broker.produce(request.subject, request.data)
        except Refused as refused:
            wire.done.append((request, refused, 0))
        else:
            wire.done.append((request, answer, end))

    def cut(self) -> None:
        """The producer's side of the connection is gone; what it had written may still arrive."""
        if self.wire is not None:
            if self.rng.below(2):
                self.ghosts.append(self.wire)
            self.wire = None
            self.line.lost("cut", self.now_ns)

    def haunt(self, wire: Wire) -> None:
        """The broker still hears something of a dead connection."""
        self.serve(wire)
        if (not wire.up and not wire.heard) or self.rng.below(4) == 0:
            self.ghosts.remove(wire)
            self.broker.durable = max([self.broker.durable, *(end for _, _, end in wire.done)])

    def crash(self) -> None:
        """The broker dies and comes back."""
        self.cut()
        self.ghosts.clear()
        self.broker.crash()
