"""Sender of a delay server: sends intents to the broker groups with ordinary PRODUCE requests, over one line to each.

A target is a broker group, by name. The dispatch log holds the name, so an intent goes to the group that it was made
for, also after a restart and at a new address. Without a cluster, each subject has one target, by a hash that is the
same everywhere. In a cluster a guide (`fairway.delay.dispatch.targets`) says which groups take a subject and where they
are; while one of them takes nothing, new intents go to another. A target that cannot be reached, or has enough bytes
outstanding, gets no new intents. Its due messages stay on disk, and other targets do not wait.

Each stream belongs to one subject, and is a `BacklogWindow` with at most 16 intents in flight. When one of them fails,
the stream waits for every answer, and then goes on from the first intent that is not stored: after a refusal with that
intent alone, and with the others once it is stored. Other streams do not wait. The answer decides about an intent:

    stored, now or before           done. A conflict counts as stored if the broker names exactly this batch.
    connection lost                 send again, once there is a connection
    NOT_MASTER                      the same; the line turns to the new master
    BUSY                            send again after 20 to 500 ms. A producer that floods a subject fills the broker's
                                    mailbox again and again, and due messages must not be the ones that wait longest.
    READ_ONLY, BAD_REQUEST,         send again after a delay that grows to 10 s. A broker that refuses a batch today may
    TOO_LARGE and others            take it after an upgrade, and the delay server must not drop messages. Only the
                                    stream's own subject waits.
    UNKNOWN_PRODUCER, or            the broker forgot the stream, or lost the end of it. The intent is sent as a stream
    SEQUENCE_GAP                    of its own. The id of that stream follows from the intent, so the broker recognises
                                    a repeat, also after a restart.
    a conflict with another or an   the same. Either server was restored from a backup, or a stranger used the stream.
    unknown batch, FOREIGN_STREAM   Nothing is dropped. If the intent was stored after all, the broker has its messages
                                    twice, with the same ids.

A new stream of a subject waits until the older stream of that subject is empty, so that messages due first go first.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from fairway import batch, limits
from fairway.batch.identity import derived_secret
from fairway.delay.dispatch.dispatcher import Intent
from fairway.errors import Code, Refused
from fairway.names import Subject
from fairway.protocol import ConnectionOptions
from fairway.protocol.line import Ask, Line, ReconnectOptions, RequestOutcome, RetryDelays
from fairway.protocol.messages import Produce, Produced
from fairway.protocol.resend import BacklogBatch, BacklogWindow, SendOutcome, outcome_of, receipt_of
from fairway.runtime.clock import Clock
from fairway.runtime.loop_link import LoopLink
from fairway.runtime.net import Address, Net
from fairway.runtime.rng import Rng

if TYPE_CHECKING:
    from fairway.delay.dispatch.targets import TargetFinder

_REFUSED_BYTES_MAX = 4 * limits.DELAY_OUTSTANDING_BYTES_MAX  # above it they count, too: memory comes first
_GOODBYE_S = 1.0


@dataclass(slots=True)
class DispatchTarget:
    """One broker group, and the connection to it."""

    name: str
    addresses: tuple[Address, ...]
    target_sender: TargetSender
    line: Line
    link: LoopLink
    leader: Address | None = None
    last: Subject | None = None  # the subject of the last intent sent there

    @property
    def is_down(self) -> bool:
        return not self.line.is_open

    def has_rest(self) -> bool:
        """Whether nothing is outstanding, or nothing can be sent."""
        return self.is_down or not self.target_sender.messages


class DispatchSender:
    """All connections of one delay server to its broker groups. Lives on its loop."""

    def __init__(
        self,
        net: Net,
        clock: Clock,
        rng: Rng,
        *,
        name: str,
        has_heartbeat: bool = True,
        outstanding_bytes: Callable[[str], int],
        on_sent: Callable[[Intent, Produced | None], None],
        on_room: Callable[[], None],
    ) -> None:
        """`name`: how the delay server introduces itself to brokers. `on_room`: a target is back, or has room for
        more."""
        self._net = net
        self._clock = clock
        self._rng = rng
        self._line_options = ReconnectOptions(
            hello=ConnectionOptions(name=name, has_heartbeat=has_heartbeat), backoff_most_ms=2_000
        )
        self._outstanding_bytes = outstanding_bytes
        self._on_sent = on_sent
        self._on_room = on_room
        self._targets: dict[str, DispatchTarget] = {}
        self._homeless: dict[str, list[Intent]] = {}  # intents by target whose address is unknown
        self._routes: dict[Subject, str] = {}
        self._guide: TargetFinder | None = None
        self._named: frozenset[str] | None = None  # the targets that the guide knows; None: it has not said yet

    def __iter__(self) -> Iterator[DispatchTarget]:
        return iter(self._targets.values())

    def reach(self, addresses: Mapping[str, Sequence[Address]]) -> None:
        """Connect to the targets at these addresses."""
        for name, places in addresses.items():
            self._dial(name, places)
        self._routes.clear()

    def follow(self, guide: TargetFinder) -> None:
        """Take routes from this guide from now on. The guide looks up the targets of homeless intents at once."""
        self._guide = guide
        for intent in [intent for intents in self._homeless.values() for intent in intents]:
            guide.want(intent.subject)

    def lead(self, name: str, addresses: Sequence[Address], leader: Address | None) -> None:
        """Connect to a broker group, or note its new addresses. `leader` None: its master is unknown."""
        target = self._targets.get(name)
        if target is None:
            self._dial(name, addresses, leader)
        elif (target.addresses, target.leader) != (tuple(addresses), leader):
            target.addresses, target.leader = tuple(addresses), leader
            target.link.redirect(addresses, leader)

    def keep_only(self, names: Collection[str]) -> None:
        """Drop targets that the guide does not know any more: idle targets at once, the others when their answers are
        there."""
        self._named = frozenset(names)
        for name in [*self._targets]:
            self._leave_unnamed(name)

    def _leave_unnamed(self, name: str) -> None:
        target = self._targets.get(name)
        if target is not None and self._is_unnamed(name) and not target.target_sender.messages:
            del self._targets[name]
            target.link.abort()

    def _is_unnamed(self, name: str) -> bool:
        return self._named is not None and name not in self._named

    def _dial(self, name: str, addresses: Sequence[Address], leader: Address | None = None) -> None:
        now_ns = self._clock.monotonic_ns()
        target_sender = TargetSender(self._rng, on_sent=self._note_sent, on_open=self._on_room)
        line = Line(self._rng, self._line_options, now_ns=now_ns, on_trouble=partial(self._on_trouble, name))
        line.add(target_sender, now_ns)
        link = LoopLink(line, addresses, self._net, self._clock)
        self._targets[name] = DispatchTarget(name, tuple(addresses), target_sender, line, link, leader)
        self.send(self._homeless.pop(name, []))

    def _on_trouble(self, name: str, _sentence: str, _now_ns: int) -> None:
        if self._guide is not None:
            self._guide.doubt(name)

    def is_busy_with(self, subject: str) -> bool:
        """Whether intents are outstanding at a target whose newest intent is of this subject."""
        return any(target.last == subject and target.target_sender.messages for target in self)

    # --- sending -----------------------------------------------------------------------------------------------------

    def route(self, subject: Subject) -> str | None:
        """The target that takes this subject now; None: its messages wait."""
        if self._guide is not None:
            groups = self._guide.groups_of(subject)
        else:
            groups = [self.target_of(subject)] if self._targets else []
        return next((name for name in groups if self.takes(name, subject)), None)

    def homes_of(self, subject: Subject) -> Sequence[str]:
        """The broker groups that share the keys of an ordered subject. Empty for other subjects."""
        return () if self._guide is None else self._guide.homes_of(subject)

    def takes(self, name: str, subject: Subject) -> bool:
        """Whether a target takes messages of a subject now."""
        target = self._targets.get(name)
        if target is None or target.is_down or target.target_sender.is_refused(subject):
            return False
        refused_bytes = min(target.target_sender.refused_bytes, _REFUSED_BYTES_MAX)
        return self._outstanding_bytes(name) - refused_bytes < limits.DELAY_OUTSTANDING_BYTES_MAX

    def target_of(self, subject: Subject) -> str:
        """The preferred target of a subject without a guide. A hash spreads subjects over targets, the same after a
        restart."""
        name = self._routes.get(subject)
        if name is None:
            name = max(self._targets, key=lambda each: batch.key_hash(f"{each}/{subject}"))
            if len(self._routes) < limits.SUBJECTS_MAX:
                self._routes[subject] = name
        return name

    def send(self, intents: Iterable[Intent]) -> None:
        """Queue the intents at their targets. The line writes them in the next turn of the loop."""
        stirred: dict[str, DispatchTarget] = {}
        for intent in intents:
            target = self._targets.get(intent.target)
            if target is None:
                self._homeless.setdefault(intent.target, []).append(intent)
                if self._guide is not None:
                    self._guide.want(intent.subject)
            else:
                target.target_sender.send(intent)
                target.last = intent.subject
                stirred[intent.target] = target
        for target in stirred.values():
            target.link.stir()

    def _note_sent(self, intent: Intent, receipt: Produced | None) -> None:
        self._on_sent(intent, receipt)
        self._on_room()
        if self._is_unnamed(intent.target):  # later: the line is still handling this answer
            asyncio.get_running_loop().call_soon(self._leave_unnamed, intent.target)

    def is_reached(self, name: str) -> bool:
        """Whether there is a connection to a target."""
        target = self._targets.get(name)
        return target is not None and not target.is_down

    def withdraw(self, name: str) -> list[Intent]:
        """Take back all intents of a target. They are not sent to it any more."""
        intents = self._homeless.pop(name, [])
        target = self._targets.pop(name, None)
        if target is not None:
            intents += target.target_sender.outstanding()
            target.link.abort()
            self._dial(name, target.addresses, target.leader)
            self._leave_unnamed(name)
        return intents

    # --- figures -----------------------------------------------------------------------------------------------------

    @property
    def homeless(self) -> dict[str, int]:
        """Messages of intents whose target has no known address, by target."""
        return {name: sum(each.messages for each in intents) for name, intents in self._homeless.items()}

    @property
    def messages(self) -> int:
        """Messages of outstanding intents."""
        return sum(target.target_sender.messages for target in self) + sum(self.homeless.values())

    # --- the end -----------------------------------------------------------------------------------------------------

    async def finish(self, within_ms: int) -> None:
        """Wait for outstanding answers. Intents that are not stored by then are sent again after the next start."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_ms / 1_000):
                for target in self:
                    await target.link.wait(target.has_rest)

    async def close(self) -> None:
        """Close all connections in good order."""
        for target in self:
            await target.link.close(_GOODBYE_S)

    def abort(self) -> None:
        """Drop all connections at once."""
        for target in self:
            target.link.abort()


