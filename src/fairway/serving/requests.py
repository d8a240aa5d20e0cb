"""One request of a client, as an actor sees it, with the way back to its session.

`admit` takes the bytes of a request from the memory for waiting requests, and `hand_to` puts the request into an
actor's mailbox. A request is answered once: by its processor, by `refuse`, or not at all if its client is gone.

`produced` is the part of a PRODUCE that brokers and delay servers share.

A broker and a delay server may share an address. The broker then passes requests about delayed messages to a
`DelayPort`. Servers do not import one another, so the protocol is here, and the command line gives the delay server to
the broker (ADR 0009).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar

from fairway import batch, limits
from fairway.errors import BadName, Code, FairwayError, Misuse, Refused, RemoteProtocolError, StorageFault
from fairway.names import Subject
from fairway.protocol import BatchesReceived, Bytes, ControlMessage, RequestReceived
from fairway.protocol.admin_messages import (
    Describe,
    Index,
    RemoveGroup,
    RemoveSubject,
    Retrace,
    Scan,
    Seek,
    Switch,
    Weigh,
)
from fairway.protocol.delay_messages import Cancel, DelayTally, History, PendingListed, Reschedule, Resend
from fairway.protocol.messages import Heartbeat, Leave, Produce, Produced, Pull
from fairway.protocol.route_messages import Register, Route
from fairway.runtime.buffers import LazyBuffer
from fairway.scheduling import Account, Actor, Expiry, Processor, Scheduler, TurnResult
from fairway.serving.memory_budget import Allowance
from fairway.serving.metrics import MetricsText
from fairway.storage.message_log import AppendReceipt
from fairway.storage.store import Store

if TYPE_CHECKING:
    from fairway.serving.memory_plan import MemoryAccount

MessageT = TypeVar("MessageT", bound=ControlMessage)

# The worst case of a decoded control message: lists of ranges take 40 times their bytes, lists of names 10 times. A
# message without lists holds its own names. The decoder drops fields of later versions.
_LISTS_GROWTH = 40
_NAMES_GROWTH = 10
_PLAIN_BYTES = 1_024
_PLAIN_BYTES_MAX = 4_096
# bytes that a view may keep in memory without an account
_BESIDE_BYTES_MAX = limits.PLAIN_CONTROL_BYTES_MAX + limits.KIB
_PLAIN = (
    Pull, Scan, Heartbeat, Leave, Produce, Retrace, Index, Seek, Switch, Weigh, Describe, RemoveSubject, RemoveGroup,
)  # fmt: skip
_NAMES = (Route, Register)
_LARGE = (Pull, Scan, Retrace, Index)  # requests with large answers; a union written where it is needed costs 1 µs
_UNREAD = Refused(Code.BUSY, "answers wait on this connection: read them before asking for more", retry_after_ms=1_000)
_LATE = Refused(Code.EXPIRED, "the request could not be answered in time: the broker is busy", retry_after_ms=50)


class Requester(Protocol):
    """The session that a request came from."""

    address: str
    here: str  # the address where the client reached this server; empty: not known
    account: Account  # what it has used
    unstored_bytes: int  # of batches that it has sent and that have no answer yet
    waiting: dict[ServedRequest[Any], None]  # its requests that wait

    @property
    def is_gone(self) -> bool: ...

    @property
    def is_swamped(self) -> bool:
        """Whether so many answers wait for the client to read them that more would be of no use."""

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame that the client takes."""

    def respond(self, correlation: int, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> None: ...

    def respond_all(self, answers: Sequence[tuple[int, ControlMessage]]) -> None: ...

    def refuse(self, correlation: int, refused: Refused) -> None: ...


class ServedRequest(Generic[MessageT]):
    """One request of one connection, as the scheduler sees it."""

    __slots__ = (
        "_cancel_timer", "_let_go", "_withdraw", "account", "attachments", "correlation", "deadline_ns", "message",
        "received_ns", "session", "wait_until_ns",
    )  # fmt: skip

    def __init__(
        self,
        session: Requester,
        correlation: int,
        message: MessageT,
        attachments: tuple[Bytes, ...] = (),
        *,
        deadline_ns: int,
        wait_until_ns: int = 0,
        received_ns: int = 0,
        let_go: Callable[[], None] | None = None,
    ) -> None:
        self.session = session
        self.account = session.account
        self.correlation = correlation
        self.message = message
        self.attachments = attachments
        self.deadline_ns = deadline_ns
        self.wait_until_ns = wait_until_ns
        self.received_ns = received_ns
        self._let_go = let_go  # called once, when the request ends
        self._withdraw: Callable[[], object] | None = None  # takes the request out of the place where it waits
        self._cancel_timer: Callable[[], object] | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody reads the answer: the client is gone, or does not read the large answers that it has asked
        for."""
        session = self.session
        return session.is_gone or (isinstance(self.message, _LARGE) and session.is_swamped)

    def end(self) -> None:
        """Free the memory of the request, which is answered or never will be."""
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()
        if self._withdraw is not None:
            self._withdraw = None
            self.session.waiting.pop(self, None)
        if self._cancel_timer is not None:
            self._cancel_timer()
            self._cancel_timer = None

    def wait_at(self, withdraw: Callable[[], object]) -> None:
        """Note that the request waits somewhere. `withdraw` takes it out of there if its client goes first."""
        self._withdraw = withdraw
        self.session.waiting[self] = None

    def wait_until(self, cancel_timer: Callable[[], object]) -> None:
        """Note the timer that ends the wait. The timer holds the request, so the end of the request cancels the
        timer."""
        self._cancel_timer = cancel_timer

    def asker_is_gone(self) -> None:
        """Withdraw the request, whose client is gone: nothing may keep it in memory."""
        withdraw, self._withdraw = self._withdraw, None
        if withdraw is not None:
            withdraw()

    def respond(self, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> None:
        self.end()
        self.session.respond(self.correlation, message, attachments)

    def refuse(self, refused: Refused) -> None:
        self.end()
        self.session.refuse(self.correlation, refused)

    def settle(
        self, outcome: FairwayError | None, answer: ControlMessage | Refused, attachments: Sequence[Bytes] = ()
    ) -> None:
        """Answer when the log has an outcome: with `answer` if all is durable, with the refusal if nothing was
        appended.

        A poisoned store sends no answer: the server does not know whether the bytes are on disk, and silence means
        that.
        """
        told = answer if outcome is None else outcome
        if isinstance(told, ControlMessage):
            self.respond(told, attachments)
        elif isinstance(told, Refused):
            self.refuse(told)
        else:
            self.end()

    def expire(self, expiry: Expiry) -> None:
        """Answer a request that ends unserved."""
        if expiry is Expiry.LATE:
            self.refuse(_LATE)
        elif expiry is Expiry.STOPPED:
            self.refuse(Refused(Code.DRAINING, "this broker is about to stop: connect again"))
        elif expiry is Expiry.GONE and not self.session.is_gone:
            self.refuse(_UNREAD)
        else:
            self.end()

    def fail(self, error: Exception) -> None:
        """Answer a request whose processor raised."""
        refused = refusal_of(error)
        if refused is None:
            self.end()
        else:
            self.refuse(refused)


class ProduceRequest(ServedRequest[Produce]):
    """The PRODUCE requests of one connection to one subject that came in a row: an actor serves them together. Each of
    them has a batch, in `attachments`, and an answer of its own."""

    __slots__ = ("checked", "unanswered")

    def __init__(
        self,
        session: Requester,
        received: BatchesReceived,
        batches: tuple[Bytes, ...],
        *,
        deadline_ns: int,
        received_ns: int,
        let_go: Callable[[], None],
    ) -> None:
        super().__init__(
            session,
            received.correlations[0],
            received.message,
            batches,
            deadline_ns=deadline_ns,
            received_ns=received_ns,
            let_go=let_go,
        )
        self.unanswered = dict.fromkeys(received.correlations)
        self.checked: tuple[batch.BatchHeader, int] | None = None  # by a worker thread: the header, and the batch's CRC

    def answer(self, answers: Sequence[tuple[int, Produced]]) -> None:
        """Answer some of the requests, by their correlation ids."""
        self.forget(correlation for correlation, _ in answers)
        self.session.respond_all(answers)

    def refuse_one(self, correlation: int, refused: Refused) -> None:
        self.forget((correlation,))
        self.session.refuse(correlation, refused)

    def refuse(self, refused: Refused) -> None:
        """Refuse all that were not answered."""
        for correlation in list(self.unanswered):
            self.refuse_one(correlation, refused)

    def settle_some(self, outcome: FairwayError | None, answers: Sequence[tuple[int, Produced]]) -> None:
        """`settle` for some of the requests, whose batches have this outcome in common."""
        if outcome is None:
            self.answer(answers)
        elif isinstance(outcome, Refused):
            for correlation, _ in answers:
                self.refuse_one(correlation, outcome)
        else:
            self.forget(correlation for correlation, _ in answers)

    def fail_one(self, correlation: int, error: Exception) -> None:
        """Answer a request whose batch could not be stored."""
        refused = refusal_of(error)
        if refused is None:
            self.forget((correlation,))
        else:
            self.refuse_one(correlation, refused)

    def forget(self, correlations: Iterable[int]) -> None:
        """Give these requests no further answer."""
        for correlation in correlations:
            self.unanswered.pop(correlation, None)
        if not self.unanswered:
            self.end()


ServedT = TypeVar("ServedT", bound=ServedRequest[Any])


def refusal_of(error: Exception) -> Refused | None:
    """The answer to a request whose processor raised; None: there is none, because the store has failed."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, BadName):
        return Refused(Code.BAD_NAME, str(error))
    if isinstance(error, Misuse | RemoteProtocolError):
        return Refused(Code.BAD_REQUEST, str(error))
    if isinstance(error, StorageFault):
        return None
    return Refused(Code.OTHER, f"the broker failed on this request: {error!r}")


def admit_batches(
    session: Requester, received: BatchesReceived, waiting: Allowance[Requester], *, deadline_ns: int, received_ns: int
) -> ProduceRequest:
    """`admit` for PRODUCE requests in a row."""
    count = len(received.batches)
    size = count * _plain_bytes(received.message, received.control_bytes) + sum(map(len, received.batches))
    waiting.take(session, size, is_urgent=size <= count * limits.URGENT_BYTES_MAX)
    session.unstored_bytes += size

    def let_go() -> None:
        waiting.give_back(session, size)
        session.unstored_bytes -= size

    return ProduceRequest(
        session,
        received,
        tuple(map(bytes if size < limits.FRAME_BUFFER_FROM_BYTES else _own, received.batches)),
        deadline_ns=deadline_ns,
        received_ns=received_ns,
        let_go=let_go,
    )


def admit(
    session: Requester,
    received: RequestReceived,
    message: MessageT,
    waiting: Allowance[Requester],
    *,
    deadline_ns: int,
    wait_until_ns: int = 0,
    received_ns: int = 0,
    beside_bytes: int = 0,
) -> ServedRequest[MessageT]:
    """The request as actors see it. Takes its bytes from the allowance until the request ends. `beside_bytes`: other
    memory that the server holds for it, such as a task."""
    size = held_bytes(received) + beside_bytes
    is_patient = wait_until_ns > 0
    is_urgent = not is_patient and size <= limits.URGENT_BYTES_MAX
    waiting.take(session, size, is_urgent=is_urgent, is_patient=is_patient)
    return ServedRequest(
        session,
        received.correlation,
        message,
        # A view would keep everything that came with it in memory.
        tuple(map(bytes if size < limits.FRAME_BUFFER_FROM_BYTES else _own, received.attachments)),
        deadline_ns=deadline_ns,
        wait_until_ns=wait_until_ns,
        received_ns=received_ns,
        let_go=partial(waiting.give_back, session, size),
    )


def _own(attachment: Bytes) -> Bytes:
    """The attachment without the bytes around it. Does not copy an attachment that nearly fills the buffer of its
    frame: 63 MiB would hold up the loop for 25 ms."""
    if isinstance(attachment, memoryview) and isinstance(attachment.obj, LazyBuffer):
        beside_bytes = len(attachment.obj) - len(attachment)
        if beside_bytes <= _BESIDE_BYTES_MAX:
            return attachment
    return bytes(attachment)


def held_bytes(received: RequestReceived) -> int:
    """The bytes that a request holds until it is answered. `Refused`: more than any request of its kind can use."""
    message, control_bytes = received.message, received.control_bytes
    attached = sum(map(len, received.attachments))
    if not isinstance(message, _PLAIN):
        return control_bytes * (_NAMES_GROWTH if isinstance(message, _NAMES) else _LISTS_GROWTH) + attached
    return _plain_bytes(message, control_bytes) + attached


def _plain_bytes(message: ControlMessage, control_bytes: int) -> int:
    """The memory of a message without lists, beside its batches."""
    if control_bytes > limits.PLAIN_CONTROL_BYTES_MAX:
        raise Refused(
            Code.BAD_REQUEST,
            f"a {type(message).__name__.upper()} of {control_bytes} bytes beside its batches: at most "
            f"{limits.PLAIN_CONTROL_BYTES_MAX} are allowed, whatever a later version adds to it",
        )
    return min(control_bytes + _PLAIN_BYTES, _PLAIN_BYTES_MAX)


def hand_to(scheduler: Scheduler, key: Hashable, request: ServedT, processor: Processor[ServedT]) -> None:
    """Put the request into the mailbox of its actor. If the mailbox refuses it, the request ends."""
    try:
        scheduler.dispatch(key, request, processor)
    except Refused:
        request.end()
        raise
    if request.wait_until_ns:
        request.wait_at(partial(scheduler.sweep_soon, key))


def produced(receipt: AppendReceipt, store: Store) -> Produced:
    """The answer to a PRODUCE, for a receipt that is durable."""
    return Produced(
        receipt.first_sequence, receipt.count, receipt.appended_ms, receipt.is_duplicate, store.messages.log.epoch
    )


DelayRequest: TypeAlias = ServedRequest[ControlMessage]

QUESTIONS = (
    Cancel,
    Reschedule,
    PendingListed,
    DelayTally,
    History,
    Resend,
)  # a union written where it is needed costs 1 µs
NO_DELAY_PORT = Refused(
    Code.BAD_REQUEST,
    "this broker keeps no delayed messages: run `fairway up`, or give the client the address of a delay server, "
    "fairway://HOST:PORT?delay=HOST:PORT",
)


class DelayPort(Protocol):
    """Takes batches with due times, and requests about pending messages: a processor for the server's scheduler."""

    def process(self, request: DelayRequest, actor: Actor) -> TurnResult: ...

    def expire(self, request: DelayRequest, expiry: Expiry) -> None: ...

    def fail(self, request: DelayRequest, error: Exception) -> None: ...

    def show(self, out: MetricsText) -> None:
        """Write the figures of the delay server."""

    def memory_accounts(self) -> list[MemoryAccount]:
        """The memory accounts of the delay server."""

    @property
    def damaged(self) -> int:
        """Records of delayed messages that the disk has lost."""


def concerns_delay(received: RequestReceived) -> bool:
    """Whether a request is for the delay port."""
    message = received.message
    if isinstance(message, Produce):
        return batch.is_delayed(received.attachments[0])
    return isinstance(message, QUESTIONS)


def key_of(message: ControlMessage) -> Hashable:
    """The key of the actor: subjects do not crowd out one another, and requests about pending messages delay no
    batches."""
    return ("delay", Subject.parse(message.subject)) if isinstance(message, Produce) else ("delay",)
