"""A producer on a line, and in place of the broker a test that reads the requests and says what is answered."""

from __future__ import annotations

from typing import Any

from fairway import batch
from fairway.errors import Code, Refused
from fairway.protocol import Connection, ControlMessage, RequestReceived, Role
from fairway.protocol import ConnectionOptions as HelloOptions
from fairway.protocol.line import Line, ReconnectOptions
from fairway.protocol.messages import Produced
from fairway.protocol.producer_session import ProducerOptions, ProducerSession
from fairway.protocol.receipts import Pending, PendingBatch
from fairway.runtime.clock import ManualClock
from fairway.runtime.rng import SeededRng


class WiredLine:
    """A line whose other end is here. Time moves only when told to."""

    def __init__(self, *, server: HelloOptions | None = None, **options: Any) -> None:
        self.clock = ManualClock()
        self.troubles: list[str] = []
        self.line = Line(SeededRng("line"), ReconnectOptions(**options), on_trouble=self.on_trouble)
        self.server: Connection | None = None
        self.requests: list[RequestReceived] = []  # heard and not yet answered
        self._server_options = server

    def on_trouble(self, sentence: str, now_ns: int) -> None:
        self.troubles.append(sentence)

    @property
    def now_ns(self) -> int:
        return self.clock.monotonic_ns()

    def is_open(self) -> bool:
        return self.line.is_open

    def is_closed(self) -> bool:
        return self.line.is_closed

    def has_server(self) -> bool:
        """Whether anybody is at the other end."""
        return self.server is not None

    def connect(self) -> None:
        """Wait until the line wants to connect, and accept."""
        due_ns = self.line.dial_due()
        assert due_ns is not None
        self.clock.advance(max(due_ns - self.now_ns, 0) / 1e6)
        self.line.connected(self.now_ns)
        self.server = Connection(Role.SERVER, self.now_ns, self._server_options)
        self.pump()

    def pump(self) -> None:
        """Carry everything in both directions, until there is nothing more to carry."""
        for _ in range(100):
            up = b"".join(self.line.take(self.now_ns))
            if self.server is None:
                return
            for event in self.server.feed(up, self.now_ns):
                if isinstance(event, RequestReceived):
                    self.requests.append(event)
            down = b"".join(self.server.take())
            self.line.feed(down, self.now_ns)
            if self.line.is_over():
                self.cut()
            if not up and not down:
                return
        raise AssertionError("it never ends")

    def sleep(self, ms: float) -> None:
        """Let time pass, and have everything done that falls due."""
        end_ns = self.now_ns + round(ms * 1e6)
        for _ in range(10_000):
            due_ns = self.line.next_deadline()
            if due_ns is None or due_ns > end_ns:
                self.clock.advance((end_ns - self.now_ns) / 1e6)
                self.pump()
                return
            self.clock.advance(max(due_ns - self.now_ns, 0) / 1e6)
            self.pump()
        raise AssertionError("a deadline that never passes")

    def cut(self) -> None:
        """The connection is gone."""
        self.server = None
        self.requests.clear()
        self.line.lost("the cable was pulled", self.now_ns)
        self.line.take(self.now_ns)

    def leave(self, *, retry_after_ms: int) -> None:
        """The other end says goodbye."""
        assert self.server is not None
        self.server.drain("the broker restarts", retry_after_ms=retry_after_ms)
        self.pump()

    def answer(self, message: ControlMessage) -> None:
        """The oldest request is granted."""
        assert self.server is not None
        self.server.respond(self.requests.pop(0).correlation, message)
        self.pump()

    def refuse(self, code: Code, *, at: int = 0, retry_after_ms: int | None = None) -> None:
        """The oldest request (or another) is refused."""
        assert self.server is not None
        request = self.requests.pop(at)
        self.server.refuse(request.correlation, Refused(code, "no", retry_after_ms=retry_after_ms))
        self.pump()


class WiredProducer(WiredLine):
    """A producer on such a line."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.producing: ProducerSession[Pending, PendingBatch] = ProducerSession(
            self.clock, SeededRng("producer"), ProducerOptions(**options), run_later=self.line.run_later
        )
        self.line.add(self.producing, self.now_ns)

    def on_trouble(self, sentence: str, now_ns: int) -> None:
        self.producing.trouble(sentence, now_ns)

    def send(self, *payloads: bytes, subject: str = "orders") -> list[Pending]:
        """One after the other; whatever leaves by itself leaves."""
        sent = [self.producing.add(subject, payload) for payload in payloads]
        self.pump()
        return sent

    @property
    def batches(self) -> list[bytes]:
        """What has arrived at the broker, unanswered."""
        return [bytes(request.attachments[0]) for request in self.requests]

    @property
    def payloads(self) -> list[list[bytes]]:
        """The same, opened."""
        return [[bytes(payload) for payload in batch.decode(each).payloads] for each in self.batches]

    @property
    def places(self) -> list[tuple[int, int, int]]:
        """Producer id, first sequence and count of each of them."""
        headers = map(batch.peek, self.batches)
        return [(header.producer_id, header.first_sequence, header.count) for header in headers]

    def store(self, first_sequence: int, *, is_duplicate: bool = False) -> None:
        """The oldest is stored, there."""
        self.answer(Produced(first_sequence, self.places[0][2], 1_700_000_000_000, is_duplicate, 1))


def connected(**options: Any) -> WiredProducer:
    scene = WiredProducer(**options)
    scene.connect()
    return scene


def ended(pending: Pending | PendingBatch) -> str:
    """The name of the error, or "stored"."""
    error = pending.exception()
    return "stored" if error is None else type(error).__name__