log = logging.getLogger("fairway.delay")

IN_FLIGHT_MAX = 16  # of one stream: at 1,000 messages each, more than a broker syncs at once
_FIRST_MS, _MOST_MS = 20, 10_000  # between attempts
_BUSY_MOST_MS = 500  # the longest delay after BUSY
_PRODUCER_MASK = (1 << 63) - 1


class DispatchBatch(BacklogBatch):
    """One intent that is queued or in flight."""

    __slots__ = ("detours", "flow", "intent", "request")

    def __init__(self, intent: Intent, flow: StreamSender) -> None:
        super().__init__(intent.data)
        self.intent = intent
        self.flow = flow
        self.request = self._new_request(intent.secret)
        self.detours = 0

    def must_leave(self, refused: Refused) -> bool:
        """Whether nothing can be stored at the intent's place in its stream any more."""
        outcome = outcome_of(refused.code)
        return outcome is SendOutcome.TAKEN or (outcome is SendOutcome.GAP and not self.detours)

    def detour(self) -> None:
        """Turn to a stream of its own. The messages keep their ids, which are explicit in the batch."""
        self.detours += 1
        producer_id = self._own_stream()
        self.data = batch.restamp(self.intent.data, producer_id=producer_id, first_sequence=0)
        self.request = self._new_request(derived_secret(self.intent.secret, producer_id))

    def _new_request(self, secret: bytes) -> Produce:
        """Pinned to the target, which the dispatch log names: the intent goes nowhere else, even if the target
        drains."""
        return Produce(str(self.intent.subject), is_pinned=True, secret=secret)

    def _own_stream(self) -> int:
        """The id of the detour stream: the same for each repeat of this detour. A secret makes it unpredictable."""
        intent, name = self.intent, f"{self.intent.producer_id}/{self.intent.first_sequence}"
        if self.detours > 1:
            name = f"{name}/{self.detours}"
        if intent.secret:
            hashed = int.from_bytes(derived_secret(intent.secret, intent.producer_id, name)[:8], "little")
        else:
            hashed = batch.key_hash(name)
        return hashed & _PRODUCER_MASK or 1


