"""What a session puts into an actor's mailbox: a request with the way back to whoever asked.

Whatever becomes of it, it is answered once: by its processor, by `refuse`, or not at all because the asker is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from fairway import limits
from fairway.errors import BadName, Code, FairwayError, Misuse, Refused, RemoteProtocolError, StorageFault
from fairway.protocol import Bytes, ControlMessage, RequestReceived
from fairway.protocol.admin import Describe, RemoveGroup, RemoveSubject, Scan, Seek, Switch, Weigh
from fairway.protocol.messages import Heartbeat, Leave, Produce, Pull
from fairway.protocol.routing import Register, Route
from fairway.protocol.tracing import Index, Retrace
from fairway.scheduling import Account, Expiry, Processor, Scheduler
from fairway.serving.budget import Allowance
from fairway.world.buffers import LazyBuffer

MessageT = TypeVar("MessageT", bound=ControlMessage)

# What a decoded control message holds at its worst: lists of ranges 40 times its bytes, lists of names 10 times. One
# without lists holds its own names; fields of later versions are not kept.
_LISTS_GROWTH = 40
_NAMES_GROWTH = 10
_PLAIN_BYTES = 1_024
_PLAIN_BYTES_MAX = 4_096
_BESIDE_BYTES_MAX = limits.PLAIN_CONTROL_BYTES_MAX + limits.KIB  # that a view keeps in memory and nobody accounts for
_PLAIN = (
    Pull, Scan, Heartbeat, Leave, Produce, Retrace, Index, Seek, Switch, Weigh, Describe, RemoveSubject, RemoveGroup,
)  # fmt: skip
_NAMES = (Route, Register)
_LARGE = (Pull, Scan, Retrace, Index)  # their answers; a union written where it is asked costs 1 µs
_UNREAD = Refused(Code.BUSY, "answers wait on this connection: read them before asking for more", retry_after_ms=1_000)
_LATE = Refused(Code.EXPIRED, "the request could not be answered in time: the broker is busy", retry_after_ms=50)


class Requester(Protocol):
    """The session that a request came from."""

    address: str
    here: str  # where it has found us; empty: not known
    account: Account  # what it has used
    waiting: dict[ServedRequest[Any], None]  # its requests that wait for something to come

    @property
    def is_gone(self) -> bool: ...

    @property
    def is_swamped(self) -> bool:
        """Whether so much waits for it to be read that more would be of no use."""

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame that it takes."""

    def respond(self, correlation: int, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> None: ...

    def refuse(self, correlation: int, refused: Refused) -> None: ...


class ServedRequest(Generic[MessageT]):
    """One request of one connection, as the scheduler sees it."""

    __slots__ = (
        "_cancel_timer", "_let_go", "_withdraw", "attachments", "correlation", "deadline_ns", "message", "received_ns",
        "session", "wait_until_ns",
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
        self.correlation = correlation
        self.message = message
        self.attachments = attachments
        self.deadline_ns = deadline_ns
        self.wait_until_ns = wait_until_ns
        self.received_ns = received_ns
        self._let_go = let_go  # called once, when the request has come to its end
        self._withdraw: Callable[[], object] | None = None  # from where it waits
        self._cancel_timer: Callable[[], object] | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether nobody reads the answer: its asker is gone, or does not read the large ones that it has asked for."""
        session = self.session
        return session.is_gone or (session.is_swamped and isinstance(self.message, _LARGE))

    @property
    def account(self) -> Account:
        return self.session.account

    def end(self) -> None:
        """It is answered, or never will be: what was held for it is free."""
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
        """The request waits somewhere. `withdraw` takes it out of there, if its asker goes before it has ended."""
        self._withdraw = withdraw
        self.session.waiting[self] = None

    def wait_until(self, cancel_timer: Callable[[], object]) -> None:
        """A timer ends the wait. The timer holds the request, so the end of the request cancels it."""
        self._cancel_timer = cancel_timer

    def asker_is_gone(self) -> None:
        """Nobody waits for the answer: nothing may keep the request in memory."""
        withdraw, self._withdraw = self._withdraw, None
        if withdraw is not None:
            withdraw()

    def respond(self, message: ControlMessage, attachments: Sequence[Bytes] = ()) -> None:
        self.end()
        self.session.respond(self.correlation, message, attachments)

    def refuse(self, refused: Refused) -> None:
        self.end()
        self.session.refuse(self.correlation, refused)

    def settle(self, outcome: FairwayError | None, answer: ControlMessage | Refused) -> None:
        """Answer when the log has spoken: so if all is durable, with the refusal if nothing was appended.

        A poisoned store answers nothing any more: whether the bytes are on disk is unknown, and silence says so.
        """
        told = answer if outcome is None else outcome
        if isinstance(told, ControlMessage):
            self.respond(told)
        elif isinstance(told, Refused):
            self.refuse(told)
        else:
            self.end()

    def expire(self, expiry: Expiry) -> None:
        """It ends unserved."""
        if expiry is Expiry.LATE:
            self.refuse(_LATE)
        elif expiry is Expiry.STOPPED:
            self.refuse(Refused(Code.DRAINING, "this broker is about to stop: connect again"))
        elif expiry is Expiry.GONE and not self.session.is_gone:
            self.refuse(_UNREAD)
        else:
            self.end()

    def fail(self, error: Exception) -> None:
        """Its processor raised."""
        if isinstance(error, Refused):
            self.refuse(error)
        elif isinstance(error, BadName):
            self.refuse(Refused(Code.BAD_NAME, str(error)))
        elif isinstance(error, Misuse | RemoteProtocolError):
            self.refuse(Refused(Code.BAD_REQUEST, str(error)))
        elif isinstance(error, StorageFault):
            self.end()
        else:
            self.refuse(Refused(Code.OTHER, f"the broker failed on this request: {error!r}"))


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
    """The request as actors see it; what it holds is taken from the allowance until it is answered. `beside_bytes`:
    what the server holds for it besides, such as a task."""
    size = held_bytes(received) + beside_bytes
    is_patient = wait_until_ns > 0
    is_urgent = not is_patient and size <= limits.URGENT_BYTES_MAX
    waiting.take(session, size, is_urgent=is_urgent, is_patient=is_patient)
    return ServedRequest(
        session,
        received.correlation,
        message,
        # A view would keep all that came with it in memory.
        tuple(map(bytes if size < limits.FRAME_BUFFER_FROM_BYTES else _own, received.attachments)),
        deadline_ns=deadline_ns,
        wait_until_ns=wait_until_ns,
        received_ns=received_ns,
        let_go=partial(waiting.give_back, session, size),
    )


def _own(attachment: Bytes) -> Bytes:
    """The attachment without what came beside it. One that has the buffer of its frame nearly to itself is not copied:
    63 MiB would hold up the loop for 25 ms."""
    if isinstance(attachment, memoryview) and isinstance(attachment.obj, LazyBuffer):
        beside_bytes = len(attachment.obj) - len(attachment)
        if beside_bytes <= _BESIDE_BYTES_MAX:
            return attachment
    return bytes(attachment)


def held_bytes(received: RequestReceived) -> int:
    """What a request holds in memory until it is answered. `Refused`: more than any of its kind has a use for."""
    message, control_bytes = received.message, received.control_bytes
    attached = sum(map(len, received.attachments))
    if not isinstance(message, _PLAIN):
        return control_bytes * (_NAMES_GROWTH if isinstance(message, _NAMES) else _LISTS_GROWTH) + attached
    if control_bytes > limits.PLAIN_CONTROL_BYTES_MAX:
        raise Refused(
            Code.BAD_REQUEST,
            f"a {type(message).__name__.upper()} of {control_bytes} bytes beside its batches: at most "
            f"{limits.PLAIN_CONTROL_BYTES_MAX} are allowed, whatever a later version adds to it",
        )
    return min(control_bytes + _PLAIN_BYTES, _PLAIN_BYTES_MAX) + attached


def hand_to(
    scheduler: Scheduler,
    key: Hashable,
    request: ServedRequest[MessageT],
    processor: Processor[ServedRequest[MessageT]],
) -> None:
    """Put it into the mailbox of its actor; where that says no, it has come to its end."""
    try:
        scheduler.dispatch(key, request, processor)
    except Refused:
        request.end()
        raise
    if request.wait_until_ns:
        request.wait_at(partial(scheduler.sweep_soon, key))
