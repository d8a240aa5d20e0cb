"""Single requests on a loop: a line to one of several servers, and one outcome to wait for per request."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from fairway.errors import InvariantViolated, RemoteProtocolError, Unreachable
from fairway.protocol import ConnectionOptions
from fairway.protocol.line import Answer, Ask, ConnectionLost, Line, ReconnectOptions, RequestOutcome
from fairway.protocol.messages import ControlMessage
from fairway.runtime.blocking_connection import Address
from fairway.runtime.clock import Clock
from fairway.runtime.loop_link import LoopLink
from fairway.runtime.net import Net
from fairway.runtime.rng import Rng

AnswerT = TypeVar("AnswerT", bound=ControlMessage)

_GOODBYE_S = 1.0


class Inquiries:
    """Session on a line: sends the waiting requests once the line is open. Each request is sent once. If its answer is
    lost, the caller decides."""

    def __init__(self, opened: Callable[[], None] | None = None) -> None:
        self._waiting: deque[tuple[ControlMessage, asyncio.Future[RequestOutcome]]] = deque()
        self._on_opened = opened

    def put(self, message: ControlMessage, outcome: asyncio.Future[RequestOutcome]) -> None:
        self._waiting.append((message, outcome))

    def put_first(self, message: ControlMessage, outcome: asyncio.Future[RequestOutcome]) -> None:
        self._waiting.appendleft((message, outcome))

    def opened(self, now_ns: int) -> None:
        if self._on_opened is not None:
            self._on_opened()

    def asks(self, room: int, now_ns: int) -> Iterator[Ask]:
        while room and self._waiting:
            message, outcome = self._waiting.popleft()
            if not outcome.done():
                room -= 1
                yield Ask(message, (), outcome)

    def answered(self, token: object, outcome: RequestOutcome, now_ns: int) -> None:
        if not isinstance(token, asyncio.Future):
            raise InvariantViolated(f"an answer to {token!r}, which is no question")
        if not token.done():
            token.set_result(outcome)

    def next_deadline(self) -> int | None:
        return None


class Inquirer:
    """A line with an `Inquiries` session, and its link. Create it on the loop that it lives on."""

    def __init__(
        self,
        net: Net,
        clock: Clock,
        rng: Rng,
        addresses: Sequence[Address],
        *,
        name: str = "fairway",
        features: tuple[str, ...] = (),
        opened: Callable[[], None] | None = None,
        on_trouble: Callable[[str, int], None] | None = None,
    ) -> None:
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        options = ReconnectOptions(hello=ConnectionOptions(name=name, features=features), backoff_most_ms=1_000)
        self.line = Line(rng, options, now_ns=clock.monotonic_ns(), on_trouble=on_trouble)
        self._session = Inquiries(opened)
        self.line.add(self._session, clock.monotonic_ns())
        self._link = LoopLink(self.line, addresses, net, clock)

    async def connected(self, patience_s: float, first_s: float) -> bool:
        """Wait until the line is open, for at most `patience_s`. With 0, wait until the first attempt has failed."""
        line = self.line
        if patience_s:
            return await self._link.wait(lambda: line.is_open, patience_s)
        await self._link.wait(lambda: line.is_open or line.trouble is not None, first_s)
        return line.is_open

    async def outcome(self, message: ControlMessage, timeout_s: float) -> RequestOutcome:
        """How the request ended. `ConnectionLost` also if nobody answered in time."""
        outcome: asyncio.Future[RequestOutcome] = self._loop.create_future()
        self._session.put(message, outcome)
        self._link.stir()
        try:
            async with asyncio.timeout(timeout_s):
                return await outcome
        except TimeoutError:
            return ConnectionLost(self.line.trouble or f"no answer within {timeout_s:g} s")

    def ask_first(self, message: ControlMessage) -> None:
        """Send this request before all that wait, and ignore the answer. For `opened`."""
        self._session.put_first(message, self._loop.create_future())

    async def ask(self, message: ControlMessage, kind: type[AnswerT], timeout_s: float) -> AnswerT:
        """The answer. Raises `Refused`, or `Unreachable` if no answer came."""
        outcome = await self.outcome(message, timeout_s)
        if isinstance(outcome, Answer):
            if not isinstance(outcome.message, kind):
                raise RemoteProtocolError(f"{type(message).__name__} was answered with {outcome.message!r}")
            return outcome.message
        if isinstance(outcome, ConnectionLost):
            raise Unreachable(outcome.sentence)
        raise outcome

    async def close(self) -> None:
        await self._link.close(_GOODBYE_S)

    def abort(self) -> None:
        self._link.abort()