class StreamSender(BacklogWindow[DispatchBatch]):
    """One producer stream: its outstanding intents, in order."""

    def __init__(self, subject: Subject, rng: Rng, before: StreamSender | None) -> None:
        super().__init__(RetryDelays(rng, first_ms=_FIRST_MS, most_ms=_MOST_MS), IN_FLIGHT_MAX)
        self.subject = subject
        self.before = before  # the older stream of this subject, which goes first
        self._busy = RetryDelays(rng, first_ms=_FIRST_MS, most_ms=_BUSY_MOST_MS)

    @property
    def size_bytes(self) -> int:
        return sum(len(dispatch_batch.data) for dispatch_batch in self.batches())

    @property
    def is_refused(self) -> bool:
        """Whether the stream waits after a refusal, or behind a stream that does."""
        return self.refused is not None or (self.before is not None and self.before.is_refused)

    def take(self, room: int, now_ns: int) -> list[DispatchBatch]:
        if self.before is not None and not self.before.is_empty:
            return []
        self.before = None
        return super().take(room if self.refused is None else min(room, 1 - self.in_flight), now_ns)

    def answered(self, dispatch_batch: DispatchBatch, outcome: RequestOutcome) -> bool:
        is_stored = super().answered(dispatch_batch, outcome)
        if is_stored and not self.is_recovering:
            self._busy.reset()
        return is_stored

    def mend(self, now_ns: int) -> bool:
        """Go on from the first batch not stored. True: as a stream of its own."""
        head, trouble = self.begin_again()
        if isinstance(trouble, Refused) and head.must_leave(trouble):
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
        backoff = self._busy if refused.code is Code.BUSY else self.backoff
        return backoff.next_ns(refused.retry_after_ms)


