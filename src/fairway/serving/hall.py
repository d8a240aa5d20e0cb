"""Where the connections are: who is let in, what all of them hold together, how they leave."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairway import limits
from fairway.errors import Code, Misuse, Refused
from fairway.protocol import Bytes, ConnectionOptions, ControlMessage, RequestReceived
from fairway.scheduling import Account, Scheduler
from fairway.serving.budget import Allowance, Budget
from fairway.serving.frame_admission import FrameAdmission
from fairway.serving.meters import ServerCounters
from fairway.serving.requests import Requester, ServedRequest
from fairway.serving.session import ServerSession
from fairway.serving.turnstile import ReadThrottle
from fairway.world.buffers import LazyBuffer
from fairway.world.clock import Clock

_DOORWAY = 128  # connections beyond the bound that are told so; those beyond them are cut off without a word
_RETRY_AFTER_MS = 1_000
_DISCARDED_PER_TURN = 2  # pieces of up to 256 KB: to free half of a large frame at once took 10 ms (bench/hostile)
_DISCARDED_SHARE = 32  # or this part of all, where that is more: it must not pile up
_BUFFERS_PER_STEP = 4  # a step of `free_some` in each turn, and one more for every four buffers that nobody uses
_WITHDRAWN_PER_TURN = 16  # requests whose asker is gone: 0.1 ms; a thousand at once took 6 ms (bench/hostile)
_WITHDRAWN_SHARE = 1_024  # or this part of all, where that is more: it must not pile up


@dataclass(frozen=True, slots=True)
class SessionManagerOptions:
    """What an operator may set."""

    connections_max: int = limits.CONNECTIONS_MAX
    partial_bytes_max: int = 128 * limits.MIB  # of frames that have not come whole, on all connections
    unsent_bytes_max: int = 128 * limits.MIB  # of answers to clients that read slower than they ask
    connection: ConnectionOptions = field(default_factory=ConnectionOptions)

    def __post_init__(self) -> None:
        if min(self.partial_bytes_max, self.unsent_bytes_max) < self.connection.frame_bytes_max:
            raise Misuse(
                f"room for one frame of {self.connection.frame_bytes_max} bytes is the least that connections need"
            )


class SessionManager:
    """All sessions of one broker; `handle` takes their requests."""

    def __init__(
        self,
        clock: Clock,
        options: SessionManagerOptions,
        meters: ServerCounters,
        scheduler: Scheduler,
        waiting: Allowance[Requester],
        handle: Callable[[ServerSession, RequestReceived], None],
    ) -> None:
        self.clock = clock
        self.handle = handle
        loop = asyncio.get_running_loop()
        self.incoming: FrameAdmission[ServerSession] = FrameAdmission(
            options.partial_bytes_max,
            clock,
            loop.call_later,
            weigh=lambda session: session.partial_bytes,
            listens=lambda session: session.is_listening,
            go_on=ServerSession.frame_granted,
            dismiss=ServerSession.dismiss,
        )
        self.outgoing: Budget[ServerSession] = Budget(
            options.unsent_bytes_max, lambda session: session.unsent_bytes, ServerSession.abort
        )
        self.turnstile: ReadThrottle[ServerSession] = ReadThrottle(
            clock, loop.call_soon, ServerSession.go_on, lambda session: session.account.end_ns
        )
        self._scheduler = scheduler
        self._waiting = waiting
        self._refusals_end_ns = 0
        self._options = options
        self._meters = meters
        self._call_later = loop.call_later
        self._call_soon = loop.call_soon
        self._call_from_any_thread = loop.call_soon_threadsafe
        self._unflushed: list[ServerSession] = []
        self._debris: list[Bytes] = []
        self._unused: list[LazyBuffer] = []
        self._is_sweeping = False
        self._orphans: deque[ServedRequest[Any]] = deque()
        self._sessions: dict[ServerSession, None] = {}
        self._deserted = asyncio.Event()
        self._deserted.set()
        self._is_closing = False
        self.on_closed: Callable[[ServerSession], None] | None = None  # told of each session that has ended

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def connections_max(self) -> int:
        return self._options.connections_max

    # --- the sessions' host ------------------------------------------------------------------------------------------

    def new_session(self) -> ServerSession:
        return ServerSession(self, self._options.connection, self._call_later)

    def session_opened(self, session: ServerSession) -> Refused | None:
        self._sessions[session] = None
        self._deserted.clear()
        self._meters.connections += 1
        if len(self._sessions) > self._options.connections_max + _DOORWAY:
            self._meters.refused(Code.TOO_MANY_CONNECTIONS)
            session.abort()
        if self._is_closing:
            return Refused(Code.DRAINING, "this broker is about to stop")
        if len(self._sessions) > self._options.connections_max:
            sentence = f"this broker has {self._options.connections_max} connections and takes no more"
            return Refused(Code.TOO_MANY_CONNECTIONS, sentence, retry_after_ms=_RETRY_AFTER_MS)
        return None

    def session_closed(self, session: ServerSession) -> None:
        self._sessions.pop(session, None)
        self.incoming.forget(session)
        self.outgoing.forget(session)
        self._waiting.forget(session)
        self._orphan(session)
        if self.on_closed is not None:
            self.on_closed(session)
        if not self._sessions:
            self._deserted.set()

    @property
    def ready_weight(self) -> float:
        return self._scheduler.ready_weight

    def _orphan(self, session: ServerSession) -> None:
        """Requests that wait somewhere, and whose asker is gone, are withdrawn a few in each turn of the loop. The
        scheduler knows that they are cancelled; only memory is at stake."""
        if session.waiting and not self._orphans:
            self._call_soon(self._withdraw_some)
        self._orphans.extend(session.waiting)
        session.waiting.clear()

    def _withdraw_some(self) -> None:
        count = max(_WITHDRAWN_PER_TURN, len(self._orphans) // _WITHDRAWN_SHARE)
        for _ in range(min(count, len(self._orphans))):
            self._orphans.popleft().asker_is_gone()
        if self._orphans:
            self._call_soon(self._withdraw_some)

    def charge(self, account: Account, elapsed_ns: int, ready_weight: float) -> bool:
        """A connection was read for so long; whether it has used more than its share by that. `ready_weight`: when that
        began."""
        self._scheduler.charge(account, elapsed_ns, ready_weight)
        return self._scheduler.is_ahead(account)

    def rest_ms(self, elapsed_ns: int) -> int:
        """All that is refused outright shares one account: how long a connection rests that spent so long on it."""
        now_ns = self.clock.monotonic_ns()
        self._refusals_end_ns = max(self._refusals_end_ns, now_ns) + elapsed_ns * limits.REFUSALS_SHARE
        return (self._refusals_end_ns - now_ns) // 1_000_000

    def answered(self, message: ControlMessage, attachments: Sequence[Bytes]) -> None:
        self._meters.answered(message, attachments)

    def refused(self, code: Code) -> None:
        self._meters.refused(code)

    def discard(self, debris: list[Bytes]) -> None:
        """Of frames that will never be whole. Freed a few pieces in each turn of the loop, so that nobody waits."""
        self._debris += debris
        self._sweep_soon()

    def discard_buffer(self, buffer: LazyBuffer) -> None:
        """Of a large frame, once nobody uses it. The thread of a disk may be the last that does."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the buffer is freed at once
            self._call_from_any_thread(self._free_soon, buffer)

    def _free_soon(self, buffer: LazyBuffer) -> None:
        self._unused.append(buffer)
        self._sweep_soon()

    def _sweep_soon(self) -> None:
        if not self._is_sweeping and (self._debris or self._unused):
            self._is_sweeping = True
            self._call_soon(self._sweep)

    def _sweep(self) -> None:
        pieces = max(_DISCARDED_PER_TURN, len(self._debris) // _DISCARDED_SHARE)
        del self._debris[-pieces:]
        for _ in range(1 + len(self._unused) // _BUFFERS_PER_STEP):
            if self._unused and not self._unused[-1].free_some():
                self._unused.pop()
        self._is_sweeping = False
        self._sweep_soon()

    def flush_soon(self, session: ServerSession) -> None:
        if not self._unflushed:
            self._scheduler.call_first(self._flush)
        self._unflushed.append(session)

    def _flush(self) -> None:
        unflushed, self._unflushed = self._unflushed, []
        for session in unflushed:
            session.flush()

    # --- the end -----------------------------------------------------------------------------------------------------

    def close(self, reason: str) -> None:
        """Say goodbye to all: what is in flight is answered, nothing new is taken."""
        self._is_closing = True
        for session in list(self._sessions):
            session.drain(reason)

    def cut_off(self) -> None:
        """Not a word more to anybody."""
        self._is_closing = True
        for session in list(self._sessions):
            session.abort()

    async def deserted(self, within_ms: int) -> None:
        """Wait a while for clients to take their last answers, then hang up."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_ms / 1_000):
                await self._deserted.wait()
        self.cut_off()
