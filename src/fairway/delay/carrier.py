"""What goes to one broker group: intents of many streams on one line, each stream in its order, byte for byte.

A stream is one subject's. It has a few intents in flight; when one of them comes to grief, nothing more of that stream
is sent until all its answers are there, and then it goes on from the first that is not stored: with that one alone, if
it was refused, and with the others once it is granted. Other streams do not notice. What becomes of an intent:

    stored, or stored before        sent. (A conflict is the same, if the broker names exactly this batch.)
    the connection was lost         again, when there is one
    NOT_MASTER                      the same: the line goes on to whoever leads
    BUSY                            again in a moment. Whoever floods a subject fills its broker's mailbox again and
                                    again, and what is due must not be the one that waits longest
    READ_ONLY and the like          again after a while, longer each time
    BAD_REQUEST, TOO_LARGE, ...     the same: a broker that cannot take it today may take it after an upgrade, and to
                                    drop a message is not ours to decide. Only its own subject waits.
    UNKNOWN_PRODUCER, or a gap      the broker has forgotten the stream, or has lost the end of it: the intent goes out
    before the first one            as a stream of its own, whose id follows from the intent's. So an intent that is
                                    sent once more, in this life or the next, is still recognised.
    a conflict with something else, the same: we, or the broker, were restored from a backup, or a stranger was there
    or with what nobody knows;      first. Nothing is dropped; if the intent was stored after all, it is there twice,
    FOREIGN_STREAM                  with the same ids.

A stream that is begun while an older one of its subject is not empty waits for that: what was due first goes first.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable

from fairway import batch
from fairway.batch.secret import derived_secret
from fairway.delay.dispatching import Intent
from fairway.errors import Code, Refused, invariant
from fairway.names import Subject
from fairway.protocol.backoff import RetryDelays
from fairway.protocol.conflict import TAKEN, is_receipt
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.session import Answer, Ask, ConnectionLost, RequestOutcome
from fairway.world.rng import Rng

log = logging.getLogger("fairway.delay")

IN_FLIGHT_MAX = 16  # of one stream: at 1,000 messages each that is more than a broker syncs at once
_FIRST_MS, _MOST_MS = 20, 10_000  # between attempts
_BUSY_MOST_MS = 500  # the same, where there was no room
_PRODUCER_MASK = (1 << 63) - 1
_FORGOTTEN = frozenset({Code.UNKNOWN_PRODUCER, Code.SEQUENCE_GAP})


class DispatchBatch:
    """One intent on its way."""

    __slots__ = ("data", "detours", "flow", "intent", "is_done", "request", "trouble")

    def __init__(self, intent: Intent, flow: StreamSender) -> None:
        self.intent = intent
        self.flow = flow
        self.data = intent.data
        self.request = self._new_request(intent.secret)
        self.is_done = False
        self.detours = 0
        self.trouble: Refused | ConnectionLost | None = None  # how the last attempt ended

    def must_leave(self, code: Code) -> bool:
        """Whether nothing can be stored at its place any more."""
        return code in TAKEN or (code in _FORGOTTEN and not self.detours)

    def detour(self) -> None:
        """As a stream of its own. The messages have explicit ids, so they remain who they are."""
        self.detours += 1
        producer_id = self._own_stream()
        self.data = batch.restamp(self.intent.data, producer_id=producer_id, first_sequence=0)
        self.request = self._new_request(derived_secret(self.intent.secret, producer_id))

    def _new_request(self, secret: bytes) -> Produce:
        """The dispatch log names the target: an intent goes nowhere else, also where the target is drained."""
        return Produce(str(self.intent.subject), is_pinned=True, secret=secret)

    def _own_stream(self) -> int:
        """The same each time it comes to that detour, and where there is a secret, known to nobody in advance."""
        intent, name = self.intent, f"{self.intent.producer_id}/{self.intent.first_sequence}"
        if self.detours > 1:
            name = f"{name}/{self.detours}"
        if intent.secret:
            hashed = int.from_bytes(derived_secret(intent.secret, intent.producer_id, name)[:8], "little")
        else:
            hashed = batch.key_hash(name)
        return hashed & _PRODUCER_MASK or 1


class StreamSender:
    """One stream: what is to be sent, in order."""

    def __init__(self, subject: Subject, rng: Rng, before: StreamSender | None) -> None:
        self.subject = subject
        self.parcels: deque[DispatchBatch] = deque()
        self.before = before  # that goes first
        self.in_flight = 0
        self.retry_ns = 0
        self.refused: Refused | None = None  # why it waits
        self._next = 0  # in `parcels`: the first that is not in flight
        self._is_broken = False
        self._backoff = RetryDelays(rng, first_ms=_FIRST_MS, most_ms=_MOST_MS)
        self._busy = RetryDelays(rng, first_ms=_FIRST_MS, most_ms=_BUSY_MOST_MS)

    @property
    def size_bytes(self) -> int:
        return sum(len(parcel.data) for parcel in self.parcels)

    @property
    def is_refused(self) -> bool:
        """Whether it waits after a refusal, or behind one that does."""
        return self.refused is not None or (self.before is not None and self.before.is_refused)

    def take(self, now_ns: int) -> DispatchBatch | None:
        """The next one to send; None: not now."""
        in_flight_max = IN_FLIGHT_MAX if self.refused is None else 1
        if self.before is not None and self.before.parcels:
            return None
        self.before = None
        is_held = self._is_broken or self.in_flight >= in_flight_max or now_ns < self.retry_ns
        if is_held or self._next >= len(self.parcels):
            return None
        parcel = self.parcels[self._next]
        self._next += 1
        self.in_flight += 1
        return parcel

    def arrived(self, parcel: DispatchBatch) -> None:
        """The broker has it."""
        self.in_flight -= 1
        parcel.is_done = True
        while self.parcels and self.parcels[0].is_done:
            self.parcels.popleft()
            self._next -= 1
        if not self._is_broken:
            self.refused = None
            self._backoff.reset()
            self._busy.reset()

    def came_to_grief(self, parcel: DispatchBatch, trouble: Refused | ConnectionLost) -> None:
        self.in_flight -= 1
        parcel.trouble = trouble
        self._is_broken = True

    def mend(self, now_ns: int) -> bool:
        """Once all answers are there, go on with the first that is not stored; True: as a stream of its own."""
        if not self._is_broken or self.in_flight:
            return False
        self._is_broken = False
        self._next = 0
        self.parcels = deque(parcel for parcel in self.parcels if not parcel.is_done)
        head = self.parcels[0]
        trouble = head.trouble
        invariant(trouble is not None, "the first parcel that is not stored is one that came to grief")
        for parcel in self.parcels:
            parcel.trouble = None
        if isinstance(trouble, Refused) and (
            trouble.code in TAKEN or (trouble.code in _FORGOTTEN and not head.detours)
        ):
            _log_detour(head, trouble)
            head.detour()
            return True
        if isinstance(trouble, Refused) and trouble.code is not Code.NOT_MASTER:
            self.refused = trouble
            self.retry_ns = now_ns + self._wait_ns(trouble)
        return False

    def _wait_ns(self, refused: Refused) -> int:
        if refused.code is Code.DRAINING:
            return 0
        backoff = self._busy if refused.code is Code.BUSY else self._backoff
        return backoff.next_ns(refused.retry_after_ms)


class TargetSender:
    """The session on the line to one broker group."""

    def __init__(
        self,
        rng: Rng,
        *,
        on_sent: Callable[[Intent, Produced | None], None],
        on_open: Callable[[], None],
    ) -> None:
        """`on_sent` is told with the receipt, or None where the broker only says that it has something there."""
        self.messages = 0  # of intents outstanding
        self.refusals: Counter[Code] = Counter()
        self.detours = 0
        self._rng = rng
        self._on_sent = on_sent
        self._on_open = on_open
        self._flows: dict[int, StreamSender] = {}  # by producer id
        self._by_subject: dict[Subject, StreamSender] = {}  # the newest stream of each
        self._ready: dict[int, StreamSender] = {}  # may have something to send; first come, first served
        self._held: dict[int, StreamSender] = {}  # wait after a refusal
        self._held_bytes: dict[int, int] = {}
        self.refused_bytes = 0  # of those

    # --- for the courier ---------------------------------------------------------------------------------------------

    def send(self, intent: Intent) -> None:
        """To be sent after all of its stream that came before."""
        flow = self._flows.get(intent.producer_id)
        if flow is None:
            before = self._by_subject.get(intent.subject)
            flow = self._flows[intent.producer_id] = StreamSender(intent.subject, self._rng, before)
            self._by_subject[intent.subject] = flow
        flow.parcels.append(DispatchBatch(intent, flow))
        self.messages += intent.messages
        self._ready[intent.producer_id] = flow

    def outstanding(self) -> list[Intent]:
        """What is not known to be stored, each stream in its order."""
        return [parcel.intent for flow in self._flows.values() for parcel in flow.parcels if not parcel.is_done]

    @property
    def intents(self) -> int:
        """Outstanding."""
        return sum(len(flow.parcels) for flow in self._flows.values())

    @property
    def refused(self) -> list[StreamSender]:
        """Streams that wait after a refusal."""
        return [flow for flow in self._flows.values() if flow.refused is not None]

    def is_refused(self, subject: Subject) -> bool:
        flow = self._by_subject.get(subject)
        return flow is not None and flow.is_refused

    # --- for the line ------------------------------------------------------------------------------------------------

    def opened(self, now_ns: int) -> None:
        del now_ns
        self._ready.update((number, flow) for number, flow in self._flows.items() if number not in self._held)
        self._on_open()

    def asks(self, room: int, now_ns: int) -> Iterable[Ask]:
        """A list, made before the first is asked: one that does not fit a frame is answered at once."""
        asks: list[Ask] = []
        if not room:
            return asks
        self._let_go(now_ns)
        while self._ready and len(asks) < room:
            number = next(iter(self._ready))
            flow = self._ready.pop(number)
            parcel = flow.take(now_ns)
            if parcel is not None:
                asks.append(Ask(parcel.request, (parcel.data,), parcel))
                self._ready[number] = flow
        return asks

    def _let_go(self, now_ns: int) -> None:
        """Those that have waited long enough."""
        for number in [number for number, flow in self._held.items() if flow.retry_ns <= now_ns]:
            self._ready[number] = self._held.pop(number)
            self.refused_bytes -= self._held_bytes.pop(number)

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        parcel: DispatchBatch = token  # type: ignore[assignment]
        flow, intent = parcel.flow, parcel.intent
        if isinstance(outcome, Refused):
            self.refusals[outcome.code] += 1
        if isinstance(outcome, Answer):
            receipt: Produced = outcome.message  # type: ignore[assignment]  # PRODUCE has no other answer
            self._arrived(parcel, receipt)
        elif isinstance(outcome, Refused) and is_receipt(outcome, parcel.data):
            self._arrived(parcel, None)
        else:
            flow.came_to_grief(parcel, outcome)
        self.detours += flow.mend(now_ns)
        self._sort(intent.producer_id, flow, now_ns)

    def _arrived(self, parcel: DispatchBatch, receipt: Produced | None) -> None:
        parcel.flow.arrived(parcel)
        self.messages -= parcel.intent.messages
        self._on_sent(parcel.intent, receipt)

    def _sort(self, number: int, flow: StreamSender, now_ns: int) -> None:
        """A stream is ready, held, or has nothing to send; one that has sent all is forgotten."""
        if not flow.parcels:
            del self._flows[number]
            self._ready.pop(number, None)
            if self._by_subject.get(flow.subject) is flow:
                del self._by_subject[flow.subject]
            self._ready.update((each, other) for each, other in self._flows.items() if other.before is flow)
        elif flow.retry_ns > now_ns:
            self._ready.pop(number, None)
            self._held[number] = flow
            self._held_bytes[number] = flow.size_bytes
            self.refused_bytes += self._held_bytes[number]
        else:
            self._ready[number] = flow

    def next_deadline(self) -> int | None:
        return min((flow.retry_ns for flow in self._held.values()), default=None)


def _log_detour(parcel: DispatchBatch, refused: Refused) -> None:
    intent = parcel.intent
    log.warning(
        "%d messages to %s go out as a stream of their own, because their place %016x+%d in the old one is not to be "
        "had (%s): was this delay server, or broker group %s, restored from a backup?",
        intent.messages, intent.subject, intent.producer_id, intent.first_sequence, refused, intent.target,
    )  # fmt: skip