class TargetSender:
    """Session on the line to one broker group: queues its streams, sends, and handles the answers."""

    def __init__(
        self,
        rng: Rng,
        *,
        on_sent: Callable[[Intent, Produced | None], None],
        on_open: Callable[[], None],
    ) -> None:
        """`on_sent` gets the receipt, or None if the broker only confirms that it already has the batch."""
        self.messages = 0  # of outstanding intents
        self.refusals: Counter[Code] = Counter()
        self.detours = 0
        self._rng = rng
        self._on_sent = on_sent
        self._on_open = on_open
        self._flows: dict[int, StreamSender] = {}  # by producer id
        self._by_subject: dict[Subject, StreamSender] = {}  # the newest stream of each
        self._ready: dict[int, StreamSender] = {}  # may have something to send, in this order
        self._held: dict[int, StreamSender] = {}  # wait after a refusal
        self._held_bytes: dict[int, int] = {}
        self.refused_bytes = 0  # of the held streams

    # --- for DispatchSender ------------------------------------------------------------------------------------------

    def send(self, intent: Intent) -> None:
        """Queue an intent behind the earlier intents of its stream."""
        flow = self._flows.get(intent.producer_id)
        if flow is None:
            before = self._by_subject.get(intent.subject)
            flow = self._flows[intent.producer_id] = StreamSender(intent.subject, self._rng, before)
            self._by_subject[intent.subject] = flow
        flow.waiting.append(DispatchBatch(intent, flow))
        self.messages += intent.messages
        self._ready[intent.producer_id] = flow

    def outstanding(self) -> list[Intent]:
        """The intents that are not known to be stored, each stream in order."""
        return [dispatch_batch.intent for flow in self._flows.values() for dispatch_batch in flow.batches()]

    @property
    def intents(self) -> int:
        """How many intents are outstanding."""
        return sum(len(flow.sent) + len(flow.waiting) for flow in self._flows.values())

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
        """Build the whole list before the line takes the first: the line answers a request that does not fit a frame at
        once."""
        asks: list[Ask] = []
        if not room:
            return asks
        self._let_go(now_ns)
        while self._ready and len(asks) < room:
            number = next(iter(self._ready))
            flow = self._ready.pop(number)
            for dispatch_batch in flow.take(1, now_ns):
                asks.append(Ask(dispatch_batch.request, (dispatch_batch.data,), dispatch_batch))
                self._ready[number] = flow
        return asks

    def _let_go(self, now_ns: int) -> None:
        """Release the streams whose delay is over."""
        for number in [number for number, flow in self._held.items() if flow.retry_ns <= now_ns]:
            self._ready[number] = self._held.pop(number)
            self.refused_bytes -= self._held_bytes.pop(number)

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        dispatch_batch: DispatchBatch = token  # type: ignore[assignment]
        flow, intent = dispatch_batch.flow, dispatch_batch.intent
        if isinstance(outcome, Refused):
            self.refusals[outcome.code] += 1
        if flow.answered(dispatch_batch, outcome):
            self.messages -= intent.messages
            self._on_sent(intent, receipt_of(outcome))
        if flow.must_decide:
            self.detours += flow.mend(now_ns)
        self._sort(intent.producer_id, flow, now_ns)

    def _sort(self, number: int, flow: StreamSender, now_ns: int) -> None:
        """A stream is ready, held, or finished. A finished stream is forgotten."""
        if flow.is_empty:
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


def _log_detour(dispatch_batch: DispatchBatch, refused: Refused) -> None:
    intent = dispatch_batch.intent
    log.warning(
        "%d messages to %s go out as a stream of their own, because their place %016x+%d in the old one is not to be "
        "had (%s): was this delay server, or broker group %s, restored from a backup?",
        intent.messages, intent.subject, intent.producer_id, intent.first_sequence, refused, intent.target,
    )  # fmt: skip
